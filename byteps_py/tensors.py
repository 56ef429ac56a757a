"""What a tensor is to the service: dtype, operation, spec, key. Pure; any thread."""

from __future__ import annotations

import enum
import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from byteps_py.errors import UsageError
from byteps_py.wording import count_text, ranks_text

MAX_NAME_BYTES = 1024
MAX_TERMS_BYTES = 256
MAX_TENSOR_BYTES = 1 << 48  # no machine holds more; keeps sums of sizes within 64 bits
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
    GATHER and EXCHANGE combine nothing either, and go from machine to machine without a server: GATHER gives every
    rank the contributions of all; EXCHANGE gives every rank the pieces that the others have for it. How long they
    are and where they lie is said anew when it changes, see ``Layout``.
    """

    SUM = 1
    MIN = 2
    MAX = 3
    PRODUCT = 4
    BROADCAST = 5
    GATHER = 6
    EXCHANGE = 7

    @property
    def is_reduction(self) -> bool:
        return self <= Op.PRODUCT

    @property
    def is_direct(self) -> bool:
        """From machine to machine, without a server: nothing is combined, nothing voted on."""
        return self >= Op.GATHER


class Checks(enum.IntFlag):
    """What a reduction finds out about its result in the same pass.

    FINITE: whether it is NaN or infinite anywhere, and through which contribution. CHECKSUM: 64 bits of its bytes.
    """

    NONE = 0
    FINITE = 1
    CHECKSUM = 2


class NonFinite(enum.IntEnum):
    """What ranks do about a reduction whose result is NaN or infinite; the values are wire codes and never change."""

    ALLOW = 0  # nothing: nobody looks
    RAISE = 1
    SKIP = 2  # leave the step out


def _utf8_bytes(text: str) -> int:
    """Raises UsageError if ``text`` can't be written in UTF-8, as names travel."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the name {text[:40]!r} has a character that UTF-8 does not know ({text[error.start]!r}, half of a "
            "surrogate pair): names must be text that can be sent"
        ) from None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What all ranks must agree on before a name is reduced for the first time.

    ``average`` divides the sum by the number of ranks at delivery: true division for floating types, floor
    division for integers. ``root`` is the global rank that a BROADCAST reads, else -1. ``priority``: higher
    goes first when tensors compete for the network (below zero, but for the first quarter of a tensor); ranks may
    differ in it. ``group``: the global ranks that take part, ascending; empty for all.

    ``scatters``: each rank gets only its piece of a reduction. Pieces are rows (of the first dimension), as even as
    can be, the longer ones first, in the order of the group.

    ``nonfinite``: unless it is ALLOW, each round says which ranks made its result NaN or infinite.

    A GATHER or an EXCHANGE has a dtype of UINT8 and the shape (bytes of the input, bytes of the result): room for the
    largest round, which each rank chooses for itself. Declared again with more room, its memory grows.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    op: Op = Op.SUM
    average: bool = False
    root: int = -1
    priority: int = 0
    group: tuple[int, ...] = ()
    scatters: bool = False
    terms: str = ""
    nonfinite: NonFinite = NonFinite.ALLOW
    count: int = field(init=False, compare=False, repr=False)  # of elements
    nbytes: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.name or _utf8_bytes(self.name) > MAX_NAME_BYTES:
            raise UsageError(f"a tensor's name must have 1 to {MAX_NAME_BYTES} bytes, got {self.name[:40]!r}…")
        if any(d < 0 for d in self.shape):
            raise UsageError(f"tensor {self.name!r}: shape {self.shape} has a negative dimension")
        if (self.op is Op.BROADCAST) != (self.root >= 0):
            raise UsageError(f"tensor {self.name!r}: a broadcast, and nothing else, names a root rank")
        if self.average and self.op is not Op.SUM:
            raise UsageError(f"tensor {self.name!r}: only a sum can be averaged, not {self.op.name.lower()}")
        if self.group and (self.group[0] < 0 or any(a >= b for a, b in itertools.pairwise(self.group))):
            raise UsageError(f"tensor {self.name!r}: group {self.group} is not ascending")
        if self.group and self.root >= 0 and self.root not in self.group:
            raise UsageError(f"tensor {self.name!r}: root rank {self.root} is not in its group {list(self.group)}")
        if self.scatters and not (self.op.is_reduction and self.shape):
            raise UsageError(f"tensor {self.name!r}: only a reduction of one or more dimensions can be scattered")
        if _utf8_bytes(self.terms) > MAX_TERMS_BYTES:
            raise UsageError(f"tensor {self.name!r}: terms of more than {MAX_TERMS_BYTES} bytes: {self.terms[:40]!r}…")
        if self.op.is_direct and not (self.dtype is DType.UINT8 and len(self.shape) == 2):
            raise UsageError(f"tensor {self.name!r}: a {self.op.name.lower()} is uint8, of shape (input, result)")
        # Once: rounds ask for them again and again.
        object.__setattr__(self, "count", self.shape[0] if self.op.is_direct else math.prod(self.shape))
        object.__setattr__(self, "nbytes", self.count * self.dtype.itemsize)
        if max(self.nbytes, self.shape[1] if self.op.is_direct else 0) > MAX_TENSOR_BYTES:
            raise UsageError(f"tensor {self.name!r}: shape {list(self.shape)} is larger than any machine's memory")

    @property
    def needs_all(self) -> bool:
        """It can't go on without a rank that has joined."""
        return self.scatters or not self.op.is_reduction

    @property
    def is_guarded(self) -> bool:
        """Whoever takes the sum looks for NaN and infinity in it."""
        return bool(self.nonfinite) and self.dtype.is_floating and self.op.is_reduction and not self.scatters

    def members(self, size: int) -> Sequence[int]:
        """The ranks that take part, of ``size`` in the job."""
        return self.group or range(size)

    def divisor(self, size: int) -> int:
        """What a result is divided by at delivery, with ``size`` ranks in the job."""
        return len(self.group) or size if self.average else 1

    def piece(self, position: int, members: int) -> tuple[int, int]:
        """(first element, elements) of what the member at ``position`` of ``members`` gets when it ``scatters``."""
        rows = self.shape[0]
        width = math.prod(self.shape[1:])
        first = position * (rows // members) + min(position, rows % members)
        return first * width, (rows // members + (position < rows % members)) * width

    def result_nbytes(self, rank: int, size: int) -> int:
        """Bytes of the result of ``rank``, with ``size`` ranks in the job."""
        if self.op.is_direct:
            return self.shape[1]
        if self.scatters:
            members = self.members(size)
            return self.piece(members.index(rank), len(members))[1] * self.dtype.itemsize
        return self.nbytes

    def agrees_with(self, other: TensorSpec) -> bool:
        """True if ranks that gave these two specs may be reduced together."""
        return self.signature() == other.signature()

    def fits_in(self, other: TensorSpec) -> bool:
        """True if a slot of ``other``, which it agrees with, has room for it."""
        return not self.op.is_direct or all(mine <= there for mine, there in zip(self.shape, other.shape, strict=True))

    def signature(self) -> tuple[object, ...]:
        shape = () if self.op.is_direct else self.shape
        return (
            self.dtype, shape, self.op, self.average, self.root, self.group, self.scatters, self.terms, self.nonfinite,
        )  # fmt: skip

    def describe(self) -> str:
        """The part that ranks must agree on, for messages: ``average of float32[3, 4]``."""
        op = "average" if self.average else self.op.name.lower()
        op = f"scattered {op}" if self.scatters else op
        root = f" from rank {self.root}" if self.op is Op.BROADCAST else ""
        group = f" among ranks {', '.join(map(str, self.group))}" if self.group else ""
        what = "bytes" if self.op.is_direct else f"{self.dtype.name.lower()}{list(self.shape)}"
        terms = f" ({self.terms})" if self.terms else ""
        guard = f", BYTEPS_NONFINITE={self.nonfinite.name.lower()}" if self.nonfinite else ""
        return f"{op} of {what}{root}{group}{terms}{guard}"


#: In the names of operations that were given none, and so are matched in the order of their calls.
UNNAMED = ".noname."

#: The priority of gradients that are waited for all together: they go in the order in which they become ready, the same
#: on all machines, and behind what is waited for by itself.
TOGETHER = -1


class Sizes(enum.IntEnum):
    """How far one who receives pieces looks at their sizes. Where one is not as expected, it gets a MismatchError."""

    PLAIN = 0  # a piece that is expected to be empty is not asked for
    CHECKED = 1  # it is
    TOGETHER = 2  # it is, and nobody's round is over before all have asked: so who sends gets the error, too
    TENTATIVE = 3  # it is; a piece of another size stays where it is, and the round may be given again


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's part in a round of a GATHER or an EXCHANGE: (offset, bytes) of pieces of its memory.

    ``sends``: in the input, for each member of the group, in order; a GATHER has one piece, which is for all.
    ``receives``: in the result, from each member. What one member sends and what the other expects must be equally
    long. A piece of 0 bytes is not sent; ``sizes`` says whether it is looked at. A member of a GATHER may leave out its
    own: it has it. A rank that is TENTATIVE sends nothing.

    >>> Layout(sends=((0, 8),), receives=((0, 8), (8, 8)))  # all gather 8 bytes of each of two
    Layout(sends=((0, 8),), receives=((0, 8), (8, 8)), sizes=<Sizes.PLAIN: 0>)
    """

    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]
    sizes: Sizes = Sizes.PLAIN

    def check(self, spec: TensorSpec, members: int) -> None:
        """Raises UsageError if ``spec``, with so many members, has no room for it."""
        room_in, room_out = spec.shape
        if len(self.receives) != members or len(self.sends) != (1 if spec.op is Op.GATHER else members):
            raise UsageError(
                f"tensor {spec.name!r}: a layout for {count_text(len(self.receives), 'rank')}, its group has {members}"
            )
        for ranges, room, what in ((self.sends, room_in, "input"), (self.receives, room_out, "result")):
            for offset, nbytes in ranges:
                if offset < 0 or nbytes < 0 or offset + nbytes > room:
                    raise UsageError(
                        f"tensor {spec.name!r}: a piece of {nbytes} bytes at {offset} is not inside its {what} of "
                        f"{room} bytes"
                    )


def differing(name: str, source: int, sent: int, target: int, due: int) -> str:
    """What to say when two ranks disagree about a piece of a GATHER or an EXCHANGE."""
    return (
        f"tensor {name!r}: rank {source} sends {sent} bytes to rank {target}, which expects {due}; give matching sizes "
        "on both"
    )


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


def unsupported(spec: TensorSpec, joined: Iterable[int]) -> str:
    """What to say when ranks have joined and a tensor can't do without them."""
    ranks = sorted(joined)
    have = "has" if len(ranks) == 1 else "have"
    return f"tensor {spec.name!r}: {spec.describe()} is not supported while {ranks_text(ranks)} {have} joined"
