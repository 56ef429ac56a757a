"""What a tensor is to the service: dtype, operation, spec, key. Pure; any thread."""

from __future__ import annotations

import enum
import hashlib
import math
from dataclasses import dataclass, field

from byteps_py.errors import UsageError

MAX_NAME_BYTES = 1024
PAGE_BYTES = 4096


class DType(enum.IntEnum):
    """Element types on the wire; the values are wire codes and never change."""

    FLOAT32 = 1
    FLOAT64 = 2
    FLOAT16 = 3
    BFLOAT16 = 4
    INT8 = 5
    INT16 = 6
    INT32 = 7
    INT64 = 8
    UINT8 = 9

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def is_floating(self) -> bool:
        return self <= DType.BFLOAT16


_ITEMSIZE = {
    DType.FLOAT32: 4,
    DType.FLOAT64: 8,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.INT8: 1,
    DType.INT16: 2,
    DType.INT32: 4,
    DType.INT64: 8,
    DType.UINT8: 1,
}


class Op(enum.IntEnum):
    """How contributions are combined; the values are wire codes and never change.

    An average is a SUM whose result each worker divides (see ``TensorSpec.divisor``).
    BROADCAST combines nothing: the result is the contribution of the root rank.
    """

    SUM = 1
    MIN = 2
    MAX = 3
    PRODUCT = 4
    BROADCAST = 5


class Checks(enum.IntFlag):
    """What a reduction finds out about its result in the same pass.

    FINITE: whether it is NaN or infinite anywhere, and through which contribution. CHECKSUM: 64 bits of its bytes.
    """

    NONE = 0
    FINITE = 1
    CHECKSUM = 2


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What all ranks must agree on before a name is reduced for the first time.

    ``average`` divides the sum by the number of ranks at delivery: true division for floating types, floor
    division for integers. ``root`` is the global rank that a BROADCAST reads, else -1. ``priority``: higher
    goes first when tensors compete for the network; ranks may differ in it.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    op: Op = Op.SUM
    average: bool = False
    root: int = -1
    priority: int = 0
    count: int = field(init=False, compare=False, repr=False)  # of elements
    nbytes: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.name or len(self.name.encode()) > MAX_NAME_BYTES:
            raise UsageError(f"a tensor's name must have 1 to {MAX_NAME_BYTES} bytes, got {self.name[:40]!r}…")
        if any(d < 0 for d in self.shape):
            raise UsageError(f"tensor {self.name!r}: shape {self.shape} has a negative dimension")
        if (self.op is Op.BROADCAST) != (self.root >= 0):
            raise UsageError(f"tensor {self.name!r}: a broadcast, and nothing else, names a root rank")
        if self.average and self.op is not Op.SUM:
            raise UsageError(f"tensor {self.name!r}: only a sum can be averaged, not {self.op.name.lower()}")
        # Once: rounds ask for them again and again.
        object.__setattr__(self, "count", math.prod(self.shape))
        object.__setattr__(self, "nbytes", self.count * self.dtype.itemsize)

    def divisor(self, size: int) -> int:
        """What a result is divided by at delivery, with ``size`` ranks."""
        return size if self.average else 1

    def agrees_with(self, other: TensorSpec) -> bool:
        """True if ranks that gave these two specs may be reduced together."""
        return self.signature() == other.signature()

    def signature(self) -> tuple[DType, tuple[int, ...], Op, bool, int]:
        return (self.dtype, self.shape, self.op, self.average, self.root)

    def describe(self) -> str:
        """The part that ranks must agree on, for messages: ``average of float32[3, 4]``."""
        op = "average" if self.average else self.op.name.lower()
        root = f" from rank {self.root}" if self.op is Op.BROADCAST else ""
        return f"{op} of {self.dtype.name.lower()}{list(self.shape)}{root}"


def key_of(name: str) -> int:
    """The 64-bit key of a name. A function of the name alone, so declaration order never matters."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def split(nbytes: int, partition_bytes: int, itemsize: int) -> list[tuple[int, int]]:
    """Cut ``nbytes`` into (offset, length) pieces of at most ``partition_bytes``, as even as whole units allow.

    The unit is a page where ``partition_bytes`` is a multiple of one, else an element: so pieces of shared
    memory start on pages, and no element is ever cut in two.

    >>> split(10, 4, 1)
    [(0, 4), (4, 3), (7, 3)]
    >>> split(20_000, 8192, 4)
    [(0, 8192), (8192, 8192), (16384, 3616)]
    >>> split(0, 4, 1)
    []
    """
    nbytes -= nbytes % itemsize
    unit = itemsize if partition_bytes % PAGE_BYTES or PAGE_BYTES % itemsize else PAGE_BYTES
    units = -(-nbytes // unit)
    parts = -(-units // max(1, partition_bytes // unit))
    pieces = []
    start = 0
    for i in range(parts):
        end = min(nbytes, start + (units // parts + (1 if i < units % parts else 0)) * unit)
        pieces.append((start, end - start))
        start = end
    return pieces
