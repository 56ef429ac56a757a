"""The states of all buckets of one hosted optimizer: made with the first step, saved, loaded, and lost with a job.

Owns which bucket has which states, and those that were loaded and no service has yet. Must not know steps. The training
thread calls.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from byteps_py.errors import UsageError
from byteps_py.kernels.update_rules import StepKind
from byteps_py.system.memory_left import available_memory_bytes
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import WIRE
from byteps_py.torch.gradients.bucket import Bucket
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.gradients.hosted.replication import ShadowedSteps
from byteps_py.torch.gradients.hosted.rules import HostedGroups
from byteps_py.torch.gradients.hosted.states import HostedStates, OwnedStates, ParameterState, RowStates, check_state
from byteps_py.torch.gradients.sparse_bucket import SparseBucket
from byteps_py.torch.operations.gathers import gathered

States = TypeVar("States", bound=OwnedStates)
Loaded = Mapping[torch.nn.Parameter, Mapping[str, Any]]


class BucketStates:
    """``groups``: the optimizer's. ``shadow``: the steps that other machines make as well; None: they make none."""

    available_bytes: Callable[[], float] = staticmethod(available_memory_bytes)

    def __init__(self, context: Context, groups: HostedGroups, shadow: ShadowedSteps | None) -> None:
        self._context, self.groups, self.shadow = context, groups, shadow
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

    def hosted(self, bucket: Bucket, reducer: GradientReducer) -> HostedStates:
        """The states of a bucket, which has been handed over. Raises UsageError if they were lost with an earlier job,
        and what Session.host raises. All ranks call it."""
        if bucket.slot_view is None:
            raise UsageError("a hosted optimizer's states are made with the first step")
        bucket.slot_view.wait_for_departure()
        slot = bucket.slot_view.slot

        def make(kind: StepKind) -> HostedStates:
            run = self.shadow.run if self.shadow is not None else 0
            initial_sum = self.groups.initial_sum(bucket.params[0])
            return HostedStates(self._context.session, slot, kind, bucket.params, initial_sum, run)

        states = self._known_or_made(bucket, reducer, HostedStates, make, "sparse")
        states.follow(slot)
        return states

    def rows(self, bucket: SparseBucket, reducer: GradientReducer) -> RowStates:
        """The states of a parameter whose gradient is sparse. Raises UsageError if they were lost with an earlier
        job."""

        def make(kind: StepKind) -> RowStates:
            if self.shadow is not None:
                raise UsageError(
                    f"shadow=True: the gradient of {bucket.names[0]!r} is sparse, and other machines can't follow its "
                    "steps, which its ranks make: pass sparse_as_dense=True"
                )
            initial_sum = self.groups.initial_sum(bucket.params[0])
            return RowStates(self._context.session, bucket.request.spec, kind, bucket.params, initial_sum)

        return self._known_or_made(bucket, reducer, RowStates, make, "dense")

    def _known_or_made(
        self,
        bucket: Bucket,
        reducer: GradientReducer,
        kind: type[States],
        make: Callable[[StepKind], States],
        other: str,
    ) -> States:
        states = self.known(bucket)
        if states is None:
            if not self._of:
                self._check_memory(reducer.buckets)
            states = made = make(self._step_kind(bucket))
            self._of[bucket] = made
            for position, param in enumerate(bucket.params):
                if (state := self._waiting.pop(param, None)) is not None:
                    made.load(position, state)
        if not isinstance(states, kind):
            raise UsageError(f"the gradient of {bucket.names[0]!r} was {other} before: a hosted optimizer keeps that")
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
        """Those of a bucket that its services have."""
        states = self._of.get(bucket)
        return states if isinstance(states, HostedStates) else None

    def _step_kind(self, bucket: Bucket) -> StepKind:
        param = bucket.params[0]
        return StepKind(self.groups.rule(param), bucket.request.spec.dtype, WIRE[param.dtype])

    def _check_memory(self, buckets: Sequence[Bucket]) -> None:
        """Raises UsageError if this machine has too little memory for the states of its ranks."""
        session = self._context.session
        needed = 0
        for bucket in buckets:
            kind = self._step_kind(bucket)
            needed += bucket.request.spec.count * kind.states * kind.state_itemsize
        needed = needed * session.local_size // session.size
        if needed > (available := self.available_bytes()):
            raise UsageError(
                f"hosted=True: the states of this machine's {session.local_size} ranks need {needed / 1e9:.1f} GB, and "
                f"it has {available / 1e9:.1f} GB left. More machines, or an optimizer with fewer states, need less"
            )

    # ---- of all ------------------------------------------------------------------------------------------------

    def follow(self, reducer: GradientReducer) -> None:
        """Buckets that had sparse gradients were split: their states, which were loaded, or are of steps whose
        gradients were all dense, wait for the new ones. All ranks call it."""
        present = set(reducer.buckets)
        for bucket in [each for each in self._of if each not in present]:  # in the same order on all ranks
            if (states := self.known(bucket)) is not None:
                for param, state in zip(bucket.params, self._gathered(bucket, states), strict=True):
                    if state:
                        self._waiting[param] = state
                del self._of[bucket]
                states.release()

    def _gathered(self, bucket: Bucket, states: OwnedStates) -> list[ParameterState]:
        """The whole states of a bucket's parameters. All ranks call it."""
        name = bucket.request.spec.name
        wholes = {
            each: gathered(states.piece(place), f"{name}.state.{place}") for place, each in enumerate(states.names)
        }
        return states.by_parameter(wholes)

    def saved(self, reducer: GradientReducer) -> dict[int, Mapping[str, Any]]:
        """As in a state_dict: by number of the parameter, those that have states. All ranks call it, unless there was
        no step since the beginning, or since they were loaded."""
        given = self._loaded
        if given is not None:
            places = {place: given[param] for place, param in enumerate(self.groups.params) if param in given}
            return copy.deepcopy(places)
        self.follow(reducer)
        by_param: dict[torch.nn.Parameter, ParameterState] = {}
        for bucket in reducer.buckets:
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
