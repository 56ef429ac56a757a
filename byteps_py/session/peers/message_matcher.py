"""What peers have sent each other: which parcels came, which of one's own are still needed. Pure.

Each stream brings parcels from one rank to another in order: the nth that a sender sends is the nth that the receiver
expects, whoever of them comes first. Not locked: Neighbours calls with the session's lock held, but for ``expect`` and
``send``, whose callers take turns, stream by stream.

All ranks together begin a new era when all have joined: streams start again, and what was not taken is void.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from byteps_py.errors import ProtocolError
from byteps_py.session.peers.peer_protocol import PeerMessage, PeerMessageKind
from byteps_py.tensors import key_of


@dataclass(slots=True, eq=False)
class Parcel:
    """Bytes that came, or come: ``payload``, or ``ready`` bytes so far at ``offset`` of the sender's ``segment``.
    ``done``: how many have been copied from there. ``due``: bytes that its sender expects in turn, or -1."""

    total: int
    payload: bytes | None
    ready: int
    id: int = 0
    segment: int = 0
    offset: int = 0
    due: int = -1
    done: int = 0

    @property
    def has_news(self) -> bool:
        """There is something to be copied, or nothing that is still to come."""
        return self.done < self.ready or self.ready == self.total


@dataclass(slots=True, eq=False)
class Flow:
    """Of one stream, from one rank: parcels that came and have not been taken, by number."""

    parcels: dict[int, Parcel] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Stream:
    """One name, as this rank sees it. ``unacknowledged``: parcels it has sent and somebody may not have taken; counts
    only those that somebody has been asked to acknowledge."""

    name: str
    key: int
    flows: dict[int, Flow]
    sent: dict[int, int]
    expected: dict[int, int]
    unacknowledged: int = 0

    def send(self, target: int) -> int:
        """The number of the next parcel to ``target``."""
        number = self.sent[target] = self.sent.get(target, 0) + 1
        return number

    def expect(self, source: int) -> int:
        """The number of the next parcel from ``source``."""
        number = self.expected[source] = self.expected.get(source, 0) + 1
        return number

    def has_next(self, source: int) -> bool:
        """True if the next parcel from ``source`` that nobody expects yet is there, or begins to be."""
        return self.expected.get(source, 0) + 1 in self.flows[source].parcels


@dataclass(slots=True, eq=False)
class _Sent:
    stream: Stream
    block: object
    takers: set[int]


class MessageMatcher:
    """``me``: this rank's number on its machine."""

    #: Messages of the next era that may come before this rank hears of it; flows of streams that it does not know yet;
    #: parcels of one flow that it has not taken. More can't come from correct ranks.
    most_early = 1 << 20

    def __init__(self, me: int) -> None:
        self.me = me
        self.era = 0
        self.joined: set[int] = set()  # peers that have no more data
        self._flows: dict[tuple[int, int], Flow] = {}  # by stream and source
        self._unclaimed: dict[tuple[int, int], Flow] = {}  # the same, of what this rank has no stream for
        self._streams: dict[int, Stream] = {}
        self._coming: dict[tuple[int, int], Parcel] = {}  # by source and id: not complete yet
        self._sent: dict[int, _Sent] = {}
        self._last_id = 0
        self._early: list[tuple[PeerMessage, bytes | None]] = []

    def stream(self, name: str, others: Iterable[int]) -> Stream:
        """The stream of this name between this rank and ``others``."""
        key = key_of(name)
        stream = self._streams.get(key)
        if stream is None:
            flows = {other: self._unclaimed.pop((key, other), Flow()) for other in others}
            self._flows.update({(key, other): flow for other, flow in flows.items()})
            stream = self._streams[key] = Stream(name, key, flows, {}, {})
        return stream

    def send(self, stream: Stream, targets: Iterable[int], block: object) -> int:
        """Note a parcel that these are to acknowledge; returns its id. ``block``: where it lies, if anywhere."""
        parcel_id = self.new_id()
        self._sent[parcel_id] = _Sent(stream, block, set(targets))
        stream.unacknowledged += 1
        return parcel_id

    def new_id(self) -> int:
        """Of the next parcel that this rank lays."""
        self._last_id += 1
        return self._last_id

    def takers(self, stream: Stream) -> set[int]:
        """Who has not taken all that it has been sent."""
        return set().union(*(sent.takers for sent in list(self._sent.values()) if sent.stream is stream))

    def came(self, message: PeerMessage, payload: bytes | None) -> object:
        """A message came. Returns the block that nobody needs any more because of it, or None. Raises ProtocolError.
        SEGMENT is not for the ledger."""
        kind, source = message.kind, message.source
        if message.era != self.era:
            if message.era == self.era + 1 and len(self._early) < self.most_early:
                self._early.append((message, payload))
            elif message.era > self.era:
                raise ProtocolError(f"local rank {source} is in era {message.era}, this one in {self.era}")
            return None
        if kind == PeerMessageKind.TAKEN:
            return self._taken(message.id, source)
        if kind == PeerMessageKind.MORE:
            parcel = self._coming.get((source, message.id))
            if parcel is None:
                raise ProtocolError(f"local rank {source} has more of a parcel that it never began")
            if message.total != parcel.total or message.ready < parcel.ready:
                raise ProtocolError(
                    f"local rank {source} has {message.ready} of {message.total} bytes of a parcel, after "
                    f"{parcel.ready} of {parcel.total}"
                )
            parcel.ready = message.ready
            if parcel.ready == parcel.total:
                del self._coming[source, message.id]
        elif kind == PeerMessageKind.JOINED:
            self.joined.add(source)
        else:
            parcel = Parcel(
                message.total, payload, message.ready, message.id, message.segment, message.offset, message.due
            )
            flow = self._flow(message.stream, source)
            if message.number in flow.parcels:
                raise ProtocolError(f"local rank {source} sent parcel {message.number} of a stream twice")
            if len(flow.parcels) >= self.most_early:
                raise ProtocolError(f"local rank {source} sends too much that nobody takes")
            is_coming = payload is None and parcel.ready < parcel.total
            if is_coming and (source, message.id) in self._coming:
                raise ProtocolError(f"local rank {source} has begun parcel {message.id} twice")
            flow.parcels[message.number] = parcel
            if is_coming:
                self._coming[source, message.id] = parcel
        return None

    def start_anew(self) -> list[object]:
        """All ranks have joined. Returns the blocks that are not needed any more."""
        blocks = [sent.block for sent in self._sent.values() if sent.block is not None]
        self.era += 1
        self.joined.clear()
        self._sent.clear()
        self._coming.clear()
        self._unclaimed.clear()
        for flow in self._flows.values():
            flow.parcels.clear()
        for stream in self._streams.values():
            stream.sent.clear()
            stream.expected.clear()
            stream.unacknowledged = 0
        early, self._early = self._early, []
        for message, payload in early:
            self.came(message, payload)
        return blocks

    def _flow(self, key: int, source: int) -> Flow:
        flow = self._flows.get((key, source)) or self._unclaimed.get((key, source))
        if flow is None:
            if len(self._unclaimed) >= self.most_early:
                raise ProtocolError(f"local rank {source} sends too much of streams that are not known here")
            flow = self._unclaimed[key, source] = Flow()
        return flow

    def _taken(self, id_: int, source: int) -> object:
        sent = self._sent.get(id_)
        if sent is None or source not in sent.takers:
            raise ProtocolError(f"local rank {source} has taken a parcel that was not for it")
        sent.takers.discard(source)
        if sent.takers:
            return None
        del self._sent[id_]
        sent.stream.unacknowledged -= 1
        return sent.block
