"""The bytes on each rank for each way to divide a model's states. Pure; any thread.

The formulas are those of ZeRO (Rajbhandari et al., 2020, section 5): see formulas.py. In mixed precision a
parameter has 16 bytes: 2 for its value, 2 for its gradient, and 12 for Adam's float32 value and two moments. In float32
it has 16, too: 4 for the value, 4 for the gradient, 8 for the moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from byteps_py.errors import UsageError
from byteps_py.parallel.sharding.strategy import assign_owners
from byteps_py.tools.plan.formulas import state_bytes, state_traffic

#: Of a parameter with gradient and Adam's states: the same in mixed precision and in float32.
BYTES_OF_A_PARAMETER = 16
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


def whole_owner_bytes(sizes: Sequence[int], ranks: int) -> list[int]:
    """The bytes of values, gradients and Adam's states of each rank that owns whole parameters with these numbers of
    elements: 16Ψ/N where owners are even. Raises UsageError.

    >>> whole_owner_bytes([4, 4, 4, 4], 2), whole_owner_bytes([4, 4, 4, 4], 4)
    ([192, 64], [128, 64, 64, 0])
    """
    owned = [0] * ranks
    for size, owner in zip(sizes, assign_owners(sizes, ranks), strict=True):
        owned[owner] += size
    return [BYTES_OF_A_PARAMETER * size for size in owned]


def bert_sizes(layers: int, hidden: int, vocabulary: int = 30522, positions: int = 512) -> list[int]:
    """The numbers of elements of BERT's parameters, in their order; BERT-large has 24 layers of 1024.

    >>> sum(bert_sizes(24, 1024))
    335141888
    """
    norm = [hidden, hidden]
    embeddings = [vocabulary * hidden, positions * hidden, 2 * hidden, *norm]
    linear = [hidden * hidden, hidden]
    layer = [*linear * 4, *norm, 4 * hidden * hidden, 4 * hidden, 4 * hidden * hidden, hidden, *norm]
    return [*embeddings, *layer * layers, *linear]
