"""The loss of sequences that are on several ranks: a mean over all tokens that count, wherever they are.

Means over each rank's tokens cannot be averaged: masked targets make ranks count different numbers. One thread.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist

from byteps_py.errors import UsageError
from byteps_py.parallel.context.exchange import place_in


def token_mean_loss(
    loss_sum: torch.Tensor,
    token_count: torch.Tensor | float,
    group: dist.ProcessGroup | None,
    *,
    reduction: Literal["sum", "mean"] = "sum",
) -> torch.Tensor:
    """The sum of all ranks' ``loss_sum`` by the sum of their ``token_count``, on all ranks. One all-reduce of two
    numbers. All ranks of the group call it alike.

        loss_sum = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        loss = token_mean_loss(loss_sum, (targets != -100).sum(), group)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)  # the sum: not the mean

    Args:
        loss_sum: one number, the sum over this rank's tokens that count.
        token_count: how many count here. Masked targets do not; it may be 0 on some ranks.
        group: the ranks that the tokens are spread over, and that gradients are reduced over: those of context
            parallelism, or of data and context parallelism together. None: this rank is alone.
        reduction: of the parameters' gradients over ``group``, by the caller. After "sum", they are those of the global
            mean. Give "mean" if the caller, or a wrapper as DistributedDataParallel or FSDP, takes the mean over the
            group's ranks: gradients are then multiplied by their number.

    Returns one number with the dtype of ``loss_sum``. Without any token that counts, it and its gradients are 0.

    Raises UsageError if ``loss_sum`` is not one number, or the count is negative.
    """
    _, size = place_in(group)
    if loss_sum.numel() != 1 or not loss_sum.is_floating_point():
        raise UsageError(
            f"loss_sum is {loss_sum.dtype} of the shape {list(loss_sum.shape)}: give the sum over this rank's tokens, "
            "one floating-point number (reduction='sum')"
        )
    if reduction not in ("sum", "mean"):
        raise UsageError(f"reduction={reduction!r}: give 'sum' or 'mean', as gradients are reduced")
    count = torch.as_tensor(token_count, dtype=torch.float64, device=loss_sum.device)
    if count.numel() != 1 or (not count.is_cuda and float(count) < 0):
        raise UsageError(f"token_count is {token_count}: give one number, 0 or more")
    loss: torch.Tensor = _GlobalMean.apply(  # type: ignore[no-untyped-call]
        loss_sum.reshape(()), count.reshape(()), group if size > 1 else None, size if reduction == "mean" else 1
    )
    return loss


class _GlobalMean(torch.autograd.Function):
    """All-reduce forwards; backwards each rank's sum has the gradient 1 / count, without communication."""

    @staticmethod
    def forward(
        ctx: Any, loss_sum: torch.Tensor, count: torch.Tensor, group: dist.ProcessGroup | None, factor: int
    ) -> torch.Tensor:
        both = torch.stack([loss_sum.to(torch.float64), count])
        if group is not None:
            dist.all_reduce(both, group=group)
        total, tokens = both
        share = torch.where(tokens > 0, 1 / tokens.clamp(min=1e-300), 0.0)
        ctx.share = share * factor
        mean: torch.Tensor = (total * share).to(loss_sum.dtype)
        return mean

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (gradients[0] * ctx.share).to(gradients[0].dtype), None, None, None
