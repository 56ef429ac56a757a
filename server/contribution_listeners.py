"""The two ways in which contributions reach a server: over TCP, and from the CS of the same machine.

A local CS sends messages over a local channel; payloads lie in shared memory that both processes map. LocalListener
owns the local listener, the channels and the segments that they brought. This module must not know what contributions
mean. Loop thread only. A peer that breaks the protocol loses its connection; nothing that it sends ends the process.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

import zmq

from byteps_py.config.settings import Settings
from byteps_py.dataplane.listener import DataListener, Peer, reply
from byteps_py.dataplane.traffic import Traffic
from byteps_py.errors import PeerLostError, ProtocolError
from byteps_py.runtime import Runtime
from byteps_py.security import auth
from byteps_py.security.unauthenticated_connections import PATIENCE_S, LocalStrangers
from byteps_py.server.reducer import Arrival, FrameMemory, SharedMemory
from byteps_py.system.channel import Channel
from byteps_py.system.log import logger
from byteps_py.system.shm import Segment
from byteps_py.tensors import Op
from byteps_py.wire.data_link import HEADER_BYTES, READER_KINDS, Header, Kind

#: About states that the server keeps.
SHADOW_KINDS = frozenset(
    (
        Kind.SHADOW_BEGIN,
        Kind.SHADOW_STATE,
        Kind.SHADOW_SUM,
        Kind.SHADOW_STEP,
        Kind.SHADOW_RECORD,
        Kind.SHADOW_ATTACHED,
        Kind.SHADOW_END,
        *READER_KINDS,
    )
)
#: About what the server accumulates: short messages without an answer.
ABOUT_COPIES = frozenset((Kind.CLOCK, Kind.ORDER))
_BATCH = 64
_MAX_SEGMENTS = 4096


class ContributionListener(DataListener):
    """Contributions over TCP. ``on_arrival``: a contribution has arrived; ``on_gone``: a peer has disconnected;
    ``on_withdraw``: a machine takes a contribution back; ``on_shadow``: a message about states that the server keeps.
    A machine's states are kept on other machines: so these come over TCP only."""

    def __init__(
        self,
        host: str,
        settings: Settings,
        traffic: Traffic,
        on_arrival: Callable[[Arrival], None],
        on_gone: Callable[[Peer], None],
        on_withdraw: Callable[[Header], None],
        on_shadow: Callable[[Header, Peer, FrameMemory], None],
    ) -> None:
        def on_message(header: Header, peer: Peer, frame: zmq.Frame) -> None:
            if header.kind is Kind.WITHDRAW:
                on_withdraw(header)
                return
            if header.kind in ABOUT_COPIES:
                on_arrival(Arrival(header, peer, 0, text=frame.bytes))
                return
            payload = FrameMemory(frame)
            if header.kind in SHADOW_KINDS:
                on_shadow(header, peer, payload)
                return
            on_arrival(Arrival(header, peer, payload.nbytes, payload if payload.nbytes else None))

        kinds = frozenset((Kind.PUSH, Kind.PULL, Kind.PASS, Kind.WITHDRAW)) | ABOUT_COPIES | SHADOW_KINDS
        super().__init__(host, settings, traffic, kinds, on_message, on_gone)


