"""The cross-entropy of logits of which each rank has the columns of some tokens (Megatron-LM, section 3).

Only three numbers a token are communicated, not the logits. With label smoothing (as torch.nn.functional.cross_entropy
has it), targets that are ignored, and the z-loss of PaLM (section 5): ``z_loss`` · (log Σ exp)².
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from byteps_py.errors import UsageError
from byteps_py.parallel.collectives import Group, all_reduced, rank_in, size_of
from byteps_py.parallel.tensor.layers import check_ids
from byteps_py.parallel.tensor.shard import padded_vocabulary


@dataclass(frozen=True, slots=True)
class CrossEntropyOptions:
    """``ignore_index``: targets that do not count. ``label_smoothing``: in [0, 1]. ``z_loss``: its weight, from 0."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise UsageError(f"label_smoothing={self.label_smoothing} must be from 0 to 1")
        if self.z_loss < 0.0:
            raise UsageError(f"z_loss={self.z_loss} must not be negative")


def parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: Group,
    vocabulary: int,
    *,
    reduction: str = "mean",
    options: CrossEntropyOptions | None = None,
) -> torch.Tensor:
    """The loss, the same on all ranks.

        loss = parallel_cross_entropy(output(hidden), targets, group, vocabulary=50257)

    Args:
        logits: (…, local), floating point: the columns of this rank, as those of a ColumnParallelLinear; columns from
            ``vocabulary`` on are padding. Types of 16 bits are computed in float32.
        targets: (…), integers: the tokens, or ``ignore_index``.
        group: the tensor-parallel ranks; None: the logits are whole.
        vocabulary: the number of tokens.
        reduction: "none" (a loss for each target, 0 if it is ignored), "sum", or "mean" over those that count; nan if
            none does, with gradients of 0, as in torch.

    Returns float32, or float64 for logits of float64. Raises UsageError if shapes do not match, a target is no token,
    or each rank has the logits of all tokens already (``gather_output``).
    """
    chosen = options or CrossEntropyOptions()
    if reduction not in ("none", "sum", "mean"):
        raise UsageError(f"reduction={reduction!r} must be 'none', 'sum' or 'mean'")
    if logits.shape[:-1] != targets.shape:
        raise UsageError(
            f"logits of shape {tuple(logits.shape)} need targets of shape {tuple(logits.shape[:-1])}, not "
            f"{tuple(targets.shape)}"
        )
    if logits.shape[-1] * size_of(group) < vocabulary:
        raise UsageError(
            f"{size_of(group)} ranks with {logits.shape[-1]} logits each have less than the vocabulary of {vocabulary}"
            ": give the logits of a ColumnParallelLinear, not gathered or cut again"
        )
    _check_not_gathered(logits, group, vocabulary)
    counted = targets != chosen.ignore_index
    check_ids(targets.masked_fill(~counted, 0), vocabulary)
    losses: torch.Tensor = _CrossEntropy.apply(logits, targets, counted, group, vocabulary, chosen)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / counted.sum()


def _check_not_gathered(logits: torch.Tensor, group: Group, vocabulary: int) -> None:
    """Raises UsageError if each rank has all logits: gradients would be those of other ranks' columns, too."""
    ranks, columns = size_of(group), logits.shape[-1]
    if ranks == 1 or columns < vocabulary or logits.is_meta:
        return
    # A small vocabulary may lie on rank 0 alone, with padding to as many columns: then other ranks have other logits.
    if columns > vocabulary or columns == padded_vocabulary(vocabulary, ranks) // ranks:
        own = logits.detach().double()
        sums = torch.stack([own.sum(), own.abs().sum(), (own * own).sum(), (own * own[..., :1]).sum()]).nan_to_num()
        if torch.equal(sums, torch.zeros_like(sums)):
            sums[0] = rank_in(group)
        greatest = all_reduced(sums, group, dist.ReduceOp.MAX)
        if not torch.equal(greatest, all_reduced(sums, group, dist.ReduceOp.MIN)):
            return
    raise UsageError(
        f"each of the {ranks} ranks gives all {vocabulary} logits (shape {tuple(logits.shape)}): their gradients would "
        "be wrong. Give the logits of Column(vocabulary=True) without gather_output=True, or gathered logits to "
        "torch.nn.functional.cross_entropy"
    )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        counted: torch.Tensor,
        group: Group,
        vocabulary: int,
        options: CrossEntropyOptions,
    ) -> torch.Tensor:
        precise = logits if logits.dtype == torch.float64 else logits.float()
        columns = logits.shape[-1]
        first = rank_in(group) * columns
        own = max(0, min(columns, vocabulary - first))  # columns that are no padding
        if own:
            greatest = precise[..., :own].amax(-1)
        else:
            greatest = precise.new_full(targets.shape, -torch.inf)
        greatest = all_reduced(greatest, group, dist.ReduceOp.MAX)
        shifted = precise - greatest.unsqueeze(-1)
        shifted[..., own:] = -torch.inf
        local = targets - first
        is_here = counted & (local >= 0) & (local < own)
        index = local.masked_fill(~is_here, 0).unsqueeze(-1)
        chosen = shifted.gather(-1, index).squeeze(-1).masked_fill(~is_here, 0.0)
        exponentials = shifted.exp()
        sums = [exponentials.sum(-1), chosen]
        if options.label_smoothing:
            sums.append(shifted[..., :own].sum(-1))
        whole = all_reduced(torch.stack(sums), group)
        log_sum = whole[0].log()
        losses = log_sum - whole[1]
        smoothing = options.label_smoothing
        if smoothing:
            losses = (1.0 - smoothing) * losses + smoothing * (log_sum - whole[2] / vocabulary)
        log_z = log_sum + greatest
        if options.z_loss:
            losses = losses + options.z_loss * log_z.square()
        ctx.save_for_backward(exponentials.div_(whole[0].unsqueeze(-1)), is_here, index, counted, log_z)
        ctx.options, ctx.own, ctx.vocabulary, ctx.dtype = options, own, vocabulary, logits.dtype
        return losses.masked_fill(~counted, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        probabilities, is_here, index, counted, log_z = ctx.saved_tensors
        options = ctx.options
        result = probabilities.clone()
        if options.z_loss:
            result.mul_((1.0 + 2.0 * options.z_loss * log_z).unsqueeze(-1))
        if options.label_smoothing:
            result[..., : ctx.own] -= options.label_smoothing / ctx.vocabulary
        picked = is_here.unsqueeze(-1).to(result) * (1.0 - options.label_smoothing)
        result.scatter_add_(-1, index, -picked)
        # A mean over no target has an infinite gradient here; that of an ignored target is 0 all the same, as in torch.
        result.mul_(gradient.masked_fill(~counted, 0.0).unsqueeze(-1))
        return result.to(ctx.dtype), None, None, None, None, None
