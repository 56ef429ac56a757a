"""Closed formulas of the papers, which the simulator, the mesh and the services' counters are compared with:
parameters, FLOPs and words of models; bubbles and times of pipelines.

b sequences of a micro-batch, s tokens of a sequence, h hidden values of a token, l layers, V entries of the vocabulary,
t ranks of a tensor-parallel group; p workers (stages), m micro-batches, v chunks on a worker; times in any unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from byteps_py.parallel.sharding.strategy import assign_owners


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
