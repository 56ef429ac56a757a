"""Closed formulas of the papers: parameters, FLOPs, bytes and words of models; bubbles and times of pipelines.

b sequences of a micro-batch, s tokens of a sequence, h hidden values of a token, a attention heads, l layers, V entries
of the vocabulary, t ranks of a tensor-parallel group. Activations and weights have 2 bytes each. Pure; any thread.

The bytes of a model's states on each rank, for each way to divide them, are those of ZeRO (Rajbhandari et al., 2020,
section 5). In mixed precision a parameter has 16 bytes: 2 for its value, 2 for its gradient, and 12 for Adam's float32
value and two moments. In float32 it has 16, too: 4 for the value, 4 for the gradient, 8 for the moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from byteps_py.errors import UsageError
from byteps_py.parallel.sharding.strategy import assign_owners

#: What a layer keeps for its backward pass: everything on one rank; with tensor parallelism; with sequence parallelism
#: besides; with this and attention scores recomputed; only its input.
ActivationMode = Literal["none", "tensor", "sequence", "selective", "full"]


def gpt_parameters(layers: int, hidden: int, vocabulary: int, sequence: int) -> float:
    """The parameters of a GPT with tied embeddings and feed-forward layers of 4h:
    12·l·h²(1 + 13/(12h) + (V+s)/(12·l·h)) (Narayanan et al., Megatron-LM, 2021).

    >>> round(gpt_parameters(96, 12288, 51200, 2048) / 1e9, 1)
    174.6
    """
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocabulary + sequence) / (12 * layers * hidden))


def gpt_step_flops(
    batch: int, sequence: int, layers: int, hidden: int, vocabulary: int, recomputes: bool = True
) -> float:
    """The floating-point operations of a step of ``batch`` sequences: 96·B·s·l·h²(1 + s/(6h) + V/(16·l·h)) if forward
    passes are repeated before backward passes (Narayanan et al., 2021). Otherwise the layers take three quarters of
    that; the head, 6·B·s·h·V, is never repeated.

    >>> f"{gpt_step_flops(1536, 2048, 96, 12288, 51200):.3g}"
    '4.51e+18'
    """
    layers_part = 24 * (4 if recomputes else 3) * batch * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden))
    return layers_part + 6 * batch * sequence * hidden * vocabulary


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


def first_stage_layers(layers: int, p: int, v: int = 1) -> float:
    """The layers for whose micro-batches the first worker of a pipeline keeps activations at once: l, for its l/p
    layers and p micro-batches; l(1 + (p-1)/(pv)) if it has v > 1 chunks (Korthikanti et al., 2022, section 4.2.3).

    >>> first_stage_layers(96, 8), first_stage_layers(96, 8, 3)
    (96.0, 124.0)
    """
    return layers * (1 + (p - 1) / (p * v)) if v > 1 else float(layers)


def tensor_parallel_words(batch: int, sequence: int, hidden: int, tp: int) -> float:
    """The words that a rank sends for a layer and a micro-batch, forward and backward: 8·b·s·h·(t-1)/t.

    >>> tensor_parallel_words(1, 2048, 12288, 8) / 1e6
    176.160768
    """
    return 8 * batch * sequence * hidden * (tp - 1) / tp


def pipeline_hop_words(batch: int, sequence: int, hidden: int) -> int:
    """The words that a stage sends to the next for a micro-batch: b·s·h.

    >>> pipeline_hop_words(1, 2048, 12288) / 1e6
    25.165824
    """
    return batch * sequence * hidden


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


# ---- pipelines: p workers (stages), m micro-batches, v chunks on a worker; times in any unit -----------------------


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
