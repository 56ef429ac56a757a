"""The changes that a plan makes to each linear layer and embedding: they are decided, or refused, for the whole model
before anything changes. ``Column`` and the other styles describe the change of a layer; parallel_plan.py carries it
out.

A fused linear layer (q, k and v in one, gate and up in one) has its parts one behind the other. Cut by rows like a
plain one, the first rank gets all of the first part, and all shapes still fit: only numbers are wrong. One thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence as Counts
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize

from byteps_py.errors import UsageError
from byteps_py.parallel.collectives import Group, rank_in, size_of
from byteps_py.parallel.tensor.layers import (
    ColumnParallelLinear,
    ParallelLayer,
    RowParallelLinear,
    VocabularyParallelEmbedding,
)
from byteps_py.parallel.tensor.shard import Blocks, Shard, vocabulary_shard


@dataclass(frozen=True, slots=True)
class Column:
    """A linear layer of which each rank computes some of the output features.

    Attributes:
        units: the output features are so many equal blocks that stay whole, as attention heads. The ranks must divide
            them. Fewer key and value heads than ranks are held by several ranks each, which sum their gradients.
        vocabulary: the output features are tokens, and are padded.
        gather_output: all ranks get all output features.
        parts: of a fused layer, whose outputs lie one behind the other: each part is cut by itself. A number of equal
            parts (``units`` are those of each part), or the sizes of the parts: their features, or their numbers of
            heads, which then stay whole. 1: the layer is not fused, or has its parts together for each unit.

    >>> gate_and_up = Column(parts=2)
    >>> gpt2_attention = Column(parts=3, units=12)  # q, k and v, of 12 heads each
    >>> phi3_attention = Column(parts=(32, 8, 8))  # q of 32 heads, k and v of 8 heads
    >>> megatron_attention = Column(parts=1, units=8)  # q, k and v of the first key head, then those of the second, …
    """

    units: int | None = None
    vocabulary: bool = False
    gather_output: bool = False
    parts: int | Counts[int] | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A linear layer for which each rank has some of the input features, as behind a Column. ``parts``: as those of a
    Column, if the input is the output of several Columns, one behind the other."""

    parts: int | Counts[int] | None = None


@dataclass(frozen=True, slots=True)
class Embedding:
    """An embedding of which each rank has the rows of some tokens."""


@dataclass(frozen=True, slots=True)
class SharedInput:
    """A module whose first argument goes to several Columns inside it, and nowhere else: it is communicated once for
    all of them. ``x + f(x)`` belongs outside: the first training step refuses it."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """A layer that treats each token alone, such as a norm, or a parameter by its own name. With sequence parallelism
    it gets a part of the sequence; without, it is one that the plan does not name."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """A layer, or a parameter by its own name, that stays whole on each rank.

    ``sum_gradients``: each rank uses it on heads, features or tokens of its own, as a norm of queries; False: all ranks
    use it on the same values.
    """

    sum_gradients: bool


Style = Column | Row | Embedding | SharedInput | Sequence | Replicated


_OWN_PARAMETERS = {nn.Linear: {"weight", "bias"}, nn.Embedding: {"weight"}}


@dataclass(frozen=True, slots=True)
class PlannedLayer:
    """A layer that is to be cut. ``name``: the first one that it has in the model. ``is_inside``: in a SharedInput."""

    name: str
    module: nn.Linear | nn.Embedding
    style: Column | Row | Embedding
    shard: Shard
    is_inside: bool

    def shards(self) -> dict[str, Shard | None]:
        """The cut of each parameter; None: it stays whole."""
        is_row = isinstance(self.style, Row)
        return {
            own: None if is_row and own == "bias" else self.shard
            for own, _ in self.module.named_parameters(recurse=False)
        }

    def build(self, group: Group, sequence_dim: int | None) -> ParallelLayer:
        """The parallel layer of this rank."""
        module = self.module
        if isinstance(module, nn.Embedding):
            return VocabularyParallelEmbedding(module, group, sequence_dim=sequence_dim)
        if isinstance(self.style, Column):
            return ColumnParallelLinear(
                module,
                group,
                sequence_dim=sequence_dim,
                shares_input=self.is_inside,
                gather_output=self.style.gather_output,
                shard=self.shard,
            )
        return RowParallelLinear(module, group, sequence_dim=sequence_dim, shard=self.shard)


def plan_layers(modules: Mapping[str, nn.Module], chosen: Mapping[str, Style], group: Group) -> list[PlannedLayer]:
    """The layers that ``chosen`` cuts, in the order of the model. Raises UsageError for the first that can't be."""
    linears = {
        name: (module, style)
        for name, style in chosen.items()
        if isinstance(style, (Column, Row)) and isinstance(module := modules[name], nn.Linear)
    }
    regions = [name for name, style in chosen.items() if isinstance(style, SharedInput)]
    for name in regions:
        if outer := next((other for other in regions if name != other and _is_below(name, other)), None):
            raise UsageError(
                f"{name} and {outer} around it both have the style SharedInput: its input would be summed twice; "
                "give it to the inner modules only"
            )
    planned: dict[int, PlannedLayer] = {}
    for name, style in chosen.items():
        module = modules[name]
        if not isinstance(style, (Column, Row, Embedding)) or not isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        check_plain(name, module)
        is_inside = isinstance(style, Column) and any(_is_below(name, region) for region in regions)
        try:
            if name in linears:
                check_fused(name, linears[name][0], linears)
            shard = _shard(name, module, style, linears, group)
        except UsageError as error:
            text = str(error)
            raise UsageError(text if text.startswith(name) else f"{name}: {text}") from None
        one = PlannedLayer(name, module, style, shard, is_inside)
        first = planned.setdefault(id(module), one)
        if (first.style, first.is_inside) != (style, is_inside):
            raise UsageError(
                f"{first.name} and {name} are one module, but the plan gives them {first.style} and {style}, or only "
                "one of them is in a SharedInput: give both the same"
            )
    found = list(planned.values())
    _check_ties(modules, found)
    return found


