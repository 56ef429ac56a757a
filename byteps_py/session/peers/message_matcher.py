"""Matches the payloads that peers have sent with the receipts of this rank, and acknowledgements with its own payloads.
Pure.

Each stream brings payloads from one rank to another in order: the nth that a sender sends is the nth that the receiver
expects, whichever of the two calls first. Not locked: PeerTransport calls with its lock held, except for ``expect`` and
``Stream.send``, whose callers take turns, stream by stream.

When all ranks have joined, all of them begin a new era: streams start again, and payloads that were not taken are void.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from byteps_py.errors import CommunicationError, JoinedError, ProtocolError
from byteps_py.session.peers.peer_protocol import PeerMessage, PeerMessageKind
from byteps_py.session.peers.waiting import Wait
from byteps_py.tensors import key_of

#: (address, length in bytes) of a range of this process's memory.
Span = tuple[int, int]
#: Memory for a payload that has no receipt.
Memory = ctypes.Array[ctypes.c_char]
#: Larger payloads from another machine go straight to their destination, if their receipt is there first.
LANDING_BYTES = 8 << 10


@dataclass(slots=True, eq=False)
class Payload:
    """Bytes from a peer, perhaps not complete yet: ``data``, or the first ``ready`` of ``total`` bytes at ``offset`` of
    the sender's ``segment``. ``done``: bytes copied from there so far. ``due``: bytes that the sender expects in
    return; -1: it does not say. ``id``: for the acknowledgement; 0: none is needed. ``has_landed``: the bytes are where
    the receipt wants them."""

    total: int
    data: bytes | Memory | None
    ready: int
    id: int = 0
    segment: int = 0
    offset: int = 0
    due: int = -1
    done: int = 0
    has_landed: bool = False

    @property
    def has_news(self) -> bool:
        """True if there are bytes to copy, or if no more will arrive."""
        return self.done < self.ready or self.ready == self.total


@dataclass(slots=True, eq=False)
class Flow:
    """The payloads of one stream from one rank that have arrived and have not been taken, by number."""

    payloads: dict[int, Payload] = field(default_factory=dict)


class Posted(NamedTuple):
    """The destination of a payload of ``nbytes`` bytes. ``owner`` keeps the memory of ``spans``."""

    spans: Sequence[Span]
    nbytes: int
    owner: object


@dataclass(slots=True, eq=False)
class Stream:
    """The payloads under one name between this rank and others. ``flows``: by rank. ``sent``, ``expected``: how
    many payloads, by rank. ``unacknowledged``: payloads of this rank that at least one receiver was asked to
    acknowledge and has not. ``led``: payloads to receivers of other machines that
    send nothing in return. ``posted``: the receipts of large payloads, by source and number."""

    name: str
    key: int
    flows: dict[int, Flow]
    sent: dict[int, int]
    expected: dict[int, int]
    unacknowledged: int = 0
    led: int = 0
    posted: dict[tuple[int, int], Posted] = field(default_factory=dict)

    def send(self, target: int) -> int:
        """The number of the next payload to ``target``."""
        number = self.sent[target] = self.sent.get(target, 0) + 1
        return number

    def expect(self, source: int) -> int:
        """The number of the next payload from ``source``."""
        number = self.expected[source] = self.expected.get(source, 0) + 1
        return number

    def has_next(self, source: int) -> bool:
        """True if the next payload from ``source`` that has no receipt is here, at least in part."""
        return self.expected.get(source, 0) + 1 in self.flows[source].payloads


@dataclass(slots=True, eq=False)
class StreamReceipt:
    """The payloads that one operation expects from a stream. The threads of one operation take turns.

    ``left``: (source, number, spans, bytes, bytes sent in return or -1), the next one last. ``error``: a difference
    between the received and the expected size. ``is_mutual``: every member expects a payload of every other, and no
    member begins without one that has joined. ``dependents``: further ranks, which can't complete the operation before
    this receipt is complete. ``owner`` keeps the memory of all spans.
    """

    stream: Stream
    left: list[tuple[int, int, Sequence[Span], int, int]] = field(default_factory=list)
    wait: Wait | None = None
    error: CommunicationError | None = None
    is_mutual: bool = False
    owner: object = None
    dependents: Collection[int] = ()

    def expect(self, source: int, spans: Sequence[Span], nbytes: int, sent: int = -1) -> None:
        """The stream's next payload from ``source``, ``nbytes`` long, goes to ``spans``. ``sent``: bytes that this rank
        sends to ``source`` in return, and that ``source`` should expect; -1: nothing to compare."""
        number = self.stream.expect(source)
        self.left.append((source, number, spans, nbytes, sent))
        if nbytes > LANDING_BYTES:
            self.stream.posted[source, number] = Posted(spans, nbytes, self.owner)

    def close(self) -> None:
        """Nothing more is copied. Does not keep the memory any longer."""
        self.owner = self.wait = None

    @property
    def is_there(self) -> bool:
        """True if everything has arrived."""
        flows = self.stream.flows
        payloads = (flows[source].payloads.get(number) for source, number, _, _, _ in self.left)
        return all(payload is not None and payload.ready == payload.total for payload in payloads)

    def missing(self) -> list[int]:
        """The ranks from which nothing has arrived yet."""
        flows = self.stream.flows
        return [source for source, number, _, _, _ in self.left if number not in flows[source].payloads]

    def absent(self, joined: Collection[int]) -> list[int]:
        """Ranks that have joined instead of the operation. ``joined``: all ranks that have joined. If the operation is
        mutual, each of them counts, whichever payload is due next: ranks that know of one do not begin."""
        if not joined:
            return []
        flows = self.stream.flows
        expected = self.left if self.is_mutual else self.left[-1:]
        silent = [rank for rank, number, *_ in expected if rank in joined and number not in flows[rank].payloads]
        return [*silent, *(rank for rank in self.dependents if rank in joined)]


@dataclass(slots=True, eq=False)
class _Sent:
    """A payload that ``takers`` have yet to acknowledge. ``block``: its memory, or None."""

    stream: Stream
    block: object
    takers: set[int]


class MessageMatcher:
    """``me``: the rank of this process."""

    #: The most messages of the next era before this rank has begun it, flows of streams that it does not know yet, and
    #: payloads of one flow that it has not taken. Correct ranks stay far below.
    most_early = 1 << 20

    def __init__(self, me: int) -> None:
        self.me = me
        self.era = 0
        self.joined: set[int] = set()  # peers that have no more data
        self._flows: dict[tuple[int, int], Flow] = {}  # by stream and source
        self._unclaimed: dict[tuple[int, int], Flow] = {}  # the same, of streams that this rank has not opened yet
        self._streams: dict[int, Stream] = {}
        self._coming: dict[tuple[int, int], Payload] = {}  # by source and id: incomplete ones
        self._sent: dict[int, _Sent] = {}
        self._last_id = 0
        self._early: list[tuple[PeerMessage, bytes | Memory | None]] = []

    def stream(self, name: str, others: Iterable[int]) -> Stream:
        """The stream of this name between this rank and the ranks ``others``."""
        key = key_of(name)
        stream = self._streams.get(key)
        if stream is None:
            flows = {other: self._unclaimed.pop((key, other), Flow()) for other in others}
            self._flows.update({(key, other): flow for other, flow in flows.items()})
            stream = self._streams[key] = Stream(name, key, flows, {}, {})
        return stream

    def send(self, stream: Stream, targets: Iterable[int], block: object) -> int:
        """Record a payload that ``targets`` are to acknowledge. Returns its id. ``block``: its memory, or None."""
        payload_id = self.new_id()
        self._sent[payload_id] = _Sent(stream, block, set(targets))
        stream.unacknowledged += 1
        return payload_id

    def new_id(self) -> int:
        """The id of the next payload."""
        self._last_id += 1
        return self._last_id

    def takers(self, stream: Stream) -> set[int]:
        """The ranks that have not acknowledged all payloads of ``stream``."""
        return set().union(*(sent.takers for sent in list(self._sent.values()) if sent.stream is stream))

    def on_message(self, message: PeerMessage, data: bytes | Memory | None) -> object:
        """Process a message, and for INLINE its bytes. Returns the block that is free after it, or None. PeerTransport
        handles SEGMENT and WAKE itself. Raises ProtocolError."""
        kind, source = message.kind, message.source
        if message.era != self.era:
            if message.era == self.era + 1 and len(self._early) < self.most_early:
                self._early.append((message, data))
            elif message.era > self.era:
                raise ProtocolError(f"rank {source} is in era {message.era}, this one in {self.era}")
            return None
        if kind == PeerMessageKind.TAKEN:
            return self._on_taken(message.id, source)
        if kind == PeerMessageKind.MORE:
            payload = self._coming.get((source, message.id))
            if payload is None:
                raise ProtocolError(f"rank {source} continues a payload that it never began")
            if message.total != payload.total or message.ready < payload.ready:
                raise ProtocolError(
                    f"rank {source} has written {message.ready} of {message.total} bytes of a payload, after "
                    f"{payload.ready} of {payload.total}"
                )
            payload.ready = message.ready
            if payload.ready == payload.total:
                del self._coming[source, message.id]
        elif kind == PeerMessageKind.JOINED:
            self.joined.add(source)
        else:
            self._add(message, data, message.ready)
        return None

    def land(self, message: PeerMessage) -> tuple[Payload, Posted | None] | None:
        """The payload of an INLINE message has begun to arrive. Returns it, and its receipt if that expects as many
        bytes; the receiver sets ``ready``. None: it is of another era, and is for ``on_message`` once all of it is
        here. Raises ProtocolError."""
        if message.era != self.era:
            return None
        payload = self._add(message, None, 0, is_coming=False)
        return payload, self.posted(message)

    def posted(self, message: PeerMessage) -> Posted | None:
        """The receipt of a payload, if there is one that expects as many bytes."""
        stream = self._streams.get(message.stream)
        posted = None if stream is None else stream.posted.get((message.source, message.number))
        return posted if posted is not None and posted.nbytes == message.total else None

    def _add(self, message: PeerMessage, data: bytes | Memory | None, ready: int, is_coming: bool = True) -> Payload:
        """A payload has arrived, or its first ``ready`` bytes. ``is_coming``: MORE messages follow if it is
        incomplete."""
        source = message.source
        payload = Payload(message.total, data, ready, message.id, message.segment, message.offset, message.due)
        flow = self._flow(message.stream, source)
        if message.number in flow.payloads:
            raise ProtocolError(f"rank {source} sent payload {message.number} of a stream twice")
        if len(flow.payloads) >= self.most_early:
            raise ProtocolError(f"rank {source} sends more than this rank takes")
        is_coming = is_coming and data is None and ready < payload.total
        if is_coming and (source, message.id) in self._coming:
            raise ProtocolError(f"rank {source} began payload {message.id} twice")
        flow.payloads[message.number] = payload
        if is_coming:
            self._coming[source, message.id] = payload
        return payload

    def close(self) -> None:
        """Keep no payloads any longer."""
        for flow in (*self._flows.values(), *self._unclaimed.values()):
            flow.payloads.clear()

    def begin_era(self) -> list[object]:
        """All ranks have joined. Returns the blocks that are free now."""
        blocks = [sent.block for sent in self._sent.values() if sent.block is not None]
        self.era += 1
        self.joined.clear()
        self._sent.clear()
        self._coming.clear()
        self._unclaimed.clear()
        for flow in self._flows.values():
            flow.payloads.clear()
        for stream in self._streams.values():
            stream.sent.clear()
            stream.expected.clear()
            stream.unacknowledged = 0
            stream.posted.clear()
        early, self._early = self._early, []
        for message, data in early:
            self.on_message(message, data)
        return blocks

    def _flow(self, key: int, source: int) -> Flow:
        flow = self._flows.get((key, source)) or self._unclaimed.get((key, source))
        if flow is None:
            if len(self._unclaimed) >= self.most_early:
                raise ProtocolError(f"rank {source} sends too much on streams that are not open here")
            flow = self._unclaimed[key, source] = Flow()
        return flow

    def _on_taken(self, id_: int, source: int) -> object:
        sent = self._sent.get(id_)
        if sent is None or source not in sent.takers:
            raise ProtocolError(f"rank {source} acknowledged a payload that was not for it")
        sent.takers.discard(source)
        if sent.takers:
            return None
        del self._sent[id_]
        sent.stream.unacknowledged -= 1
        return sent.block


def joined_error(name: str, rank: int) -> JoinedError:
    """The error of an operation that needs ``rank`` after ``rank`` has joined."""
    return JoinedError(f"tensor {name!r}: this operation needs all ranks, but rank {rank} has called join()")
