"""A pipeline schedule as data: for each worker, the list of actions that it carries out, in order. Pure; any thread.

A *pipe* is one pass through all stages of the model. Most schedules have one; Chimera has several, each with its own
copy of the stages, in different directions. A *stage* is a part of the model that one worker holds. The batch of a step
is cut into *parts*; each part goes through all stages of one pipe, forward and then backward. A part is a micro-batch,
or half of one (Chimera's backward halving).

Sends, receives, the reduction of gradients and changes of weight versions follow from the lists (checker.py,
simulator.py, weight_versions.py); no schedule states them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class ActionKind(enum.Enum):
    """The computation of a worker for a stage and a part."""

    FORWARD = "F"
    BACKWARD = "B"  # the gradients of the input and of the weights
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"  # after the INPUT_GRADIENT of the same part; nobody else waits for it


class Action(NamedTuple):
    """One entry of a worker's list. ``parts``: several only in Chimera's doubled forward passes, which run as one
    action."""

    kind: ActionKind
    pipe: int
    stage: int
    parts: tuple[int, ...]

    def __str__(self) -> str:
        parts = ", ".join(map(str, self.parts))
        noun = "part" if len(self.parts) == 1 else "parts"
        return f"{self.kind.name.lower().replace('_', ' ')} of {noun} {parts} at stage {self.stage} of pipe {self.pipe}"


class WeightRule(enum.Enum):
    """The weights with which a part is computed."""

    SYNCHRONOUS = "the same weights for all parts of a step"
    STASHED = "PipeDream: the newest weights at the forward pass, kept until the backward pass"
    DOUBLE_BUFFERED = "PipeDream-2BW: the weights before the newest ones"


@dataclass(frozen=True, slots=True)
class Program:
    """The actions of one step.

    Args:
        name: of the schedule.
        workers: the list of each worker.
        holders: for each pipe, the worker that holds each stage.
        micro_batches: of the step.
        parts_of_micro_batch: 2 if each micro-batch is cut in halves.
        warmup: forward actions of each worker before it begins to alternate.
        rule: which weights a part is computed with.
        weight_versions: that each worker keeps.
        idle_of_ideal: whether the bubble ratio of this schedule is by convention idle time over computing time;
            otherwise it is idle time over the whole time.
    """

    name: str
    workers: tuple[tuple[Action, ...], ...]
    holders: tuple[tuple[int, ...], ...]
    micro_batches: int
    parts_of_micro_batch: int = 1
    rule: WeightRule = WeightRule.SYNCHRONOUS
    weight_versions: tuple[int, ...] = ()
    idle_of_ideal: bool = False
    warmup: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.warmup:
            object.__setattr__(self, "warmup", tuple(map(_forwards_first, self.workers)))
        if not self.weight_versions:
            object.__setattr__(self, "weight_versions", (1,) * len(self.workers))

    @property
    def parts(self) -> int:
        """The number of parts of the step."""
        return self.micro_batches * self.parts_of_micro_batch

    @property
    def stages(self) -> int:
        """The number of stages of each pipe."""
        return len(self.holders[0])

    def stages_of(self, worker: int) -> list[tuple[int, int]]:
        """The (pipe, stage) pairs that a worker holds."""
        return [
            (pipe, stage)
            for pipe, holders in enumerate(self.holders)
            for stage, holder in enumerate(holders)
            if holder == worker
        ]

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """All actions as (worker, position in its list, action)."""
        for worker, actions in enumerate(self.workers):
            for position, action in enumerate(actions):
                yield worker, position, action

    def peak_in_flight(self) -> list[int]:
        """The most micro-batches, for each worker, whose activations it holds at once. A micro-batch counts once for
        each stage of the worker; half of one counts as a whole one until both halves are done."""
        return [_peak(actions, self.parts_of_micro_batch) for actions in self.workers]


def one_pipe(workers: int, chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """``holders`` of one pipe of ``workers * chunks`` stages: stage ``c * workers + r`` on worker ``r``."""
    return (tuple(stage % workers for stage in range(workers * chunks)),)


def forward(stage: int, part: int, pipe: int = 0) -> Action:
    """The forward pass of one part."""
    return Action(ActionKind.FORWARD, pipe, stage, (part,))


def backward(stage: int, part: int, pipe: int = 0) -> Action:
    """The backward pass of one part."""
    return Action(ActionKind.BACKWARD, pipe, stage, (part,))


def one_forward_one_backward(
    forwards: Sequence[Action], backwards: Sequence[Action], warmup: int
) -> tuple[Action, ...]:
    """``warmup`` forward actions, then backward and forward in turn, then the remaining backward actions."""
    order = list(forwards[:warmup])
    rest = iter(forwards[warmup:])
    for action in backwards:
        order.append(action)
        order.extend(following for following in [next(rest, None)] if following is not None)
    return tuple(order)


def _forwards_first(actions: Sequence[Action]) -> int:
    count = 0
    for action in actions:
        if action.kind is not ActionKind.FORWARD:
            break
        count += 1
    return count


def _peak(actions: Sequence[Action], parts_of_micro_batch: int) -> int:
    left: dict[tuple[int, int, int], int] = {}
    peak = 0
    for action in actions:
        for part in action.parts:
            key = action.pipe, action.stage, part // parts_of_micro_batch
            if action.kind is ActionKind.FORWARD:
                left[key] = left.get(key, 0) + 1
            elif action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT):
                left[key] -= 1
                if not left[key]:
                    del left[key]
        peak = max(peak, len(left))
    return peak
