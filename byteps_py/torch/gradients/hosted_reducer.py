"""Sums the gradients of a hosted optimizer for the services, which step with them and send the parameters.

    finish(): gradients are on their way ─► make_steps(): each sum is stepped when it is there, parameters come back

The training thread calls, but for ``ready``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from byteps_py.errors import UsageError
from byteps_py.kernels.update_rules import Hyperparameters, StepKind, UpdateRule
from byteps_py.memory_left import available_memory_bytes
from byteps_py.torch.compression import Compression
from byteps_py.torch.engine.context import Context
from byteps_py.torch.engine.dtypes import WIRE, wire_dtype
from byteps_py.torch.engine.slot_view import PieceView, TensorRequest
from byteps_py.torch.gradients.bucket import Bucket, GradientOptions
from byteps_py.torch.gradients.gradient_checksums import Gradients, Scratch
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.gradients.hosted_rules import check_dtypes
from byteps_py.torch.gradients.hosted_states import HostedStates

#: Of a parameter: the number of its param_group.
GroupOf = dict[torch.nn.Parameter, int]


class HostedBucket(Bucket):
    """A bucket whose sums go to their owners' services. ``summed``: which of its parameters take part in the next step.
    ``is_alone``: no other rank adds to it. Then a parameter without a gradient stays as it is; of several ranks, others
    may have one."""

    is_alone = False
    summed: tuple[bool, ...] | None = None

    def receive(self) -> None:
        self._check_untouched(self.changed)
        self.summed = tuple(
            takes_part and not (self.is_alone and param.grad is None)
            for takes_part, param in zip(self.participates, self.params, strict=True)
        )

    def deliver(self) -> None:
        pass

    def release_results(self) -> None:
        pass

    def _move_out_of_results(self, slot_view: PieceView, gradients: Gradients) -> Gradients:
        return gradients


class HostedReducer(GradientReducer):
    """``group_of``: of the parameters; ``rule_of``: of a param_group, by its number."""

    available_bytes: Callable[[], float] = staticmethod(available_memory_bytes)

    def __init__(
        self,
        context: Context,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        options: GradientOptions,
        group_of: GroupOf,
        rule_of: Callable[[int], UpdateRule],
    ) -> None:
        self.group_of, self._rule_of = group_of, rule_of
        # Not in the buckets: hooks of parameters hold those, and a model may outlive its optimizer.
        self._states: dict[HostedBucket, HostedStates] = {}
        self.loaded: dict[torch.nn.Parameter, Mapping[str, Any]] = {}  # states that no service has yet
        if context.session.size == 1:  # nothing is sent, so nothing is rounded for it
            options = replace(options, compression=Compression.none)
        super().__init__(context, named, options)
        self.accepts_sparse = False

    # ---- buckets ----------------------------------------------------------------------------------------------

    def _kind_of(self, param: torch.nn.Parameter, dtype: torch.dtype) -> Hashable:
        return super()._kind_of(param, dtype), param.dtype, self.group_of[param]

    def _new_bucket(
        self, request: TensorRequest, names: list[str], params: list[torch.nn.Parameter], first: int, scratch: Scratch
    ) -> Bucket:
        return HostedBucket(request, names, params, self._options, first, scratch)

    def _request(self, names: list[str], params: list[torch.nn.Parameter], first: int) -> TensorRequest:
        for name, param in zip(names, params, strict=True):
            if not param.is_cpu:
                raise UsageError(f"hosted=True: parameter {name!r} lies on {param.device}; hosted are those on cpu")
            dtype = self._options.compression.wire_dtype(param.dtype)
            check_dtypes(name, wire_dtype(dtype, name), wire_dtype(param.dtype, name))
        request = super()._request(names, params, first)
        spec = request.spec
        spec = replace(spec, shape=(sum(param.numel() for param in params),), ownership=spec.name)
        return replace(request, spec=spec, result_shapes=())

    def _exchanges_needed(self) -> bool:
        before = self._session
        is_alone = not super()._exchanges_needed()
        if self._session is not before:
            for bucket in self.hosted:
                bucket.is_alone = is_alone
        return True

    @property
    def hosted(self) -> list[HostedBucket]:
        """All buckets."""
        return [bucket for bucket in self._buckets if isinstance(bucket, HostedBucket)]

    def states_of(self, bucket: HostedBucket, initial_sum: float) -> HostedStates:
        """The states of a bucket. Raises UsageError if they were lost with an earlier job."""
        session = self._context.session
        states = self.known_states(bucket)
        if states is None:
            if not self._states:
                self._check_memory()
            if bucket.slot_view is None:
                raise UsageError("a hosted optimizer's states are made with the first step")
            states = HostedStates(session, bucket.slot_view.slot, self._step_kind(bucket), bucket.params, initial_sum)
            self._states[bucket] = states
            for position, param in enumerate(bucket.params):
                if (state := self.loaded.pop(param, None)) is not None:
                    states.load(position, state)
        elif bucket.slot_view is not None:
            states.follow(bucket.slot_view.slot)
        return states

    def known_states(self, bucket: HostedBucket) -> HostedStates | None:
        """The states of a bucket, if there are any. Raises UsageError if they were lost with an earlier job."""
        states = self._states.get(bucket)
        if states is not None and states.session is not self._context.session:
            raise UsageError(
                "the states of a hosted optimizer have ended with the job that it was in: load_state_dict() a saved "
                "one first, as TorchState does from its last commit"
            )
        return states

    def _step_kind(self, bucket: HostedBucket) -> StepKind:
        rule = self._rule_of(self.group_of[bucket.params[0]])
        return StepKind(rule, bucket.request.spec.dtype, WIRE[bucket.params[0].dtype])

    def _check_memory(self) -> None:
        """Raises UsageError if this machine has too little memory for the states of its ranks."""
        session = self._context.session
        needed = 0
        for bucket in self.hosted:
            kind = self._step_kind(bucket)
            needed += bucket.request.spec.count * kind.states * kind.state_itemsize
        needed = needed * session.local_size // session.size
        if needed > (available := self.available_bytes()):
            raise UsageError(
                f"hosted=True: the states of this machine's {session.local_size} ranks need {needed / 1e9:.1f} GB, and "
                f"it has {available / 1e9:.1f} GB left. More machines, or an optimizer with fewer states, need less"
            )

    # ---- a step -----------------------------------------------------------------------------------------------

    @property
    def has_sums(self) -> bool:
        """True between ``finish`` and ``make_steps``."""
        return any(bucket.summed is not None for bucket in self.hosted)

    def drop_sums(self) -> None:
        """Make no step with the sums. All ranks do so, or none."""
        for bucket in self.hosted:
            is_due, bucket.summed = bucket.summed is not None, None
            if is_due and bucket.slot_view is not None and bucket.slot_view.session is self._context.session:
                self._context.session.skip_step(bucket.slot_view.slot)
                bucket.slot_view.wait()

    def make_steps(self, numbers: Sequence[Hyperparameters], clip: float, initial_sums: Sequence[float]) -> None:
        """Step with the sums: ``numbers`` of each param_group. Returns when all parameters are there."""
        due: list[tuple[HostedStates, tuple[bool, ...]]] = []
        begins: list[Callable[[], None]] = []
        for bucket in self.hosted:
            if bucket.summed is None or bucket.slot_view is None:
                continue
            group = self.group_of[bucket.params[0]]
            states = self.states_of(bucket, initial_sums[group])
            if states.kind.rule != self._rule_of(group):
                raise UsageError(
                    f"param_groups[{group}] has changed: a hosted optimizer keeps the momentum (or none), amsgrad, "
                    "maximize and nesterov of its first step, and the side of 0.5 on which beta1 was"
                )
            begins.append(partial(states.begin_step, numbers[group], clip, bucket.summed))
            due.append((states, bucket.summed))
        for bucket in self.hosted:
            bucket.summed = None
        for begin in begins:  # once nothing is wrong with any of them
            begin()
        for states, participates in due:
            states.take_parameters(participates)

    def square_sum(self, initial_sums: Sequence[float]) -> float:
        """Of this rank's pieces of the averages."""
        total = 0.0
        for bucket in self.hosted:
            if bucket.summed is not None and bucket.slot_view is not None:
                states = self.states_of(bucket, initial_sums[self.group_of[bucket.params[0]]])
                total += states.square_sum(bucket.summed)
        return total

    @property
    def has_states(self) -> bool:
        """True from the first step, or the first states that were loaded, on."""
        return bool(self._states)

    @property
    def is_lost(self) -> bool:
        """True if the states have ended with the job that they were in."""
        return any(states.session is not self._context.session for states in self._states.values())

    def forget_states(self) -> None:
        """They are about to be replaced."""
        for states in self._states.values():
            states.release()
        self._states.clear()
