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

Names are patterns as in fnmatch; they are those of ``model.named_modules()``.

Parameters that stay whole on each rank may get partial gradients, which are then summed over the ranks. Where all ranks
compute the same, a whole parameter's gradient is right on each rank. Where each rank computes its own tokens (sequence
parallelism), heads or features (between a Column and a Row), it is a part of the sum. A parameter of which plan and
sizes don't tell this is refused by name, before anything changes. One thread.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

from byteps_py.errors import UsageError
from byteps_py.parallel.collectives import Group, size_of
from byteps_py.parallel.gradient_scaling import decide_together
from byteps_py.parallel.tensor.layers import KeepsGroup, ParallelLayer, SummedGradients, enter, sum_gradients
from byteps_py.parallel.tensor.planned_layers import (
    Column,
    Embedding,
    PlannedLayer,
    Replicated,
    Row,
    Sequence,
    SharedInput,
    Style,
    plan_layers,
)
from byteps_py.parallel.tensor.shard import Blocks, Shard


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


#: Names of norms of queries and keys.
_QUERY_OR_KEY = re.compile(r"(^|_)(q|k|query|key)(_|$)|^[qk](norm|_?ln|_?layernorm)")


def summed_parameters(
    modules: Mapping[str, nn.Module],
    plan: Mapping[str, Style],
    chosen: Mapping[str, Style],
    planned: list[PlannedLayer],
    is_sequence_parallel: bool,
) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """The modules and names of the parameters of their own that are to be summed. Raises UsageError for parameters that
    can't be right. ``chosen``: the styles of the modules; ``planned``: the layers that are cut."""
    place = _Place(modules, planned, [name for name, style in chosen.items() if isinstance(style, SharedInput)])
    seen = {id(one.module) for one in planned}
    # An earlier call, or the model itself, has taken care of these.
    seen |= {id(module) for module in modules.values() if isinstance(module, (ParallelLayer, SummedGradients))}
    found = []
    for name, module in modules.items():
        if id(module) in seen:
            continue
        seen.add(id(module))
        names = []
        for own, parameter in module.named_parameters(recurse=False):
            full = f"{name}.{own}" if name else own
            style = _style(plan, name, full)
            if isinstance(style, Replicated):
                is_summed = style.sum_gradients
            elif place.is_over_all_heads(name, parameter):
                raise UsageError(
                    f"{full} is for all heads together, but each rank has some of them: norm each head by itself (a "
                    f"weight of the head's size), or gather before it; if all ranks use it alike, {_remedy(name)}"
                )
            elif is_sequence_parallel:
                if not isinstance(style, Sequence) and place.region(name) is None:
                    raise UsageError(
                        f"{full} has no style in the plan, and with sequence_dim its gradient would be that of a part "
                        f"of the sequence. Give {name or own!r} Sequence() if it treats each token alone, "
                        "Replicated(sum_gradients=True) if each rank uses it on tokens or heads of its own, "
                        "Replicated(sum_gradients=False) if all ranks use it on the same values"
                    )
                if isinstance(style, Sequence) and isinstance(module, (_NormBase, nn.GroupNorm)):
                    raise UsageError(
                        f"{name} is a {type(module).__name__}, whose statistics are over many tokens: Sequence() is "
                        "for layers that treat each token alone, such as LayerNorm"
                    )
                is_summed = True
            else:
                is_summed = place.is_partial(name, full, module, parameter)
            if is_summed:
                _check_forward(modules, name, full, module)
                names.append(own)
        if names:
            found.append((module, tuple(names)))
    return found


def _style(plan: Mapping[str, Style], name: str, full: str) -> Style | None:
    """The style of a whole parameter: by the longest pattern that matches it or its module."""
    matching = [
        pattern
        for pattern, style in plan.items()
        if isinstance(style, (Sequence, Replicated))
        and (fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(full, pattern))
    ]
    return plan[max(matching, key=len)] if matching else None


