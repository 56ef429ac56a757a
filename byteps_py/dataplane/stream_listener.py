"""Byte streams between processes of a job: who listens for them, and how one is called.

caller ──who it is, HELLO────────────────────► listener      each message is preceded by its length;
       ◄─"+" CHALLENGE, or "-" and why not ───               the four in the middle: handshake.py
       ──PROOF ──────────────────────────────►
       ◄─"+" and perhaps more, or "-" and why not

One thread serves all callers until they have authenticated, within the limits that all listeners of this package have
(unauthenticated_connections.py): none of them blocks it, and a caller has only so long for all of its handshake,
however it spreads its bytes. Must not know what the streams carry.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from byteps_py.config.addresses import is_ipv6, joined
from byteps_py.dataplane.handshake import CallerHandshake
from byteps_py.dataplane.seal import StreamSeal
from byteps_py.errors import BytePSError, ProtocolError
from byteps_py.security.unauthenticated_connections import PATIENCE_S, UnauthenticatedConnections
from byteps_py.system.log import logger
from byteps_py.system.machine import resolved

_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
#: The longest message.
MOST_BYTES = 4096
ACCEPTED, REFUSED = b"+", b"-"
_RETRY_S = 0.05
#: How many ports are tried, to find one that is free at all addresses.
_MOST_PORTS = 20
_IDLE_S = 60.0

#: The seals of a new connection, for sending and for receiving.
Seals = tuple[StreamSeal, StreamSeal]


def framed(message: bytes) -> bytes:
    """``message`` as it is sent."""
    return _LENGTH.pack(len(message)) + message


def length_of(prefix: bytes) -> int:
    """The length of the message that follows ``prefix``. Raises ProtocolError if it is too long."""
    (nbytes,) = _LENGTH.unpack(prefix)
    if nbytes > MOST_BYTES:
        raise ProtocolError(f"a message of {nbytes} bytes in a handshake; at most {MOST_BYTES} are allowed")
    return int(nbytes)


def accepted(answer: bytes, whose: str) -> bytes:
    """The contents of ``answer``, which ``whose`` listener sent. Raises ProtocolError if it is a refusal."""
    if answer[:1] != ACCEPTED:
        raise ProtocolError(f"{whose} turned it away: {answer[1:].decode(errors='replace')}")
    return answer[1:]


def refusal(why: object) -> bytes:
    """An answer that ends the handshake."""
    return REFUSED + str(why).encode()[: MOST_BYTES - 1]


def shake_hands(sock: socket.socket, handshake: CallerHandshake, first: bytes, whose: str) -> tuple[Seals, bytes]:
    """The caller's end, on ``sock``: send ``first``, which ends with the HELLO of ``handshake``, and complete the
    handshake within PATIENCE_S. Also returns what the listener says at its end. Raises OSError and ProtocolError."""
    deadline = time.monotonic() + PATIENCE_S
    sock.sendall(framed(first))
    challenge = accepted(receive(sock, deadline), whose)
    proof, sealing, opening = handshake.answer_for_stream(challenge)
    sock.sendall(framed(proof))
    return (sealing, opening), accepted(receive(sock, deadline), whose)


def receive(sock: socket.socket, deadline: float) -> bytes:
    """The next message, before ``deadline`` by the steady clock. Raises OSError and ProtocolError."""
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


def end_when_silent(sock: socket.socket, silence_s: float) -> None:
    """Let the system end a connection, also an idle one, whose other end acknowledges nothing for ``silence_s``; and
    send small messages at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silence_s))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(silence_s / 2)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(silence_s / 4)))


def _listen(hosts: Sequence[str]) -> list[socket.socket]:
    """Sockets that listen at one port of all ``hosts``, numeric addresses. Raises OSError."""
    for left in reversed(range(_MOST_PORTS)):
        made: list[socket.socket] = []
        try:
            for host in hosts:
                family = socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
                port = made[0].getsockname()[1] if made else 0
                made.append(socket.create_server((host, port), family=family, backlog=1024))
                made[-1].setblocking(False)
        except OSError as error:
            is_taken = bool(made) and error.errno == errno.EADDRINUSE  # by another program, at one of them
            for each in made:
                each.close()
            if not (left and is_taken):
                raise
        else:
            break
    return made


