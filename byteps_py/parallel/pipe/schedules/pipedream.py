"""PipeDream (Narayanan et al., 2019) and PipeDream-2BW (2021): 1F1B without a flush between batches. Gradients are
computed with weights that are older than those they are applied to."""

from __future__ import annotations

import dataclasses

from byteps_py.parallel.pipe.program import Program, WeightRule
from byteps_py.parallel.pipe.schedules.dapple import dapple


def pipedream(workers: int, micro_batches: int) -> Program:
    """The weights of a stage change after each backward pass. Worker r keeps p - r versions, because as many
    micro-batches are between their forward and backward passes there:

        w(t + 1) = w(t) - lr * gradient(w1(t - p + 1), ..., wp(t))
    """
    versions = tuple(min(workers - worker, micro_batches) for worker in range(workers))
    return _stale("pipedream", WeightRule.STASHED, versions, workers, micro_batches)


def pipedream_2bw(workers: int, micro_batches: int) -> Program:
    """The weights change after each batch of m >= p micro-batches, with two versions:

    W(t + 1) = W(t) - lr * gradient(W(t - 1))
    """
    return _stale("pipedream-2bw", WeightRule.DOUBLE_BUFFERED, (2,) * workers, workers, micro_batches)


def _stale(name: str, rule: WeightRule, versions: tuple[int, ...], workers: int, micro_batches: int) -> Program:
    program = dapple(workers, micro_batches)
    return dataclasses.replace(program, name=name, rule=rule, weight_versions=versions)
