"""Whether a layer is what its parallel form takes it for: a plain nn.Linear or nn.Embedding.

What subclasses, hooks and decorations add would be lost without a word. One thread.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrize

from byteps_py.errors import UsageError

_OWN_PARAMETERS = {nn.Linear: {"weight", "bias"}, nn.Embedding: {"weight"}}


def check_plain(name: str, module: nn.Module) -> None:
    """Raises UsageError if the layer ``name`` does more than nn.Linear or nn.Embedding."""
    kind = next(one for one in _OWN_PARAMETERS if isinstance(module, one))
    added = _added(module, kind)
    if added is not None:
        raise UsageError(
            f"{name} {added}, which the parallel layer would not have: leave it whole (not in the plan), or move it to "
            f"a module around a plain nn.{kind.__name__}"
        )


def _added(module: nn.Module, kind: type[nn.Module]) -> str | None:
    if parametrize.is_parametrized(module):
        names = [
            name for name, _ in module.named_modules() if name.count(".") == 1 and name.startswith("parametrizations.")
        ]
        return f"has parametrizations ({', '.join(name.partition('.')[2] for name in names)})"
    if type(module) is not kind:
        return f"is a {type(module).__module__}.{type(module).__qualname__}, a subclass of nn.{kind.__name__}"
    if "forward" in module.__dict__:
        return "has a forward() of its own"
    hooks = sorted(key for key, value in module.__dict__.items() if key.endswith(("_hooks", "_pre_hooks")) and value)
    if hooks:
        return f"has hooks ({', '.join(one.strip('_') for one in hooks)})"
    more = [*(one for one, _ in module.named_parameters(recurse=False) if one not in _OWN_PARAMETERS[kind])]
    more += [*(one for one, _ in module.named_buffers(recurse=False)), *(one for one, _ in module.named_children())]
    if more or "weight" not in module._parameters:
        return f"has parameters, buffers or modules of its own ({', '.join(more) or 'no weight'})"
    for own, parameter in module.named_parameters(recurse=False):
        if type(parameter.data) is not torch.Tensor or type(parameter) is not nn.Parameter:
            found = type(parameter.data if type(parameter) is nn.Parameter else parameter).__name__
            return f"has a {own} that is a {found} (call parallelize before fully_shard or quantization)"
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"has hooks of its {own} (call parallelize before wrappers and hooks)"
    return None
