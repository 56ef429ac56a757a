"""The other machines' communication services: what this one fetches from them, and they from it.

Owned by the loop's thread. Connections are made when they are first needed, so a job that only reduces has none.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from byteps_py import machine
from byteps_py.dataplane.dialer import COPY_BYTES
from byteps_py.dataplane.listener import DataListener, RemotePeer
from byteps_py.dataplane.peer import Peer
from byteps_py.dataplane.strangers import SWEEP_S
from byteps_py.dataplane.traffic import Traffic
from byteps_py.errors import BytePSError, ProtocolError, from_name
from byteps_py.loop import EventLoop
from byteps_py.settings import Settings
from byteps_py.wire import Fetch, Header, Kind
from byteps_py.worker.actions import AskSum
from byteps_py.worker.links import OnLost, TcpLink
from byteps_py.worker.pieces import Request, Transfer
from byteps_py.worker.tensor import SumRequest
from byteps_py.worker.topology import Topology

#: A frame that can't be sent from where it lies is sent in time so short that nothing sooner is worth asking.
_SENT_CHECK_S = 0.001

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


class PeerMachines:
    """Listens from the start on; ``open`` once it is known who the others are.

    ``on_request``: another machine wants a piece; ``on_gone``: it is gone.
    """

    def __init__(
        self,
        loop: EventLoop,
        settings: Settings,
        on_request: Callable[[Request | SumRequest], None],
        on_gone: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._settings = settings
        self._on_request = on_request
        self._traffic = Traffic()
        self._listener = DataListener(
            machine.offered_host(settings),
            settings,
            self._traffic,
            frozenset((Kind.FETCH, Kind.FETCH_SUM)),
            self._requested,
            lambda peer: on_gone(peer.machine),
        )
        loop.add_reader(self._listener.socket, self._listener.on_readable)
        loop.add_reader(self._listener.monitor, self._listener.on_monitor)
        loop.call_later(SWEEP_S, self._sweep)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._topology: Topology | None = None
        self._on_lost: OnLost | None = None
        self._links: dict[int, TcpLink] = {}
        self._epoch = 0  # since which the group is the same
        self._received = 0  # by links that are gone
        self._numbers = itertools.count()
        self._fetched: dict[int, _Asked] = {}  # by number of the request
        self._early: list[tuple[Header, Peer, zmq.Frame]] = []
        self._leaving: list[tuple[zmq.MessageTracker, Callable[[], None]]] = []

    def _sweep(self) -> None:
        self._listener.sweep()
        self._loop.call_later(SWEEP_S, self._sweep)

    @property
    def address(self) -> str:
        """``tcp://host:port``."""
        return self._listener.address

    @property
    def bytes_sent(self) -> int:
        return self._traffic.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._received + sum(link.bytes_received for link in self._links.values())

    def open(self, topology: Topology, on_lost: OnLost) -> None:
        """Ask and answer from now on. ``on_lost``: a connection is found broken."""
        self._topology, self._on_lost = topology, on_lost
        self._epoch = topology.epoch
        early, self._early = self._early, []
        for message in early:
            self._requested(*message)

    def leave(self) -> None:
        """The group is over: what it asked for is not wanted any more, nor given."""
        self._topology = None
        for link in self._links.values():
            self._received += link.bytes_received
            link.close()
        self._links.clear()
        self._fetched.clear()

    @property
    def _me(self) -> int:
        return self._settings.worker_id if self._topology is None else self._topology.machine_index

    # ---- asking ----------------------------------------------------------------------------------------

    def fetch(self, item: Transfer | AskSum, then: Then, refused: Refused) -> None:
        number = next(self._numbers) & 0xFFFFFFFF
        header = Header(Kind.FETCH, self._me, self._epoch, index=number, round=item.round, length=item.length)
        if isinstance(item, AskSum):
            tensor = item.part.tensor
            header.kind, header.key, header.generation = Kind.FETCH_SUM, tensor.key, tensor.generation
            header.offset = item.part.index
            body = b""
        else:
            header.key, header.offset = item.channel.key, item.offset
            body = Fetch(item.channel.ranks[item.source], item.target, item.total, item.is_tentative).pack()
        self._fetched[number] = _Asked(item.server, header, body, then, refused)
        self._link(item.server).ask(header, body)

    def _again(self, machine_index: int) -> None:
        """The connection was made anew: what was asked may be lost, or its answer. Asking twice does no harm."""
        for asked in [each for each in self._fetched.values() if each.machine == machine_index]:
            self._link(machine_index).ask(asked.header, asked.body)

    def _link(self, machine_index: int) -> TcpLink:
        link = self._links.get(machine_index)
        if link is None:
            if self._topology is None or self._on_lost is None:
                raise ProtocolError("a piece is to be fetched before it is known from whom")
            link = self._links[machine_index] = TcpLink(
                self._context,
                self._loop,
                self._topology.workers[machine_index].address,
                self._me,
                self._settings,
                _no_payload,
                self._answered,
                functools.partial(self._again, machine_index),
                self._on_lost,
                f"communication service of machine {machine_index}",
            )
        return link

    def _answered(self, header: Header, frame: zmq.Frame | None) -> None:
        if header.kind not in (Kind.ANSWER, Kind.REFUSED) or frame is None:
            raise ProtocolError(f"a communication service sent a {header.kind.name} message for an answer")
        asked = self._fetched.pop(header.index, None)
        if asked is None:
            return  # it says again what an earlier answer has said
        if header.kind is Kind.REFUSED:
            error, _, text = frame.bytes.decode(errors="replace").partition("\n")
            asked.refused(from_name(error, text))
        else:
            asked.then(frame)

    # ---- answering -------------------------------------------------------------------------------------

    def _requested(self, header: Header, peer: Peer, frame: zmq.Frame) -> None:
        if header.epoch < self._epoch:
            return  # of a group that is no more, and so is who asked
        if self._topology is None or header.epoch > self._epoch:  # who asks heard sooner that the group is complete
            self._early.append((header, peer, frame))
            return
        try:
            self._on_request(_request(header, peer, frame))
        except BytePSError as error:
            # The one who asked ends the job: it has the ranks that can't go on.
            self._traffic.note("refused a request of", f"machine {peer.machine}", error)
            peer.refuse(header, f"{type(error).__name__}\n{error}")

    def refuse(self, origin: object, error: BytePSError) -> None:
        peer, header = _origin(origin)
        peer.refuse(header, f"{type(error).__name__}\n{error}")

    def serve(self, origin: object, view: memoryview, then: Callable[[], None]) -> None:
        peer, header = _origin(origin)
        if len(view) < COPY_BYTES:
            peer.answer(header, zmq.Frame(view, copy=True))
            then()
            return
        tracker = peer.lend(header, view)
        if tracker is None:
            then()  # it is gone; it asks again if it comes back
            return
        if not self._leaving:
            self._loop.call_later(_SENT_CHECK_S, self._check_sent)
        self._leaving.append((tracker, then))

    def _check_sent(self) -> None:
        leaving, self._leaving = self._leaving, []
        for tracker, then in leaving:
            if tracker.done:
                then()
            else:
                self._leaving.append((tracker, then))
        if self._leaving:
            self._loop.call_later(_SENT_CHECK_S, self._check_sent)

    def close(self) -> None:
        self._loop.remove(self._listener.socket)
        self._loop.remove(self._listener.monitor)
        for link in self._links.values():
            link.close()
        self._context.term()
        self._listener.close()


def _origin(origin: object) -> tuple[RemotePeer, Header]:
    if not (isinstance(origin, tuple) and isinstance(origin[0], RemotePeer)):
        raise ProtocolError("an answer for nobody")
    return origin


def _request(header: Header, peer: Peer, frame: zmq.Frame) -> Request | SumRequest:
    """Raises ProtocolError."""
    origin = (peer, header)
    if header.kind is Kind.FETCH_SUM:
        return SumRequest(origin, peer.machine, header.key, header.generation, header.offset, header.round)
    fetch = Fetch.unpack(frame.bytes)
    return Request(
        origin, peer.machine, header.key, header.round, fetch.source, fetch.target, header.offset, header.length,
        fetch.total, fetch.is_tentative,
    )  # fmt: skip


def _no_payload(*_: object) -> memoryview:
    raise ProtocolError("a request has no payload of its own")
