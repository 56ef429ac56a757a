"""Why a job is divided as it is, or can't be divided, in sentences. sizing.py decides; this is what it says.

Pure; any thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from byteps_py.errors import UsageError
from byteps_py.parallel.mesh.gpu_memory import MemoryNeed, MeshSizes, gigabytes
from byteps_py.parallel.mesh.sizing_job import SizingJob
from byteps_py.wording import count_text


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
