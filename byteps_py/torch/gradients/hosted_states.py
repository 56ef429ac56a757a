"""The states of one bucket's gradients, kept by the services: this rank's service has those of this rank's piece.

    gradients ─ scattered sum ─► this rank's piece ─ step, in the service ─► its parameters ─ gather ─► all parameters

Owns the states and the gather's slot. Must not know hooks or other buckets. The training thread calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from byteps_py.errors import UsageError
from byteps_py.kernels.step_segments import StepSegment
from byteps_py.kernels.update_rules import Hyperparameters, Method, StepKind, UpdateRule, step_scalars
from byteps_py.session import Session, Slot
from byteps_py.tensors import DType, Layout, Op, TensorSpec
from byteps_py.torch.engine.slot_view import TORCH, Mover, pieces
from byteps_py.torch.gradients.hosted_rules import MASTER, counts_steps, moment_names

#: States of one parameter, as in a state_dict.
ParameterState = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Factors:
    """What averages are multiplied by, in this order: ``unscale`` of a GradScaler, ``clip``."""

    unscale: float = 1.0
    clip: float = 1.0


@dataclass(frozen=True, slots=True)
class Overlap:
    """Elements of a parameter that lie in this rank's piece. ``position``: of the parameter; ``inside``: elements of
    it; ``place``: elements of the piece."""

    position: int
    inside: slice
    place: slice


class HostedStates:
    """``spec``: of the scattered sum. ``params``: the bucket's, in order. ``initial_sum``: Adagrad's first state."""

    def __init__(
        self,
        session: Session,
        spec: TensorSpec,
        kind: StepKind,
        params: Sequence[torch.nn.Parameter],
        initial_sum: float = 0.0,
    ) -> None:
        self.session, self.kind = session, kind
        self._params = params
        self.steps = [0] * len(params)  # that each parameter has made
        members = spec.members(session.size)
        ranges = [spec.piece(position, len(members)) for position in range(len(members))]
        _, self._count = ranges[members.index(session.rank)]
        self.sizes = [param.numel() for param in params]
        self.overlaps_of_all = [list(_overlaps(self.sizes, *each)) for each in ranges]
        self.overlaps = self.overlaps_of_all[members.index(session.rank)]
        self._part = session.host(kind, self._count) if self._count else None
        wide = torch.float64 if kind.gradient is DType.FLOAT64 else torch.float32
        memory = self._part.states if self._part is not None else ()
        if self._part is not None:
            self._release = weakref.finalize(self, session.release_part, self._part)
        self._states = [pieces(state, wide, [(self._count,)])[0] for state in memory]
        for state in self._states:
            state.zero_()
        if kind.rule.method is Method.ADAGRAD and self._states:
            self._states[1].fill_(initial_sum)
        itemsize = kind.parameter.itemsize
        self._layout = Layout(
            ((0, self._count * itemsize),), tuple((start * itemsize, count * itemsize) for start, count in ranges)
        )
        shape = (self._count * itemsize, spec.count * itemsize)
        (self._slot,) = session.declare(
            [TensorSpec(f"{spec.name}.parameters", DType.UINT8, shape, Op.GATHER, group=spec.group)]
        )
        dtype = TORCH[kind.parameter]
        self._results = pieces(self._slot.result, dtype, [tuple(param.shape) for param in params])

    # ---- a step ------------------------------------------------------------------------------------------------

    def square_sum(self, source: Slot, participates: Sequence[bool]) -> float:
        """Of the averages in this rank's piece."""
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        if self._count:
            (sums,) = pieces(source.result, TORCH[self.kind.gradient], [(self._count,)])
            for overlap in self.overlaps:
                if participates[overlap.position]:
                    total += torch.linalg.vector_norm(sums[overlap.place], dtype=torch.float64) ** 2
        return float(total)

    def begin_step(
        self, source: Slot, numbers: Hyperparameters, factors: Factors, participates: Sequence[bool]
    ) -> None:
        """Begin the step of the parameters that take part, with the averages in ``source``."""
        for position, takes_part in enumerate(participates):
            self.steps[position] += takes_part
        if self._part is None:
            return
        self._take_changed_parameters()
        segments: list[StepSegment] = []
        for overlap in self.overlaps:
            if participates[overlap.position]:
                steps = self.steps[overlap.position]
                scalars = step_scalars(self.kind.rule, numbers, steps, factors.unscale, factors.clip)
                start, stop = overlap.place.start, overlap.place.stop
                if segments and segments[-1].elements.stop == start and segments[-1].scalars == scalars:
                    start = segments.pop().elements.start
                segments.append(StepSegment(range(start, stop), scalars))
        self.begin_segments(source, segments)

    def begin_segments(self, source: Slot, segments: Sequence[StepSegment]) -> None:
        """Begin these segments of a step."""
        if self._part is not None:
            self.session.begin_step(self._part, source, self._slot, segments)

    def wait_for_step(self) -> None:
        """Wait until the service has done what was begun."""
        if self._part is not None:
            self.session.wait_for_step(self._part)

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return self._params[0].device

    @property
    def master(self) -> torch.Tensor:
        """This rank's piece of the masters."""
        return self._states[0]

    def moment(self, number: int) -> torch.Tensor:
        """This rank's piece of a moment."""
        return self._states[1 + number]

    @property
    def update(self) -> torch.Tensor:
        """LAMB: this rank's piece of the updates, once they are computed."""
        return self._states[3]

    def send_parameters(self) -> None:
        """Wait for the step, and send this rank's parameters to all."""
        self.wait_for_step()
        self.session.hand_over(self._slot, layout=self._layout)

    def take_parameters(self, participates: Sequence[bool], mover: Mover) -> None:
        """Wait for the parameters of all ranks, and write them where they belong. ``mover``: of their device. On CUDA,
        the copies come before later work of the caller's stream. They also come before the gradients of the next step
        are handed over, since one stream makes both copies: so the memory is not written too early."""
        self.session.wait(self._slot)
        taken = [position for position, takes_part in enumerate(participates) if takes_part]
        with torch.no_grad():
            targets: list[torch.Tensor] = [self._params[position] for position in taken]
            if targets:
                mover.adopt(self._slot.result)
                mover.fetch([self._results[position] for position in taken], targets)

    def _take_changed_parameters(self) -> None:
        """A parameter that the training has changed, or loaded, is its master from now on."""
        master = self._states[0]
        for overlap in self.overlaps:
            own = self._params[overlap.position].detach().reshape(-1)[overlap.inside].cpu()  # waits for its stream
            kept = master[overlap.place]
            if not torch.equal(kept.to(own.dtype), own):
                kept.copy_(own)

    # ---- states that are saved and loaded ----------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Of the states in a state_dict, the master first."""
        return (MASTER, *moment_names(self.kind.rule))

    def piece(self, number: int) -> torch.Tensor:
        """This rank's piece of a state, by its number in ``names``."""
        if not self._states:
            return torch.empty(0, dtype=torch.float32, device="cpu")
        if number == 0:
            self._take_changed_parameters()
        return self._states[number]

    def by_parameter(self, wholes: Mapping[str, torch.Tensor]) -> list[ParameterState]:
        """The states of each parameter, from all ranks' pieces of the whole bucket. Empty before its first step."""
        found: list[ParameterState] = []
        start = 0
        for param, steps in zip(self._params, self.steps, strict=True):
            end = start + param.numel()
            state: ParameterState = {}
            if steps or self.kind.rule.method is Method.ADAGRAD:  # which has states from the beginning
                if counts_steps(self.kind.rule):
                    state["step"] = torch.tensor(float(steps), device="cpu")
                for name, whole in wholes.items():
                    if name != MASTER or whole.dtype is not param.dtype:
                        state[name] = whole[start:end].view(param.shape).clone()
            found.append(state)
            start = end
        return found

    def load(self, position: int, state: Mapping[str, torch.Tensor]) -> None:
        """Take over the states of the parameter at ``position``, which ``check_state`` has found right."""
        if all(state.get(name) is None for name in moment_names(self.kind.rule)):
            self.steps[position] = 0
            return
        self.steps[position] = int(state["step"]) if counts_steps(self.kind.rule) else 1
        for overlap in self.overlaps:
            if overlap.position == position:
                for number, name in enumerate(self.names):
                    if (value := state.get(name)) is not None:
                        own = value.detach().reshape(-1)[overlap.inside]
                        self._states[number][overlap.place].copy_(own)

    def release(self) -> None:
        """The states are needed no more."""
        if self._part is not None:
            self._release()


def check_state(rule: UpdateRule, param: torch.nn.Parameter, state: Mapping[str, Any], what: str) -> None:
    """Raises UsageError if a parameter's ``state``, of a state_dict, lacks what ``rule`` needs."""
    names = moment_names(rule)
    if all(state.get(name) is None for name in names) and "step" not in state:
        return  # before its first step
    for name in (*names, *(["step"] if counts_steps(rule) else [])):
        value = state.get(name)
        shape = torch.Size() if name == "step" else param.shape
        found = value.shape if isinstance(value, torch.Tensor) else torch.Size()  # a number
        if value is None or found != shape:
            has = "none" if value is None else f"one of shape {list(found)}"
            raise UsageError(
                f"the state of {what}, of shape {list(param.shape)}, needs {name!r} of shape {list(shape)} and has "
                f"{has}: it is of another optimizer or model"
            )


def _overlaps(sizes: Sequence[int], first: int, count: int) -> Iterator[Overlap]:
    start = 0
    for position, size in enumerate(sizes):
        low, high = max(start, first), min(start + size, first + count)
        if low < high:
            yield Overlap(position, slice(low - start, high - start), slice(low - first, high - first))
        start += size