class LocalPeer(Peer):
    """A CS on this machine. Its messages are headers; payloads lie in segments that it has sent."""

    def __init__(self, channel: Channel, local: LocalListener) -> None:
        self.machine = -1  # until its HELLO
        self.channel = channel
        self._local = local
        self._segments: dict[int, Segment] = {}
        self._unsent: collections.deque[bytes] = collections.deque()  # while the peer's buffer is full

    @property
    def name(self) -> str:
        return f"local process {self.channel.peer_pid}"

    def close(self) -> None:
        self.channel.close()
        self._segments.clear()

    # ---- out ---------------------------------------------------------------------------------------------

    def answer(self, header: Header, result: zmq.Frame | None, digest: bytes = b"") -> None:
        self._send(reply(header, Kind.ANSWER))

    def tell(self, header: Header, payload: bytes = b"") -> None:
        self._send(header.pack() + payload)

    def refuse(self, header: Header, reason: str) -> None:
        self._send(reply(header, Kind.REFUSED) + reason.encode())

    def _send(self, message: bytes) -> None:
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self.flush()

    def flush(self) -> None:
        """Send waiting messages until the peer's buffer is full."""
        try:
            while self._unsent and self.channel.try_send(self._unsent[0]):
                self._unsent.popleft()
        except PeerLostError as error:
            self._local.lose(self, error)
        else:
            self._local.wait_for_room(self, bool(self._unsent))

    # ---- in ----------------------------------------------------------------------------------------------

    def accept_segment(self, header: Header, fds: list[int]) -> None:
        """Map a segment. Raises ProtocolError."""
        if len(fds) != 1 or not header.length:
            raise ProtocolError(
                f"SEGMENT {header.segment} of {header.length} bytes has {len(fds)} descriptors, not one"
            )
        if header.segment in self._segments or len(self._segments) >= _MAX_SEGMENTS:
            raise ProtocolError(
                f"SEGMENT {header.segment} was sent before, or is one too many after {len(self._segments)}"
            )
        try:
            segment = self._local.runtime.segment(fds[0], header.length)
        except (OSError, ValueError) as error:
            raise ProtocolError(
                f"segment {header.segment} of {header.length} bytes can't be mapped: {error}"
            ) from error
        segment.fd = -1  # the memory stays mapped without it, until the last payload in it is forgotten
        self._segments[header.segment] = segment

    def arrival(self, header: Header) -> Arrival:
        """The contribution that ``header`` places in shared memory. Raises ProtocolError if it lies outside a
        segment."""
        payload = answer = None
        if header.kind is Kind.PUSH:
            payload = self._place(header, header.segment, header.segment_offset, header.payload_nbytes)
        wants = header.wants_result and not header.is_supply
        if wants and (header.op is not Op.BROADCAST or header.kind is Kind.PULL):
            answer = self._place(header, header.answer_segment, header.answer_offset, header.length)
            first, second = sorted((payload, answer), key=lambda each: each.address) if payload else (answer, answer)
            if first.address < second.address < first.address + first.nbytes:
                raise ProtocolError("the memory for the answer overlaps the contribution")
        return Arrival(header, self, payload.nbytes if payload else 0, payload, answer)

    def _place(self, header: Header, number: int, offset: int, nbytes: int) -> SharedMemory:
        segment = self._segments.get(number)
        if segment is None or offset + nbytes > segment.nbytes or offset % header.dtype.itemsize:
            size = f"has {segment.nbytes} bytes" if segment else "was never sent"
            raise ProtocolError(f"{nbytes} bytes at offset {offset} do not lie in segment {number}, which {size}")
        return SharedMemory(segment, offset, nbytes)


