"""The states of one bucket's gradients, kept by the services: each has those of the elements that its ranks own.

    gradients ─ sum, for owners ─► step, in the owner's service ─ broadcast, from owners ─► parameters

Owns the states and the parameters' slot. Must not know hooks or other buckets. The training thread calls.
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
from byteps_py.session import HostedPart, Session, Slot
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.torch.engine.slot_view import TORCH, pieces
from byteps_py.torch.gradients.hosted_rules import MASTER, counts_steps, moment_names

#: States of one parameter, as in a state_dict.
ParameterState = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Overlap:
    """Elements of a parameter that this rank owns. ``position``: of the parameter; ``inside``: elements of it;
    ``place``: elements of the states."""

    position: int
    inside: slice
    place: slice


class HostedStates:
    """``source``: the slot of the gradients. ``params``: the bucket's, in order. ``initial_sum``: Adagrad's first
    state. Made by all ranks."""

    def __init__(
        self,
        session: Session,
        source: Slot,
        kind: StepKind,
        params: Sequence[torch.nn.Parameter],
        initial_sum: float = 0.0,
    ) -> None:
        self.session, self.kind = session, kind
        self._params = params
        self.steps = [0] * len(params)  # that each parameter has made
        self._part = self._host(source)
        self._release = weakref.finalize(self, session.release_part, self._part)
        own = [(first, count) for first, count, rank in self._part.owners if rank == session.rank]
        self.count = sum(count for _, count in own)  # of the elements that this rank owns
        self._overlaps = list(_overlaps([param.numel() for param in params], own))
        wide = torch.float64 if kind.gradient is DType.FLOAT64 else torch.float32
        self._states = [pieces(state, wide, [(self.count,)])[0] for state in self._part.states]
        for state in self._states:
            state.zero_()
        if kind.rule.method is Method.ADAGRAD and self._states:
            self._states[1].fill_(initial_sum)

    def _host(self, source: Slot, before: HostedPart | None = None) -> HostedPart:
        spec, dtype = source.spec, self.kind.parameter
        name = f"{spec.name}.parameters"
        wanted = TensorSpec(name, dtype, (spec.count,), Op.BROADCAST, priority=spec.priority, ownership=spec.name)
        (self._slot,) = self.session.declare([wanted])
        self._results = pieces(self._slot.result, TORCH[dtype], [tuple(param.shape) for param in self._params])
        return self.session.host(self.kind, source, self._slot, before)

    def follow(self, source: Slot) -> None:
        """Go on with the slot of the gradients, which may have been declared again. All ranks do so."""
        if source is not self._part.source:
            self._part = self._host(source, self._part)

    # ---- a step ------------------------------------------------------------------------------------------------

    def square_sum(self, participates: Sequence[bool]) -> float:
        """Of the averages that this rank owns, of the parameters that take part. Waits for them."""
        if not self.count:
            return 0.0
        taken = [overlap.place for overlap in self._overlaps if participates[overlap.position]]
        return self.session.square_sum(self._part, [range(place.start, place.stop) for place in taken])

    def begin_step(self, numbers: Hyperparameters, clip: float, participates: Sequence[bool]) -> None:
        """Begin the step of the parameters that take part, with the averages of the latest round."""
        for position, takes_part in enumerate(participates):
            self.steps[position] += takes_part
        if self.count:
            self._take_changed_parameters()
            segments: list[StepSegment] = []
            for overlap in self._overlaps:
                if participates[overlap.position]:
                    scalars = step_scalars(self.kind.rule, numbers, self.steps[overlap.position], clip=clip)
                    start, stop = overlap.place.start, overlap.place.stop
                    if segments and segments[-1].elements.stop == start and segments[-1].scalars == scalars:
                        start = segments.pop().elements.start
                    segments.append(StepSegment(range(start, stop), scalars))
            self.session.begin_step(self._part, segments)
        self.session.hand_over(self._slot)

    def take_parameters(self, participates: Sequence[bool]) -> None:
        """Wait for the parameters, and write them where they belong."""
        self.session.wait(self._part.source)
        self.session.wait(self._slot)
        taken = [position for position, takes_part in enumerate(participates) if takes_part]
        with torch.no_grad():
            targets: list[torch.Tensor] = [self._params[position] for position in taken]
            if targets:
                torch._foreach_copy_(targets, [self._results[position] for position in taken])

    def _take_changed_parameters(self) -> None:
        """A parameter that the training has changed, or loaded, is its master from now on."""
        master = self._states[0]
        for overlap in self._overlaps:
            own = self._params[overlap.position].detach().reshape(-1)[overlap.inside]
            kept = master[overlap.place]
            if not torch.equal(kept.to(own.dtype), own):
                kept.copy_(own)

    # ---- states that are saved and loaded ----------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Of the states in a state_dict, the master first."""
        return (MASTER, *moment_names(self.kind.rule))

    def piece(self, number: int) -> torch.Tensor:
        """The elements of a state that this rank owns, by its number in ``names``."""
        if not self._states:
            return torch.empty(0, dtype=torch.float32, device="cpu")
        if number == 0:
            self._take_changed_parameters()
        return self._states[number]

    def by_parameter(self, gathered: Mapping[str, torch.Tensor]) -> list[ParameterState]:
        """The states of each parameter, from all ranks' pieces, by rank. Empty before its first step."""
        wholes = {name: self._in_order(state) for name, state in gathered.items()}
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

    def _in_order(self, gathered: torch.Tensor) -> torch.Tensor:
        """A whole state, from the pieces of all ranks."""
        whole = torch.empty_like(gathered)
        start = 0
        for first, count, _ in sorted(self._part.owners, key=lambda owned: (owned[2], owned[0])):
            whole[first : first + count] = gathered[start : start + count]
            start += count
        return whole

    def load(self, position: int, state: Mapping[str, torch.Tensor]) -> None:
        """Take over the states of the parameter at ``position``, which ``check_state`` has found right."""
        if all(state.get(name) is None for name in moment_names(self.kind.rule)):
            self.steps[position] = 0
            return
        self.steps[position] = int(state["step"]) if counts_steps(self.kind.rule) else 1
        for overlap in self._overlaps:
            if overlap.position == position:
                for number, name in enumerate(self.names):
                    if (value := state.get(name)) is not None:
                        own = value.detach().reshape(-1)[overlap.inside]
                        self._states[number][overlap.place].copy_(own)

    def release(self) -> None:
        """The states are needed no more."""
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


def _overlaps(sizes: Sequence[int], own: Sequence[tuple[int, int]]) -> Iterator[_Overlap]:
    """``sizes``: of the parameters. ``own``: (first, count) of the elements that a rank owns, in order."""
    place = 0
    for first, count in own:
        start = 0
        for position, size in enumerate(sizes):
            low, high = max(start, first), min(start + size, first + count)
            if low < high:
                at = place + low - first
                yield _Overlap(position, slice(low - start, high - start), slice(at, at + high - low))
            start += size
        place += count
