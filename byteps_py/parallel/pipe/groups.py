"""The process groups of a pipeline. All ranks of the job make them together, also those of the other pipelines on other
parts of a mesh. One thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.layout import PipelineLayout
from byteps_py.parallel.pipe.program import Program

#: The ranks of each group of one kind; a rank is in one of them at most.
Rows = list[list[int]]


@dataclass(frozen=True, slots=True)
class PipelineGroups:
    """Of this rank. ``workers``: of its data-parallel copy. ``everyone``: of all copies. ``stages``: the ranks with the
    same stage, if these are several. ``tied``: those of some workers, in all copies, which share parameters.

    A group for each stage, and for each set of shared parameters: workers may finish their stages in different orders,
    and the sums of one group never wait for those of another."""

    workers: dist.ProcessGroup
    everyone: dist.ProcessGroup
    stages: dict[int, dist.ProcessGroup]
    tied: dict[frozenset[int], dist.ProcessGroup]

    @classmethod
    def new(cls, layout: PipelineLayout, program: Program, tied: Sequence[frozenset[int]]) -> PipelineGroups:
        """All ranks of the job call it. ``tied``: sets of workers whose stages share parameters. Raises UsageError."""
        wanted = [layout.copies_of_workers(), layout.rows_of(range(layout.workers))]
        wanted += [layout.rows_of(workers) for workers in holders_of(program)]
        wanted += [layout.rows_of(workers) for workers in tied]
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


def new_groups(wanted: Sequence[Rows]) -> list[dist.ProcessGroup | None]:
    """A group for each entry of ``wanted``: that of the row with this rank; None if there is none. torch wants all
    ranks of the job to make all groups in the same order, so each one is told what others want. All ranks of the job
    call it. Raises UsageError on all of them if those of a row want different groups."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, list(wanted))
    for rank, theirs in enumerate(told):
        for other in sorted({one for rows in theirs for row in rows if rank in row for one in row}):
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
        for place, rows in enumerate(theirs):
            for row in rows:
                group = dist.new_group(row)
                if dist.get_rank() in row:
                    own[place] = group
    return own
