"""The costs of a layout: memory on the fullest rank, and the time of a step, for ``bps.parallel.parallelize_model``
with a Llama-like model.

Memory is that of this package: float32 parameters, gradients and Adam's moments (16 bytes a parameter), their 2-byte
copies for autocast, activations of the micro-batches under way, and logits. ZeRO divides them among N copies
(Rajbhandari et al., 2020) as torch does: "zero2" gathers parameters for a whole step, and gradients that
micro-batches accumulate are whole in all stages. Activations are counted as Korthikanti et al. (2022) do, for a layer
of examples/llama_model.py with autocast, fused attention and sequence parallelism: 32h + 4k + 8f bytes a token, with k
values of keys and f inner ones of the feed-forward layer.

Time is that of step_time.py, of which a schedule changes the bubble: (p-1)/v of a worker's time for GPipe, DAPPLE and
the interleaved one, otherwise what the simulator of schedules says; ZeRO the bytes of parameters and gradients; and
summation servers, sharded hosted states and shadows the time of a sum, by our placement (byteps_py/placement/shares.py
and hosted_shares.py). Pure; any thread.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.schedules import make
from byteps_py.parallel.pipe.simulator import simulate
from byteps_py.placement.hosted_shares import HostedOptimum, shadow_copies, used_cpu_machines
from byteps_py.tools.plan.calibration import StepTimeModel
from byteps_py.tools.plan.cluster import Cluster
from byteps_py.tools.plan.sizing_job import ModelShape
from byteps_py.tools.plan.step_table import Column, StepLayout

#: As ParallelOptions has them.
Data = Literal["ddp", "zero1", "zero2", "zero3", "hsdp"]
Hosted = Literal["no", "sharded", "machine"]
#: Schedules whose bubble has a formula; the others are simulated, up to this number of forward passes.
WITH_FORMULA = ("gpipe", "dapple", "interleaved")
MOST_SIMULATED_PASSES = 1024
#: Schedules whose weights are late: parallelize_model has none of them, bps.parallel.Pipeline does.
STALE = ("pipedream", "pipedream-2bw")
#: Chunks of a worker that ``schedule="interleaved"`` makes.
CHUNKS = 2
#: Adam's two moments.
_MOMENT_BYTES = 8
#: Of a shadow: the moments, and the parameter that the server's step needs.
_SHADOW_BYTES = 12
#: The most that BYTEPS_SHADOW_COPIES may be.
_MOST_COPIES = 8


@dataclass(frozen=True, slots=True)
class JobLayout:
    """One way to train: the sizes of the mesh, and the options of ``parallelize_model``."""

    tp: int
    cp: int
    pp: int
    dp: int
    #: Sequences of a micro-batch.
    micro_batch: int
    #: Of a step, on each data-parallel rank.
    micro_batches: int
    data: Data = "ddp"
    schedule: str = "dapple"
    recompute: bool = False
    hosted: Hosted = "no"
    #: Servers on other machines keep the hosted states, too.
    shadow: bool = False

    @property
    def copies(self) -> int:
        """Ranks with the same parameters."""
        return self.dp * self.cp

    @property
    def chunks(self) -> int:
        """Of a worker."""
        return CHUNKS if self.pp > 1 and self.schedule == "interleaved" else 1

    @property
    def is_stale(self) -> bool:
        """Whether a micro-batch may be computed with weights that are some updates old."""
        return self.pp > 1 and self.schedule in STALE

    @property
    def pipes(self) -> int:
        """Stages that a worker has because pipes go in both directions."""
        return 2 if self.pp > 1 and self.schedule in ("chimera", "gems") else 1

    def __str__(self) -> str:
        words = [f"tp {self.tp}, cp {self.cp}, pp {self.pp}, dp {self.dp}"]
        words.append(f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)} of {self.micro_batch}")
        words += [self.schedule] * (self.pp > 1) + ["recompute"] * self.recompute + [self.data]
        words += [f"hosted {self.hosted}"] * (self.hosted != "no") + ["shadow"] * self.shadow
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on the fullest rank."""

    #: Parameters, gradients, the optimizer's states, copies for autocast.
    states: float
    #: Of micro-batches under way, and logits.
    activations: float
    #: Of optimizer states in the memory of each machine.
    host: float = 0.0
    #: Of shadows in the memory of each CPU machine; without CPU machines they are in ``host``.
    cpu_machine: float = 0.0

    @property
    def total(self) -> float:
        """On the GPU."""
        return self.states + self.activations


