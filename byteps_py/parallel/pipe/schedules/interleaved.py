"""Interleaved 1F1B (Narayanan et al., 2021) in the flexible form of Llama 3 (Grattafiori et al., 2024): each worker
holds several chunks of the model, and any number of micro-batches is possible."""

from __future__ import annotations

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
    of micro-batches if that is less).

    The bubble is (p - 1) / (m v) of the ideal time if ``consecutive >= workers`` and the last round has none or at
    least ``workers`` micro-batches. More consecutive micro-batches cost ``(consecutive - workers) (chunks - 1)``
    activations more and hide transfers. Fewer than ``workers`` would deadlock: all forward passes then come before
    all backward passes.
    """
    consecutive = min(workers, micro_batches) if consecutive is None else consecutive
    if consecutive < workers:
        logger.warning(
            "interleaved schedule: %d consecutive micro-batches are fewer than %d workers, so all forward passes come "
            "before all backward passes",
            consecutive,
            workers,
        )
        return _program(workers, micro_batches, chunks, micro_batches, [micro_batches * chunks] * workers)
    return one_forward_one_backward_in_rounds(workers, micro_batches, chunks, consecutive)


def one_forward_one_backward_in_rounds(workers: int, micro_batches: int, chunks: int, consecutive: int) -> Program:
    """The schedule for ``consecutive >= workers``; with fewer, the checker finds the deadlock."""
    warmups = [
        min(micro_batches * chunks, (chunks - 1) * consecutive + 2 * (workers - worker - 1))
        for worker in range(workers)
    ]
    return _program(workers, micro_batches, chunks, consecutive, warmups)


def _program(workers: int, micro_batches: int, chunks: int, consecutive: int, warmups: list[int]) -> Program:
    rounds = [range(first, min(first + consecutive, micro_batches)) for first in range(0, micro_batches, consecutive)]

    def actions_of(worker: int) -> tuple[Action, ...]:
        forwards = [
            forward(chunk * workers + worker, part) for some in rounds for chunk in range(chunks) for part in some
        ]
        backwards = [
            backward(chunk * workers + worker, part)
            for some in rounds
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
        micro_batches,
        idle_of_ideal=True,
        warmup=tuple(warmups),
    )
