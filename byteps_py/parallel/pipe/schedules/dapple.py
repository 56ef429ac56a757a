"""DAPPLE (Fan et al., 2021), also called 1F1B with flush: after some forward passes, one backward and one forward pass
in turn, so that few activations are held at once. PipeDream's schedules have the same order."""

from __future__ import annotations

from byteps_py.parallel.pipe.program import Program, backward, forward, one_forward_one_backward, one_pipe
from byteps_py.parallel.pipe.schedules.options import WarmUp


def dapple(workers: int, micro_batches: int, warm_up: WarmUp = WarmUp.A) -> Program:
    """The bubble of GPipe; worker r holds the activations of as many micro-batches as it warms up with: min(p - r, m)
    for A. B warms up with min(2 (p - r) - 1, m), which hides transfers behind computation."""

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
