"""The gradients of collectives. Each function here runs a collective, and names its adjoint:

    collective      the gradient of a rank's input
    ----------      ------------------------------
    reduction       the same reduction of all ranks' gradients
    allgather       the average of all ranks' gradients of its rows
    broadcast       on the root the average of all ranks' gradients, on other ranks zeros
    alltoall        each row's gradient, from the rank that the row went to
    reducescatter   all ranks' gradients of their rows

Any thread. Autograd may compute gradients on a thread of its own; the context is that of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from byteps_py.errors import UsageError
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.dtypes import check_are_tensors
from byteps_py.torch.operations.broadcasts import broadcast_request, start_broadcast
from byteps_py.torch.operations.gathers import Splits, start_alltoall, start_gather
from byteps_py.torch.operations.handles import result_of
from byteps_py.torch.operations.process_sets import ProcessSet, group_of, members_of
from byteps_py.torch.operations.reductions import Adasum, Average, ReductionOptions, Sum, scaled, start_reduction

Tensors = Sequence[torch.Tensor]
#: From the gradients of the results to those of the inputs.
Adjoint = Callable[[Tensors], Tensors]
#: From the inputs to the results and the adjoint.
Run = Callable[[Tensors], tuple[Tensors, Adjoint]]


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.context = contexts.current()
        results, ctx.adjoint = run(tensors)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with contexts.use(ctx.context):
            return None, *ctx.adjoint(grads)


def _apply(run: Run, tensors: Tensors) -> tuple[torch.Tensor, ...]:
    results: tuple[torch.Tensor, ...] = _Collective.apply(run, *tensors)  # type: ignore[no-untyped-call]
    return results


def _of_gradient(name: str | None, kind: str = "") -> str | None:
    return None if name is None else f"{kind}{name}.grad"


def _results(handle: int) -> tuple[torch.Tensor, ...]:
    result = result_of(handle)
    return result if isinstance(result, tuple) else (result,)


def reduce(tensors: Tensors, name: str | None, options: ReductionOptions) -> tuple[torch.Tensor, ...]:
    """The reduction of each of ``tensors``."""

    def run(tensors: Tensors) -> tuple[Tensors, Adjoint]:
        return _results(start_reduction(tensors, None, name, options, is_awaited=True)), adjoint

    def adjoint(grads: Tensors) -> Tensors:
        if options.op not in (Sum, Average, Adasum):
            raise UsageError(
                f"{options.kind or 'push_pull'} with op={options.op.name.title()} is not differentiable, only Sum and "
                "Average are"
            )
        return reduce(grads, _of_gradient(name), options)

    return _apply(run, tensors)


def gather(
    tensors: Tensors, name: str | None, process_set: ProcessSet, is_group: bool = False
) -> tuple[torch.Tensor, ...]:
    """The rows of all ranks of each of ``tensors``."""

    def run(tensors: Tensors) -> tuple[Tensors, Adjoint]:
        group = group_of(process_set)
        results = _results(start_gather(tensors, name, group, is_group, background=False))
        rows = [tensor.shape[0] for tensor in tensors]
        return results, lambda grads: adjoint(grads, rows)

    def adjoint(grads: Tensors, rows: Sequence[int]) -> Tensors:
        context, members, group = contexts.current(), members_of(process_set), group_of(process_set)
        grad_name = _of_gradient(name)
        options = ReductionOptions(Average, "allgather.grad", group, is_group=True)
        means = result_of(start_reduction(grads, None, grad_name, options))
        own = torch.tensor([rows], device="cpu")
        handle = start_gather([own], grad_name and f"{grad_name}.rows", group, background=False)
        before = result_of(handle)[: members.index(context.session.rank)].sum(0).tolist()
        return [mean.narrow(0, first, count) for mean, first, count in zip(means, before, rows, strict=True)]

    return _apply(run, tensors)


def broadcast_from(root_rank: int, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
    """A copy of the root's ``tensor``."""
    check_are_tensors((tensor,), name)

    def run(tensors: Tensors) -> tuple[Tensors, Adjoint]:
        output = torch.empty_like(tensors[0], requires_grad=False)
        return _results(start_broadcast_of(tensors[0], output, root_rank, name, process_set)), adjoint

    def adjoint(grads: Tensors) -> Tensors:
        options = ReductionOptions(Average, "allreduce", group_of(process_set))
        (mean,) = reduce(grads, _of_gradient(name, "broadcast."), options)
        return (mean if contexts.current().place.rank == root_rank else torch.zeros_like(mean),)

    (result,) = _apply(run, (tensor,))
    return result


def start_broadcast_of(
    tensor: torch.Tensor, output: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> int:
    """Begin to copy the root's ``tensor`` into every rank's ``output``. Returns a handle."""
    context = contexts.current()
    request = broadcast_request(context, tensor, root_rank, name, group_of(process_set))
    return start_broadcast(context, request, tensor, output, name)


def exchange(
    tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that all ranks send to this one, and the number from each."""

    def run(tensors: Tensors) -> tuple[Tensors, Adjoint]:
        handle = start_alltoall(tensors[0], splits, name, group_of(process_set), background=False)
        output, received = result_of(handle)
        back, rows = received.tolist(), tensors[0].shape[0]
        return (output, received), lambda grads: adjoint(grads, back, rows)

    def adjoint(grads: Tensors, received: Sequence[int], rows: int) -> Tensors:
        handle = start_alltoall(grads[0], received, _of_gradient(name), group_of(process_set), background=False)
        gradient, _ = result_of(handle)
        if gradient.shape[0] < rows:  # rows that were sent to no rank
            zeros = gradient.new_zeros((rows - gradient.shape[0], *gradient.shape[1:]))
            gradient = torch.cat([gradient, zeros])
        return (gradient,)

    output, received = _apply(run, (tensor,))
    return output, received


def reduce_scatter(
    tensors: Tensors, name: str | None, options: ReductionOptions, process_set: ProcessSet
) -> tuple[torch.Tensor, ...]:
    """This rank's rows of the reduction of each of ``tensors``."""

    def run(tensors: Tensors) -> tuple[Tensors, Adjoint]:
        return _results(start_reduction(tensors, None, name, options)), adjoint

    def adjoint(grads: Tensors) -> Tensors:
        # As in Horovod: gradients are of the average over ranks. The sum is size() times the average.
        factor = options.before * options.after * (len(members_of(process_set)) if options.op is Sum else 1)
        given = [scaled(gradient, factor) for gradient in grads]
        grad_name = _of_gradient(name, "reducescatter.")
        return _results(start_gather(given, grad_name, options.group, is_group=True, background=False))

    return _apply(run, tensors)
