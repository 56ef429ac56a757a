"""The messages between a rank and the communication service of its machine, over their channel. Pure; any thread.

Each message is a class with a code: ``encode`` makes bytes of it, ``decode`` makes it of bytes (see record_codec.py).
``Ready``, ``RoundsDone`` and ``ChunksArrived`` are by far the most frequent; each is about one slot or many.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from byteps_py.errors import ProtocolError, UsageError
from byteps_py.tensor_codec import Codec
from byteps_py.tensors import DType, Layout, NonFinite, Op, Sizes, TensorSpec
from byteps_py.wire.data_link import SegmentNumbers
from byteps_py.wire.record_codec import (
    F64,
    I32,
    U8,
    U32,
    U64,
    Data,
    Flag,
    MessageCodec,
    Pairs,
    RecordCodec,
    RowsCodec,
    Text,
    Texts,
    U32s,
    U64s,
)

VERSION = 23

#: The most entries of a message about rounds: more are spread over several messages.
MAX_ROUNDS = 4096
#: The most specs of a Declare: with names at their longest it stays below the channel's limit.
MAX_SPECS = 100
#: The most entries of a LinksUsed.
MAX_LINKS = 1024
#: The most bytes of a RecordData.
MAX_DATA_BYTES = 128 << 10
#: A rank that attaches so much to a step waits until a server has the attachment of the step before.
PACED_BYTES = 1 << 20

_link = MessageCodec("local message")
encode, decode = _link.encode, _link.decode

#: (slot, round, a number): the bytes handed over so far, nonfinite ranks (see rank_bits.py), or the chunk.
RoundRows = Annotated[tuple[tuple[int, int, int], ...], RowsCodec("IIQ")]
#: (segment, offset) of memory.
Place = tuple[int, int]


# ---- rank → service ----------------------------------------------------------------------------------------------


@_link.message(1)
@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a rank. ``synced_in``: the epoch with which the latest group began that this rank has the
    state of, 0 if it has none."""

    version: U32
    local_rank: I32
    local_size: U32
    pid: U32
    synced_in: U32

    @classmethod
    def of(cls, local_rank: int, local_size: int, pid: int, synced_in: int) -> Hello:
        """The first message of a rank with this version."""
        return cls(VERSION, local_rank, local_size, pid, synced_in)


@dataclass(frozen=True, slots=True)
class SpecFields:
    """A TensorSpec in a message. ``codec``: see Codec.code; 0 for none. ``momentum``, ``drawn``: see Codec."""

    dtype: U8
    op: U8
    nonfinite: U8
    average: Flag
    scatters: Flag
    is_shadowed: Flag
    is_replicated: Flag
    root: I32
    priority: I32
    staleness: U32
    quorum: U32
    codec: U64
    momentum: F64
    drawn: U64
    name: Text
    shape: U64s
    group: U32s
    terms: Text
    ownership: Text
    remark: Text

    @classmethod
    def of(cls, spec: TensorSpec) -> SpecFields:
        """The fields of ``spec``."""
        codec = spec.codec
        return cls(
            spec.dtype, spec.op, spec.nonfinite, spec.average, spec.scatters, spec.is_shadowed,
            spec.is_replicated, spec.root, spec.priority, spec.staleness, spec.quorum,
            *((codec.code, codec.momentum, codec.drawn) if codec is not None else (0, 0.0, 0)),
            spec.name, spec.shape, spec.group, spec.terms, spec.ownership, spec.remark,
        )  # fmt: skip

    def spec(self) -> TensorSpec:
        """The spec with these fields. Raises ProtocolError if there is none."""
        try:
            return TensorSpec(
                self.name, DType(self.dtype), self.shape, Op(self.op), self.average, self.root, self.priority,
                self.group, self.scatters, self.terms, NonFinite(self.nonfinite), self.ownership, self.is_shadowed,
                self.is_replicated, self.remark,
                Codec.from_code(self.codec, self.momentum, self.drawn) if self.codec else None, self.staleness,
                self.quorum,
            )  # fmt: skip
        except (ValueError, UsageError) as error:
            raise ProtocolError(f"tensor {self.name[:80]!r}: malformed declaration: {error}") from None


_spec_codec = RecordCodec(SpecFields)


def pack_spec(spec: TensorSpec) -> bytes:
    """The fields of ``spec``, beside its name, for a message of the scheduler."""
    return _spec_codec.pack_one(replace(SpecFields.of(spec), name=""))


