"""The other machines' communication services: what this one fetches from them, and they from it.

Owned by the loop's thread. Connections are made when they are first needed, so a job that only reduces has none.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from byteps_py.config.settings import Settings
from byteps_py.dataplane.listener import Peer, RemotePeer
from byteps_py.dataplane.placed_messages import PlacedTracker
from byteps_py.dataplane.rdma_lane import RdmaLane
from byteps_py.dataplane.traffic import Traffic
from byteps_py.errors import BytePSError, ProtocolError, from_name
from byteps_py.runtime import Runtime
from byteps_py.system import machine
from byteps_py.wire.data_link import Fetch, Header, Kind
from byteps_py.worker.core.pieces import PieceRequest, Receipt, Receipts, Transfer, Way
from byteps_py.worker.core.tensor import AskSum, SumRequest
from byteps_py.worker.core.topology import Topology
from byteps_py.worker.io.railed_link import RailedLink
from byteps_py.worker.io.server_links import LinkEvents, LinkOrigin, LinkTarget, TcpLink

#: What came whole is said so late by itself: most ranks ask for the next round's piece before.
_SAY_S = 0.005
#: Requests that may come before it is known here that the group is complete.
_MAX_EARLY = 1 << 16

Then = Callable[[zmq.Frame], None]
Refused = Callable[[BytePSError], None]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that has no answer yet."""

    machine: int
    header: Header
    body: bytes
    then: Then
    refused: Refused
    way: Way | None = None  # of a piece, not of a sum
    total: int = 0


#: What is being sent from where it lies, and what to do when it has left; without a tracker: when all before has.
_Leaving = tuple[zmq.MessageTracker | PlacedTracker | None, Callable[[], None] | None]