@dataclass(frozen=True, slots=True)
class PlanJob:
    """A model, a cluster, and a batch."""

    model: ModelShape
    cluster: Cluster
    #: Of a step, over all GPUs.
    sequences: int
    #: Tokens of each.
    sequence: int
    #: The copies of states that other machines are to keep, as BYTEPS_SHADOW_COPIES; 0 for none. Only layouts whose
    #: states are hosted can have some.
    shadow: int = 0
    #: Whether schedules with late weights are layouts, too.
    stale: bool = False

    def __post_init__(self) -> None:
        if self.shadow and self.cluster.machines + self.cluster.servers < 2:
            raise UsageError(
                "a shadow is on another machine, and the cluster has only one: plan with more machines, or with CPU "
                "machines (servers)"
            )
        if not 0 <= self.shadow <= (most := min(_MOST_COPIES, max(1, sum(self.shadow_copies)))):
            raise UsageError(
                f"shadow={self.shadow}: other machines of this cluster can keep up to {most} copies of states (never "
                f"more than {_MOST_COPIES}); plan with fewer, or with more CPU machines (servers)"
            )

    @property
    def shadow_copies(self) -> tuple[int, int]:
        """On CPU and on GPU machines."""
        return shadow_copies(self.cluster.machines, self.cluster.servers, self.shadow)


# ---- memory --------------------------------------------------------------------------------------------------------