def unpack_spec(name: str, data: bytes) -> TensorSpec:
    """The spec of tensor ``name`` in a message of the scheduler. Raises ProtocolError."""
    try:
        fields: SpecFields = _spec_codec.unpack_whole(data)
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"tensor {name[:80]!r}: malformed declaration: {error}") from None
    return replace(fields, name=name).spec()


@_link.message(2)
@dataclass(frozen=True, slots=True)
class Declare:
    """Requests slots for tensors. A Declared answers."""

    request: U32
    specs: tuple[SpecFields, ...]

    @classmethod
    def of(cls, request: int, specs: Sequence[TensorSpec]) -> Declare:
        """Requests slots for ``specs``."""
        return cls(request, tuple(map(SpecFields.of, specs)))


@_link.message(3)
@dataclass(frozen=True, slots=True)
class Ready:
    """Bytes of slots are written: of these rounds, so many so far."""

    rounds: RoundRows


@_link.message(4)
@dataclass(frozen=True, slots=True)
class EnterBarrier:
    """The rank waits at its barrier number ``sequence``. A BarrierReleased answers."""

    sequence: U64


@_link.message(5)
@dataclass(frozen=True, slots=True)
class Leave:
    """The rank ends, in order unless ``error`` names the exception that ends it.

    Attributes:
        unfinished: the user has not said that training is done.
        planned: all other ranks come back as well.
        error: the exception, in one line.
        traceback: its traceback.
        return_reason: why the rank is about to come back; empty if it is not.
    """

    unfinished: Flag = False
    planned: Flag = False
    error: Text = ""
    traceback: Text = ""
    return_reason: Text = ""


@_link.message(6)
@dataclass(frozen=True, slots=True)
class Ping:
    """A rank that has waited for long asks whether the service is alive. A Pong answers."""


@_link.message(7)
@dataclass(frozen=True, slots=True)
class SetLayout:
    """The layout of a slot's next round and of those after it."""

    slot: U32
    sizes: U8
    sends: Pairs
    receives: Pairs

    @classmethod
    def of(cls, slot: int, layout: Layout) -> SetLayout:
        """``layout`` for ``slot``."""
        return cls(slot, layout.sizes, tuple(layout.sends), tuple(layout.receives))

    def layout(self) -> Layout:
        """The layout. Raises ProtocolError if it is none."""
        try:
            return Layout(self.sends, self.receives, Sizes(self.sizes))
        except ValueError as error:
            raise ProtocolError(f"malformed layout: {error}") from None


@_link.message(8)
@dataclass(frozen=True, slots=True)
class Join:
    """The rank has no more data. An AllJoined answers."""


@_link.message(9)
@dataclass(frozen=True, slots=True)
class GiveStackFile:
    """Comes with the descriptor of the file to which this process writes its Python stacks (see stack_dump.py)."""


@_link.message(44)
@dataclass(frozen=True, slots=True)
class GiveFlightRecorder:
    """Comes with the descriptor of the memory of this process's flight recorder (see flight_recorder.py)."""


@_link.message(10)
@dataclass(frozen=True, slots=True)
class Note:
    """A note for other ranks, shown if this rank keeps them waiting."""

    text: Text


@_link.message(21)
@dataclass(frozen=True, slots=True)
class AskIntroduction:
    """Local ranks that are to know each other. The first one of a rank comes with the descriptor of its inbox."""

    key: U64
    members: U32s


@_link.message(24)
@dataclass(frozen=True, slots=True)
class WaitBegun:
    """The sender waits for ranks of ``group``, itself included, without the service."""

    id: U64
    round: U64
    age_s: F64
    name: Text
    group: U32s


@_link.message(25)
@dataclass(frozen=True, slots=True)
class WaitEnded:
    """Ends the wait of the WaitBegun with this number."""

    id: U64


@dataclass(frozen=True, slots=True)
class StepCount:
    """The steps that a rank has begun in a sequence, and the optimizers that have stepped."""

    steps: U64
    optimizers: U64
    sequence: Text


@_link.message(39)
@dataclass(frozen=True, slots=True)
class StepsBegun:
    """The steps that a rank has begun, once it has waited for a while. See Session.steps_begun."""

    counts: tuple[StepCount, ...]


@dataclass(frozen=True, slots=True)
class LinkUsed:
    """The bytes sent to one rank: see PairUsage in control.proto."""

    rank: U32
    nbytes: U64
    busy_s: F64
    unread_s: F64
    relayed_bytes: U64
    relayed_busy_s: F64


@_link.message(50)
@dataclass(frozen=True, slots=True)
class ProgressMade:
    """The progress of the rank since it began to train: see Progress. Sent at most once a second."""

    steps: U64
    step_s: F64
    last_step_at_s: F64
    tokens: U64
    samples: U64
    exposed_s: F64
    result_bytes: U64
    recoveries: U64
    tokens_per_s: F64
    exposed_share: F64