class PeerMachines:
    """Listens from the start on; ``open`` once the other machines are known.

    ``on_request``: another machine wants a piece, or has got it; ``on_gone``: it is gone.
    """

    receipts_class: type[Receipts] = Receipts
    link_class: type[TcpLink] = RailedLink

    def __init__(
        self,
        runtime: Runtime,
        settings: Settings,
        on_request: Callable[[PieceRequest | SumRequest | Receipt], None],
        on_gone: Callable[[int], None],
    ) -> None:
        self._runtime = runtime
        self._loop = runtime.loop
        self._settings = settings
        self._on_request = on_request
        self._on_gone = on_gone
        self.traffic = Traffic()
        self.bytes_received = 0  # as answers
        self._listener = runtime.data_listener(
            machine.bindable_host(settings),
            settings,
            self.traffic,
            frozenset((Kind.FETCH, Kind.FETCH_SUM, Kind.TAKEN)),
            self._requested,
            self._gone,
        )
        if settings.rdma:
            self._listener.await_rdma()
        self._listener.attach(self._loop)
        self._context = runtime.zmq_context()
        self._rdma: RdmaLane | None = None
        self._topology: Topology | None = None
        self._on_lost: Callable[[str, int], None] | None = None
        self._links: dict[int, TcpLink] = {}
        self._epoch = 0  # that the group began with
        self._numbers = itertools.count()
        self._fetched: dict[int, _Asked] = {}  # by number of the request
        self._receipts = self.receipts_class()
        self._is_saying = False  # a timer runs
        self._early: list[tuple[Header, Peer, zmq.Frame]] = []
        self._leaving: list[_Leaving] = []
        self._is_watching = False  # a timer runs

    @property
    def address(self) -> str:
        """``tcp://host:port``."""
        return self._listener.address

    def open(self, topology: Topology, on_lost: Callable[[str, int], None], rdma: RdmaLane | None = None) -> None:
        """Ask and answer from now on. ``on_lost(sentence, machine)``: its machine can't be reached. ``rdma``: by which
        payloads travel; None: over connections."""
        self._topology, self._on_lost = topology, on_lost
        self._epoch = topology.group
        self._rdma = rdma
        if rdma is not None:
            self._listener.use_rdma(rdma)
        early, self._early = self._early, []
        for message in early:
            self._requested(*message)

    def leave(self) -> None:
        """The group is over: what it asked for is not wanted any more, nor given."""
        self._topology = None
        for link in self._links.values():
            link.close()
        self._links.clear()
        if self._rdma is not None:
            self._rdma = None
            self._listener.await_rdma()
        self._fetched.clear()
        self._receipts.clear()
        self._leaving.clear()

    @property
    def _me(self) -> int:
        return self._settings.worker_id if self._topology is None else self._topology.machine_index

    # ---- asking ----------------------------------------------------------------------------------------

    def fetch(self, item: Transfer | AskSum, then: Then, refused: Refused) -> None:
        header = self._header(Kind.FETCH, item.round)
        header.length = item.length
        if isinstance(item, AskSum):
            tensor = item.part.tensor
            header.kind, header.key, header.generation = Kind.FETCH_SUM, tensor.key, tensor.generation
            header.offset = item.part.index
            asked = _Asked(item.server, header, b"", then, refused)
        else:
            header.key, header.offset = item.channel.key, item.offset
            way = Way(item.server, header.key, item.channel.ranks[item.source], item.target)
            fetch = Fetch(way.source, way.target, item.total, item.is_tentative, self._receipts.say(way))
            asked = _Asked(item.server, header, fetch.pack(), then, refused, way, item.total)
        self._fetched[header.index] = asked
        self._link(item.server).ask(header, asked.body)

    def _header(self, kind: Kind, round_: int) -> Header:
        return Header(kind, self._me, self._epoch, index=next(self._numbers) & 0xFFFFFFFF, round=round_)

    def _again(self, machine_index: int) -> None:
        """The connection was made anew: what was asked may be lost, or its answer. Asking twice does no harm."""
        for asked in [each for each in self._fetched.values() if each.machine == machine_index]:
            self._link(machine_index).ask(asked.header, asked.body)
        for way, round_ in self._receipts.sent_to(machine_index):
            self._say(way, round_)

    def _say(self, way: Way, round_: int) -> None:
        """A piece has come."""
        header = self._header(Kind.TAKEN, round_)
        header.key = way.key
        self._link(way.machine).ask(header, Fetch(way.source, way.target, 0, taken=round_).pack())

    def _say_due(self) -> None:
        self._is_saying = False
        for way, round_ in self._receipts.take_due():
            self._say(way, round_)

    def _link(self, machine_index: int) -> TcpLink:
        link, on_lost = self._links.get(machine_index), self._on_lost
        if link is None:
            if self._topology is None or on_lost is None:
                raise ProtocolError("a piece is to be fetched before the other machines are known")
            link = self._links[machine_index] = self.link_class(
                LinkOrigin(self._context, self._runtime, self._me, self._settings, _no_payload, self._rdma),
                LinkTarget(
                    self._topology.workers[machine_index].address,
                    f"communication service of machine {machine_index}",
                    self._topology.group,
                    is_late=True,  # it is a member: a process that does not know this group has its port by now
                    link_mbit=min(self._topology.workers[machine_index].link_mbit, self._topology.me.link_mbit),
                ),
                LinkEvents(
                    self._answered,
                    functools.partial(self._again, machine_index),
                    lambda sentence: on_lost(sentence, machine_index),
                ),
            )
        return link

    def _answered(self, header: Header, frame: zmq.Frame | None) -> None:
        if header.kind not in (Kind.ANSWER, Kind.REFUSED) or frame is None:
            raise ProtocolError(f"a communication service sent a {header.kind.name} message for an answer")
        self.bytes_received += len(frame)
        asked = self._fetched.pop(header.index, None)
        if asked is None:
            return  # it says again what an earlier answer has said
        if header.kind is Kind.REFUSED:
            error, _, text = frame.bytes.decode(errors="replace").partition("\n")
            asked.refused(from_name(error, text))
            return
        if asked.way is not None:
            self._receipts.arrived(asked.way, asked.header.round, len(frame), asked.total)
            if self._receipts.are_due and not self._is_saying:
                self._is_saying = True
                self._loop.call_later(_SAY_S, self._say_due)
        asked.then(frame)

    # ---- answering -------------------------------------------------------------------------------------

    def _requested(self, header: Header, peer: Peer, frame: zmq.Frame) -> None:
        if header.epoch < self._epoch:
            return  # of a group that is over, as is the machine that asked
        # The machine that asks may have heard sooner that the group is complete.
        if self._topology is None or header.epoch > self._epoch:
            if len(self._early) < _MAX_EARLY:  # more no correct machine sends
                self._early.append((header, peer, frame))
            return
        try:
            for event in events_of(header, peer, frame.bytes):
                self._on_request(event)
        except BytePSError as error:
            self.traffic.note("refused a request of", f"machine {peer.machine}", error)
            if header.kind is not Kind.TAKEN:  # the machine that asked ends the job: its ranks can't go on
                peer.refuse(header, f"{type(error).__name__}\n{error}")

    def _gone(self, peer: Peer) -> None:
        """A connection has ended. What its machine asks for on a newer one, perhaps already, is wanted."""
        if self._listener.peer_of(peer.machine) is None:
            self._on_gone(peer.machine)

    def refuse(self, origin: object, error: BytePSError) -> None:
        peer, header = _origin(origin)
        peer.refuse(header, f"{type(error).__name__}\n{error}")

    def serve(self, origin: object, view: memoryview, then: Callable[[], None] | None = None) -> None:
        """A machine that is gone has to ask again: nothing has left for it, and ``then`` is not called."""
        peer, header = _origin(origin)
        if len(view) < self._runtime.thresholds.copied_answer:
            if peer.give(header, zmq.Frame(view, copy=True)) and then is not None:
                then()
            return
        tracker = peer.lend(header, view)
        if tracker is not None:
            self._leaving.append((tracker, then))
            self._watch()

    def when_left(self, then: Callable[[], None]) -> None:
        """Call ``then`` once all that is being sent by now has left."""
        if not self._leaving:
            then()
            return
        self._leaving.append((None, then))
        self._watch()

    def _watch(self) -> None:
        if not self._is_watching:
            self._is_watching = True
            self._loop.call_later(self._runtime.thresholds.sent_check_s, self._check_sent)

    def _check_sent(self) -> None:
        self._is_watching = False
        left, leaving = list[Callable[[], None] | None](), list[_Leaving]()
        for tracker, then in self._leaving:
            if tracker.done if tracker is not None else not leaving:
                left.append(then)
            else:
                leaving.append((tracker, then))
        self._leaving = leaving
        for then in filter(None, left):
            then()
        if self._leaving:
            self._watch()

    def close(self) -> None:
        self._listener.detach(self._loop)
        for link in self._links.values():
            link.close()
        self._context.term()
        self._listener.close()


def _origin(origin: object) -> tuple[RemotePeer, Header]:
    if not (isinstance(origin, tuple) and isinstance(origin[0], RemotePeer)):
        raise ProtocolError("an answer to no request")
    return origin


def events_of(header: Header, peer: Peer, payload: bytes) -> list[PieceRequest | SumRequest | Receipt]:
    """What a FETCH, a FETCH_SUM or a TAKEN says, in order. Raises ProtocolError."""
    if header.kind is Kind.FETCH_SUM:
        number = header.generation
        return [SumRequest((peer, header), peer.machine, header.key, number, header.offset, header.round)]
    fetch = Fetch.unpack(payload)
    events: list[PieceRequest | SumRequest | Receipt] = []
    if fetch.taken:
        events.append(Receipt(peer.machine, header.key, fetch.taken, fetch.source, fetch.target))
    if header.kind is Kind.FETCH:
        request = PieceRequest(
            (peer, header), peer.machine, header.key, header.round, fetch.source, fetch.target, header.offset,
            header.length, fetch.total, fetch.is_tentative,
        )  # fmt: skip
        events.append(request)
    return events


def _no_payload(*_: object) -> memoryview:
    raise ProtocolError("a request has no payload of its own")
