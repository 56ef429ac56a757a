"""The names of an optimizer's parameters, as a script gives them. Any thread."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from byteps_py.errors import UsageError

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


def checked_names(
    optimizer: torch.optim.Optimizer, named_parameters: NamedParameters | None
) -> dict[torch.nn.Parameter, str]:
    """The name of each parameter, in the given order; numbers if ``named_parameters`` is empty. Raises UsageError."""
    named = list(named_parameters) if named_parameters is not None else []
    if any(not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)) for pair in named):
        raise UsageError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    seen: set[str] = set()
    duplicates = {name for name, _ in named if name in seen or seen.add(name)}  # type: ignore[func-returns-value]
    if duplicates:
        raise UsageError(
            "Parameter names in named_parameters must be unique. Found duplicates: " + ", ".join(sorted(duplicates))
        )
    if not named:
        return {
            param: f"push_pull.parameter.{g}.{i}"
            for g, group in enumerate(optimizer.param_groups)
            for i, param in enumerate(group["params"])
        }
    names = {param: name for name, param in reversed(named)}
    unnamed = [
        f"{tuple(param.shape)} at position {i} of group {g}"
        for g, group in enumerate(optimizer.param_groups)
        for i, param in enumerate(group["params"])
        if param not in names
    ]
    if unnamed:
        raise UsageError(
            "named_parameters was specified, but one or more model parameters were not named. Parameters of shape: "
            + ", ".join(unnamed)
        )
    return dict(reversed(names.items()))
