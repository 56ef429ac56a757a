"""The ranks of a pipeline: where each worker and each data-parallel copy is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from byteps_py.errors import UsageError
from byteps_py.parallel.mesh.device_mesh import Mesh

PIPE, DATA, CONTEXT = "pp", "dp", "cp"


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """``ranks``: of shape (others, copies, workers): one pipeline with its data-parallel copies for each coordinate of
    the mesh's other dimensions. ``device_type``: of the mesh's tensors."""

    ranks: torch.Tensor
    own: tuple[int, int, int]
    device_type: str = "cpu"

    @classmethod
    def of(cls, mesh: DeviceMesh | Mesh | None) -> PipelineLayout:
        """The layout of ``mesh``, whose dimension "pp" is that of workers, and "dp" and "cp" those of copies, if there
        are any. Without a mesh all ranks are workers of one pipeline. Raises UsageError."""
        check_process_groups()
        if isinstance(mesh, Mesh):
            mesh = mesh.device_mesh
        if mesh is None:
            ranks = torch.arange(dist.get_world_size(), device="cpu").view(1, 1, -1)
        else:
            names = mesh.mesh_dim_names or ()
            if PIPE not in names:
                raise UsageError(f"the mesh has the dimensions {names}; a pipeline needs one named {PIPE!r}")
            copies = [names.index(name) for name in (DATA, CONTEXT) if name in names]
            others = [index for index, name in enumerate(names) if name not in (PIPE, DATA, CONTEXT)]
            whole = mesh.mesh.permute([*others, *copies, names.index(PIPE)])
            workers = mesh.size(names.index(PIPE))
            ranks = whole.reshape(-1, math.prod(mesh.size(index) for index in copies), workers)
        found = (ranks == dist.get_rank()).nonzero()
        if len(found) != 1:
            raise UsageError(
                f"rank {dist.get_rank()} is not in the mesh of its pipeline, whose ranks are "
                f"{ranks.flatten().tolist()}; all ranks of the job create their pipelines together, each with a mesh "
                "that it is in"
            )
        first, second, third = found[0].tolist()
        return cls(ranks, (first, second, third), "cpu" if mesh is None else mesh.device_type)

    @property
    def workers(self) -> int:
        """The number of workers."""
        return int(self.ranks.shape[2])

    @property
    def copies(self) -> int:
        """The number of data-parallel copies."""
        return int(self.ranks.shape[1])

    @property
    def worker(self) -> int:
        """Of this rank."""
        return self.own[2]

    def device_of(self, module: nn.Module | Sequence[nn.Module]) -> torch.device:
        """Of the parameters; of modules without any, that of the mesh."""
        modules = [module] if isinstance(module, nn.Module) else module
        found = (parameter.device for one in modules for parameter in one.parameters())
        if (device := next(found, None)) is not None:
            return device
        return torch.empty(0, device=self.device_type).device  # with the index of the current GPU

    def rank_of(self, worker: int) -> int:
        """The rank of another worker of this rank's copy."""
        return int(self.ranks[self.own[0], self.own[1], worker])

    def rank_of_first(self, workers: Iterable[int]) -> int:
        """The rank of the first of ``workers`` in the first copy."""
        return int(self.ranks[self.own[0], 0, min(workers)])

    def copies_of_this_worker(self) -> list[int]:
        """The ranks of this worker in all copies."""
        return [int(rank) for rank in self.ranks[self.own[0], :, self.own[2]]]

    def copies_of_workers(self) -> list[list[int]]:
        """The ranks of each copy, of all pipelines of the layout."""
        return [row for other in self.ranks.tolist() for row in other]

    def rows_of(self, workers: Iterable[int]) -> list[list[int]]:
        """The ranks that are one of ``workers`` in any copy, for each pipeline of the layout; none if that is one."""
        columns = sorted(workers)
        rows = [self.ranks[other][:, columns].flatten().tolist() for other in range(len(self.ranks))]
        return rows if len(rows[0]) > 1 else []


def check_process_groups() -> None:
    """Raises UsageError if there are none."""
    if not dist.is_initialized():
        raise UsageError("a pipeline needs process groups: call torch.distributed.init_process_group() before")