def rank_memory(job: PlanJob, layout: JobLayout) -> RankMemory:
    """Of the fullest rank: the first worker of a pipeline has the most micro-batches under way, the last one the
    logits; the larger of both counts."""
    model, tp = job.model, layout.tp
    layers = -(-model.layers // (layout.pp * layout.chunks)) * layout.chunks * layout.pipes
    ends = 2 if layout.pp == 1 or layout.pipes > 1 else 1
    parameters = (layers * model.layer_parameters + ends * model.embedding_parameters) / tp
    layer_parameters = model.layer_parameters / tp
    whole = parameters if layout.micro_batches > 1 else 2 * layer_parameters  # gradients before they are reduced
    share = parameters / (layout.cp if layout.data == "hsdp" else layout.copies)
    moments = _MOMENT_BYTES * (parameters if layout.data == "ddp" else share)
    if layout.data in ("ddp", "zero1"):
        states = (4 + 4 + 2) * parameters + moments
    else:
        gathered = parameters if layout.data == "zero2" else 2 * layer_parameters
        states = (4 + 4) * share + (4 + 2) * gathered + 4 * whole + moments
    if layout.is_stale:
        states += 4 * parameters * (_versions(layout) - 1)
    host = 0.0
    if layout.hosted != "no":
        states -= moments
        distinct = parameters * tp * _stages_of_machine(job, layout)
        host = _MOMENT_BYTES * distinct / (_machines_of_copies(job, layout) if layout.hosted == "sharded" else 1)
    cpu_machine = 0.0
    if layout.shadow:
        machines, (on_cpu, on_gpu) = job.cluster.machines, job.shadow_copies
        each = _SHADOW_BYTES * model.parameters
        cpu_machine = on_cpu * each / (used_cpu_machines(machines, job.cluster.servers) or 1)
        host += on_gpu * each / machines

    tokens = layout.micro_batch * job.sequence / layout.cp
    kv = model.hidden * model.kv_heads // model.heads
    layer = tokens * (32 * model.hidden + 4 * kv + 8 * model.ffn) / tp
    logits = 8 * tokens * model.vocabulary / tp  # and their gradients, in float32
    first, last = under_way(layout)
    stage = layers / layout.pipes * layer
    if layout.recompute:
        kept, working = 4 * tokens * model.hidden / tp, stage
    else:
        kept, working = stage, 0.0
    activations = max(first * kept + working, last * kept + working + logits)
    return RankMemory(states, activations, host, cpu_machine)


def under_way(layout: JobLayout) -> tuple[float, float]:
    """The micro-batches whose activations the first and the last worker keep at once, in units of a whole stage."""
    p, m = layout.pp, layout.micro_batches
    if p == 1:
        return 1, 1
    if layout.schedule == "gpipe":
        return m, m
    if layout.schedule == "dapple" or layout.is_stale:
        return min(p, m), 1
    if layout.schedule == "interleaved":
        most = min(m, p * (1 + (p - 1) / (p * layout.chunks)))
        return most, most / 2 if m > 1 else 1
    peak = max(_simulated(layout.schedule, p, m)[1])
    return peak, peak


def _versions(layout: JobLayout) -> int:
    """Of the weights on the first worker (Narayanan et al., PipeDream, 2019; Memory-Efficient Pipeline-Parallel DNN
    Training, 2021)."""
    return 2 if layout.schedule == "pipedream-2bw" else min(layout.pp, layout.micro_batches)


def _stages_of_machine(job: PlanJob, layout: JobLayout) -> int:
    return min(layout.pp, max(1, job.cluster.gpus_per_machine // (layout.tp * layout.cp)))


def _machines_of_copies(job: PlanJob, layout: JobLayout) -> int:
    """The machines over which the ranks with the same parameters lie. "dp" is outermost."""
    inside = layout.tp * layout.cp * layout.pp
    node = job.cluster.gpus_per_machine
    dp_machines = max(1, layout.dp * min(inside, node) // node) if inside <= node else layout.dp
    return max(1, dp_machines * max(1, layout.tp * layout.cp // node))


# ---- time ----------------------------------------------------------------------------------------------------------


def step_layout(job: PlanJob, layout: JobLayout) -> StepLayout:
    """For the formulas of step_time."""
    model = job.model
    return StepLayout(
        gpus=layout.tp * layout.cp * layout.pp * layout.dp,
        batch=job.sequences,
        micro_batch=layout.micro_batch,
        hidden=model.hidden,
        heads=model.heads,
        layers=-(-model.layers // (layout.pp * layout.chunks)) * layout.pp * layout.chunks,  # the fullest stage counts
        sequence=job.sequence,
        tp=layout.tp,
        dp=layout.dp,
        pp=layout.pp,
        cp=layout.cp,
        vocabulary=model.vocabulary,
        layer_parameters=model.layer_parameters,
        kv_hidden=model.hidden * model.kv_heads // model.heads,
        chunks=layout.chunks,
        recomputed="full" if layout.recompute else "none",
        sequence_parallel=layout.tp > 1,
        fused_attention=True,
        data_outermost=True,
    )


def step_times(job: PlanJob, layouts: Sequence[JobLayout], times: StepTimeModel) -> dict[str, Column]:
    """The parts of each layout's step, in milliseconds."""
    parts = dict(times.parts([step_layout(job, layout) for layout in layouts]))
    bubble = np.array([_bubble_of_formula(layout) for layout in layouts])
    parts["pipeline bubble"] = parts["pipeline bubble"] * bubble
    parts["optimizer"] = parts["optimizer"] * _updates(layouts)
    sums = gradient_sums(job, layouts, parts["gradients"])
    window = parts["computing"] + parts["tensor parallelism"] + parts["context parallelism"]
    hidden = [_hides_gradients(layout) for layout in layouts]
    parts["gradients"] = np.where(hidden, _exposed(job, layouts, window, sums), sums)
    if job.shadow:
        step: Column = np.asarray(sum(parts.values()))
        parts["shadow"] = np.maximum(0, np.array([_copies_ms(job, layout) for layout in layouts]) - step)
    return parts


def gradient_sums(job: PlanJob, layouts: Sequence[JobLayout], rings: Column) -> Column:
    """The time of the sums of gradients in a step, also where computing hides them. ``rings``: of one sum of each
    layout in a ring."""
    times: Column = np.array([_traffic(layout) * _servers(job, layout) for layout in layouts])
    return np.asarray(_updates(layouts) * rings * times)


def _updates(layouts: Sequence[JobLayout]) -> Column:
    """Of the weights, in a step."""
    return np.array([layout.micro_batches if _updates_often(layout) else 1 for layout in layouts])


def _hides_gradients(layout: JobLayout) -> bool:
    """Whether gradients are summed while others are computed. Those of hosted optimizers are, one by one, except in a
    pipeline, whose gradients come at its end. Sums of DistributedDataParallel and FSDP2 count as a whole: the constants
    that are fitted to measured steps contain the part that is hidden."""
    return layout.hosted != "no" and layout.pp == 1


def _exposed(job: PlanJob, layouts: Sequence[JobLayout], computing: Column, gradients: Column) -> Column:
    """The part of the sums that computing does not hide. They begin in the backward pass of the last micro-batch, layer
    after layer: the first layer's gradient comes at the end. Owners of sharded states send parameters back after the
    step: half of all."""
    passes = np.array([layout.micro_batches * (4 if layout.recompute else 3) / 2 for layout in layouts])
    later = (job.model.layers - 1) / job.model.layers
    back = gradients * np.array([0.5 if layout.hosted == "sharded" else 0.0 for layout in layouts])
    summed = gradients - back
    return np.asarray(back + np.maximum(summed * (1 - later), summed - computing / passes * later))


def _copies_ms(job: PlanJob, layout: JobLayout) -> float:
    """What a shadow's links need at least for the sums of a step that each machine adds alone. They travel while the
    next step computes, which does not end before."""
    if not layout.shadow or _machines_of_copies(job, layout) > 1:
        return 0.0
    cluster = job.cluster
    sums = 4 * job.model.parameters / layout.pp * _stages_of_machine(job, layout)
    carried = HostedOptimum(
        cluster.machines, cluster.servers, layout.hosted == "sharded", True, group=1, copies=job.shadow
    ).time
    return 1e3 * float(carried) * sums / cluster.hardware.network_bytes_per_s


def _updates_often(layout: JobLayout) -> bool:
    """Whether each micro-batch updates the weights."""
    return layout.is_stale and layout.schedule == "pipedream"


def _bubble_of_formula(layout: JobLayout) -> float:
    """The bubble in units of that of step_time, (p-1)/v of a worker's time."""
    if layout.is_stale:
        return 0.0  # the next step begins before this one has ended
    if layout.pp == 1 or layout.schedule in ("gpipe", "dapple"):
        return 1.0
    if layout.schedule == "interleaved":
        return 1.0 if layout.micro_batches >= layout.pp else float(layout.chunks)
    makespan, _ = _simulated(layout.schedule, layout.pp, layout.micro_batches)
    return (makespan / 3 - layout.micro_batches) / (layout.pp - 1)


@functools.lru_cache(maxsize=4096)
def _simulated(schedule: str, workers: int, micro_batches: int) -> tuple[float, tuple[int, ...]]:
    """(makespan for a forward pass of 1 and a backward pass of 2, activations that each worker has at most)."""
    program = make(schedule, workers, micro_batches)
    return simulate(program).makespan, tuple(program.peak_in_flight())


@functools.lru_cache(maxsize=4096)
def is_possible(schedule: str, workers: int, micro_batches: int) -> bool:
    """Whether there is such a schedule, and it is small enough to be judged."""
    if workers == 1:
        return schedule == "dapple"
    if schedule in STALE:
        return schedule == "pipedream" or micro_batches >= workers
    if schedule in WITH_FORMULA:
        return schedule != "interleaved" or micro_batches >= workers
    if workers * micro_batches > MOST_SIMULATED_PASSES:
        return False
    try:
        make(schedule, workers, micro_batches)
    except UsageError:
        return False
    return True


def _traffic(layout: JobLayout) -> float:
    """Bytes of parameters and gradients in units of an all-reduce, 2 bytes sent for each of gradients."""
    if layout.pipes > 1:
        return 2.0  # both stages of a worker
    if layout.data == "zero1":
        return 1.5  # and each owner sends its parameters
    if layout.data in ("zero3", "hsdp"):
        return layout.micro_batches + 0.5  # gathered for each forward and each backward pass; reduced once
    return 1.0


def _servers(job: PlanJob, layout: JobLayout) -> float:
    """The time of a sum by our placement in units of a ring's, 2(n-1)/n · M/B."""
    n = _machines_of_copies(job, layout)
    if layout.data != "ddp" or n < 2:
        return 1.0
    machines, servers = job.cluster.machines, job.cluster.servers
    if layout.hosted != "no":  # servers of all machines add these sums, also those of a group of some machines
        is_sharded = layout.hosted == "sharded"
        best = HostedOptimum(machines, servers, is_sharded, layout.shadow, min(n, machines), job.shadow)
        return float(best.time) * n / (2 * (n - 1))
    k = min(n, servers * n / machines)
    return n**2 / (n**2 + k * n - 2 * k)
