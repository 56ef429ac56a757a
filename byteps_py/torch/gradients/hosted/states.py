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
from byteps_py.session import HostedPart, Session, ShadowedStep, Slot
from byteps_py.shadow import RestorablePart, ShadowReader
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.torch.collectives.slot_view import TORCH, Mover, pieces
from byteps_py.torch.gradients.hosted.rules import MASTER, counts_steps, moment_names

#: States of one parameter, as in a state_dict.
ParameterState = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors of the averages, applied in this order: ``unscale`` of a GradScaler, ``clip``."""

    unscale: float = 1.0
    clip: float = 1.0


@dataclass(frozen=True, slots=True)
class Overlap:
    """Elements of a parameter that a rank owns. ``position``: of the parameter; ``inside``: elements of it; ``place``:
    elements of the rank's states."""

    position: int
    inside: slice
    place: slice


#: (first element, number of elements, rank) of each part of a tensor, in order.
Owned = Sequence[tuple[int, int, int]]


class StoredElements:
    """One state of one parameter that other machines hold, read when it is asked for.

    ``parts``: of the tensor of gradients, in order. ``state``: the state's number; ``first``: the parameter's first
    element in the tensor. ``elements[a:b]`` is a tensor of these elements. A deep copy is a tensor of all.
    """

    def __init__(
        self, reader: ShadowReader, parts: Sequence[RestorablePart], state: int, first: int, shape: tuple[int, ...]
    ) -> None:
        self._reader, self._parts, self._state, self._first = reader, parts, state, first
        self.shape = torch.Size(shape)
        self.dtype = torch.float64 if parts and parts[0].kind.state_itemsize == 8 else torch.float32

    def __getitem__(self, elements: slice) -> torch.Tensor:
        wanted = range(self._first + elements.start, self._first + elements.stop)
        found = torch.empty(len(wanted), dtype=self.dtype, device="cpu")
        view = found.numpy().data.cast("B") if len(wanted) else memoryview(b"")
        for part in self._parts:
            here = range(max(wanted.start, part.elements.start), min(wanted.stop, part.elements.stop))
            if here:
                size = found.element_size()
                place = slice((here.start - wanted.start) * size, (here.stop - wanted.start) * size)
                self._reader.read_into(part, self._state, here, view[place])
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self[0 : self.shape.numel()].view(self.shape)


def elements_of(state: torch.Tensor | StoredElements, elements: slice) -> torch.Tensor:
    """Elements of a parameter's state, which may be stored elsewhere."""
    return state[elements] if isinstance(state, StoredElements) else state.detach().reshape(-1)[elements]