def _check_forward(modules: Mapping[str, nn.Module], name: str, full: str, module: nn.Module) -> None:
    """Raises UsageError if the module's forward() is not where the parameter is read: there its gradient is summed."""
    kind = type(module)
    around = modules.get(name.rpartition(".")[0])
    reason = None
    if kind.forward is nn.Module.forward:
        reason = f"a {kind.__name__} has no forward()"
    elif "forward" in module.__dict__:
        reason = f"{name} has a forward() of its own"
    elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) or isinstance(around, nn.MultiheadAttention):
        reason = f"{name} is (in) a {kind.__name__}, which reads parameters in its own way"
    elif parametrize.is_parametrized(module) or isinstance(module, parametrize.ParametrizationList):
        reason = f"{name} has parametrizations"
    if reason is not None:
        raise UsageError(
            f"the gradient of {full} would have to be summed over the tensor-parallel ranks, but {reason}: make it a "
            "parameter of the module whose forward() uses it, or use copy_to_ranks(parameter, group) there, with "
            "Replicated(sum_gradients=False)"
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a whole parameter in the model, beside the layers that are cut."""

    modules: Mapping[str, nn.Module]
    planned: list[PlannedLayer]
    regions: list[str]

    def region(self, name: str) -> str | None:
        """The SharedInput that ``name`` is, or lies in."""
        return next((one for one in self.regions if name == one or not one or name.startswith(f"{one}.")), None)

    def is_partial(self, name: str, full: str, module: nn.Module, parameter: nn.Parameter) -> bool:
        """Without sequence parallelism: whether its gradient is a part of the sum. Raises UsageError if unclear."""
        if parameter.numel() == 1 and self._is_beside_logits(name):
            raise UsageError(_unclear(full, name))
        scope = next((one for one in _scopes(name) if any(self._below(one))), None)
        region = self.region(name)
        if scope is None and region is None:
            return False
        if scope is not None and type(self.modules[scope]) is nn.Sequential and scope != name:
            return self._is_open(scope, name)
        if region is not None:
            layers = list(self._below(region))
        else:
            prefix = f"{scope}." if scope else ""
            layers = [one for one in self._below(scope or "") if "." not in one.name.removeprefix(prefix)]
        columns = [one for one in layers if isinstance(one.style, Column)]
        if not layers:
            return False
        widths = {one.module.in_features for one in columns if isinstance(one.module, nn.Linear)}
        widths |= {one.module.out_features for one in layers if _is_row(one) and isinstance(one.module, nn.Linear)}
        blocks = [_blocks(one) for one in columns]
        heads = {one.size for one in blocks if one.size > 1}
        outputs = {max(one.counts) * one.size for one in blocks}
        if isinstance(module, nn.Linear):
            is_key = module.in_features in widths and any(module.out_features % size == 0 for size in heads)
            if is_key and module.out_features < max(max(one.counts) * one.size for one in blocks if one.size > 1):
                if region is not None:
                    return True
                raise UsageError(
                    f"{full} stays whole beside layers that are cut into heads: if it computes keys or values for each "
                    f"rank's own heads, give {name} Column(units=kv_heads), also for fewer heads than ranks; if not, "
                    f"{_remedy(name)}"
                )
            if region is None and module.in_features in widths:
                return False
            raise UsageError(_unclear(full, name))
        if region is None and isinstance(module, nn.MultiheadAttention) and module.embed_dim in widths:
            return False
        length = parameter.shape[-1] if parameter.dim() else 1
        if length in heads and parameter.dim() == 1 and _QUERY_OR_KEY.search(name.rpartition(".")[2].lower()):
            return True
        if length in widths and length not in heads and parameter.numel() > 1:
            return False
        if parameter.dim() == 1 and length > 1 and length not in widths:
            locals_ = [one.shard.local for one in columns]
            if length in heads or (not heads and length not in outputs and any(one % length == 0 for one in locals_)):
                return True
        raise UsageError(_unclear(full, name))

    def _below(self, scope: str) -> Iterator[PlannedLayer]:
        """The layers in the module ``scope`` between which ranks compute on their own."""
        for one in self.planned:
            style = one.style
            is_inner = isinstance(style, Row) or (
                isinstance(style, Column) and not style.vocabulary and not style.gather_output
            )
            if is_inner and (not scope or one.name.startswith(f"{scope}.")):
                yield one

    def is_over_all_heads(self, name: str, parameter: nn.Parameter) -> bool:
        """True if the parameter is of a norm of queries or keys, as that of OLMo 2, over features of which each rank
        has some."""
        parent, _, own = name.rpartition(".")
        if not parameter.dim() or not _QUERY_OR_KEY.search(own.lower()):
            return False
        return any(
            one.name.rpartition(".")[0] == parent
            and isinstance(one.style, Column)
            and one.shard.local < one.shard.length == parameter.shape[-1]
            and _blocks(one).size != parameter.shape[-1]
            for one in self._below(parent)
        )

    def _is_beside_logits(self, name: str) -> bool:
        """True if an output layer, of whose logits each rank has some, is in the module ``name`` or beside it."""
        outputs = (one for one in self.planned if isinstance(one.style, Column) and one.style.vocabulary)
        return any(
            one.name.rpartition(".")[0] in (name, name.rpartition(".")[0])
            for one in outputs
            if isinstance(one.style, Column) and not one.style.gather_output
        )

    def _is_open(self, scope: str, name: str) -> bool:
        """True if ``name`` lies behind a Column and before its Row in the nn.Sequential ``scope``."""
        before = list(self.modules).index(name)
        order = {one: index for index, one in enumerate(self.modules)}
        earlier = [one for one in self._below(scope) if order[one.name] < before]
        return bool(earlier) and isinstance(max(earlier, key=lambda one: order[one.name]).style, Column)


def _scopes(name: str) -> Iterator[str]:
    """The name itself, and those of the modules around it, outwards."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


def _is_row(layer: PlannedLayer) -> bool:
    return isinstance(layer.style, Row)


def _blocks(layer: PlannedLayer) -> Blocks:
    style, module = layer.style, layer.module
    if not isinstance(style, Column) or not isinstance(module, nn.Linear):
        return Blocks((1,), 1)
    return Blocks.of(module.out_features, style.units, style.parts)


def _remedy(name: str) -> str:
    return f"give {name} Replicated(sum_gradients=False)"


def _unclear(full: str, name: str) -> str:
    target = name if name.count(".") >= full.count(".") - 1 and name else full
    return (
        f"{full} stays whole on each rank, beside layers that are cut. If each rank uses it on heads or features of "
        f"its own, its gradient has to be summed: give {target!r} Replicated(sum_gradients=True) in the plan; if all "
        f"ranks use it on the same values, Replicated(sum_gradients=False). A parameter's own name, {full!r}, will do"
    )
