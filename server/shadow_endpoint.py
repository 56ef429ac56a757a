"""Where restarted jobs, and programs that write checkpoints, read the states that a server keeps: a small gRPC server.

It listens at a port of its own, with the scheduler's authentication. Its thread runs asyncio; it hands every request to
the service's loop, and waits for the answer with a deadline. ``close`` may be called once, by the service's thread.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from byteps_py.config.settings import Settings
from byteps_py.proto import shadow_pb2, shadow_pb2_grpc
from byteps_py.scheduler.call_authenticator import CallAuthenticator
from byteps_py.server.shadow_keeper import ShadowKeeper, StatesRequest
from byteps_py.system import machine
from byteps_py.system.log import logger
from byteps_py.system.loop import EventLoop
from byteps_py.wire.data_link import ShadowDescription

#: Elements in one message: 1 MB of float32.
_CHUNK = 1 << 18
_ATTACHED_CHUNK_BYTES = 1 << 20
#: How long a request may wait for the service's thread and for steps that are applied first.
ANSWER_S = 30.0
_START_S = 10.0
_STOP_GRACE_S = 0.5
_CLOSE_S = 5.0


class ShadowEndpoint(shadow_pb2_grpc.ShadowServicer):
    """Begins to listen in a thread of its own. ``keeper``, ``loop``: of the service."""

    def __init__(self, keeper: ShadowKeeper, settings: Settings, loop: EventLoop) -> None:
        self._keeper = keeper
        self._settings = settings
        self._loop = loop
        self._authenticator = CallAuthenticator(settings)
        self._address = ""
        self._is_bound = threading.Event()
        self._aio: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="byteps-shadow", daemon=True)
        self._thread.start()

    def address(self) -> str:
        """``host:port``, once it listens; empty, and a warning, if it can't."""
        if not self._is_bound.wait(_START_S):
            logger.warning("nobody can read the states that this server keeps: no port within %g s", _START_S)
        return self._address

    def close(self) -> None:
        """End all calls."""
        if self._is_bound.wait(_START_S) and self._aio is not None and self._ended is not None:
            ended = self._ended
            try:
                self._aio.call_soon_threadsafe(ended.set)
            except RuntimeError:
                logger.debug("the endpoint of shadowed states has ended before")  # it could not listen
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.warning("the endpoint of shadowed states does not end within %g s", _CLOSE_S)

    # ---- its thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            logger.warning("nobody can read the states that this server keeps: %r", error)
        finally:
            self._is_bound.set()

    async def _serve(self) -> None:
        host = machine.bindable_host(self._settings)
        found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        ip = str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
        server, port = self._authenticator.new_server(_joined(ip, 0))
        shadow_pb2_grpc.add_ShadowServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        await server.start()
        self._aio, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self._address = _joined(host, port)
        self._authenticator.watch()
        self._is_bound.set()
        try:
            await self._ended.wait()
        finally:
            self._authenticator.unwatch()
            await server.stop(_STOP_GRACE_S)

    # ---- calls -----------------------------------------------------------------------------------------------

    async def Describe(  # noqa: N802
        self, request: shadow_pb2.ShadowQuery, context: grpc.aio.ServicerContext[Any, Any]
    ) -> shadow_pb2.ShadowChunk:
        await self._authenticator.authenticate(context)
        found: ShadowDescription = await self._ask(
            lambda answer: answer(self._keeper.describe(request.hold_s)), context
        )
        return shadow_pb2.ShadowChunk(data=found.pack())

    async def Read(  # noqa: N802
        self, request: shadow_pb2.ShadowRead, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[shadow_pb2.ShadowChunk]:
        await self._authenticator.authenticate(context)
        for start in range(request.start, max(request.stop, request.start + 1), _CHUNK):
            stop = min(start + _CHUNK, request.stop)
            data = await self._ask(functools.partial(self._read_chunk, request, start, stop), context)
            if isinstance(data, tuple):
                text, is_unknown = data
                code = grpc.StatusCode.NOT_FOUND if is_unknown else grpc.StatusCode.FAILED_PRECONDITION
                await context.abort(code, text)
            yield shadow_pb2.ShadowChunk(data=data)

    async def ReadAttached(  # noqa: N802
        self, request: shadow_pb2.AttachedRead, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[shadow_pb2.ShadowChunk]:
        await self._authenticator.authenticate(context)
        for start in range(request.start, request.stop, _ATTACHED_CHUNK_BYTES):
            stop = min(start + _ATTACHED_CHUNK_BYTES, request.stop)
            data = await self._ask(functools.partial(self._read_attached, request, start, stop), context)
            if data is None:
                text = f"the record of rank {request.rank} of step {request.step} is not kept here any more"
                await context.abort(grpc.StatusCode.NOT_FOUND, text)
            yield shadow_pb2.ShadowChunk(data=data)
            if len(data) < stop - start:
                return  # nobody has attached that much

    def _read_attached(
        self, request: shadow_pb2.AttachedRead, start: int, stop: int, answer: Callable[[object], None]
    ) -> None:
        """In the service's thread. The answer is bytes, or None."""
        answer(self._keeper.attached(request.run, request.rank, request.step, range(start, stop)))

    def _read_chunk(
        self, request: shadow_pb2.ShadowRead, start: int, stop: int, answer: Callable[[object], None]
    ) -> None:
        """In the service's thread. The answer is bytes, or (why there are none, whether the partition is unknown)."""

        def refuse(text: str, is_unknown: bool) -> None:
            answer((text, is_unknown))

        place = (request.run, request.key, request.index, request.step, request.state, start, stop)
        self._keeper.read(StatesRequest(*place, deliver=answer, refuse=refuse))

    async def _ask(
        self, ask: Callable[[Callable[[object], None]], None], context: grpc.aio.ServicerContext[Any, Any]
    ) -> Any:
        """What ``ask``, which runs in the service's thread, gives to its argument. Ends the call if that takes too
        long."""
        aio = asyncio.get_running_loop()
        future: asyncio.Future[object] = aio.create_future()

        def resolve(value: object) -> None:
            if not future.done():
                future.set_result(value)

        def answer(value: object) -> None:
            if not aio.is_closed():  # else the process ends
                aio.call_soon_threadsafe(resolve, value)

        self._loop.post(lambda: ask(answer))
        try:
            async with asyncio.timeout(ANSWER_S):
                return await future
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"this server gave no answer within {ANSWER_S:g} s")


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