class OwnedStates:
    """Of the elements that this rank owns. ``params``: the bucket's, in order. ``initial_sum``: Adagrad's first
    state."""

    def __init__(
        self,
        session: Session,
        kind: StepKind,
        params: Sequence[torch.nn.Parameter],
        owners: Owned,
        states: Sequence[torch.Tensor],
        initial_sum: float,
    ) -> None:
        self.session, self.kind = session, kind
        self._params, self._owners, self._states = params, owners, states
        self.steps = [0] * len(params)  # that each parameter has made
        self.sizes = [param.numel() for param in params]
        self.overlaps_of_all = [
            list(_overlaps(self.sizes, [(first, count) for first, count, owner in owners if owner == rank]))
            for rank in range(session.size)
        ]
        self.overlaps = self.overlaps_of_all[session.rank]
        self.count = owned_by(session.rank, owners)  # of elements
        for state in states:
            state.zero_()
        if kind.rule.method is Method.ADAGRAD and states:
            states[1].fill_(initial_sum)

    @property
    def master(self) -> torch.Tensor:
        """The masters that this rank owns."""
        return self._state(0)

    def moment(self, number: int) -> torch.Tensor:
        """A moment of the elements that this rank owns."""
        return self._state(1 + number)

    @property
    def update(self) -> torch.Tensor:
        """LAMB: the updates of the elements that this rank owns, once they are computed."""
        return self._state(3)

    def _state(self, number: int) -> torch.Tensor:
        return self._states[number] if self._states else torch.empty(0, dtype=_wide(self.kind), device="cpu")

    def _take_changed_parameters(self) -> None:
        """A parameter that the training has changed, or loaded, is its master from now on."""
        for overlap in self.overlaps:
            own = self._params[overlap.position].detach().reshape(-1)[overlap.inside].cpu()  # waits for its stream
            kept = self.master[overlap.place]
            if not torch.equal(kept.to(own.dtype), own):
                kept.copy_(own)

    # ---- states that are saved and loaded ----------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Of the states in a state_dict, the master first."""
        return (MASTER, *moment_names(self.kind.rule))

    def piece(self, number: int) -> torch.Tensor:
        """The elements of a state that this rank owns, by its number in ``names``."""
        if number == 0:
            self._take_changed_parameters()
        return self._state(number)

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
        for first, count, _ in sorted(self._owners, key=lambda owned: (owned[2], owned[0])):
            whole[first : first + count] = gathered[start : start + count]
            start += count
        return whole

    def load(self, position: int, state: Mapping[str, Any]) -> None:
        """Take over the states of the parameter at ``position``, which ``check_state`` has found right."""
        if all(state.get(name) is None for name in moment_names(self.kind.rule)):
            self.steps[position] = 0
            return
        self.steps[position] = int(state["step"]) if counts_steps(self.kind.rule) else 1
        for overlap in self.overlaps:
            if overlap.position == position:
                for number, name in enumerate(self.names):
                    if (value := state.get(name)) is not None:
                        own = elements_of(value, overlap.inside)
                        self._states[number][overlap.place].copy_(own)

    def release(self) -> None:
        """The states are needed no more."""


class HostedStates(OwnedStates):
    """In the service, which makes the steps. ``source``: the slot of the gradients. ``run``: of the copies on other
    machines, 0 for none. Made by all ranks.

    ``shadowed``: the step that is about to begin, for the copies; ``last_step``: the number of the latest one.
    """

    shadowed: ShadowedStep | None = None
    last_step = 0

    def __init__(
        self,
        session: Session,
        source: Slot,
        kind: StepKind,
        params: Sequence[torch.nn.Parameter],
        initial_sum: float = 0.0,
        run: int = 0,
    ) -> None:
        self.run = run
        self._part = self._host(session, source, kind, run)
        self._release = weakref.finalize(self, session.state_host.release_part, self._part)
        count = owned_by(session.rank, self._part.owners)
        states = [pieces(state, _wide(kind), [(count,)])[0] for state in self._part.states]
        super().__init__(session, kind, params, self._part.owners, states, initial_sum)
        self._view_results()

    @staticmethod
    def _host(session: Session, source: Slot, kind: StepKind, run: int, before: HostedPart | None = None) -> HostedPart:
        spec = source.spec
        name = f"{spec.name}.parameters"
        wanted = TensorSpec(
            name, kind.parameter, (spec.count,), Op.BROADCAST, priority=spec.priority, ownership=spec.name
        )
        (target,) = session.declare([wanted])
        return session.state_host.host(kind, source, target, before, run)

    def _view_results(self) -> None:
        shapes = [tuple(param.shape) for param in self._params]
        self._results = pieces(self._part.target.result, TORCH[self.kind.parameter], shapes)

    def follows(self, source: Slot) -> bool:
        """True if ``source`` is the slot of the gradients already."""
        return source is self._part.source

    def follow(self, source: Slot) -> None:
        """Go on with the slot of the gradients, which may have been declared again. All ranks do so."""
        if not self.follows(source):
            self._part = self._host(self.session, source, self.kind, self.run, self._part)
            self._view_results()

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return self._params[0].device

    def square_sum(self, participates: Sequence[bool]) -> float:
        """Of the averages that this rank owns, of the parameters that take part. Waits for them."""
        if not self.count:
            return 0.0
        taken = [overlap.place for overlap in self.overlaps if participates[overlap.position]]
        return self.session.state_host.square_sum(self._part, [range(place.start, place.stop) for place in taken])

    def begin_step(self, numbers: Hyperparameters, factors: Factors, participates: Sequence[bool]) -> None:
        """Begin the step of the parameters that take part, with the averages of the latest round. Of LAMB, its first
        phase."""
        for position, takes_part in enumerate(participates):
            self.steps[position] += takes_part
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
        self.begin_segments(segments, is_last=self.kind.rule.method is not Method.LAMB)

    def begin_segments(self, segments: Sequence[StepSegment], is_last: bool) -> None:
        """Begin these segments of a step; ``is_last``: no others follow, and the parameters are sent."""
        if self.count:
            self.session.state_host.begin_step(self._part, segments, is_last, self.shadowed)
        if is_last:
            self.last_step = self.shadowed.step if self.shadowed is not None else 0
            self.session.hand_over(self._part.target)

    def wait_for_update(self) -> None:
        """Wait until the service has done what was begun, and is not the last of a step."""
        if self.count:
            self.session.state_host.wait_for_step(self._part)

    def take_parameters(self, participates: Sequence[bool], mover: Mover) -> None:
        """Wait for the parameters, and write them where they belong. ``mover``: of their device. On CUDA, the copies
        come before later work of the caller's stream. They also come before the gradients of the next step are handed
        over, since one stream makes both copies; and no parameter is written before all gradients are there."""
        self.session.wait(self._part.source)
        self.session.wait(self._part.target)
        taken = [position for position, takes_part in enumerate(participates) if takes_part]
        with torch.no_grad():
            targets: list[torch.Tensor] = [self._params[position] for position in taken]
            if targets:
                mover.adopt(self._part.target.result)
                mover.fetch([self._results[position] for position in taken], targets)

    def release(self) -> None:
        self._release()


