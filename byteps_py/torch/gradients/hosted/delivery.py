"""Sums the gradients of a hosted optimizer for the services, which step with them and send the parameters.

    finish(): gradients are on their way ─► begin_steps(): each sum is stepped when it is there ─► take_parameters()

The training thread calls, but for ``ready``.
"""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from byteps_py.errors import CommunicationError, UsageError
from byteps_py.kernels.update_rules import Hyperparameters, Method, StepKind, UpdateRule
from byteps_py.memory_left import available_memory_bytes
from byteps_py.tensors import NonFinite
from byteps_py.torch.collectives import nonfinite
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import WIRE, wire_dtype
from byteps_py.torch.collectives.slot_view import PieceView, TensorRequest
from byteps_py.torch.compression import Compression
from byteps_py.torch.gradients.bucket import Bucket, GradientOptions, GradientPlace
from byteps_py.torch.gradients.gradient_checksums import Gradients, Scratch
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.gradients.hosted.replication import ShadowedSteps, ShadowedTensor
from byteps_py.torch.gradients.hosted.rules import check_dtypes
from byteps_py.torch.gradients.hosted.sparse_rows import HostedSparseBucket
from byteps_py.torch.gradients.hosted.states import Factors, HostedStates, OwnedStates, ParameterState, RowStates
from byteps_py.torch.gradients.hosted.trust_ratios import UpdatePhase, begin_scaled_steps
from byteps_py.torch.gradients.sparse_bucket import SparseBucket
from byteps_py.torch.operations.gathers import gathered

#: Of a parameter: the number of its param_group.
GroupOf = dict[torch.nn.Parameter, int]
#: Of a parameter: a weak reference to the optimizer that has it, one at a time, because its service has the
#: parameter's master. A parameter may outlive its optimizer, and the reverse.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def claim(named: Sequence[tuple[str, torch.nn.Parameter]], owner: object) -> None:
    """Give ``owner`` the parameters until it is gone. Raises UsageError if another one has one of them."""
    if any(_other(param, owner) for _, param in named):
        gc.collect()  # an optimizer that is not used any more may be part of a cycle
    for name, param in named:
        if _other(param, owner):
            raise UsageError(
                f"hosted=True: parameter {name!r} belongs to another hosted optimizer already: its service has the "
                "parameter's states, and both would change it. Use one optimizer with several param_groups, or delete "
                "the other one first (del optimizer)"
            )
    for _, param in named:
        _owners[param] = weakref.ref(owner)


def _other(param: torch.nn.Parameter, owner: object) -> bool:
    reference = _owners.get(param)
    return reference is not None and reference() not in (None, owner)


class HostedBucket(Bucket):
    """A bucket whose sums go to their owners' services. ``summed``: which parameters take part in the next step.
    ``is_alone``: no other rank adds to it. Then a parameter without a gradient stays as it is; of several ranks, others
    may have one."""

    untouched_until = "step()"
    touched_remedy = (
        "A hosted optimizer's gradients stay on the rank as they are, and the services clip and unscale their "
        "averages: call optimizer.clip_grad_norm_(max_norm) instead of torch.nn.utils.clip_grad_norm_, and "
        "scaler.unscale_(optimizer) before it where there is a GradScaler"
    )
    is_alone = False
    gives: tuple[bool, ...] = ()  # which of them have a gradient
    is_copied = False  # gradients were copied before the training went on, which may change or replace them meanwhile
    summed: tuple[bool, ...] | None = None

    def collect(self, sparse: bool = False) -> list[torch.Tensor | None]:
        for name, param, shape in zip(self.names, self.params, self.request.shapes, strict=True):
            if tuple(param.shape) != shape:
                raise UsageError(
                    f"hosted=True: parameter {name!r} has changed its shape from {list(shape)} to {list(param.shape)}, "
                    "and its service has states for the first one: make a new optimizer for the new parameter"
                )
        found = super().collect(sparse)
        self.gives = tuple(grad is not None for grad in found)
        return found

    def hand_over(self, gradients: Sequence[torch.Tensor | None], is_early: bool = False) -> None:
        self.drop_sum()
        super().hand_over(gradients, is_early)

    def drop_sum(self) -> None:
        """Make no step with the sums, if one is due. All ranks do so, or none."""
        is_due, self.summed = self.summed is not None, None
        if is_due and self.slot_view is not None:
            self.slot_view.wait_for_departure()
            self.slot_view.session.skip_step(self.slot_view.slot)
            self.slot_view.wait()

    @property
    def taking_part(self) -> tuple[bool, ...]:
        """Which parameters take part in the step of the round. Known once it is handed over."""
        return tuple(
            takes_part and not (self.is_alone and not gives)
            for takes_part, gives in zip(self.participates, self.gives, strict=True)
        )

    def receive(self) -> None:
        touched = None if self.is_copied else self.changed
        self._check_untouched(touched)
        self.summed = self.taking_part

    def deliver(self) -> None:
        pass

    def release_results(self) -> None:
        pass

    def _move_out_of_results(self, slot_view: PieceView, gradients: Gradients) -> Gradients:
        return gradients


