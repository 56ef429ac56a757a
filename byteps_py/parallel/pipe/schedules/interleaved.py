"""Interleaved 1F1B (Narayanan et al., 2021) in the flexible form of Llama 3 (Grattafiori et al., 2024): each worker
holds several chunks of the model, and any number of micro-batches is possible."""

from __future__ import annotations

import itertools

from byteps_py.errors import UsageError
from byteps_py.log import logger
from byteps_py.parallel.pipe.program import (
    Action,
    Program,
    backward,
    forward,
    one_forward_one_backward,
    one_pipe,
)


def interleaved(workers: int, micro_batches: int, chunks: int = 2, consecutive: int | None = None) -> Program:
    """Micro-batches go through the chunks of a worker in rounds of ``consecutive`` (default: the number of workers, or
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