@_link.message(51)
@dataclass(frozen=True, slots=True)
class LinksUsed:
    """What the rank has sent to ranks of other machines since it said so before."""

    links: tuple[LinkUsed, ...]


@_link.message(26)
@dataclass(frozen=True, slots=True)
class WantChunks:
    """Asks the service to report each chunk of the slot's results, from the next round on."""

    slot: U32


@_link.message(28)
@dataclass(frozen=True, slots=True)
class Drain:
    """The rank is about to leave, once others have fetched its pieces. A Drained answers."""


# Optimizers whose states the service keeps: see worker/ranks/hosting.py.


@_link.message(30)
@dataclass(frozen=True, slots=True)
class KeepStates:
    """Requests states for steps from gradients to parameters. A StatesKept answers.

    Attributes:
        step_kind: see StepKind.code.
        source: the slot of the gradients.
        target: the slot of the parameters.
        before: number of the states to go on with; 0 for new ones.
        run: see ShadowPartition; 0 if no other machine keeps copies.
    """

    request: U32
    step_kind: U32
    source: U32
    target: U32
    before: U32
    run: U64


@_link.message(32)
@dataclass(frozen=True, slots=True)
class BeginStep:
    """Make a step with the sums of a round. They are kept for another step unless it is the last one with them.

    ``step``, ``durable``, ``is_whole``: see ShadowedStep; 0 if no other machine makes the step.
    """

    shard: U32
    round: U64
    is_last: Flag
    step: U64
    durable: U64
    is_whole: Flag
    segments: tuple[SegmentNumbers, ...]


@_link.message(33)
@dataclass(frozen=True, slots=True)
class SkipStep:
    """Make no step with the sums of this round."""

    slot: U32
    round: U64


@_link.message(34)
@dataclass(frozen=True, slots=True)
class DropStates:
    """The states are no longer needed."""

    shard: U32


@_link.message(35)
@dataclass(frozen=True, slots=True)
class MeasureNorm:
    """Requests the sum of squares of the averages that the rank owns. A NormMeasured answers."""

    request: U32
    shard: U32
    ranges: Pairs


@_link.message(36)
@dataclass(frozen=True, slots=True)
class BeginRecord:
    """Begins the record of a step: ``common_bytes`` and then ``attached_bytes`` bytes, in the RecordData messages that
    follow. See ShadowRecord."""

    run: U64
    step: U64
    durable: U64
    is_whole: Flag
    common_bytes: U64
    attached_bytes: U64


@_link.message(37)
@dataclass(frozen=True, slots=True)
class RecordData:
    """The next bytes of the record that the last BeginRecord announced."""

    data: Data


@_link.message(42)
@dataclass(frozen=True, slots=True)
class AskServers:
    """Requests the addresses of the summation servers. A ServersKnown answers."""

    request: U32


# ---- service → rank ----------------------------------------------------------------------------------------------


@_link.message(11)
@dataclass(frozen=True, slots=True)
class Welcome:
    """The group has taken the rank in. See Session."""

    rank: U32
    size: U32
    local_rank: U32
    local_size: U32
    is_continued: Flag
    is_under_way: Flag
    since_epoch: U32
    machine_index: U32
    num_machines: U32
    is_homogeneous: Flag
    has_shadow_servers: Flag
    slowest_mbit: F64
    replicated_gain: F64
    shadowed_gain: F64
    memory_bytes: U64


@_link.message(12)
@dataclass(frozen=True, slots=True)
class GiveSegment:
    """Comes with the descriptor of a shared-memory segment."""

    id: U32
    nbytes: U64


@dataclass(frozen=True, slots=True)
class SlotFields:
    """A slot in a Declared. ``nbytes``: of its result. ``coded_state``: where what its machine keeps for a codec lies;
    nowhere for most. See RankSlot."""

    id: U32
    nbytes: U64
    round: U64
    result_segment: U32
    result_offset: U64
    inputs: Pairs
    coded_state: Pairs = ()


@_link.message(13)
@dataclass(frozen=True, slots=True)
class Declared:
    """The slots that a Declare has requested, in its order."""

    request: U32
    slots: tuple[SlotFields, ...]


@_link.message(14)
@dataclass(frozen=True, slots=True)
class RoundsDone:
    """Results lie in their slots."""

    rounds: RoundRows


@_link.message(27)
@dataclass(frozen=True, slots=True)
class ChunksArrived:
    """Chunks of results lie in their slots."""

    chunks: RoundRows


