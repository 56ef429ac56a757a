"""A hosted optimizer for a model in parts: its ranks are those with the same parameters, ``mesh.gradient_group``.

    gradients of one copy ─► sums over its copies, in the services ─► steps ─► parameters of the copies

Each copy of a part has its gradients summed over the other ranks of the copy by its own layers, or its own pipeline.
The norm for clipping, and the decision to skip a step, are of the whole model: over "tp" and "pp", too. One thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from byteps_py.parallel.mesh import Mesh
from byteps_py.parallel.pipe.pipeline import Pipeline
from byteps_py.parallel.tensor.parallel_plan import sharded_parameters
from byteps_py.torch.compression import CompressionArgument, choice_of
from byteps_py.torch.gradients.hosted.optimizer import HostedOptions, host_copies
from byteps_py.torch.gradients.hosted.states_mode import Share, asked_for


class MeshModel:
    """The model on a mesh, for norms: a WholeModel.

    Sum 0 is of parameters that all ranks of "tp" hold, the same on each; the others are of parts, by the number of
    ranks of "tp" that hold these elements.
    """

    def __init__(self, module: nn.Module | Pipeline, mesh: Mesh) -> None:
        counted = module.counted_parameters() if isinstance(module, Pipeline) else module.named_parameters()
        shards = module.sharded_parameters() if isinstance(module, Pipeline) else sharded_parameters(module)
        #: By sum: the number of ranks that hold these elements.
        self._holders = [1, 1, *sorted({number for shard in shards.values() for *_, number in shard.copied()})]
        self._shares: dict[nn.Parameter, list[Share]] = {}
        for name, parameter in counted:
            if name not in shards:
                self._shares[parameter] = [(0, parameter.numel(), 0)]
                continue
            row, place = parameter.numel() // max(len(parameter), 1), 0
            found: list[Share] = []
            for start, stop, number in shards[name].copied():
                found.append((place * row, start * row, 1))
                found.append((start * row, stop * row, self._holders.index(number, 2)))
                place = stop
            self._shares[parameter] = [*found, (place * row, parameter.numel(), 1)]
        self._tp = mesh.group("tp") if mesh.tp > 1 else None
        self._pp = mesh.group("pp") if mesh.pp > 1 else None
        self._device = next(iter(module.parameters())).device
        self.sums = len(self._holders)

    def shares(self, param: nn.Parameter) -> Sequence[Share]:
        return self._shares.get(param, ())

    def square_sum(self, sums: Sequence[float]) -> float:
        parts = sum(value / number for value, number in zip(sums[1:], self._holders[1:], strict=True))
        return self._over(self._pp, sums[0] + self._over(self._tp, parts))

    def is_any(self, is_here: bool) -> bool:
        return self._over(self._pp, self._over(self._tp, float(is_here))) > 0

    def _over(self, group: dist.ProcessGroup | None, value: float) -> float:
        """The sum over a group."""
        if group is None:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self._device)
        dist.all_reduce(total, group=group)
        return float(total)


@dataclass(frozen=True, slots=True)
class MeshHosting:
    """``hosted``, ``shadow``, ``compression``: see ParallelOptions. ``passes``: backward passes of a step, without a
    pipeline."""

    hosted: bool | str
    shadow: bool
    passes: int
    compression: CompressionArgument


def hosted_optimizer(
    optimizer: torch.optim.Optimizer, module: nn.Module | Pipeline, mesh: Mesh, how: MeshHosting
) -> torch.optim.Optimizer:
    """The optimizer, whose states the services of ``mesh.gradient_group`` keep. A pipeline's gradients are there after
    its last action only. Raises UsageError. All ranks call it."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    is_pipeline = isinstance(module, Pipeline)
    hosting = HostedOptions(
        shadow=how.shadow,
        mode=asked_for(how.hosted or True),
        whole=MeshModel(module, mesh),
        takes_all_at_once=is_pipeline,
    )
    ranks = dist.get_process_group_ranks(mesh.gradient_group)
    passes = 1 if is_pipeline else how.passes
    made: Any = host_copies(optimizer, names, ranks, passes, hosting, choice_of(how.compression))
    own: torch.optim.Optimizer = made  # of the class that is given, too
    return own


def whole_module(module: nn.Module | Pipeline) -> nn.Module:
    """The modules of this rank as one, of which names of parameters and buffers are asked."""
    if isinstance(module, Pipeline):
        return nn.ModuleDict({str(stage): module.stages[stage] for stage in sorted(module.stages)})
    return module


class EqualCopies:
    """Gives all copies of this rank's modules the values of the first one, as DistributedDataParallel does:
    ``parameters`` at first, ``buffers`` before each step."""

    def __init__(self, module: nn.Module | Pipeline, copies: dist.ProcessGroup) -> None:
        self._module = whole_module(module)
        self._copies, self._first = copies, min(dist.get_process_group_ranks(copies))

    def parameters(self) -> None:
        """All copies call it."""
        self._send(self._module.parameters())
        self.buffers()

    def buffers(self) -> None:
        """All copies call it."""
        self._send(self._module.buffers())

    def _send(self, tensors: Iterable[torch.Tensor]) -> None:
        if dist.get_world_size(self._copies) > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), self._first, group=self._copies)
