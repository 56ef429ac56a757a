"""A rank's messages to and from other ranks: it sends payloads and collects theirs.

Ranks of the same machine share memory and sockets; ranks of other machines have a link each. Owns this rank's
inbox, the ways to the others, and the memory between them; MessageMatcher decides. Must not know torch, process groups
or operations. Any thread may call; threads that use the same stream take turns.

A receiver requests nothing: the nth payload of a stream from a rank is for the nth receipt. The receiver acknowledges a
payload only if the sender's memory, or the sender's lead over its receivers, depends on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn, cast

from byteps_py.config.settings import Settings
from byteps_py.errors import (
    CommunicationError,
    IntegrityError,
    JoinedError,
    MismatchError,
    ProtocolError,
    StallError,
)
from byteps_py.kernels.jit import streaming
from byteps_py.session.peers import peer_protocol
from byteps_py.session.peers.background_sender import BackgroundSender, LinkKeeper
from byteps_py.session.peers.link_socket import LinkSocket
from byteps_py.session.peers.message_matcher import (
    Memory,
    MessageMatcher,
    Payload,
    Posted,
    Span,
    Stream,
    StreamReceipt,
    joined_error,
)
from byteps_py.session.peers.peer_connection import PeerConnection, PendingSend, views_of
from byteps_py.session.peers.peer_connector import NewConnection, PeerConnector
from byteps_py.session.peers.peer_protocol import RECORD_BYTES, PeerMessage, PeerMessageKind
from byteps_py.session.peers.peer_sockets import Inbox, PeerDirectory, PeerOutbox
from byteps_py.session.peers.placed_payloads import (
    KINDS as PLACED_KINDS,
    Inline,
    NewLane,
    PlacedPayloads,
    without_memory,
)
from byteps_py.session.peers.shared_slots import IncomingMemory, MemoryHost, OutgoingMemory, SharedSegment, SharedSlots
from byteps_py.session.peers.votes import Votes
from byteps_py.session.peers.waiting import Host, PeerWaiter, Wait
from byteps_py.system.shm import Block
from byteps_py.tensors import differing
from byteps_py.wire import rank_link as protocol

#: Payloads up to this size travel in the message: one more copy, but no memory to be given back.
INLINE_BYTES = 32 << 10
#: Receivers begin to copy once this much of a payload is written. Measured: half is no faster, a quarter slower.
CHUNK_BYTES = 1 << 20
#: Payloads of a stream that not all receivers have acknowledged; a further one has to wait.
WINDOW = 4
#: One in this many of the payloads to other machines up to a size is acknowledged. Each larger one is: a receiver keeps
#: those that have arrived too early.
_ACKNOWLEDGED = 8
_MOST_UNACKNOWLEDGED_BYTES = 256 << 10
#: Less, between two checks, is not told.
_REPORTED_BYTES = 16 << 10
#: Waiting for the next report of a large payload costs less than copying the bytes that may not have arrived.
_REPORT_WAIT_S = 0.002
_INLINE, _SHARED, _MORE, _TAKEN, _SEGMENT, _JOINED, _WAKE, *_ = map(int, PeerMessageKind)
_MEMORY, _PLACED = int(PeerMessageKind.MEMORY), int(PeerMessageKind.PLACED)
_BETWEEN_MACHINES = frozenset((_INLINE, _TAKEN, _JOINED))


class PeerTransport:
    """``host``: the session of ``rank``. ``local_ranks``: the ranks of its machine. ``settings``: None: ranks of other
    machines can't be connected to. ``epoch``: see PeerConnector. ``new_lane``: for what is read by RDMA; None: nothing
    is. Raises the errors of ``new_lane``."""

    def __init__(
        self,
        host: Host,
        rank: int,
        local_ranks: range,
        settings: Settings | None = None,
        epoch: int = 0,
        new_lane: NewLane | None = None,
    ) -> None:
        self._host = host
        self._me = rank
        self._local_ranks = local_ranks
        self._waiter = PeerWaiter(host, rank, self.take_message)
        self._lock = threading.Lock()  # guards the matcher and the outgoing memory
        self._matcher = MessageMatcher(rank)
        self._outgoing = OutgoingMemory()
        self._incoming = IncomingMemory()
        self._inbox = Inbox()
        self._outboxes: dict[int, PeerOutbox | PeerConnection] = {}
        self._retired: list[tuple[SharedSlots, Stream]] = []
        #: The ranks to which this one is introduced.
        self.directory = PeerDirectory(host, self._waiter, rank, local_ranks, self._inbox.write_fd)
        self._links: dict[int, PeerConnection] = {}  # by rank, of other machines
        # Their connections by descriptor, and former ones
        self._link_sockets: dict[int, tuple[PeerConnection, LinkSocket]] = {}
        self._relayed: frozenset[int] = frozenset()  # ranks that are reached through a third machine as well
        self._error: ProtocolError | None = None  # found while no thread was waiting for messages
        #: Connects to ranks of other machines; None if that is not possible.
        self.connector: PeerConnector | None = None
        #: After a connection has ended, the services have this long, in seconds, to report the fate of its rank.
        self.lost_after_s = 0.0
        self._placed: PlacedPayloads | None = None  # None: this rank is without RDMA
        self._poller: select.epoll | None = None
        self._has_joined = self._is_closed = False
        if settings is not None and new_lane is not None:
            self._placed = PlacedPayloads(settings, rank, lambda: self._matcher.era, new_lane, Inline(self._wake))
        if settings is not None:
            self.connector = PeerConnector(settings, rank, epoch, self._connected)
            self.lost_after_s = settings.patience_s
            self._poller = select.epoll()
            self._poller.register(self._inbox.fileno(), select.EPOLLIN)
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._poller.register(self._wake_fd, select.EPOLLIN)
            self._background_sender = BackgroundSender(lambda: host.is_being_read, self._wake)
            self._link_keeper = LinkKeeper(self._check_links, min(1.0, settings.patience_s / 4))

    def introduce(self, local_rank: int, write_fd: int) -> None:
        """The service hands over ``write_fd``, a descriptor for the inbox of ``local_rank``, perhaps that of a new
        process in the place of an earlier one. Called by the reading thread."""
        rank = self._local_ranks[0] + local_rank
        before = self._outboxes.get(rank)
        self._outboxes[rank] = PeerOutbox(write_fd)
        if before is not None:
            before.close()

    def _connected(self, rank: int, connection: NewConnection) -> None:
        """Called by a thread of the connector."""
        with self._host.state:  # nobody receives meanwhile
            if self._is_closed:
                connection.sock.close()
                return
            link = self._links.get(rank)
            if link is None:
                poller = cast(select.epoll, self._poller)
                link = self._links[rank] = PeerConnection(
                    self._me, rank, self, poller, self._background_sender, self.lost_after_s, self._link_broke
                )
                link.use_relay(rank in self._relayed)
            if (made := link.resume(connection)) is not None:
                self._link_sockets[made.sock.fileno()] = link, made
            is_new = self._outboxes.get(rank) is not link
            self._outboxes[rank] = link
        self._link_keeper.start()
        if is_new and self._placed is not None:
            self._placed.introduce(link)
        if is_new and self._has_joined:
            self._send_joined(link)
        self._wake()  # for messages that arrived before the poller knew of it

    def _link_broke(self, link: PeerConnection) -> None:
        if self.connector is not None:
            self.connector.redial(link.rank, lambda: link.needs_connection)

    def knows_memory(self, ranks: Iterable[int]) -> bool:
        """True once it is clear by which lane large payloads travel to ``ranks``, which are connected."""
        return self._placed is None or all(map(self._placed.knows, ranks))

    def set_relays(self, relays: Mapping[int, str]) -> None:
        """Reach these ranks through a third machine as well, whose relay has this address, and no others. Called by the
        reading thread."""
        if self.connector is None:
            return
        mine, moved = self.connector.set_relays(relays)
        self._relayed = frozenset(relays)
        for rank, link in self._links.items():
            needs_one = link.use_relay(rank in relays)
            if rank in mine and needs_one:
                self.connector.call_through_relay(rank)
            elif rank in moved:
                link.renew("another machine relays it")

    def _report_links(self) -> None:
        """Tell the service what was sent to ranks of other machines. Called with ``state`` held. The system does not
        count what travels by RDMA: the rest would show slow links where there are none."""
        if self._placed is not None:
            return
        used = []
        for rank, link in self._links.items():
            direct, relayed = link.usage()
            if direct.acked + relayed.acked >= _REPORTED_BYTES:
                used.append(protocol.LinkUsed(rank, *direct, relayed.acked, relayed.busy_s))
        for first in range(0, len(used), protocol.MAX_LINKS):
            self._host.tell(protocol.LinksUsed(tuple(used[first : first + protocol.MAX_LINKS])))

    def _check_links(self) -> None:
        """Receive, so that links are not silent while no thread waits for messages, and see which are."""
        with self._host.state:
            if self._is_closed or self._error is not None:
                return
            try:
                if not self._host.is_being_read:
                    self.take_message()
                now_s = time.monotonic()
                for link in list(self._links.values()):
                    link.check(now_s)
                if self._placed is not None:
                    self._placed.check(now_s)
                self._report_links()
            except ProtocolError as error:
                self._error = error
        self._wake()

    def _wake(self) -> None:
        """Have the thread that waits for messages look again."""
        os.eventfd_write(self._wake_fd, 1)

    # ---- sending ---------------------------------------------------------------------------------------

    def stream(self, name: str, others: Iterable[int]) -> Stream:
        """The stream of this name between this rank and the ranks ``others``."""
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
        payloads has no more data) and the error that ends the session.
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
        self,
        stream: Stream,
        targets: Sequence[int],
        spans: Sequence[Span],
        is_led: bool,
        dues: Sequence[int] = (),
        owner: object = None,
    ) -> list[PendingSend]:
        """Send the concatenation of ``spans`` as the stream's next payload to each rank of ``targets``. Returns the
        sends that are not complete: ``owner`` keeps its memory, and nobody may change it until it is
        (``wait_until_sent``).

        ``is_led``: the targets send nothing in return, so that a small payload, too, has to be acknowledged. ``dues``:
        for each target the number of bytes that this rank expects of it in return, so that both sides detect a
        difference; empty if there is nothing to compare. Raises CommunicationError and the error that ends the session.
        """
        self._host.check_open()
        nbytes = spans[0][1] if len(spans) == 1 else sum(length for _, length in spans)
        if nbytes <= INLINE_BYTES:
            self._send_inline(stream, targets, spans, nbytes, is_led, dues)
            return []
        near = [at for at, target in enumerate(targets) if target in self._local_ranks]
        if len(near) == len(targets):
            self._send_shared(stream, targets, spans, nbytes, dues)
            return []
        far = [at for at in range(len(targets)) if at not in near]
        sent = self._send_over_connections(
            stream, [targets[at] for at in far], spans, is_led, [dues[at] for at in far] if dues else dues, owner
        )
        if near:
            self._send_shared(
                stream, [targets[at] for at in near], spans, nbytes, [dues[at] for at in near] if dues else dues
            )
        return [part for part in sent if not part.has_arrived]

    def wait_until_sent(self, sent: Sequence[PendingSend], timeout_s: float) -> None:
        """Return when all of ``sent`` is sent. Raises StallError and the error that ends the session."""

        def have_left() -> bool:
            return all(part.has_left for part in sent)

        if not have_left():
            wait = Wait("a message", 0, lambda: [part.connection.rank for part in sent if not part.has_left])
            self._waiter.until(have_left, wait, timeout_s)
            self._waiter.ended(wait)
        self._await_reports(sent)
        for part in sent:
            part.connection.release(part.mark)

    def _await_reports(self, sent: Sequence[PendingSend]) -> None:
        """Wait, while reports arrive, until all but a few bytes of ``sent`` are reported."""
        reported = -1

        def is_enough() -> bool:
            return all(part.is_little for part in sent) or sum(part.reported for part in sent) != reported

        while not all(part.is_little for part in sent) and (now := sum(part.reported for part in sent)) != reported:
            reported = now
            with contextlib.suppress(StallError):
                self._host.wait_until(is_enough, _REPORT_WAIT_S, lambda: "")

    def is_sent(self, sent: Sequence[PendingSend]) -> bool:
        """True if ``wait_until_sent`` would not block. Processes the messages that have arrived: reports are among
        them."""
        if all(part.is_done for part in sent):
            return True
        self.take_messages()
        return all(part.is_done for part in sent)

    def refuse(self, stream: Stream, targets: Iterable[int], joined: int) -> None:
        """Tell ``targets`` that they do not get the stream's next payload because rank ``joined`` has joined:
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
        payload_id = self._id_of_led(stream, targets, nbytes) if is_led else 0
        data = b"".join([ctypes.string_at(address, length) for address, length in spans])
        era, me, key = self._matcher.era, self._me, stream.key
        for at, target in enumerate(targets):
            number, due = stream.send(target), dues[at] if dues else -1
            record = peer_protocol.pack(_INLINE, me, era, 0, key, number, nbytes, nbytes, payload_id, 0, due)
            self._outboxes[target].send(record + data)

    def _id_of_led(self, stream: Stream, targets: Sequence[int], nbytes: int) -> int:
        """The id of a payload to receivers that send nothing in return; 0: it is not acknowledged, because one of the
        next is. An acknowledgement from another machine costs as much as a small payload."""
        is_small = nbytes <= _MOST_UNACKNOWLEDGED_BYTES and self._poller is not None
        if is_small and not any(target in self._local_ranks for target in targets):
            stream.led += 1
            if stream.led % _ACKNOWLEDGED:
                return 0
        with self._lock:
            return self._matcher.send(stream, targets, None)

    def _send_over_connections(
        self,
        stream: Stream,
        targets: Sequence[int],
        spans: Sequence[Span],
        is_led: bool,
        dues: Sequence[int],
        owner: object,
    ) -> list[PendingSend]:
        payload_id, nbytes = 0, sum(length for _, length in spans)
        if is_led:
            payload_id = self._id_of_led(stream, targets, nbytes)
        era, me, key = self._matcher.era, self._me, stream.key
        sent: list[PendingSend] = []
        for at, target in enumerate(targets):
            number, due = stream.send(target), dues[at] if dues else -1
            connection = cast(PeerConnection, self._outboxes[target])
            fields = (_INLINE, me, era, 0, key, number, nbytes, nbytes, payload_id, 0, due)
            if self._placed is not None and self._placed.takes(target, nbytes):
                sent.append(self._placed.place(connection, PeerMessage(*fields), spans, owner))
            else:
                sent.append(connection.send_payload(peer_protocol.pack(*fields), spans, owner))
        return sent

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
                    outbox = cast(PeerOutbox, self._outboxes[target])
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

    def shared_slots(self, stream: Stream, slot_bytes: int) -> SharedSlots:
        """Slots for operations in which every member gives bytes to every other, step by step. They are of
        ``slot_bytes`` bytes, and are allocated by the first operation."""
        self._sweep()
        return SharedSlots(self._memory_host, stream, slot_bytes)

    def shared_segment(self, stream: Stream, maker: int, nbytes: int) -> SharedSegment:
        """Memory of ``nbytes`` that the ranks of ``stream``, all of this machine, share; see SharedSegment."""
        return SharedSegment(self._memory_host, stream, maker, nbytes)

    @property
    def _memory_host(self) -> MemoryHost:
        return MemoryHost(
            self._me, self._lock, self._matcher, self._outgoing, self._incoming, self._outboxes,
            self._waiter, self._announce,
        )  # fmt: skip

    def votes(self, name: str, others: Iterable[int]) -> Votes:
        """Votes among this rank and the ranks ``others``, to which it is introduced. Nothing else may use the
        stream of this name."""
        return Votes(self._me, self.stream(name, others), self._matcher, self._outboxes, self._waiter, self._lose)

    def retire(self, slots: SharedSlots, stream: Stream) -> None:
        """The group of ``slots`` has ended on this rank, with no operation under way. Other members may still read
        them, until all have retired theirs: each tells the others on ``stream``, which has no other use."""
        if slots.block is not None:
            self.send(stream, tuple(stream.flows), ((0, 0),), is_led=False)
            self._retired.append((slots, stream))

    def _sweep(self) -> None:
        """Free the slots that all members have retired."""
        for retired in list(self._retired):
            slots, stream = retired
            if all(stream.has_next(source) for source in stream.flows):
                self._retired.remove(retired)
                with self._lock:
                    self._free(slots)

    def _free(self, slots: SharedSlots) -> None:
        block, slots.block = slots.block, None
        if block is not None:
            self._outgoing.free(block)

    # ---- receiving -------------------------------------------------------------------------------------

    def collect(self, receipt: StreamReceipt, timeout_s: float) -> None:
        """Copy the expected payloads to the memory of the receipt; return when all of it is copied. If the call fails,
        the next call continues after the bytes that were copied.

        Raises StallError, MismatchError (once everything has arrived; a payload of another size is dropped),
        JoinedError and the error that ends the session.
        """
        try:
            self._collect(receipt, time.monotonic() + timeout_s)
        finally:
            if receipt.wait is not None:
                self._waiter.ended(receipt.wait)
        receipt.close()
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
                    receipt.stream.posted.pop((source, number), None)
                    left.pop()
                continue
            wait = receipt.wait = receipt.wait or Wait(receipt.stream.name, number, receipt.missing)
            self._await_payload(receipt, wait, source, number, deadline - time.monotonic())

    def abandon(self, receipt: StreamReceipt) -> None:
        """Nothing more is copied to the memory of ``receipt``, which is not collected any more."""
        stream = receipt.stream
        with self._host.state:
            for source, number, *_ in receipt.left:
                stream.posted.pop((source, number), None)
                payload = stream.flows[source].payloads.get(number)
                outbox = self._outboxes.get(source)
                if payload is not None and isinstance(outbox, PeerConnection):
                    outbox.divert(payload)
        receipt.close()

    def await_next(self, streams: Sequence[tuple[Stream, int]], timeout_s: float) -> None:
        """Return when one of the (stream, source) pairs has a payload without a receipt. Raises StallError and the
        error that ends the session."""

        def has_arrived() -> bool:
            return any(stream.has_next(source) for stream, source in streams)

        self.take_messages()
        if not has_arrived():
            self._host.wait_until(has_arrived, timeout_s, lambda: "no message from any rank")

    def poll(self, receipt: StreamReceipt) -> bool:
        """True if ``collect`` would not block. Processes the messages that have arrived."""
        if not receipt.is_there:
            self.take_messages()
        return receipt.is_there

    def take_messages(self) -> None:
        """Process the messages that have arrived. Does not block. Raises the error that ends the session."""
        with self._host.state:
            self._host.check_open()
            while not self._host.is_being_read and self.take_message():
                pass

    def joined_among(self, ranks: Iterable[int]) -> set[int]:
        """The members of ``ranks`` that have no more data."""
        return self._matcher.joined.intersection(ranks)

    def joined_error(self, stream: Stream, joined: Iterable[int]) -> JoinedError:
        """The error of the stream's next operation, which needs the ranks ``joined``."""
        return joined_error(stream.name, min(joined))

    def absent(self, receipt: StreamReceipt) -> list[int]:
        """The ranks that have joined instead of the operation of ``receipt``; see StreamReceipt.absent."""
        return receipt.absent(self._matcher.joined)

    def _await_payload(self, receipt: StreamReceipt, wait: Wait, source: int, number: int, timeout_s: float) -> None:
        payloads = receipt.stream.flows[source].payloads

        def has_arrived() -> bool:
            payload = payloads.get(number)
            if payload is not None and payload.has_news:
                return True
            return bool(payload is None and self.absent(receipt)) or self._outboxes[source].failure is not None

        self._waiter.until(has_arrived, wait, timeout_s)
        payload = payloads.get(number)
        if payload is None and (gone := self.absent(receipt)):
            raise joined_error(receipt.stream.name, gone[0])
        if payload is None or not payload.has_news:
            self._lose(source, wait, timeout_s)

    def _lose(self, source: int, wait: Wait, timeout_s: float) -> NoReturn:
        """The connection to ``source`` has ended before everything has arrived. Raises the error that the services
        report, if they find out in time; otherwise PeerLostError."""
        link = cast(PeerConnection, self._outboxes[source])
        failure = cast(CommunicationError, link.failure)
        patience_s = link.failed_at_s + self.lost_after_s - time.monotonic()
        if patience_s > 0 and not isinstance(failure, IntegrityError):
            with contextlib.suppress(StallError):
                self._waiter.until(lambda: False, wait, min(patience_s, timeout_s), has_spun=True)
            if timeout_s < patience_s:
                raise StallError(f"tensor {wait.name!r}: nothing came from rank {source} within {timeout_s:.3g} s")
        raise type(failure)(f"tensor {wait.name!r}: {failure}")

    def _difference(
        self, stream: Stream, source: int, payload: Payload, nbytes: int, sent: int
    ) -> CommunicationError | None:
        """The error for a payload that has another size than expected, or whose sender expects another size in
        return."""
        if payload.due == peer_protocol.REFUSED:
            return joined_error(stream.name, payload.offset)
        other, own = source, self._me
        if payload.total != nbytes:
            return MismatchError(differing(stream.name, other, payload.total, own, nbytes))
        if payload.due < 0 or sent < 0:
            return None
        return MismatchError(differing(stream.name, own, sent, other, payload.due))

    def _take(self, source: int, payload: Payload, spans: Sequence[Span]) -> bool:
        """Copy the written bytes of a payload to ``spans``. True if that completes it."""
        if payload.has_landed:
            pass
        elif payload.data is not None:
            start = 0
            for address, length in spans:
                part = (
                    payload.data if length == payload.total else bytes(memoryview(payload.data)[start : start + length])
                )
                ctypes.memmove(address, part, length)
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
        return self._inbox.fileno() if self._poller is None else self._poller.fileno()

    def take_message(self) -> bool:
        """Process a message, if one has arrived. Called with the host's ``state`` held while no other thread reads.
        Raises ProtocolError."""
        if self._poller is None:
            return self._take_local_message()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        has_arrived = False
        for fd, events in self._poller.poll(0):
            found = self._link_sockets.get(fd)
            if found is None:
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                    if self._placed is not None:
                        self._placed.inline.run()
                else:
                    self._take_local_message()
            else:
                link, link_socket = found
                if events & select.EPOLLOUT:
                    link.send_waiting(link_socket)
                if events & ~select.EPOLLOUT:
                    link.receive(link_socket)
            has_arrived = True
        return has_arrived

    def _take_local_message(self) -> bool:
        nbytes, fd = self._inbox.receive()
        try:
            if not nbytes:
                return False
            message = peer_protocol.unpack(buffer := self._inbox.buffer, nbytes)
            source = message.source
            if source == self._me or source not in self._local_ranks or message.kind in PLACED_KINDS:
                raise ProtocolError(f"rank {source} is no peer of rank {self._me} on its machine: {message}")
            if message.kind == _WAKE:
                return True  # a waiting thread checks its condition after every message
            if message.kind == _SEGMENT:
                if fd < 0:
                    raise ProtocolError(f"rank {source} announced a segment without its descriptor")
                given, fd = fd, -1
                self._incoming.add(source, message.segment, given, message.total)
                return True
        finally:
            if fd >= 0:  # the message does not use it
                os.close(fd)
        self._on_message(message, bytes(buffer[RECORD_BYTES:nbytes]) if message.kind == _INLINE else None)
        return True

    def on_message(self, message: PeerMessage, data: bytes | Memory | None) -> None:
        """A message of another machine, with its payload. Raises ProtocolError."""
        if message.kind in PLACED_KINDS:
            self._on_placed(message, bytes(data or b""))
            return
        if message.kind not in _BETWEEN_MACHINES:
            raise ProtocolError(f"rank {message.source} shares no memory with rank {self._me}: {message}")
        self._on_message(message, data)

    def land(self, message: PeerMessage) -> PayloadLanding:
        """The payload of ``message``, of another machine, follows. Raises ProtocolError."""
        with self._lock:
            found = self._matcher.land(message) if message.kind == _INLINE else None
        return PayloadLanding(self, message, *(found or (None, None)))

    def _on_placed(self, message: PeerMessage, body: bytes) -> None:
        """A message about what is read by RDMA. Raises ProtocolError."""
        link = self._links[message.source]
        if self._placed is None:
            if message.kind != _MEMORY:
                raise ProtocolError(f"rank {message.source} has placed a payload, and rank {self._me} is without RDMA")
            if message.total:
                link.send(without_memory(self._me, self._matcher.era))
            return
        landed = None
        if message.kind == _PLACED:
            with self._lock:
                found = self._matcher.land(message)
            payload = found[0] if found is not None else None
            landed = functools.partial(self._landed, message._replace(kind=_INLINE, ready=message.total), payload)
        self._placed.take(link, message, body, landed)

    def _landed(self, message: PeerMessage, payload: Payload | None, data: Memory) -> None:
        """A payload was read by RDMA. ``payload``: None: it is of another era."""
        if payload is None:
            self._on_message(message, data)
            return
        with self._lock:
            posted = self._matcher.posted(message)
        if posted is None:
            payload.data = data
        else:
            at = ctypes.addressof(data)
            for address, length in posted.spans:
                ctypes.memmove(address, at, length)
                at += length
            payload.has_landed = True
        payload.ready = payload.total

    def _on_message(self, message: PeerMessage, data: bytes | Memory | None) -> None:
        with self._lock:
            freed = self._matcher.on_message(message, data)
            if freed is not None:
                self._outgoing.free(cast(Block, freed))

    def _receive(self) -> None:
        """Take messages, unless another thread does."""
        with self._host.state, contextlib.suppress(ProtocolError):
            if not self._host.is_being_read:
                self.take_message()

    # ---- join and close --------------------------------------------------------------------------------

    def join(self, tell: Callable[[], None]) -> None:
        """This rank has no more data. ``tell`` sends that to the service; it is called before the peers are told,
        because a peer may join on receiving it, and the service must know of this rank first."""
        if self.directory.includes_all:
            self.directory.wait_for_all()
        tell()
        self._has_joined = True
        for outbox in list(self._outboxes.values()):
            self._send_joined(outbox)

    def _send_joined(self, outbox: PeerOutbox | PeerConnection) -> None:
        outbox.send(peer_protocol.pack(_JOINED, self._me, self._matcher.era, 0, 0, 0, 0, 0, 0, 0, -1))

    def begin_era(self) -> None:
        """All ranks have joined: all streams start again."""
        self._has_joined = False
        with self._lock:
            for block in self._matcher.begin_era():
                self._outgoing.free(cast(Block, block))
            while self._retired:
                self._free(self._retired.pop()[0])

    def close(self, is_forked: bool = False) -> None:
        """Close the sockets and unmap the memory. Messages that were sent still arrive. ``is_forked``: called in a
        forked child."""
        if self._is_closed:
            return
        if self._placed is not None and not is_forked:
            self._placed.close(self._receive, self.lost_after_s)
        self._is_closed = True
        if self.connector is not None:
            self.connector.close(is_forked)
        for outbox in self._outboxes.values():  # they stay in the table: a thread that waits may still look at them
            outbox.close(is_forked)
        self._link_sockets.clear()
        if self._poller is not None:
            self._link_keeper.close(is_forked)
        with contextlib.nullcontext() if is_forked else self._host.state:
            self._inbox.close()
            if self._poller is not None:
                self._background_sender.close(is_forked)
                self._poller.close()
                os.close(self._wake_fd)
        self._retired.clear()
        self._matcher.close()
        self._incoming.close()
        self._outgoing.close()


