"""A tensor as the service sees it: dtype, operation, spec, layout, key.

Must not know torch, sockets or memory. Pure; any thread.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from byteps_py.errors import UsageError
from byteps_py.tensor_codec import CHANGES, Codec
from byteps_py.wording import count_text, ranks_text

MAX_NAME_BYTES = 1024
MAX_TERMS_BYTES = 256
MAX_TENSOR_BYTES = 1 << 48  # more than any machine holds; keeps sums of sizes within 64 bits
PAGE_BYTES = 4096
#: The staleness of an ACCUMULATE in which no machine waits for another one.
NO_BOUND = (1 << 16) - 1
MAX_QUORUM = (1 << 16) - 1


class DType(enum.IntEnum):
    """The types of elements. The values are wire codes and never change."""

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
        """The size of one element in bytes."""
        return _ITEMSIZE[self]

    @property
    def is_floating(self) -> bool:
        """True for floating types, False for integers."""
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
    """How contributions are combined. The values are wire codes and never change.

    An average is a SUM whose result each machine divides (see ``TensorSpec.divisor``). BROADCAST, GATHER and EXCHANGE
    combine nothing. The result of a BROADCAST is the contribution of the root rank. GATHER gives every rank the
    contributions of all ranks, EXCHANGE gives every rank the pieces that the other ranks have for it. Both go from
    machine to machine without a server. A ``Layout`` says where the pieces lie and how long they are; ranks send it
    again when it changes. An ACCUMULATE is not made together: servers keep a sum, to which each machine adds when it
    comes, and gets the sum as it is then (see ``TensorSpec.staleness``). Its first round brings the first value.
    """

    SUM = 1
    MIN = 2
    MAX = 3
    PRODUCT = 4
    BROADCAST = 5
    GATHER = 6
    EXCHANGE = 7
    ACCUMULATE = 8

    @property
    def is_reduction(self) -> bool:
        """True if the operation combines contributions elementwise."""
        return self <= Op.PRODUCT

    @property
    def bypasses_servers(self) -> bool:
        """True if data goes from machine to machine without a server, and nothing is combined."""
        return self is Op.GATHER or self is Op.EXCHANGE

    @property
    def kernel(self) -> Op:
        """The operation that kernels carry out."""
        return Op.SUM if self is Op.ACCUMULATE else self


class Checks(enum.IntFlag):
    """The checks that a reduction makes of its result in the same pass.

    FINITE: whether the result is NaN or infinite anywhere, and which contributions are. CHECKSUM: a checksum of 64 bits
    over the result's bytes.
    """

    NONE = 0
    FINITE = 1
    CHECKSUM = 2


class NonFinite(enum.IntEnum):
    """The reaction of the ranks to a result that is NaN or infinite. The values are wire codes and never change."""

    ALLOW = 0  # nothing; results are not checked
    RAISE = 1  # raise NonFiniteError
    SKIP = 2  # skip the step


def _utf8_bytes(text: str) -> int:
    """The size of ``text`` in UTF-8. Raises UsageError if it can't be encoded."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the name {text[:40]!r} has a character that UTF-8 can't encode ({text[error.start]!r}, half of a "
            "surrogate pair): a name must be valid UTF-8"
        ) from None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The facts that all ranks must agree on before the first round of a name.

    Attributes:
        name: 1 to 1024 bytes in UTF-8.
        dtype: type of the elements.
        shape: dimensions. A GATHER or an EXCHANGE has the dtype UINT8 and the shape (bytes of the input, bytes of the
            result): room for the largest round, which each rank chooses for itself. Declaring it again with more room
            makes its memory grow.
        op: the operation.
        average: divide the sum by the number of ranks at delivery: true division for floating types, floor division
            for integers.
        root: global rank that a BROADCAST reads; -1 for other operations.
        priority: a tensor with a higher priority goes first when tensors compete for the network. With a priority below
            zero, the first quarter of a tensor goes in the order of the calls, which machines share, and only the rest
            by priority. Ranks may give different priorities.
        group: global ranks that take part, ascending; empty for all.
        scatters: each rank gets only its piece of a reduction. Pieces are whole rows (of the first dimension), as even
            as possible, the longer ones first, in the order of the group.
        terms: further text on which ranks must agree, at most 256 bytes.
        nonfinite: unless it is ALLOW, each round reports which ranks made its result NaN or infinite.
        ownership: unless it is empty, each partition has an owner among the ranks of the group, and the name of the
            tensor that decides which: of a SUM, whose results go only to the owners' services, its own name; of a
            BROADCAST, which reads each partition from its owner, the name of such a SUM with as many elements and the
            same group.
        is_shadowed: of such a SUM, servers that do not add a partition are sent its result, too.
        is_replicated: with ownership, each machine has owners for all partitions among its own ranks of the group: a
            SUM is placed and answered as one without owners, and a BROADCAST stays on its machine.
        remark: a sentence for ``bps status``, at most 256 bytes. Ranks may give different ones.
        codec: the form in which a SUM of floating elements of at most 32 bits travels between machines, if several take
            part; None for that of its dtype. With ``scatters``, each piece is coded by itself. Of an ACCUMULATE of
            float32: the form of changes; servers and machines keep values as they are. CHANGES of a BROADCAST
            of float32, with one owner for each partition: what travels is added to the result of the round before.
        staleness: of an ACCUMULATE, by how many rounds a machine may be ahead of the slowest one, at least 1, or
            NO_BOUND: it gets the sum once each machine has given to the round ``staleness`` before. 0 for other
            operations.
        quorum: of an ACCUMULATE without a bound: a machine gets the sum once so many machines wait for it, and the
            others do not come in time. 0: it gets it at once.
        count: number of elements.
        nbytes: size in bytes.

    Raises UsageError if the values contradict each other.

    >>> spec = TensorSpec("weight", DType.FLOAT32, (3, 4), average=True)
    >>> spec.nbytes, spec.divisor(size=8), spec.describe()
    (48, 8, 'average of float32[3, 4]')
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
    ownership: str = ""
    is_shadowed: bool = False
    is_replicated: bool = False
    remark: str = ""
    codec: Codec | None = None
    staleness: int = 0
    quorum: int = 0
    count: int = field(init=False, compare=False, repr=False)  # of elements
    nbytes: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.name or _utf8_bytes(self.name) > MAX_NAME_BYTES:
            raise UsageError(f"a tensor's name must have 1 to {MAX_NAME_BYTES} bytes, got {self.name[:40]!r}…")
        if any(d < 0 for d in self.shape):
            raise UsageError(f"tensor {self.name!r}: shape {self.shape} has a negative dimension")
        if (self.op is Op.BROADCAST and not self.ownership) != (self.root >= 0):
            raise UsageError(f"tensor {self.name!r}: a broadcast needs a root rank, and no other operation takes one")
        if self.average and self.op is not Op.SUM:
            raise UsageError(f"tensor {self.name!r}: only a sum can be averaged, not {self.op.name.lower()}")
        if self.group and (self.group[0] < 0 or any(a >= b for a, b in itertools.pairwise(self.group))):
            raise UsageError(f"tensor {self.name!r}: the ranks of group {self.group} are not ascending from 0")
        if self.group and self.root >= 0 and self.root not in self.group:
            raise UsageError(f"tensor {self.name!r}: root rank {self.root} is not in its group {list(self.group)}")
        if self.scatters and not (self.op.is_reduction and self.shape):
            raise UsageError(f"tensor {self.name!r}: only a reduction of one or more dimensions can be scattered")
        if self.codec is not None:
            self._check_codec(self.codec)
        if self.op is Op.ACCUMULATE or self.staleness or self.quorum:
            self._check_accumulation()
        if self.ownership:
            self._check_ownership()
        if self.is_shadowed and self.ownership != self.name:
            raise UsageError(f"tensor {self.name!r}: only a sum for owners is shadowed, not a {self.describe()}")
        if self.is_replicated and not self.ownership:
            raise UsageError(f"tensor {self.name!r}: owners on each machine need ownership, not a {self.describe()}")
        if _utf8_bytes(self.terms) > MAX_TERMS_BYTES:
            raise UsageError(f"tensor {self.name!r}: terms of more than {MAX_TERMS_BYTES} bytes: {self.terms[:40]!r}…")
        if _utf8_bytes(self.remark) > MAX_TERMS_BYTES:
            raise UsageError(f"tensor {self.name!r}: a remark of more than {MAX_TERMS_BYTES} bytes")
        if self.op.bypasses_servers and not (self.dtype is DType.UINT8 and len(self.shape) == 2):
            raise UsageError(f"tensor {self.name!r}: a {self.op.name.lower()} is uint8, of shape (input, result)")
        # Computed once: every round uses them.
        object.__setattr__(self, "count", self.shape[0] if self.op.bypasses_servers else math.prod(self.shape))
        object.__setattr__(self, "nbytes", self.count * self.dtype.itemsize)
        if max(self.nbytes, self.shape[1] if self.op.bypasses_servers else 0) > MAX_TENSOR_BYTES:
            raise UsageError(f"tensor {self.name!r}: shape {list(self.shape)} is larger than any machine's memory")

    def _check_codec(self, codec: Codec) -> None:
        what = f"tensor {self.name!r}: compression {codec}"
        if not self.dtype.is_floating or self.dtype is DType.FLOAT64:
            raise UsageError(
                f"{what} is for float32, float16 and bfloat16, not for {self.dtype.name.lower()}: give it none"
            )
        has_one_owner = bool(self.ownership) and not self.is_replicated
        if self.op is Op.BROADCAST and has_one_owner and codec == CHANGES and self.dtype is DType.FLOAT32:
            return
        if self.op is Op.ACCUMULATE and not (codec.draws or codec.is_thc or codec.momentum):
            return
        lacks_answers = (has_one_owner and codec.needs_answers) or (self.scatters and codec.is_thc)
        if self.op is not Op.SUM or lacks_answers or (self.is_shadowed and codec.has_states):
            raise UsageError(
                f"{what} is for sums and averages that all machines get, not for a "
                f"{replace(self, codec=None).describe()}"
            )
        if codec.has_states and self.nonfinite is NonFinite.SKIP:
            raise UsageError(
                f"{what} can't be had with BYTEPS_NONFINITE=skip: what a skipped step did not send would be lost. Use "
                "it without error feedback and momentum, or BYTEPS_NONFINITE=raise"
            )

    def _check_accumulation(self) -> None:
        if self.op is not Op.ACCUMULATE or not 1 <= self.staleness <= NO_BOUND:
            raise UsageError(
                f"tensor {self.name!r}: a staleness of 1 to {NO_BOUND} belongs to an accumulate, not "
                f"{self.staleness} to a {self.op.name.lower()}"
            )
        if not 0 <= self.quorum <= MAX_QUORUM or (self.quorum and self.staleness != NO_BOUND):
            raise UsageError(
                f"tensor {self.name!r}: a quorum of 1 to {MAX_QUORUM} machines belongs to an accumulate without a "
                f"bound, not {self.quorum} to one with staleness {self.staleness}"
            )
        if (not self.dtype.is_floating and self.dtype.itemsize < DType.INT32.itemsize) or self.group or self.nonfinite:
            raise UsageError(
                f"tensor {self.name!r}: an accumulate is for all ranks, of floating elements or integers of at least "
                f"32 bits, with nonfinite='allow', not a {self.describe()}"
            )

    def _check_ownership(self) -> None:
        is_sum = self.op is Op.SUM and self.ownership == self.name
        is_broadcast = self.op is Op.BROADCAST and self.ownership != self.name
        if not (is_sum or is_broadcast) or self.scatters or self.nonfinite:
            raise UsageError(
                f"tensor {self.name!r}: ownership needs a SUM, or a BROADCAST that names one, with "
                f"nonfinite='allow', not a {self.describe()}"
            )
        if _utf8_bytes(self.ownership) > MAX_NAME_BYTES:
            raise UsageError(
                f"tensor {self.name!r}: owned as {self.ownership[:40]!r}…, more than {MAX_NAME_BYTES} bytes"
            )

    @property
    def needs_all(self) -> bool:
        """True if the operation needs all ranks, including those that have joined."""
        return self.scatters or bool(self.ownership) or not self.op.kernel.is_reduction

    @property
    def sent_nbytes(self) -> int:
        """The size in bytes of what a machine sends of it to other machines; of one that scatters with a codec, see
        ``sent_piece``. Of an ACCUMULATE with a codec, that of values, up to the end of the last block."""
        if self.codec is None:
            return self.nbytes
        if self.op is Op.ACCUMULATE:
            return -(-self.count // self.codec.block) * self.sent_itemsize
        return self.codec.coded_nbytes(self.count)

    @property
    def sent_itemsize(self) -> int:
        """The size in bytes of what is never cut, of that: an element, or a coded block."""
        if self.codec is not None and self.op is Op.ACCUMULATE:
            return self.codec.block * self.dtype.itemsize
        return self.dtype.itemsize if self.codec is None else self.codec.item_bytes

    @property
    def is_guarded(self) -> bool:
        """True if each round checks its result for NaN and infinity."""
        return bool(self.nonfinite) and self.dtype.is_floating and self.op.is_reduction and not self.scatters

    def members(self, size: int) -> Sequence[int]:
        """The ranks that take part, in a job of ``size`` ranks."""
        return self.group or range(size)

    def divisor(self, size: int) -> int:
        """The number by which a result is divided at delivery, in a job of ``size`` ranks; 1 without ``average``."""
        return len(self.group) or size if self.average else 1

    def piece(self, position: int, members: int) -> tuple[int, int]:
        """(first element, number of elements) that the member at ``position`` of ``members`` gets if ``scatters``."""
        rows = self.shape[0]
        width = math.prod(self.shape[1:])
        first = position * (rows // members) + min(position, rows % members)
        return first * width, (rows // members + (position < rows % members)) * width

    def sent_piece(self, position: int, members: int, codec: Codec | None) -> tuple[int, int]:
        """(first byte, size in bytes) of ``piece`` in what machines code with ``codec``, or hold as it is. Pieces lie
        one after the other; after the last one is their end.

        >>> TensorSpec("g", DType.FLOAT32, (300,), scatters=True).sent_piece(1, 2, Codec.topk(0.01))
        (208, 208)
        """
        if codec is None:
            first, count = self.piece(position, members)
            return first * self.dtype.itemsize, count * self.dtype.itemsize
        rows, longer = divmod(self.shape[0], members)
        width = math.prod(self.shape[1:])
        short, long = codec.coded_nbytes(rows * width), codec.coded_nbytes((rows + 1) * width)
        first = min(position, longer) * long + max(0, position - longer) * short
        return first, long if position < longer else short

    def result_nbytes(self, rank: int, size: int) -> int:
        """The size in bytes of the result of ``rank``, in a job of ``size`` ranks."""
        if self.op.bypasses_servers:
            return self.shape[1]
        if self.ownership and self.op is Op.SUM:
            return 0
        if self.scatters:
            members = self.members(size)
            return self.piece(members.index(rank), len(members))[1] * self.dtype.itemsize
        return self.nbytes

    def agrees_with(self, other: TensorSpec) -> bool:
        """True if ranks with these two specs may take part in the same rounds."""
        return self.signature() == other.signature()

    def fits_in(self, other: TensorSpec) -> bool:
        """True if a slot of ``other``, which agrees with this spec, has room for it."""
        return not self.op.bypasses_servers or all(
            mine <= there for mine, there in zip(self.shape, other.shape, strict=True)
        )

    def signature(self) -> tuple[object, ...]:
        """Everything that ranks must agree on, but the name."""
        shape = () if self.op.bypasses_servers else self.shape
        return (
            self.dtype, shape, self.op, self.average, self.root, self.group, self.scatters, self.terms, self.nonfinite,
            self.ownership, self.is_shadowed, self.is_replicated, self.codec, self.staleness,
            self.quorum,
        )  # fmt: skip

    def describe(self) -> str:
        """Everything that ranks must agree on, for messages: ``average of float32[3, 4]``."""
        op = "average" if self.average else self.op.name.lower()
        op = f"scattered {op}" if self.scatters else op
        root = f" from rank {self.root}" if self.root >= 0 else ""
        root = (
            " for owners"
            if self.ownership == self.name
            else f" from owners of {self.ownership!r}"
            if self.ownership
            else root
        )
        group = f" among ranks {', '.join(map(str, self.group))}" if self.group else ""
        what = "bytes" if self.op.bypasses_servers else f"{self.dtype.name.lower()}{list(self.shape)}"
        terms = f" ({self.terms})" if self.terms else ""
        shadow = (", on each machine" if self.is_replicated else "") + (", shadowed" if self.is_shadowed else "")
        guard = f", BYTEPS_NONFINITE={self.nonfinite.name.lower()}" if self.nonfinite else ""
        coded = f", compressed to {self.codec}" if self.codec is not None else ""
        stale = f", staleness {self.staleness}" if self.staleness not in (0, NO_BOUND) else ""
        quorum = f", quorum {self.quorum}" if self.quorum else ""
        return f"{op} of {what}{root}{group}{terms}{shadow}{guard}{coded}{stale}{quorum}"


#: Part of the names of operations that the program gave no name. They are matched in the order of their calls.
UNNAMED = ".noname."

#: Part of the names of what ranks compare in the first step of an optimizer. The number of the optimizer follows.
FIRST_STEP = ", first step of optimizer "

#: The priority of gradients that an optimizer waits for all together. They go in the order in which they become ready,
#: which is the same on all machines, and behind tensors that are waited for singly.
PRIORITY_READY_ORDER = -1


class Sizes(enum.IntEnum):
    """How a rank that receives pieces checks their sizes. A piece of another size is a MismatchError on that rank."""

    PLAIN = 0  # pieces that are expected to be empty are not requested, and so not checked
    CHECKED = 1  # all pieces are requested
    TOGETHER = 2  # the same, and no rank's round ends before all have requested: so senders get the error too
    TENTATIVE = 3  # all are requested; a piece of another size is not taken, and the round may be given again


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's part in a round of a GATHER or an EXCHANGE: the pieces of its memory, as (offset, size) in bytes.

    Attributes:
        sends: pieces of the input, one for each member of the group, in order. A GATHER has one piece, for all members.
        receives: pieces of the result, one from each member. In a GATHER, a member may leave out its own.
        sizes: how the sizes of received pieces are checked. A rank whose ``sizes`` is TENTATIVE sends nothing.

    What one member sends and what the other expects must have the same size. A piece of 0 bytes is not sent.

    >>> Layout(sends=((0, 8),), receives=((0, 8), (8, 8)))  # two ranks gather 8 bytes of each
    Layout(sends=((0, 8),), receives=((0, 8), (8, 8)), sizes=<Sizes.PLAIN: 0>)
    """

    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]
    sizes: Sizes = Sizes.PLAIN

    def check(self, spec: TensorSpec, members: int) -> None:
        """Raise UsageError if ``spec``, in a group of ``members`` ranks, has no room for this layout."""
        room_in, room_out = spec.shape
        if len(self.receives) != members or len(self.sends) != (1 if spec.op is Op.GATHER else members):
            raise UsageError(
                f"tensor {spec.name!r}: the layout is for {count_text(len(self.receives), 'rank')}, its group has "
                f"{members}"
            )
        for ranges, room, what in ((self.sends, room_in, "input"), (self.receives, room_out, "result")):
            for offset, nbytes in ranges:
                if offset < 0 or nbytes < 0 or offset + nbytes > room:
                    raise UsageError(
                        f"tensor {spec.name!r}: a piece of {nbytes} bytes at {offset} is not inside its {what} of "
                        f"{room} bytes"
                    )


def differing(name: str, source: int, sent: int, target: int, due: int) -> str:
    """The message of an error about two ranks that disagree on the size of a piece of a GATHER or an EXCHANGE."""
    return (
        f"tensor {name!r}: rank {source} sends {sent} bytes to rank {target}, which expects {due}; give matching sizes "
        "on both"
    )


def key_of(name: str) -> int:
    """The 64-bit key of a name. It depends on the name alone, so the order of declarations does not matter."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def split(nbytes: int, partition_bytes: int, itemsize: int) -> list[tuple[int, int]]:
    """Cut ``nbytes`` into pieces of at most ``partition_bytes``, as even as whole units allow.

    Returns (offset, size) in bytes of each. The unit is a page if ``partition_bytes`` is a multiple of one, else an
    element. So pieces of shared memory start at pages, and no element is cut.

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
    """The message of an error about a tensor that needs the ranks ``joined``, which have joined."""
    ranks = sorted(joined)
    have = "has" if len(ranks) == 1 else "have"
    return f"tensor {spec.name!r}: {spec.describe()} is not supported while {ranks_text(ranks)} {have} joined"