def _is_below(name: str, other: str) -> bool:
    return not other or name.startswith(f"{other}.")


def _shard(
    name: str,
    module: nn.Linear | nn.Embedding,
    style: Column | Row | Embedding,
    linears: Mapping[str, tuple[nn.Linear, Column | Row]],
    group: Group,
) -> Shard:
    ranks, rank = size_of(group), rank_in(group)
    if isinstance(module, nn.Embedding):
        return vocabulary_shard(module.num_embeddings, ranks, rank)
    if isinstance(style, Row):
        return Blocks.of(module.in_features, None, style.parts).shard(1, ranks, rank, 0)
    if isinstance(style, Column) and style.vocabulary:
        if style.units is not None or style.parts is not None:
            raise UsageError("vocabulary=True has tokens for output features: leave out units and parts")
        return vocabulary_shard(module.out_features, ranks, rank)
    units = style.units if isinstance(style, Column) else None
    blocks = Blocks.of(module.out_features, units, style.parts if isinstance(style, Column) else None)
    if isinstance(style, Column) and style.parts is None and units is None:
        _check_whole_heads(name, module, linears, ranks)
    heads = max(blocks.counts)
    if len(blocks.counts) == 1 and units is not None:
        heads = max([heads, *_heads_beside(name, blocks.size, linears)])
    shard = blocks.shard(0, ranks, rank, heads)
    if isinstance(style, Column) and style.gather_output and (len(blocks.counts) > 1 or shard.copies):
        raise UsageError(
            "the gathered output would have the parts of one rank behind those of another: gather_output=True is for "
            "layers of one part without copied heads"
        )
    return shard