AnyHosted = HostedBucket | HostedSparseBucket


class HostedReducer(GradientReducer):
    """``group_of``: of the parameters; ``rule_of``: of a param_group, by its number."""

    available_bytes: Callable[[], float] = staticmethod(available_memory_bytes)
    _is_alone = False  # of the buckets that are made next

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
        self._states: dict[AnyHosted, OwnedStates] = {}
        self.loaded: dict[torch.nn.Parameter, Mapping[str, Any]] = {}  # states that no service has yet
        if context.session.size == 1:  # nothing is sent, so nothing is rounded for it
            options = replace(options, compression=Compression.none)
        #: Gradients are handed over by ``hand_over_now`` alone, and may be computed while ``finish`` runs elsewhere.
        self.is_delayed = False
        self.shadow: ShadowedSteps | None = None
        self._bad: list[bool] | None = None
        self._due: list[tuple[HostedStates, tuple[bool, ...]]] = []
        super().__init__(context, named, options)

    def add(self, named: Sequence[tuple[str, torch.nn.Parameter]], groups: Sequence[Sequence[str]] = ()) -> None:
        claim(named, self)
        super().add(named, groups)

    # ---- buckets ----------------------------------------------------------------------------------------------

    def _kind_of(self, param: torch.nn.Parameter, dtype: torch.dtype) -> Hashable:
        return super()._kind_of(param, dtype), param.dtype, self.group_of[param]

    def _new_bucket(
        self, request: TensorRequest, names: list[str], params: list[torch.nn.Parameter], first: int, scratch: Scratch
    ) -> Bucket:
        bucket = HostedBucket(request, names, params, self._options, first, scratch)
        bucket.is_alone = self._is_alone
        return bucket

    def _new_sparse_bucket(
        self, request: TensorRequest, name: str, param: torch.nn.Parameter, first: int
    ) -> SparseBucket:
        shape = param.shape[0], math.prod(param.shape[1:])  # pieces of whole rows
        spec = replace(request.spec, shape=shape, ownership="", is_shadowed=False)
        request = replace(request, spec=spec)
        return HostedSparseBucket(self._context, request, name, param, self._options, first, self._scratch)

    def _split_sparse(self, bucket: Bucket, error: Exception | None, new_buckets: list[Bucket]) -> None:
        super()._split_sparse(bucket, error, new_buckets)
        if isinstance(bucket, HostedBucket) and (states := self.known_states(bucket)) is not None:
            # They were loaded, or are of steps whose gradients were all dense.
            for param, state in zip(bucket.params, self.gathered(bucket, states), strict=True):
                if state:
                    self.loaded[param] = state
            del self._states[bucket]
            states.release()

    def gathered(self, bucket: AnyHosted, states: OwnedStates) -> list[ParameterState]:
        """The whole states of a bucket's parameters. All ranks call it."""
        name = bucket.request.spec.name
        wholes = {
            each: gathered(states.piece(place), f"{name}.state.{place}") for place, each in enumerate(states.names)
        }
        return states.by_parameter(wholes)

    def _request(self, names: list[str], params: list[torch.nn.Parameter], first: int) -> TensorRequest:
        for name, param in zip(names, params, strict=True):
            if param.device.type not in ("cpu", "cuda"):
                raise UsageError(
                    f"hosted=True: parameter {name!r} lies on {param.device}; hosted are those on cpu and cuda"
                )
            dtype = self._options.compression.wire_dtype(param.dtype)
            check_dtypes(name, wire_dtype(dtype, name), wire_dtype(param.dtype, name))
        request = super()._request(names, params, first)
        spec = request.spec
        shape = (sum(param.numel() for param in params),)
        # Whether sums are finite is found out by their owners, see agreement.py.
        shadow = self._options.shadow
        spec = replace(spec, shape=shape, ownership=spec.name, nonfinite=NonFinite.ALLOW, is_shadowed=shadow)
        return replace(request, spec=spec, result_shapes=())

    def ready(self, place: GradientPlace, param: torch.Tensor) -> None:
        if not self.is_delayed:
            super().ready(place, param)

    def hand_over_now(self) -> None:
        """The first half of ``finish``, of a delayed step: copy all gradients. Raises as ``finish`` does, and
        UsageError for a sparse gradient."""
        if self.sparse:
            raise UsageError(
                f"delayed_update_after: the gradient of {self.sparse[0].names[0]!r} is sparse, and a delayed step "
                "needs dense ones: pass sparse_as_dense=True"
            )
        self.accepts_sparse = False
        errors: list[Exception] = []
        with self._lock:
            self._send_rest(errors)
        for bucket in self.hosted:
            bucket.is_copied = True  # ``finish`` must not read a gradient, which the training may replace
            if bucket.sent and bucket.slot_view is not None:
                bucket.slot_view.wait_for_departure()
        self._bad = None  # of the step before
        self._bad = self.bad_gradients() if self._options.nonfinite else []
        if errors:
            with contextlib.suppress(Exception):  # the first error is raised below
                self.finish()
            raise errors[0]

    def bad_gradients(self) -> list[bool]:
        """Of each parameter: whether this rank's gradient is NaN or infinite. Of a delayed step: at its hand-over."""
        if self._bad is not None:
            found, self._bad = self._bad, None
            return found
        return [
            param.grad is not None and not nonfinite.is_finite(param.grad)
            for bucket in self.with_states
            for param in bucket.params
        ]

    def _exchanges_needed(self) -> bool:
        before = self._session
        is_alone = not super()._exchanges_needed()
        if self._session is not before:
            self._is_alone = is_alone
            for bucket in self.hosted:
                bucket.is_alone = is_alone
        return True

    @property
    def hosted(self) -> list[HostedBucket]:
        """All buckets."""
        return [bucket for bucket in self._buckets if isinstance(bucket, HostedBucket)]

    @property
    def sparse(self) -> list[HostedSparseBucket]:
        """Those whose gradient is sparse."""
        return [bucket for bucket in self._buckets if isinstance(bucket, HostedSparseBucket)]

    @property
    def with_states(self) -> list[AnyHosted]:
        """All of both kinds."""
        return [bucket for bucket in self._buckets if isinstance(bucket, AnyHosted)]

    def states_of(self, bucket: HostedBucket, initial_sum: float) -> HostedStates:
        """The states of a bucket, which has been handed over. Raises UsageError if they were lost with an earlier job,
        and what Session.host raises. All ranks call it."""
        if bucket.slot_view is None:
            raise UsageError("a hosted optimizer's states are made with the first step")
        bucket.slot_view.wait_for_departure()
        slot = bucket.slot_view.slot
        states = self.known_states(bucket)
        if states is None:
            self._check_memory_once()
            kind = self._step_kind(bucket)
            run = self.shadow.run if self.shadow is not None else 0
            states = HostedStates(self._context.session, slot, kind, bucket.params, initial_sum, run)
            self._keep(bucket, states)
        if not isinstance(states, HostedStates):
            raise UsageError(f"the gradient of {bucket.names[0]!r} was sparse before: a hosted optimizer keeps that")
        states.follow(slot)
        return states

    def rows_of(self, bucket: HostedSparseBucket, initial_sum: float) -> RowStates:
        """The states of a parameter whose gradient is sparse. Raises UsageError if they were lost with an earlier
        job."""
        states = self.known_states(bucket)
        if states is None:
            self._check_memory_once()
            kind = self._step_kind(bucket)
            if self.shadow is not None:
                raise UsageError(
                    f"shadow=True: the gradient of {bucket.names[0]!r} is sparse, and other machines can't follow its "
                    "steps, which its ranks make: pass sparse_as_dense=True"
                )
            states = RowStates(self._context.session, bucket.request.spec, kind, bucket.params, initial_sum)
            self._keep(bucket, states)
        if not isinstance(states, RowStates):
            raise UsageError(f"the gradient of {bucket.names[0]!r} was dense before: a hosted optimizer keeps that")
        return states

    def _keep(self, bucket: AnyHosted, states: OwnedStates) -> None:
        self._states[bucket] = states
        for position, param in enumerate(bucket.params):
            if (state := self.loaded.pop(param, None)) is not None:
                states.load(position, state)

    def known_states(self, bucket: AnyHosted) -> OwnedStates | None:
        """The states of a bucket, if there are any. Raises UsageError if they were lost with an earlier job."""
        states = self._states.get(bucket)
        if states is not None and states.session is not self._context.session:
            raise UsageError(
                "the states of a hosted optimizer have ended with the job that it was in: load_state_dict() a saved "
                "one first, as TorchState does from its last commit"
            )
        return states

    def _step_kind(self, bucket: AnyHosted) -> StepKind:
        rule = self._rule_of(self.group_of[bucket.params[0]])
        return StepKind(rule, bucket.request.spec.dtype, WIRE[bucket.params[0].dtype])

    def _check_memory_once(self) -> None:
        if not self._states:
            self._check_memory()

    def _check_memory(self) -> None:
        """Raises UsageError if this machine has too little memory for the states of its ranks."""
        session = self._context.session
        needed = 0
        for bucket in self.with_states:
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
        """True between ``finish`` and ``begin_steps``."""
        return any(bucket.summed is not None for bucket in self.hosted) or any(row.is_summed for row in self.sparse)

    def drop_sums(self) -> None:
        """Make no step with the sums. All ranks do so, or none."""
        for bucket in self.hosted:
            if bucket.slot_view is not None and bucket.slot_view.session is self._context.session:
                with contextlib.suppress(CommunicationError):  # a job that has ended makes no step either
                    bucket.drop_sum()
            bucket.summed = None
        for rows in self.sparse:
            rows.is_summed = False

    def take_parameters(self) -> None:
        """Take the parameters of the steps that ``begin_steps`` has begun."""
        due, self._due = self._due, []
        for states, participates in due:
            states.take_parameters(participates, self._context.mover(states.device))

    def begin_steps(self, numbers: Sequence[Hyperparameters], factors: Factors, initial_sums: Sequence[float]) -> None:
        """Step with the sums: ``numbers`` of each param_group. Returns when the services know all about the steps."""
        due: list[tuple[HostedStates, tuple[bool, ...]]] = []
        begins: list[Callable[[], None]] = []
        updates: list[UpdatePhase] = []
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
            begins.append(partial(states.begin_step, numbers[group], factors, bucket.summed))
            due.append((states, bucket.summed))
            if states.kind.rule.method is Method.LAMB:
                updates.append(UpdatePhase(bucket.request.spec.name, states, numbers[group], bucket.summed))
        sparse: list[tuple[HostedSparseBucket, RowStates, Hyperparameters]] = []
        for rows in self.sparse:
            if rows.is_summed:
                group = self.group_of[rows.params[0]]
                rows.check_rule(self._rule_of(group), numbers[group])
                sparse.append((rows, self.rows_of(rows, initial_sums[group]), numbers[group]))
        for bucket in self.hosted:
            bucket.summed = None
        for states, _ in due:
            states.shadowed = self.shadow.next if self.shadow is not None else None
        for begin in begins:  # once nothing is wrong with any of them
            begin()
        begin_scaled_steps(self._context, updates)
        for rows, its_states, its_numbers in sparse:
            rows.step_rows(its_states, its_numbers, factors)
        self._due = due

    def record_step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Have other machines hold what belongs to the step that has begun. Raises UsageError, see ShadowedSteps."""
        if self.shadow is not None:
            tensors = [
                ShadowedTensor(bucket.request.spec.name, bucket.names, bucket.params, states)
                for bucket in self.hosted
                if isinstance(states := self._states.get(bucket), HostedStates)
            ]
            self.shadow.record(tensors, groups)

    def square_sum(self, initial_sums: Sequence[float]) -> float:
        """Of the averages that this rank owns, after ``finish``: NaN or infinite if one of them is. Waits for them."""
        total = 0.0
        for bucket in self.hosted:
            if bucket.summed is not None and bucket.slot_view is not None:
                states = self.states_of(bucket, initial_sums[self.group_of[bucket.params[0]]])
                total += states.square_sum(bucket.summed)
        for rows in self.sparse:
            if rows.is_summed:
                values = rows.own_rows(self._context.session)[1]
                total += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
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
