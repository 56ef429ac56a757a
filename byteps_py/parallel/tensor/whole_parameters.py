"""Finds the parameters that stay whole on each rank and get partial gradients: these gradients are summed over the
ranks.

Where all ranks compute the same, a whole parameter's gradient is right on each rank. Where each rank computes its own
tokens (sequence parallelism), heads or features (between a Column and a Row), it is a part of the sum. A
parameter of which plan and sizes don't tell this is refused by name, before anything changes. One thread.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

from byteps_py.errors import UsageError
from byteps_py.parallel.tensor.layers import ParallelLayer, SummedGradients
from byteps_py.parallel.tensor.planned_layers import Column, PlannedLayer, Replicated, Row, Sequence, SharedInput, Style
from byteps_py.parallel.tensor.shard import Blocks

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
