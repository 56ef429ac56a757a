"""The duration of a program: each worker carries out its list in order, and begins each action as soon as its inputs
are there and the worker is free. Sends take no time of the worker. Pure; any thread.

Idle time hides sums of gradients: ``reductions`` says when a worker may begin those of its stages, over their copies in
other pipes and the data-parallel ones (Chimera, section 3.2).
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from byteps_py.parallel.pipe.checker import Result, check, inputs_of, results_of
from byteps_py.parallel.pipe.program import Action, ActionKind, Program


@dataclass(frozen=True, slots=True)
class Durations:
    """The durations of a whole micro-batch at one stage, in any unit. ``p2p``: from the end of an action on one worker
    until its result is on another. ``input_gradient_share``: of a backward pass, where it is split in two.
    ``stage_forward``, ``stage_backward``, ``hops``: those of each stage, and between a stage and the next one, instead
    of ``forward``, ``backward``, ``p2p``."""

    forward: float = 1.0
    backward: float = 2.0
    p2p: float = 0.0
    input_gradient_share: float = 0.5
    stage_forward: tuple[float, ...] = ()
    stage_backward: tuple[float, ...] = ()
    hops: tuple[float, ...] = ()

    def of(self, action: Action, parts_of_micro_batch: int) -> float:
        """The duration of ``action``."""
        backward = self.stage_backward[action.stage] if self.stage_backward else self.backward
        whole = {
            ActionKind.FORWARD: self.stage_forward[action.stage] if self.stage_forward else self.forward,
            ActionKind.BACKWARD: backward,
            ActionKind.INPUT_GRADIENT: backward * self.input_gradient_share,
            ActionKind.WEIGHT_GRADIENT: backward * (1 - self.input_gradient_share),
        }[action.kind]
        return whole * len(action.parts) / parts_of_micro_batch

    def hop(self, stage: int, other: int) -> float:
        """From a result of ``stage`` until it is on the worker of ``other``."""
        return self.hops[min(stage, other)] if self.hops else self.p2p


class Span(NamedTuple):
    """An action and its time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class ScheduleTimeline:
    """The actions of each worker with their times."""

    program: Program
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """The end of the last action."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @property
    def busy(self) -> list[float]:
        """The time that each worker computes."""
        return [sum(span.end - span.start for span in spans) for spans in self.spans]

    @property
    def idle(self) -> list[float]:
        """The time that each worker does not compute, until the makespan."""
        makespan = self.makespan
        return [makespan - busy for busy in self.busy]

    @property
    def bubble_ratio(self) -> float:
        """Idle time over all time of the workers, or over the time that they compute: see Program.idle_of_ideal."""
        whole = sum(self.busy) if self.program.idle_of_ideal else self.makespan * len(self.spans)
        return sum(self.idle) / whole if whole else 0.0


def simulate(program: Program, durations: Durations | None = None) -> ScheduleTimeline:
    """The timeline of ``program``. Raises ScheduleError if it can't be carried out (checker.py).

    >>> from byteps_py.parallel.pipe.schedules import chimera
    >>> simulate(chimera(4, 4)).makespan
    16.0
    """
    check(program)
    durations = durations or Durations()
    ends: dict[Result, float] = {}
    workers = range(len(program.workers))
    spans: list[list[Span]] = [[] for _ in workers]
    runnable = deque(workers)
    listeners: dict[Result, list[int]] = {}
    while runnable:
        worker = runnable.popleft()
        while len(spans[worker]) < len(program.workers[worker]):
            action = program.workers[worker][len(spans[worker])]
            start = spans[worker][-1].end if spans[worker] else 0.0
            inputs = list(inputs_of(program, action))
            missing = next((some.result for some in inputs if some.result not in ends), None)
            if missing is not None:
                listeners.setdefault(missing, []).append(worker)
                break
            for some in inputs:
                hop = durations.hop(some.result[2], action.stage) if some.worker != worker else 0.0
                start = max(start, ends[some.result] + hop)
            end = start + durations.of(action, program.parts_of_micro_batch)
            spans[worker].append(Span(action, start, end))
            for result in results_of(action):
                ends[result] = end
                runnable.extend(listeners.pop(result, ()))
    return ScheduleTimeline(program, tuple(map(tuple, spans)))


# ---- sums of gradients in idle time --------------------------------------------------------------------------------


#: (position in the worker's list of the action after which the sum may begin, (pipe, stage)). The position is -1 if the
#: worker has no action.
Reduction = tuple[int, tuple[int, int]]


class SyncMode(enum.Enum):
    """When the sum of a stage's gradients begins."""

    #: After the last action of the worker.
    AT_END = "at-end"
    #: After the last backward pass of the stage on the worker.
    EAGER = "eager"
    #: Like EAGER if idle time follows, which hides the sum; otherwise like AT_END.
    EAGER_OPT = "eager-opt"


def reductions(program: Program, durations: Durations | None, mode: SyncMode) -> list[list[Reduction]]:
    """The reductions of each worker, in the order in which they begin; each of its stages is there once. A stage
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
    """True if the worker waits between the action at ``position`` and its last action."""
    rounding_error = 1e-9 * makespan
    return any(
        following.start - span.end > rounding_error
        for span, following in zip(spans[position:], spans[position + 1 :], strict=False)
    )
