"""Messages of one connection whose payload the receiver reads from the sender's memory, by RDMA.

    sender                                            receiver
    MEMORY       what may be read  ◄───────────────►  MEMORY
    PLACED       place, sealed header ─────────────►  reads there (rdma_lane.py): the sender's processor has no part
                 the memory stays as it is                │
                                   ◄── PLACED_READ ───────┤
                                                      opens the header with the payload: the message has arrived

Everything but payloads travels over the connection, as ever. To those above, nothing differs: messages arrive in the
order in which they were sent, what follows a PLACED waits until it is read, and a connection that breaks loses the
rest. The header's seal covers the payload: a payload that was changed on the way, or whose sender has used its memory
again, is a damaged message. One object an end; owned by the loop's thread.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

import zmq

from byteps_py.dataplane.link_usage import TcpCounters
from byteps_py.dataplane.rdma_lane import MemoryRead, RdmaLane
from byteps_py.dataplane.seal import DamagedError, Data, Seal
from byteps_py.errors import CommunicationError, ProtocolError
from byteps_py.system.loop import EventLoop
from byteps_py.wire.data_link import Header, Kind

#: Reads that one other end may ask for at the same time. Its credit allows far fewer.
_MOST_READS = 1024
#: What a PLACED_READ says: the number of the message, and the microseconds in which the receiver has read anything.
_READ = struct.Struct("<QQ")
_LEAST_S = 1e-6
_OWN = frozenset((Kind.MEMORY, Kind.PLACED, Kind.PLACED_READ))


class PlacedEnd(ABC):
    """The end of a connection that has PlacedMessages."""

    loop: EventLoop

    @abstractmethod
    def say(self, kind: Kind, payload: bytes) -> None:
        """Send a message of this module."""

    @abstractmethod
    def deliver(self, header: Header, payload: zmq.Frame) -> None:
        """A message has arrived."""

    @abstractmethod
    def damaged(self, damage: DamagedError) -> None:
        """A message whose payload was read can't be opened."""

    @abstractmethod
    def malformed(self, error: ProtocolError) -> None:
        """The other end has sent a message of this module that no correct one sends."""

    @abstractmethod
    def broken(self, why: str) -> None:
        """A payload can't be read: the connection does not work. It is ended, and ``close`` is called."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A message that waits for a payload: its own, whose ``sealed`` header opens with it, or one before it."""

    number: int
    header: Header
    payload: zmq.Frame
    sealed: bytes = b""
    read: MemoryRead | None = None
    is_read: bool = False


class PlacedTracker:
    """Like ZeroMQ's MessageTracker."""

    def __init__(self, placed: PlacedMessages, number: int) -> None:
        self._placed, self._number = placed, number

    @property
    def done(self) -> bool:
        """True once the payload is read, or never will be: its memory may change."""
        return not self._placed.holds(self._number)


