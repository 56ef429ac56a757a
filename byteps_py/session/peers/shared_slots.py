"""Shared memory between the ranks of one machine: blocks for payloads, and ``SharedSlots``, of which each rank of a
group writes its own, step by step, for the others to read, while they do the same.

Segments are sealed memfds whose descriptors go from rank to rank. No other process can open them, and they are freed
with the last process that maps them. OutgoingMemory and IncomingMemory are not locked: PeerTransport calls with its
lock held.

SharedSlots are a few slots of each rank, and a few control lines that say how many steps it has published. So a tensor
of any size needs no more shared memory than that, and bytes are read while they are in the caches. No acknowledgement
is needed: a rank that publishes a step has read all earlier steps of the others.

    wait until all others have published step s - 1, for which they have read step s - 2 of this rank
    read step s - 1 of the others; write step s to the slot of step s - 4; publish it

The number of published steps is a word in memory: a rank publishes by writing its word, and waits by polling the words
of the others. A rank that has polled for long enough records that it sleeps, and a rank that publishes a step then
sends it a message. Compiled instructions take the steps (kernels/jit/all_reduce_kernels.py); this module does the work
before, between and after them.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

from byteps_py.errors import JoinedError, MismatchError, ProtocolError
from byteps_py.kernels.all_reduce_table import AHEAD, ASLEEP, ERA_BIT, RECORDS, SLOTS, WORD
from byteps_py.session.peers import peer_protocol
from byteps_py.session.peers.message_matcher import MessageMatcher, Stream, joined_error
from byteps_py.session.peers.peer_connection import PeerConnection
from byteps_py.session.peers.peer_protocol import PeerMessageKind
from byteps_py.session.peers.peer_sockets import PeerOutbox
from byteps_py.session.peers.waiting import PeerWaiter, Wait
from byteps_py.system.shm import PAGE, Arena, Block, Segment
from byteps_py.tensors import key_of

#: A free block is used for a payload that needs at least 1 / _LEAST_PART of it.
_LEAST_PART = 4
#: Free blocks beyond this keep their addresses, but give their pages back.
_IDLE_BYTES = 256 << 20


class OutgoingMemory:
    """Blocks for payloads. A freed block is reused as soon as possible, the latest first, as its memory is in the
    caches."""

    def __init__(self, idle_bytes: int = _IDLE_BYTES) -> None:
        self._arena = Arena()
        self._idle_bytes = idle_bytes
        self._free: dict[int, list[Block]] = {}  # by size
        self._warm: dict[int, Block] = {}  # by address: free blocks with pages, the oldest first
        self._warm_bytes = 0

    @property
    def segments(self) -> list[Segment]:
        """All segments so far. A segment must be announced to a peer before a block in it is."""
        return self._arena.segments

    def allocate(self, nbytes: int) -> tuple[Block, Segment]:
        """A block of at least ``nbytes`` bytes, and its segment, to which the caller keeps a reference while it
        writes."""
        block = self._find(nbytes)
        return block, self._arena.segments[block.segment]

    def allocate_alone(self, nbytes: int) -> tuple[Block, Segment]:
        """A block of whole pages in a segment of its own, which is never used for payloads. No page of it is touched
        yet."""
        block = self._arena.allocate_alone(nbytes)
        return block, self._arena.segments[block.segment]

    def _find(self, nbytes: int) -> Block:
        size = size_class(nbytes)
        blocks = self._free.get(size)
        if not blocks and self._free:
            fitting = [s for s, some in self._free.items() if some and size < s <= _LEAST_PART * size]
            blocks = self._free[min(fitting)] if fitting else None
        if not blocks:
            return self._arena.allocate(size)
        block = blocks.pop()
        if self._warm.pop(block.address, None) is not None:
            self._warm_bytes -= block.nbytes
        return block

    def free(self, block: Block) -> None:
        """Reuse ``block`` from now on."""
        self._free.setdefault(block.nbytes, []).append(block)
        self._warm[block.address] = block
        self._warm_bytes += block.nbytes
        while self._warm_bytes > self._idle_bytes:
            coldest = self._warm.pop(next(iter(self._warm)))
            self._warm_bytes -= coldest.nbytes
            self._arena.segments[coldest.segment].forget(coldest.offset, coldest.nbytes)

    def close(self) -> None:
        """Unmap all segments. Peers that have mapped them keep them."""
        for segment in self._arena.segments:
            segment.close_descriptor()
        self._arena.segments.clear()
        self._free.clear()
        self._warm.clear()


class IncomingMemory:
    """The mapped segments of this rank's peers."""

    def __init__(self) -> None:
        self._segments: dict[tuple[int, int], Segment] = {}  # by owner and number

    def add(self, source: int, number: int, fd: int, nbytes: int) -> None:
        """Map segment ``number`` of ``source``. Takes ownership of ``fd`` in any case. Raises ProtocolError for a
        descriptor that is not sealed at ``nbytes`` bytes."""
        try:
            if number and (source, number - 1) not in self._segments:
                raise ProtocolError(f"rank {source} announced segment {number} before earlier ones")
            segment = Segment(fd, nbytes)
        except (ProtocolError, OSError, ValueError, OverflowError) as error:
            os.close(fd)
            raise ProtocolError(
                f"rank {source} announced a segment of {nbytes} bytes that can't be mapped: {error}"
            ) from error
        segment.close_descriptor()  # the mapping stays
        self._segments[source, number] = segment

    def find(self, source: int, number: int, end: int) -> Segment:
        """The segment, to which the caller keeps a reference while it reads. Raises ProtocolError if it is not mapped
        up to ``end`` bytes."""
        segment = self._segments.get((source, number))
        if segment is None or end > segment.nbytes:
            raise ProtocolError(f"rank {source} sent a payload outside of its memory: segment {number}")
        return segment

    def close(self) -> None:
        """Unmap all segments."""
        self._segments.clear()


