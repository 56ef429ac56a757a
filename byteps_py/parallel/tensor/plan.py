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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from byteps_py.errors import UsageError
from byteps_py.parallel.tensor.layers import (
    ColumnParallelLinear,
    ParallelLayer,
    RowParallelLinear,
    Shard,
    VocabularyParallelEmbedding,
    enter,
    sequence_parallel,
)
from byteps_py.parallel.tensor.regions import Group, size_of


@dataclass(frozen=True, slots=True)
class Column:
    """A linear layer of which each rank computes some of the output features.

    ``units``: the output features are so many equal blocks that stay whole, as attention heads; the ranks must divide
    them. ``vocabulary``: they are tokens, and are padded. ``gather_output``: all ranks get all of them.
    """

    units: int | None = None
    vocabulary: bool = False
    gather_output: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A linear layer for which each rank has some of the input features, as behind a Column."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """An embedding of which each rank has the rows of some tokens."""


@dataclass(frozen=True, slots=True)
class SharedInput:
    """A module whose first argument goes to several Columns inside it, and nowhere else: it is communicated once for
    all of them."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """A layer that treats each token alone, such as a norm. With sequence parallelism it gets a part of the sequence;
    without, it stays as it is."""


Style = Column | Row | Embedding | SharedInput | Sequence


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

    Raises UsageError if a pattern matches no layer, a style does not fit its layer, or sizes can't be divided.
    """
    modules = dict(model.named_modules())
    chosen = _choose(plan, modules)
    if size_of(group) == 1:
        return model
    regions = [name for name, style in chosen.items() if isinstance(style, SharedInput)]
    made: dict[int, nn.Parameter] = {}
    for name, style in chosen.items():
        module = modules[name]
        if isinstance(style, SharedInput):
            module.register_forward_pre_hook(_InputHook(group, sequence_dim), with_kwargs=True)
        elif isinstance(style, Sequence):
            if sequence_dim is not None:
                sequence_parallel(module, group)
        else:
            layer = _layer(name, module, style, group, sequence_dim, _is_inside(name, regions))
            for own, parameter in module.named_parameters(recurse=False):
                if id(parameter) in made:
                    layer.register_parameter(own, _tied(name, layer, own, made[id(parameter)]))
                elif own in layer.sharded_parameters():
                    made[id(parameter)] = layer.get_parameter(own)
            layer.train(module.training)
            _replace(model, name, layer)
    _check_ties(model, made, modules)
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


class _InputHook:
    """Communicates the first argument of a module."""

    def __init__(self, group: Group, sequence_dim: int | None) -> None:
        self.group, self.sequence_dim = group, sequence_dim

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], others: dict[str, Any]) -> Any:
        if not arguments or not isinstance(arguments[0], torch.Tensor):
            raise UsageError(
                f"{type(module).__name__} is in the plan as SharedInput: call it with its input, a tensor, as the "
                "first positional argument"
            )
        return (enter(arguments[0], self.group, self.sequence_dim), *arguments[1:]), others


def _choose(plan: Mapping[str, Style], modules: Mapping[str, nn.Module]) -> dict[str, Style]:
    """The style of each layer, by name, in the order of the model."""
    for pattern, style in plan.items():
        if not isinstance(style, Style):
            raise UsageError(
                f"the plan has {style!r} for {pattern!r}: use Column, Row, Embedding, SharedInput or Sequence"
            )
        if not fnmatch.filter(modules, pattern):
            raise UsageError(f"the plan names {pattern!r}, but the model has no such layer; it has {_some(modules)}")
    chosen: dict[str, Style] = {}
    for name, module in modules.items():
        matching = [pattern for pattern in plan if fnmatch.fnmatchcase(name, pattern)]
        if matching:
            chosen[name] = style = plan[max(matching, key=len)]
            wanted = nn.Linear if isinstance(style, (Column, Row)) else nn.Embedding
            if not isinstance(style, (SharedInput, Sequence)) and not isinstance(module, wanted):
                raise UsageError(
                    f"{name} is a {type(module).__name__}; the plan's {type(style).__name__} is for {wanted.__name__}"
                )
    return chosen


def _some(names: Iterable[str]) -> str:
    listed = [repr(name) for name in names if name]
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


def _is_inside(name: str, regions: Iterable[str]) -> bool:
    return any(name.startswith(f"{region}.") for region in regions)


def _layer(
    name: str, module: nn.Module, style: Style, group: Group, sequence_dim: int | None, is_inside: bool
) -> ParallelLayer:
    try:
        if isinstance(style, Column) and isinstance(module, nn.Linear):
            _check_units(style.units, module, group)
            return ColumnParallelLinear(
                module,
                group,
                sequence_dim=sequence_dim,
                shares_input=is_inside,
                vocabulary=style.vocabulary,
                gather_output=style.gather_output,
            )
        if isinstance(style, Row) and isinstance(module, nn.Linear):
            return RowParallelLinear(module, group, sequence_dim=sequence_dim)
        if isinstance(module, nn.Embedding):
            return VocabularyParallelEmbedding(module, group, sequence_dim=sequence_dim)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    raise UsageError(f"{name} is a {type(module).__name__}, which {type(style).__name__} is not for")


def _check_units(units: int | None, linear: nn.Linear, group: Group) -> None:
    if units is None:
        return
    if units < 1 or linear.out_features % units:
        raise UsageError(f"{linear.out_features} output features are no {units} equal units: give the number of heads")
    if units % size_of(group):
        fits = max(factor for factor in range(1, units + 1) if units % factor == 0 and factor <= size_of(group))
        raise UsageError(
            f"{size_of(group)} tensor-parallel ranks do not divide {units} heads: use tp={fits}, or a multiple of "
            f"{size_of(group)} heads"
        )


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, layer)


def _tied(name: str, layer: ParallelLayer, own: str, other: nn.Parameter) -> nn.Parameter:
    here = layer.get_parameter(own)
    if here.shape != other.shape:
        raise UsageError(
            f"{name}.{own} is tied to a parameter that is cut into parts of the shape {tuple(other.shape)}, and would "
            f"itself have {tuple(here.shape)}: give Column(vocabulary=True) to an output layer that is tied to an "
            "embedding"
        )
    return other


def _check_ties(model: nn.Module, made: Mapping[int, nn.Parameter], before: Mapping[str, nn.Module]) -> None:
    """Raises UsageError if a layer that the plan does not name still has a whole parameter that another one has cut."""
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) in made and before.get(name) is module:
                raise UsageError(f"{name}.{own} is tied to a layer that is cut; give {name} a style in the plan too")
