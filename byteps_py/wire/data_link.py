"""The messages of the data plane, between a CS and an SS or two CSs, and between a reader of shadowed states and an
SS: headers and records. Pure; any thread.

Over TCP a message is [header, payload], sealed (dataplane/seal.py) except during the handshake. Between two processes
of one machine it is a header, and its payload lies in shared memory (server/contribution_listeners.py). This module
never allocates memory by a size that a header claims.
"""

from __future__ import annotations

import enum
import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from byteps_py.errors import ProtocolError, UsageError
from byteps_py.tensor_codec import Codec
from byteps_py.tensors import DType, Op
from byteps_py.wire.record_codec import F64, U32, U64, Data, F64s, Flag, RecordCodec, Text, U64s

MAGIC = 0x31535042  # "BPS1", little endian
VERSION = 18

# magic, version, kind, dtype, op | epoch, sender, root, machines | key | generation, index | round | offset | length
# | payload segment, payload offset, answer segment, answer offset | flags | nonfinite_ranks | waited | codec
# | staleness | quorum | drawn
_LAYOUT = struct.Struct("<IBBBB IHHH Q II Q Q Q IQIQ B Q I Q H H Q")
HEADER_BYTES = _LAYOUT.size
MAX_WAITED_US = (1 << 32) - 1
#: The limit of a message about shadowed states, which is sent in pieces if it is longer than a partition: at ``offset``
#: of ``segment_offset`` bytes.
MAX_PIECES_BYTES = 4 << 20
#: The most bytes of one answer to a reader. A longer description comes in several, as in MAX_PIECES_BYTES.
MAX_READ_BYTES = 1 << 20
#: ``sender`` of a reader of shadowed states, which is no machine of the job.
READER = 0xFFFF
#: The limit of the bytes that a rank attaches to the record of a step: buffers, and the user's attachments.
MAX_ATTACHED_BYTES = 256 << 20


class Kind(enum.IntEnum):
    """The kind of a message. The values are wire codes and never change."""

    # CS → SS or CS, first on a connection: names the sender, and with ``index`` which of its machine's network
    # interfaces it is (rail); payload: see dataplane/handshake.py
    HELLO = 1
    PUSH = 2  # CS → SS: a contribution; an answer is expected
    PULL = 3  # CS → SS: the sender contributes nothing to this broadcast, but wants its result
    ANSWER = 4  # SS → CS: the result of a round; CS → CS: the bytes that were fetched
    REFUSED = 5  # to a CS: the message is not accepted; payload: the reason, as text
    SEGMENT = 6  # CS → SS on one machine: a shared-memory segment; the message carries its descriptor
    PROBE = 7  # CS → SS, which returns it unchanged: measures the link
    FETCH = 8  # CS → CS: requests bytes of one of the receiver's ranks; payload: a Fetch. An ANSWER brings them
    FETCH_SUM = 9  # CS → CS: requests the machine's sum of a part of a scattered reduction; ``offset``: which part
    PASS = 10  # CS → SS: the machine's ranks have joined and contribute nothing; wants an answer without the result
    WANT = 11  # SS → CS: another machine lacks this round's result; a CS that has it sends its contribution again.
    # Of an ACCUMULATE: the server needs the CS's clock, or with the flag SUPPLY its copy, in a PUSH that has the flag
    WITHDRAW = 12  # CS → SS: the sender's contribution to this round goes to another server; no answer
    TAKEN = 13  # CS → CS: the sender has all bytes that a Fetch names, of its round ``taken``; no answer
    AWAITED = 14  # SS → CS: other machines wait for the receiver in these rounds; payload: names of rounds; no answer
    # Of an ACCUMULATE: the rounds of each machine that a copy of the partition contains; payload: see pack_clock. SS →
    # CS: the copy that the ANSWER with the same name brings, and the version that the PUSH made. CS → SS, after a WANT:
    # its own copy, of round ``round``
    CLOCK = 15
    ORDER = (
        16  # CS → SS: the versions at which the PUSH that follows is added and answered, in a replay; see pack_order
    )
    # The states of hosted optimizers that servers keep in step (server/shadow.py). Their header names a partition of
    # gradients; ``round`` is one of its sum, or the number of a step. Long payloads come in pieces (MAX_PIECES_BYTES).
    SHADOW_BEGIN = 30  # CS → SS: keep a partition's states as of step ``round``; payload: a ShadowPartition
    SHADOW_STATE = 31  # CS → SS: ``length`` bytes at ``offset`` of state ``segment`` of the partition begun last
    SHADOW_SUM = 32  # CS → SS: the sum of round ``round``, which another server has added
    SHADOW_STEP = 33  # CS → SS: the owner steps with the sum of round ``round``; payload: a ShadowStep
    SHADOW_RECORD = 34  # CS → SS: rank ``index``'s record of step ``round``; ``key``: the run; payload: a ShadowRecord
    SHADOW_END = 35  # CS → SS: another server keeps the partition's states; no answer
    SHADOW_HELD = 36  # SS → CS: the server holds, as of step ``round``, the header's states, step or record
    SHADOW_LACKS = 37  # SS → CS: states, a sum or a step before is missing: begin again; payload: the reason
    # CS → SS: a piece of the attachment to rank ``index``'s record of step ``round``; ``key``: the run; the piece is at
    # ``offset`` of ``segment_offset`` bytes. The record is held once all pieces are there
    SHADOW_ATTACHED = 38
    # A reader requests what a server keeps. An ANSWER with the same ``round`` brings it, or a REFUSED says why not.
    DESCRIBE_STATES = 40  # reader → SS: payload: a StatesQuery. The ANSWERs bring a ShadowDescription
    READ_STATES = 41  # reader → SS: payload: a StatesRead
    READ_ATTACHED = 42  # reader → SS: payload: an AttachedRead
    CHALLENGE = 20  # the answer to a HELLO: asks for proof that the peer knows the secret, and proves the same
    PROOF = 21  # CS → SS or CS: the answer to a CHALLENGE
    DAMAGED = 22  # to the sender of message number ``round`` of this connection, which can't be opened: send it again
    # The answer to a PROOF; this message and all later ones, in both directions, are sealed. Payload: the addresses of
    # the listener's other network interfaces, a line each
    WELCOME = 23
    # RDMA: after WELCOME each end describes the memory that the other one may read, and again when there is more of it;
    # payload: what its agent says, or nothing without an agent (dataplane/rdma_lane.py)
    MEMORY = 24
    # A message whose payload the receiver reads itself: ``length`` bytes at address ``segment_offset`` of the sender;
    # payload: its sealed header
    PLACED = 25
    # The receiver has read payloads: their memory may change. Payload: for each the number of its PLACED, 8 bytes, and
    # for how many microseconds the receiver has read anything so far, 8 bytes
    PLACED_READ = 26


