"""Listens for ranks of other machines. One thread serves all callers until they have authenticated, within the limits
that all listeners of this package have (unauthenticated_connections.py): none of them blocks it, and a caller has only
so long for all of its handshake, however it spreads its bytes.

Must not know the messages on connections.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from byteps_py.config.settings import Settings
from byteps_py.dataplane.handshake import ListenerHandshake
from byteps_py.errors import BytePSError, ProtocolError
from byteps_py.security.unauthenticated_connections import UnauthenticatedConnections
from byteps_py.session.peers import peer_handshake
from byteps_py.session.peers.peer_handshake import LENGTH_BYTES, CalledHandshake, Seals
from byteps_py.system.log import logger

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
        return LENGTH_BYTES + (peer_handshake.length_of(bytes(self.data[:LENGTH_BYTES])) if known else 0)


class PeerListener:
    """Listens at ``host``, any port, for rank ``me`` of the group of ranks of ``epoch``. Raises OSError if it can't.

    ``on_called(rank, sock, seals)``: a rank has authenticated. ``on_refused(rank, why)``: a connection that said it was
    of ``rank`` was turned away; anybody may say so. The listener's thread calls both.
    """

    def __init__(
        self,
        host: str,
        settings: Settings,
        me: int,
        epoch: int,
        on_called: Callable[[int, socket.socket, Seals], None],
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
            sock.send(peer_handshake.framed(answer))
        except BlockingIOError:  # it was nobody's turn
            return
        except (OSError, BytePSError) as error:
            with contextlib.suppress(OSError):
                sock.send(peer_handshake.framed(peer_handshake.refusal(error)))
            self._forget(caller)
            sock.close()
            logger.debug("rank %d: a connection to it was refused: %s", self._me, error)
            self._on_refused(handshake.rank, str(error))
            return
        if handshake.seals is not None:
            self._forget(caller)
            self._on_called(handshake.rank, sock, handshake.seals)

    def _forget(self, caller: _Caller) -> None:
        fd = caller.sock.fileno()
        self._strangers.discard(fd)
        self._selector.unregister(caller.sock)
        del self._callers[fd]
