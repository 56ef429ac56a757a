"""The flight recorder of a rank: its latest operations, in memory that its communication service can read at any time.

A rank writes a record of 128 bytes when an operation begins, and fills in its end later. The records form a ring in
memory without a name (memfd), made once; the rank hands its descriptor to the service of its machine. So the records
can be read while the rank hangs, and after it was killed. Beside the ring, the memory holds what many records have in
common: the group of ranks, under a number.

``FlightRecorder`` writes; any thread may call it, and nothing is locked or allocated once a group is known: about 1 µs
for the begin and 0.4 µs for the end of an operation. ``read_recording`` reads, in any process. flight_dump.py writes
what was read in torch's format. Knows no torch, session or socket.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from byteps_py.errors import UsageError
from byteps_py.system.shm import Segment

#: The operations by their codes, with torch's names. The codes are those of ``Operation``.
OPERATIONS = (
    "all_reduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "all_gather", "all_gather_v",
    "_all_gather_base", "all_gather_into_tensor_coalesced", "reduce_scatter", "reduce_scatter_v",
    "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "gather", "scatter", "all_to_all", "send", "recv",
    # Not torch's: a wait of the training thread, and the stages of partitions on services.
    "wait", "local_reduce", "exchange", "wait_for_machines", "sum", "local_broadcast",
    "optimizer_step", "shadow_step",
)  # fmt: skip
#: The types of elements by their codes, with torch's names.
DTYPES = (
    "Undefined", "Float", "Double", "Half", "BFloat16", "Char", "Short", "Int", "Long", "Byte", "Bool", "ComplexFloat",
    "ComplexDouble", "ComplexHalf", "UInt16", "UInt32", "UInt64", "Float8_e4m3fn", "Float8_e5m2",
)  # fmt: skip
SCHEDULED, STARTED, COMPLETED, FAILED, WITHDRAWN = range(5)
#: In place of a shape that differs between ranks, or is not known: such shapes are not compared.
NO_SHAPE = 255

_MAGIC = b"BPSFLT01"
_HEADER_BYTES = 4096
_RECORD_BYTES = 128
_GROUPS_BYTES = 8 << 20  # reserved; memory that nothing was written to does not exist
_MAX_RANKS = 1 << 20
_MAX_DIMENSIONS = 4
# number, sequence, bytes, step | times: enqueued, started, ended | group | operation, state, types and dimensions of
# the input and the output | the shapes | the number again: a record without it is being written
_RECORD = struct.Struct("<QQQI3QI6B8IQ")
_HEAD = struct.Struct("<8sIIQQQI")  # magic, records, bytes of a record, wall and monotonic time, bytes of groups, about
_HEAD_GROUPS = struct.Struct("<Q")
_HEAD_GROUPS_AT = 8 + 4 + 4 + 8 + 8
_NUMBER = struct.Struct("<Q")
_LENGTH = struct.Struct("<I")
_TIME = struct.Struct("<Q")
_BYTES_AT, _STARTED_AT, _ENDED_AT, _STATE_AT = 16, 36, 44, 57


@dataclass(frozen=True, slots=True)
class FlightGroup:
    """The ranks of some operations. ``ranks``: global, ascending. ``description``: of torch's group, such as "mesh_dp".
    ``kind``: "group" of torch.distributed, "pair" of a sender and a receiver, or "name" of a tensor."""

    id: int
    name: str
    description: str
    ranks: tuple[int, ...]
    kind: str = "group"

    @property
    def dimension(self) -> str:
        """The dimension of the mesh ("dp", "tp", …) whose group it is; empty if it is not known."""
        return self.description.removeprefix("mesh_") if self.description.startswith("mesh_") else ""


@dataclass(frozen=True, slots=True)
class FlightSpan:
    """An operation of a rank.

    Attributes:
        number: of the rank's operations, from 1.
        group: its ranks.
        sequence: of the operations of the group, from 1.
        operation: its name in torch: "all_reduce", …
        nbytes: of this rank's data.
        step: the rank's training step, from 0.
        enqueued_ns, started_ns, ended_ns: on the rank's monotonic clock; 0: not yet. ``ended_ns`` is when the rank
            learned of the end.
        state: "scheduled", "started", "completed" or "failed".
        input_shape, output_shape: None if it is not known, or differs between ranks.
        input_dtype, output_dtype: torch's names of the types, as "Float".
    """

    number: int
    group: FlightGroup
    sequence: int
    operation: str
    nbytes: int
    step: int
    enqueued_ns: int
    started_ns: int
    ended_ns: int
    state: str
    input_shape: tuple[int, ...] | None
    output_shape: tuple[int, ...] | None
    input_dtype: str
    output_dtype: str


@dataclass(frozen=True, slots=True)
class Recording:
    """The contents of a flight recorder at a moment.

    Attributes:
        about: of the rank: "rank", "size", "host", "machine", "pid", "job" and "epoch", as far as they are known.
        wall_ns, monotonic_ns: two clocks, read at the same moment: when the recorder was made.
        spans: the oldest first.
        groups: all that were made, also those without spans.
        lost: how many older operations the ring has overwritten.
    """

    about: dict[str, Any]
    wall_ns: int
    monotonic_ns: int
    spans: list[FlightSpan] = field(repr=False)
    groups: list[FlightGroup] = field(repr=False)
    lost: int = 0

    def wall_of(self, monotonic_ns: int) -> int:
        """The wall-clock time, in ns since the epoch, of a time of ``spans``; 0 of 0."""
        return monotonic_ns - self.monotonic_ns + self.wall_ns if monotonic_ns else 0


class GroupCounter:
    """A group as its recorder knows it. ``count``: of its operations so far."""

    __slots__ = ("count", "id")

    def __init__(self, id: int) -> None:
        self.id = id
        self.count = 0


class FlightRecorder:
    """The memory of a rank's latest ``capacity`` operations. ``about``: see Recording. Raises OSError if there is no
    memory for it.

    >>> recorder = FlightRecorder(64, {"rank": 0})
    >>> number = recorder.begin(recorder.group("0", "", (0, 1)), OPERATIONS.index("barrier"))
    >>> recorder.end(number)
    >>> [(span.operation, span.group.ranks, span.state) for span in recorder.read().spans]
    [('barrier', (0, 1), 'completed')]
    >>> recorder.close()
    """

    def __init__(self, capacity: int, about: dict[str, Any]) -> None:
        self._capacity = capacity
        self._groups_at = _HEADER_BYTES + capacity * _RECORD_BYTES
        nbytes = self._groups_at + _GROUPS_BYTES
        self._segment: Segment | None = Segment.create(nbytes)
        self._memory: memoryview | mmap.mmap = self._segment.view
        text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), **about}).encode()
        text = text if len(text) <= _HEADER_BYTES - _HEAD.size else b"{}"
        self._wall_ns, self._monotonic_ns = time.time_ns(), time.monotonic_ns()
        _HEAD.pack_into(
            self._memory, 0, _MAGIC, capacity, _RECORD_BYTES, self._wall_ns, self._monotonic_ns, 0, len(text)
        )
        self._memory[_HEAD.size : _HEAD.size + len(text)] = text
        self._next = itertools.count(1).__next__
        self._lock = threading.Lock()
        self._groups: dict[tuple[str, str, tuple[int, ...], str], GroupCounter] = {}
        self._groups_bytes = 0
        self._is_closed = False
        self.step = 0  #: of the training, for the operations that follow

    @property
    def fd(self) -> int:
        """The descriptor of the memory, for ``read_recording`` in another process; -1 after ``close``."""
        return -1 if self._segment is None else self._segment.fd

    @property
    def is_closed(self) -> bool:
        """True after ``close``: nothing is recorded any more."""
        return self._is_closed

    def group(self, name: str, description: str, ranks: Sequence[int], kind: str = "group") -> GroupCounter:
        """The group with these facts, which is made at the first call. ``name`` is the same on all of its ranks."""
        key = name, description, tuple(ranks), kind
        found = self._groups.get(key)
        if found is None:
            with self._lock:
                found = self._groups.get(key)
                if found is None:
                    found = self._groups[key] = self._add(key)
        return found

    def _add(self, key: tuple[str, str, tuple[int, ...], str]) -> GroupCounter:
        name, description, ranks, kind = key
        listed: list[int] = [] if ranks == tuple(range(len(ranks))) else list(ranks)
        text = json.dumps([name, description, kind, len(ranks), listed]).encode()
        end = self._groups_bytes + _LENGTH.size + len(text)
        if end > _GROUPS_BYTES or self._is_closed:
            return GroupCounter(0)  # its operations are recorded without it
        at = self._groups_at + self._groups_bytes
        _LENGTH.pack_into(self._memory, at, len(text))
        self._memory[at + _LENGTH.size : self._groups_at + end] = text
        self._groups_bytes = end
        _HEAD_GROUPS.pack_into(self._memory, _HEAD_GROUPS_AT, end)
        return GroupCounter(len(self._groups) + 1)

    def begin(
        self,
        group: GroupCounter,
        operation: int,
        nbytes: int = 0,
        input: tuple[int, Sequence[int] | None] = (0, ()),
        output: tuple[int, Sequence[int] | None] = (0, ()),
        at_ns: int | None = None,
    ) -> int:
        """An operation begins. Returns its number, for ``start`` and ``end``.

        Args:
            operation: its place in OPERATIONS.
            input, output: the place in DTYPES and the shape; None: a shape that others do not have.
            at_ns: on the monotonic clock; None: now.
        """
        number = self._next()
        group.count += 1
        ins, ins_shape = _folded(input[1])
        outs, outs_shape = _folded(output[1])
        if not self._is_closed:
            _RECORD.pack_into(
                self._memory, _HEADER_BYTES + number % self._capacity * _RECORD_BYTES,
                number, group.count, nbytes, self.step, time.monotonic_ns() if at_ns is None else at_ns, 0, 0,
                group.id, operation, SCHEDULED, input[0], output[0], ins, outs, *ins_shape, *outs_shape, number,
            )  # fmt: skip
        return number

    def start(self, number: int) -> None:
        """This rank has handed its part over."""
        at = self._place(number)
        if at:
            _TIME.pack_into(self._memory, at + _STARTED_AT, time.monotonic_ns())
            if self._memory[at + _STATE_AT] == SCHEDULED:
                self._memory[at + _STATE_AT] = STARTED

    def end(self, number: int, has_failed: bool = False) -> None:
        """The operation is over on this rank."""
        at = self._place(number)
        if at and self._memory[at + _STATE_AT] < COMPLETED:
            _TIME.pack_into(self._memory, at + _ENDED_AT, time.monotonic_ns())
            self._memory[at + _STATE_AT] = FAILED if has_failed else COMPLETED

    def set_bytes(self, number: int, nbytes: int) -> None:
        """The size of this rank's data, which was not known at the begin."""
        at = self._place(number)
        if at:
            _NUMBER.pack_into(self._memory, at + _BYTES_AT, nbytes)

    def withdraw(self, number: int, group: GroupCounter) -> None:
        """The latest operation of ``group`` was not carried out: another one takes its place."""
        group.count -= 1
        at = self._place(number)
        if at:
            self._memory[at + _STATE_AT] = WITHDRAWN

    def _place(self, number: int) -> int:
        """The place of the record; 0 if another one has it."""
        if self._is_closed:
            return 0
        at = _HEADER_BYTES + number % self._capacity * _RECORD_BYTES
        return at if _NUMBER.unpack_from(self._memory, at)[0] == number else 0

    def read(self) -> Recording:
        """The records. Raises UsageError after ``close``."""
        if self._is_closed:
            raise UsageError("the flight recorder is closed")
        return read_recording(self.fd)

    def close(self) -> None:
        """Release the memory. Others who have its descriptor can still read it. Later calls record nothing."""
        with self._lock:
            segment, self._segment, self._is_closed = self._segment, None, True
            if segment is not None:
                segment.close_descriptor()
                # A thread may be about to write: the memory goes with the last one that refers to it.
                self._memory = mmap.mmap(-1, segment.nbytes)


