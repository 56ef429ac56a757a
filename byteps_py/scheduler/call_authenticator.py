"""Authenticates the callers of a gRPC server of this package: processes that know the cluster secret may call it, and
others cost little.

gRPC does not tell of a connection before it is authenticated. So the connections are found among the descriptors of the
process, and are cut off by the limits of every listener (unauthenticated_connections.py). No scan is made while there
is no stranger: the kernel tells when a connection arrives at gRPC's listening socket.

    a connection arrives, or a call shows a token ──► scans, until all connections are admitted or have ended

gRPC waits for a request as long as its connection lives; RequestTimeout ends such calls, and an idle connection ends
soon after its last call.

A server's asyncio thread calls everything here, but for ``handshake_begins``.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import signal
import socket
import stat
import struct
import threading
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from byteps_py.config.addresses import joined
from byteps_py.config.settings import Settings
from byteps_py.errors import CommunicationError
from byteps_py.scheduler import rpc
from byteps_py.security import auth
from byteps_py.security.unauthenticated_connections import (
    MOST,
    PATIENCE_S,
    RefusalLog,
    UnauthenticatedConnections,
    duplicate,
)
from byteps_py.system.log import logger

_UNPROVEN = (
    f"it has not proven within {PATIENCE_S:g} s that it knows the cluster secret (BYTEPS_SECRET or BYTEPS_SECRET_FILE, "
    "the same everywhere): it does not know it, or its machine or link is too slow"
)
_DESCRIPTORS = "/proc/self/fd"
#: Seconds between two scans, and while many connect.
_SCAN_INTERVAL_S, _HURRIED_S = 0.05, 0.005
_MANY = MOST // 4
#: A scan reads the state of every descriptor of the process. Scans for handshakes take at most this part of the time,
#: beyond so many seconds at once.
_SCANNING, _AT_ONCE_S = 0.1, 0.02
#: The most connections that ended without a token and are remembered until ``take_refused``.
_MOST_REFUSED = 100


#: Together with the time that an idle connection has (rpc.py), this is less than the 5 s for unauthenticated processes.
REQUEST_PATIENCE_S = 2.0

_F_SETOWN_EX, _F_OWNER_TID = 15, 0  # of fcntl(2)
#: Time for a thread to start or end.
_START_S = 10.0

Context = grpc.aio.ServicerContext[Any, Any]


class Arrivals:
    """Calls ``told``, on a thread of its own, when connections have arrived at ``port``, where a library listens.

    Whoever polls the library's socket misses connections that the library accepts at once. So the kernel sends a signal
    for each, which this thread alone gets, and waits for. If the kernel can't, there may always be some that wait.
    Raises CommunicationError if no socket listens there.
    """

    def __init__(self, port: int, told: Callable[[], object]) -> None:
        self._listening = [fd for fd in map(int, os.listdir(_DESCRIPTORS)) if _listens(fd, port)]
        if not self._listening:
            raise CommunicationError(f"no socket of this process listens at port {port}")
        self._told = told
        self._unaccepted = select.poll()
        for fd in self._listening:
            self._unaccepted.register(fd, select.POLLIN)
        self._has_begun = threading.Event()
        self._may_end = threading.Event()
        self._gets_signals = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="byteps-arrivals", daemon=True)
        self._thread.start()
        if not self._has_begun.wait(_START_S):
            raise CommunicationError(f"a thread did not start within {_START_S:g} s")

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})
        try:
            for fd in self._listening:
                self._want_signals(fd)
            self._gets_signals = True
        except OSError as error:
            logger.info("connections have to be looked for all the time: the kernel does not tell of them: %s", error)
        self._has_begun.set()
        while signal.sigwait({signal.SIGIO}) and not self._is_closed:
            self._told()
        self._may_end.wait(_START_S)  # a thread that has ended must not be sent the signal of ``close``

    def _want_signals(self, fd: int) -> None:
        """Let the kernel send signals to this thread for arrivals at ``fd``. Raises OSError."""
        fcntl.fcntl(fd, _F_SETOWN_EX, struct.pack("ii", _F_OWNER_TID, threading.get_native_id()))
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)

    @property
    def are_waiting(self) -> bool:
        """There may be a connection that the library has yet to accept."""
        return not self._gets_signals or any(event & select.POLLIN for _, event in self._unaccepted.poll(0))

    def close(self) -> None:
        """``told`` is not called any more."""
        self._is_closed = True
        if self._thread.ident is not None and self._thread.is_alive():
            signal.pthread_kill(self._thread.ident, signal.SIGIO)
        self._may_end.set()
        self._thread.join(_START_S)


def _listens(fd: int, port: int) -> bool:
    try:
        with duplicate(fd, port) as end:
            return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:  # no socket, or closed meanwhile
        return False


class GrpcConnections:
    """Finds the connections to ``port``, where the server listens, and cuts off those that are not admitted in time.

    Any thread may call ``handshake_begins``; the other methods are for the server's thread.
    """

    def __init__(self, port: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._scanned_s = clock()
        self._debt_s = 0.0  # time that scans have taken, less the time that they may take
        self._waiting = UnauthenticatedConnections(clock)
        self._waiting.port = port
        self.port = port
        self._known: dict[
            int, tuple[int, str]
        ] = {}  # by descriptor: (inode of its socket, its peer; "" if it is no connection to the port)
        self._admitted: set[int] = set()  # inodes
        self._proven: set[str] = set()  # peers that have shown a token since the last scan
        self._explained: set[str] = set()
        self._refused: list[str] = []

    def listens_at(self, port: int) -> None:
        """The port is known now. Call it before the server starts."""
        self.port = self._waiting.port = port

    def handshake_begins(self) -> None:
        """A TLS handshake begins. It may fail so soon that only a scan now finds the connection.

        In a flood of them most start no scan: the server's thread has to run, too.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            since_s = self._clock() - self._scanned_s
            is_rested = len(self._waiting) <= _MANY or since_s >= _HURRIED_S
            if is_rested and self._debt_s - _SCANNING * since_s <= _AT_ONCE_S:
                self._scan()
        finally:
            self._lock.release()

    def admit(self, peer: str) -> None:
        """``peer``, as gRPC names it, has shown a valid token. The next ``scan`` finds out which connection it is."""
        with self._lock:
            self._proven.add(address_of(peer))

    def explained(self, peer: str) -> None:
        """``peer`` got an answer that says why it is refused, and the log has it: ``take_refused`` leaves it out."""
        with self._lock:
            self._explained.add(address_of(peer))

    def scan(self) -> float | None:
        """Find new connections, forget those that have ended, and cut off those that exceed a limit. Returns in how
        many seconds to scan again; None if all connections are admitted."""
        with self._lock:
            self._scan()
            if all(inode in self._admitted for inode, peer in self._known.values() if peer):
                return None
            is_tired = self._debt_s > _AT_ONCE_S
            return _HURRIED_S if len(self._waiting) > _MANY and not is_tired else _SCAN_INTERVAL_S

    def take_refused(self) -> list[str]:
        """Peers whose connection ended, or was cut off, without a valid token since the last call."""
        with self._lock:
            refused, self._refused = self._refused, []
        return refused

    def _scan(self) -> None:
        began_s = self._clock()
        found: dict[int, tuple[int, str]] = {}
        for name in os.listdir(_DESCRIPTORS):
            fd = int(name)
            try:
                status = os.fstat(fd)
            except OSError:  # closed meanwhile
                continue
            if stat.S_ISSOCK(status.st_mode):
                known = self._known.get(fd)
                is_known = known is not None and known[0] == status.st_ino
                found[fd] = known if known is not None and is_known else self._new(fd, status.st_ino)
        gone = [known for fd, known in self._known.items() if known[1] and found.get(fd, (0,))[0] != known[0]]
        heard = self._proven | self._explained
        silent = [peer for inode, peer in gone if inode not in self._admitted and peer not in heard]
        self._refused += silent[: _MOST_REFUSED - len(self._refused)]
        for fd in self._known.keys() - found.keys():
            self._waiting.discard(fd)
        self._known = found
        self._admitted.intersection_update([inode for inode, _ in found.values()])
        for fd, (inode, peer) in found.items():
            if peer in self._proven:
                self._admitted.add(inode)
            if inode in self._admitted:
                self._waiting.discard(fd)
        self._proven.clear()
        self._explained.intersection_update([peer for _, peer in found.values()])
        self._waiting.sweep()
        now_s = self._clock()
        self._debt_s = max(0.0, self._debt_s - _SCANNING * (now_s - self._scanned_s)) + now_s - began_s
        self._scanned_s = now_s

    def _new(self, fd: int, inode: int) -> tuple[int, str]:
        self._waiting.discard(fd)
        try:
            with duplicate(fd, self.port) as end:
                host, port, *_ = end.getpeername()
        except OSError:
            return inode, ""  # it listens, or belongs to another port
        self._waiting.add(fd)
        host = host.removeprefix("::ffff:")
        return inode, joined(host, port)


