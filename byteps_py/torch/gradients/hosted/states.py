"""The states of a hosted optimizer, kept by the services: each has those of the elements that its ranks own.

    BucketStates    which bucket has which: made with the first step, saved, loaded, and lost with a job
    OwnedStates     of one bucket: HostedStates, in the service; RowStates, on the rank, of a sparse gradient

    gradients ─ sum, for owners ─► step, in the owner's service ─ broadcast, from owners ─► parameters

Owns the states and the parameters' slots. Must not know steps or hooks. The training thread calls.
"""

from __future__ import annotations

import copy
import itertools
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from byteps_py.errors import UsageError
from byteps_py.kernels.optimizer_steps import StepSegment
from byteps_py.kernels.update_rules import Hyperparameters, Method, StepKind, UpdateRule, step_scalars
from byteps_py.session import HostedShard, Session, ShadowedStep, Slot
from byteps_py.system.process_memory import available_memory_bytes
from byteps_py.tensor_codec import Codec
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import WIRE
from byteps_py.torch.collectives.movers import Mover
from byteps_py.torch.collectives.slot_view import TORCH, pieces
from byteps_py.torch.gradients.bucket import Bucket
from byteps_py.torch.gradients.hosted.agreement import Factors
from byteps_py.torch.gradients.hosted.replication import ShadowedSteps
from byteps_py.torch.gradients.hosted.rules import MASTER, HostedGroups, counts_steps, moment_names
from byteps_py.torch.gradients.hosted.states_mode import WholeModel
from byteps_py.torch.gradients.sparse_bucket import SparseBucket
from byteps_py.torch.gradients.whole_state import StatePiece, WholeState, WholeTensor
from byteps_py.torch.operations.gathers import gathered
from byteps_py.torch.operations.reductions import Max, reduced

