"""Makes a model tensor-parallel: a plan names the style of each layer.

    plan = {
        "embedding": Embedding(),
        "layers.*.attention": SharedInput(),
        "layers.*.attention.w[qkv]": Column(units=heads),
        "layers.*.attention.wo": Row(),
        "layers.*.feed_forward": SharedInput(),
        "layers.*.feed_forward.w[13]": Column(),
        "layers.*.feed_forward.w2": Row(),
        "layers.*.*_norm": Sequence(),
        "norm": Sequence(),
        "output": Column(vocabulary=True),
    }
    parallelize(model, plan, mesh.group("tp"), sequence_dim=1)

Names are patterns as in fnmatch; they are those of ``model.named_modules()``. One thread.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from byteps_py.errors import UsageError
from byteps_py.parallel.collectives import Group, size_of
from byteps_py.parallel.gradient_scaling import decide_together
from byteps_py.parallel.tensor.layers import KeepsGroup, ParallelLayer, enter, sum_gradients
from byteps_py.parallel.tensor.planned_layers import (
    Column,
    Embedding,
    Replicated,
    Row,
    Sequence,
    SharedInput,
    Style,
    plan_layers,
)
from byteps_py.parallel.tensor.shard import Shard
from byteps_py.parallel.tensor.whole_parameters import summed_parameters


def parallelize(
    model: nn.Module, plan: Mapping[str, Style], group: Group, *, sequence_dim: int | None = None
) -> nn.Module:
    """Change ``model`` in place and return it: each rank keeps its part of the parameters that the plan names.

    Args:
        model: with the same parameters on all ranks. Tied parameters stay tied if their layers are cut alike.
        plan: the style of each layer, by patterns of names. Of two patterns that match, the longer one counts.
        group: the tensor-parallel ranks; None or one rank: the model stays as it is.
        sequence_dim: of the tensors between layers. With it, the model is sequence-parallel: between regions of Column
            and Row, each rank has a part of the sequence. The embedding cuts it; see ``regions.collect_along`` for a
            model whose output is to be whole.

    Each parameter is cut, or stays whole; then its gradient is summed over the ranks where each uses it on its own
    heads, features or tokens: see Replicated. Raises UsageError if a pattern matches no layer, a style does not fit its
    layer, sizes can't be divided, or it is unclear how a parameter is used; then nothing has changed.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen = _choose(plan, modules)
    if size_of(group) == 1:
        return model
    planned = plan_layers(modules, chosen, group)
    summed = summed_parameters(modules, plan, chosen, planned, sequence_dim is not None)
    for name, style in {id(modules[name]): (name, style) for name, style in chosen.items()}.values():
        if isinstance(style, SharedInput):
            SharedInputRegion(name, group, sequence_dim).attach(modules[name])
    for module, names in summed:
        sum_gradients(module, names, group)
    for module in modules.values():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # its fast path in evaluation reads the whole weights of its layers
    made: dict[int, nn.Parameter] = {}
    for one in planned:
        layer = one.build(group, sequence_dim)
        for own, parameter in one.module.named_parameters(recurse=False):
            layer.register_parameter(own, made.setdefault(id(parameter), layer.get_parameter(own)))
        layer.train(one.module.training)
        for name, module in modules.items():
            if module is one.module:
                _replace(model, name, layer)
    decide_together(model.parameters(), [group])
    return model


def sharded_parameters(model: nn.Module) -> dict[str, Shard]:
    """The parameters of ``model`` that lie in parts on tensor-parallel ranks, by name."""
    return {
        f"{name}.{own}" if name else own: shard
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, ParallelLayer) and size_of(module.group) > 1
        for own, shard in module.sharded_parameters().items()
    }


def tensor_parallel_group(model: nn.Module) -> Group:
    """The ranks that ``parallelize`` has cut the layers of ``model`` for; None if it has cut none."""
    return next((one.group for one in model.modules() if isinstance(one, ParallelLayer)), None)


#: GPT-2's layer in transformers.
_CONV1D = (
    ": replace it by an nn.Linear, whose weight is the transposed one: linear.weight.copy_(conv.weight.T), and give "
    "its parts (Column(parts=3, units=heads) for c_attn)"
)


def _choose(plan: Mapping[str, Style], modules: Mapping[str, nn.Module]) -> dict[str, Style]:
    """The style of each layer, by name, in the order of the model."""
    parameters = [
        f"{name}.{own}" if name else own
        for name, module in modules.items()
        for own, _ in module.named_parameters(recurse=False)
    ]
    for pattern, style in plan.items():
        if not isinstance(style, Style):
            raise UsageError(
                f"the plan has {style!r} for {pattern!r}: use Column, Row, Embedding, SharedInput, Sequence or "
                "Replicated"
            )
        names = [*modules, *(parameters if isinstance(style, (Sequence, Replicated)) else ())]
        if not fnmatch.filter(names, pattern):
            raise UsageError(
                f"the plan names {pattern!r}, but the model has no such layer; it has {_names_text(modules)}"
            )
    chosen: dict[str, Style] = {}
    for name, module in modules.items():
        matching = [pattern for pattern in plan if fnmatch.fnmatchcase(name, pattern)]
        if matching:
            chosen[name] = style = plan[max(matching, key=len)]
            wanted = nn.Linear if isinstance(style, (Column, Row)) else nn.Embedding
            if isinstance(style, (Column, Row, Embedding)) and not isinstance(module, wanted):
                raise UsageError(
                    f"{name} is a {type(module).__module__}.{type(module).__name__}; the plan's {type(style).__name__} "
                    f"is for {wanted.__name__}" + (_CONV1D if type(module).__name__ == "Conv1D" else "")
                )
    return chosen


def _names_text(names: Iterable[str]) -> str:
    listed = [repr(name) for name in names if name]
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, layer)


# ---- the style SharedInput -----------------------------------------------------------------------------------------


#: Nodes of autograd of operations on each element, and on shapes: their results are the same on all ranks if their
#: inputs are.
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