class PayloadLanding:
    """A large payload from another machine: to the memory of its receipt, if that is there by then and expects as many
    bytes; otherwise to memory of its own, from which it is copied."""

    def __init__(
        self, peers: PeerTransport, message: PeerMessage, payload: Payload | None, posted: Posted | None
    ) -> None:
        self._peers, self._message, self.payload, self._posted = peers, message, payload, posted
        self._own: Memory | None = None
        if posted is not None:
            self.views = views_of(posted.spans)
        else:
            self._own = (ctypes.c_char * message.total)()
            self.views = deque([memoryview(self._own).cast("B")])

    def divert(self) -> None:
        """The memory of the receipt must not be written to any more."""
        if self._posted is None:
            return
        self._own = (ctypes.c_char * self._message.total)()
        own = memoryview(self._own).cast("B")
        done = len(own) - sum(map(len, self.views))
        filled, at = views_of(self._posted.spans), 0
        while at < done:
            view = filled.popleft()[: done - at]
            own[at : at + len(view)] = view
            at += len(view)
        self.views, self._posted = deque([own[done:]]), None

    def complete(self) -> None:
        """The whole payload is here. Raises ProtocolError."""
        payload = self.payload
        if payload is None:  # of another era
            self._peers.on_message(self._message, self._own)
            return
        payload.data, payload.has_landed = self._own, self._own is None
        payload.ready = payload.total
