"""torch's GradScaler on a model in parts: whether a step is skipped is decided once, by all ranks of the mesh.

A GradScaler looks for infinities in this rank's gradients. Where these are parts of a model (tensor parallelism, stages
of a pipeline, owners of ``shard``), a rank could skip a step alone, and copies of other parameters would part ways. So
the first model in parts replaces the method with which torch.amp.GradScaler, and its subclasses, look for them: for an
optimizer that has parameters of such a model, the largest answer of its ranks counts. Other optimizers see no
difference. One thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

#: The groups that decide about each parameter, one for each dimension of the mesh. They live as long as the parameter:
#: a group that is kept beyond destroy_process_group keeps its threads, which can abort the process when it ends.
_GROUPS: WeakIdKeyDictionary = WeakIdKeyDictionary()
_METHOD = "_unscale_grads_"


def decide_together(parameters: Iterable[torch.Tensor], groups: Sequence[dist.ProcessGroup | None]) -> None:
    """The ranks of ``groups`` skip a step together, if a GradScaler is used. They call this with parameters of one
    model, and with the same groups."""
    given = {group for group in groups if group is not None and dist.get_world_size(group) > 1}
    if not given:
        return
    _agree_in(torch.amp.GradScaler)
    for parameter in parameters:
        _GROUPS[parameter] = given | _GROUPS.get(parameter, set())


def _agree_in(scaler: type[Any]) -> None:
    """Replace the method of this class, and of those derived from it, now and later. torch's ShardedGradScaler is not
    imported for that: its module keeps the default group of the time of its import."""
    method = vars(scaler).get(_METHOD)
    if method is not None and not hasattr(method, "__wrapped__"):
        setattr(scaler, _METHOD, _agreeing(method))
    for derived in scaler.__subclasses__():
        _agree_in(derived)
    if scaler is torch.amp.GradScaler:
        scaler.__init_subclass__ = classmethod(_agree_in)  # type: ignore[assignment]


def _agreeing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def unscale(scaler: Any, optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        return _agreed(optimizer, method(scaler, optimizer, *arguments, **named))

    return unscale


def _agreed(
    optimizer: torch.optim.Optimizer, found: dict[torch.device, torch.Tensor]
) -> dict[torch.device, torch.Tensor]:
    """``found``: by device, 1 if a gradient there is infinite or NaN. Returns it for all ranks."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    groups = {group for one in parameters for group in _GROUPS.get(one, ())}
    if not groups:
        return found
    device = next(iter(found), parameters[0].device)
    values = [value.to(device).reshape(1).float() for value in found.values()]
    largest = torch.cat(values).max() if values else torch.zeros((), device=device)
    for group in sorted(groups, key=_dimension):  # ranks with other parameters take them in the same order
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    if not found:  # of a rank without gradients
        return {device: largest}
    for each, value in found.items():
        value.copy_(largest.to(each).reshape(value.shape))
    return found


def _dimension(group: dist.ProcessGroup) -> tuple[int, int, list[int], str]:
    """Sorts groups by dimension, from inner to outer: the groups of one dimension of a mesh have one stride."""
    ranks = dist.get_process_group_ranks(group)
    return ranks[1] - ranks[0], len(ranks), ranks, group.group_name
