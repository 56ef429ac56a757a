"""An optimizer's state dict with the states of all parameters, from their owners, and back. Interchangeable with that
of the optimizer on one rank. Ranks call these functions together. One thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from byteps_py.errors import UsageError
from byteps_py.parallel.sharding.segments import NamedParameter


def gather_states(
    members: Sequence[NamedParameter],
    state: dict[Any, dict[str, Any]],
    ranks: Sequence[int],
    group: dist.ProcessGroup | None,
) -> list[dict[str, Any]]:
    """The states of each of ``members``, whole and on the CPU where an owner's are not this rank's own. ``ranks``: the
    global ranks of ``group``."""
    own: list[dict[str, Any] | None] = [
        {name: _described(value) for name, value in state.get(member.parameter, {}).items()}
        if member.piece.is_own
        else None
        for member in members
    ]
    if group is None:
        return [dict(state.get(member.parameter, {})) for member in members]
    described: list[Any] = [None] * len(ranks)
    dist.all_gather_object(described, own, group=group)
    result = []
    for place, member in enumerate(members):
        entries: dict[str, Any] = {}
        for name, value in described[member.owner][place].items():
            if not isinstance(value, _Described):
                entries[name] = value
                continue
            device = member.parameter.device
            if member.piece.is_own:
                whole = state[member.parameter][name]
                sent = whole.to(device).contiguous()
            else:
                whole = sent = torch.empty(value.shape, dtype=value.dtype, device=device)
            dist.broadcast(sent, ranks[member.owner], group=group)
            entries[name] = whole if member.piece.is_own else whole.cpu()
        result.append(entries)
    return result


def check_states(loaded: dict[str, Any], groups: Sequence[dict[str, Any]], names: dict[int, str]) -> dict[str, Any]:
    """Raise UsageError unless ``loaded`` fits an optimizer with these parameter groups. ``names``: of parameters, by
    id. Returns the state of each parameter, by its name."""
    if not isinstance(loaded, dict) or not {"state", "param_groups"} <= loaded.keys():
        raise UsageError("a state dict of an optimizer has 'state' and 'param_groups'")
    theirs = [len(group["params"]) for group in loaded["param_groups"]]
    ours = [len(group["params"]) for group in groups]
    if theirs != ours:
        raise UsageError(
            f"the state dict is of an optimizer with parameter groups of {theirs} parameters, this one has {ours}: it "
            "is of another model. Nothing was loaded"
        )
    places = [place for group in loaded["param_groups"] for place in group["params"]]
    parameters = [parameter for group in groups for parameter in group["params"]]
    found = {}
    for place, parameter in zip(places, parameters, strict=True):
        entries = loaded["state"].get(place, {})
        for name, value in entries.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape and _is_like(name):
                raise UsageError(
                    f"{name} of {names[id(parameter)]} has the shape {tuple(value.shape)} in the state dict, and the "
                    f"parameter {tuple(parameter.shape)}: it is of another model. Nothing was loaded"
                )
        found[names[id(parameter)]] = entries
    return found


def _is_like(name: str) -> bool:
    """Whether a state has its parameter's shape in torch's element-wise optimizers."""
    return name.startswith(("exp_avg", "max_exp_avg", "momentum_buffer", "square_avg", "grad_avg", "sum", "acc_delta"))


class _Described:
    """The shape and dtype of a tensor that is sent."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _described(value: Any) -> Any:
    return _Described(value) if isinstance(value, torch.Tensor) else value
