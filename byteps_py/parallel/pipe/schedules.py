"""The schedules: each is a function of the number of workers p and of micro-batches m that returns a Program. ``make``
finds them by name. Pure; any thread."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.program import (
    Action,
    ActionKind,
    Program,
    WeightRule,
    backward,
    forward,
    one_forward_one_backward,
    one_pipe,
)
from byteps_py.system.log import logger


def gpipe(workers: int, micro_batches: int) -> Program:
    """GPipe (Huang et al., 2019): all forward passes, then all backward passes.

    Bubble ratio (p - 1) / (m + p - 1); each worker holds the activations of all micro-batches.
    """
    return Program(
        "gpipe",
        tuple(
            tuple(
                [forward(worker, part) for part in range(micro_batches)]
                + [backward(worker, part) for part in range(micro_batches)]
            )
            for worker in range(workers)
        ),
        one_pipe(workers),
        micro_batches,
    )


class WarmUp(enum.Enum):
    """The number of forward passes that worker r of p makes before its first backward pass, in DAPPLE."""

    A = "A"  # p - r
    B = "B"  # 2 (p - r) - 1


def dapple(workers: int, micro_batches: int, warm_up: WarmUp = WarmUp.A) -> Program:
    """DAPPLE (Fan et al., 2021), also called 1F1B with flush: after some forward passes, one backward and one forward
    pass in turn, so that few activations are held at once.

    The bubble of GPipe; worker r holds the activations of as many micro-batches as it warms up with: min(p - r, m) for
    A. B warms up with min(2 (p - r) - 1, m), which hides transfers behind computation.
    """

    def warmup(worker: int) -> int:
        behind = workers - worker
        return min(behind if warm_up is WarmUp.A else 2 * behind - 1, micro_batches)

    return Program(
        "dapple",
        tuple(
            one_forward_one_backward(
                [forward(worker, part) for part in range(micro_batches)],
                [backward(worker, part) for part in range(micro_batches)],
                warmup(worker),
            )
            for worker in range(workers)
        ),
        one_pipe(workers),
        micro_batches,
    )


def interleaved(workers: int, micro_batches: int, chunks: int = 2, consecutive: int | None = None) -> Program:
    """Interleaved 1F1B (Narayanan et al., 2021) in the flexible form of Llama 3 (Grattafiori et al., 2024): each worker
    holds several chunks of the model, and any number of micro-batches is possible.

    Micro-batches go through the chunks of a worker in rounds of ``consecutive`` (default: the number of workers, or
    of micro-batches if that is less). Raises UsageError if there are fewer micro-batches than ``consecutive``.

    The bubble is (p - 1) / (m v) of the ideal time if ``consecutive >= workers`` and the last round has none or at
    least ``workers`` micro-batches. More consecutive micro-batches cost ``(consecutive - workers) (chunks - 1)``
    activations more and hide transfers. Fewer than ``workers`` would deadlock: all forward passes then come before
    all backward passes. A last round so short that it would deadlock is spread over the other rounds.
    """
    consecutive = min(workers, micro_batches) if consecutive is None else consecutive
    if consecutive > micro_batches:
        raise UsageError(f"{consecutive} consecutive micro-batches are not possible: a step has {micro_batches}")
    if consecutive < workers:
        logger.warning(
            "interleaved schedule: %d consecutive micro-batches are fewer than %d workers, so all forward passes come "
            "before all backward passes",
            consecutive,
            workers,
        )
        return _program(workers, chunks, [micro_batches], [micro_batches * chunks] * workers)
    last = micro_batches % consecutive
    # Found by simulation for 2 to 8 workers and 2 to 4 chunks; two chunks carry on after a single micro-batch.
    if chunks > 1 and 0 < last < 2 * (workers - 1) - consecutive and (chunks, last) != (2, 1):
        return _one_forward_one_backward(workers, chunks, _even(micro_batches, micro_batches // consecutive))
    return one_forward_one_backward_in_rounds(workers, micro_batches, chunks, consecutive)


def one_forward_one_backward_in_rounds(workers: int, micro_batches: int, chunks: int, consecutive: int) -> Program:
    """The schedule for ``consecutive >= workers``; with fewer, the checker finds the deadlock."""
    whole, last = divmod(micro_batches, consecutive)
    return _one_forward_one_backward(workers, chunks, [consecutive] * whole + [last] * (last > 0))


def _one_forward_one_backward(workers: int, chunks: int, rounds: list[int]) -> Program:
    warmups = [
        min(sum(rounds) * chunks, (chunks - 1) * rounds[0] + 2 * (workers - worker - 1)) for worker in range(workers)
    ]
    return _program(workers, chunks, rounds, warmups)


def _even(micro_batches: int, rounds: int) -> list[int]:
    each, more = divmod(micro_batches, rounds)
    return [each + 1] * more + [each] * (rounds - more)


def _program(workers: int, chunks: int, rounds: list[int], warmups: list[int]) -> Program:
    """``rounds``: the number of micro-batches of each."""
    ends = list(itertools.accumulate(rounds))
    parts = [range(end - count, end) for count, end in zip(rounds, ends, strict=True)]

    def actions_of(worker: int) -> tuple[Action, ...]:
        forwards = [
            forward(chunk * workers + worker, part) for some in parts for chunk in range(chunks) for part in some
        ]
        backwards = [
            backward(chunk * workers + worker, part)
            for some in parts
            for chunk in reversed(range(chunks))
            for part in some
        ]
        warmup = warmups[worker]
        if warmup < len(forwards):  # one F, then one B in turn
            warmup += 1
        return one_forward_one_backward(forwards, backwards, warmup)

    return Program(
        "interleaved",
        tuple(map(actions_of, range(workers))),
        one_pipe(workers, chunks),
        sum(rounds),
        idle_of_ideal=True,
        warmup=tuple(warmups),
    )


class More(enum.Enum):
    """The arrangement of more micro-batches than workers in Chimera."""

    DIRECT = "direct"
    DOUBLING = "doubling"
    HALVING = "halving"


#: (slot, action)
_Slot = tuple[int, Action]


def chimera(workers: int, micro_batches: int, pipes: int = 2, more: More = More.DIRECT) -> Program:
    """Chimera (Li and Hoefler, 2021): pipes in both directions, each with its own copy of the stages, fill each other's
    bubbles.

    Time is cut into slots of equal length. A unit is as many micro-batches as there are workers (p), shared evenly
    among the pipes. In a unit that begins at slot 0, micro-batch j of a pipe is at stage s

        forward    in slot 2 j + s
        backward   in slot 2 j + p + (p - 1 - s)

    and no two of these meet in the same slot of a worker: on worker w, the forward passes of down pipes and the
    backward passes of up pipes are in slots of the parity of w, all others in the others. A unit occupies 2 p slots of
    each worker, so the next one begins 2 p slots later.

    With *forward doubling* each forward slot holds two micro-batches, and with *backward halving* each backward slot
    half of one, so that forward and backward slots last as long as each other. Each forward slot then has two backward
    slots, p slots apart, and a unit occupies 3 p slots: no bubble is left between units.

    Bubble ratio (p - 2f) / (2f m + p - 2f) in slots of equal length, for 2f ``pipes`` and m = p micro-batches; each
    worker holds ``pipes`` stages.

    ``more``: how more than p micro-batches are arranged: DIRECT (unit after unit), DOUBLING or HALVING. Raises
    UsageError if that is not possible for these numbers.
    """
    _check_chimera(workers, micro_batches, pipes, more)
    half = pipes // 2
    down = [tuple((number * workers // half + stage) % workers for stage in range(workers)) for number in range(half)]
    holders = (*down, *(tuple(reversed(some)) for some in down))
    lists: list[list[_Slot]] = [[] for _ in range(workers)]
    slots = _direct_slots if more is More.DIRECT else _doubled_slots
    for slot, action in slots(workers, pipes, micro_batches * (2 if more is More.HALVING else 1)):
        lists[holders[action.pipe][action.stage]].append((slot, action))
    return Program(
        "chimera",
        tuple(tuple(action for _, action in sorted(some, key=lambda entry: entry[0])) for some in lists),
        holders,
        micro_batches,
        parts_of_micro_batch=2 if more is More.HALVING else 1,
    )


def _direct_slots(workers: int, pipes: int, parts: int) -> Iterator[_Slot]:
    for unit, first in enumerate(range(0, parts, workers)):
        each, begin = min(workers, parts - first) // pipes, 2 * workers * unit
        for pipe, j, stage in itertools.product(range(pipes), range(each), range(workers)):
            own = (first + pipe * each + j,)
            yield begin + 2 * j + stage, Action(ActionKind.FORWARD, pipe, stage, own)
            yield begin + 2 * j + 2 * workers - 1 - stage, Action(ActionKind.BACKWARD, pipe, stage, own)


def _doubled_slots(workers: int, pipes: int, parts: int) -> Iterator[_Slot]:
    """Forward passes of two parts: two micro-batches, or the halves of one."""
    for unit, first in enumerate(range(0, parts, 2 * workers)):
        each, begin = min(2 * workers, parts - first) // 2 // pipes, 3 * workers * unit
        for pipe, j, stage in itertools.product(range(pipes), range(each), range(workers)):
            part = first + 2 * (pipe * each + j)
            yield begin + 2 * j + stage, Action(ActionKind.FORWARD, pipe, stage, (part, part + 1))
            for half in (0, 1):
                slot = begin + 2 * j + (2 + half) * workers - 1 - stage
                yield slot, Action(ActionKind.BACKWARD, pipe, stage, (part + half,))


def _check_chimera(workers: int, micro_batches: int, pipes: int, more: More) -> None:
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


def gems(workers: int, micro_batches: int) -> Program:
    """GEMS (Jain et al., 2020): two copies of the model in opposite directions, and one micro-batch at a time on each
    worker, so that as little memory as possible is needed.

    Bubble ratio about (p - 1) / (p + 1/2): the forward pass of a micro-batch overlaps with the backward pass of the
    one before it, which is in the other direction.
    """
    holders = (tuple(range(workers)), tuple(reversed(range(workers))))

    def actions_of(worker: int) -> tuple[Action, ...]:
        order = []
        for part in range(micro_batches):
            pipe = part % 2
            stage = holders[pipe].index(worker)
            order += [forward(stage, part, pipe), backward(stage, part, pipe)]
        return tuple(order)

    return Program("gems", tuple(map(actions_of, range(workers))), holders, micro_batches)


def pipedream(workers: int, micro_batches: int) -> Program:
    """PipeDream (Narayanan et al., 2019): 1F1B without a flush between batches. Gradients are computed with weights
    that are older than those they are applied to.

    The weights of a stage change after each backward pass. Worker r keeps p - r versions, because as many
    micro-batches are between their forward and backward passes there:

        w(t + 1) = w(t) - lr * gradient(w1(t - p + 1), ..., wp(t))
    """
    versions = tuple(min(workers - worker, micro_batches) for worker in range(workers))
    return _stale("pipedream", WeightRule.STASHED, versions, workers, micro_batches)


def pipedream_2bw(workers: int, micro_batches: int) -> Program:
    """PipeDream-2BW (Narayanan et al., 2021): the weights change after each batch of m >= p micro-batches, with two
    versions:

    W(t + 1) = W(t) - lr * gradient(W(t - 1))
    """
    return _stale("pipedream-2bw", WeightRule.DOUBLE_BUFFERED, (2,) * workers, workers, micro_batches)


def _stale(name: str, rule: WeightRule, versions: tuple[int, ...], workers: int, micro_batches: int) -> Program:
    program = dapple(workers, micro_batches)
    return dataclasses.replace(program, name=name, rule=rule, weight_versions=versions)


__all__ = ["More", "WarmUp", "chimera", "dapple", "gems", "gpipe", "interleaved", "make", "pipedream", "pipedream_2bw"]


class _Schedule(NamedTuple):
    """``options``: the parameters after the number of workers and micro-batches, by the name of the option."""

    function: Callable[..., Program]
    options: dict[str, str]


SCHEDULES = {
    "gpipe": _Schedule(gpipe, {}),
    "dapple": _Schedule(dapple, {"warmup": "warm_up"}),
    "interleaved": _Schedule(interleaved, {"chunks": "chunks", "consecutive": "consecutive"}),
    "chimera": _Schedule(chimera, {"pipes": "pipes", "more": "more"}),
    "gems": _Schedule(gems, {}),
    "pipedream": _Schedule(pipedream, {}),
    "pipedream-2bw": _Schedule(pipedream_2bw, {}),
}
#: The field's other names.
ALIASES = {"1f1b": "dapple"}
#: Carried out by torch, which makes their lists of actions (pipeline_plan.py).
OF_TORCH = ("zero-bubble", "zb-v", "dualpipev")


def make(name: str, workers: int, micro_batches: int, **options: Any) -> Program:
    """The schedule ``name`` with the options of `bps schedule`: ``chunks``, ``consecutive``, ``pipes``, ``more``
    ("direct", "doubling" or "halving") and ``warmup`` ("A" or "B"). "1f1b" is dapple. Raises UsageError.

    >>> make("chimera", 4, 8, more="doubling").warmup
    (3, 4, 4, 3)
    >>> make("1f1b", 4, 8).name
    'dapple'
    """
    name = ALIASES.get(name.lower(), name)
    if name in OF_TORCH:
        raise UsageError(
            f"{name} is one of torch's schedules, and torch makes its lists of actions: bps.parallel.Pipeline takes "
            f"it, and `bps schedule` does not draw it; it draws {', '.join(SCHEDULES)}"
        )
    schedule = SCHEDULES.get(name)
    if schedule is None:
        ours = ", ".join(each if each != "dapple" else "dapple (also called 1f1b)" for each in SCHEDULES)
        raise UsageError(
            f"there is no schedule {name!r}; there are {ours}, and in a Pipeline torch's {', '.join(OF_TORCH)}"
        )
    if unknown := sorted(set(options) - set(schedule.options)):
        known = ", ".join(schedule.options) or "none"
        raise UsageError(f"the schedule {name} has no option {unknown[0]}; its options: {known}")
    for what, count in {"workers": workers, "micro-batches": micro_batches, **options}.items():
        if isinstance(count, int) and count < 1:
            raise UsageError(f"{what}: {count} is not possible; at least 1 is needed")
    arguments = {schedule.options[option]: _value(option, value) for option, value in options.items()}
    return schedule.function(workers, micro_batches, **arguments)


def _value(option: str, value: Any) -> Any:
    kind = {"more": More, "warmup": WarmUp}.get(option)
    if kind is None or isinstance(value, kind):
        return value
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(repr(each.value) for each in kind)
        raise UsageError(f"{option}={value!r} is not possible; it is one of {names}") from None