def size_class(nbytes: int) -> int:
    """``nbytes`` rounded up, by at most a quarter, so that tensors of similar sizes share blocks.

    >>> [size_class(n) for n in (1, 5000, 1 << 20, (1 << 20) + 1)]
    [4096, 8192, 1048576, 1310720]
    """
    step = max(PAGE, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return -(-nbytes // step) * step


_RECORD = struct.Struct("=QQ")  # key, bytes of the tensor
_SHARED, _WAKE = int(PeerMessageKind.SHARED), int(PeerMessageKind.WAKE)


class MemoryHost(NamedTuple):
    """The objects that slots and shared segments of rank ``me`` share. ``lock`` guards ``matcher`` and ``outgoing``.
    ``announce`` tells a peer about memory segments."""

    me: int
    lock: threading.Lock
    matcher: MessageMatcher
    outgoing: OutgoingMemory
    incoming: IncomingMemory
    outboxes: Mapping[int, PeerOutbox | PeerConnection]
    waiter: PeerWaiter
    announce: Callable[[PeerOutbox], None]


class SharedSlots:
    """The slots of one group. ``stream``: to the other members; it has no other use. ``slot_bytes``: the size of each
    slot.

    All members call the same operations in the same order, one at a time. One thread at a time.
    """

    def __init__(self, host: MemoryHost, stream: Stream, slot_bytes: int) -> None:
        self._stream, self.slot_bytes = stream, slot_bytes
        self._me, self._lock, self._matcher = host.me, host.lock, host.matcher
        self._outgoing, self._incoming = host.outgoing, host.incoming
        self._outboxes, self._waiter, self._announce = host.outboxes, host.waiter, host.announce
        self.block: Block | None = None  # this rank's control lines and slots
        self._segments: dict[int, Segment] = {}  # by rank: those that hold the members' lines and slots
        #: The address of the control lines by rank, once it is known.
        self.controls: dict[int, int] = {}
        self._era = -1
        self._first = 0  # steps of earlier operations of this era
        self._operations = 0  # earlier ones, of this era
        # The operation under way:
        self.key = self._nbytes = self._steps = 0
        self._name = ""
        self._wait: Wait | None = None

    @property
    def others(self) -> list[int]:
        """The ranks of the other members."""
        return list(self._stream.flows)

    @property
    def era(self) -> int:
        """The era in which the members have exchanged addresses; -1 before that. A new one begins once all ranks have
        joined."""
        return self._era

    @property
    def base(self) -> int:
        """This rank's word when the operation began."""
        return (self._era << ERA_BIT) + self._first

    @property
    def record(self) -> int:
        """The offset of the operation's record in every member's control lines."""
        return RECORDS + self._operations % 2 * _RECORD.size

    @property
    def knows_addresses(self) -> bool:
        """True if this rank knows the addresses of all members' slots."""
        return self._era == self._matcher.era and len(self.controls) > len(self._stream.flows)

    def slots_of(self, rank: int) -> int:
        """The address of a member's slots, which are contiguous. This rank's are known after ``prepare``, the others'
        if ``knows_addresses``."""
        return self.controls[rank] + PAGE

    def prepare(self) -> None:
        """Allocate this rank's slots and announce them, unless that was done in this era. After it, the first step of
        the next operation may be written, whether or not the operation is begun."""
        if self._era == self._matcher.era:
            return
        if self.block is None:
            with self._lock:
                self.block, segment = self._outgoing.allocate(PAGE + SLOTS * self.slot_bytes)
            self._segments[self._me] = segment
            ctypes.memset(self.block.address, 0, PAGE)
        self._era, self._first, self._operations = self._matcher.era, 0, 0
        self.controls = {self._me: self.block.address}
        for target in self._stream.flows:
            outbox = cast(PeerOutbox, self._outboxes[target])
            if outbox.announced <= self.block.segment:
                self._announce(outbox)
            nbytes, number = self.block.nbytes, self._stream.send(target)
            where = self.block.segment, self._stream.key, number, nbytes, nbytes, 0, self.block.offset
            outbox.send(peer_protocol.pack(_SHARED, self._me, self._era, *where, self.slot_bytes))

    def begin(self, name: str, nbytes: int, steps: int) -> None:
        """Begin the next operation: every member publishes ``steps`` steps of a tensor of ``nbytes`` bytes. ``name``:
        the same on all members. Raises JoinedError if a member has no more data."""
        if missing := [source for source in self.others if source in self._matcher.joined]:
            raise joined_error(name, missing[0])
        self.prepare()
        self.key, self._name, self._nbytes, self._steps = key_of(name), name, nbytes, steps
        _RECORD.pack_into(self._lines(self._me), self.record, self.key, nbytes)
        self._wait = Wait(name, self._operations + 1, self._missing)

    def await_addresses(self, timeout_s: float, absent_elsewhere: Callable[[], list[int]] = list) -> None:
        """Return when this rank ``knows_addresses``. ``absent_elsewhere``: for slots that serve a part of an operation:
        returns the ranks without them that have joined instead. Members that know of one do not begin. Raises
        StallError, JoinedError (a member, or such a rank, has no more data), ProtocolError and the error that ends the
        session."""
        flows = self._stream.flows
        if self._wait is None:
            raise ValueError("await_addresses() without begin()")

        def unknown() -> list[int]:
            return [source for source in flows if source not in self.controls and not flows[source].payloads]

        def absent() -> list[int]:
            return [*self._matcher.joined.intersection(unknown()), *absent_elsewhere()]

        def has_arrived() -> bool:
            return not unknown() or bool(absent())

        if not has_arrived():
            self._waiter.until(has_arrived, self._wait, timeout_s)
        if gone := absent():
            raise self._joined(min(gone))
        for source, flow in flows.items():
            for number, payload in list(flow.payloads.items()):
                segment = self._incoming.find(source, payload.segment, payload.offset + payload.total)
                if payload.due != self.slot_bytes or payload.total < PAGE + SLOTS * self.slot_bytes:
                    raise ProtocolError(f"rank {source} has slots of {payload.due} bytes, not {self.slot_bytes}")
                self._segments[source] = segment
                self.controls[source] = segment.address + payload.offset
                del flow.payloads[number]

    def spin_s(self) -> float:
        """The time, in seconds, to poll for the others' first step before ``sleep`` is called."""
        return self._waiter.spin_s()

    def spun(self, in_vain: bool) -> None:
        """Report the outcome of polling, if ``spin_s`` was not 0."""
        self._waiter.spun(in_vain)

    def sleep(self, step: int, timeout_s: float, absent_elsewhere: Callable[[], list[int]] = list) -> None:
        """Return when all other members have published ``step`` steps of this operation; this rank has recorded that it
        sleeps. ``absent_elsewhere``: see ``await_addresses``. Raises StallError, JoinedError (a member has no more
        data, and no member has published more than the first step; or a rank without slots has none) and the error that
        ends the session."""
        if self._wait is None:
            raise ValueError("sleep() without begin()")
        word = self.base + step

        def absent() -> list[int]:
            return self._absent() or absent_elsewhere()

        def has_arrived() -> bool:
            return all(self._has_published(source, word) for source in self.others) or bool(absent())

        self._waiter.until(has_arrived, self._wait, timeout_s, has_spun=True)
        if gone := absent():
            raise self._joined(gone[0])

    def wake(self) -> None:
        """Send a message to every member that sleeps."""
        for target in self.others:
            if ctypes.c_uint64.from_address(self.controls[target] + ASLEEP).value:
                self._outboxes[target].send(peer_protocol.pack(_WAKE, self._me, self._era, 0, 0, 0, 0, 0, 0, 0, -1))

    def differ(self, timeout_s: float) -> None:
        """Another member is in another operation. Raises MismatchError if it adds the same tensor with another size.
        Otherwise raises StallError after ``timeout_s``, as the other operation's name means little to users, and
        callers can find out more meanwhile; and the error that ends the session."""
        for source in self.others:
            key, nbytes = _RECORD.unpack_from(self._lines(source), self.record)
            if key == self.key and nbytes != self._nbytes:
                raise MismatchError(
                    f"tensor {self._name!r}: rank {source} adds {nbytes} bytes, rank "
                    f"{self._me} {self._nbytes}; call the same operations in the same order on "
                    "every rank"
                )
        if self._wait is None:
            raise ValueError("differ() without begin()")
        self._waiter.until(lambda: False, self._wait, timeout_s, has_spun=True)

    def pause(self) -> None:
        """No thread waits for the operation now. It may be continued later, or never."""
        if self._wait is not None:
            self._waiter.ended(self._wait)

    def end(self) -> None:
        """All members have published and read all steps."""
        self.pause()
        self._first += self._steps
        self._operations += 1
        self._wait = None

    def _lines(self, rank: int) -> ctypes.Array[ctypes.c_char]:
        return (ctypes.c_char * PAGE).from_address(self.controls[rank])

    def _has_published(self, source: int, word: int) -> bool:
        return 0 <= self._published(source) - word < AHEAD

    def _published(self, source: int) -> int:
        return int(ctypes.c_uint64.from_address(self.controls[source] + WORD).value)

    def _missing(self) -> list[int]:
        if not self.knows_addresses:
            return [source for source in self.others if source not in self.controls]
        published = {source: self._published(source) for source in self.others}
        elsewhere = [s for s in self.others if _RECORD.unpack_from(self._lines(s), self.record)[0] != self.key]
        return elsewhere or [source for source in self.others if published[source] == min(published.values())]

    def _absent(self) -> list[int]:
        """Members that have joined and have not begun this operation."""
        joined, first = self._matcher.joined, self.base + 1
        return [source for source in self.others if source in joined and not self._has_published(source, first)]

    def _joined(self, source: int) -> JoinedError:
        return joined_error(self._name, source)


class SharedSegment:
    """A segment of memory that some ranks of a machine share: one of them makes it, the others map it. All may read and
    write it; their callers agree on the order of accesses. One thread at a time.

        the maker:   memory ──SEGMENT, with its descriptor──► the others      SHARED: its number
        the others:  wait for SHARED, then find the segment among those that are mapped already

    ``stream``: to the other ranks, all of this machine; it has no other use. ``maker``: the rank that makes the
    segment, the same on all of them, like ``nbytes``. Raises OSError if the system can't provide as much, and the error
    that ends the session."""

    def __init__(self, host: MemoryHost, stream: Stream, maker: int, nbytes: int) -> None:
        self._host, self._stream, self._maker, self._nbytes = host, stream, maker, nbytes
        self._wait = Wait(stream.name, 1, lambda: [maker])
        self._segment: Segment | None = None
        if maker == host.me:
            self._make()

    def _make(self) -> None:
        host, stream = self._host, self._stream
        with host.lock:
            block, self._segment = host.outgoing.allocate_alone(self._nbytes)
        for target in stream.flows:
            outbox = cast(PeerOutbox, host.outboxes[target])
            if outbox.announced <= block.segment:
                host.announce(outbox)
            number = stream.send(target)
            where = block.segment, stream.key, number, block.nbytes, block.nbytes, 0, block.offset
            outbox.send(peer_protocol.pack(int(PeerMessageKind.SHARED), host.me, host.matcher.era, *where, -1))

    def map(self, timeout_s: float) -> None:
        """Return when the segment is mapped here. Raises StallError, after which it may be called again, ProtocolError,
        and the error that ends the session."""
        if self._segment is not None:
            return
        host, payloads = self._host, self._stream.flows[self._maker].payloads
        host.waiter.until(lambda: bool(payloads), self._wait, timeout_s)
        host.waiter.ended(self._wait)
        _, payload = payloads.popitem()
        if payload.total < self._nbytes:
            raise ProtocolError(f"rank {self._maker} shares {payload.total} bytes, not {self._nbytes}")
        self._segment = host.incoming.find(self._maker, payload.segment, payload.offset + payload.total)

    @property
    def segment(self) -> Segment:
        """The segment, once it is mapped. Its ``view`` keeps the memory, also after the session."""
        if self._segment is None:
            raise ValueError("the segment is not mapped yet")
        return self._segment
