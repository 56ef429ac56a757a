"""The steps of a hosted optimizer: the services make them with the sums of a round, and the ranks take the parameters.

    reducer.finish(): sums are on their way ─► begin(): each is stepped when it is there ─► take()

Must not know when a step is made. The training thread calls, or that of a delayed step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from byteps_py.errors import UsageError
from byteps_py.kernels.update_rules import Hyperparameters, Method
from byteps_py.torch.collectives import nonfinite
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.gradients.bucket import Bucket
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.gradients.hosted.bucket_states import BucketStates
from byteps_py.torch.gradients.hosted.delivery import OwnerDelivery, owned, skip_steps
from byteps_py.torch.gradients.hosted.replication import ShadowedTensor
from byteps_py.torch.gradients.hosted.sparse_rows import SummedRows
from byteps_py.torch.gradients.hosted.states import Factors, HostedStates, RowStates
from byteps_py.torch.gradients.hosted.trust_ratios import UpdatePhase, begin_scaled_steps
from byteps_py.torch.gradients.sparse_bucket import SparseBucket


@dataclass(frozen=True, slots=True)
class BegunStep:
    """Of one bucket, whose parameters are to be taken. ``taking_part``: which of them."""

    states: HostedStates
    taking_part: tuple[bool, ...]


class SumSteps:
    """Of one optimizer."""

    def __init__(self, context: Context, reducer: GradientReducer, states: BucketStates) -> None:
        self._context, self._reducer, self._states = context, reducer, states
        self._groups, self._shadow = states.groups, states.shadow

    @property
    def _due(self) -> list[tuple[Bucket, OwnerDelivery, tuple[bool, ...]]]:
        """The buckets whose sums no step has taken, and which parameters take part. Sparse gradients are the last."""
        found = sorted(owned(self._reducer.buckets), key=lambda each: isinstance(each[0], SparseBucket))
        return [(bucket, delivery, delivery.summed) for bucket, delivery in found if delivery.summed is not None]

    @property
    def are_due(self) -> bool:
        """True between ``finish`` of the reducer and ``begin``."""
        return bool(self._due)

    def skip(self) -> None:
        """Make no step with the sums. All ranks do so, or none."""
        skip_steps(self._context, self._reducer.buckets)

    def square_sum(self) -> float:
        """Of the averages that this rank owns: NaN or infinite if one of them is. Waits for them."""
        total = 0.0
        for bucket, _, taking_part in self._due:
            if isinstance(bucket, SparseBucket):
                values = SummedRows(bucket).own(self._context.session)[1]
                total += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
            elif bucket.slot_view is not None:
                total += self._states.hosted(bucket, self._reducer).square_sum(taking_part)
        return total

    def begin(self, numbers: Sequence[Hyperparameters], factors: Factors) -> list[BegunStep]:
        """Step with the sums: ``numbers`` of each param_group. Returns when the services know all about the steps."""
        begun: list[BegunStep] = []
        begins: list[Callable[[], None]] = []
        updates: list[UpdatePhase] = []
        sparse: list[tuple[OwnerDelivery, SummedRows, RowStates, Hyperparameters]] = []
        due = self._due
        for bucket, delivery, taking_part in due:
            group = self._groups.group_of[bucket.params[0]]
            rule = self._groups.rule(bucket.params[0])
            if isinstance(bucket, SparseBucket):
                rows = SummedRows(bucket)
                rows.check_rule(rule, numbers[group])
                sparse.append((delivery, rows, self._states.rows(bucket, self._reducer), numbers[group]))
                continue
            if bucket.slot_view is None:
                continue  # of an earlier job
            states = self._states.hosted(bucket, self._reducer)
            if states.kind.rule != rule:
                raise UsageError(
                    f"param_groups[{group}] has changed: a hosted optimizer keeps the momentum (or none), amsgrad, "
                    "maximize and nesterov of its first step, and the side of 0.5 on which beta1 was"
                )
            begins.append(partial(states.begin_step, numbers[group], factors, taking_part))
            begun.append(BegunStep(states, taking_part))
            if rule.method is Method.LAMB:
                updates.append(UpdatePhase(bucket.request.spec.name, states, numbers[group], taking_part))
        for bucket, delivery, _ in due:
            if not isinstance(bucket, SparseBucket):
                delivery.summed = None
        for each in begun:
            each.states.shadowed = self._shadow.next if self._shadow is not None else None
        for begin in begins:  # once nothing is wrong with any of them
            begin()
        begin_scaled_steps(self._context, updates)
        for delivery, rows, row_states, its_numbers in sparse:
            rows.step(row_states, its_numbers, factors)
            delivery.summed = None
        return begun

    def record(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Have other machines hold what belongs to the step that has begun. Raises UsageError, see ShadowedSteps."""
        if self._shadow is not None:
            tensors = [
                ShadowedTensor(bucket.request.spec.name, bucket.names, bucket.params, states)
                for bucket in self._reducer.buckets
                if (states := self._states.in_services(bucket)) is not None
            ]
            self._shadow.record(tensors, groups)

    def take(self, begun: Sequence[BegunStep]) -> None:
        """Take the parameters of steps that have begun."""
        for each in begun:
            each.states.take_parameters(each.taking_part, self._context.mover(each.states.device))

    def bad_gradients(self) -> list[bool]:
        """Of each parameter, bucket by bucket: whether this rank's gradient is NaN or infinite."""
        return [
            param.grad is not None and not nonfinite.is_finite(param.grad)
            for bucket in self._reducer.buckets
            for param in bucket.params
        ]
