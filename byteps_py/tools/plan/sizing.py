"""The sizes of a mesh: how many ranks for tensor, context, pipeline and data parallelism, each with its reason.

The rules are those by which Llama 3 was divided (Chu et al., Scaling Llama 3 Training with Efficient Parallelism
Strategies, 2025, section 5.1). Divisions of the GPUs are tried in the order of what they cost; the first that keeps
pipelines busy, hides its transfers and fits in memory is taken; if there is none, the one that fits and computes most
for each byte of its transfers. Pure; any thread.

With N GPUs and B sequences of a step, a data-parallel group of tp·cp·pp GPUs has b = B·tp·cp·pp/N sequences. A pipeline
with a small bubble wants b ≥ pp, which is B·tp·cp ≥ N: that does not depend on pp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from byteps_py.errors import UsageError
from byteps_py.tools.plan.sizing_job import (
    MemoryNeed,
    MeshSizes,
    ModelShape,
    Recomputation,
    SizeOptions,
    SizingJob,
    divisors,
    gigabytes,
    load_model,
    memory_need,
)
from byteps_py.wording import count_text, shown


@dataclass(frozen=True, slots=True)
class SizesTried:
    """A division that was tried, and not taken."""

    sizes: MeshSizes
    memory: MemoryNeed
    #: Then its transfers can't be hidden.
    fits: bool


@dataclass(frozen=True, slots=True)
class SizeReasons:
    """``tried``: in their order, before ``sizes``, which are taken and need ``memory``."""

    job: SizingJob
    sizes: MeshSizes
    memory: MemoryNeed
    tried: Sequence[SizesTried]

    def sentences(self) -> Iterator[str]:
        """One entry for each decision."""
        yield self._of_tp()
        yield self._of_cp()
        yield from self._of_pp()
        yield (
            f"dp {self.sizes.dp}: the rest of {count_text(self.job.gpus, 'GPU')}. Each data-parallel group has a batch "
            f"of b = {count_text(self.sizes.batch, 'sequence')}."
        )
        yield self._of_zero()
        if self.sizes.recomputation == "full":
            least = min(each.memory.total for each in self.tried if each.sizes.recomputation == "selective")
            yield (
                f"Recomputation of whole layers: with that of attention scores alone, at least {gigabytes(least)} are "
                f"needed on a GPU that has {self._limit}."
            )

    @property
    def _limit(self) -> str:
        return gigabytes(self.job.options.memory_bytes)

    def _least(self, **bounds: int) -> SizesTried | None:
        """Of those with the same recomputation that did not fit: the one that needs the least memory. ``bounds``: each
        size that must be equal (``tp=8``) or smaller (``tp_below=8``)."""
        found = [
            each
            for each in self.tried
            if not each.fits
            and each.sizes.recomputation == self.sizes.recomputation
            and all(
                getattr(each.sizes, name.removesuffix("_below")) < value
                if name.endswith("_below")
                else getattr(each.sizes, name) == value
                for name, value in bounds.items()
            )
        ]
        return min(found, key=lambda each: each.memory.total, default=None)

    def _of_tp(self) -> str:
        job, size, cp = self.job, self.sizes.tp, self.sizes.cp
        batch = f"{job.sequences}·tp·pp/{job.gpus}" if cp == 1 else f"{job.sequences}·tp·{cp}·pp/{job.gpus}"
        text = (
            f"tp {size}: a data-parallel group has b = {batch} sequences of a step. A pipeline with a small bubble "
            f"wants b ≥ pp, and so tp ≥ {-(-job.gpus // (job.sequences * cp))}."
        )
        if (best := self._least(cp=cp, tp_below=size)) is not None:
            text += f" A smaller size needs at least {best.memory} on a GPU that has {self._limit}."
        if size == job.options.gpus_per_machine < job.gpus:
            text += f" A machine has {size} GPUs; the exchanges of a larger size, in each layer, would use the network."
        return text

    def _of_cp(self) -> str:
        job, size = self.job, self.sizes.cp
        if size == 1:
            return f"cp 1: b ≥ pp without it, and activations of {job.sequence} tokens fit in memory."
        largest_tp = job.tp_sizes[-1]
        needed = -(-job.gpus // (job.sequences * largest_tp))
        if needed > 1:
            text = (
                f"cp {size}: a step has only {count_text(job.sequences, 'sequence')}. Even with tp {largest_tp}, b ≥ "
                f"pp needs cp ≥ {needed}: a longer pipeline would need a larger b as well."
            )
        else:
            text = f"cp {size}: b ≥ pp without it, but it divides the activations of {job.sequence} tokens."
        if (best := self._least(cp_below=size)) is not None:
            text += f" A smaller size needs at least {best.memory} on a GPU that has {self._limit}."
        return f"{text} Its ranks share weights and optimizer states, as those of dp do."

    def _of_pp(self) -> Iterator[str]:
        job, sizes = self.job, self.sizes
        if sizes.pp == 1:
            yield f"pp 1: the model fits without a pipeline: {self.memory} of {self._limit}."
            return
        for each in self.tried:
            if (each.sizes.tp, each.sizes.cp, each.fits) == (sizes.tp, sizes.cp, True):
                yield (
                    f"No ZeRO-3 without a pipeline: it would compute {job.intensity(each.sizes):,.0f} FLOPs for each "
                    f"byte of weights that it gathers ({count_text(each.sizes.micro_batch, 'sequence')} at once). A "
                    f"GPU computes {job.intensity_of_links:,.0f} in the time of one byte, so the transfers can't be "
                    "hidden. Those of a pipeline are smaller."
                )
        text = f"pp {sizes.pp}: the shortest pipeline that fits in memory: {self.memory} of {self._limit}."
        if (before := self._least(tp=sizes.tp, cp=sizes.cp, pp_below=sizes.pp)) is not None:
            text += f" A shorter one needs at least {before.memory}."
        yield f"{text} Its stages keep their weights whole: gathering them (ZeRO-3) would slow its transfers."

    def _of_zero(self) -> str:
        sizes, twice = self.sizes, 2 * self.sizes.pp
        if sizes.zero_stage == 3:
            return (
                f"ZeRO-3: a micro-batch of {count_text(sizes.micro_batch, 'sequence')} computes "
                f"{self.job.intensity(sizes):,.0f} FLOPs for each byte of weights that it gathers. A GPU computes "
                f"{self.job.intensity_of_links:,.0f} in the time of one byte, so computing "
                f"{'hides the transfers' if self.job.is_hidden(sizes) else 'waits for transfers; nothing else fits'}."
            )
        if sizes.pp == 1 and sizes.zero_stage == 1:
            return f"ZeRO-1: the gradients of {sizes.batch} micro-batches are added up whole, and reduced once."
        if sizes.pp == 1:
            return "ZeRO-2: a step has one micro-batch, so sharded gradients cost no further transfers."
        if sizes.zero_stage == 1:
            return (
                f"ZeRO-1 with 1F1B: b = {sizes.batch} ≥ 2·pp = {twice}. Gradients stay whole until the last micro-"
                "batch, and are reduced once."
            )
        return (
            f"ZeRO-2 with all forward passes before all backward passes: b = {sizes.batch} < 2·pp = {twice}. So few "
            "micro-batches may all be in flight; that hides transfers, and gradients are reduced once."
        )


def nothing_fits(job: SizingJob, tried: Sequence[SizesTried]) -> UsageError:
    """The error for a job of which no division was taken."""
    most = job.sequences * job.tp_sizes[-1] * job.cp_sizes[-1]
    if not tried and most < job.gpus:
        return UsageError(
            f"a batch of {count_text(job.sequences, 'sequence')} of {job.sequence} tokens is too small for {job.gpus} "
            f"GPUs: with tp {job.tp_sizes[-1]} and cp {job.cp_sizes[-1]}, the largest that divide, it is enough for "
            f"{most}. Use at most {most} GPUs, or a larger batch"
        )
    if not tried:
        multiple = job.gpus // job.tp_sizes[-1]
        return UsageError(
            f"no division of {job.gpus} GPUs gives all data-parallel groups equally many of {job.sequences} sequences: "
            f"use a batch of a multiple of {multiple} sequences ({multiple * job.sequence} tokens), or another number "
            "of GPUs"
        )
    best = min(tried, key=lambda each: each.memory.total)
    limit, count = job.options.memory_bytes, job.model.parameters
    fewest = math.ceil(16 * count / limit)
    if fewest > job.gpus:
        remedy = f"the states alone, 16 bytes for each of {count:,} parameters, need at least {fewest} GPUs"
    else:
        remedy = "use more GPUs, or shorter sequences"
    return UsageError(
        f"nothing fits on {count_text(job.gpus, 'GPU')} of {gigabytes(limit)}: the division that needs the least "
        f"memory ({best.sizes}, {best.sizes.recomputation} recomputation) needs {best.memory} on a GPU; {remedy}"
    )


# ---- the decision --------------------------------------------------------------------------------------------------


__all__ = ["SizeOptions", "SizePlan", "parse_count", "plan_size"]

_SUFFIXES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, slots=True)
class SizePlan:
    """The sizes of a mesh, from inner to outer, and a sentence or two for each decision."""

    tp: int
    cp: int
    pp: int
    dp: int
    reasons: tuple[str, ...]
    #: With the batch of a data-parallel group, the stage of ZeRO, and recomputation.
    sizes: MeshSizes
    #: Of the fullest GPU.
    memory: MemoryNeed

    def as_json(self) -> dict[str, Any]:
        """The object that `bps plan size --json` prints."""
        return {"tp": self.tp, "cp": self.cp, "pp": self.pp, "dp": self.dp, "reasons": list(self.reasons)}


def plan_size(
    gpus: int, batch_tokens: int, sequence: int, model: ModelShape | str, options: SizeOptions | None = None
) -> SizePlan:
    """The sizes for a training job.

    Args:
        gpus: of the whole job: a multiple of a machine's GPUs, or fewer than one machine has.
        batch_tokens: of a step, over all GPUs: a multiple of ``sequence``.
        sequence: tokens of a sequence.
        model: a shape; or the name of a well-known model, or of a JSON file (see load_model).
        options: the cluster.

    Raises UsageError if the numbers do not go together, or if nothing fits in memory; it says how many bytes are
    needed.

    >>> plan = plan_size(16384, 2**24, 131072, "llama3-405b")
    >>> plan.tp, plan.cp, plan.pp, plan.dp
    (8, 16, 16, 8)
    """
    shape = load_model(model) if isinstance(model, str) else model
    job = SizingJob(gpus, batch_tokens, sequence, shape, options or SizeOptions())
    tried: list[SizesTried] = []
    for sizes in _divisions(job):
        memory = memory_need(shape, sequence, sizes)
        fits = memory.total <= job.options.memory_bytes
        if fits and job.is_hidden(sizes):
            return _plan(SizeReasons(job, sizes, memory, tried))
        tried.append(SizesTried(sizes, memory, fits))
    fitting = [each for each in tried if each.fits]
    if fitting:
        best = max(fitting, key=lambda each: job.intensity(each.sizes))
        return _plan(SizeReasons(job, best.sizes, best.memory, tried))
    raise nothing_fits(job, tried)


def _plan(reasons: SizeReasons) -> SizePlan:
    sizes = reasons.sizes
    return SizePlan(sizes.tp, sizes.cp, sizes.pp, sizes.dp, tuple(reasons.sentences()), sizes, reasons.memory)


def parse_count(text: str) -> int:
    """A whole number with one of the suffixes K, M, G, which stand for 2¹⁰, 2²⁰ and 2³⁰: Llama 3's batch of "16M"
    tokens is 2048 sequences of 8192. Raises UsageError.

    >>> parse_count("16M"), parse_count("8K"), parse_count("131072")
    (16777216, 8192, 131072)
    """
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)([KMG]?)", text.strip().upper())
    count = Decimal(match[1]) * _SUFFIXES[match[2]] if match else Decimal(0)
    if count < 1 or count != int(count):
        raise UsageError(
            f"{shown(text)!r} is no whole number of at least 1, with K (2^10), M (2^20) or G (2^30) after it"
        )
    return int(count)


# ---- the divisions, in the order in which they are tried -----------------------------------------------------


def _divisions(job: SizingJob) -> Iterator[MeshSizes]:
    """Small context-parallel sizes first, then small tensor-parallel ones, then ZeRO without a pipeline, then short
    pipelines. Recomputation of whole layers, a third more computing, comes last."""
    modes: tuple[Recomputation, ...] = ("selective", "full")
    for mode in modes:
        for cp in job.cp_sizes:
            for tp in job.tp_sizes:
                if job.gpus % (tp * cp) == 0 and job.sequences * tp * cp >= job.gpus:  # b ≥ pp
                    yield from _pipelines(job, tp, cp, mode)


def _pipelines(job: SizingJob, tp: int, cp: int, mode: Recomputation) -> Iterator[MeshSizes]:
    for pp in divisors(job.gpus // (tp * cp)):
        dp = job.gpus // (tp * cp * pp)
        if pp > job.model.layers or job.sequences % dp:
            continue
        batch = job.sequences // dp
        sizes = MeshSizes(tp, cp, pp, dp, batch, zero_stage=1 if batch >= 2 * pp else 2, recomputation=mode)
        yield sizes
        if pp == 1 and dp * cp > 1:
            yield _with_largest_micro_batch(job, replace(sizes, zero_stage=3))


def _with_largest_micro_batch(job: SizingJob, sizes: MeshSizes) -> MeshSizes:
    """The largest that fits: with each sequence, more is computed for each byte of weights that is gathered."""
    for size in reversed(divisors(sizes.batch)):
        larger = replace(sizes, micro_batch=size)
        if memory_need(job.model, job.sequence, larger).total <= job.options.memory_bytes:
            return larger
    return sizes
