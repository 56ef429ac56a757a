"""The sizes of a mesh: how many ranks for tensor, context, pipeline and data parallelism, each with its reason.

The rules are those by which Llama 3 was divided (Chu et al., Scaling Llama 3 Training with Efficient Parallelism
Strategies, 2025, section 5.1). Divisions of the GPUs are tried in the order of what they cost; the first that keeps
pipelines busy, hides its transfers and fits in memory is taken; if there is none, the one that fits and computes most
for each byte of its transfers. Pure; any thread.

With N GPUs and B sequences of a step, a data-parallel group of tp·cp·pp GPUs has b = B·tp·cp·pp/N sequences. A pipeline
with a small bubble wants b ≥ pp, which is B·tp·cp ≥ N: that does not depend on pp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from byteps_py.errors import UsageError
from byteps_py.parallel.mesh.gpu_memory import MemoryNeed, MeshSizes, Recomputation, memory_need
from byteps_py.parallel.mesh.model_shape import ModelShape, load_model
from byteps_py.parallel.mesh.size_reasons import SizeReasons, SizesTried, nothing_fits
from byteps_py.parallel.mesh.sizing_job import SizeOptions, SizingJob, divisors
from byteps_py.wording import shown

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
