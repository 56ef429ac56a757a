"""Starting reductions: copies in, hand over; wait, copies out. Any thread.

The public functions are in api.py, allreduce.py and scatter.py; what they differ in (synchronous or not, in place or
not) is there. What has to be declared is in plans.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import cast

import torch

from byteps_py.errors import CommunicationError, UsageError
from byteps_py.torch.engine.context import Context
from byteps_py.torch.engine.dtypes import bits_of, check_dense, check_result
from byteps_py.torch.engine.integer_averages import mean, summands
from byteps_py.torch.engine.named_sums import NamedSums
from byteps_py.torch.engine.named_work import Attempt, NamedWork
from byteps_py.torch.engine.slot_view import PieceView
from byteps_py.torch.horovod.ops import begin_when_free, kind_in, operation_of
from byteps_py.torch.horovod.plans import Plans, ReductionOptions
from byteps_py.torch.horovod.scaling import fetch_scaled, scaled, send_scaled

#: Once one part of a group has failed, how long the others are waited for: ranks may disagree about how many there are.
_OTHER_PARTS_S = 10.0

Tensors = Sequence[torch.Tensor]


def start_reduction(
    context: Context,
    tensors: Tensors,
    into: Tensors | None,
    name: str | None,
    options: ReductionOptions,
    is_group: bool = False,
    is_awaited: bool = False,
) -> int:
    """Begin to reduce each of ``tensors`` into that of ``into`` (may be the same; None: new ones). Returns a handle.

    Its result is the output, of a group the tuple of them. ``is_awaited``: the caller is about to wait for it. Raises
    UsageError.
    """
    context.session  # noqa: B018  raises NotInitializedError
    for output in into or ():
        check_result(output, name)
    with context.lock:
        plans = cast(Plans, context.belongings.get(Plans) or context.belongings.setdefault(Plans, Plans()))
        plan = plans.find(context, tensors, options, is_group, name)
    if name is None:
        full = context.names.next(plan.kind, plan.signature, plan.nbytes)
    elif options.kind:
        full = f"{plan.kind}.{name}"
    elif context.is_claimed(name):
        raise UsageError(f"tensor name {name!r} belongs to a gradient of a DistributedOptimizer; choose another")
    else:
        full = name
    outputs = (
        [tensor.new_empty(shape) for tensor, shape in zip(tensors, plan.shapes, strict=True)]
        if into is None
        else list(into)
    )

    def through_the_service() -> Attempt:
        slot_views = context.slot_views(plan.requests(full))
        view = bits_of if plan.has_truth_values else torch.Tensor.detach
        for slot_view, part in zip(slot_views, plan.parts, strict=True):
            if plan.are_summed_wider[part[0]]:
                slot_view.contribute([summands(scaled(tensors[i].detach(), options.before)) for i in part])
            else:
                send_scaled(slot_view, [view(tensors[i]) for i in part], options.before)

        def complete() -> None:
            _wait_all(slot_views)
            for slot_view, part in zip(slot_views, plan.parts, strict=True):
                if plan.are_summed_wider[part[0]]:
                    for sums, i in zip(slot_view.results, part, strict=True):
                        average = mean(sums, plan.count, outputs[i].dtype, plan.rounding)
                        outputs[i].detach().copy_(scaled(average, options.after))
                else:
                    fetch_scaled(slot_view, [view(outputs[i]) for i in part], options.after)

        return Attempt(lambda: all(e.is_done for e in slot_views), complete)

    def begin() -> NamedWork:
        if plan.router.are_local:
            offer = plan.offer(full) if is_awaited else None
            sums = NamedSums.of(context)
            attempt = sums.begin(full, options.group, offer, tensors, outputs, through_the_service)
        else:
            attempt = through_the_service()

        def complete() -> torch.Tensor | tuple[torch.Tensor, ...]:
            attempt.complete()
            return tuple(outputs) if is_group else outputs[0]

        return operation_of(context, full, name is None, Attempt(attempt.is_done, complete))

    return begin_when_free(context, full, name, begin)


def start_adasum(
    context: Context,
    tensors: Tensors,
    into: Tensors | None,
    name: str | None,
    options: ReductionOptions,
    is_group: bool = False,
) -> int:
    """Begin to combine each of ``tensors`` by Adasum; else as ``start_reduction``. Raises UsageError."""
    from byteps_py.torch.horovod import adasum

    for tensor in tensors:
        check_dense(tensor, name)
    for output in into or ():
        check_result(output, name)
    kind = kind_in(options.group, "grouped_adasum" if is_group else "adasum")
    if name is None:
        what = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        full = context.names.next(kind, (what, options.before, options.after), sum(tensor.nbytes for tensor in tensors))
    else:
        full = f"{kind}.{name}"
    outputs = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors] if into is None else list(into)

    def begin() -> NamedWork:
        running = adasum.start(
            context, [scaled(tensor.detach(), options.before) for tensor in tensors], full, options.group
        )

        def complete() -> torch.Tensor | tuple[torch.Tensor, ...]:
            for output, result in zip(outputs, running.wait(), strict=True):
                output.detach().copy_(scaled(result, options.after))
            return tuple(outputs) if is_group else outputs[0]

        return operation_of(context, full, name is None, Attempt(lambda: running.done, complete))

    return begin_when_free(context, full, name, begin)


def _wait_all(slot_views: Sequence[PieceView]) -> None:
    for i, slot_view in enumerate(slot_views):
        try:
            slot_view.wait()
        except CommunicationError:
            for other in slot_views[i + 1 :]:
                with contextlib.suppress(CommunicationError):  # the first one is on its way to the caller
                    other.wait(_OTHER_PARTS_S)
            raise
