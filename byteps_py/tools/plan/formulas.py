"""Closed formulas of the papers: the bytes of a model's activations and states.

b sequences of a micro-batch, s tokens of a sequence, h hidden values of a token, a attention heads, t ranks of a
tensor-parallel group. Activations and weights have 2 bytes each. Pure; any thread.

The bytes of a model's states on each rank, for each way to divide them, are those of ZeRO (Rajbhandari et al., 2020,
section 5). In mixed precision a parameter has 16 bytes: 2 for its value, 2 for its gradient, and 12 for Adam's float32
value and two moments. In float32 it has 16, too: 4 for the value, 4 for the gradient, 8 for the moments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from byteps_py.errors import UsageError

#: The values that a layer keeps for its backward pass: everything on one rank; with tensor parallelism; with sequence
#: parallelism besides; with this and attention scores recomputed; only its input.
ActivationMode = Literal["none", "tensor", "sequence", "selective", "full"]


def activation_bytes(
    sequence: int, batch: int, hidden: int, heads: int, tp: int = 1, mode: ActivationMode = "none"
) -> float:
    """The bytes that a layer keeps for the backward pass of a micro-batch, on one rank (Korthikanti et al., 2022).

    "none": s·b·h(34 + 5as/h); "tensor": s·b·h(10 + 24/t + 5as/(ht)); "sequence": as "none", divided by t; "selective":
    34·s·b·h/t; "full": 2·s·b·h. Raises UsageError for another ``mode``.

    >>> [activation_bytes(2048, 4, 6144, 64, 8, mode) / 2**20 for mode in ("none", "tensor", "selective")]
    [6752.0, 1264.0, 204.0]
    """
    values, scores = sequence * batch * hidden, 5 * heads * sequence**2 * batch
    by_mode = {
        "none": 34.0 * values + scores,
        "tensor": 10 * values + (24 * values + scores) / tp,
        "sequence": (34 * values + scores) / tp,
        "selective": 34 * values / tp,
        "full": 2.0 * values,
    }
    if mode not in by_mode:
        raise UsageError(f"mode={mode!r}: a layer keeps one of {', '.join(by_mode)}")
    return by_mode[mode]


def state_bytes(parameters: float, ranks: int = 1, zero_stage: int = 0) -> float:
    """The bytes on a rank of weights and gradients (2 each), and of Adam's float32 weights and moments (12), of which
    ``ranks`` ranks share the optimizer's part (stage 1), the gradients (2) and the weights (3) (Rajbhandari et al.,
    ZeRO, 2020). Raises UsageError for another stage.

    >>> [round(state_bytes(7.5e9, 64, stage) / 1e9, 2) for stage in range(4)]
    [120.0, 31.41, 16.64, 1.88]
    """
    _check_stage(zero_stage)
    whole = (16, 4, 2, 0)[zero_stage]
    return whole * parameters + (16 - whole) * parameters / ranks


def state_traffic(parameters: float, zero_stage: int = 0) -> float:
    """The elements that a rank sends in a step for its states, with many ranks: 2Ψ, and 3Ψ with stage 3. Raises
    UsageError for another stage.

    >>> state_traffic(7.5e9, 2), state_traffic(7.5e9, 3)
    (15000000000.0, 22500000000.0)
    """
    _check_stage(zero_stage)
    return (3 if zero_stage == 3 else 2) * parameters


def _check_stage(zero_stage: int) -> None:
    if zero_stage not in (0, 1, 2, 3):
        raise UsageError(f"zero_stage={zero_stage}: ZeRO has the stages 1, 2 and 3; 0 stands for no sharding")


_NAMES = ("data parallel", "ZeRO-1: optimizer states", "ZeRO-2: and gradients", "ZeRO-3: and parameters")


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One row of the table: bytes on a rank between two steps, and elements that it sends in one."""

    stage: int
    name: str
    rank_bytes: float
    sent_elements: float


def stage_table(parameters: float, sharding: int) -> list[StageMemory]:
    """For the stages 0 to 3 of ZeRO with ``sharding`` ranks that share states. With copies of these groups (HSDP,
    dp_degree), ``sharding`` is the size of one group, however many copies there are. Raises UsageError.

    >>> [round(row.rank_bytes / 1e9, 2) for row in stage_table(7.5e9, 64)]
    [120.0, 31.41, 16.64, 1.88]
    """
    if not parameters > 0 or sharding < 1:
        raise UsageError(f"{parameters:g} parameters on {sharding} ranks: use numbers above 0")
    return [
        StageMemory(stage, name, state_bytes(parameters, sharding, stage), state_traffic(parameters, stage))
        for stage, name in enumerate(_NAMES)
    ]
