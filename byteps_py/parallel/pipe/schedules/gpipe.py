"""GPipe (Huang et al., 2019): all forward passes, then all backward passes."""

from __future__ import annotations

from byteps_py.parallel.pipe.program import Program, backward, forward, one_pipe


def gpipe(workers: int, micro_batches: int) -> Program:
    """Bubble ratio (p - 1) / (m + p - 1); each worker holds the activations of all micro-batches."""
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
