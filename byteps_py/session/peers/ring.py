"""Memory in which the ranks of a group lay, step by step, what the others are to have, while they do the same: a few
slots of each, and a few lines that say how far it is.

So a tensor of any size needs no more shared memory than that, and what is laid is read while it is in the caches.
Nobody says that a slot has been read: who lays a step has read all of the others' steps before it.

    wait until all others have laid step s - 1, for which they have read step s - 2 of this rank
    read step s - 1 of the others; write step s where step s - 2 was, or an earlier one; lay it

How far a rank is stands in memory, so to lay a step is to write a word, and to wait is to look at one. A rank
that has looked for long enough writes down that it sleeps, and whoever lays a step sends it a message. The steps
themselves are taken by compiled instructions (byteps_py/torch/engine/ring/steps.py); here is what comes before,
between and after them.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from byteps_py.errors import JoinedError, MismatchError, ProtocolError
from byteps_py.session.peers import peer_protocol
from byteps_py.session.peers.memory import Incoming, Outgoing
from byteps_py.session.peers.message_matcher import MessageMatcher, Stream
from byteps_py.session.peers.peer_protocol import PeerMessageKind
from byteps_py.session.peers.peer_sockets import PeerOutbox
from byteps_py.session.peers.receipts import joined
from byteps_py.session.peers.waiting import Patience, Wait
from byteps_py.shm import PAGE, Block, Segment
from byteps_py.tensors import key_of

#: A power of two. Two would do, but what was written two steps ago is still in the caches of those who have read it,
#: and has to be taken from there: with four, sums of 4 MB take half of the time where that is slow, and nowhere more.
SLOTS = 4
#: Where a rank's control lines have what: steps laid so far, in all operations of its era; whether it sleeps; what the
#: operation under way is, and the one before or after it. Nobody else writes there.
WORD, ASLEEP, RECORDS = 0, 64, 128
#: An era's words begin here; within one, nobody is ahead of others by more than that.
_ERA, AHEAD = 40, 1 << 39
_RECORD = struct.Struct("=QQ")  # key, bytes of the tensor
_LAID, _LOOK = int(PeerMessageKind.LAID), int(PeerMessageKind.LOOK)


class RingHost(NamedTuple):
    """What the rings of local rank ``me`` share. ``first_rank``: the global rank of local rank 0. ``books`` guards
    ``matcher`` and ``outgoing``. ``announce`` tells a neighbour of memory."""

    me: int
    first_rank: int
    books: threading.Lock
    matcher: MessageMatcher
    outgoing: Outgoing
    incoming: Incoming
    outboxes: Mapping[int, PeerOutbox]
    patience: Patience
    announce: Callable[[PeerOutbox], None]


class Ring:
    """Of one group, whose other members' local ranks are those of ``stream``, which has no other use. One operation
    at a time, all members' in the same order; one thread at a time."""

    def __init__(self, host: RingHost, stream: Stream, slot_bytes: int) -> None:
        self._stream, self.slot_bytes = stream, slot_bytes
        self._me, self._first_rank, self._books, self._matcher = host.me, host.first_rank, host.books, host.matcher
        self._outgoing, self._incoming = host.outgoing, host.incoming
        self._outboxes, self._patience, self._announce = host.outboxes, host.patience, host.announce
        self.block: Block | None = None  # where its lines and slots are
        self._segments: dict[int, Segment] = {}  # by local rank: those with members' lines and slots
        #: Where members have them, once all know each other: by local rank, addresses.
        self.controls: dict[int, int] = {}
        self._era = -1
        self._first = 0  # steps of operations before this one, in this era
        self._operations = 0  # before this one, in this era
        # Of the operation under way:
        self.key = self._nbytes = self._steps = 0
        self._name = ""
        self._wait: Wait | None = None

    @property
    def others(self) -> list[int]:
        return list(self._stream.flows)

    @property
    def era(self) -> int:
        """Since when members have known each other; a new one begins once all have joined."""
        return self._era

    @property
    def base(self) -> int:
        """What this rank's word was when the operation began."""
        return (self._era << _ERA) + self._first

    @property
    def record(self) -> int:
        """Where members have that of the operation, within their control lines."""
        return RECORDS + self._operations % 2 * _RECORD.size

    @property
    def knows_all(self) -> bool:
        """All members know where the others' slots are."""
        return self._era == self._matcher.era and len(self.controls) > len(self._stream.flows)

    def slots(self, local_rank: int) -> int:
        """The address of a member's slots, which lie side by side. Of this rank, once ``prepare`` has been called; of
        others, if it ``knows_all``."""
        return self.controls[local_rank] + PAGE

    def prepare(self) -> None:
        """The first step of the next operation may be written from now on, whether or not it comes to it."""
        if self._era == self._matcher.era:
            return
        if self.block is None:
            with self._books:
                self.block, segment = self._outgoing.allocate(PAGE + SLOTS * self.slot_bytes)
            self._segments[self._me] = segment
            ctypes.memset(self.block.address, 0, PAGE)
        self._era, self._first, self._operations = self._matcher.era, 0, 0
        self.controls = {self._me: self.block.address}
        for target in self._stream.flows:
            outbox = self._outboxes[target]
            if outbox.announced <= self.block.segment:
                self._announce(outbox)
            nbytes, number = self.block.nbytes, self._stream.send(target)
            where = self.block.segment, self._stream.key, number, nbytes, nbytes, 0, self.block.offset
            outbox.send(peer_protocol.pack(_LAID, self._me, self._era, *where, self.slot_bytes))

    def begin(self, name: str, nbytes: int, steps: int) -> None:
        """The next operation, of a tensor of ``nbytes``: every member lays ``steps`` steps. ``name``: what all call it.
        Raises JoinedError if one has no more data."""
        if missing := [source for source in self.others if source in self._matcher.joined]:
            raise joined(name, self._first_rank + missing[0])
        self.prepare()
        self.key, self._name, self._nbytes, self._steps = key_of(name), name, nbytes, steps
        _RECORD.pack_into(self._lines(self._me), self.record, self.key, nbytes)
        self._wait = Wait(name, self._operations + 1, self._missing)

    def meet(self, timeout_s: float) -> None:
        """Return when this rank ``knows_all``. Raises StallError, JoinedError (one has no more data), ProtocolError and
        what ends the session."""
        flows = self._stream.flows
        if self._wait is None:
            raise ValueError("meet() without begin()")

        def unknown() -> list[int]:
            return [source for source in flows if source not in self.controls and not flows[source].parcels]

        def has_come() -> bool:
            return not (missing := unknown()) or not self._matcher.joined.isdisjoint(missing)

        if not has_come():
            self._patience.until(has_come, self._wait, timeout_s)
        if missing := unknown():
            raise self._joined(min(self._matcher.joined.intersection(missing)))
        for source, flow in flows.items():
            for number, parcel in list(flow.parcels.items()):
                segment = self._incoming.find(source, parcel.segment, parcel.offset + parcel.total)
                if parcel.due != self.slot_bytes or parcel.total < PAGE + SLOTS * self.slot_bytes:
                    raise ProtocolError(f"local rank {source} has slots of {parcel.due} bytes, not {self.slot_bytes}")
                self._segments[source] = segment
                self.controls[source] = segment.address + parcel.offset
                del flow.parcels[number]

    def patience_s(self) -> float:
        """For how long to look for the others' next step before ``sleep`` is called."""
        return self._patience.look_s()

    def looked(self, in_vain: bool) -> None:
        """What came of it, if it was any time at all."""
        self._patience.looked(in_vain)

    def sleep(self, step: int, timeout_s: float) -> None:
        """Return when all other members have laid so many steps of this operation, for which this rank has written down
        that it sleeps. Raises StallError, JoinedError (one has no more data; nobody has laid more than the first step)
        and what ends the session."""
        if self._wait is None:
            raise ValueError("sleep() without begin()")
        word = self.base + step

        def has_come() -> bool:
            return all(self._has_laid(source, word) for source in self.others) or bool(self._absent())

        self._patience.until(has_come, self._wait, timeout_s, has_looked=True)
        if absent := self._absent():
            raise self._joined(absent[0])

    def wake(self) -> None:
        """Whoever sleeps."""
        for target in self.others:
            if ctypes.c_uint64.from_address(self.controls[target] + ASLEEP).value:
                self._outboxes[target].send(peer_protocol.pack(_LOOK, self._me, self._era, 0, 0, 0, 0, 0, 0, 0, -1))

    def differ(self, timeout_s: float) -> None:
        """Somebody adds another tensor here. Raises MismatchError; where it is in another operation, whose name says
        little to users, StallError once the time is over, for callers that can find out more meanwhile; and what ends
        the session."""
        for source in self.others:
            key, nbytes = _RECORD.unpack_from(self._lines(source), self.record)
            if key == self.key and nbytes != self._nbytes:
                raise MismatchError(
                    f"tensor {self._name!r}: rank {self._first_rank + source} adds {nbytes} bytes, rank "
                    f"{self._first_rank + self._me} {self._nbytes}; call the same operations in the same order on "
                    "every rank"
                )
        if self._wait is None:
            raise ValueError("differ() without begin()")
        self._patience.until(lambda: False, self._wait, timeout_s, has_looked=True)

    def pause(self) -> None:
        """Nobody waits for the operation now; it may go on later, or never."""
        if self._wait is not None:
            self._patience.ended(self._wait)

    def end(self) -> None:
        """All steps of all have been laid, and read."""
        self.pause()
        self._first += self._steps
        self._operations += 1
        self._wait = None

    def _lines(self, local_rank: int) -> ctypes.Array[ctypes.c_char]:
        return (ctypes.c_char * PAGE).from_address(self.controls[local_rank])

    def _has_laid(self, source: int, word: int) -> bool:
        return 0 <= self._laid(source) - word < AHEAD

    def _laid(self, source: int) -> int:
        return int(ctypes.c_uint64.from_address(self.controls[source] + WORD).value)

    def _missing(self) -> list[int]:
        if not self.knows_all:
            return [source for source in self.others if source not in self.controls]
        laid = {source: self._laid(source) for source in self.others}
        elsewhere = [s for s in self.others if _RECORD.unpack_from(self._lines(s), self.record)[0] != self.key]
        return elsewhere or [source for source in self.others if laid[source] == min(laid.values())]

    def _absent(self) -> list[int]:
        """Members that have joined, and have not begun this operation."""
        gone = self._matcher.joined
        return [source for source in self.others if source in gone and not self._has_laid(source, self.base + 1)]

    def _joined(self, source: int) -> JoinedError:
        return joined(self._name, self._first_rank + source)
