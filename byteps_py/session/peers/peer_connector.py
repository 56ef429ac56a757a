"""Makes the connections between this rank and ranks of other machines: it listens, connects, and has both ends prove
that they belong to the job (byteps_py/dataplane/handshake.py).

caller ──who it is, HELLO────────────────────► listener      each message is preceded by its length;
       ◄─"+" CHALLENGE, or "-" and why not ───               the four in the middle: dataplane/handshake.py
       ──PROOF ──────────────────────────────►
       ◄─"+", or "-" and why not ─────────────

Of two ranks the one with the greater number connects, as many times as the link needs (dataplane/long_links.py): all
of these are a set. A connection serves all groups of both. One thread serves all
callers until they have authenticated, within the limits that all listeners of this package have
(unauthenticated_connections.py): none of them blocks it, and a caller has only so long for all of its handshake,
however it spreads its bytes. Must not know the messages on connections. Any thread may call.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from byteps_py.config.settings import Settings
from byteps_py.config.variables import MOST_CONNECTIONS
from byteps_py.dataplane import long_links
from byteps_py.dataplane.handshake import CallerHandshake, Challenge, ListenerHandshake
from byteps_py.dataplane.stream_seal import StreamSeal
from byteps_py.errors import BytePSError, ConfigurationError, NotInitializedError, ProtocolError, RendezvousError
from byteps_py.security.unauthenticated_connections import PATIENCE_S, UnauthenticatedConnections
from byteps_py.system import machine
from byteps_py.system.log import logger

#: kind, the caller's rank, the listener's rank, epoch of their group, number of the set, index in it
_CALL = struct.Struct("<8sIIIII")
_MAGIC = b"bps-rnk2"
_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
#: The longest message.
MOST_BYTES = 4096
ACCEPTED, REFUSED = b"+", b"-"

#: The seals of a new connection, for sending and for receiving.
Seals = tuple[StreamSeal, StreamSeal]


class NewConnection(NamedTuple):
    """A connection to another rank, with which both have authenticated each other. ``set_number``: of
    the connections that the caller makes at one time, from 1. ``position``: of this one in its set; 0 is made first."""

    sock: socket.socket
    seals: Seals
    set_number: int = 1
    position: int = 0


#: Called with the rank at the other end of a new connection, and the connection.
OnConnected = Callable[[int, NewConnection], None]


def framed(message: bytes) -> bytes:
    """``message`` as it is sent."""
    return _LENGTH.pack(len(message)) + message


def length_of(prefix: bytes) -> int:
    """The length of the message that follows ``prefix``. Raises ProtocolError if it is too long."""
    (nbytes,) = _LENGTH.unpack(prefix)
    if nbytes > MOST_BYTES:
        raise ProtocolError(f"a message of {nbytes} bytes in a handshake; at most {MOST_BYTES} are allowed")
    return int(nbytes)


def call(caller: int, callee: int, epoch: int, hello: bytes, place: tuple[int, int] = (1, 0)) -> bytes:
    """The first message of rank ``caller`` to rank ``callee``, both in the group of ranks of ``epoch``. ``place``: the
    number of the set, and the index in it."""
    return _CALL.pack(_MAGIC, caller, callee, epoch, *place) + hello


def accepted(answer: bytes, rank: int) -> bytes:
    """The contents of ``answer``, which rank ``rank`` sent. Raises ProtocolError if it is a refusal."""
    if answer[:1] != ACCEPTED:
        raise ProtocolError(f"rank {rank} turned it away: {answer[1:].decode(errors='replace')}")
    return answer[1:]


def refusal(why: object) -> bytes:
    """An answer that ends the handshake."""
    return REFUSED + str(why).encode()[: MOST_BYTES - 1]


def bound_to(rank: int, address: str, place: tuple[int, int] = (1, 0)) -> str:
    """A text that both proofs cover beside the secret: a proof for one rank, or one place in a link, is worth nothing
    at another."""
    return f"rank {rank} at {address}, connection {place[1]} of set {place[0]}"


class CalledHandshake:
    """The end of rank ``me``, which listens at ``address``, in the group of ranks of ``epoch``.

    ``rank``: who calls, or says so; -1: not known yet. ``place``: see ``call``. ``seals``: of the connection, once its
    caller has proven that it is of the job.
    """

    def __init__(self, listener: ListenerHandshake, me: int, address: str, epoch: int) -> None:
        self._listener, self._me, self._address, self._epoch = listener, me, address, epoch
        self._challenge: Challenge | None = None
        self.rank = -1
        self.place = (1, 0)
        self.seals: Seals | None = None

    def process(self, message: bytes) -> bytes:
        """The answer to the next message of the caller. Raises ProtocolError if the connection is to end."""
        if self._challenge is not None:
            opening, sealing = self._challenge.accept_for_stream(message)
            self.seals = sealing, opening
            return ACCEPTED
        if len(message) < _CALL.size:
            raise ProtocolError("it is no rank of this job")
        magic, rank, callee, epoch, *place = _CALL.unpack_from(message)
        if magic != _MAGIC or callee != self._me or rank <= self._me:
            raise ProtocolError("it is no rank of this job that connects to this one")
        self.rank, self.place = rank, (place[0], place[1])
        if self.place[1] >= MOST_CONNECTIONS:
            raise ProtocolError(f"it calls itself connection {self.place[1]} of a link; {MOST_CONNECTIONS} are allowed")
        if epoch != self._epoch:
            raise ProtocolError(f"it belongs to the group of ranks of epoch {epoch}, this one to {self._epoch}")
        bound = bound_to(self._me, self._address, self.place)
        text, self._challenge = self._listener.challenge(message[_CALL.size :], rank, bound, epoch)
        return ACCEPTED + text


_RETRY_S = 0.05
_IDLE_S = 60.0


@dataclass(slots=True, eq=False)
class _Caller:
    sock: socket.socket
    handshake: CalledHandshake
    data: bytearray = field(default_factory=bytearray)  # of the message that is coming

    def receive(self) -> bytes | None:
        """The next message, if all of it has arrived; never more than that is read. Raises OSError and
        ProtocolError."""
        part = self.sock.recv(self._due - len(self.data))
        if not part:
            raise ProtocolError("the other end closed the connection in the middle of the handshake")
        self.data += part
        if len(self.data) < self._due:
            return None
        message = bytes(self.data[LENGTH_BYTES:])
        self.data.clear()
        return message

    @property
    def _due(self) -> int:
        """The bytes of the message, as far as is known."""
        known = len(self.data) >= LENGTH_BYTES
        return LENGTH_BYTES + (length_of(bytes(self.data[:LENGTH_BYTES])) if known else 0)


class PeerListener:
    """Listens at ``host``, any port, for rank ``me`` of the group of ranks of ``epoch``. Raises OSError if it can't.

    ``on_called(rank, connection)``: a rank has authenticated. ``on_refused(rank, why)``: a connection that said it was
    of ``rank`` was turned away; anybody may say so. The listener's thread calls both.
    """

    def __init__(
        self,
        host: str,
        settings: Settings,
        me: int,
        epoch: int,
        on_called: OnConnected,
        on_refused: Callable[[int, str], None],
    ) -> None:
        self._me, self._epoch = me, epoch
        self._on_called, self._on_refused = on_called, on_refused
        family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(place[:2], family=family, backlog=1024)
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        #: ``host:port``.
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._handshake = ListenerHandshake(settings)
        self._callers: dict[int, _Caller] = {}  # by descriptor
        self._strangers = UnauthenticatedConnections()
        self._strangers.port = port
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_numbers = itertools.count()
        self._strangers.watch(self._call_later)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._is_closed = False
        threading.Thread(target=self._serve, name="byteps-accept", daemon=True).start()

    @property
    def cut_off(self) -> int:
        """The number of connections that were ended because they did not authenticate in time, or sent too much
        before."""
        return self._strangers.cut_off

    @property
    def callers(self) -> int:
        """The number of connections that have yet to authenticate."""
        return len(self._callers)

    def close(self, is_forked: bool = False) -> None:
        """Stop listening. Connections stay."""
        self._is_closed = True
        if is_forked:
            self._listener.close()
        else:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes everything

    # ---- the thread ------------------------------------------------------------------------------------

    def _call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._timer_numbers), callback))

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                due_s = self._timers[0][0] - time.monotonic() if self._timers else _IDLE_S
                for key, _ in self._selector.select(max(0.0, due_s)):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif (caller := self._callers.get(key.fd)) is not None:
                        self._receive(caller)
                while self._timers and self._timers[0][0] <= time.monotonic():
                    heapq.heappop(self._timers)[-1]()
        finally:
            for caller in self._callers.values():
                caller.sock.close()
            self._listener.close()
            self._selector.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            if not self._is_closed:
                time.sleep(_RETRY_S)  # no descriptors left, for example
            return
        sock.setblocking(False)
        handshake = CalledHandshake(self._handshake, self._me, self.address, self._epoch)
        self._callers[sock.fileno()] = _Caller(sock, handshake)
        self._selector.register(sock, selectors.EVENT_READ)
        self._strangers.add(sock.fileno())  # if there are too many, the oldest or this one can be read, and is over

    def _receive(self, caller: _Caller) -> None:
        handshake, sock = caller.handshake, caller.sock
        try:
            message = caller.receive()
            if message is None:
                return
            answer = handshake.process(message)
            sock.send(framed(answer))
        except BlockingIOError:  # it was nobody's turn
            return
        except (OSError, BytePSError) as error:
            with contextlib.suppress(OSError):
                sock.send(framed(refusal(error)))
            self._forget(caller)
            sock.close()
            logger.debug("rank %d: a connection to it was refused: %s", self._me, error)
            self._on_refused(handshake.rank, str(error))
            return
        if handshake.seals is not None:
            self._forget(caller)
            self._on_called(handshake.rank, NewConnection(sock, handshake.seals, *handshake.place))

    def _forget(self, caller: _Caller) -> None:
        fd = caller.sock.fileno()
        self._strangers.discard(fd)
        self._selector.unregister(caller.sock)
        del self._callers[fd]


_RETRY_AGAIN_S = 0.2
_LEAST_S = 1.0  # for an attempt
_SWITCH_OFF = (
    "or set BYTEPS_DIRECT_CONNECTIONS=0 on all ranks, which sends everything through the communication service"
)


class PeerConnector:
    """``epoch``: that of this group of ranks: ranks of an earlier one are turned away."""

    def __init__(self, settings: Settings, rank: int, epoch: int, on_connected: OnConnected) -> None:
        self._settings = settings
        self._rank = rank
        self._epoch = epoch
        self._on_connected = on_connected
        self._changed = threading.Condition()
        self._calling = threading.Lock()
        self._connected: set[int] = set()
        self._addresses: dict[int, str] = {}  # of ranks that this one has to call
        self._awaited: set[int] = set()  # ranks that are to connect to this one
        self._sets: collections.Counter[int] = collections.Counter()  # by rank: of connections, made by this one
        self._dialed: set[socket.socket] = set()  # whose handshakes are under way
        self._refusals: dict[int, str] = {}  # by awaited rank: why its latest attempt has failed
        #: None until this rank listens.
        self.listener: PeerListener | None = None
        self._is_closed = False

    def address(self) -> str:
        """The address at which this rank listens, ``host:port``. The rank begins to listen with the first call. Raises
        ConfigurationError if it can't."""
        with self._changed:
            if self.listener is None:
                host = machine.bindable_host(self._settings)
                try:
                    self.listener = PeerListener(
                        host, self._settings, self._rank, self._epoch, self._called, self._refused
                    )
                except OSError as error:
                    raise ConfigurationError(
                        f"rank {self._rank} can't listen for other ranks at {host} ({error}): set DMLC_NODE_HOST or "
                        f"DMLC_INTERFACE to an address of this machine, {_SWITCH_OFF}"
                    ) from error
            return self.listener.address

    def connect(self, addresses: Mapping[int, str], timeout_s: float) -> None:
        """Return when there is a connection to each rank of ``addresses``. Raises RendezvousError that says which one
        can't be made, and why."""
        deadline = time.monotonic() + timeout_s
        if not self._calling.acquire(timeout=timeout_s):  # two connections between two ranks would not agree
            raise RendezvousError(f"rank {self._rank} is still connecting to other ranks after {timeout_s:g} s")
        try:
            missing = self._call_all(addresses, deadline)
        finally:
            self._calling.release()
        with self._changed:
            while absent := [rank for rank in missing if rank not in self._connected]:
                if self._is_closed:
                    raise NotInitializedError("the session was closed while ranks connected to each other")
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise RendezvousError(self._no_call(absent))

    def _call_all(self, addresses: Mapping[int, str], deadline: float) -> list[int]:
        """Connect to those that this rank has to call. Returns those to which it was not connected before."""
        with self._changed:
            missing = {rank: address for rank, address in addresses.items() if rank not in self._connected}
            self._awaited.update(rank for rank in missing if rank > self._rank)
        callees = {rank: address for rank, address in missing.items() if rank < self._rank}
        self._addresses.update(callees)
        if len(callees) == 1:
            self._call(*next(iter(callees.items())), deadline)
        elif callees:
            with ThreadPoolExecutor(min(8, len(callees)), "byteps-connect") as pool:
                for attempt in [pool.submit(self._call, *callee, deadline) for callee in callees.items()]:
                    attempt.result()
        return list(missing)

    def _no_call(self, absent: list[int]) -> str:
        reasons = {rank: self._refusals[rank] for rank in absent if rank in self._refusals}
        why = f" ({'; '.join(f'rank {rank}: {why}' for rank, why in reasons.items())})" if reasons else ""
        ranks, address = ", ".join(map(str, absent)), self.listener.address if self.listener is not None else "?"
        return (
            f"rank{'s' * (len(absent) > 1)} {ranks} did not connect to rank {self._rank} at {address}{why}: let "
            f"them reach that address, {_SWITCH_OFF}"
        )

    # ---- calling ---------------------------------------------------------------------------------------

    def _call(self, rank: int, address: str, deadline: float) -> None:
        with self._changed:
            self._sets[rank] += 1
            set_number = self._sets[rank]
        while True:
            try:
                first = self._connect(rank, address, (set_number, 0), deadline)
            except (OSError, ProtocolError) as error:
                why = str(error)
            else:
                break
            if time.monotonic() > deadline - _RETRY_S or self._is_closed:
                raise RendezvousError(
                    f"rank {self._rank} can't connect to rank {rank} at {address} ({why}): let ranks of different "
                    f"machines reach each other, {_SWITCH_OFF}"
                )
            time.sleep(_RETRY_S)
        count = long_links.connections_for(self._settings, long_links.round_trip_s(first.sock))
        self._add(rank, first)
        if count > 1:
            with ThreadPoolExecutor(count - 1, "byteps-connect") as pool:
                for index in range(1, count):
                    pool.submit(self._call_also, rank, address, (set_number, index))

    def _call_also(self, rank: int, address: str, place: tuple[int, int]) -> None:
        """Make a further connection of a link. Without it the link is slower, and that is all."""
        try:
            self._add(rank, self._connect(rank, address, place, 0.0))
        except (OSError, ProtocolError) as error:
            if self._is_closed:
                return
            logger.warning(
                "rank %d could not make connection %d to rank %d at %s (%s): the link may be slower",
                self._rank, place[1], rank, address, error,
            )  # fmt: skip

    def _connect(self, rank: int, address: str, place: tuple[int, int], deadline: float) -> NewConnection:
        """Raises OSError and ProtocolError."""
        limit_s = max(_LEAST_S, min(PATIENCE_S, deadline - time.monotonic()))
        sock = socket.create_connection(_place(address), limit_s)
        try:
            with self._changed:
                self._dialed.add(sock)
            if self._is_closed:
                raise ProtocolError("the session has been closed")
            return NewConnection(sock, self._shake_hands(rank, address, place, sock), *place)
        except (OSError, ProtocolError):
            sock.close()
            raise
        finally:
            with self._changed:
                self._dialed.discard(sock)

    def _shake_hands(self, rank: int, address: str, place: tuple[int, int], sock: socket.socket) -> Seals:
        """Complete the handshake within PATIENCE_S. Raises OSError and ProtocolError."""
        deadline = time.monotonic() + PATIENCE_S
        caller = CallerHandshake(self._settings, self._rank, bound_to(rank, address, place), self._epoch)
        sock.sendall(framed(call(self._rank, rank, self._epoch, caller.hello, place)))
        challenge = accepted(_receive(sock, deadline), rank)
        proof, sealing, opening = caller.answer_for_stream(challenge)
        sock.sendall(framed(proof))
        accepted(_receive(sock, deadline), rank)
        return sealing, opening

    def _add(self, rank: int, connection: NewConnection) -> None:
        """Add a connection. One of a later set replaces those of the same rank before."""
        if self._is_closed:
            connection.sock.close()
            return
        long_links.tune(connection.sock, self._settings)
        self._on_connected(rank, connection)
        with self._changed:
            self._connected.add(rank)
            self._awaited.discard(rank)
            self._refusals.pop(rank, None)
            self._changed.notify_all()

    def redial(self, rank: int, is_needed: Callable[[], bool]) -> None:
        """The connection to ``rank`` has broken: make another one while ``is_needed``, if this rank is the one that
        calls. Returns at once."""
        address = self._addresses.get(rank)
        if address is not None and rank < self._rank and not self._is_closed:
            arguments = (rank, address, is_needed)
            threading.Thread(target=self._call_until, args=arguments, name="byteps-connect", daemon=True).start()

    def _call_until(self, rank: int, address: str, is_needed: Callable[[], bool]) -> None:
        while not self._is_closed and is_needed():
            with contextlib.suppress(RendezvousError):
                self._call(rank, address, 0.0)
                return
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, _RETRY_AGAIN_S)

    # ---- being called ----------------------------------------------------------------------------------

    def _called(self, rank: int, connection: NewConnection) -> None:
        self._add(rank, connection)

    def _refused(self, rank: int, why: str) -> None:
        with self._changed:
            if rank in self._awaited:  # a stranger may claim any other number, and as many as it likes
                self._refusals[rank] = why

    def close(self, is_forked: bool = False) -> None:
        """Stop listening. Connections stay."""
        if is_forked:
            self._is_closed = True
        else:
            with self._changed:
                self._is_closed = True
                for sock in self._dialed:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
                self._changed.notify_all()
        if self.listener is not None:
            self.listener.close(is_forked)


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _receive(sock: socket.socket, deadline: float) -> bytes:
    return _exactly(sock, length_of(_exactly(sock, LENGTH_BYTES, deadline)), deadline)


def _exactly(sock: socket.socket, nbytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < nbytes:
        left_s = deadline - time.monotonic()
        sock.settimeout(max(left_s, 0.001))
        try:
            part = sock.recv(nbytes - len(data)) if left_s > 0 else None
        except TimeoutError:
            part = None
        if part is None:
            raise ProtocolError(f"its handshake was not over after {PATIENCE_S:g} s")
        if not part:
            raise ProtocolError("the other end closed the connection in the middle of the handshake")
        data += part
    return data