class LocalListener:
    """Listens at the abstract socket ``name``. ``on_arrival``: a contribution has arrived; ``on_gone``: a peer has
    disconnected; ``on_withdraw``: a machine takes a contribution back."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        runtime: Runtime,
        traffic: Traffic,
        on_arrival: Callable[[Arrival], None],
        on_gone: Callable[[Peer], None],
        on_withdraw: Callable[[Header], None],
    ) -> None:
        self.name = name
        self._settings = settings
        self.runtime = runtime
        self._loop = runtime.loop
        self._traffic = traffic
        self._on_arrival = on_arrival
        self._on_gone = on_gone
        self._on_withdraw = on_withdraw
        self._peers: set[LocalPeer] = set()
        self._strangers = LocalStrangers(self._loop.call_later, self._cut_off)
        self._listener = runtime.local_listener(name)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def peer_of(self, machine: int) -> Peer | None:
        """The local connection of a machine; None if it has none."""
        return next((peer for peer in self._peers if peer.machine == machine), None)

    @property
    def connections(self) -> int:
        """Number of connected local peers."""
        return len(self._peers)

    def _accept(self) -> None:
        try:
            peer = LocalPeer(self._listener.accept(), self)
        except (ProtocolError, OSError) as error:
            self._traffic.refused("a local process", "local processes", error)
            return
        self._peers.add(peer)
        self._loop.add_reader(peer.channel.fileno(), lambda: self._on_readable(peer))
        self._strangers.add(peer)

    def _cut_off(self, peer: LocalPeer) -> None:
        self.lose(peer, ProtocolError(f"it sent no HELLO within {PATIENCE_S:g} s, or too many processes did not"))

    def _on_readable(self, peer: LocalPeer) -> None:
        try:
            for _ in range(_BATCH):
                if peer not in self._peers or (message := peer.channel.receive(0)) is None:
                    return
                data, fds = message
                try:
                    self._receive(peer, data, fds)
                finally:
                    for fd in fds:
                        self.runtime.close_fd(fd)
        except PeerLostError as error:
            self.lose(peer, error)
        except ProtocolError as error:
            self._traffic.turned_away(peer.name, error)
            self.lose(peer, error)

    def _receive(self, peer: LocalPeer, data: bytes, fds: list[int]) -> None:
        """One message. Raises ProtocolError if the peer is to lose its connection."""
        header = Header.unpack(data[:HEADER_BYTES])
        if header.kind is Kind.HELLO and peer.machine < 0:
            token = data[HEADER_BYTES:].decode(errors="replace")
            if not auth.is_valid(token, self._settings, "local", str(header.sender)):
                text = "its proof of membership is wrong: do job and secret agree?"
                peer.refuse(header, f"{ProtocolError.__name__}\n{text}")
                raise ProtocolError(text)
            peer.machine = header.sender
            self._strangers.discard(peer)
            logger.debug("machine %d has connected locally", header.sender)
        elif header.sender != peer.machine:
            raise ProtocolError(
                f"it sent {header.kind.name} as machine {header.sender}, without a HELLO as that machine"
            )
        elif header.kind is Kind.SEGMENT:
            peer.accept_segment(header, fds)
        elif header.kind in (Kind.PUSH, Kind.PULL, Kind.PASS) and len(data) == HEADER_BYTES:
            self._contribution(peer, header)
        elif header.kind is Kind.WITHDRAW:
            self._on_withdraw(header)
        elif header.kind in ABOUT_COPIES:
            self._on_arrival(Arrival(header, peer, 0, text=data[HEADER_BYTES:]))
        else:
            raise ProtocolError(f"a local peer must not send {header.kind.name} of {len(data)} bytes")

    def _contribution(self, peer: LocalPeer, header: Header) -> None:
        try:
            arrival = peer.arrival(header)
        except ProtocolError as error:
            self._traffic.turned_away(peer.name, error)
            peer.refuse(header, f"{ProtocolError.__name__}\n{error}")
            return
        self._traffic.bytes_local += arrival.nbytes
        self._on_arrival(arrival)

    def wait_for_room(self, peer: LocalPeer, wanted: bool) -> None:
        """Let the loop flush ``peer`` once its buffer has room, or stop that."""
        if peer not in self._peers:
            return
        if wanted:
            self._loop.add_writer(peer.channel.fileno(), peer.flush)
        else:
            self._loop.remove_writer(peer.channel.fileno())

    def lose(self, peer: LocalPeer, reason: Exception) -> None:
        """The peer has disconnected, or is disconnected now. Each of its segments stays mapped until the last
        contribution in it is forgotten."""
        if peer not in self._peers:
            return
        logger.info("%s, machine %d, has disconnected: %s", peer.name, peer.machine, str(reason))
        self._peers.remove(peer)
        self._strangers.discard(peer)
        self._loop.remove(peer.channel.fileno())
        peer.close()
        self._on_gone(peer)

    def close(self) -> None:
        """End all connections. The loop must still exist."""
        self._loop.remove(self._listener.fileno())
        self._listener.close()
        for peer in self._peers:
            self._loop.remove(peer.channel.fileno())
            peer.close()
        self._peers.clear()
