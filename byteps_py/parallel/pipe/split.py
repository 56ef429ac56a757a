"""Cuts a model into stages: at places that the user names, or so that the slowest stage is as fast as possible.

A model can be cut between the modules of nn.Sequential, also of one inside another. Its parameters keep their names.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin

from byteps_py.errors import UsageError


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules between which a model can be cut, by their names in it, in order. Raises UsageError.

    >>> list(layers(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))))
    ['0', '1.0', '1.1']
    """
    if not isinstance(model, nn.Sequential):
        raise UsageError(
            f"{type(model).__name__} can't be cut into stages: it is not an nn.Sequential, whose modules run one after "
            "the other; make it one, or give a list with the module of each stage"
        )
    return dict(_layers(model, ""))


def _layers(module: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, nn.Sequential) and len(child) and type(child) is nn.Sequential:
            yield from _layers(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


class SplitModel(list[nn.Module]):
    """The stages of a model, whose parameters have the names that they have in it."""


def split(
    model: nn.Module,
    stages: int,
    costs: Sequence[float] | Mapping[str, float] | None = None,
    cuts: Sequence[str] | None = None,
) -> SplitModel:
    """The modules of ``model`` in ``stages`` stages, whose parameters are those of the model and have the same names.

    Args:
        model: an nn.Sequential, perhaps with others inside.
        stages: how many.
        costs: of each layer (see ``layers``), in any unit; those left out of a mapping cost 1. ``measured_costs``
            measures them. Default: see ``usual_costs``.
        cuts: the first layer of each stage but the first one, instead of ``costs``.

    Raises UsageError if the model can't be cut there, or has fewer layers than stages.

    >>> model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    >>> [[name for name, _ in stage.named_children()] for stage in split(model, 2, costs=[4, 1, 1, 1, 1])]
    [['0'], ['1', '2', '3', '4']]
    """
    found = layers(model)
    names = list(found)
    if stages < 1 or len(names) < stages:
        raise UsageError(f"a model of {len(names)} layers can't be cut into {stages} stages")
    if cuts is not None:
        bounds = _bounds_of(cuts, names, stages)
    else:
        given = usual_costs(found.values()) if costs is None else _costs(costs, names)
        bounds = _behind_free_layers(balanced(given, stages), given)
    return SplitModel(
        _nested({name: found[name] for name in names[first:end]})
        for first, end in itertools.pairwise([*bounds, len(names)])
    )


def balanced(costs: Sequence[float], stages: int, transfers: Sequence[float] | None = None) -> list[int]:
    """The first layer of each stage, for the smallest cost of the slowest stage or transfer. ``transfers``: the cost of
    a transfer after each layer. The dynamic programme of PipeDream (Narayanan et al., 2019, section 3.1), with one
    worker for each stage:

        A(j, s) = min over i of max(A(i, s - 1), 2 transfers[i], costs of layers i + 1 ... j)

    >>> balanced([1, 1, 1, 3, 3], 3)
    [0, 3, 4]
    """
    count = len(costs)
    before = [0.0, *itertools.accumulate(costs)]
    best: list[list[tuple[float, int]]] = [[(before[j], 0) for j in range(count + 1)]]
    for stage in range(1, stages):
        row = [(float("inf"), 0)] * (count + 1)
        for j in range(stage + 1, count + 1):
            row[j] = min(
                (max(best[-1][i][0], 2 * transfers[i - 1] if transfers else 0.0, before[j] - before[i]), i)
                for i in range(stage, j)
            )
        best.append(row)
    bounds, end = [], count
    for stage in reversed(range(stages)):
        end = best[stage][end][1]
        bounds.append(end)
    return bounds[::-1]


def measured_costs(model: nn.Module, inputs: Any, repeats: int = 3) -> dict[str, float]:
    """Seconds of a forward and a backward pass of each layer: the fastest of ``repeats``. ``inputs``: of the first one.
    Parameters and their gradients do not change."""
    costs: dict[str, float] = {}
    for name, layer in layers(model).items():
        gradients = [(parameter, parameter.grad) for parameter in layer.parameters()]
        seconds = []
        for _ in range(repeats):
            leaves = _apply(lambda one: one.detach().requires_grad_(one.is_floating_point()), inputs)
            begin = time.perf_counter()
            outputs = layer(leaves)
            roots: list[torch.Tensor] = []
            _apply(lambda one, roots=roots: roots.append(one) if one.requires_grad else None, outputs)
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
            seconds.append(time.perf_counter() - begin)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        costs[name] = min(seconds)
        inputs = _apply(torch.Tensor.detach, outputs)
    return costs


def _apply(function: Callable[..., Any], value: Any) -> Any:
    from byteps_py.parallel.pipe.trees import flatten, unflatten

    tensors, structure = flatten(value)
    return unflatten([function(tensor) for tensor in tensors], structure)


def usual_costs(found: Iterable[nn.Module]) -> list[float]:
    """Of each layer: its parameters, as a token is multiplied with each of them once. Those of an nn.Embedding are only
    looked up. 1 for each layer if none has others, if some are not known yet (lazy modules), or if some are those of
    convolutions, which take a parameter many times.

    >>> usual_costs([nn.Embedding(100, 8), nn.Linear(8, 8), nn.Linear(8, 100)])
    [0.0, 72.0, 900.0]
    """
    every = list(found)
    parts = [[part for part in layer.modules() if not isinstance(part, _TABLES)] for layer in every]
    if any(isinstance(part, _NOT_COUNTED) for some in parts for part in some):
        return [1.0] * len(every)
    costs = [float(sum(one.numel() for part in some for one in part.parameters(recurse=False))) for some in parts]
    return costs if any(costs) else [1.0] * len(every)


def _behind_free_layers(bounds: Sequence[int], costs: Sequence[float]) -> list[int]:
    """Layers without a cost stay with the layer before them, as activations do, unless the stage has nothing else."""
    moved = [bounds[0]]
    for bound, end in itertools.pairwise([*bounds[1:], len(costs)]):
        while bound + 1 < end and not costs[bound]:
            bound += 1
        moved.append(bound)
    return moved


_TABLES = (nn.Embedding, nn.EmbeddingBag)
_NOT_COUNTED = (_ConvNd, LazyModuleMixin)


def _costs(costs: Sequence[float] | Mapping[str, float], names: Sequence[str]) -> list[float]:
    if isinstance(costs, Mapping):
        if unknown := sorted(set(costs) - set(names)):
            raise UsageError(f"costs: the model has no layer {unknown[0]!r}; its layers: {', '.join(names)}")
        return [costs.get(name, 1.0) for name in names]
    if len(costs) != len(names):
        raise UsageError(f"costs: {len(costs)} numbers for {len(names)} layers")
    return list(costs)


def _bounds_of(cuts: Sequence[str], names: Sequence[str], stages: int) -> list[int]:
    if len(cuts) != stages - 1:
        raise UsageError(f"cuts: {len(cuts)} of them make {len(cuts) + 1} stages, not {stages}")
    bounds = [0]
    for cut in cuts:
        if cut not in names:
            raise UsageError(f"cuts: the model can't be cut at {cut!r}; its layers: {', '.join(names)}")
        if names.index(cut) <= bounds[-1]:
            raise UsageError(f"cuts: {cut!r} is the first layer of the model, or not after the cut before it")
        bounds.append(names.index(cut))
    return bounds


def _nested(some: Mapping[str, nn.Module]) -> nn.Sequential:
    """An nn.Sequential of modules with dotted names."""
    stage = nn.Sequential()
    for name, module in some.items():
        *path, last = name.split(".")
        inner = stage
        for step in path:
            if not hasattr(inner, step):
                inner.add_module(step, nn.Sequential())
            inner = inner.get_submodule(step)  # type: ignore[assignment]
        inner.add_module(last, module)
    return stage
