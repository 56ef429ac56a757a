"""What torch.distributed's callers pass: reduce operations, options, lists of tensors. Pure; any thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from byteps_py.errors import UsageError
from byteps_py.tensors import Op
from byteps_py.torch.engine.dtypes import WIRE, as_bytes, check_dense, check_result

Kinds: Any = dist.ReduceOp.RedOpType
Tensors = torch.Tensor | Sequence[torch.Tensor]
_WIRE_OPS = {Kinds.SUM: Op.SUM, Kinds.AVG: Op.SUM, Kinds.MIN: Op.MIN, Kinds.MAX: Op.MAX, Kinds.PRODUCT: Op.PRODUCT}
_BITWISE = {Kinds.BAND: torch.bitwise_and, Kinds.BOR: torch.bitwise_or, Kinds.BXOR: torch.bitwise_xor}
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
Fold = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Reduction:
    """How to carry out a reduce operation on a dtype.

    ``fold``: not on the way but here, from everybody's tensors, two at a time. ``view``: the dtype as which the service
    sees the memory. ``factor``: what a contribution is multiplied by. ``terms``: what else members must agree on.
    """

    op: Op = Op.SUM
    average: bool = False
    factor: float | torch.Tensor | None = None
    view: torch.dtype | None = None
    fold: Fold | None = None
    terms: str = ""

    def prepare(self, tensor: torch.Tensor) -> torch.Tensor:
        """What ``tensor`` contributes."""
        if self.factor is not None:
            tensor = tensor.detach() * self.factor
        return self.seen(tensor)

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` in the wire's dtype, sharing memory."""
        tensor = tensor.detach()
        if self.view is None or tensor.dtype is self.view:
            return tensor
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor.view(self.view)


def reduction_of(op: Any, dtype: torch.dtype) -> Reduction:
    """Raises UsageError for an operation that means nothing on ``dtype``."""
    kind, factor = kind_of(op)
    if factor is None:
        return _reduction(kind, dtype)
    if not (dtype.is_floating_point and dtype in WIRE):
        raise _impossible(kind, dtype)
    return Reduction(Op.SUM, factor=factor)


@functools.cache  # to compare kinds takes as long as all else
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
    if dtype is torch.bool and not average:  # or and and
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
    """(kind, factor of a PREMUL_SUM). Reduce operations compare and hash badly: only their kinds do well."""
    if isinstance(op, Kinds):
        return op, None
    kind, factor = op.__getstate__()
    return kind, factor


def _impossible(kind: Any, dtype: torch.dtype) -> UsageError:
    return UsageError(f"tensors of dtype {dtype} can't be reduced with {kind.name}; convert them first")


def limit_of(timeout: timedelta | float | None) -> float | None:
    """A timeout in seconds; None for none. torch's own backends take numbers of seconds, too, and say "unset" with a
    negative time."""
    if timeout is None:
        return None
    limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return None if limit_s < 0 else limit_s


def seconds(options: Any, default_s: float) -> float:
    """The timeout of an option object, if it has one of its own."""
    timeout: timedelta | None = getattr(options, "timeout", None)
    limit_s = timeout.total_seconds() if timeout is not None else 0.0
    return limit_s if limit_s > 0 else default_s


def listed(tensors: Tensors) -> list[torch.Tensor]:
    """Dense tensors as a list. Raises UsageError for a sparse one, or one on a device without memory."""
    found = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for tensor in found:
        check_dense(tensor, None)
    return found


def check_writable(tensor: torch.Tensor) -> None:
    """Raises UsageError for one of whose elements several lie at one address: see check_result."""
    check_result(tensor, None, takes_views=True)


def alone(tensors: Any, what: str) -> Any:
    """The only element. Raises UsageError: a process has one device in a group."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError(f"{what}: expected one tensor (or one list) per process, got {len(tensors)}")
    return tensors[0]


def device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Their device. Raises UsageError if they lie on several."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise UsageError(f"tensors of one operation lie on {', '.join(sorted(map(str, devices)))}; move them to one")
    return devices.pop() if devices else torch.device("cpu")


def octets(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in logical order as flat uint8; a copy where memory does not hold them so."""
    return as_bytes(tensor.resolve_conj().resolve_neg())


def nbytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


class Landing:
    """Where bytes of a result go: the tensor's own memory, or, if that has gaps, first beside it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        check_writable(tensor)
        self._tensor = tensor.detach()
        is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        self._beside = self._tensor if is_plain else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self.memory = self._beside.view(-1).view(torch.uint8)

    def land(self) -> None:
        """All bytes are there."""
        if self._beside is not self._tensor:
            self._tensor.copy_(self._beside)