class CalledHandshake(Protocol):
    """The listener's end of one handshake.

    ``rank``: who calls, or says so; -1: not known yet. ``seals``: of the connection, once its caller has proven that it
    is of the job.
    """

    rank: int
    seals: Seals | None

    def process(self, message: bytes) -> bytes:
        """The answer to the next message of the caller. Raises ProtocolError if the connection is to end."""


H = TypeVar("H", bound=CalledHandshake)


@dataclass(slots=True, eq=False)
class _Caller(Generic[H]):
    sock: socket.socket
    handshake: H
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


class StreamListener(Generic[H]):
    """Listens at ``host``, any port, and at the same port of ``more_hosts``, other addresses of this machine. Raises
    OSError if it can't.

    ``new_handshake(address)``: for a connection to this listener's address. ``on_called(handshake, socket)``: a caller
    has authenticated; the callee owns the socket, which does not block. ``on_refused(rank, why)``: a connection that
    said it was of ``rank`` was turned away; anybody may say so. The listener's thread calls all three.
    """

    def __init__(
        self,
        host: str,
        new_handshake: Callable[[str], H],
        on_called: Callable[[H, socket.socket], None],
        on_refused: Callable[[int, str], None],
        more_hosts: Sequence[str] = (),
    ) -> None:
        self._new_handshake = new_handshake
        self._on_called = on_called
        self._on_refused = on_refused
        self._listeners = _listen([resolved(each) for each in (host, *more_hosts)])
        port = self._listeners[0].getsockname()[1]
        #: ``host:port``, of ``host``.
        self.address = joined(host, port)
        self._callers: dict[int, _Caller[H]] = {}  # by descriptor
        self._strangers = UnauthenticatedConnections()
        self._strangers.port = port
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_numbers = itertools.count()
        self._strangers.watch(self._call_later)
        self._selector = selectors.DefaultSelector()
        for each in self._listeners:
            self._selector.register(each, selectors.EVENT_READ, each)
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="byteps-accept", daemon=True)
        self._thread.start()

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
        for each in self._listeners:
            if is_forked:
                each.close()
            else:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes everything

    # ---- the thread ------------------------------------------------------------------------------------

    def _call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._timer_numbers), callback))

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                due_s = self._timers[0][0] - time.monotonic() if self._timers else _IDLE_S
                for key, _ in self._selector.select(max(0.0, due_s)):
                    if key.data is not None:
                        self._accept(key.data)
                    elif (caller := self._callers.get(key.fd)) is not None:
                        self._receive(caller)
                while self._timers and self._timers[0][0] <= time.monotonic():
                    heapq.heappop(self._timers)[-1]()
        finally:
            for caller in self._callers.values():
                caller.sock.close()
            for each in self._listeners:
                each.close()
            self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:
            if not self._is_closed:
                time.sleep(_RETRY_S)  # no descriptors left, for example
            return
        sock.setblocking(False)
        self._callers[sock.fileno()] = _Caller(sock, self._new_handshake(self.address))
        self._selector.register(sock, selectors.EVENT_READ)
        self._strangers.add(sock.fileno())  # if there are too many, the oldest or this one can be read, and is over

    def _receive(self, caller: _Caller[H]) -> None:
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
            logger.debug("%s: a connection to it was refused: %s", self.address, error)
            self._on_refused(handshake.rank, str(error))
            return
        if handshake.seals is not None:
            self._forget(caller)
            self._on_called(handshake, sock)

    def _forget(self, caller: _Caller[H]) -> None:
        fd = caller.sock.fileno()
        self._strangers.discard(fd)
        self._selector.unregister(caller.sock)
        del self._callers[fd]
