"""DistributedOptimizer(op=Adasum): each rank steps by itself, then what the steps changed is combined.

    start = weights;  the wrapped optimizer steps;  delta = weights - start;  weights = start + adasum(deltas)

So momentum and the like are applied before ranks are combined, as Horovod does. Owns the deltas; what Adasum is says
adasum.py. The training thread calls; hooks (distributed.py) only count passes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from byteps_py.errors import GradientOrderError
from byteps_py.torch.adasum import start
from byteps_py.torch.compression import Compressor
from byteps_py.torch.context import Context
from byteps_py.torch.hooks import Distributed


class Deltas:
    """Combines changes of parameters over the ranks of ``group`` (empty: all)."""

    def __init__(self, context: Context, name: str, group: tuple[int, ...], compression: type[Compressor]) -> None:
        self._context = context
        self._name = name
        self._group = group
        self._compression = compression

    @property
    def alone(self) -> bool:
        """There is nobody to combine with: this rank steps by itself."""
        session = self._context.session
        return (len(self._group) or session.size) == 1 or session.rank not in (self._group or (session.rank,))

    def combine(self, deltas: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The Adasum of each, in its own dtype; those that travel as one dtype travel together."""
        kinds: dict[torch.dtype, list[int]] = {}
        for index, delta in enumerate(deltas):
            kinds.setdefault(self._compression.wire_dtype(delta.dtype), []).append(index)
        running = [
            (
                indices,
                start(
                    self._context,
                    [deltas[index].to(dtype) for index in indices],
                    f"{self._name}.{str(dtype).removeprefix('torch.')}",
                    self._group,
                ),
            )
            for dtype, indices in kinds.items()
        ]
        combined = list(deltas)
        for indices, operation in running:
            for index, result in zip(indices, operation.wait(), strict=True):
                combined[index] = result.to(deltas[index].dtype)
        return combined


class AdasumDistributed(Distributed):
    """What DistributedOptimizer puts before the wrapped optimizer's class for op=Adasum."""

    _deltas: Deltas

    def synchronize(self) -> None:
        """Nothing to wait for: gradients stay this rank's own, and may be clipped before step()."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises GradientOrderError (an AssertionError), except in a job of one rank."""
        if not self._deltas.alone:
            raise GradientOrderError(
                "Skipping synchronization is not supported when using Adasum optimizer: it combines what step() changes"
            )
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let the wrapped optimizer step, and combine what it changed. Parameters without a gradient count as having
        zeros. If combining fails, the weights are those before the step."""
        loss = None if closure is None else closure()
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self._passes.hook(params)  # unfrozen meanwhile
        self._passes.over()
        if self._deltas.alone:
            super(Distributed, self).step()  # type: ignore[misc]
            return loss
        for param in params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        before = [param.detach().clone() for param in params]
        try:
            super(Distributed, self).step()  # type: ignore[misc]
            changes = [param.detach() - old for param, old in zip(params, before, strict=True)]
            changes = self._deltas.combine(changes)
        except BaseException:
            _assign(params, before)
            raise
        _assign(params, [old + change for old, change in zip(before, changes, strict=True)])
        return loss

    step.hooked = True  # type: ignore[attr-defined]


def _assign(params: Sequence[torch.nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)
