"""Starts reductions: copy in and hand over, later wait and copy out. Any thread.

The public functions are in torch/horovod, which knows the synchronous and in-place forms. The declarations are in
reduction_plans.py. Scale factors are applied while tensors are copied to the service and back: float16 and bfloat16 are
multiplied in float32 and rounded once, integers in float64 and rounded towards zero, so the result is deterministic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import cast

import torch

from byteps_py.errors import CommunicationError, UsageError
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.all_reduce.negotiated import NegotiatedAllReduce
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import bits_of, check_are_tensors, check_dense, check_result, mean, summands
from byteps_py.torch.collectives.result_pool import empty_result
from byteps_py.torch.collectives.router import Reach
from byteps_py.torch.collectives.slot_view import PieceView
from byteps_py.torch.collectives.work import Attempt, NamedWork
from byteps_py.torch.operations import adasum
from byteps_py.torch.operations.handles import kind_in_group, named_work, result_of, start_when_name_is_free
from byteps_py.torch.operations.reduction_plans import Adasum, ReduceOp, ReductionOptions, ReductionPlans

#: The time to wait for the other parts of a group after one has failed. Ranks may disagree about the number of parts.
_OTHER_PARTS_S = 10.0

Tensors = Sequence[torch.Tensor]


def reduced(tensor: torch.Tensor, op: ReduceOp, name: str) -> torch.Tensor:
    """The reduction of ``tensor`` over all ranks, a new tensor. Waits for the other ranks."""
    handle = start_reduction([tensor], None, name, ReductionOptions(op), is_awaited=True)
    result: torch.Tensor = result_of(handle)
    return result


def start_reduction(
    tensors: Tensors, into: Tensors | None, name: str | None, options: ReductionOptions, is_awaited: bool = False
) -> int:
    """Begin to reduce each of ``tensors`` into the tensor of ``into`` at its position. Returns a handle.

    into: may be ``tensors``; None for new tensors. is_awaited: the caller is about to wait for the result.
    The handle's result is the output, or a tuple of outputs for a group. Raises UsageError.
    """
    context = contexts.current()
    if options.op is Adasum and options.kind == "allreduce":
        return _start_adasum(context, tensors, into, name, options)
    context.session  # noqa: B018  raises NotInitializedError
    check_are_tensors(tensors, name)
    for output in into or ():
        check_result(output, name)
    with context.lock:
        plans = cast(
            ReductionPlans,
            context.belongings.get(ReductionPlans) or context.belongings.setdefault(ReductionPlans, ReductionPlans()),
        )
        plan = plans.find(context, tensors, options, name)
    if name is None:
        full_name = context.names.next(plan.kind, plan.signature, plan.nbytes)
    elif options.kind:
        full_name = f"{plan.kind}.{name}"
    elif context.is_claimed(name):
        raise UsageError(f"tensor name {name!r} belongs to a gradient of a DistributedOptimizer; choose another")
    else:
        full_name = name
    outputs = (
        [empty_result(tensor, shape) for tensor, shape in zip(tensors, plan.shapes, strict=True)]
        if into is None
        else list(into)
    )

    def start_on_service() -> Attempt:
        slot_views = context.slot_views(plan.requests(full_name))
        view = bits_of if plan.has_bool_as_bytes else torch.Tensor.detach
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
        # Between machines, the services find out if ranks call different operations without names.
        if plan.router.reach is Reach.MEMORY or (plan.router.reach is Reach.CONNECTIONS and name is not None):
            offer = plan.offer(full_name) if is_awaited else None
            sums = NegotiatedAllReduce.of(context)
            attempt = sums.begin(full_name, options.group, offer, tensors, outputs, start_on_service)
        else:
            attempt = start_on_service()

        def complete() -> torch.Tensor | tuple[torch.Tensor, ...]:
            attempt.complete()
            return tuple(outputs) if options.is_group else outputs[0]

        return named_work(context, full_name, name is None, Attempt(attempt.is_done, complete))

    return start_when_name_is_free(context, full_name, name, begin)


def _start_adasum(
    context: Context,
    tensors: Tensors,
    into: Tensors | None,
    name: str | None,
    options: ReductionOptions,
) -> int:
    for tensor in tensors:
        check_dense(tensor, name)
    for output in into or ():
        check_result(output, name)
    kind = kind_in_group(options.group, "grouped_adasum" if options.is_group else "adasum")
    if name is None:
        signature = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        full_name = context.names.next(
            kind, (signature, options.before, options.after), sum(tensor.nbytes for tensor in tensors)
        )
    else:
        full_name = f"{kind}.{name}"
    outputs = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors] if into is None else list(into)

    def begin() -> NamedWork:
        running = adasum.start(
            context, [scaled(tensor.detach(), options.before) for tensor in tensors], full_name, options.group
        )

        def complete() -> torch.Tensor | tuple[torch.Tensor, ...]:
            for output, result in zip(outputs, running.wait(), strict=True):
                output.detach().copy_(scaled(result, options.after))
            return tuple(outputs) if options.is_group else outputs[0]

        return named_work(context, full_name, name is None, Attempt(lambda: running.done, complete))

    return start_when_name_is_free(context, full_name, name, begin)


def _wait_all(slot_views: Sequence[PieceView]) -> None:
    for i, slot_view in enumerate(slot_views):
        try:
            slot_view.wait()
        except CommunicationError:
            for other in slot_views[i + 1 :]:
                with contextlib.suppress(CommunicationError):  # the first error is raised below
                    other.wait(_OTHER_PARTS_S)
            raise


# ---- scale factors -----------------------------------------------------------------------------------------


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """``tensor * factor`` in the tensor's dtype.

    >>> scaled(torch.tensor([3, -3]), 0.5).tolist()
    [1, -1]
    """
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_floating_point:
        return tensor * factor
    return (tensor.to(torch.float64) * factor).to(tensor.dtype)


def send_scaled(slot_view: PieceView, tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Contribute ``tensors * factor``."""
    if factor == 1.0:
        slot_view.contribute(tensors)
    elif all(_in_one_pass(tensor, slot_view) for tensor in tensors):
        with torch.no_grad():
            for tensor, view in zip(tensors, slot_view.inputs, strict=True):
                torch.mul(tensor, factor, out=view)
        slot_view.contribute_input()
    else:
        slot_view.contribute([scaled(tensor, factor) for tensor in tensors])


def fetch_scaled(slot_view: PieceView, outputs: Sequence[torch.Tensor], factor: float) -> None:
    """Copy ``results * factor`` to ``outputs``."""
    if factor != 1.0 and all(_in_one_pass(output, slot_view) for output in outputs):
        with torch.no_grad():
            for view, output in zip(slot_view.results, outputs, strict=True):
                torch.mul(view, factor, out=output)
        return
    slot_view.fetch(outputs)
    if factor != 1.0:
        for output in outputs:
            output.copy_(scaled(output, factor))


def _in_one_pass(tensor: torch.Tensor, slot_view: PieceView) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype is slot_view.dtype and tensor.dtype.is_floating_point
