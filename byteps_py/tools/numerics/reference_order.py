"""One process that adds in the order of a parallel run, so that the two can be compared bit by bit.

Parallel runs split sums: a row-parallel layer adds t partial products, data-parallel ranks add d gradients, a step adds
the gradients of its micro-batches. Sums of floats depend on their order, so a run never has the bits of a sequential
one. With the same splits and the same order, it has, and what still differs is an error of the program (Llama 3,
section 6.2).

The order is that of byteps_py's sums (docs/internals/protocol.md): over the local ranks of each machine in order, then
over the machines in order; each stage adds in float32 (float64 for float64) and rounds once.

Sums that are exact in any order need no care: of two terms; of one term and zeros (a vocabulary-parallel embedding, the
target's logit), but for the sign of zero; maxima; integers. Other libraries add in orders of their own: with them, the
bits agree for two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from byteps_py.errors import UsageError
from byteps_py.parallel.float32_gradients import Float32Gradients
from byteps_py.tools.numerics.recorder import Recorder


@dataclass(frozen=True, slots=True)
class ReferenceOrder:
    """How a parallel run splits its sums.

    Args:
        tp: tensor-parallel ranks.
        dp: data-parallel ranks.
        micro_batches: of a step, on each data-parallel rank.
        tp_machines: local ranks of each machine in a tensor-parallel group; none: all on one machine.
        dp_machines: the same of a data-parallel group.
        float32: gradients are accumulated and reduced in float32 (``Float32Gradients``), not in their own dtype.

    Raises UsageError if a number is below 1, or machines have not that many ranks together.

    >>> ReferenceOrder(tp=2, dp=4, micro_batches=8, dp_machines=(2, 2)).dp
    4
    """

    tp: int = 1
    dp: int = 1
    micro_batches: int = 1
    tp_machines: tuple[int, ...] = ()
    dp_machines: tuple[int, ...] = ()
    float32: bool = True

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "micro_batches"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: it must be at least 1")
        for name, machines, ranks in (("tp", self.tp_machines, self.tp), ("dp", self.dp_machines, self.dp)):
            if machines and (sum(machines) != ranks or min(machines) < 1):
                raise UsageError(
                    f"{name}_machines={machines} have {sum(machines)} ranks together, but {name}={ranks}: give the "
                    "number of ranks of each machine"
                )


def ordered_sum(tensors: Sequence[torch.Tensor], machines: Sequence[int] = ()) -> torch.Tensor:
    """The sum of equal shapes with the bits of byteps_py's sum over ranks.

    Args:
        tensors: each rank's, in rank order.
        machines: local ranks of each machine; none: all on one machine.

    Returns a tensor of the same dtype. Raises UsageError if the shapes or dtypes differ, or the machines' ranks are not
    as many.

    >>> ordered_sum([torch.tensor([256.0, 1.0]).bfloat16()] * 3).tolist()  # not 256 + 256 rounded, + 256
    [768.0, 3.0]
    """
    if not tensors or len({(tensor.shape, tensor.dtype) for tensor in tensors}) != 1:
        raise UsageError(
            f"a sum of {[(list(each.shape), each.dtype) for each in tensors]}: give equal shapes and dtypes"
        )
    counts = list(machines) or [len(tensors)]
    if sum(counts) != len(tensors):
        raise UsageError(f"machines {counts} have {sum(counts)} ranks, but {len(tensors)} tensors are to be added")
    ends = list(accumulate(counts))
    contributions = [_sum(tensors[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    return _sum(contributions)


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    dtype = tensors[0].dtype
    exact = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = tensors[0].detach().to(exact, copy=True)
    for tensor in tensors[1:]:
        total += tensor.detach().to(exact)
    return total.to(dtype)


def apply_reference_order(model: nn.Module, plan: Mapping[str, str], order: ReferenceOrder) -> nn.Module:
    """Make the linear layers of ``model`` compute as ``order.tp`` ranks would.

    Args:
        model: its nn.Linear modules are replaced, in place; parameters and their names stay.
        plan: patterns of module names (fnmatch) to "column" or "row"; the first match counts.
        order: the splits.

    A "row" layer adds the ranks' partial products in rank order, and then the bias. A "column" layer computes the
    ranks' columns one by one, and adds the gradients of its input in rank order. Each partial product has the shape
    that a rank's has, so the same kernel gives the same bits.

    Returns ``model``. Raises UsageError if a layer can't be split evenly, a style is unknown, or a pattern matches no
    linear layer.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    >>> apply_reference_order(model, {"0": "column", "2": "row"}, ReferenceOrder(tp=2))[2].style
    'row'
    """
    unused = set(plan)
    for name, module in list(model.named_modules()):
        matching = [pattern for pattern in plan if fnmatchcase(name, pattern)]
        if matching and isinstance(module, nn.Linear):
            unused -= set(matching)
            replacement = OrderedLinear(module, plan[matching[0]], order, name)
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, replacement)
    if unused:
        raise UsageError(
            f"the plan's {', '.join(map(repr, sorted(unused)))} match no nn.Linear of the model: correct the patterns"
        )
    return model


class OrderedLinear(nn.Linear):
    """A linear layer that computes as the ranks of a tensor-parallel group, one after another. It has the parameters of
    the layer that it replaces. ``x``: [..., in_features]; returns [..., out_features]."""

    def __init__(self, layer: nn.Linear, style: str, order: ReferenceOrder, name: str) -> None:
        nn.Module.__init__(self)
        if style not in ("column", "row"):
            raise UsageError(f"style {style!r} of {name!r} in the plan: it must be 'column' or 'row'")
        cut = layer.out_features if style == "column" else layer.in_features
        if cut % order.tp:
            raise UsageError(
                f"{name!r} has {cut} {'outputs' if style == 'column' else 'inputs'}, which tp={order.tp} does not "
                "divide: choose another tp, or leave the layer out of the plan"
            )
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.style, self.order = style, order
        self.train(layer.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        ranks, machines = self.order.tp, self.order.tp_machines
        if self.style == "column":
            inputs, weights = _applied(_CopyToRanks, x, ranks, machines), _applied(_Cut, self.weight, ranks, 0)
            biases = [None] * ranks if self.bias is None else _applied(_Cut, self.bias, ranks, 0)
            outputs = [nn.functional.linear(*each) for each in zip(inputs, weights, biases, strict=True)]
            joined: torch.Tensor = _applied(_Join, *outputs)
            return joined
        inputs, weights = _applied(_Cut, x, ranks, -1), _applied(_Cut, self.weight, ranks, 1)
        partial = [nn.functional.linear(*each) for each in zip(inputs, weights, strict=True)]
        total: torch.Tensor = _applied(_SumOfRanks, machines, *partial)
        return total if self.bias is None else total + self.bias


def _applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)


class _CopyToRanks(torch.autograd.Function):
    """Megatron-LM's f: the identity, whose backward pass adds the ranks' gradients, in rank order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int, machines: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        ctx.machines = machines
        return tuple(x.view_as(x) for _ in range(ranks))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ordered_sum(gradients, ctx.machines), None, None


