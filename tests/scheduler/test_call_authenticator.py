"""Strangers at a gRPC server: it scans for them when a connection arrives, until all are admitted or gone."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import queue
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from byteps_py.config.settings import Settings
from byteps_py.errors import CommunicationError
from byteps_py.scheduler import call_authenticator, rpc
from byteps_py.scheduler.call_authenticator import Arrivals, CallAuthenticator, GrpcConnections
from byteps_py.security.unauthenticated_connections import PATIENCE_S

METHOD = "/tests.Any/Call"
SETTINGS = Settings(scheduler_host="127.0.0.1", scheduler_port=1)


@pytest.fixture(autouse=True, scope="module")
def grpc_library() -> Iterator[None]:
    """gRPC's own descriptors live as long as any channel does: keep one, so that no test seems to leak them."""
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        with contextlib.suppress(grpc.RpcError):
            channel.unary_unary("/warm/up")(b"", timeout=0.05)
        yield


class Connections(GrpcConnections):
    """``scans``: how many; ``late_s``: by so much the clock has been moved."""

    def __init__(self, port: int) -> None:
        self.late_s, self.scans = 0.0, 0
        super().__init__(port, lambda: time.monotonic() + self.late_s)

    def has_scanned(self, times: int) -> bool:
        return self.scans >= times

    def scan(self) -> float | None:
        self.scans += 1
        return super().scan()


class Watched(CallAuthenticator):
    connections_class = Connections
    _connections: Connections


def test_each_arrival_is_told_even_if_it_is_accepted_at_once() -> None:
    told = queue.SimpleQueue[None]()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        arrivals = Arrivals(listener.getsockname()[1], lambda: told.put(None))
        for _ in range(2):
            with socket.create_connection(listener.getsockname()):
                assert arrivals.are_waiting
                listener.accept()[0].close()
                told.get(timeout=10)
                assert not arrivals.are_waiting
        arrivals.close()
        with socket.create_connection(listener.getsockname()):
            assert told.empty()


class Deaf(Arrivals):
    def _want_signals(self, fd: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_where_the_kernel_tells_of_no_arrival_there_may_always_be_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        arrivals = Deaf(listener.getsockname()[1], lambda: None)
        assert arrivals.are_waiting
        arrivals.close()


def test_a_port_where_nobody_listens_is_an_error() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(CommunicationError, match="no socket of this process listens"):
            Arrivals(bound.getsockname()[1], lambda: None)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.001)


def serving(use: Callable[[Watched, int], Coroutine[Any, Any, None]]) -> None:
    """Run ``use(authenticator, port)`` beside a server that admits the callers of METHOD."""

    async def run() -> None:
        authenticator = Watched(SETTINGS)
        server, port = authenticator.new_server("127.0.0.1:0")

        async def call(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            await authenticator.authenticate(context)
            return b""

        handlers = {"Call": grpc.unary_unary_rpc_method_handler(call)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tests.Any", handlers),))
        await server.start()
        authenticator.watch()
        try:
            await until(lambda: not authenticator.is_scanning)
            await use(authenticator, port)
        finally:
            authenticator.unwatch()
            await server.stop(0)

    asyncio.run(run())


def test_scans_go_on_while_a_stranger_is_there_and_no_longer() -> None:
    async def use(authenticator: Watched, port: int) -> None:
        connections = authenticator._connections
        for _ in range(2):
            enough = connections.scans + 3
            with socket.create_connection(("127.0.0.1", port)):
                await until(functools.partial(connections.has_scanned, enough))
                assert authenticator.is_scanning
            await until(lambda: not authenticator.is_scanning)

    serving(use)


def test_a_stranger_is_cut_off_in_time(caplog: pytest.LogCaptureFixture) -> None:
    async def use(authenticator: Watched, port: int) -> None:
        connections = authenticator._connections
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await until(functools.partial(connections.has_scanned, connections.scans + 1))
            connections.late_s = PATIENCE_S
            async with asyncio.timeout(2):
                with contextlib.suppress(ConnectionResetError):
                    while await reader.read(1000):  # gRPC says first which protocol it speaks
                        pass
            await until(lambda: not authenticator.is_scanning)
        finally:
            writer.close()

    serving(use)
    said = [record.getMessage() for record in caplog.records if "has not proven" in record.getMessage()]
    assert f"within {PATIENCE_S:g} s" in said[0]  # it may know the secret, and have been too slow
    assert said[0].endswith("it does not know it, or its machine or link is too slow")


def test_no_scan_is_made_once_a_caller_is_admitted() -> None:
    async def use(authenticator: Watched, port: int) -> None:
        connections = authenticator._connections
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary(METHOD)
            for _ in range(2):
                await call(b"", metadata=rpc.metadata(SETTINGS), timeout=10)
                await until(lambda: not authenticator.is_scanning)
            connections.late_s = 2 * PATIENCE_S
            scans = connections.scans
            await call(b"", metadata=rpc.metadata(SETTINGS), timeout=10)  # it was not cut off
            await until(lambda: not authenticator.is_scanning)
            assert connections.scans > scans

    serving(use)


def test_who_takes_an_admitted_callers_address_is_a_stranger_again() -> None:
    """The descriptor and the address may be the same as before; the connection is another one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        connections = GrpcConnections(port)
        with socket.socket() as member:
            member.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # it leaves no TIME_WAIT
            member.connect(("127.0.0.1", port))
            address = member.getsockname()
            end, _ = listener.accept()
            connections.admit(f"ipv4:127.0.0.1:{address[1]}")
            assert connections.scan() is None
        end.close()
        with socket.socket() as stranger:
            stranger.bind(address)
            stranger.connect(("127.0.0.1", port))
            end, _ = listener.accept()
            assert connections.scan() is not None
            end.close()
            assert connections.scan() is None
            assert connections.take_refused() == [f"127.0.0.1:{address[1]}"]


def test_time_between_scans_is_shorter_than_what_a_stranger_may_wait() -> None:
    assert call_authenticator._SCAN_INTERVAL_S < PATIENCE_S / 10
