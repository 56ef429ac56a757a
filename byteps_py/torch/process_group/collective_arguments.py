"""Arguments of torch.distributed's collectives: reduce operations, options, lists of tensors. Pure; any thread."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from byteps_py.errors import UsageError
from byteps_py.tensors import Op
from byteps_py.torch.collectives.dtypes import WIRE, check_dense
from byteps_py.torch.collectives.group_collectives import Reduction

Kinds: Any = dist.ReduceOp.RedOpType
Tensors = torch.Tensor | Sequence[torch.Tensor]
_WIRE_OPS = {Kinds.SUM: Op.SUM, Kinds.AVG: Op.SUM, Kinds.MIN: Op.MIN, Kinds.MAX: Op.MAX, Kinds.PRODUCT: Op.PRODUCT}
_BITWISE = {Kinds.BAND: torch.bitwise_and, Kinds.BOR: torch.bitwise_or, Kinds.BXOR: torch.bitwise_xor}
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def reduction_of(op: Any, dtype: torch.dtype) -> Reduction:
    """The Reduction for torch's ``op``. Raises UsageError for an operation that is not defined for ``dtype``."""
    kind, factor = kind_of(op)
    if factor is None:
        return _reduction(kind, dtype)
    if not (dtype.is_floating_point and dtype in WIRE):
        raise _impossible(kind, dtype)
    return Reduction(Op.SUM, factor=factor)


@functools.cache  # comparing kinds takes half of the time
def _reduction(kind: Any, dtype: torch.dtype) -> Reduction:
    if kind in _BITWISE:
        if dtype.is_floating_point or dtype.is_complex:
            raise _impossible(kind, dtype)
        return Reduction(fold=_BITWISE[kind])
    average = kind == Kinds.AVG
    wire = _WIRE_OPS.get(kind)
    if wire is None:
        raise _impossible(kind, dtype)
    if dtype in WIRE:
        return Reduction(wire, average)
    if dtype is torch.bool and not average:  # logical or, logical and
        return Reduction(Op.MAX if wire in (Op.SUM, Op.MAX) else Op.MIN, view=torch.uint8)
    if dtype in (torch.complex64, torch.complex128):
        if wire is Op.SUM:
            return Reduction(wire, average, view=torch.float32 if dtype is torch.complex64 else torch.float64)
        if wire is Op.PRODUCT:
            return Reduction(fold=torch.mul)
    if dtype in _SIGNED and wire is Op.SUM and not average:
        return Reduction(wire, view=_SIGNED[dtype])  # the same bits in two's complement
    raise _impossible(kind, dtype)


def kind_of(op: Any) -> tuple[Any, float | torch.Tensor | None]:
    """(kind, factor of a PREMUL_SUM). Kinds can be compared and hashed, unlike torch's ReduceOp objects."""
    if isinstance(op, Kinds):
        return op, None
    kind, factor = op.__getstate__()
    return kind, factor


def _impossible(kind: Any, dtype: torch.dtype) -> UsageError:
    return UsageError(f"tensors of dtype {dtype} can't be reduced with {kind.name}; convert them first")


def timeout_of(options: Any, default_s: float) -> float:
    """The timeout of an option object, in seconds; ``default_s`` if it has none."""
    timeout: timedelta | None = getattr(options, "timeout", None)
    limit_s = timeout.total_seconds() if timeout is not None else 0.0
    return limit_s if limit_s > 0 else default_s


def dense_tensors(tensors: Tensors) -> list[torch.Tensor]:
    """``tensors`` as a list. Raises UsageError for a sparse tensor, or one on the meta device."""
    found = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for tensor in found:
        check_dense(tensor, None)
    return found


def only(tensors: Any, what: str) -> Any:
    """The only element of ``tensors``. Raises UsageError for several: a process has one device in a group."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError(f"{what}: expected one tensor (or one list) per process, got {len(tensors)}")
    return tensors[0]
