"""The choices that some schedules offer."""

from __future__ import annotations

import enum


class WarmUp(enum.Enum):
    """How many forward passes worker r of p makes before its first backward pass, in DAPPLE."""

    A = "A"  # p - r
    B = "B"  # 2 (p - r) - 1


class More(enum.Enum):
    """How Chimera arranges more micro-batches than workers."""

    DIRECT = "direct"
    DOUBLING = "doubling"
    HALVING = "halving"
