"""A rank's side of its dealings with the other ranks of its machine: send them parcels, collect theirs.

Owns this rank's inbox, the ways to the others, and the memory between them; the Ledger decides. Must not know torch,
process groups or operations. Any thread may call; those that use one stream take turns.

A receiver asks for nothing: the nth parcel that a stream brings from a rank is for the nth receipt. Nothing is sent
back but that a parcel was taken, where memory, or a sender's lead over its receivers, depends on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from byteps_py.errors import CommunicationError, JoinedError, MismatchError, ProtocolError
from byteps_py.kernels.jit import streaming
from byteps_py.session.peers import peer_protocol
from byteps_py.session.peers.memory import Incoming, Outgoing
from byteps_py.session.peers.message_matcher import MessageMatcher, Parcel, Stream
from byteps_py.session.peers.peer_directory import PeerDirectory
from byteps_py.session.peers.peer_protocol import RECORD_BYTES, PeerMessageKind
from byteps_py.session.peers.peer_sockets import Inbox, PeerOutbox
from byteps_py.session.peers.receipts import Span, StreamReceipt, joined
from byteps_py.session.peers.ring import Ring, RingHost
from byteps_py.session.peers.votes import Votes
from byteps_py.session.peers.waiting import Host, Patience, Wait
from byteps_py.shm import Block
from byteps_py.tensors import differing

#: What is not longer travels in the message: a copy more, but no memory to be given back.
INLINE_BYTES = 32 << 10
#: Receivers begin when so much lies there. Measured: half of it is no faster, a quarter slower.
CHUNK_BYTES = 1 << 20
#: Parcels of a stream that somebody has not acknowledged; a further one has to wait.
WINDOW = 4

_INLINE, _LAID, _MORE, _TAKEN, _SEGMENT, _JOINED, _LOOK = map(int, PeerMessageKind)


class LocalPeers:
    """``first_rank``: the global rank of local rank 0."""

    def __init__(self, host: Host, local_rank: int, local_size: int, first_rank: int) -> None:
        self._host = host
        self._first_rank = first_rank
        self._me = local_rank
        self._local_size = local_size
        self._patience = Patience(host, local_rank, local_size, first_rank, self.take_message)
        self._books = threading.Lock()  # guards the ledger and the outgoing memory
        self._matcher = MessageMatcher(local_rank)
        self._outgoing = Outgoing()
        self._incoming = Incoming()
        self._inbox = Inbox()
        self._outboxes: dict[int, PeerOutbox] = {}
        self._retired: list[tuple[Ring, Stream]] = []
        #: With which ranks this one can deal.
        self.directory = PeerDirectory(host, self._patience, local_rank, local_size, self._inbox.door)

    def introduce(self, local_rank: int, door: int) -> None:
        """The service gives the way to a neighbour, perhaps a new one in an earlier one's place."""
        before = self._outboxes.get(local_rank)
        self._outboxes[local_rank] = PeerOutbox(door)
        if before is not None:
            before.close()

    # ---- sending ---------------------------------------------------------------------------------------

    def stream(self, name: str, others: Iterable[int]) -> Stream:
        with self._books:
            return self._matcher.stream(name, others)

    def has_room(self, stream: Stream) -> bool:
        """True if the next parcel may be sent."""
        if stream.unacknowledged >= WINDOW:
            self.take_messages()
        return stream.unacknowledged < WINDOW

    def room(self, stream: Stream) -> Callable[[float], None]:
        """Of one who waits for it: returns, within so many seconds, when the next parcel may be sent. Raises
        StallError, after which it may be called again, JoinedError (one that has not taken the others has no more data)
        and what ends the session."""
        wait = Wait(stream.name, 0, lambda: self._matcher.takers(stream))

        def gone() -> set[int]:
            return self.gone(self._matcher.takers(stream))

        def within(timeout_s: float) -> None:
            if stream.unacknowledged >= WINDOW:
                self._patience.until(lambda: stream.unacknowledged < WINDOW or bool(gone()), wait, timeout_s)
                self._patience.ended(wait)
            if stream.unacknowledged >= WINDOW:
                raise self.joined(stream, gone())

        return within

    def send(
        self, stream: Stream, targets: Sequence[int], spans: Sequence[Span], is_led: bool, dues: Sequence[int] = ()
    ) -> None:
        """The stream's next parcel, end to end of ``spans``, to each of ``targets``. Over when it is copied.

        ``is_led``: targets don't send in turn, so what is small, too, has to be acknowledged. ``dues``: bytes that this
        rank expects of each target in turn, so that both find out if they disagree; none if nobody else need know.
        """
        self._host.check_open()
        nbytes = spans[0][1] if len(spans) == 1 else sum(length for _, length in spans)
        if nbytes <= INLINE_BYTES:
            self._send_inline(stream, targets, spans, nbytes, is_led, dues)
        else:
            self._lay(stream, targets, spans, nbytes, dues)

    def refuse(self, stream: Stream, targets: Iterable[int], gone: int) -> None:
        """These do not get the stream's next parcel, since the local rank ``gone`` has joined: they raise that."""
        era, me, key = self._matcher.era, self._me, stream.key
        for target in targets:
            number = stream.send(target)
            record = peer_protocol.pack(_INLINE, me, era, 0, key, number, 0, 0, 0, gone, peer_protocol.REFUSED)
            self._outboxes[target].send(record)

    def _send_inline(
        self,
        stream: Stream,
        targets: Sequence[int],
        spans: Sequence[Span],
        nbytes: int,
        is_led: bool,
        dues: Sequence[int],
    ) -> None:
        parcel_id = 0
        if is_led:
            with self._books:
                parcel_id = self._matcher.send(stream, targets, None)
        data = b"".join([ctypes.string_at(address, length) for address, length in spans])
        era, me, key = self._matcher.era, self._me, stream.key
        for at, target in enumerate(targets):
            number, due = stream.send(target), dues[at] if dues else -1
            record = peer_protocol.pack(_INLINE, me, era, 0, key, number, nbytes, nbytes, parcel_id, 0, due)
            self._outboxes[target].send(record + data)

    def _lay(
        self, stream: Stream, targets: Sequence[int], spans: Sequence[Span], nbytes: int, dues: Sequence[int]
    ) -> None:
        with self._books:
            block, segment = self._outgoing.allocate(nbytes)
            parcel_id = self._matcher.send(stream, targets, block)
        era, me, key = self._matcher.era, self._me, stream.key
        done = ready = 0
        for address, length in spans:
            for first in range(0, length, CHUNK_BYTES):
                part = min(CHUNK_BYTES, length - first)
                streaming.copy(segment.address + block.offset + done, address + first, part)
                done += part
                if done - ready < CHUNK_BYTES and done < nbytes:
                    continue
                for at, target in enumerate(targets):
                    outbox = self._outboxes[target]
                    if ready:
                        outbox.send(peer_protocol.pack(_MORE, me, era, 0, 0, 0, nbytes, done, parcel_id, 0, -1))
                        continue
                    if outbox.announced <= block.segment:
                        self._announce(outbox)
                    number, due = stream.send(target), dues[at] if dues else -1
                    where, offset = block.segment, block.offset
                    outbox.send(
                        peer_protocol.pack(_LAID, me, era, where, key, number, nbytes, done, parcel_id, offset, due)
                    )
                ready = done

    def _announce(self, outbox: PeerOutbox) -> None:
        with self._books:
            segments = self._outgoing.segments[outbox.announced :]
            for number, segment in enumerate(segments, outbox.announced):
                record = peer_protocol.pack(
                    _SEGMENT, self._me, self._matcher.era, number, 0, 0, segment.nbytes, 0, 0, 0, -1
                )
                outbox.send(record, segment.fd)
            outbox.announced += len(segments)

    def ring(self, stream: Stream, slot_bytes: int) -> Ring:
        """For operations in which all of a group give to all, step by step. Its slots are there with the first one."""
        self._sweep()
        host = RingHost(
            self._me, self._first_rank, self._books, self._matcher, self._outgoing, self._incoming, self._outboxes,
            self._patience, self._announce,
        )  # fmt: skip
        return Ring(host, stream, slot_bytes)

    def votes(self, name: str, others: Iterable[int]) -> Votes:
        """With these local ranks, whom this one has met. Nothing else uses the stream of this name."""
        return Votes(self._me, self.stream(name, others), self._matcher, self._outboxes, self._patience)

    def retire(self, ring: Ring, stream: Stream) -> None:
        """The ring's group has ended here, with nothing under way. Others may still read its slots, until all have said
        the same on ``stream``, which brings nothing else."""
        if ring.block is not None:
            self.send(stream, tuple(stream.flows), ((0, 0),), is_led=False)
            self._retired.append((ring, stream))

    def _sweep(self) -> None:
        """Free the slots of rings that all members have retired."""
        for retired in list(self._retired):
            ring, stream = retired
            if all(stream.has_next(source) for source in stream.flows):
                self._retired.remove(retired)
                with self._books:
                    self._free(ring)

    def _free(self, ring: Ring) -> None:
        block, ring.block = ring.block, None
        if block is not None:
            self._outgoing.free(block)

    # ---- receiving -------------------------------------------------------------------------------------

    def collect(self, receipt: StreamReceipt, timeout_s: float) -> None:
        """Copy what comes to where it belongs; return when all of it is there. What has come stays, if called again.

        Raises StallError, MismatchError (once all is there; what is not as long as it should be is let go), JoinedError
        and what ends the session.
        """
        try:
            self._collect(receipt, time.monotonic() + timeout_s)
        finally:
            if receipt.wait is not None:
                self._patience.ended(receipt.wait)
        if receipt.error is not None:
            raise receipt.error

    def _collect(self, receipt: StreamReceipt, deadline: float) -> None:
        left = receipt.left
        while left:
            source, number, spans, nbytes, sent = left[-1]
            parcels = receipt.stream.flows[source].parcels
            parcel = parcels.get(number)
            if parcel is not None and parcel.has_news:
                if parcel.total != nbytes or parcel.due != sent:
                    receipt.error = receipt.error or self._difference(receipt.stream, source, parcel, nbytes, sent)
                if self._take(source, parcel, spans if parcel.total == nbytes else ()):
                    del parcels[number]
                    left.pop()
                continue
            wait = receipt.wait = receipt.wait or Wait(receipt.stream.name, number, receipt.missing)
            self._await_parcel(receipt, wait, source, number, deadline - time.monotonic())

    def await_next(self, streams: Sequence[tuple[Stream, int]], timeout_s: float) -> None:
        """Return when one of these streams has a parcel of this source that nobody expects yet. Raises StallError and
        what ends the session."""

        def has_come() -> bool:
            return any(stream.has_next(source) for stream, source in streams)

        self.take_messages()
        if not has_come():
            self._host.wait_until(has_come, timeout_s, lambda: "nothing came from anybody")

    def look(self, receipt: StreamReceipt) -> bool:
        """True if ``collect`` would not block. Takes what messages there are."""
        if not receipt.is_there:
            self.take_messages()
        return receipt.is_there

    def take_messages(self) -> None:
        """Take what messages there are."""
        with self._host.state:
            self._host.check_open()
            while not self._host.is_being_read and self.take_message():
                pass

    def gone(self, local_ranks: Iterable[int]) -> set[int]:
        """Which of them have no more data."""
        return self._matcher.joined.intersection(local_ranks)

    def joined(self, stream: Stream, gone: Iterable[int]) -> JoinedError:
        """These have no more data, and the stream's next operation needs them."""
        return joined(stream.name, self._first_rank + min(gone))

    def _await_parcel(self, receipt: StreamReceipt, wait: Wait, source: int, number: int, timeout_s: float) -> None:
        flows = receipt.stream.flows
        parcels, gone = flows[source].parcels, self._matcher.joined

        def absent() -> list[int]:
            """Who has joined instead. If the operation is mutual, whoever knows so has not begun it either."""
            expected = receipt.left if receipt.is_mutual else receipt.left[-1:]
            return [rank for rank, nth, *_ in expected if rank in gone and nth not in flows[rank].parcels]

        def has_come() -> bool:
            parcel = parcels.get(number)
            return bool(absent()) if parcel is None else parcel.has_news

        self._patience.until(has_come, wait, timeout_s)
        if number not in parcels:
            raise joined(receipt.stream.name, self._first_rank + absent()[0])

    def _difference(
        self, stream: Stream, source: int, parcel: Parcel, nbytes: int, sent: int
    ) -> CommunicationError | None:
        """What is wrong with a parcel that is not as long as it should be, or whose sender expects something else."""
        if parcel.due == peer_protocol.REFUSED:
            return joined(stream.name, self._first_rank + parcel.offset)
        other, own = self._first_rank + source, self._first_rank + self._me
        if parcel.total != nbytes:
            return MismatchError(differing(stream.name, other, parcel.total, own, nbytes))
        if parcel.due < 0 or sent < 0:
            return None
        return MismatchError(differing(stream.name, own, sent, other, parcel.due))

    def _take(self, source: int, parcel: Parcel, spans: Sequence[Span]) -> bool:
        """Copy what is there of it. True if that was all."""
        if parcel.payload is not None:
            start = 0
            for address, length in spans:
                data = parcel.payload if length == parcel.total else parcel.payload[start : start + length]
                ctypes.memmove(address, data, length)
                start += length
        else:
            done, ready = parcel.done, parcel.ready
            whole = self._incoming.find(source, parcel.segment, parcel.offset + parcel.total)
            start = 0
            for address, length in spans:
                first, last = max(done, start), min(ready, start + length)
                if first < last:
                    ctypes.memmove(address + first - start, whole.address + parcel.offset + first, last - first)
                start += length
            parcel.done = ready
            if ready < parcel.total:
                return False
        if parcel.id:
            self._outboxes[source].send(
                peer_protocol.pack(_TAKEN, self._me, self._matcher.era, 0, 0, 0, 0, 0, parcel.id, 0, -1)
            )
        return True

    # ---- messages --------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Readable when there is a message."""
        return self._inbox.fileno()

    def take_message(self) -> bool:
        """Take one, if there is any. Called with the host's ``state`` held while nobody else reads. Raises
        ProtocolError."""
        nbytes, fd = self._inbox.receive()
        try:
            if not nbytes:
                return False
            message = peer_protocol.unpack(buffer := self._inbox.buffer, nbytes)
            source = message.source
            if source == self._me or source >= self._local_size:
                raise ProtocolError(f"local rank {source} is no neighbour of local rank {self._me}: {message}")
            if message.kind == _LOOK:
                return True  # who waits looks whenever something has come
            if message.kind == _SEGMENT:
                if fd < 0:
                    raise ProtocolError(f"local rank {source} told of memory without its descriptor")
                given, fd = fd, -1
                self._incoming.add(source, message.segment, given, message.total)
                return True
        finally:
            if fd >= 0:  # nobody has taken it
                os.close(fd)
        payload = bytes(buffer[RECORD_BYTES:nbytes]) if message.kind == _INLINE else None
        with self._books:
            freed = self._matcher.came(message, payload)
            if freed is not None:
                self._outgoing.free(cast(Block, freed))
        return True

    # ---- ends ------------------------------------------------------------------------------------------

    def join(self, tell: Callable[[], None]) -> None:
        """No more data: ``tell`` the service, then peers, who may join on hearing it, and be heard first there."""
        if self.directory.includes_all:
            self.directory.wait_for_all()
        record = peer_protocol.pack(_JOINED, self._me, self._matcher.era, 0, 0, 0, 0, 0, 0, 0, -1)
        tell()
        for outbox in self._outboxes.values():
            outbox.send(record)

    def start_anew(self) -> None:
        """All ranks have joined."""
        with self._books:
            for block in self._matcher.start_anew():
                self._outgoing.free(cast(Block, block))
            while self._retired:
                self._free(self._retired.pop()[0])

    def close(self, is_forked: bool = False) -> None:
        """Nobody reads any more; what was sent still arrives. ``is_forked``: in a copy of the session's process."""
        for outbox in self._outboxes.values():
            outbox.close(is_forked)
        self._outboxes.clear()
        with contextlib.nullcontext() if is_forked else self._host.state:
            self._inbox.close()
        self._retired.clear()
        self._incoming.close()
        self._outgoing.close()
