"""Codec: the form in which a tensor travels between machines, if it is not that of its dtype.

Its unit is a block: so many elements, which become so many bytes. Partitions are cut between blocks, so whoever holds,
sends or places bytes needs nothing but ``item_bytes``. ``byteps_py/codecs`` has the arithmetic. Pure; any thread.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

from byteps_py.errors import UsageError

#: Elements of a block of INT8, of the FLOAT8s and of ditherings: 1.6 % of what travels as bytes are scales.
SCALED_BLOCK = 256
#: Elements of a block of TOPK and RANDOMK, which fit in a processor's first cache; bits of their positions.
TOPK_BLOCK = 4096
POSITION_BITS = 12
#: Elements of a block of the ONEBITs.
ONEBIT_BLOCK = 2048

#: The largest coded block. A partition holds at least one, however small partitions are to be.
MAX_BLOCK_BYTES = 4 * TOPK_BLOCK + TOPK_BLOCK // 4

_KIND_BITS = 8
_ENTRIES = (1 << 16) - 1
_FEEDBACK = 1 << 31
_SEED_AT = 32
MAX_SEED = (1 << 32) - 1
MAX_DRAWN = (1 << 48) - 1


class CodecKind(enum.IntEnum):
    """How the elements of a block are coded. The values are wire codes and never change."""

    INT8 = 1
    FLOAT8_E4M3 = 2
    FLOAT8_E5M2 = 3
    TOPK = 4
    ONEBIT = 5  # each element becomes 1 or -1
    ONEBIT_SCALED = 6  # … times the mean magnitude of its block
    RANDOMK = 7
    DITHERING_LINEAR = 8  # rounded up or down by chance, to one of ``entries`` steps of the block's largest magnitude
    DITHERING_LINEAR_L2 = 9  # … of the block's Euclidean norm
    DITHERING_NATURAL = 10  # rounded by chance to one of ``entries`` halvings of the block's largest magnitude, or to 0
    DITHERING_NATURAL_L2 = 11
    THC = 12  # multiples of a step that machines have agreed on, in lanes of 8 bits, which a server adds
    THC_WIDE = 13  # … of 16 bits
    TOPK_2BIT = 14  # signs, and one of two magnitudes


_TOPK = (CodecKind.TOPK, CodecKind.TOPK_2BIT)
_SPARSE = (*_TOPK, CodecKind.RANDOMK)
_ONEBIT = (CodecKind.ONEBIT, CodecKind.ONEBIT_SCALED)
_DITHERING = tuple(CodecKind)[7:11]
_THC = (CodecKind.THC, CodecKind.THC_WIDE)


@dataclass(frozen=True, slots=True)
class Codec:
    """The facts of a codec, on which all ranks must agree.

    Attributes:
        kind: how elements are coded.
        entries: of the TOPKs and RANDOMK: how many elements of each block are sent; of ditherings: the number of levels
            above 0; 0 for others.
        error_feedback: each machine adds what it could not send in one round to its contribution to the next.
        seed: of RANDOMK and of ditherings: what they draw follows from it.
        momentum: the factor of Nesterov momentum that machines apply before they code; 0: none.
        drawn: of a codec that draws: for how many rounds machines have drawn before the tensor was declared.

    Blocks of INT8 and the FLOAT8s: a float32 scale, then ``SCALED_BLOCK`` bytes. Blocks of TOPK: ``entries`` float32
    values, as many positions, and zeros up to a multiple of 4 bytes. Blocks of TOPK_2BIT: two float32 magnitudes,
    ``entries`` positions, as many times 2 bits (sign, then which magnitude), and zeros; if the second magnitude is 0,
    entries stand for nothing. Positions, ascending: a string of bits in which bit ``(position >> low_bits) + entry`` is
    set for each entry, then ``low_bits`` bits of each. An entry without a bit, and one whose position is not above the
    one before, stands for nothing. Blocks of RANDOMK: ``entries`` float32 values. Blocks of ditherings: a float32
    scale, then for each of ``SCALED_BLOCK`` elements 2, 4 or 8 bits, as few as hold the levels and a sign. Blocks of
    the ONEBITs: a float32 scale, the number of elements in 32 bits, and ``ONEBIT_BLOCK`` bits. Blocks of the THCs: a
    float32 step, the largest magnitude as a float32, and ``SCALED_BLOCK`` lanes; they always have error feedback, of
    which servers know nothing. Little endian.

    >>> Codec(CodecKind.INT8).coded_nbytes(1000), str(Codec(CodecKind.INT8))
    (1040, 'int8')
    >>> Codec.topk(0.01, error_feedback=True).item_bytes
    208
    >>> Codec.topk(0.03, bits=2).item_bytes
    148
    >>> str(Codec.randomk(0.01, seed=3))
    'randomk of 41 in 4096 (seed 3)'
    """

    kind: CodecKind
    entries: int = 0
    error_feedback: bool = False
    seed: int = 0
    momentum: float = 0.0
    drawn: int = 0

    def __post_init__(self) -> None:
        kind, most = self.kind, 0
        if kind in _SPARSE:
            most = TOPK_BLOCK
        elif kind in _DITHERING:
            most = 127
        if not min(1, most) <= self.entries <= most:
            what = "levels" if kind in _DITHERING else "entries in a block"
            raise UsageError(f"a codec {kind.name.lower()} with {self.entries} {what} does not exist: 1 to {most} do")
        if not 0 <= self.seed <= (MAX_SEED if self.draws else 0):
            raise UsageError(f"a codec {kind.name.lower()} with the seed {self.seed!r} does not exist")
        if not 0 <= self.momentum < 1:
            raise UsageError(f"momentum is a factor of at least 0 and below 1, not {self.momentum!r}")
        if not 0 <= self.drawn <= (MAX_DRAWN if self.draws else 0):
            raise UsageError(f"a codec {kind.name.lower()} that was drawn for {self.drawn} rounds does not exist")

    @classmethod
    def topk(cls, ratio: float, error_feedback: bool = False, bits: int = 32) -> Codec:
        """TOPK that sends at least the share ``ratio`` of each block, TOPK_2BIT for 2 bits. Raises UsageError unless
        0 < ratio <= 1, and for other bits."""
        if bits not in (2, 32):
            raise UsageError(f"topk sends values of 32 or 2 bits, not bits={bits!r}")
        return cls(CodecKind.TOPK if bits == 32 else CodecKind.TOPK_2BIT, _entries("topk", ratio), error_feedback)

    @classmethod
    def randomk(cls, ratio: float, seed: int = 0, error_feedback: bool = False) -> Codec:
        """RANDOMK that sends at least the share ``ratio`` of each block. Raises UsageError unless 0 < ratio <= 1."""
        return cls(CodecKind.RANDOMK, _entries("randomk", ratio), error_feedback, seed)

    @property
    def is_thc(self) -> bool:
        """Machines agree on its steps from round to round."""
        return self.kind in _THC

    def levels(self, machines: int) -> int:
        """Of a THC: how many multiples of a step, up and down, ``machines`` may send: lanes hold their sum. Up to 127,
        those of an integer of 8 bits; 7 are those of one of 4 bits. 0: there are too many machines."""
        return min(127, (32767 if self.kind is CodecKind.THC_WIDE else 127) // machines)

    @property
    def leaves_out(self) -> bool:
        """True if some elements of a tensor are not sent."""
        return self.kind in _SPARSE

    @property
    def draws(self) -> bool:
        """True if the codec draws pseudo-random numbers."""
        return self.kind is CodecKind.RANDOMK or self.kind in _DITHERING

    @property
    def has_states(self) -> bool:
        """Machines keep something of it from round to round."""
        return self.error_feedback or self.momentum > 0

    @property
    def needs_answers(self) -> bool:
        """A machine needs the answer to what it sent: to take back what a TOPK's server left out, or to agree on the
        steps of a THC."""
        return self.kind in _TOPK or self.is_thc

    def state_nbytes(self, count: int) -> tuple[int, int, int]:
        """Bytes of what a machine keeps of ``count`` elements: the error, the momentum, and what machines have agreed
        on for the blocks of a THC; all of float32 numbers."""
        blocks = -(-count // self.block)
        return 4 * count * self.error_feedback, 4 * count * (self.momentum > 0), 4 * blocks * self.is_thc

    @property
    def element_bits(self) -> int:
        """Bits of a coded element of a dithering."""
        return 2 if self.entries < 2 else 4 if self.entries < 8 else 8

    @property
    def block(self) -> int:
        """Elements of a block."""
        return TOPK_BLOCK if self.kind in _SPARSE else ONEBIT_BLOCK if self.kind in _ONEBIT else SCALED_BLOCK

    @property
    def item_bytes(self) -> int:
        """Bytes of a coded block. A tensor's last block has as many, whatever it holds."""
        if self.kind in _TOPK:
            is_full, low_bits = self.kind is CodecKind.TOPK, POSITION_BITS - (self.entries - 1).bit_length()
            bits = self.entries * (low_bits + (1 if is_full else 3)) + (TOPK_BLOCK >> low_bits)
            return (4 * self.entries if is_full else 8) + -(-bits // 32) * 4
        if self.kind is CodecKind.RANDOMK:
            return 4 * self.entries
        if self.kind in _ONEBIT:
            return 8 + ONEBIT_BLOCK // 8
        if self.kind in _THC:
            return 8 + SCALED_BLOCK * (2 if self.kind is CodecKind.THC_WIDE else 1)
        return 4 + SCALED_BLOCK * (self.element_bits if self.kind in _DITHERING else 8) // 8

    def coded_nbytes(self, count: int) -> int:
        """Bytes of ``count`` elements."""
        return -(-count // self.block) * self.item_bytes

    def dense_nbytes(self, coded: int) -> int:
        """The size of the float32 elements that ``coded`` bytes stand for."""
        return coded // self.item_bytes * self.block * 4

    @property
    def on_wire(self) -> Codec:
        """The codec as a server sees it: error feedback and momentum are the machines' own."""
        return replace(self, error_feedback=False, momentum=0.0, drawn=0)

    @property
    def code(self) -> int:
        """A number of 64 bits for messages, without ``momentum`` and ``drawn``; never 0, which stands for no codec."""
        feedback = _FEEDBACK if self.error_feedback else 0
        return self.kind | self.entries << _KIND_BITS | feedback | self.seed << _SEED_AT

    @classmethod
    def from_code(cls, code: int, momentum: float = 0.0, drawn: int = 0) -> Codec:
        """The codec with this code. Raises ValueError or UsageError if there is none."""
        kind, entries = CodecKind(code & (1 << _KIND_BITS) - 1), code >> _KIND_BITS & _ENTRIES
        codec = cls(kind, entries, bool(code & _FEEDBACK), code >> _SEED_AT, momentum, drawn)
        if codec.code != code:
            raise ValueError(f"no codec has the code {code:#x}")
        return codec

    def __str__(self) -> str:
        share = f" of {self.entries} in {self.block}" if self.kind in _SPARSE else ""
        levels = f" of {self.entries} levels" if self.kind in _DITHERING else ""
        after = f" after {self.drawn} rounds" if self.drawn else ""
        seed = f" (seed {self.seed}{after})" if self.draws else ""
        also = " and ".join(
            [*["error feedback"] * self.error_feedback, *[f"momentum {self.momentum:g}"] * (self.momentum > 0)]
        )
        return f"{self.kind.name.lower()}{share}{levels}{seed}{f' with {also}' if also else ''}"


#: The codec of what parameters change by in a step.
CHANGES = Codec(CodecKind.INT8)


def _entries(name: str, ratio: float) -> int:
    if not 0 < ratio <= 1:
        raise UsageError(f"{name} sends a share above 0 and up to 1 of a tensor, not ratio={ratio!r}")
    return math.ceil(ratio * TOPK_BLOCK)
