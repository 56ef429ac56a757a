"""When a worker may sum the gradients of its stages across their replicas: the copies of the stage in other pipes, and
the data-parallel ones (Chimera, section 3.2). Pure; any thread."""

from __future__ import annotations

import enum

from byteps_py.parallel.pipe.program import ActionKind, Program
from byteps_py.parallel.pipe.simulator import Durations, ScheduleTimeline, Span, simulate

#: (position in the worker's list of the action after which the sum may begin, (pipe, stage)). The position is -1 if the
#: worker has no action.
Reduction = tuple[int, tuple[int, int]]


class SyncMode(enum.Enum):
    """When the sum of a stage's gradients begins."""

    #: After the last action of the worker.
    AT_END = "at-end"
    #: After the last backward pass of the stage on the worker.
    EAGER = "eager"
    #: As EAGER if idle time follows, which hides the sum; otherwise as AT_END.
    EAGER_OPT = "eager-opt"


def reductions(program: Program, durations: Durations | None, mode: SyncMode) -> list[list[Reduction]]:
    """For each worker its reductions, in the order in which they begin; each of its stages is there once. A stage
    without actions (GEMS with one micro-batch) is reduced at the end. Only EAGER_OPT depends on ``durations``.

    >>> from byteps_py.parallel.pipe.schedules import chimera
    >>> reductions(chimera(4, 4), Durations(), SyncMode.EAGER_OPT)[0]  # idle after the last action of stage 3
    [(5, (1, 3)), (7, (0, 0))]
    """
    timeline = simulate(program, durations)
    return [_of_worker(timeline, worker, mode) for worker in range(len(program.workers))]


def _of_worker(timeline: ScheduleTimeline, worker: int, mode: SyncMode) -> list[Reduction]:
    program = timeline.program
    end = len(program.workers[worker]) - 1
    ready = dict.fromkeys(program.stages_of(worker), end)
    for position, action in enumerate(program.workers[worker]):
        if mode is not SyncMode.AT_END and action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT):
            ready[action.pipe, action.stage] = position
    if mode is SyncMode.EAGER_OPT:
        spans = timeline.spans[worker]
        ready = {stage: at if _is_idle_after(spans, at, timeline.makespan) else end for stage, at in ready.items()}
    return sorted((position, stage) for stage, position in ready.items())


def _is_idle_after(spans: tuple[Span, ...], position: int, makespan: float) -> bool:
    """Whether the worker waits between the action at ``position`` and its last action."""
    rounding_error = 1e-9 * makespan
    return any(
        following.start - span.end > rounding_error
        for span, following in zip(spans[position:], spans[position + 1 :], strict=False)
    )