@_link.message(15)
@dataclass(frozen=True, slots=True)
class DeclarationsFailed:
    """These declarations are void. ``error``: the name of its class."""

    slots: U32s
    error: Text
    message: Text


@_link.message(16)
@dataclass(frozen=True, slots=True)
class BarrierReleased:
    """All ranks have reached this barrier."""

    sequence: U64


@_link.message(17)
@dataclass(frozen=True, slots=True)
class Fatal:
    """The service does nothing more for this rank. ``error``: the name of its class."""

    error: Text
    message: Text

    @classmethod
    def of(cls, error: Exception) -> Fatal:
        """The message that reports ``error``."""
        return cls(type(error).__name__, str(error))


@_link.message(18)
@dataclass(frozen=True, slots=True)
class Pong:
    """The service is alive."""


@_link.message(19)
@dataclass(frozen=True, slots=True)
class AllJoined:
    """All ranks have joined, rank ``last`` as the last one."""

    last: U32


@_link.message(20)
@dataclass(frozen=True, slots=True)
class HostsChanged:
    """Ranks wait to join, or are about to leave."""

    added: Flag
    removed: Flag


@dataclass(frozen=True, slots=True)
class RelayedRank:
    """A rank of another machine that is reached through a third one as well, which listens at ``address``."""

    rank: U32
    address: Text


@_link.message(52)
@dataclass(frozen=True, slots=True)
class RelaysChanged:
    """All ranks that this one reaches through third machines from now on."""

    relays: tuple[RelayedRank, ...]


@_link.message(22)
@dataclass(frozen=True, slots=True)
class PeerInbox:
    """Comes with the descriptor of the inbox of another rank of this machine."""

    local_rank: U32


@_link.message(23)
@dataclass(frozen=True, slots=True)
class Introduced:
    """All members have asked with this key, and each knows the others' inboxes by now."""

    key: U64


@_link.message(29)
@dataclass(frozen=True, slots=True)
class Drained:
    """Other ranks have fetched this rank's pieces, or have left."""


@_link.message(31)
@dataclass(frozen=True, slots=True)
class StatesKept:
    """The states that a KeepStates has requested.

    Attributes:
        id: their number.
        count: elements that the rank owns.
        states: the place of each.
        owners: (first element, number of elements, rank) of each partition.
        error: why they can't be kept: the name of its class. Empty if they are.
        message: its text.
    """

    request: U32
    id: U32
    count: U64
    states: Pairs
    owners: Annotated[tuple[tuple[int, int, int], ...], RowsCodec("QQI")]
    error: Text = ""
    message: Text = ""


@_link.message(40)
@dataclass(frozen=True, slots=True)
class NormMeasured:
    """The sum that a MeasureNorm has requested."""

    request: U32
    sum: F64


@_link.message(38)
@dataclass(frozen=True, slots=True)
class StepsHeld:
    """Other machines hold the states and records of the steps up to ``step``, except for refused records, the latest of
    which is that of ``refused``. ``is_whole``: they have held all states of the rank."""

    step: U64
    is_whole: Flag
    refused: U64


@_link.message(41)
@dataclass(frozen=True, slots=True)
class RecordTaken:
    """A server has this record, to which PACED_BYTES or more are attached, or none takes it."""

    run: U64
    step: U64


@_link.message(43)
@dataclass(frozen=True, slots=True)
class ServersKnown:
    """The addresses of the present epoch's servers, ``tcp://host:port``, which an AskServers has requested."""

    request: U32
    addresses: Texts


# ---- conversion --------------------------------------------------------------------------------------------------

_VERSION_OF_HELLO = struct.Struct("<BI")


def decode_hello(data: bytes) -> Hello | None:
    """The Hello in ``data``; None if it is another message. Raises ProtocolError, also for another version, whose
    messages may be any others."""
    if not data or data[0] != 1:
        decode(data)
        return None
    if len(data) >= _VERSION_OF_HELLO.size and _VERSION_OF_HELLO.unpack_from(data)[1] != VERSION:
        raise ProtocolError("this rank's byteps_py and its communication service's are different versions")
    hello: Hello = decode(data)
    return hello


def record_messages(begin: BeginRecord, common: bytes, attached: bytes) -> Iterator[BeginRecord | RecordData]:
    """``begin`` and the messages with its data."""
    yield begin
    for data in (common, attached):
        view = memoryview(data)
        for start in range(0, len(data), MAX_DATA_BYTES):
            yield RecordData(bytes(view[start : start + MAX_DATA_BYTES]))
