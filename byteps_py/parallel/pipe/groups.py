"""The ranks of a pipeline: the places of workers and data-parallel copies, their process groups, and their messages in
these: errors, and sums of gradients.

All ranks of the job make the groups together, also those of the other pipelines on other parts of a mesh. One thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from byteps_py.errors import PipelineError, UsageError
from byteps_py.parallel.float32_gradients import GradientSum, gradient_dtype
from byteps_py.parallel.mesh import Mesh
from byteps_py.parallel.pipe.program import Program
from byteps_py.wording import ranks_text

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
        """The worker of this rank."""
        return self.own[2]

    def device_of(self, module: nn.Module | Sequence[nn.Module]) -> torch.device:
        """The device of the parameters; of modules without any, that of the mesh."""
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


# ---- process groups ------------------------------------------------------------------------------------------------


#: The ranks of each group of one kind; a rank is in one of them at most.
Rows = list[list[int]]


@dataclass(frozen=True, slots=True)
class PipelineGroups:
    """The groups of this rank. ``workers``: of its data-parallel copy. ``everyone``: of all copies. ``stages``: the
    ranks with the same stage, if these are several. ``tied``: those of some workers, in all copies, which share
    parameters.

    A group for each stage, and for each set of shared parameters: workers may finish their stages in different orders,
    and the sums of one group never wait for those of another."""

    workers: dist.ProcessGroup
    everyone: dist.ProcessGroup
    stages: dict[int, dist.ProcessGroup]
    tied: dict[frozenset[int], dist.ProcessGroup]

    @classmethod
    def new(cls, layout: PipelineLayout, program: Program, tied: Sequence[frozenset[int]]) -> PipelineGroups:
        """All ranks of the job call it. ``tied``: sets of workers whose stages share parameters. Raises UsageError."""
        wanted = [("mesh_pp", layout.copies_of_workers()), ("mesh_dp_pp", layout.rows_of(range(layout.workers)))]
        wanted += [("mesh_dp", layout.rows_of(workers)) for workers in holders_of(program)]
        wanted += [("tied parameters", layout.rows_of(workers)) for workers in tied]
        workers, everyone, *others = new_groups(wanted)
        if workers is None:
            raise RuntimeError("this rank is in no row of its own layout")
        of_stages, of_tied = others[: program.stages], others[program.stages :]
        return cls(
            workers,
            everyone or workers,
            {stage: group for stage, group in enumerate(of_stages) if group is not None},
            {some: group for some, group in zip(tied, of_tied, strict=True) if group is not None},
        )


def holders_of(program: Program) -> list[frozenset[int]]:
    """The workers that hold each stage."""
    return [frozenset(holders[stage] for holders in program.holders) for stage in range(program.stages)]


def new_groups(wanted: Sequence[tuple[str, Rows]]) -> list[dist.ProcessGroup | None]:
    """A group for each entry of ``wanted``, a description and rows: that of the row with this rank; None if there is
    none. torch wants all ranks of the job to make all groups in the same order, so each one is told the groups that
    others want. All ranks of the job call it. Raises UsageError on all of them if those of a row want different
    groups."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, list(wanted))
    for rank, theirs in enumerate(told):
        for other in sorted({one for _, rows in theirs for row in rows if rank in row for one in row}):
            if told[other] != theirs:
                raise UsageError(
                    f"ranks {rank} and {other} are in one pipeline, but want different groups of ranks: give all ranks "
                    "the same mesh, and the same stages if some of these share parameters"
                )
    own: list[dist.ProcessGroup | None] = [None] * len(wanted)
    made: list[Any] = []
    for theirs in told:
        if theirs in made:
            continue
        made.append(theirs)
        for place, (description, rows) in enumerate(theirs):
            for row in rows:
                group = dist.new_group(row, group_desc=description)
                if dist.get_rank() in row:
                    own[place] = group
    return own


def raise_failures(error: Exception | None, group: dist.ProcessGroup) -> NoReturn:
    """Raise PipelineError with the errors of all ranks of ``group``, which call it together: at least one of them has
    an ``error``."""
    said: list[str | None] = [None] * dist.get_world_size(group)
    mine = None if error is None else f"{type(error).__name__}: {error}"
    dist.all_gather_object(said, mine, group=group)
    by_text: dict[str, list[int]] = {}
    for rank, text in zip(dist.get_process_group_ranks(group), said, strict=True):
        if text is not None:
            by_text.setdefault(text, []).append(rank)
    told = (f"{ranks_text(ranks)}: {text}" for text, ranks in by_text.items())
    raise PipelineError("; ".join(told)) from error


# ---- parameters that several ranks hold ----------------------------------------------------------------------------


@dataclass(slots=True)
class ReplicatedParameters:
    """Parameters that the ranks of ``group`` hold, in the same order."""

    names: Sequence[str]
    parameters: Sequence[nn.Parameter]
    group: dist.ProcessGroup
    is_due: bool = True  # in this step, it has not been launched yet
    _under_way: list[GradientSum] = field(default_factory=list)

    def launch(self) -> None:
        """Begin to sum the gradients. All ranks of the group call it once in a step. Raises UsageError for a sparse
        gradient, after the others have been served."""
        self.is_due = False
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            if parameter.requires_grad:
                by_dtype.setdefault(gradient_dtype(parameter), []).append(parameter)
        for dtype, some in by_dtype.items():
            self._under_way.append(GradientSum(some, [_dense(parameter) for parameter in some], dtype, self.group))
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise UsageError(f"{name}: a pipeline does not sum sparse gradients; use sparse=False")

    def finish(self) -> None:
        """Wait for the sums. A parameter without a gradient on any rank gets none."""
        for one in self._under_way:
            for parameter, total in one.wait():
                if total is None:
                    parameter.grad = None
                elif parameter.grad is None or parameter.grad.is_sparse:
                    parameter.grad = total.clone()
                else:
                    parameter.grad.copy_(total)
        self._under_way.clear()
        self.is_due = True

    def begin_anew(self) -> None:
        """Sums under way are lost."""
        self._under_way.clear()
        self.is_due = True

    def broadcast(self, source: int) -> None:
        """Give all ranks the values of rank ``source``."""
        for parameter in self.parameters:
            dist.broadcast(parameter.data, source, group=self.group)


def _dense(parameter: nn.Parameter) -> torch.Tensor | None:
    if parameter.grad is not None and parameter.grad.is_sparse:
        return torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    return parameter.grad
