"""The time of a training step, from the shapes of a GPT and the sizes of its mesh, by formulas with some constants of
the hardware: rates, latencies, bytes for a value. calibration.py fits the constants to measured steps.

A worker of the pipeline needs for a micro-batch of n = b·s tokens, forward and backward:

    matrix products of a layer   72·n·h²/t FLOPs, slower where h/t or n is small (Narayanan et al., Megatron-LM, 2021)
    attention of a layer         12·n·s·h/t FLOPs, and bytes of memory for each of its n·s·a/t scores
    norms, dropout, GELU         bytes of memory for each of n·h and of n·h/t values
    all-reduces of a layer       4 of 2·n·h bytes among t ranks in a ring, 6 if layers are recomputed
    keys and values of a layer   gathered among context-parallel ranks, which have n = b·s/cp tokens each
    launching                    at least the time in which the CPU launches a layer's kernels

The last worker has the head besides. With p workers, m micro-batches and v chunks on a worker, the pipeline takes m
times the slowest worker, and (p-1)/v times a worker for its bubble (Narayanan et al., 2021). A hop carries 2·n·h bytes.
Gradients are reduced in a ring among d ranks; then the optimizer passes over its states. Pure; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from byteps_py.errors import UsageError
from byteps_py.tools.plan.step_table import Column, StepLayouts


@dataclass(frozen=True, slots=True)
class Hardware:
    """The figures of a cluster's data sheets. Raises UsageError for a value that is not above 0.

    The defaults are machines of 8 NVIDIA A100 (80 GB) with NVLink and 8 links of 200 Gbit/s.
    """

    gpus_per_machine: int = 8
    #: Of a GPU, a second, with 2-byte numbers.
    peak_flops: float = 312e12
    #: Of a GPU's memory.
    memory_bytes_per_s: float = 2.0e12
    #: Between GPUs of a machine, in one direction.
    machine_bytes_per_s: float = 300e9
    #: Of a machine's links to others, all together, in one direction.
    network_bytes_per_s: float = 200e9

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise UsageError(f"{field.name}={value!r}: a number above 0 is needed")
        if self.gpus_per_machine != int(self.gpus_per_machine):
            raise UsageError(f"gpus_per_machine={self.gpus_per_machine!r}: a whole number is needed")


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant of the formulas, before anything is measured."""

    name: str
    #: The value to expect.
    expected: float
    #: The standard deviation of its natural logarithm: how far measured steps may move it.
    spread: float
    meaning: str


def constants(hardware: Hardware) -> tuple[Constant, ...]:
    """The usual performance of ``hardware``: shares of its data sheet's rates, and usual latencies of GPUs."""
    peak, memory = hardware.peak_flops, hardware.memory_bytes_per_s
    machine, network = hardware.machine_bytes_per_s, hardware.network_bytes_per_s
    return (
        Constant("product_flops", 0.86 * peak, 0.06, "FLOP/s of large matrix products"),
        Constant("half_width", 40.0, 0.4, "h/t that halves this rate"),
        Constant("half_tokens", 350.0, 0.4, "tokens of a micro-batch that halve it"),
        Constant("score_flops", 0.4 * peak, 0.15, "FLOP/s of the products in attention"),
        Constant("score_bytes", 27.0, 0.12, "bytes moved for a score of attention"),
        Constant("value_bytes", 25.0, 0.5, "bytes moved for a value of a layer that each rank has"),
        Constant("shared_value_bytes", 40.0, 0.5, "bytes moved for one that tensor parallelism divides"),
        Constant("memory_bytes_per_s", 0.75 * memory, 0.05, "rate of memory"),
        Constant("layer_launch_s", 3e-3, 0.5, "launching a layer's kernels, forward and backward"),
        Constant("tensor_launch_s", 3e-4, 1.0, "the same for its all-reduces"),
        Constant("logit_bytes", 60.0, 0.5, "bytes moved for a logit"),
        Constant("machine_reduce_bytes_per_s", 0.83 * machine, 0.5, "all-reduces of activations within a machine"),
        Constant("network_reduce_bytes_per_s", 0.3 * network, 0.7, "the same across machines"),
        Constant("reduce_latency_s", 6e-5, 0.7, "latency of an all-reduce, for each doubling of its ranks"),
        Constant("machine_hop_bytes_per_s", 0.5 * machine, 0.6, "a hop of the pipeline within a machine"),
        Constant("network_hop_bytes_per_s", 0.1 * network, 0.6, "the same between machines"),
        Constant("hop_latency_s", 1e-4, 0.7, "latency of a hop"),
        Constant("exposed_hops", 0.5, 0.7, "share of the hops that computing does not hide"),
        Constant("machine_gradient_bytes_per_s", 0.67 * machine, 0.6, "reducing gradients within a machine, a GPU"),
        Constant("network_gradient_bytes_per_s", 0.5 * network, 0.5, "the same across machines, a machine"),
        Constant("optimizer_bytes", 25.0, 0.4, "bytes moved for a parameter by the optimizer"),
        Constant("layer_step_s", 1e-4, 1.0, "once a step, for each layer of a worker"),
        Constant("step_s", 5e-3, 1.0, "once a step"),
    )