def _heads_beside(name: str, size: int, linears: Mapping[str, tuple[nn.Linear, Column | Row]]) -> list[int]:
    """The numbers of heads of the other column layers in the same module: queries, where this one has keys."""
    parent = name.rpartition(".")[0]
    found = []
    for other, (linear, style) in linears.items():
        if other.rpartition(".")[0] == parent and isinstance(style, Column) and not style.vocabulary:
            if style.units is not None:
                found.append(style.units)
            elif style.parts is None and linear.out_features % size == 0:
                found.append(linear.out_features // size)
    return found


def _check_whole_heads(
    name: str, linear: nn.Linear, linears: Mapping[str, tuple[nn.Linear, Column | Row]], ranks: int
) -> None:
    """Raises UsageError if a layer without units would be cut inside a head of the queries beside it."""
    parent = name.rpartition(".")[0]
    for other, (query, style) in linears.items():
        if other.rpartition(".")[0] == parent and isinstance(style, Column) and style.units:
            size = query.out_features // style.units
            features = linear.out_features
            if features < query.out_features and features % size == 0 and features % (size * ranks):
                raise UsageError(
                    f"{ranks} ranks would cut its {features} features inside heads of {size}, those of {other}: give "
                    f"it Column(units={features // size})"
                )


def _check_ties(modules: Mapping[str, nn.Module], planned: list[PlannedLayer]) -> None:
    """Raises UsageError if a parameter is cut in one layer, and whole or cut in another way in another layer."""
    cut: dict[int, tuple[str, Shard]] = {}
    by_module = {id(one.module): one.shards() for one in planned}
    for one in planned:
        for own, parameter in one.module.named_parameters(recurse=False):
            shard = one.shards()[own]
            if shard is not None:
                cut.setdefault(id(parameter), (f"{one.name}.{own}", shard))
    for name, module in modules.items():
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in cut:
                continue
            other, shard = cut[id(parameter)]
            here = by_module.get(id(module), {}).get(own)
            if here is None:
                raise UsageError(
                    f"{name}.{own} is tied to a layer that is cut, {other.rpartition('.')[0]}; give {name} a style "
                    "that cuts it in the plan too"
                )
            if here != shard:
                raise UsageError(
                    f"{name}.{own} is tied to a parameter that is cut in another way, {other}: rank 0 would have "
                    f"{here.local} of {here.length} indices of dimension {here.dim} here, {shard.local} of "
                    f"{shard.length} of dimension {shard.dim} there; give Column(vocabulary=True) to an output layer "
                    "that is tied to an embedding"
                )


def check_plain(name: str, module: nn.Module) -> None:
    """Raises UsageError if the layer ``name`` does more than nn.Linear or nn.Embedding: additions of subclasses, hooks
    and decorations would be lost without a word."""
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


# ---- fused layers --------------------------------------------------------------------------------------------------


#: Last parts of the names of fused layers, in lower case.
_FUSED = re.compile(
    r"q_?k_?v|(^|_)w?(kv|qk)(_|$)|query_?key|key_?value|c_attn|att_proj|ff_proj|in_proj|w_?pack|glu|fused"
    r"|gate_?(and_?)?up|up_?(and_?)?gate|(^|_)w(12|13|31|21)$|(^|_)(fc|linear)(12|1_?gate)$"
)
#: Names that say nothing: then that of the module around them counts.
_BARE = re.compile(r"linear|proj|dense|layer|base_layer|fc|\d+")

_REMEDY = (
    "cut by rows, the first rank would get all of its first part. Say how it is made: Column(parts=2) for two equal "
    "parts one behind the other (gate and up), Column(parts=(heads, kv_heads, kv_heads)) for q, k and v one behind the "
    "other (GPT-2, Phi-3, Wqkv), Column(parts=1, units=kv_heads) if q, k and v of each key head lie together "
    "(Megatron-LM, GPT-NeoX), or Column(parts=1) if it is not fused"
)


def check_fused(name: str, linear: nn.Linear, linears: Mapping[str, tuple[nn.Linear, Column | Row]]) -> None:
    """Raises UsageError if the layer ``name`` looks fused, but its style does not say how. ``linears``: all layers with
    the styles Column and Row, in the order of the model."""
    _, style = linears[name]
    if style.parts is not None:
        return
    if isinstance(style, Row):
        widths = [_widest(other, column) for other, column in _beside(name, linears, Column).values()]
        if widths and linear.in_features > max(widths):
            raise UsageError(
                f"{name} has {linear.in_features} input features, more than any Column beside it has output features: "
                "if its input is what several of them computed, one behind the other, give their sizes, Row(parts=…); "
                "if not, Row(parts=1)"
            )
        return
    if style.vocabulary or style.gather_output:
        return
    own, around = [*name.lower().split(".")[::-1], "", ""][:2]
    if _FUSED.search(own) or (_BARE.fullmatch(own) and _FUSED.search(around)):
        raise UsageError(f"{name} has the name of a fused layer: {_REMEDY}")
    after = list(linears)[list(linears).index(name) + 1 :]
    rows = _beside(name, {each: linears[each] for each in after}, Row)
    widths = [other.in_features for other, _ in rows.values()]
    if widths and linear.out_features not in widths and linear.out_features > min(widths):
        narrow = min(rows, key=lambda one: rows[one][0].in_features)
        raise UsageError(
            f"{name} has {linear.out_features} output features, but {narrow} takes {min(widths)}; "
            f"it looks like a fused layer: {_REMEDY}"
        )


def _widest(linear: nn.Linear, style: Column | Row) -> int:
    blocks = Blocks.of(linear.out_features, style.units if isinstance(style, Column) else None, style.parts)
    return max(blocks.counts) * blocks.size


def _beside(
    name: str, linears: Mapping[str, tuple[nn.Linear, Column | Row]], kind: type
) -> dict[str, tuple[nn.Linear, Column | Row]]:
    """The layers of this kind in the same module, or else in the module around it or below that."""
    parent = name.rpartition(".")[0]
    for scope, depth in ((parent, 1), (parent.rpartition(".")[0], 2)):
        prefix = f"{scope}." if scope else ""
        found = {
            other: (linear, style)
            for other, (linear, style) in linears.items()
            if isinstance(style, kind)
            and not (isinstance(style, Column) and (style.gather_output or style.vocabulary))
            and other.startswith(prefix)
            and other.removeprefix(prefix).count(".") < depth
        }
        if found or not parent:
            return found
    return {}
