"""The layouts of a job: each one that is possible, what it costs, the fastest ones that fit, and why. Pure; any
thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from byteps_py.errors import UsageError
from byteps_py.tools.plan.calibration import StepTimeModel
from byteps_py.tools.plan.layout_cost import (
    CHUNKS,
    STALE,
    Data,
    Hosted,
    JobLayout,
    PlanJob,
    RankMemory,
    is_possible,
    rank_memory,
    step_times,
)
from byteps_py.tools.plan.sizing_job import divisors, gigabytes

SCHEDULES = ("dapple", "interleaved", "gpipe", "chimera", "gems")
_LARGEST_MICRO_BATCH = 32
#: Layouts of nearly the same time: of those, the one that needs less memory comes first.
_ALIKE = 0.005


@dataclass(frozen=True, slots=True)
class CostedLayout:
    """A layout with its costs."""

    layout: JobLayout
    step_ms: float
    #: By name, in milliseconds.
    parts: dict[str, float]
    memory: RankMemory

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        layout = self.layout
        return {
            "mesh": mesh_of(layout),
            "options": options_of(layout),
            "micro_batch": layout.micro_batch,
            "step_ms": self.step_ms,
            "parts_ms": self.parts,
            "memory_gb": {
                "states": self.memory.states / 1e9,
                "activations": self.memory.activations / 1e9,
                "host": self.memory.host / 1e9,
                "cpu_machine": self.memory.cpu_machine / 1e9,
            },
        }


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """The answer."""

    job: PlanJob
    #: The fastest first; at least one.
    best: list[CostedLayout]
    #: All that fit, and all that do not.
    fitting: list[CostedLayout]
    too_large: list[CostedLayout]
    reasons: list[str]

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        limit = 1e9 * self.job.cluster.memory_gb
        faster = [each for each in self.too_large if each.step_ms < self.best[0].step_ms]
        return {
            "best": [each.as_json() for each in self.best],
            "reasons": self.reasons,
            "fitting": len(self.fitting),
            "does_not_fit": {
                "count": len(self.too_large),
                "faster": [each.as_json() | {"lacking_gb": (each.memory.total - limit) / 1e9} for each in faster[:10]],
            },
        }


def mesh_of(layout: JobLayout) -> dict[str, int]:
    """The arguments of Mesh."""
    return {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": layout.dp}


def options_of(layout: JobLayout) -> dict[str, Any]:
    """The arguments of ParallelOptions, apart from ``plan``; of Pipeline, if the layout is stale."""
    if layout.is_stale:
        recompute = {"recompute": True} if layout.recompute else {}
        return {"schedule": layout.schedule, "micro_batches": layout.micro_batches} | recompute
    options: dict[str, Any] = {"data": layout.data, "micro_batches": layout.micro_batches}
    if layout.tp > 1:
        options["sequence_dim"] = 1
    if layout.pp > 1:
        options["schedule"] = layout.schedule
    if layout.recompute:
        options["recompute"] = True
    if layout.hosted != "no":
        options["hosted"] = layout.hosted
    if layout.shadow:
        options["shadow"] = True
    return options


def possible_layouts(job: PlanJob) -> Iterator[JobLayout]:
    """Each that ``parallelize_model`` takes: sizes that divide GPUs, heads, sequences and batch. Tensor-parallel groups
    stay within a machine."""
    model, cluster = job.model, job.cluster
    for tp in divisors(cluster.gpus_per_machine):
        if model.heads % tp or (model.kv_heads % tp and tp % model.kv_heads) or cluster.gpus % tp:
            continue
        for cp in divisors(cluster.gpus // tp):
            if cp > 1 and job.sequence % (2 * cp):
                continue
            for pp in divisors(cluster.gpus // (tp * cp)):
                dp = cluster.gpus // (tp * cp * pp)
                if pp <= model.layers and job.sequences % dp == 0:
                    yield from _with_options(job, (tp, cp, pp, dp))


def _with_options(job: PlanJob, mesh: tuple[int, int, int, int]) -> Iterator[JobLayout]:
    tp, cp, pp, dp = mesh
    schedules = (*SCHEDULES, *STALE) if job.stale and tp == cp == 1 else SCHEDULES
    batch = job.sequences // dp
    for micro_batch in divisors(batch):
        if micro_batch > _LARGEST_MICRO_BATCH:
            break
        count = batch // micro_batch
        for schedule in schedules:
            if not is_possible(schedule, pp, count):
                continue
            if schedule == "interleaved" and job.model.layers < CHUNKS * pp:
                continue
            for recompute in (False, True) if pp > 1 else (False,):
                for data, hosted in _states(schedule, dp * cp, cp):
                    if not job.shadow or hosted != "no":
                        yield JobLayout(*mesh, micro_batch, count, data, schedule, recompute, hosted, job.shadow > 0)


def _states(schedule: str, copies: int, cp: int) -> Iterator[tuple[Data, Hosted]]:
    yield "ddp", "no"
    if copies == 1 or schedule in ("chimera", "gems", *STALE):
        return
    yield "zero1", "no"
    yield "zero2", "no"
    yield "zero3", "no"
    if 1 < cp < copies:
        yield "hsdp", "no"
    yield "ddp", "machine"  # first: of layouts that are predicted alike, it was measured to be faster
    yield "ddp", "sharded"


def plan_layouts(job: PlanJob, times: StepTimeModel, count: int = 5) -> LayoutPlan:
    """The ``count`` fastest layouts that fit in memory.

    Raises UsageError if no layout is possible, or if none fits: then it says which one lacks least.
    """
    layouts = list(possible_layouts(job))
    if not layouts:
        raise UsageError(
            f"no layout is possible for {job.cluster.gpus} GPUs and {job.sequences} sequences of a step: data-parallel "
            f"ranks have as many sequences each, and the sizes of the mesh divide {job.cluster.gpus}; take a multiple "
            "of the GPUs as the batch"
        )
    parts = step_times(job, layouts, times)
    total = np.sum(list(parts.values()), axis=0)
    costed = [
        CostedLayout(
            layout,
            float(total[place]),
            {name: float(one[place]) for name, one in parts.items()},
            rank_memory(job, layout),
        )
        for place, layout in enumerate(layouts)
    ]
    limit = 1e9 * job.cluster.memory_gb
    costed.sort(key=lambda each: each.step_ms)
    fitting = [each for each in costed if each.memory.total <= limit]
    too_large = [each for each in costed if each.memory.total > limit]
    if not fitting:
        least = min(too_large, key=lambda each: each.memory.total)
        raise UsageError(
            f"the model does not fit: of {len(too_large):,} layouts, {least.layout} needs least, {_needs(least)} on a "
            f"GPU that has {gigabytes(limit)}; {gigabytes(least.memory.total - limit)} are lacking. Take more GPUs, "
            "shorter sequences, or a smaller model"
        )
    first = [each for each in fitting if each.step_ms <= fitting[0].step_ms * (1 + _ALIKE)]
    best = min(first, key=lambda each: (each.memory.total + each.memory.host, each.step_ms))
    ranked = [best, *(each for each in fitting if each is not best)][:count]
    return LayoutPlan(job, ranked, fitting, too_large, list(_reasons(best, fitting, too_large, limit)))


def _needs(each: CostedLayout) -> str:
    memory = each.memory
    return f"{gigabytes(memory.total)} ({gigabytes(memory.states)} states, {gigabytes(memory.activations)} activations)"


_CHOICES: tuple[tuple[str, Callable[[JobLayout], Any]], ...] = (
    ("tp", lambda layout: layout.tp),
    ("cp", lambda layout: layout.cp),
    ("pp", lambda layout: layout.pp),
    ("schedule", lambda layout: layout.schedule),
    ("a micro-batch of", lambda layout: layout.micro_batch),
    ("recomputation:", lambda layout: "yes" if layout.recompute else "no"),
    ("data:", lambda layout: layout.data),
    ("hosted:", lambda layout: layout.hosted),
)


def _reasons(
    best: CostedLayout, fitting: list[CostedLayout], too_large: list[CostedLayout], limit: float
) -> Iterator[str]:
    """The parts of the step, the layouts that do not fit, and, for each choice, the best layouts with another one."""
    shares = sorted(((part / best.step_ms, name) for name, part in best.parts.items() if part), reverse=True)
    yield (
        f"A step takes {_seconds(best.step_ms)}: "
        + ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= 0.005)
        + f". A GPU needs {_needs(best)} of its {gigabytes(limit)}."
    )
    if best.layout.shadow:
        where, held = ("GPU machine", best.memory.host)
        if best.memory.cpu_machine:
            where, held = "CPU machine", best.memory.cpu_machine
        yield f"A {where} keeps {gigabytes(held)} of states in its memory, shadows included."
    if best is not fitting[0]:
        yield f"Of those within {_ALIKE:.1%} of the fastest, it needs least memory on GPUs and machines together."
    for name, value_of in _CHOICES:
        chosen = value_of(best.layout)
        if name == "schedule" and best.layout.pp == 1:
            continue
        others: dict[Any, CostedLayout] = {}
        lacking: dict[Any, float] = {}
        for each in fitting:
            others.setdefault(value_of(each.layout), each)
        for each in too_large:
            value = value_of(each.layout)
            if value not in others:
                lacking[value] = min(lacking.get(value, float("inf")), each.memory.total - limit)
        said = [
            f"{value} is {_slower(each, best)}"
            for value, each in sorted(others.items(), key=lambda pair: pair[1].step_ms)
            if value != chosen
        ]
        said += [f"{value} lacks at least {gigabytes(least)}" for value, least in lacking.items() if value != chosen]
        if said:
            yield f"{name} {chosen}: with the best of everything else, {'; '.join(said)}."
    faster = [each for each in too_large if each.step_ms < best.step_ms]
    if faster:
        near = min(faster, key=lambda each: each.memory.total)
        yield (
            f"{len(faster):,} layouts would be faster and do not fit. {near.layout} lacks least: it needs "
            f"{_needs(near)}, {gigabytes(near.memory.total - limit)} too much, for {_seconds(near.step_ms)} a step."
        )


def _slower(each: CostedLayout, best: CostedLayout) -> str:
    behind = each.step_ms / best.step_ms - 1
    if abs(behind) < _ALIKE:
        return "as fast"
    return f"{behind:.0%} slower" if behind < 10 else f"{behind + 1:.0f} times slower"


def _seconds(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:.2f} s" if milliseconds >= 1e3 else f"{milliseconds:.1f} ms"