#: Parts of a step's time, in milliseconds, that follow each other.
Parts = dict[str, Column]
_GRADIENT_BYTES = 4  # float32
#: Of launching kernels and running them, the slower one counts; where they are close, a little more than it.
_OVERLAP_POWER = 4


def step_parts(logarithms: Column, hardware: Hardware, jobs: StepLayouts) -> Parts:
    """The parts of each job's step. ``logarithms``: of the values of ``constants(hardware)``, in their order."""
    c = dict(zip((one.name for one in constants(hardware)), np.exp(logarithms), strict=True))
    node = hardware.gpus_per_machine
    tokens, width = jobs.micro_batch * jobs.sequence / jobs.cp, jobs.hidden / jobs.tp
    values = tokens * jobs.hidden
    like_gpt = jobs.layer_parameters / (12 * jobs.hidden**2)
    is_far = jobs.gpus > node
    rest, scores = 1 + jobs.repeats_rest / 3, 1 + jobs.repeats_scores / 3  # a forward pass is a third of all computing
    flops = c["product_flops"] / (1 + c["half_width"] / width)
    computing = rest * 72 * values * width * like_gpt / flops * (1 + c["half_tokens"] / tokens)
    computing += scores * (12 - 6 * jobs.fused_attention) * tokens * jobs.sequence * width / c["score_flops"]
    between = np.where(jobs.sequence_parallel > 0, values / jobs.tp, values)
    moved = scores * c["score_bytes"] * tokens * jobs.sequence * jobs.heads / jobs.tp * (1 - jobs.fused_attention)
    moved += rest * (c["value_bytes"] * between + c["shared_value_bytes"] * tokens * width * like_gpt)
    computing += moved / c["memory_bytes_per_s"]
    is_tensor = jobs.tp > 1
    rate = np.where(jobs.tp <= node, c["machine_reduce_bytes_per_s"], c["network_reduce_bytes_per_s"])
    one = 2 * (jobs.tp - 1) / jobs.tp * 2 * values / rate + c["reduce_latency_s"] * np.log2(np.maximum(jobs.tp, 2))
    reducing = np.where(is_tensor, (4 + 2 * jobs.repeats_rest) * one, 0)
    launching = rest * (c["layer_launch_s"] + np.where(is_tensor, c["tensor_launch_s"], 0))

    def slower(running: Column) -> Column:
        return np.asarray((running**_OVERLAP_POWER + launching**_OVERLAP_POWER) ** (1 / _OVERLAP_POWER))

    layers = jobs.layers / jobs.pp
    computed, both = layers * slower(computing), layers * slower(computing + reducing)
    rate = np.where(jobs.tp * jobs.cp > node, c["network_gradient_bytes_per_s"] / node, c["machine_reduce_bytes_per_s"])
    keys = 2 * 2 * jobs.micro_batch * jobs.sequence * jobs.kv_hidden / jobs.tp * (jobs.cp - 1) / jobs.cp
    gathering = layers * (2 + jobs.repeats_scores) * keys / rate
    logits = tokens * jobs.vocabulary / jobs.tp
    head = 6 * logits * jobs.hidden / flops + c["logit_bytes"] * logits / c["memory_bytes_per_s"]
    count = jobs.micro_batches

    block = jobs.tp * jobs.cp * np.where(jobs.data_outermost > 0, 1, jobs.dp)  # ranks from a stage to the next
    crossing = np.where(is_far, np.minimum(1, block / node), 0)  # hops that leave a machine
    hop = 2 * values * (crossing / c["network_hop_bytes_per_s"] + (1 - crossing) / c["machine_hop_bytes_per_s"])
    hops = 2 * (jobs.pp - 1) + 2 * c["exposed_hops"] * (count * jobs.chunks - 1)
    hopping = np.where(jobs.pp > 1, hops * (hop + c["hop_latency_s"]), 0)

    embedding = jobs.vocabulary * jobs.hidden / jobs.tp
    parameters = jobs.layer_parameters / jobs.tp * layers + embedding
    # Groups that sum different gradients share a machine's links.
    stages = np.where(jobs.data_outermost > 0, jobs.pp, 1)
    sharing = np.maximum(1, np.minimum(jobs.tp * jobs.cp * stages, node) / jobs.cp)
    rate = np.where(is_far, c["network_gradient_bytes_per_s"] / sharing, c["machine_gradient_bytes_per_s"])
    copies = jobs.dp * jobs.cp
    reduced = 2 * (copies - 1) / copies * parameters + np.where(jobs.pp > 1, embedding, 0)
    once = c["optimizer_bytes"] * parameters / c["memory_bytes_per_s"] + c["layer_step_s"] * layers + c["step_s"]
    parts = {
        "computing": count * (computed + head),
        "tensor parallelism": count * (both - computed),
        "context parallelism": count * gathering,
        "pipeline bubble": (jobs.pp - 1) / jobs.chunks * (both + gathering),
        "pipeline hops": hopping,
        "gradients": _GRADIENT_BYTES * reduced / rate,
        "optimizer": once,
    }
    return {name: 1e3 * part for name, part in parts.items()}


def step_ms(logarithms: Column, hardware: Hardware, jobs: StepLayouts) -> Column:
    """The sum of the parts."""
    return np.asarray(sum(step_parts(logarithms, hardware, jobs).values()))
