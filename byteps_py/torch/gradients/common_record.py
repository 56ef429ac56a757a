"""What all ranks have alike after a step of a shadowed optimizer, as JSON for rank 0's record (see shadow/record.py).

Most of it is the same in every step, and is made once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from byteps_py.torch.gradients.hosted_states import HostedStates


@dataclass(frozen=True, slots=True)
class ShadowedTensor:
    """A tensor of gradients, by its name: the parameters that it is of, with their names, and their states."""

    name: str
    param_names: Sequence[str]
    params: Sequence[torch.nn.Parameter]
    states: HostedStates


class CommonRecord:
    """Of one optimizer. The training thread calls."""

    def __init__(self) -> None:
        self._known: tuple[object, ...] = ()
        self._layout = ""

    def pack(
        self,
        tensors: Sequence[ShadowedTensor],
        groups: Sequence[Mapping[str, Any]],
        model: torch.nn.Module | None,
        calls: int = 0,
    ) -> bytes:
        """``calls``: of step(). ``model``: where parameters that share their memory have several names; None: they have
        one."""
        known = (model, [tensor.params for tensor in tensors], [len(group["params"]) for group in groups])
        if not self._known or not _is_same(known, self._known):
            self._known, self._layout = known, json.dumps(_layout(tensors, groups, model))[1:]
        said = {
            "parts": [[each.name, sum(each.states.sizes), each.states.last_step] for each in tensors],
            "steps": {each.name: _steps(each.states.steps) for each in tensors},
            "groups": [_plain(group) for group in groups],
            "calls": calls,
        }
        return f"{json.dumps(said)[:-1]}, {self._layout}".encode()


def _is_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """The same model, lists of parameters and sizes of param_groups. A tensor's list is made once and never changed."""
    alike = one[0] is other[0] and one[2] == other[2] and len(one[1]) == len(other[1])
    return alike and all(mine is theirs for mine, theirs in zip(one[1], other[1], strict=True))


def _layout(
    tensors: Sequence[ShadowedTensor], groups: Sequence[Mapping[str, Any]], model: torch.nn.Module | None
) -> dict[str, Any]:
    in_model: dict[torch.nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False) if model is not None else ():
        in_model.setdefault(param, []).append(name)
    params: dict[str, list[Any]] = {}
    places: dict[torch.nn.Parameter, int] = {}
    names: dict[str, list[str]] = {}
    for tensor in tensors:
        first = 0
        for name, param in zip(tensor.param_names, tensor.params, strict=True):
            params[name] = [tensor.name, first, list(param.shape), str(param.dtype)]
            first += param.numel()
            places[param] = len(places)
            if (all_names := in_model.get(param, [name])) != [name]:
                names[name] = all_names
    return {
        "params": params,
        "kinds": {tensor.name: list(tensor.states.names) for tensor in tensors},
        "members": [[places[param] for param in group["params"] if param in places] for group in groups],
        "names": names,
    }


def _steps(steps: Sequence[int]) -> int | list[int]:
    return steps[0] if steps and steps.count(steps[0]) == len(steps) else list(steps)


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(value) for name, value in group.items() if name != "params"}


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_number(each) for each in value]
    return value
