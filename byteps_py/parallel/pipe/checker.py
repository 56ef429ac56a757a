"""Refuses programs that can't be carried out. Pure; any thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from byteps_py.errors import ScheduleError
from byteps_py.parallel.pipe.program import Action, ActionKind, Program

#: A computed value: (kind, pipe, stage, part).
Result = tuple[ActionKind, int, int, int]


@dataclass(frozen=True, slots=True)
class Input:
    """An input of an action: the result of another one, computed by ``worker``."""

    result: Result
    worker: int

    def __str__(self) -> str:
        kind, pipe, stage, part = self.result
        return f"{Action(kind, pipe, stage, (part,))} on worker {self.worker}"


def inputs_of(program: Program, action: Action) -> Iterator[Input]:
    """The inputs of ``action``, in the order in which they are checked."""
    kind, pipe, stage, parts = action
    holders = program.holders[pipe]
    for part in parts:
        if kind is ActionKind.FORWARD:
            if stage:
                yield Input((ActionKind.FORWARD, pipe, stage - 1, part), holders[stage - 1])
            continue
        yield Input((ActionKind.FORWARD, pipe, stage, part), holders[stage])
        if kind is ActionKind.WEIGHT_GRADIENT:
            yield Input((ActionKind.INPUT_GRADIENT, pipe, stage, part), holders[stage])
        elif stage + 1 < len(holders):
            yield Input((ActionKind.INPUT_GRADIENT, pipe, stage + 1, part), holders[stage + 1])


def results_of(action: Action) -> Iterator[Result]:
    """The results of ``action``. A BACKWARD is an INPUT_GRADIENT and a WEIGHT_GRADIENT."""
    kind, pipe, stage, parts = action
    for part in parts:
        if kind is ActionKind.BACKWARD:
            yield ActionKind.INPUT_GRADIENT, pipe, stage, part
            yield ActionKind.WEIGHT_GRADIENT, pipe, stage, part
        else:
            yield kind, pipe, stage, part


def check(program: Program) -> None:
    """Raises ScheduleError, which names a worker, its action and the mistake, if a worker does not hold the stage of an
    action, if an action is missing or there twice, or if workers wait for each other (or for themselves) for ever: each
    carries out its list in order, and a receive ends when its data has come."""
    _check_once(program)
    _check_order(program)


def _check_once(program: Program) -> None:
    done: dict[Result, int] = {}
    pipe_of: dict[int, int] = {}
    for worker, position, action in program.actions():
        where = f"worker {worker}, action {position} ({action})"
        _, pipe, stage, parts = action
        if not 0 <= pipe < len(program.holders) or not 0 <= stage < len(program.holders[pipe]):
            raise ScheduleError(f"{where}: there is no such stage")
        if program.holders[pipe][stage] != worker:
            raise ScheduleError(f"{where}: worker {program.holders[pipe][stage]} holds this stage")
        if not parts:
            raise ScheduleError(f"{where}: it has no part")
        for part in parts:
            if not 0 <= part < program.parts:
                raise ScheduleError(f"{where}: the step has {program.parts} parts, counted from 0")
            if pipe_of.setdefault(part, pipe) != pipe:
                raise ScheduleError(f"{where}: part {part} goes through pipe {pipe_of[part]}, too")
        for result in results_of(action):
            if result in done:
                raise ScheduleError(f"{where}: it is there twice, or with another action that includes it")
            done[result] = worker
    for part in range(program.parts):
        if part not in pipe_of:
            raise ScheduleError(f"no worker has an action of part {part}")
        pipe = pipe_of[part]
        for stage, worker in enumerate(program.holders[pipe]):
            for kind in (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT):
                if (kind, pipe, stage, part) not in done:
                    raise ScheduleError(f"worker {worker}: the {Action(kind, pipe, stage, (part,))} is missing")


def _check_order(program: Program) -> None:
    done: set[Result] = set()
    positions = [0] * len(program.workers)
    waiting: dict[int, Input] = {}
    runnable = list(range(len(program.workers)))
    #: Workers that wait for a result.
    listeners: dict[Result, list[int]] = {}
    while runnable:
        worker = runnable.pop()
        actions = program.workers[worker]
        waiting.pop(worker, None)
        while positions[worker] < len(actions):
            action = actions[positions[worker]]
            missing = next((some for some in inputs_of(program, action) if some.result not in done), None)
            if missing is not None:
                waiting[worker] = missing
                listeners.setdefault(missing.result, []).append(worker)
                break
            for result in results_of(action):
                done.add(result)
                runnable += listeners.pop(result, ())
            positions[worker] += 1
    if waiting:
        worker = min(waiting)
        action = program.workers[worker][positions[worker]]
        others = "; ".join(
            f"worker {other} waits in action {positions[other]} for the {some}"
            for other, some in sorted(waiting.items())
            if other != worker
        )
        raise ScheduleError(
            f"deadlock: worker {worker}, action {positions[worker]} ({action}) waits for the {waiting[worker]}, which "
            f"never comes{f'; {others}' if others else ''}"
        )
