"""Closed formulas of the papers. Times in any unit; p workers (stages), m micro-batches, v chunks on a worker.

Pure; any thread.
"""

from __future__ import annotations

import math


def gpipe_bubble_ratio(p: int, m: int) -> float:
    """Idle time over the whole time of GPipe and DAPPLE."""
    return (p - 1) / (m + p - 1)


def interleaved_bubble_ratio(p: int, m: int, v: int) -> float:
    """Idle time over computing time of the interleaved schedule, if it ``is_ideal``.

    >>> round(100 * interleaved_bubble_ratio(16, 32, 8), 2)  # Llama 3
    5.86
    """
    return (p - 1) / (m * v)


def is_ideal(p: int, m: int, k: int) -> bool:
    """Whether rounds of ``k`` consecutive micro-batches give the interleaved schedule its smallest bubble (Llama 3)."""
    return k >= p and (m % k == 0 or p <= m % k < k)


def all_forward_all_backward_time(p: int, m: int, v: int, forward: float = 1.0, backward: float = 2.0) -> float:
    """The time of the interleaved schedule with fewer than p consecutive micro-batches."""
    return (forward + backward) * (m * v + p - 1 + max(0, p - m) * (v - 1))


def reduce_scatters(m: int, v: int, k: int, zero_stage: int, alternates: bool = True) -> int:
    """Reduce-scatters of gradients of a worker in a step of the interleaved schedule (Llama 3): ``alternates``: one
    forward, one backward; otherwise all forward passes come first."""
    return v * math.ceil(m / k) if zero_stage >= 2 and alternates else v


def chimera_bubble_ratio(p: int, m: int, pipes: int = 2) -> float:
    """Idle time over the whole time of a unit of Chimera (m = p), in slots of equal length."""
    return (p - pipes) / (pipes * m + p - pipes)


def chimera_doubled_time(p: int, m: int, slot: float) -> float:
    """The time of Chimera with forward doubling (``slot`` 2) or backward halving (``slot`` 1), for forward 1 and
    backward 2, in full units."""
    return 3 * m + (p - 2) * slot


def chimera_critical_path(p: int, units: int) -> tuple[int, int]:
    """(forward passes, backward passes) on the critical path of directly concatenated units."""
    return p + 2 * (units - 1), (2 * p - 2) * units


def chimera_time(
    p: int, units: int, forward: float, backward: float, p2p: float, exposed_all_reduce: float = 0.0
) -> float:
    """``exposed_all_reduce``: the longest time that a worker's reduction of gradients is not hidden."""
    forwards, backwards = chimera_critical_path(p, units)
    return forwards * (forward + p2p) + backwards * (backward + p2p) + exposed_all_reduce


def rabenseifner_time(replicas: int, size: float, alpha: float, beta: float) -> float:
    """An all-reduce of ``size`` bytes by reduce-scatter and all-gather with halving and doubling: ``alpha`` for a
    message, ``beta`` for a byte.

    >>> rabenseifner_time(8, 1e6, 5, 1e-3)
    1780.0
    """
    return 2 * math.log2(replicas) * alpha + 2 * (replicas - 1) / replicas * size * beta


def ring_time(replicas: int, size: float, alpha: float, beta: float) -> float:
    """The same in a ring.

    >>> ring_time(8, 1e6, 5, 1e-3)
    1820.0
    """
    return 2 * (replicas - 1) * alpha + 2 * (replicas - 1) / replicas * size * beta
