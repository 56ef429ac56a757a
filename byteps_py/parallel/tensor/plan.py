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

from torch import nn

from byteps_py.errors import UsageError
from byteps_py.parallel.gradient_scaling import decide_together
from byteps_py.parallel.tensor.layers import ParallelLayer, sum_gradients
from byteps_py.parallel.tensor.planned_layers import plan_layers
from byteps_py.parallel.tensor.regions import Group, size_of
from byteps_py.parallel.tensor.shard import Shard
from byteps_py.parallel.tensor.shared_input import SharedInputRegion
from byteps_py.parallel.tensor.styles import Column, Embedding, Replicated, Row, Sequence, SharedInput, Style
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
            raise UsageError(f"the plan names {pattern!r}, but the model has no such layer; it has {_some(modules)}")
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


def _some(names: Iterable[str]) -> str:
    listed = [repr(name) for name in names if name]
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, layer)