_NO_DIMENSIONS = (0, 0, 0, 0)
_LARGEST = 1 << 32


def _folded(shape: Sequence[int] | None) -> tuple[int, Sequence[int]]:
    """The number of dimensions and four sizes. Beyond four, the first ones count as one; of a tensor with a dimension
    above 2³², only the number of elements is kept."""
    if shape is None:
        return NO_SHAPE, _NO_DIMENSIONS
    count = len(shape)
    if count > _MAX_DIMENSIONS:
        shape = (math.prod(shape[: 1 - _MAX_DIMENSIONS]), *shape[1 - _MAX_DIMENSIONS :])
        count = _MAX_DIMENSIONS
    if count and max(shape) >= _LARGEST:
        shape, count = (math.prod(shape) // _LARGEST, math.prod(shape) % _LARGEST), 2
    return count, (*shape, *_NO_DIMENSIONS[count:])


def read_recording(fd: int) -> Recording:
    """Read the memory of a flight recorder, of this process or another one, while it is written or after that. Records
    that are being written at the moment are left out. Raises UsageError if ``fd`` holds no recording."""
    return parse_recording(_settled(fd, min(os.fstat(fd).st_size, _MAX_FILE_BYTES)))


def copy_recording(fd: int) -> bytes:
    """The bytes of such a memory, without zeros at its end, for ``parse_recording``. Raises UsageError if ``fd`` holds
    no recording."""
    head = os.pread(fd, _HEAD.size, 0)
    try:
        magic, capacity, record_bytes, *_, groups_bytes, _ = _HEAD.unpack(head)
    except struct.error:
        magic = b""
    if magic != _MAGIC:
        raise UsageError("this is no recording of a flight recorder")
    return _settled(fd, min(_HEADER_BYTES + capacity * record_bytes + groups_bytes, _MAX_FILE_BYTES))


def _settled(fd: int, nbytes: int) -> bytes:
    """The first ``nbytes`` of such a memory, without records that have begun while it was read. The writer may overtake
    a reader in the middle of a record; one that was complete in an earlier read is complete now."""
    before, data = os.pread(fd, nbytes, 0), bytearray(os.pread(fd, nbytes, 0))
    capacity = _HEAD.unpack_from(data)[1] if len(data) >= _HEAD.size else 0
    end = min(_HEADER_BYTES + capacity * _RECORD_BYTES, len(data), len(before))
    for at in range(_HEADER_BYTES + _RECORD.size - _NUMBER.size, end - _NUMBER.size + 1, _RECORD_BYTES):
        if before[at : at + _NUMBER.size] != data[at : at + _NUMBER.size]:
            _NUMBER.pack_into(data, at, 0)
    return bytes(data)


_MAX_FILE_BYTES = 1 << 30


def parse_recording(data: bytes) -> Recording:
    """The same of the bytes of such a memory; zeros at its end may be missing. Raises UsageError."""
    try:
        magic, capacity, record_bytes, wall_ns, monotonic_ns, groups_bytes, about_bytes = _HEAD.unpack_from(data, 0)
        if magic != _MAGIC or record_bytes != _RECORD_BYTES:
            raise ValueError("another format")
        about = json.loads(data[_HEAD.size : _HEAD.size + about_bytes])
        groups_at = _HEADER_BYTES + capacity * _RECORD_BYTES
        groups = _groups_of(data[groups_at : groups_at + groups_bytes])
        spans, newest = [], 0
        for at in range(_HEADER_BYTES, groups_at, _RECORD_BYTES):
            record = _RECORD.unpack_from(data, at)
            newest = max(newest, record[0])
            if 0 < record[0] == record[-1] and (span := _span(record, groups)) is not None:
                spans.append(span)
    except (struct.error, ValueError, TypeError, LookupError) as error:
        raise UsageError(f"this is no recording of a flight recorder ({error})") from None
    # A record whose place two operations take at the same time may carry the wrong number.
    spans = sorted((span for span in spans if span.number > newest - capacity), key=lambda span: span.number)
    return Recording(about, wall_ns, monotonic_ns, spans, list(groups.values()), max(0, newest - capacity))


_UNKNOWN = FlightGroup(0, "unknown", "undefined", ())
_STATES = ("scheduled", "started", "completed", "failed")


def _groups_of(data: bytes) -> dict[int, FlightGroup]:
    groups: dict[int, FlightGroup] = {}
    at = 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        name, description, kind, size, listed = json.loads(data[at + _LENGTH.size : at + _LENGTH.size + length])
        if not 0 <= size <= _MAX_RANKS:
            raise ValueError(f"a group of {size} ranks")
        id = len(groups) + 1
        ranks = tuple(map(int, listed)) if listed else tuple(range(size))
        groups[id] = FlightGroup(id, str(name), str(description), ranks, str(kind))
        at += _LENGTH.size + length
    return groups


def _span(record: tuple[int, ...], groups: dict[int, FlightGroup]) -> FlightSpan | None:
    number, sequence, nbytes, step, enqueued, started, ended, group, operation, state, ins, outs, *rest = record
    if state >= WITHDRAWN or operation >= len(OPERATIONS) or max(ins, outs) >= len(DTYPES):
        return None
    count_in, count_out, *sizes, _ = rest
    return FlightSpan(
        number, groups.get(group, _UNKNOWN), sequence, OPERATIONS[operation], nbytes, step, enqueued, started, ended,
        _STATES[state], _shape(count_in, sizes[:4]), _shape(count_out, sizes[4:]), DTYPES[ins], DTYPES[outs],
    )  # fmt: skip


def _shape(count: int, sizes: Sequence[int]) -> tuple[int, ...] | None:
    return None if count == NO_SHAPE else tuple(sizes[:count])


class RecordingTail:
    """Follows the memory of a flight recorder: gives each operation once, in their order, after it was completed.

    Not thread-safe. ``fd``: the caller's, which stays open meanwhile.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._next = 1
        self._groups: dict[int, FlightGroup] = {}
        magic, self._capacity, record_bytes, *_ = _HEAD.unpack(os.pread(fd, _HEAD.size, 0))
        if magic != _MAGIC or record_bytes != _RECORD_BYTES or not self._capacity:
            raise UsageError("this is no recording of a flight recorder")

    def read(self) -> list[FlightSpan]:
        """Those that are new. One that is not over holds back those that began later, but for a quarter of the
        memory."""
        found: list[FlightSpan] = []
        while (record := self._record(self._next)) is not None:
            number, state = record[0], record[9]
            if number > self._next:  # overwritten: others are
                self._next = number - self._capacity // 2
                continue
            if state < COMPLETED and self._record(self._next + self._capacity // 4) is None:
                break
            if record[7] not in self._groups:
                self._read_groups()
            if state == COMPLETED and (span := _span(record, self._groups)) is not None:
                found.append(span)
            self._next += 1
        return found

    def _record(self, number: int) -> tuple[int, ...] | None:
        """The record at this number's place; None if that is older."""
        at = _HEADER_BYTES + number % self._capacity * _RECORD_BYTES
        settled = os.pread(self._fd, _RECORD.size, at)[-_NUMBER.size :]  # see _settled
        record = _RECORD.unpack(os.pread(self._fd, _RECORD.size - _NUMBER.size, at) + settled)
        return record if record[0] >= number else None

    def _read_groups(self) -> None:
        at = _HEADER_BYTES + self._capacity * _RECORD_BYTES
        (nbytes,) = _HEAD_GROUPS.unpack(os.pread(self._fd, _HEAD_GROUPS.size, _HEAD_GROUPS_AT))
        self._groups = _groups_of(os.pread(self._fd, nbytes, at))
