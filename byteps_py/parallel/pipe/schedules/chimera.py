"""Chimera (Li and Hoefler, 2021): pipes in both directions, each with its own copy of the stages, fill each other's
bubbles.

Time is cut into slots of equal length. A unit is as many micro-batches as there are workers (p), shared evenly among
the pipes. In a unit that begins at slot 0, micro-batch j of a pipe is at stage s

    forward    in slot 2 j + s
    backward   in slot 2 j + p + (p - 1 - s)

and no two of these meet in the same slot of a worker: on worker w, the forward passes of down pipes and the backward
passes of up pipes are in slots of the parity of w, all others in the others. A unit occupies 2 p slots of each worker,
so the next one begins 2 p slots later.

With *forward doubling* each forward slot holds two micro-batches, and with *backward halving* each backward slot half
of one, so that forward and backward slots last as long as each other. Each forward slot then has two backward slots, p
slots apart, and a unit occupies 3 p slots: no bubble is left between units.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.program import Action, ActionKind, Program
from byteps_py.parallel.pipe.schedules.options import More

#: (slot, action)
_Slot = tuple[int, Action]


def chimera(workers: int, micro_batches: int, pipes: int = 2, more: More = More.DIRECT) -> Program:
    """Bubble ratio (p - 2f) / (2f m + p - 2f) in slots of equal length, for 2f ``pipes`` and m = p micro-batches;
    each worker holds ``pipes`` stages.

    ``more``: how more than p micro-batches are arranged: DIRECT (unit after unit), DOUBLING or HALVING. Raises
    UsageError if that is not possible for these numbers.
    """
    _check(workers, micro_batches, pipes, more)
    half = pipes // 2
    down = [tuple((number * workers // half + stage) % workers for stage in range(workers)) for number in range(half)]
    holders = (*down, *(tuple(reversed(some)) for some in down))
    lists: list[list[_Slot]] = [[] for _ in range(workers)]
    slots = _direct if more is More.DIRECT else _doubled
    for slot, action in slots(workers, pipes, micro_batches * (2 if more is More.HALVING else 1)):
        lists[holders[action.pipe][action.stage]].append((slot, action))
    return Program(
        "chimera",
        tuple(tuple(action for _, action in sorted(some, key=lambda entry: entry[0])) for some in lists),
        holders,
        micro_batches,
        parts_of_micro_batch=2 if more is More.HALVING else 1,
    )


def _direct(workers: int, pipes: int, parts: int) -> Iterator[_Slot]:
    for unit, first in enumerate(range(0, parts, workers)):
        each, begin = min(workers, parts - first) // pipes, 2 * workers * unit
        for pipe, j, stage in itertools.product(range(pipes), range(each), range(workers)):
            own = (first + pipe * each + j,)
            yield begin + 2 * j + stage, Action(ActionKind.FORWARD, pipe, stage, own)
            yield begin + 2 * j + 2 * workers - 1 - stage, Action(ActionKind.BACKWARD, pipe, stage, own)


def _doubled(workers: int, pipes: int, parts: int) -> Iterator[_Slot]:
    """Forward passes of two parts: two micro-batches, or the halves of one."""
    for unit, first in enumerate(range(0, parts, 2 * workers)):
        each, begin = min(2 * workers, parts - first) // 2 // pipes, 3 * workers * unit
        for pipe, j, stage in itertools.product(range(pipes), range(each), range(workers)):
            part = first + 2 * (pipe * each + j)
            yield begin + 2 * j + stage, Action(ActionKind.FORWARD, pipe, stage, (part, part + 1))
            for half in (0, 1):
                slot = begin + 2 * j + (2 + half) * workers - 1 - stage
                yield slot, Action(ActionKind.BACKWARD, pipe, stage, (part + half,))


def _check(workers: int, micro_batches: int, pipes: int, more: More) -> None:
    if workers % 2:
        raise UsageError(f"Chimera has pipes in both directions: it needs an even number of workers, not {workers}")
    if pipes % 2 or pipes < 2 or workers // 2 % (pipes // 2):
        raise UsageError(
            f"Chimera with {workers} workers can't have {pipes} pipes: their number is 2f, and f divides {workers // 2}"
        )
    pieces = pipes * (2 if more is More.DOUBLING else 1)
    if micro_batches < 1 or micro_batches % pieces:
        raise UsageError(
            f"Chimera with {pipes} pipes ({more.value}) needs a multiple of {pieces} micro-batches, not {micro_batches}"
        )