def address_of(peer: str) -> str:
    """
    >>> address_of("ipv4:10.0.0.1:4242"), address_of("ipv6:%5Bfd00::1%5D:4242")
    ('10.0.0.1:4242', '[fd00::1]:4242')
    """
    return urllib.parse.unquote(peer).partition(":")[2]


class RequestTimeout(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Ends calls with a single request and a single answer whose request does not come within REQUEST_PATIENCE_S."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)  # a grpc.RpcMethodHandler; None for an unknown method
        if handler is None or handler.unary_unary is None:
            return handler

        async def answer(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                async with asyncio.timeout(REQUEST_PATIENCE_S):
                    request = await anext(aiter(requests))
            except (TimeoutError, StopAsyncIteration):
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the call came without its request")
            return await handler.unary_unary(request, context)

        # On the wire both kinds of calls are equal, but the handler of a stream runs before the request is there.
        return grpc.stream_unary_rpc_method_handler(answer, handler.request_deserializer, handler.response_serializer)


class CallAuthenticator:
    """The callers of one server. ``connections_class``: how they are found; tests name another one in a subclass."""

    connections_class: type[GrpcConnections] = GrpcConnections

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._refusals = RefusalLog(call_later=lambda s, then: asyncio.get_running_loop().call_later(s, then))
        self._connections = self.connections_class(0)
        self._arrivals: Arrivals | None = None
        self._next_scan: asyncio.TimerHandle | None = None

    def new_server(self, address: str) -> tuple[grpc.aio.Server, int]:
        """A server that will listen on ``address``, ``host:port``, and its port. Raises RuntimeError if it can't."""
        server = grpc.aio.server(interceptors=[RequestTimeout()], options=rpc.server_options())
        port = rpc.add_port(server, address, self._settings, self._connections.handshake_begins)
        self._connections.listens_at(port)
        return server, port

    def watch(self) -> None:
        """Begin to cut off connections that are not authenticated in time, in the running asyncio loop; the server has
        started. Raises CommunicationError if the server can't be watched."""
        loop = asyncio.get_running_loop()
        self._arrivals = Arrivals(self._connections.port, lambda: loop.call_soon_threadsafe(self._scan_soon))
        self._scan_soon()

    def unwatch(self) -> None:
        """End the scans that ``watch`` began."""
        if self._arrivals is not None:
            self._arrivals.close()
            self._arrivals = None
        if self._next_scan is not None:
            self._next_scan.cancel()

    @property
    def is_scanning(self) -> bool:
        """There may be connections that are not admitted."""
        return self._next_scan is not None

    def _scan_soon(self, after_s: float = _HURRIED_S) -> None:
        if self._next_scan is None and self._arrivals is not None:
            self._next_scan = asyncio.get_running_loop().call_later(after_s, self._scan)

    def _scan(self) -> None:
        self._next_scan = None
        # A connection that is accepted during the scan shows as waiting here.
        are_waiting = self._arrivals is not None and self._arrivals.are_waiting
        after_s = self._connections.scan()
        for address in self._connections.take_refused():
            self._note(address, _UNPROVEN)
        if are_waiting or after_s is not None:
            self._scan_soon(_SCAN_INTERVAL_S if after_s is None else after_s)

    def _note(self, address: str, why: str) -> None:
        self._refusals.note(address, address.rpartition(":")[0], why)

    async def authenticate(self, context: Context) -> None:
        """End a call that shows no valid token."""
        shown = dict(context.invocation_metadata() or ()).get(rpc.TOKEN_KEY, "")
        if not auth.is_valid(str(shown), self._settings, "control"):
            why = "the cluster secrets or the jobs differ" if shown else "it shows no cluster secret"
            self._connections.explained(context.peer())
            self._scan_soon()
            self._note(address_of(context.peer()), why)
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                f"{why}: set the same BYTEPS_SECRET or BYTEPS_SECRET_FILE, and the same BYTEPS_JOB_ID or scheduler "
                "address, everywhere",
            )
        self._connections.admit(context.peer())
        self._scan_soon()