class _SumOfRanks(torch.autograd.Function):
    """Megatron-LM's g: the sum of the ranks' tensors in rank order, whose backward pass is the identity."""

    @staticmethod
    def forward(ctx: Any, machines: tuple[int, ...], *partial: torch.Tensor) -> torch.Tensor:
        ctx.ranks = len(partial)
        return ordered_sum(partial, machines)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *[gradient] * ctx.ranks)


class _Cut(torch.autograd.Function):
    """The ranks' chunks of a tensor, in memory of their own as on the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int, dim: int) -> tuple[torch.Tensor, ...]:
        ctx.dim = dim
        return tuple(chunk.clone(memory_format=torch.contiguous_format) for chunk in x.chunk(ranks, dim))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return torch.cat(gradients, ctx.dim), None, None


class _Join(torch.autograd.Function):
    """The ranks' chunks of the last dimension in one tensor; the inverse of _Cut."""

    @staticmethod
    def forward(ctx: Any, *chunks: torch.Tensor) -> torch.Tensor:
        ctx.ranks = len(chunks)
        return torch.cat(chunks, -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(chunk.clone(memory_format=torch.contiguous_format) for chunk in gradient.chunk(ctx.ranks, -1))


def reference_gradients(
    model: nn.Module,
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
    batches: Sequence[Sequence[Any]],
    order: ReferenceOrder,
    recorder: Recorder | None = None,
    average: bool = True,
) -> dict[str, torch.Tensor]:
    """The gradients of one step in the order of a parallel run.

    Args:
        model: with ``apply_reference_order`` if the run is tensor-parallel.
        loss_of: takes the model and a micro-batch, returns its loss, scaled as in the run.
        batches: ``batches[d][j]`` is micro-batch j of data-parallel rank d.
        order: the splits.
        recorder: attached to ``model``; it records each data-parallel rank's passes, and the result.
        average: divide the sums over data-parallel ranks by their number, as ``Float32Gradients.reduce`` does.

    Each rank's micro-batches are added in order; then the ranks' gradients, in rank order. Returns the result by
    parameter name: float32 with ``order.float32`` for low-precision parameters, else of their dtype. ``parameter.grad``
    is None afterwards. Raises UsageError if the batches are not order.dp lists of order.micro_batches.
    """
    counts = [len(own) for own in batches]
    if counts != [order.micro_batches] * order.dp:
        raise UsageError(
            f"batches of {counts} micro-batches, but dp={order.dp} and micro_batches={order.micro_batches}: give "
            "batches[d][j] for each rank d and micro-batch j"
        )
    ranks: list[dict[str, torch.Tensor]] = []
    with _without_gradients(model), Float32Gradients(model, enabled=order.float32) as accumulated:
        for rank, own in enumerate(batches):
            with nullcontext() if recorder is None else recorder.at(dp=rank):
                for batch in own:
                    loss_of(model, batch).backward()
            ranks.append(accumulated.gradients())
            accumulated.zero()
    found: dict[str, torch.Tensor] = {}
    for name, _ in model.named_parameters():
        parts = [gradients[name] for gradients in ranks if name in gradients]
        if parts:
            zeros = torch.zeros_like(parts[0])
            total = ordered_sum([gradients.get(name, zeros) for gradients in ranks], order.dp_machines)
            found[name] = total / order.dp if average else total
    if recorder is not None:
        recorder.reduced_gradients(found)
    return found


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    for parameter in model.parameters():
        parameter.grad = None
    try:
        yield
    finally:
        for parameter in model.parameters():
            parameter.grad = None
