"""The style SharedInput: a module's input is communicated once for all the Columns inside it.

Backward, the input's gradient is summed over the ranks, each of which has the part of its own features. A use of the
input that all ranks share, as in ``x + f(x)``, would be summed with it: it is refused. One thread.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from byteps_py.errors import UsageError
from byteps_py.parallel.tensor.layers import KeepsGroup, enter
from byteps_py.parallel.tensor.regions import Group, size_of

#: Nodes of autograd of operations on each element, and on shapes: what they do is the same on all ranks if their inputs
#: are.
_SAME_ON_ALL_RANKS = re.compile(
    "(Add|Sub|Rsub|Mul|Div|Neg|Pow|Rsqrt|Sqrt|Exp|Mean|Sum|Abs|Where|MaskedFill|Silu|Gelu|Relu|Sigmoid|Tanh|Softplus|"
    "NativeDropout|NativeLayerNorm|FusedRmsNorm|View|UnsafeView|ReshapeAlias|Alias|AsStrided|Transpose|T|Permute|Clone|"
    r"ToCopy|Cat|Stack|Slice|Select|Split|SplitWithSizes|Unsqueeze|Squeeze|Expand|Unbind)Backward\d*"
)


class SharedInputRegion(KeepsGroup):
    """The hooks of one module. ``name``: in the model."""

    def __init__(self, name: str, group: Group, sequence_dim: int | None) -> None:
        self.name, self.group, self.sequence_dim = name, group, sequence_dim
        self._is_checked = False
        self._entered: Any = None  # the node of autograd where the input enters, during the first forward pass

    def attach(self, module: nn.Module) -> None:
        """Have ``module`` call the hooks."""
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, arguments: tuple[Any, ...], others: dict[str, Any]) -> Any:
        if not arguments or not isinstance(arguments[0], torch.Tensor):
            raise UsageError(
                f"{type(module).__name__} is in the plan as SharedInput: call it with its input, a tensor, as the "
                "first positional argument"
            )
        entered = enter(arguments[0], self.group, self.sequence_dim)
        if not self._is_checked and not torch.compiler.is_compiling():
            self._entered = entered.grad_fn
        return (entered, *arguments[1:]), others

    def _after(self, module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        entered, self._entered = self._entered, None
        if entered is None:  # no gradients are computed, or it was checked
            return
        used_by = _use_on_all_ranks(_nodes_of(result), entered)
        if used_by is not None:
            ranks = size_of(self.group)
            raise UsageError(
                f"{self.name} is in the plan as SharedInput, but its input also reaches its output beside its layers "
                f"(by {used_by}, as in x + f(x)): the gradient of that path would be summed over the {ranks} "
                f"tensor-parallel ranks, and be {ranks} times as large. Add the input outside {self.name}, or take "
                "SharedInput out of the plan: then each Column communicates its own input"
            )
        self._is_checked = True


def _nodes_of(result: Any) -> list[Any]:
    if isinstance(result, torch.Tensor):
        return [] if result.grad_fn is None else [result.grad_fn]
    if isinstance(result, dict):
        result = list(result.values())
    return [node for one in result for node in _nodes_of(one)] if isinstance(result, list | tuple) else []


def _use_on_all_ranks(nodes: list[Any], entered: Any) -> str | None:
    """The operation by which ``entered`` reaches one of ``nodes`` through operations that are the same on all ranks;
    None: there is no such path."""
    if any(node is entered for node in nodes):
        return "the output itself"
    waiting, seen = list(nodes), set(nodes)
    while waiting:
        node = waiting.pop()
        if _SAME_ON_ALL_RANKS.fullmatch(node.name()) is None:
            continue
        for before, _ in node.next_functions:
            if before is entered:
                return str(node.name())
            if before is not None and before not in seen:
                seen.add(before)
                waiting.append(before)
    return None