#: All that a reader sends, and nobody else.
READER_KINDS = frozenset((Kind.DESCRIBE_STATES, Kind.READ_STATES, Kind.READ_ATTACHED))

#: Flags of a contribution. RESENT: its machine lacks the result, though the server may have sent it. SUPPLY: its
#: machine has the result, and wants no answer; a WANT asked for the contribution. NO_RESULT: its machine needs only to
#: hear that the round is complete; another one owns the result.
RESENT = 1
SUPPLY = 2
NO_RESULT = 4
#: Of an ACCUMULATE with a codec. In a PUSH: the payload is the code of a change; else it is values. In an ANSWER: it is
#: changes, see pack_changes; else values.
CODED = 8


@dataclass(slots=True)
class Header:
    """The header of one message. Sizes and offsets are bytes.

    Attributes:
        kind: kind of the message.
        sender: machine index of the CS.
        epoch: the sender's epoch.
        dtype: type of the elements.
        op: operation.
        root: machine index of a broadcast's source.
        key: key of the tensor.
        generation: generation of the tensor.
        index: index of the partition in the tensor.
        round: round of the tensor.
        offset: offset of the partition in the tensor.
        length: size of the partition.
        segment: shared-memory segment of the payload; this and the next three fields are 0 over TCP.
        segment_offset: offset of the payload in it.
        answer_segment: segment of the answer.
        answer_offset: offset of the answer in it.
        machines: number of machines that contribute; 0 for all.
        flags: RESENT, SUPPLY, NO_RESULT, CODED.
        nonfinite_ranks: see rank_bits.py. In a PUSH, the ranks that would make its payload NaN or infinite; 0 if
            the round is not checked. In its ANSWER, the ranks that made the result so.
        waited_us: in an ANSWER, how long the PUSH had waited for other machines, in microseconds.
        codec: the form of the payload and of the answer: see Codec.code; 0 for that of ``dtype``. Of an ACCUMULATE, see
            CODED. Of a SHADOW_BEGIN: of the partition's sums.
        staleness, quorum: of an ACCUMULATE: see TensorSpec.
        drawn: of a codec that draws: see Codec. Of a PUSH with CODED: the version of the values that the sender has
            got in this epoch; 0: it needs all values.

    >>> header = Header(Kind.PUSH, sender=1, dtype=DType.FLOAT32, key=7, round=2, length=4096)
    >>> Header.unpack(header.pack()) == header
    True
    """

    kind: Kind
    sender: int
    epoch: int = 0
    dtype: DType = DType.UINT8
    op: Op = Op.SUM
    root: int = 0xFFFF
    key: int = 0
    generation: int = 0
    index: int = 0
    round: int = 0
    offset: int = 0
    length: int = 0
    segment: int = 0
    segment_offset: int = 0
    answer_segment: int = 0
    answer_offset: int = 0
    machines: int = 0
    flags: int = 0
    nonfinite_ranks: int = 0
    waited_us: int = 0
    codec: int = 0
    staleness: int = 0
    quorum: int = 0
    drawn: int = 0

    @property
    def is_resent(self) -> bool:
        """The flag RESENT."""
        return bool(self.flags & RESENT)

    @property
    def is_supply(self) -> bool:
        """The flag SUPPLY."""
        return bool(self.flags & SUPPLY)

    @property
    def is_coded(self) -> bool:
        """The flag CODED."""
        return bool(self.flags & CODED)

    @property
    def payload_nbytes(self) -> int:
        """The size of the payload of a PUSH. Raises ProtocolError if its codec does not exist."""
        if not self.flags & CODED:
            return self.length
        return coded_nbytes(self.codec, self.length // self.dtype.itemsize)

    @property
    def wants_result(self) -> bool:
        """The answer to this contribution brings the result, which its sender does not have otherwise."""
        return self.kind is not Kind.PASS and self.sender != self.root and not self.flags & NO_RESULT

    @property
    def answer_place(self) -> tuple[int, int]:
        """(segment, offset) of the answer in shared memory."""
        return self.answer_segment, self.answer_offset

    def pack(self) -> bytes:
        """The header's ``HEADER_BYTES`` bytes."""
        return _LAYOUT.pack(
            MAGIC,
            VERSION,
            self.kind,
            self.dtype,
            self.op,
            self.epoch,
            self.sender,
            self.root,
            self.machines,
            self.key,
            self.generation,
            self.index,
            self.round,
            self.offset,
            self.length,
            self.segment,
            self.segment_offset,
            self.answer_segment,
            self.answer_offset,
            self.flags,
            self.nonfinite_ranks,
            self.waited_us,
            self.codec,
            self.staleness,
            self.quorum,
            self.drawn,
        )

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Header:
        """The header in ``data``. Raises ProtocolError for anything that no correct peer sends."""
        if len(data) != HEADER_BYTES:
            raise ProtocolError(f"a header has {HEADER_BYTES} bytes, got {len(data)}")
        (magic, version, kind, dtype, op, epoch, sender, root, machines, key, generation, index, round_, offset, length,
         segment, segment_offset, answer_segment, answer_offset, flags, nonfinite_ranks, waited_us, codec,
         staleness, quorum, drawn) = _LAYOUT.unpack(
            data
        )  # fmt: skip
        if magic != MAGIC:
            raise ProtocolError(f"not a byteps_py message (magic {magic:#010x})")
        if version != VERSION:
            raise ProtocolError(f"peer speaks version {version} of the data plane, this process {VERSION}")
        try:
            return cls(
                _KINDS[kind], sender, epoch, _DTYPES[dtype], _OPS[op], root, key, generation, index, round_,
                offset, length, segment, segment_offset, answer_segment, answer_offset, machines, flags,
                nonfinite_ranks, waited_us, codec, staleness, quorum, drawn,
            )  # fmt: skip
        except KeyError:
            raise ProtocolError(f"unknown code in header: kind {kind}, dtype {dtype}, op {op}") from None


# Plain dictionaries: calling an enum takes ten times as long, for every message.
_KINDS = {int(k): k for k in Kind}
_DTYPES = {int(d): d for d in DType}
_OPS = {int(o): o for o in Op}


@functools.lru_cache(256)
def _codec_of(code: int) -> Codec:
    try:
        return Codec.from_code(code)
    except (ValueError, UsageError) as error:
        raise ProtocolError(f"unknown codec {code:#x} in header: {error}") from None


def coded_nbytes(codec: int, count: int) -> int:
    """The size of the code of ``count`` elements. Raises ProtocolError for an unknown codec."""
    return _codec_of(codec).coded_nbytes(count)


_COUNT = struct.Struct("<I")


def pack_changes(machines: Sequence[int], codes: Sequence[bytes | memoryview]) -> bytes:
    """The payload of an ANSWER with CODED: the machines whose changes bring the values that the receiver has to the
    present ones, in order, and their codes. The receiver has that of its own change itself, so it is left out of
    ``codes``."""
    return b"".join((_COUNT.pack(len(machines)), struct.pack(f"<{len(machines)}I", *machines), *codes))


def changes_nbytes(machines: int, codes: int) -> int:
    """The size of that, with ``codes`` bytes of codes."""
    return _COUNT.size * (1 + machines) + codes


def unpack_changes(data: bytes | memoryview, own: int, size: int) -> list[int]:
    """Where the code of each change begins, of ``size`` bytes each; -1 for that of machine ``own``. Raises
    ProtocolError for a payload of another size."""
    count = _COUNT.unpack_from(data)[0] if len(data) >= _COUNT.size else -1
    at = changes_nbytes(count, 0)
    if count < 0 or len(data) < at:
        raise ProtocolError(f"changes in {len(data)} bytes, which have no room for {count} machines")
    places = []
    for machine in struct.unpack_from(f"<{count}I", data, _COUNT.size):
        places.append(-1 if machine == own else at)
        at += 0 if machine == own else size
    if at != len(data):
        raise ProtocolError(f"changes in {len(data)} bytes, {at} were due")
    return places


#: Names a round of a partition: key, generation, index, round.
RoundName = tuple[int, int, int, int]

_NAME = struct.Struct("<QIIQ")
MAX_NAMES = 64


def name_of(header: Header) -> RoundName:
    """The name of the header's round. A contribution and its answer have the same, and no other message has it."""
    return header.key, header.generation, header.index, header.round


def pack_names(names: Sequence[RoundName]) -> bytes:
    """The payload of an AWAITED with these names, at most ``MAX_NAMES``."""
    return b"".join(_NAME.pack(*name) for name in names)


def unpack_names(data: bytes) -> list[RoundName]:
    """The names in the payload of an AWAITED. Raises ProtocolError."""
    if len(data) % _NAME.size or not 0 < len(data) <= MAX_NAMES * _NAME.size:
        raise ProtocolError(f"{len(data)} bytes are not the names of 1 to {MAX_NAMES} rounds")
    return list(_NAME.iter_unpack(data))


def pack_clock(clock: Sequence[int], added_at: int = 0) -> bytes:
    """The payload of a CLOCK: by machine, the last of its rounds that a copy contains; ``added_at``: the version that
    the receiver's contribution made, 0 if that is not known."""
    return struct.pack(f"<{1 + len(clock)}Q", added_at, *clock)


def unpack_clock(data: bytes) -> tuple[tuple[int, ...], int]:
    """(clock, added_at) in the payload of a CLOCK. Raises ProtocolError."""
    if len(data) % 8 or len(data) < 16:
        raise ProtocolError(f"{len(data)} bytes are no clock: 8 for each machine, and 8 more")
    added_at, *clock = struct.unpack(f"<{len(data) // 8}Q", data)
    return tuple(clock), added_at


def pack_order(added_at: int, answered_at: int) -> bytes:
    """The payload of an ORDER."""
    return struct.pack("<QQ", added_at, answered_at)


def unpack_order(data: bytes) -> tuple[int, int]:
    """(added_at, answered_at) in the payload of an ORDER. Raises ProtocolError."""
    if len(data) != 16:
        raise ProtocolError(f"{len(data)} bytes are no order, which has 16")
    added_at, answered_at = struct.unpack("<QQ", data)
    return added_at, answered_at


class PayloadRecord:
    """The payload of a message, as a record: a frozen dataclass (see record_codec.py)."""

    __slots__ = ()

    def pack(self) -> bytes:
        """The payload's bytes. Raises UsageError if a value is out of its field's range."""
        try:
            return _codec(type(self)).pack_one(self)
        except struct.error as error:
            raise UsageError(f"{self!r:.200} can't be sent: {error}") from None

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """The record in ``data``. Raises ProtocolError."""
        try:
            found: Self = _codec(cls).unpack_whole(data)
        except (struct.error, ValueError) as error:
            raise ProtocolError(f"malformed {cls.__name__}: {error}") from None
        return found


_codecs: dict[type, RecordCodec] = {}


def _codec(record: type) -> RecordCodec:
    if (known := _codecs.get(record)) is None:
        known = _codecs[record] = RecordCodec(record)
    return known


@dataclass(frozen=True, slots=True)
class Fetch(PayloadRecord):
    """The payload of a FETCH.

    It requests ``length`` bytes (see ``Header``) at ``offset`` of the piece that rank ``source`` has for rank
    ``target``. The header's ``index`` numbers the requests; the same holds for FETCH_SUM.

    Attributes:
        source: rank that sends the piece.
        target: rank that receives it.
        total: size of the whole piece in bytes.
        is_tentative: if the piece has another size, it stays where it is, for a later request.
        taken: a round whose whole piece has arrived; 0 for none. The sender keeps a piece until then, since it may be
            lost on the way.
    """

    source: U32
    target: U32
    total: U64
    is_tentative: Flag = False
    taken: U64 = 0


# ---- states that servers keep in step with their owners: server/shadow.py ----------------------------------------


@dataclass(frozen=True, slots=True)
class ShadowPartition(PayloadRecord):
    """The payload of a SHADOW_BEGIN: a partition of gradients whose states the server is to keep. SHADOW_STATE messages
    with all elements of its states follow.

    Attributes:
        run: a random number of one optimizer in one incarnation of the job.
        first: the partition's first element in the tensor.
        count: number of its elements.
        step_kind: see StepKind.code.
        step: the step after which the states that follow hold.
        name: name of the tensor of gradients.
    """

    run: U64
    first: U64
    count: U64
    step_kind: U32
    step: U64
    name: Text


@dataclass(frozen=True, slots=True)
class SegmentNumbers:
    """Elements from ``start`` to ``stop``, of a partition or of a rank's elements, that step with the same ``scalars``:
    see StepSegment."""

    start: U64
    stop: U64
    scalars: F64s


@dataclass(frozen=True, slots=True)
class ShadowStep(PayloadRecord):
    """The payload of a SHADOW_STEP: a step that the partition's owner makes. The sum is that of the header's round: the
    server has added it itself, or a SHADOW_SUM has brought it.

    Attributes:
        run: see ShadowPartition.
        step: its number; all partitions that step together have the same.
        before: the partition's step before this one, or that of its states.
        divisor: divisor of the sum.
        durable: all states of the run are held for this step: it may be applied.
        whole: all states of the run have been held: earlier runs are needed no more.
        segments: the elements, with the numbers of the step.
    """

    run: U64
    step: U64
    before: U64
    divisor: U64
    durable: U64 = 0
    whole: Flag = False
    segments: tuple[SegmentNumbers, ...] = ()


@dataclass(frozen=True, slots=True)
class ShadowRecord(PayloadRecord):
    """The payload of a SHADOW_RECORD: the data of one rank after a step, beside the states.

    Attributes:
        run: see ShadowPartition, and ShadowStep for ``step``, ``durable`` and ``whole``.
        rank: whose record it is, of ``size`` ranks.
        attached_bytes: of the buffers and the user's attachments; SHADOW_ATTACHED messages bring them.
        common: of rank 0: JSON of the data that is the same on all ranks (shadow/record.py).
    """

    run: U64
    step: U64
    rank: U32
    size: U32
    durable: U64 = 0
    whole: Flag = False
    attached_bytes: U64 = 0
    common: Data = b""

    @property
    def nbytes(self) -> int:
        """The size of the message as a payload."""
        return _codec(ShadowRecord).header_bytes + len(self.common)


@dataclass(frozen=True, slots=True)
class HeldPartition:
    """A partition that a server keeps. ``partition.step``: of the states as they are; ``steps``: those that can be
    applied to them, in order."""

    key: U64
    index: U32
    partition: ShadowPartition
    steps: U64s = ()


@dataclass(frozen=True, slots=True)
class HeldRun:
    """The part of a run that a server keeps. ``age_s``: since the last message about it; ``records``: those of which
    all that is attached is there."""

    run: U64
    durable: U64 = 0
    age_s: F64 = 0.0
    partitions: tuple[HeldPartition, ...] = ()
    records: tuple[ShadowRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class ShadowDescription(PayloadRecord):
    """All that a server keeps, for those that want to read it."""

    runs: tuple[HeldRun, ...] = ()


@dataclass(frozen=True, slots=True)
class StatesQuery(PayloadRecord):
    """The payload of a DESCRIBE_STATES. For ``hold_s`` seconds steps that are durable are not applied, so that what is
    described can be read."""

    hold_s: F64


@dataclass(frozen=True, slots=True)
class StatesRead(PayloadRecord):
    """The payload of a READ_STATES: elements ``start`` to ``stop`` of a partition's state number ``state`` (0: the
    master; then the moments), as they are after ``step``, which the partition makes. At most MAX_READ_BYTES."""

    run: U64
    key: U64
    index: U32
    step: U64
    state: U32
    start: U64
    stop: U64


@dataclass(frozen=True, slots=True)
class AttachedRead(PayloadRecord):
    """The payload of a READ_ATTACHED: bytes ``start`` to ``stop`` of what is attached to a record, at most
    MAX_READ_BYTES."""

    run: U64
    step: U64
    rank: U32
    start: U64
    stop: U64
