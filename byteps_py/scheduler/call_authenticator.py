"""Authenticates the callers of a gRPC server of this package: processes that know the cluster secret may call it, and
others cost little.

gRPC does not tell of a connection before it is authenticated. So the connections are found among the descriptors of the
process, and are cut off by the limits of every listener (unauthenticated_connections.py). gRPC waits for a request as
long as its connection lives; RequestTimeout ends such calls, and an idle connection ends soon after its last call.

A server's asyncio thread calls everything here, but for ``handshake_begins``.
"""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from byteps_py.config.settings import Settings
from byteps_py.scheduler import rpc
from byteps_py.security import auth
from byteps_py.security.refusal_log import RefusalLog
from byteps_py.security.unauthenticated_connections import MOST, UnauthenticatedConnections, duplicate

_OF_THIS_CLUSTER = "knows the cluster secret (BYTEPS_SECRET or BYTEPS_SECRET_FILE, the same everywhere)"
_DESCRIPTORS = "/proc/self/fd"
#: Seconds between two scans, and while many connect.
_SCAN_INTERVAL_S, _HURRIED_S = 0.05, 0.005
_MANY = MOST // 4
#: A scan reads the state of every descriptor of the process. Scans for handshakes take at most this part of the time,
#: beyond so many seconds at once.
_SCANNING, _AT_ONCE_S = 0.1, 0.02
#: How many connections that ended without a token are remembered until ``take_refused``.
_MOST_REFUSED = 100


#: Together with the time that an idle connection has (rpc.py), this is less than the 5 s for unauthenticated processes.
REQUEST_PATIENCE_S = 2.0

Context = grpc.aio.ServicerContext[Any, Any]


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
        self._port = port
        self._known: dict[
            int, tuple[int, str]
        ] = {}  # by descriptor: (inode of its socket, its peer; "" if it is no connection to the port)
        self._admitted: set[str] = set()
        self._explained: set[str] = set()
        self._refused: list[str] = []

    def listens_at(self, port: int) -> None:
        """The port is known now. Call it before the server starts."""
        self._port = self._waiting.port = port

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
        """``peer``, as gRPC names it, has shown a valid token."""
        with self._lock:
            self._admitted.add(address_of(peer))

    def explained(self, peer: str) -> None:
        """``peer`` got an answer that says why it is refused, and the log has it: ``take_refused`` leaves it out."""
        with self._lock:
            self._explained.add(address_of(peer))

    def scan(self) -> float:
        """Find new connections, forget those that have ended, and cut off those that exceed a limit. Returns in how
        many seconds to scan again."""
        with self._lock:
            self._scan()
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
        gone = [peer for fd, (inode, peer) in self._known.items() if peer and found.get(fd, (0,))[0] != inode]
        silent = [peer for peer in gone if peer not in self._admitted | self._explained]
        self._refused += silent[: _MOST_REFUSED - len(self._refused)]
        for fd in self._known.keys() - found.keys():
            self._waiting.discard(fd)
        self._known = found
        for fd, (_, peer) in found.items():
            if peer in self._admitted:
                self._waiting.discard(fd)
        here = {peer for _, peer in found.values()}
        self._admitted &= here
        self._explained &= here
        self._waiting.sweep()
        now_s = self._clock()
        self._debt_s = max(0.0, self._debt_s - _SCANNING * (now_s - self._scanned_s)) + now_s - began_s
        self._scanned_s = now_s

    def _new(self, fd: int, inode: int) -> tuple[int, str]:
        self._waiting.discard(fd)
        try:
            with duplicate(fd, self._port) as end:
                host, port, *_ = end.getpeername()
        except OSError:
            return inode, ""  # it listens, or belongs to another port
        self._waiting.add(fd)
        host = host.removeprefix("::ffff:")
        return inode, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
    """The callers of one server."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._refusals = RefusalLog()
        self._connections = GrpcConnections(0)
        self._watching: asyncio.Task[None] | None = None

    def new_server(self, address: str) -> tuple[grpc.aio.Server, int]:
        """A server that will listen on ``address``, ``host:port``, and its port. Raises RuntimeError if it can't."""
        server = grpc.aio.server(interceptors=[RequestTimeout()], options=rpc.server_options())
        port = rpc.add_port(server, address, self._settings, self._connections.handshake_begins)
        self._connections.listens_at(port)
        return server, port

    def watch(self) -> None:
        """Begin to cut off connections that are not authenticated in time, in the running asyncio loop."""
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._connections.scan())

    def unwatch(self) -> None:
        """End the task that ``watch`` began."""
        if self._watching is not None:
            self._watching.cancel()

    def note_refused(self) -> None:
        """Log the connections that have ended without a valid token."""
        for address in self._connections.take_refused():
            self._note(address, f"it has not proven that it {_OF_THIS_CLUSTER}")
        self._refusals.tick()

    def _note(self, address: str, why: str) -> None:
        self._refusals.note(address, address.rpartition(":")[0], why)

    async def authenticate(self, context: Context) -> None:
        """End a call that shows no valid token."""
        shown = dict(context.invocation_metadata() or ()).get(rpc.TOKEN_KEY, "")
        if not auth.is_valid(str(shown), self._settings, "control"):
            why = "the cluster secrets or the jobs differ" if shown else "it shows no cluster secret"
            self._connections.explained(context.peer())
            self._note(address_of(context.peer()), why)
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                f"{why}: set the same BYTEPS_SECRET or BYTEPS_SECRET_FILE, and the same BYTEPS_JOB_ID or scheduler "
                "address, everywhere",
            )
        self._connections.admit(context.peer())
