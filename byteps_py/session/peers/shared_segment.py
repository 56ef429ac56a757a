"""A segment of memory that some ranks of a machine share: one of them makes it, the others map it. All may read and
write it; who does what when is for their callers to agree on.

    the maker:   memory ──SEGMENT, with its descriptor──► the others      SHARED: its number
    the others:  wait for SHARED, then find the segment among those that are mapped already

One thread at a time.
"""

from __future__ import annotations

from typing import cast

from byteps_py.errors import ProtocolError
from byteps_py.session.peers import peer_protocol
from byteps_py.session.peers.message_matcher import Stream
from byteps_py.session.peers.peer_protocol import PeerMessageKind
from byteps_py.session.peers.peer_sockets import PeerOutbox
from byteps_py.session.peers.shared_slots import MemoryHost
from byteps_py.session.peers.waiting import Wait
from byteps_py.shm import Segment


class SharedSegment:
    """``stream``: to the other ranks, all of this machine; it has no other use. ``maker``: the rank that makes the
    segment, the same on all of them, like ``nbytes``. Raises OSError if the system can't provide as much, and what ends
    the session."""

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
        and what ends the session."""
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
