"""What a training process and its communication service say to each other over their channel. Pure.

Each message starts with one byte, its kind. Those on the hot path (READY, DONE) are packed records, many to
a message, and a RECORD has bytes; the rest is JSON.

    rank → service: HELLO, DECLARE, LAYOUT, READY, CHUNKS, BARRIER, JOIN, NOTE, SETTLE, LEAVE, PING, STACK, INTRODUCE,
                    WAITS, WAITED, STEPS, HOST, NORM, STEP, SKIP, RECORD, UNHOST
    service → rank: WELCOME, SEGMENT (with a descriptor), DECLARED, CHUNK, DONE, FAILED, RELEASED, JOINED, HOSTS,
                    SETTLED, FATAL, PONG, PEER, INTRODUCED, HOSTED, NORMED, HELD, RECORDED
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterable, Iterator
from typing import Any

from byteps_py.errors import ProtocolError
from byteps_py.tensors import DType, Layout, NonFinite, Op, Sizes, TensorSpec

VERSION = 9


class RankMessageKind(enum.IntEnum):
    """First byte of a message."""

    HELLO = 1  # {version, local_rank, local_size, pid, synced_in}: the first message of a rank
    DECLARE = 2  # {request, specs}
    READY = 3  # records (slot, round, bytes written so far)
    BARRIER = 4  # {sequence}
    LEAVE = 5  # {}, {unfinished}, {error, traceback} or {again, planned}: the rank ends, in order unless an exception
    # ends it; unfinished: training was not said to be done; again: it is about to come back, and why; planned: as all
    # others are
    LAYOUT = 7  # {slot, sends, receives, sizes}: of the slot's next round and those after it
    PING = 6  # {}: a rank that has waited for long asks whether the service is alive
    JOIN = 8  # {}: the rank has no more data
    STACK = 9  # {} and the descriptor of the file where this process's Python stacks are written
    NOTE = 10  # {text}: what others should know if this rank keeps them waiting
    WELCOME = 11  # {rank, size, local_rank, local_size, since_epoch, …}
    SEGMENT = 12  # {id, nbytes} and the descriptor of a shared-memory segment
    DECLARED = 13  # {request, slots: [{id, inputs: [[segment, offset]], result: [segment, offset]}]}
    DONE = 14  # records (slot, round, blame; see blame.py): the result lies in the slot
    FAILED = 15  # {slots, error, message}: these declarations are void
    RELEASED = 16  # {sequence}
    FATAL = 17  # {error, message}: nothing works any more
    PONG = 18  # {}
    JOINED = 19  # {last}: all ranks have joined, that one as the last
    HOSTS = 20  # {added, removed}: ranks wait to join, or are about to leave
    # The service introduces the ranks of one machine to each other with these (byteps_py/session/peers):
    INTRODUCE = 21  # {key, members}: local ranks that are to know each other; the first one with the way to the sender
    PEER = 22  # {local_rank} and the way to it
    INTRODUCED = 23  # {key}: all members have asked, and each knows the way to the others by now
    WAITS = 24  # {id, name, round, age_s, group}: of ranks that the sender waits for, itself included
    WAITED = 25  # {id}: it has come
    STEPS = 39  # {begun: [[sequence, steps, optimizers]]}: how far a rank is that has waited for a while; see RankSteps
    CHUNKS = 26  # {slot}: the rank wants to hear of each chunk of the slot's results, from the next round on
    CHUNK = 27  # records (slot, round, chunk): this chunk of a result lies in the slot
    SETTLE = 28  # {}: the rank is about to leave, once others have taken what it has given them
    SETTLED = 29  # {}: they have, or are gone
    # Optimizers whose states the service keeps (worker/ranks/hosting.py):
    HOST = (
        30  # {request, step_kind, source, target, before, run}: keep states; the slots of gradients and of parameters;
    )
    # before: the states to go on with, 0 for new ones; run: see ShadowPart, 0 for no copies on other machines
    HOSTED = 31  # {request, id, count, states: [[segment, offset]], owners: [[first, count, rank]]} or {error, message}
    STEP = 32  # {part, round, segments, is_last, step, durable, whole}: step with the sums of the source's round, which
    # are kept for another step unless it is the last; step, durable, whole: see ShadowStep
    SKIP = 33  # {slot, round}: make no step with the sums of this round
    UNHOST = 34  # {part}: the states are needed no more
    NORM = 35  # {request, part, ranges}: of the averages that the rank owns
    NORMED = 36  # {request, sum}: of their squares, as float.hex
    RECORD = 37  # a byte of RecordPart, and the next bytes of a packed ShadowRecord, or of what is attached to it
    HELD = (
        38  # {step, whole, refused}: other machines hold the states, and the record, of this step and of those before,
    )
    # but for records that were refused, of which this is the latest; whole: all states of the rank have been held
    RECORDED = 39  # {run, step}: a server has this record, to which PACED_BYTES or more are attached, or none takes it


class RecordPart(enum.IntFlag):
    """Of a RECORD. MORE: others follow. ATTACHED: of what is attached."""

    MORE = 1
    ATTACHED = 2


#: Of a RECORD.
RECORD_PART_BYTES = 128 << 10
#: A rank that attaches so much to a step waits until a server has what it attached to the step before.
PACED_BYTES = 1 << 20

_KINDS = {int(k): k for k in RankMessageKind}
_RECORD = struct.Struct("<IIQ")
_ONE_RECORD = struct.Struct("<BIIQ")  # a whole message, with the kind: most have one record
#: More records than this are spread over several messages.
MAX_RECORDS = 4096
#: Specs per DECLARE message: with names at their longest it stays below the channel's limit.
MAX_SPECS = 100


def pack(kind: RankMessageKind, **fields: Any) -> bytes:
    return bytes([kind]) + json.dumps(fields, separators=(",", ":")).encode()


def hello(local_rank: int, local_size: int, pid: int, synced_in: int) -> bytes:
    """``synced_in``: the epoch with which the latest group began that this rank has the state of, 0 if it has none."""
    return pack(
        RankMessageKind.HELLO,
        version=VERSION,
        local_rank=local_rank,
        local_size=local_size,
        pid=pid,
        synced_in=synced_in,
    )


def pack_record(kind: RankMessageKind, slot_id: int, round_: int, nbytes: int) -> bytes:
    return _ONE_RECORD.pack(kind, slot_id, round_, nbytes)


def pack_records(kind: RankMessageKind, records: Iterable[tuple[int, int, int]]) -> bytes:
    return bytes([kind]) + b"".join([_RECORD.pack(*record) for record in records])


def pack_record_parts(said: bytes, attached: bytes) -> Iterator[bytes]:
    """The RECORD messages with a packed ShadowRecord, and with what is attached to it."""
    for data, kind in ((said, RecordPart(0)), (attached, RecordPart.ATTACHED)):
        view = memoryview(data)
        for start in range(0, len(data), RECORD_PART_BYTES):
            end = start + RECORD_PART_BYTES
            has_more = end < len(data) or (bool(attached) and not kind)
            part = kind | RecordPart.MORE if has_more else kind
            yield bytes((RankMessageKind.RECORD, part)) + view[start:end]


def record_part_of(message: bytes) -> tuple[RecordPart, memoryview]:
    """What a RECORD has. Raises ProtocolError."""
    if len(message) < 3 or message[1] > RecordPart.MORE | RecordPart.ATTACHED:
        raise ProtocolError(f"malformed local message: a RECORD of {len(message)} bytes")
    return RecordPart(message[1]), memoryview(message)[2:]


def kind_of(message: bytes) -> RankMessageKind:
    try:
        return _KINDS[message[0]]
    except (KeyError, IndexError):
        raise ProtocolError(f"unknown kind of local message: {message[:1]!r}") from None


def fields_of(message: bytes) -> dict[str, Any]:
    """The fields of a JSON message. Raises ProtocolError."""
    try:
        fields = json.loads(message[1:])
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed local message: {error}") from None
    if not isinstance(fields, dict):
        raise ProtocolError("malformed local message: not an object")
    return fields


def records_of(message: bytes) -> Iterator[tuple[int, int, int]]:
    """The (slot, round, bytes) records of a READY or DONE message. Raises ProtocolError."""
    if (len(message) - 1) % _RECORD.size:
        raise ProtocolError(f"malformed local message: {len(message) - 1} bytes of records of {_RECORD.size}")
    return _RECORD.iter_unpack(memoryview(message)[1:])


def spec_to_json(spec: TensorSpec) -> list[Any]:
    return [
        spec.name, spec.dtype, list(spec.shape), spec.op, spec.average, spec.root, spec.priority, list(spec.group),
        spec.scatters, spec.terms, spec.nonfinite, spec.ownership, spec.is_shadowed,
    ]  # fmt: skip


def spec_from_json(fields: list[Any]) -> TensorSpec:
    """Raises ProtocolError."""
    try:
        name, dtype, shape, op, average, root, priority, group, scatters, terms, nonfinite, owned, shadowed = fields
        return TensorSpec(
            str(name), DType(dtype), tuple(int(d) for d in shape), Op(op), bool(average), int(root), int(priority),
            tuple(int(r) for r in group), bool(scatters), str(terms), NonFinite(nonfinite), str(owned), bool(shadowed),
        )  # fmt: skip
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"malformed tensor declaration: {error}") from None


def layout_to_message(slot_id: int, layout: Layout) -> bytes:
    return pack(RankMessageKind.LAYOUT, slot=slot_id, sends=layout.sends, receives=layout.receives, sizes=layout.sizes)


def layout_of(fields: dict[str, Any]) -> Layout:
    """The layout in a LAYOUT message. Raises ProtocolError."""
    try:
        sends, receives = ([(int(offset), int(nbytes)) for offset, nbytes in fields[what]] for what in _LAYOUT)
        return Layout(tuple(sends), tuple(receives), Sizes(fields["sizes"]))
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"malformed layout: {error}") from None


_LAYOUT = ("sends", "receives")
