"""Codec: the form in which a tensor travels between machines, if it is not that of its dtype.

Its unit is a block: so many elements, which become so many bytes. Partitions are cut between blocks, so whoever holds,
sends or places bytes needs nothing but ``item_bytes``. ``byteps_py/codecs`` has the arithmetic. Pure; any thread.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

from byteps_py.errors import UsageError

#: Elements of a block of INT8 and of the FLOAT8s: 1.6 % of what travels are scales.
SCALED_BLOCK = 256
#: Elements of a block of TOPK. Their positions fit in 16 bits, and the elements in a processor's first cache.
TOPK_BLOCK = 4096

#: The largest coded block. A partition holds at least one, however small partitions are to be.
MAX_BLOCK_BYTES = 6 * TOPK_BLOCK

_KIND_BITS = 8
_FEEDBACK = 1 << 31


class CodecKind(enum.IntEnum):
    """How the elements of a block are coded. The values are wire codes and never change."""

    INT8 = 1
    FLOAT8_E4M3 = 2
    FLOAT8_E5M2 = 3
    TOPK = 4


@dataclass(frozen=True, slots=True)
class Codec:
    """The facts of a codec, on which all ranks must agree.

    Attributes:
        kind: how elements are coded.
        entries: of TOPK: how many elements of each block are sent; 0 for others.
        error_feedback: each machine adds what it could not send in one round to its contribution to the next.

    Blocks of INT8 and the FLOAT8s: a float32 scale, then ``SCALED_BLOCK`` bytes. Blocks of TOPK: ``entries`` float32
    values, as many positions of 16 bits, ascending, and zeros up to a multiple of 4 bytes. Little endian.

    >>> Codec(CodecKind.INT8).coded_nbytes(1000), str(Codec(CodecKind.INT8))
    (1040, 'int8')
    >>> Codec.topk(0.01, error_feedback=True).item_bytes
    248
    """

    kind: CodecKind
    entries: int = 0
    error_feedback: bool = False

    def __post_init__(self) -> None:
        if (self.kind is CodecKind.TOPK) != (0 < self.entries <= TOPK_BLOCK):
            raise UsageError(f"a codec {self.kind.name.lower()} with {self.entries} entries in a block does not exist")

    @classmethod
    def topk(cls, ratio: float, error_feedback: bool = False) -> Codec:
        """TOPK that sends at least the share ``ratio`` of each block. Raises UsageError unless 0 < ratio <= 1."""
        if not 0 < ratio <= 1:
            raise UsageError(f"topk sends a share above 0 and up to 1 of a tensor, not ratio={ratio!r}")
        return cls(CodecKind.TOPK, math.ceil(ratio * TOPK_BLOCK), error_feedback)

    @property
    def block(self) -> int:
        """Elements of a block."""
        return TOPK_BLOCK if self.kind is CodecKind.TOPK else SCALED_BLOCK

    @property
    def item_bytes(self) -> int:
        """Bytes of a coded block. A tensor's last block has as many, whatever it holds."""
        if self.kind is CodecKind.TOPK:
            return -(-6 * self.entries // 4) * 4
        return 4 + SCALED_BLOCK

    def coded_nbytes(self, count: int) -> int:
        """Bytes of ``count`` elements."""
        return -(-count // self.block) * self.item_bytes

    def dense_nbytes(self, coded: int) -> int:
        """The size of the float32 elements that ``coded`` bytes stand for."""
        return coded // self.item_bytes * self.block * 4

    @property
    def on_wire(self) -> Codec:
        """The codec as a server sees it: error feedback is the machines' own."""
        return replace(self, error_feedback=False)

    @property
    def code(self) -> int:
        """A number of 32 bits for messages; never 0, which stands for no codec."""
        return self.kind | self.entries << _KIND_BITS | (_FEEDBACK if self.error_feedback else 0)

    @classmethod
    def from_code(cls, code: int) -> Codec:
        """The codec with this code. Raises ValueError or UsageError if there is none."""
        entries = (code & ~_FEEDBACK) >> _KIND_BITS
        return cls(CodecKind(code & (1 << _KIND_BITS) - 1), entries, bool(code & _FEEDBACK))

    def __str__(self) -> str:
        share = f" of {self.entries} in {self.block}" if self.kind is CodecKind.TOPK else ""
        return f"{self.kind.name.lower()}{share}{' with error feedback' if self.error_feedback else ''}"