#: Given states of some parameters.
Loaded = Mapping[torch.nn.Parameter, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Elements of a parameter that a rank owns. ``position``: the parameter's; ``inside``: the elements in the
    parameter; ``place``: the same elements in the rank's states."""

    position: int
    inside: slice
    place: slice


#: (first element, number of elements, rank) of each part of a tensor, in order.
Owned = Sequence[tuple[int, int, int]]


def elements_of(state: torch.Tensor | WholeTensor, elements: slice) -> torch.Tensor:
    """Elements of a parameter's state, which may lie elsewhere."""
    return state[elements] if isinstance(state, WholeTensor) else state.detach().reshape(-1)[elements]


class OwnedStates:
    """The states of the elements that this rank owns, of one bucket. ``params``: the bucket's, in order.
    ``initial_sum``: Adagrad's first state."""

    #: Parameters are not their masters, though they may have as many bits.
    are_rounded = False
    #: False if a rank of the group's first machine owns the same elements: then that one gives them to all ranks.
    gives_to_all = True

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
        """The names of the states in a state_dict, the master first."""
        return (MASTER, *moment_names(self.kind.rule))

    def piece(self, number: int) -> torch.Tensor:
        """The elements of a state that this rank gives to all, by its number in ``names``."""
        if number == 0:
            self._take_changed_parameters()
        state = self._state(number)
        return state if self.gives_to_all else state[:0]

    def whole(self, names: Sequence[str], gathered: Mapping[str, torch.Tensor]) -> list[WholeState]:
        """The state of each parameter, from the pieces of all ranks, rank by rank. ``names``: of the parameters."""
        parts = sorted(self._owners, key=lambda owned: (owned[2], owned[0]))
        ends = list(itertools.accumulate(count for _, count, _ in parts))
        found: list[WholeState] = []
        start = 0
        for name, param, steps in zip(names, self._params, self.steps, strict=True):
            tensors = {}
            for kind, values in gathered.items():
                pieces = [
                    StatePiece.of(first - start, values[end - count : end])
                    for (first, count, _), end in zip(parts, ends, strict=True)
                ]
                tensors[kind] = WholeTensor(f"{kind} of {name!r}", param.shape, values.dtype, pieces)
            found.append(WholeState(self.kind.rule, steps, param.dtype, tensors, self.are_rounded))
            start += param.numel()
        return found

    def load(self, position: int, state: Mapping[str, Any]) -> None:
        """Take over the states of the parameter at ``position``, which ``check_state`` has found right."""
        if "step" not in state and all(state.get(name) is None for name in self.names):
            self.steps[position] = 0
            return
        self.steps[position] = int(state.get("step", 1))
        for overlap in self.overlaps:
            if overlap.position == position:
                for number, name in enumerate(self.names):
                    if (value := state.get(name)) is not None:
                        own = elements_of(value, overlap.inside)
                        self._states[number][overlap.place].copy_(own)

    def release(self) -> None:
        """The states are needed no more."""


class HostedStates(OwnedStates):
    """States in the service, which makes the steps. ``source``: the slot of the gradients. ``run``: the number of the
    run that has copies on other machines; 0: it has none. ``codec``: of what parameters change by. All ranks make them.

    With a codec, a rank's parameters are the sum of the changes that have come, in the memory of its result, and
    differ from the masters by what the last code lacked. Raises UsageError if they are not alike on all ranks.

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
        codec: Codec | None = None,
    ) -> None:
        self.session, self.kind, self.run = session, kind, run
        self._codec = None if source.spec.is_replicated else codec  # on one machine, parameters do not travel
        self.are_rounded = self._codec is not None
        first = source.spec.members(session.size)[0] - (session.rank - session.local_rank)
        self.gives_to_all = 0 <= first < session.local_size or not source.spec.is_replicated
        self._part = self._host(source)
        self._release = weakref.finalize(self, session.state_host.release_shard, self._part)
        count = owned_by(session.rank, self._part.owners)
        states = [pieces(state, _wide(kind), [(count,)])[0] for state in self._part.states]
        super().__init__(session, kind, params, self._part.owners, states, initial_sum)
        self._view_results()
        if self.are_rounded:
            self._begin_with([param.detach() for param in params], source.spec)
            for overlap in self.overlaps:
                self.master[overlap.place] = params[overlap.position].detach().reshape(-1)[overlap.inside].cpu()

    def _begin_with(self, values: Sequence[torch.Tensor], spec: TensorSpec) -> None:
        """The next change is added to these. When it returns, all ranks have done so: a service changes the results of
        all ranks of its machine. ``spec``: of the gradients."""
        digest = 0
        for result, value in zip(self._results, values, strict=True):
            result.copy_(value)
            digest = zlib.crc32(result.reshape(-1).view(torch.uint8).numpy().data, digest)
        both = torch.tensor([digest, -digest], dtype=torch.int64, device="cpu")
        largest, least = reduced(both, Max, f"{spec.name}.alike", spec.group).tolist()
        if largest != -least:
            raise UsageError(
                f"parameter_compression: the parameters of {spec.name!r} differ between ranks, which get only what a "
                "step changes: call broadcast_parameters(model.state_dict(), root_rank=0) before the first step"
            )

    def _take_changed_parameters(self) -> None:
        if not self.are_rounded:
            super()._take_changed_parameters()
            return
        for overlap in self.overlaps:
            own = self._params[overlap.position].detach().reshape(-1)[overlap.inside].cpu()
            given = self._results[overlap.position].reshape(-1)[overlap.inside]
            if not torch.equal(given, own):  # elements that the training has changed
                kept = self.master[overlap.place]
                kept.copy_(torch.where(given == own, kept, own))

    def _host(self, source: Slot, before: HostedShard | None = None) -> HostedShard:
        name, count, priority = source.spec.name, source.spec.count, source.spec.priority
        wanted = TensorSpec(
            f"{name}.parameters", self.kind.parameter, (count,), Op.BROADCAST, priority=priority, ownership=name,
            is_replicated=source.spec.is_replicated, group=source.spec.group, codec=self._codec,
        )  # fmt: skip
        (target,) = self.session.declare([wanted])
        return self.session.state_host.host(self.kind, source, target, before, self.run)

    def _view_results(self) -> None:
        shapes = [tuple(param.shape) for param in self._params]
        self._results = pieces(self._part.target.result, TORCH[self.kind.parameter], shapes)

    def follows(self, source: Slot) -> bool:
        """True if ``source`` is the slot of the gradients already."""
        return source is self._part.source

    def follow(self, source: Slot) -> None:
        """Go on with the slot of the gradients, which may have been declared again. All ranks do so."""
        if not self.follows(source):
            if self.are_rounded and self._part.target.error is None:
                self._take_changed_parameters()
            self._part = self._host(source, self._part)
            self._view_results()
            if self.are_rounded:
                self._begin_with([param.detach() for param in self._params], source.spec)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._params[0].device

    def square_sums(self, participates: Sequence[bool], whole: WholeModel) -> list[float]:
        """The sums of the squares of the averages that this rank gives to all, of the parameters that take part, for
        each of the sums of ``whole``. Waits for them."""
        ranges: list[list[range]] = [[] for _ in range(whole.sums)]
        for overlap in self.overlaps if self.gives_to_all else ():
            if participates[overlap.position]:
                for start, stop, number in whole.shares(self._params[overlap.position]):
                    low, high = max(start, overlap.inside.start), min(stop, overlap.inside.stop)
                    if low < high:
                        at = overlap.place.start - overlap.inside.start
                        ranges[number].append(range(at + low, at + high))
        host = self.session.state_host
        return [host.square_sum(self._part, some) if some else 0.0 for some in ranges]

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
    """States on this rank, which steps the rows of its piece itself (see SummedRows). ``spec``: a parameter's."""

    def __init__(
        self,
        session: Session,
        spec: TensorSpec,
        kind: StepKind,
        params: Sequence[torch.nn.Parameter],
        initial_sum: float = 0.0,
    ) -> None:
        owners = [(*piece, rank) for rank, piece in pieces_of(spec, session).items()]
        count = owned_by(session.rank, owners)
        states = [torch.empty(count, dtype=_wide(kind), device="cpu") for _ in range(kind.states)]
        super().__init__(session, kind, params, owners, states, initial_sum)


def pieces_of(spec: TensorSpec, session: Session) -> dict[int, tuple[int, int]]:
    """(first element, number of elements) of a sparse gradient that each rank of its group owns."""
    members = spec.members(session.size)
    return {rank: spec.piece(position, len(members)) for position, rank in enumerate(members)}


def owned_by(rank: int, owners: Owned) -> int:
    """The number of elements that a rank owns."""
    return sum(count for _, count, owner in owners if owner == rank)


def _wide(kind: StepKind) -> torch.dtype:
    return torch.float64 if kind.gradient is DType.FLOAT64 else torch.float32


def check_state(rule: UpdateRule, param: torch.nn.Parameter, state: Mapping[str, Any], what: str) -> None:
    """Raises UsageError if a parameter's ``state``, of a state_dict, lacks what ``rule`` needs."""
    names = moment_names(rule)
    if all(state.get(name) is None for name in (MASTER, *names)) and "step" not in state:
        return  # before its first step
    has_master = state.get(MASTER) is not None
    for name in (*names, *([MASTER] if has_master else []), *(["step"] if counts_steps(rule) else [])):
        value = state.get(name)
        shape = torch.Size() if name == "step" else param.shape
        found = value.shape if isinstance(value, (torch.Tensor, WholeTensor)) else torch.Size()  # a number
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


States = TypeVar("States", bound=OwnedStates)


class BucketStates:
    """The states of all buckets of one optimizer. ``groups``: its param_groups. ``buckets``: its reducer's. ``shadow``:
    the steps that other machines make as well; None: they make none. ``codec``: of what parameters change by."""

    available_bytes: Callable[[], float] = staticmethod(available_memory_bytes)

    def __init__(
        self,
        context: Context,
        groups: HostedGroups,
        buckets: Sequence[Bucket],
        shadow: ShadowedSteps | None,
        codec: Codec | None = None,
    ) -> None:
        self._context, self.groups, self.buckets, self.shadow = context, groups, buckets, shadow
        self._codec = codec
        self._of: dict[Bucket, OwnedStates] = {}
        self._waiting: dict[torch.nn.Parameter, Mapping[str, Any]] = {}  # states that no service has yet
        self._loaded: Loaded | None = None  # all states, if there was no step since they were loaded

    @property
    def are_made(self) -> bool:
        """True from the first step, or the first states that were loaded, on."""
        return bool(self._of)

    @property
    def are_spread(self) -> bool:
        """True if no rank has all states."""
        return self._loaded is None and self.are_made

    @property
    def are_lost(self) -> bool:
        """True if the states have ended with the job that they were in."""
        return any(states.session is not self._context.session for states in self._of.values())

    # ---- of one bucket -----------------------------------------------------------------------------------------

    def hosted(self, bucket: Bucket) -> HostedStates:
        """The states of a bucket, which has been handed over. Raises UsageError if they were lost with an earlier job,
        and what Session.host raises. All ranks call it."""
        if bucket.slot_view is None:
            raise UsageError("a hosted optimizer's states are made with the first step")
        bucket.slot_view.wait_for_departure()
        slot = bucket.slot_view.slot

        def make(kind: StepKind, initial_sum: float) -> HostedStates:
            run = self.shadow.run if self.shadow is not None else 0
            return HostedStates(self._context.session, slot, kind, bucket.params, initial_sum, run, self._codec)

        states = self._known_or_made(bucket, HostedStates, make)
        states.follow(slot)
        return states

    def rows(self, bucket: SparseBucket) -> RowStates:
        """The states of a parameter whose gradient is sparse. Raises UsageError if they were lost with an earlier
        job."""

        def make(kind: StepKind, initial_sum: float) -> RowStates:
            if self.shadow is not None:
                raise UsageError(
                    f"shadow=True: the gradient of {bucket.names[0]!r} is sparse, and other machines can't follow its "
                    "steps, which its ranks make: pass sparse_as_dense=True"
                )
            return RowStates(self._context.session, bucket.request.spec, kind, bucket.params, initial_sum)

        return self._known_or_made(bucket, RowStates, make)

    def _known_or_made(self, bucket: Bucket, kind: type[States], make: Callable[[StepKind, float], States]) -> States:
        states = self.known(bucket)
        if states is None:
            if not self._of:
                self._check_memory()
            made = make(self._step_kind(bucket), self.groups.initial_sum(bucket.params[0]))
            states = self._of[bucket] = made
            for position, param in enumerate(bucket.params):
                if (state := self._waiting.pop(param, None)) is not None:
                    made.load(position, state)
        if not isinstance(states, kind):
            before = "sparse" if isinstance(states, RowStates) else "dense"
            raise UsageError(f"the gradient of {bucket.names[0]!r} was {before} before: a hosted optimizer keeps that")
        return states

    def known(self, bucket: Bucket) -> OwnedStates | None:
        """The states of a bucket, if there are any. Raises UsageError if they were lost with an earlier job."""
        states = self._of.get(bucket)
        if states is not None and states.session is not self._context.session:
            raise UsageError(
                "the states of a hosted optimizer have ended with the job that it was in: load_state_dict() a saved "
                "one first, as TorchState does from its last commit"
            )
        return states

    def in_services(self, bucket: Bucket) -> HostedStates | None:
        """The states of a bucket, if its services have them."""
        states = self._of.get(bucket)
        return states if isinstance(states, HostedStates) else None

    def _step_kind(self, bucket: Bucket) -> StepKind:
        param = bucket.params[0]
        return StepKind(self.groups.rule(param), bucket.request.spec.dtype, WIRE[param.dtype])

    def _check_memory(self) -> None:
        """Raises UsageError if this machine has too little memory for the states of its ranks."""
        session = self._context.session
        needed, is_replicated = 0, False
        sharers: Sequence[int] = range(session.size)
        first = session.rank - session.local_rank
        here = range(first, first + session.local_size)
        for bucket in self.buckets:
            kind, spec = self._step_kind(bucket), bucket.request.spec
            needed += spec.count * kind.states * kind.state_itemsize
            is_replicated = is_replicated or spec.is_replicated
            sharers = spec.members(session.size)
        if is_replicated:
            sharers = [rank for rank in sharers if rank in here]
        needed = needed * session.local_size // len(sharers)  # the machine's other ranks have as much
        if needed > (available := self.available_bytes()):
            fewer = 'hosted="sharded"' if is_replicated and session.num_machines > 1 else "More machines"
            raise UsageError(
                f"hosted=True: the states of this machine's {session.local_size} ranks need {needed / 1e9:.1f} GB, and "
                f"it has {available / 1e9:.1f} GB left. {fewer}, or an optimizer with fewer states, need less"
            )

    # ---- of all ------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Buckets that had sparse gradients were split: their states, which were loaded, or are of steps whose
        gradients were all dense, wait for the new ones. All ranks call it."""
        present = set(self.buckets)
        for bucket in [each for each in self._of if each not in present]:  # in the same order on all ranks
            if (states := self.known(bucket)) is not None:
                for param, state in zip(bucket.params, self._gathered(bucket, states), strict=True):
                    if state:
                        self._waiting[param] = state
                del self._of[bucket]
                states.release()

    def _gathered(self, bucket: Bucket, states: OwnedStates) -> list[dict[str, Any]]:
        """The whole states of a bucket's parameters. All ranks call it."""
        name = bucket.request.spec.name
        pieces = {
            each: gathered(states.piece(place), f"{name}.state.{place}", bucket.request.spec.group)
            for place, each in enumerate(states.names)
        }
        return [copy.deepcopy(whole.entries) for whole in states.whole(bucket.names, pieces)]

    def saved(self) -> dict[int, Mapping[str, Any]]:
        """As in a state_dict: by number of the parameter, those that have states. All ranks call it, unless there was
        no step since the beginning, or since they were loaded."""
        given = self._loaded
        if given is not None:
            places = {place: given[param] for place, param in enumerate(self.groups.params) if param in given}
            return copy.deepcopy(places)
        self.follow()
        by_param: dict[torch.nn.Parameter, dict[str, Any]] = {}
        for bucket in self.buckets:
            if (states := self.known(bucket)) is not None:
                by_param.update(zip(bucket.params, self._gathered(bucket, states), strict=True))
        return {place: state for place, param in enumerate(self.groups.params) if (state := by_param.get(param))}

    def load(self, given: Loaded) -> None:
        """Keep these states for the services to take over with the next step. Until then they must not change."""
        self._loaded, self._waiting = dict(given), dict(given)

    def check(self, given: Loaded, names: Mapping[torch.nn.Parameter, str]) -> None:
        """Raises UsageError if states that are given lack what a step needs. ``names``: of the parameters."""
        for param, state in given.items():
            check_state(self.groups.rule(param), param, state, repr(names[param]))

    def note_step(self, takes_over: bool = False) -> None:
        """A step was made. ``takes_over``: those that parameters without a step still wait for are copied, because
        their reader is about to be closed."""
        self._loaded = None
        if takes_over:
            self._waiting = {param: copy.deepcopy(state) for param, state in self._waiting.items()}

    def forget(self) -> None:
        """They are about to be replaced."""
        for states in self._of.values():
            states.release()
        self._of.clear()