class RowStates(OwnedStates):
    """On this rank, which steps the rows of its piece itself (see sparse_rows.py). ``spec``: of a parameter."""

    def __init__(
        self,
        session: Session,
        spec: TensorSpec,
        kind: StepKind,
        params: Sequence[torch.nn.Parameter],
        initial_sum: float = 0.0,
    ) -> None:
        owners = [(*spec.piece(rank, session.size), rank) for rank in range(session.size)]
        count = owned_by(session.rank, owners)
        states = [torch.empty(count, dtype=_wide(kind), device="cpu") for _ in range(kind.states)]
        super().__init__(session, kind, params, owners, states, initial_sum)


def owned_by(rank: int, owners: Owned) -> int:
    """The number of elements that a rank owns."""
    return sum(count for _, count, owner in owners if owner == rank)


def _wide(kind: StepKind) -> torch.dtype:
    return torch.float64 if kind.gradient is DType.FLOAT64 else torch.float32


def check_state(rule: UpdateRule, param: torch.nn.Parameter, state: Mapping[str, Any], what: str) -> None:
    """Raises UsageError if a parameter's ``state``, of a state_dict, lacks what ``rule`` needs."""
    names = moment_names(rule)
    if all(state.get(name) is None for name in names) and "step" not in state:
        return  # before its first step
    for name in (*names, *(["step"] if counts_steps(rule) else [])):
        value = state.get(name)
        shape = torch.Size() if name == "step" else param.shape
        found = value.shape if isinstance(value, (torch.Tensor, StoredElements)) else torch.Size()  # a number
        if value is None or found != shape:
            has = "none" if value is None else f"one of shape {list(found)}"
            raise UsageError(
                f"the state of {what}, of shape {list(param.shape)}, needs {name!r} of shape {list(shape)} and has "
                f"{has}: it is of another optimizer or model"
            )


def _overlaps(sizes: Sequence[int], own: Sequence[tuple[int, int]]) -> Iterator[Overlap]:
    """``sizes``: of the parameters. ``own``: (first, count) of the elements that a rank owns, in order."""
    place = 0
    for first, count in own:
        start = 0
        for position, size in enumerate(sizes):
            low, high = max(start, first), min(start + size, first + count)
            if low < high:
                at = place + low - first
                yield Overlap(position, slice(low - start, high - start), slice(at, at + high - low))
            start += size
        place += count
