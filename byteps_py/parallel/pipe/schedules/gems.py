"""GEMS (Jain et al., 2020): two copies of the model in opposite directions, and one micro-batch at a time on each
worker, so that as little memory as possible is needed."""

from __future__ import annotations

from byteps_py.parallel.pipe.program import Action, Program, backward, forward


def gems(workers: int, micro_batches: int) -> Program:
    """Bubble ratio about (p - 1) / (p + 1/2): the forward pass of a micro-batch overlaps with the backward pass of the
    one before it, which is in the other direction."""
    holders = (tuple(range(workers)), tuple(reversed(range(workers))))

    def actions_of(worker: int) -> tuple[Action, ...]:
        order = []
        for part in range(micro_batches):
            pipe = part % 2
            stage = holders[pipe].index(worker)
            order += [forward(stage, part, pipe), backward(stage, part, pipe)]
        return tuple(order)

    return Program("gems", tuple(map(actions_of, range(workers))), holders, micro_batches)