class PlacedMessages:
    """``most_bytes``: of a payload."""

    def __init__(self, lane: RdmaLane, opening: Seal, end: PlacedEnd, most_bytes: int) -> None:
        self._lane = lane
        self._opening = opening
        self._end = end
        self._most_bytes = most_bytes
        self._name = ""  # of the other end's agent
        self._told = 0  # how many segments the other end knows
        self._held: dict[int, Data] = {}  # by message number: what the other end is to read
        self._waiting: deque[_Waiting] = deque()
        self._reading_s, self._read_until_s = 0.0, 0.0  # in which any read was under way here, and when the last ended
        self._bytes_read_there, self._reading_there_s = 0, 0.0  # at the other end
        self._moved_s = 0.0  # when a read has ended, or the first one began
        self._is_closed = False
        self.was_tried = False  # a payload was to be read, at either end
        self.has_worked = False

    # ---- out -----------------------------------------------------------------------------------------------------

    def introduce(self) -> None:
        """Tell the other end what it may read."""
        description = self._lane.describe()
        self._told = self._lane.segments
        self._end.say(Kind.MEMORY, description)

    def place(self, sealing: Seal, packed: bytes, payload: Data, digest: bytes = b"") -> tuple[bytes, bytes] | None:
        """The sealed header and payload of a PLACED to send instead. None: the message is to be sent as it is."""
        if not self._name or self._is_closed or len(payload) < self._lane.least_bytes:
            return None
        address = self._lane.address_of(payload)
        if address is None:
            return None
        if self._told < self._lane.segments:
            self.introduce()
        number = sealing.number
        apart = sealing.seal_apart(packed, payload, digest)
        placed = Header(Kind.PLACED, Header.unpack(packed).sender, segment_offset=address, length=len(payload))
        sealed, shown = sealing.seal(placed.pack(), apart)
        self._held[number] = payload
        self._lane.hold(1)
        self.was_tried = True
        return sealed, bytes(shown)

    def holds(self, number: int) -> bool:
        """True while the other end is to read the payload of message ``number``."""
        return number in self._held

    @property
    def counters(self) -> TcpCounters:
        """The bytes that the other end has read here, and the time in which it read, as it says."""
        return TcpCounters(self._bytes_read_there, self._reading_there_s, 0.0)

    # ---- in ------------------------------------------------------------------------------------------------------

    def arrived(self, header: Header, payload: zmq.Frame) -> None:
        """The message that the seal has opened last."""
        if self._is_closed:
            return  # what was before it is lost
        if header.kind in _OWN:
            try:
                self._take(header, payload.bytes)
            except ProtocolError as error:
                self._end.malformed(error)
        elif self._waiting:
            self._waiting.append(_Waiting(self._opening.number - 1, header, payload, is_read=True))
        else:
            self._end.deliver(header, payload)

    def _take(self, header: Header, payload: bytes) -> None:
        """Raises ProtocolError."""
        if header.kind is Kind.MEMORY:
            self.met(payload)
        elif header.kind is Kind.PLACED_READ:
            self._were_read(payload)
        else:
            self._begin(header, payload)

    def met(self, description: bytes) -> None:
        """The other end has told what may be read there; nothing: it reads nothing, and has nothing to read. Raises
        ProtocolError."""
        if not description:
            return
        try:
            self._name = self._lane.meet(description, not self._name)
        except CommunicationError as error:
            raise ProtocolError(f"its memory can't be read by RDMA: {error}") from error

    def _were_read(self, text: bytes) -> None:
        if len(text) % _READ.size:
            raise ProtocolError(f"{len(text)} bytes do not say what was read, as {_READ.size} for each payload do")
        for number, reading_us in _READ.iter_unpack(text):
            if (payload := self._held.pop(number, None)) is not None:
                self._lane.hold(-1)
                self._bytes_read_there += len(payload)
                self._reading_there_s = max(self._reading_there_s, reading_us * 1e-6)
                self.has_worked = True

    def _begin(self, header: Header, sealed: bytes) -> None:
        if not self._name:
            raise ProtocolError("it sent a PLACED, and has not described its memory")
        if not 0 < header.length <= self._most_bytes or len(self._waiting) >= _MOST_READS:
            raise ProtocolError(
                f"it sent a PLACED of {header.length} bytes after {len(self._waiting)} messages that wait; allowed are "
                f"{self._most_bytes} bytes and {_MOST_READS} messages"
            )
        one = _Waiting(self._opening.number - 1, header, zmq.Frame(), sealed)
        if all(each.is_read for each in self._waiting):
            self._moved_s = self._end.loop.time()
            self._end.loop.call_later(self._lane.patience_s, self._check)
        self._waiting.append(one)
        self.was_tried = True
        one.read = self._lane.read(self._name, header.segment_offset, header.length, lambda why: self._ended(one, why))

    def _ended(self, one: _Waiting, why: str) -> None:
        if self._is_closed or one.read is None:
            return
        if why:
            self._end.broken(why)
            return
        self.has_worked = True
        self._moved_s = self._end.loop.time()
        one.payload = zmq.Frame(one.read.memory.data, copy=False)
        until_s = max(one.read.until_s, one.read.began_s + _LEAST_S)
        self._reading_s += max(0.0, until_s - max(one.read.began_s, self._read_until_s))
        self._read_until_s = max(self._read_until_s, until_s)
        one.read, one.is_read = None, True
        self._end.say(Kind.PLACED_READ, _READ.pack(one.number, int(self._reading_s * 1e6)))
        while self._waiting and self._waiting[0].is_read and not self._is_closed:
            self._deliver(self._waiting.popleft())

    def _deliver(self, one: _Waiting) -> None:
        header = one.header
        if one.sealed:
            try:
                header = Header.unpack(self._opening.open_apart(one.number, one.sealed, one.payload.buffer))
            except DamagedError as damage:
                self._end.damaged(damage)
                return
        self._end.deliver(header, one.payload)

    def _check(self) -> None:
        """Every read has a deadline: nothing has ended for so long."""
        if self._is_closed or all(each.is_read for each in self._waiting):
            return
        left_s = self._moved_s + self._lane.patience_s - self._end.loop.time()
        if left_s > 0:
            self._end.loop.call_later(left_s, self._check)
        else:
            self._end.broken(f"no read by RDMA has ended for {self._lane.patience_s:.3g} s")

    def close(self) -> None:
        """The connection has ended. A second time does no harm."""
        if self._is_closed:
            return
        self._is_closed = True
        for one in self._waiting:
            if one.read is not None:
                self._lane.take_back(one.read)
        self._waiting.clear()
        self._lane.hold(-len(self._held))
        self._held.clear()
        if self._name:
            self._lane.part(self._name)
