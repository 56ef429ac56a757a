"""torch's GradScaler on a model in parts: whether a step is skipped is decided once, by all ranks of the mesh.

A GradScaler looks for infinities in this rank's gradients. Where these are parts of a model (tensor parallelism, stages
of a pipeline, owners of ``shard``), a rank could skip a step alone, and copies of other parameters would part ways. So
the first model in parts replaces the method with which torch.amp.GradScaler, and its subclasses, look for them: for an
optimizer that has parameters of such a model, the largest answer of its ranks counts. Other optimizers see no
difference. One thread.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

_Ranks = tuple[int, ...]
#: The ranks that decide about each parameter, once for each dimension of the mesh.
_RANKS: WeakIdKeyDictionary = WeakIdKeyDictionary()
#: The group of these ranks that was given last: all of them know the same one, independent of the parameters that each
#: has.
_GROUPS: dict[_Ranks, dist.ProcessGroup] = {}
_METHOD = "_unscale_grads_"
#: A group that is still there when Python has ended keeps its threads, which can abort the process.
atexit.register(_GROUPS.clear)


def decide_together(parameters: Iterable[torch.Tensor], groups: Sequence[dist.ProcessGroup | None]) -> None:
    """The ranks of ``groups`` skip a step together, if a GradScaler is used. They call this with parameters of one
    model, and with the same groups."""
    given: list[_Ranks] = []
    for group in groups:
        if group is not None and dist.get_world_size(group) > 1:
            given.append(tuple(dist.get_process_group_ranks(group)))
            _GROUPS[given[-1]] = group
    if not given:
        return
    _agree_in(torch.amp.GradScaler)
    for parameter in parameters:
        _RANKS[parameter] = {*_RANKS.get(parameter, ()), *given}


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
    members = {ranks for one in parameters for ranks in _RANKS.get(one, ())}
    if not members:
        return found
    device = next(iter(found), parameters[0].device)
    values = [value.to(device).reshape(1).float() for value in found.values()]
    largest = torch.cat(values).max() if values else torch.zeros((), device=device)
    for ranks in sorted(members, key=_dimension):  # ranks with other parameters take them in the same order
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=_GROUPS[ranks])
    if not found:  # of a rank without gradients
        return {device: largest}
    for each, value in found.items():
        value.copy_(largest.to(each).reshape(value.shape))
    return found


def _dimension(ranks: _Ranks) -> tuple[int, int, _Ranks]:
    """Sorts groups by dimension, from inner to outer: the groups of one dimension of a mesh have one stride."""
    return ranks[1] - ranks[0], len(ranks), ranks
