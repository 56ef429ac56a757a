"""Buckets whose sums a machine's GPUs make a part of (BYTEPS_LOCAL_SUM), by a process group of the backend "byteps".

    hook → hand_over ─ its turn: the buckets before it are handed over ─► all_reduce of the group, on a copy
    step → finish ── wait ─► param.grad

NCCL carries out operations in the order of their calls, and ranks may compute gradients in different orders. So a
bucket waits for its turn: buckets travel in the order in which they were planned, as DistributedDataParallel's do. The
group has no other use. Must not know hooks or optimizers. The caller holds the lock of the GradientReducer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from byteps_py.errors import UnsupportedError
from byteps_py.system.log import logger
from byteps_py.tensors import NonFinite
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.slot_view import TensorRequest
from byteps_py.torch.gradients.bucket import Bucket, BucketParts, GradientOptions
from byteps_py.torch.operations.reductions import Average, Sum


class SumUnderWay(Protocol):
    """``wait``: orders the caller's stream after the sum; raises its error."""

    def wait(self) -> object: ...


#: Begins to sum a flat tensor over all ranks, or to average it, in its own memory.
BeginSum = Callable[[torch.Tensor, bool], SumUnderWay]


class GroupSums:
    """The sums of one GradientReducer, in the order of its buckets. ``device_type``: of gradients that travel so."""

    def __init__(self, begin: BeginSum, device_type: str = "cuda") -> None:
        self._begin = begin
        self._device_type = device_type
        self._waiting: dict[GroupBucket, torch.Tensor] = {}
        self._next = 0  # index of the bucket whose turn it is

    def takes(self, request: TensorRequest) -> bool:
        """True if gradients like these travel so."""
        return request.device.type == self._device_type and request.spec.codec is None

    def hand_over(self, bucket: GroupBucket, flat: torch.Tensor, buckets: Sequence[Bucket]) -> None:
        """Sum ``flat``, of ``bucket``, once all ``buckets`` before it are handed over or take no part."""
        self._waiting[bucket] = flat
        while self._next < len(buckets):
            due = buckets[self._next]
            if isinstance(due, GroupBucket) and due in self._waiting:
                due.work = self._begin(self._waiting.pop(due), due.options.op is Average)
            elif isinstance(due, GroupBucket) and due.is_active:
                return
            self._next += 1
        self._next = 0  # the next round may begin before all of this one is delivered

    def reset(self) -> None:
        """The round is over, perhaps by an error."""
        self._waiting.clear()
        self._next = 0


class GroupBucket(Bucket):
    """A bucket that travels by ``sums``. ``buckets``: all of its reducer."""

    has_slot = False

    def __init__(self, parts: BucketParts, sums: GroupSums, buckets: Sequence[Bucket]) -> None:
        self._sums, self._buckets = sums, buckets
        self._rounds = 0
        super().__init__(parts)

    def reset(self) -> None:
        super().reset()
        self.work: SumUnderWay | None = None
        self._flat: torch.Tensor | None = None

    @property
    def round(self) -> int:
        return self._rounds

    def hand_over(self, gradients: Sequence[torch.Tensor | None], is_early: bool = False) -> None:
        """Raises UnsupportedError for a sparse gradient."""
        self._rounds += 1
        self.gives = [grad is not None for grad in gradients]
        with torch.no_grad():
            parts = [
                param.new_zeros(param.numel()) if grad is None else grad.detach().reshape(-1).to(param.dtype)
                for param, grad in zip(self.params, gradients, strict=True)
            ]
            self._flat = torch.cat(parts)
        self._sums.hand_over(self, self._flat, self._buckets)

    def refuse_sparse(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Raises UnsupportedError for a sparse gradient."""
        for name, grad in zip(self.names, gradients, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise UnsupportedError(
                    f"the gradient of {name!r} is sparse, and BYTEPS_LOCAL_SUM lets GPUs sum dense gradients only: set "
                    "BYTEPS_LOCAL_SUM=host, or pass sparse_as_dense=True to DistributedOptimizer"
                )

    def await_sum(self) -> None:
        if self.work is not None:
            self.work.wait()

    def write_results(self) -> None:
        if self._flat is None or self.work is None:
            return
        with torch.no_grad():
            results = self._flat.split([param.numel() for param in self.params])
            for param, result, participates in zip(self.params, results, self.participates, strict=True):
                if not participates:
                    continue  # frozen: must not get a gradient
                if param.grad is None or param.grad.layout is not torch.strided:
                    param.grad = torch.empty_like(param)
                param.grad.copy_(result.view(param.shape))


def sums_by_gpus(context: Context, options: GradientOptions) -> GroupSums | None:
    """How the GPUs of each machine sum the gradients of a new DistributedOptimizer; None: the services alone do, and
    the log says why if BYTEPS_LOCAL_SUM asks for more. All ranks call it, in the same order: it makes a process group.
    """
    mode = context.settings.local_sum
    if mode == "host" or context.session.size < 2:
        return None
    if why := _why_not(options):
        logger.warning("BYTEPS_LOCAL_SUM=%s: gradients are summed by host-sum: %s", mode, why)
        return None
    return sums_of(dist.new_group())


def sums_of(group: object, device_type: str = "cuda") -> GroupSums:
    """Sums by a process group of all ranks, which has no other use."""

    def begin(flat: torch.Tensor, is_average: bool) -> SumUnderWay:
        op = dist.ReduceOp.AVG if is_average else dist.ReduceOp.SUM
        work: SumUnderWay | None = dist.all_reduce(flat, op, group=cast(Any, group), async_op=True)
        if work is None:  # this rank is no member, as can't be
            raise UnsupportedError("the group of all ranks does not have this one")
        return work

    return GroupSums(begin, device_type)


def _why_not(options: GradientOptions) -> str:
    """A clause; empty: GPUs sum. The same on all ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return (
            'GPUs sum by a process group: call torch.distributed.init_process_group("byteps") before '
            "DistributedOptimizer"
        )
    if not getattr(dist.group.WORLD, "sums_on_gpus", False):
        return 'the group of all ranks is not of the backend "byteps", or its GPUs do not sum, as the log says'
    if options.op not in (Average, Sum) or options.predivide != 1.0:
        return "GPUs make plain sums and averages only, without gradient_predivide_factor"
    if options.group:
        return "the optimizer has a process set"
    if options.nonfinite is not NonFinite.ALLOW:
        return "BYTEPS_NONFINITE checks what the services sum: set BYTEPS_NONFINITE=allow"
    return ""
