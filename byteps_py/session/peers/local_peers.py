"""A rank's messages to and from the other ranks of its machine: it sends payloads and collects theirs.

Owns this rank's inbox, the outboxes to the others, and the memory between them; MessageMatcher decides. Must not know
torch, process groups or operations. Any thread may call; threads that use the same stream take turns.

A receiver requests nothing: the nth payload of a stream from a rank is for the nth receipt. The receiver acknowledges a
payload only if the sender's memory, or the sender's lead over its receivers, depends on it.
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
from byteps_py.session.peers.memory import IncomingMemory, OutgoingMemory
from byteps_py.session.peers.message_matcher import MessageMatcher, Payload, Span, Stream, StreamReceipt, joined_error
from byteps_py.session.peers.peer_directory import PeerDirectory
from byteps_py.session.peers.peer_protocol import RECORD_BYTES, PeerMessageKind
from byteps_py.session.peers.peer_sockets import Inbox, PeerOutbox
from byteps_py.session.peers.ring import Ring, RingHost
from byteps_py.session.peers.votes import Votes
from byteps_py.session.peers.waiting import Host, PeerWaiter, Wait
from byteps_py.shm import Block
from byteps_py.tensors import differing

#: Payloads up to this size travel in the message: one more copy, but no memory to be given back.
INLINE_BYTES = 32 << 10
#: Receivers begin to copy once this much of a payload is written. Measured: half is no faster, a quarter slower.
CHUNK_BYTES = 1 << 20
#: Payloads of a stream that not all receivers have acknowledged; a further one has to wait.
WINDOW = 4

_INLINE, _SHARED, _MORE, _TAKEN, _SEGMENT, _JOINED, _WAKE = map(int, PeerMessageKind)


class LocalPeers:
    """``host``: the session. ``first_rank``: the global rank of local rank 0."""

    def __init__(self, host: Host, local_rank: int, local_size: int, first_rank: int) -> None:
        self._host = host
        self._first_rank = first_rank
        self._me = local_rank
        self._local_size = local_size
        self._waiter = PeerWaiter(host, local_rank, local_size, first_rank, self.take_message)
        self._lock = threading.Lock()  # guards the matcher and the outgoing memory
        self._matcher = MessageMatcher(local_rank)
        self._outgoing = OutgoingMemory()
        self._incoming = IncomingMemory()
        self._inbox = Inbox()
        self._outboxes: dict[int, PeerOutbox] = {}
        self._retired: list[tuple[Ring, Stream]] = []
        #: The ranks to which this one is introduced.
        self.directory = PeerDirectory(host, self._waiter, local_rank, local_size, self._inbox.write_fd)

    def introduce(self, local_rank: int, write_fd: int) -> None:
        """The service hands over ``write_fd``, a descriptor for the inbox of ``local_rank``, perhaps that of a new
        process in the place of an earlier one. Called by the reading thread."""
        before = self._outboxes.get(local_rank)
        self._outboxes[local_rank] = PeerOutbox(write_fd)
        if before is not None:
            before.close()

    # ---- sending ---------------------------------------------------------------------------------------

    def stream(self, name: str, others: Iterable[int]) -> Stream:
        """The stream of this name between this rank and the local ranks ``others``."""
        with self._lock:
            return self._matcher.stream(name, others)

    def can_send(self, stream: Stream) -> bool:
        """True if the stream's next payload may be sent. Does not block."""
        if stream.unacknowledged >= WINDOW:
            self.take_messages()
        return stream.unacknowledged < WINDOW

    def window_wait(self, stream: Stream) -> Callable[[float], None]:
        """A function that waits, for at most the given number of seconds, until the stream's next payload may be sent.

        It raises StallError, after which it may be called again, JoinedError (a rank that has not taken earlier
        payloads has no more data) and what ends the session.
        """
        wait = Wait(stream.name, 0, lambda: self._matcher.takers(stream))

        def absent() -> set[int]:
            return self.joined_among(self._matcher.takers(stream))

        def within(timeout_s: float) -> None:
            if stream.unacknowledged >= WINDOW:
                self._waiter.until(lambda: stream.unacknowledged < WINDOW or bool(absent()), wait, timeout_s)
                self._waiter.ended(wait)
            if stream.unacknowledged >= WINDOW:
                raise self.joined_error(stream, absent())

        return within

    def send(
        self, stream: Stream, targets: Sequence[int], spans: Sequence[Span], is_led: bool, dues: Sequence[int] = ()
    ) -> None:
        """Send the concatenation of ``spans`` as the stream's next payload to each local rank of ``targets``. Returns
        when the bytes are copied.

        ``is_led``: the targets send nothing in return, so that a small payload, too, has to be acknowledged. ``dues``:
        for each target the number of bytes that this rank expects of it in return, so that both sides detect a
        difference; empty if there is nothing to compare. Raises CommunicationError and what ends the session.
        """
        self._host.check_open()
        nbytes = spans[0][1] if len(spans) == 1 else sum(length for _, length in spans)
        if nbytes <= INLINE_BYTES:
            self._send_inline(stream, targets, spans, nbytes, is_led, dues)
        else:
            self._send_shared(stream, targets, spans, nbytes, dues)

    def refuse(self, stream: Stream, targets: Iterable[int], joined: int) -> None:
        """Tell ``targets`` that they do not get the stream's next payload because the local rank ``joined`` has joined:
        their receipts raise JoinedError."""
        era, me, key = self._matcher.era, self._me, stream.key
        for target in targets:
            number = stream.send(target)
            record = peer_protocol.pack(_INLINE, me, era, 0, key, number, 0, 0, 0, joined, peer_protocol.REFUSED)
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
        payload_id = 0
        if is_led:
            with self._lock:
                payload_id = self._matcher.send(stream, targets, None)
        data = b"".join([ctypes.string_at(address, length) for address, length in spans])
        era, me, key = self._matcher.era, self._me, stream.key
        for at, target in enumerate(targets):
            number, due = stream.send(target), dues[at] if dues else -1
            record = peer_protocol.pack(_INLINE, me, era, 0, key, number, nbytes, nbytes, payload_id, 0, due)
            self._outboxes[target].send(record + data)

    def _send_shared(
        self, stream: Stream, targets: Sequence[int], spans: Sequence[Span], nbytes: int, dues: Sequence[int]
    ) -> None:
        with self._lock:
            block, segment = self._outgoing.allocate(nbytes)
            payload_id = self._matcher.send(stream, targets, block)
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
                        outbox.send(peer_protocol.pack(_MORE, me, era, 0, 0, 0, nbytes, done, payload_id, 0, -1))
                        continue
                    if outbox.announced <= block.segment:
                        self._announce(outbox)
                    number, due = stream.send(target), dues[at] if dues else -1
                    where, offset = block.segment, block.offset
                    outbox.send(
                        peer_protocol.pack(_SHARED, me, era, where, key, number, nbytes, done, payload_id, offset, due)
                    )
                ready = done

    def _announce(self, outbox: PeerOutbox) -> None:
        with self._lock:
            segments = self._outgoing.segments[outbox.announced :]
            for number, segment in enumerate(segments, outbox.announced):
                record = peer_protocol.pack(
                    _SEGMENT, self._me, self._matcher.era, number, 0, 0, segment.nbytes, 0, 0, 0, -1
                )
                outbox.send(record, segment.fd)
            outbox.announced += len(segments)

    def ring(self, stream: Stream, slot_bytes: int) -> Ring:
        """A ring for operations in which every member gives bytes to every other, step by step. Its slots, of
        ``slot_bytes`` bytes, are allocated by its first operation."""
        self._sweep()
        host = RingHost(
            self._me, self._first_rank, self._lock, self._matcher, self._outgoing, self._incoming, self._outboxes,
            self._waiter, self._announce,
        )  # fmt: skip
        return Ring(host, stream, slot_bytes)

    def votes(self, name: str, others: Iterable[int]) -> Votes:
        """Votes among this rank and the local ranks ``others``, to which it is introduced. Nothing else may use the
        stream of this name."""
        return Votes(self._me, self.stream(name, others), self._matcher, self._outboxes, self._waiter)

    def retire(self, ring: Ring, stream: Stream) -> None:
        """The group of ``ring`` has ended on this rank, with no operation under way. Other members may still read its
        slots, until all have retired it: each tells the others on ``stream``, which has no other use."""
        if ring.block is not None:
            self.send(stream, tuple(stream.flows), ((0, 0),), is_led=False)
            self._retired.append((ring, stream))

    def _sweep(self) -> None:
        """Free the slots of rings that all members have retired."""
        for retired in list(self._retired):
            ring, stream = retired
            if all(stream.has_next(source) for source in stream.flows):
                self._retired.remove(retired)
                with self._lock:
                    self._free(ring)

    def _free(self, ring: Ring) -> None:
        block, ring.block = ring.block, None
        if block is not None:
            self._outgoing.free(block)

    # ---- receiving -------------------------------------------------------------------------------------

    def collect(self, receipt: StreamReceipt, timeout_s: float) -> None:
        """Copy what the receipt expects to its memory; return when all of it is copied. If the call fails, what was
        copied is kept, and the next call continues.

        Raises StallError, MismatchError (once everything has come; a payload of another size is dropped), JoinedError
        and what ends the session.
        """
        try:
            self._collect(receipt, time.monotonic() + timeout_s)
        finally:
            if receipt.wait is not None:
                self._waiter.ended(receipt.wait)
        if receipt.error is not None:
            raise receipt.error

    def _collect(self, receipt: StreamReceipt, deadline: float) -> None:
        left = receipt.left
        while left:
            source, number, spans, nbytes, sent = left[-1]
            payloads = receipt.stream.flows[source].payloads
            payload = payloads.get(number)
            if payload is not None and payload.has_news:
                if payload.total != nbytes or payload.due != sent:
                    receipt.error = receipt.error or self._difference(receipt.stream, source, payload, nbytes, sent)
                if self._take(source, payload, spans if payload.total == nbytes else ()):
                    del payloads[number]
                    left.pop()
                continue
            wait = receipt.wait = receipt.wait or Wait(receipt.stream.name, number, receipt.missing)
            self._await_payload(receipt, wait, source, number, deadline - time.monotonic())

    def await_next(self, streams: Sequence[tuple[Stream, int]], timeout_s: float) -> None:
        """Return when one of the (stream, source) pairs has a payload without a receipt. Raises StallError and what
        ends the session."""

        def has_come() -> bool:
            return any(stream.has_next(source) for stream, source in streams)

        self.take_messages()
        if not has_come():
            self._host.wait_until(has_come, timeout_s, lambda: "no message from any rank")

    def poll(self, receipt: StreamReceipt) -> bool:
        """True if ``collect`` would not block. Processes the messages that have arrived."""
        if not receipt.is_there:
            self.take_messages()
        return receipt.is_there

    def take_messages(self) -> None:
        """Process the messages that have arrived. Does not block. Raises what ends the session."""
        with self._host.state:
            self._host.check_open()
            while not self._host.is_being_read and self.take_message():
                pass

    def joined_among(self, local_ranks: Iterable[int]) -> set[int]:
        """Those of ``local_ranks`` that have no more data."""
        return self._matcher.joined.intersection(local_ranks)

    def joined_error(self, stream: Stream, joined: Iterable[int]) -> JoinedError:
        """The error of the stream's next operation, which needs the local ranks ``joined``."""
        return joined_error(stream.name, self._first_rank + min(joined))

    def _await_payload(self, receipt: StreamReceipt, wait: Wait, source: int, number: int, timeout_s: float) -> None:
        flows = receipt.stream.flows
        payloads, joined = flows[source].payloads, self._matcher.joined

        def absent() -> list[int]:
            """Ranks that have joined instead. A mutual operation is not begun by any rank that knows of one of them."""
            expected = receipt.left if receipt.is_mutual else receipt.left[-1:]
            return [rank for rank, nth, *_ in expected if rank in joined and nth not in flows[rank].payloads]

        def has_come() -> bool:
            payload = payloads.get(number)
            return bool(absent()) if payload is None else payload.has_news

        self._waiter.until(has_come, wait, timeout_s)
        if number not in payloads:
            raise joined_error(receipt.stream.name, self._first_rank + absent()[0])

    def _difference(
        self, stream: Stream, source: int, payload: Payload, nbytes: int, sent: int
    ) -> CommunicationError | None:
        """The error for a payload that has another size than expected, or whose sender expects another size in
        return."""
        if payload.due == peer_protocol.REFUSED:
            return joined_error(stream.name, self._first_rank + payload.offset)
        other, own = self._first_rank + source, self._first_rank + self._me
        if payload.total != nbytes:
            return MismatchError(differing(stream.name, other, payload.total, own, nbytes))
        if payload.due < 0 or sent < 0:
            return None
        return MismatchError(differing(stream.name, own, sent, other, payload.due))

    def _take(self, source: int, payload: Payload, spans: Sequence[Span]) -> bool:
        """Copy what has been written of a payload to ``spans``. True if that completes it."""
        if payload.data is not None:
            start = 0
            for address, length in spans:
                data = payload.data if length == payload.total else payload.data[start : start + length]
                ctypes.memmove(address, data, length)
                start += length
        else:
            done, ready = payload.done, payload.ready
            whole = self._incoming.find(source, payload.segment, payload.offset + payload.total)
            start = 0
            for address, length in spans:
                first, last = max(done, start), min(ready, start + length)
                if first < last:
                    ctypes.memmove(address + first - start, whole.address + payload.offset + first, last - first)
                start += length
            payload.done = ready
            if ready < payload.total:
                return False
        if payload.id:
            self._outboxes[source].send(
                peer_protocol.pack(_TAKEN, self._me, self._matcher.era, 0, 0, 0, 0, 0, payload.id, 0, -1)
            )
        return True

    # ---- messages --------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """A descriptor that is readable when a message has arrived."""
        return self._inbox.fileno()

    def take_message(self) -> bool:
        """Process one message, if one has arrived. Called with the host's ``state`` held while no other thread reads.
        Raises ProtocolError."""
        nbytes, fd = self._inbox.receive()
        try:
            if not nbytes:
                return False
            message = peer_protocol.unpack(buffer := self._inbox.buffer, nbytes)
            source = message.source
            if source == self._me or source >= self._local_size:
                raise ProtocolError(f"local rank {source} is no peer of local rank {self._me}: {message}")
            if message.kind == _WAKE:
                return True  # a waiting thread checks its condition after every message
            if message.kind == _SEGMENT:
                if fd < 0:
                    raise ProtocolError(f"local rank {source} announced a segment without its descriptor")
                given, fd = fd, -1
                self._incoming.add(source, message.segment, given, message.total)
                return True
        finally:
            if fd >= 0:  # the message does not use it
                os.close(fd)
        data = bytes(buffer[RECORD_BYTES:nbytes]) if message.kind == _INLINE else None
        with self._lock:
            freed = self._matcher.came(message, data)
            if freed is not None:
                self._outgoing.free(cast(Block, freed))
        return True

    # ---- join and close --------------------------------------------------------------------------------

    def join(self, tell: Callable[[], None]) -> None:
        """This rank has no more data. ``tell`` sends that to the service; it is called before the peers are told,
        because a peer may join on receiving it, and the service must know of this rank first."""
        if self.directory.includes_all:
            self.directory.wait_for_all()
        record = peer_protocol.pack(_JOINED, self._me, self._matcher.era, 0, 0, 0, 0, 0, 0, 0, -1)
        tell()
        for outbox in self._outboxes.values():
            outbox.send(record)

    def begin_era(self) -> None:
        """All ranks have joined: all streams start again."""
        with self._lock:
            for block in self._matcher.begin_era():
                self._outgoing.free(cast(Block, block))
            while self._retired:
                self._free(self._retired.pop()[0])

    def close(self, is_forked: bool = False) -> None:
        """Close the sockets and unmap the memory. Sent messages still arrive. ``is_forked``: called in a forked
        child."""
        for outbox in self._outboxes.values():
            outbox.close(is_forked)
        self._outboxes.clear()
        with contextlib.nullcontext() if is_forked else self._host.state:
            self._inbox.close()
        self._retired.clear()
        self._incoming.close()
        self._outgoing.close()
