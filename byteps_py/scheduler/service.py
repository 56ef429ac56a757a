"""The scheduler's shell: a gRPC server that carries events to the core and its answers back.

Everything runs in one asyncio thread. Nothing here decides anything.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from byteps_py import auth
from byteps_py.errors import ConfigurationError, UsageError
from byteps_py.log import logger
from byteps_py.machine import require_secret
from byteps_py.proto import control_pb2 as pb
from byteps_py.proto import control_pb2_grpc
from byteps_py.scheduler import core as states
from byteps_py.scheduler import rpc
from byteps_py.scheduler.cluster import ClusterConfig
from byteps_py.scheduler.core import SchedulerCore
from byteps_py.scheduler.ending import Finish
from byteps_py.scheduler.member import describe
from byteps_py.scheduler.outgoing import Outgoing
from byteps_py.settings import Settings

TICK_S = 0.2
STOP_GRACE_S = 1.0
MAX_BACKLOG = 10_000  # messages that wait for one member; who takes none of so many is cut off

Context = grpc.aio.ServicerContext[pb.MemberMessage, pb.SchedulerMessage]


class _Link:
    """One member's stream, seen from here. None in the backlog ends it."""

    def __init__(self) -> None:
        self.backlog: asyncio.Queue[pb.SchedulerMessage | None] = asyncio.Queue(MAX_BACKLOG)
        self.handler = asyncio.current_task()
        self.who = "a process"

    def put(self, message: pb.SchedulerMessage | None) -> None:
        try:
            self.backlog.put_nowait(message)
        except asyncio.QueueFull:
            if self.handler is not None:
                self.handler.cancel()


class SchedulerService(control_pb2_grpc.SchedulerServicer):
    """Serves one job. ``run`` may be called once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._core = SchedulerCore(ClusterConfig.from_settings(settings))
        self._links: dict[int, _Link] = {}
        self._connection_ids = itertools.count(1)
        self._said = ""
        self._happened = asyncio.Event()
        self._bug: Exception | None = None

    async def run(self) -> Finish:
        """Listen, and return once the job is over. Raises ConfigurationError if the address can't be used."""
        host, port = listening_address(self._settings)
        server = grpc.aio.server(options=rpc.server_options())
        control_pb2_grpc.add_SchedulerServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        try:
            rpc.add_port(server, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", self._settings)
        except RuntimeError as error:
            raise ConfigurationError(f"the scheduler can't listen on {host}:{port}: {error}") from error
        await server.start()
        logger.info("listening on %s:%d for job %s", host, port, self._settings.job)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, f"the scheduler got {signal.Signals(number).name}")
        try:
            return await self._until_finished()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            for link in self._links.values():
                link.put(None)
            await server.stop(STOP_GRACE_S)

    async def _until_finished(self) -> Finish:
        while True:
            now_s = time.monotonic()
            self._deliver(self._core.on_tick(now_s))
            if self._bug is not None:
                raise self._bug
            finish = self._core.finished(now_s)
            if finish is not None:
                return finish
            self._happened.clear()
            try:
                async with asyncio.timeout(TICK_S):
                    await self._happened.wait()
            except TimeoutError:
                pass

    def status(self) -> pb.StatusReply:
        """The job as it stands, also after its end. In the server's thread."""
        return self._core.status(time.monotonic())

    def stop(self, reason: str) -> None:
        """End the job in order. In the server's thread, or as its signal handler."""
        self._deliver(self._core.stop(reason, time.monotonic()))
        self._happened.set()

    def _deliver(self, outgoing: Outgoing) -> None:
        for connection, message in outgoing:
            link = self._links.get(connection)
            if link is None:
                continue
            link.put(message)
            if message.HasField("refused"):
                logger.warning("turned away %s: %s", link.who, message.refused.message)
                link.put(None)
        for sentence in dict.fromkeys(m.stalled.message for _, m in outgoing if m.HasField("stalled")):
            logger.info("%s", sentence)  # the workers warn
        if self._said != self._core.reason:
            self._said = self._core.reason
            failed = self._core.state == states.FAILED
            logger.log(logging.ERROR if failed else logging.INFO, "%s", self._said)

    # ---- calls -----------------------------------------------------------------------------------------------

    async def Attend(self, requests: AsyncIterator[pb.MemberMessage], context: Context) -> None:  # noqa: N802
        await self._authenticate(context)
        connection, link = next(self._connection_ids), _Link()
        self._links[connection] = link
        self._deliver(self._core.on_connected(connection, time.monotonic()))
        reader = asyncio.create_task(self._read(connection, link, requests))
        try:
            while (message := await link.backlog.get()) is not None:
                await context.write(message)
        finally:
            # Cancelled when the member's process or connection is gone.
            del self._links[connection]
            self._deliver(self._core.on_disconnected(connection, time.monotonic()))
            self._happened.set()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, connection: int, link: _Link, requests: AsyncIterator[pb.MemberMessage]) -> None:
        try:
            async for message in requests:
                if message.HasField("register"):
                    link.who = describe(message.register)
                try:
                    self._deliver(self._core.handle(connection, message, time.monotonic()))
                except Exception as error:
                    self._bug = error  # ``run`` raises it: a scheduler in an unknown state must not go on
                    self._happened.set()
                    return
        finally:
            link.put(None)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:  # noqa: N802
        await self._authenticate(context)
        return self.status()

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.StopReply:  # noqa: N802
        await self._authenticate(context)
        self.stop(request.reason)
        return pb.StopReply()

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.ScaleReply:  # noqa: N802
        await self._authenticate(context)
        try:
            outgoing = self._core.scale(request.servers, list(request.addresses), time.monotonic())
        except UsageError as error:
            return pb.ScaleReply(error=str(error))
        self._deliver(outgoing)
        return pb.ScaleReply(servers=self._core.cpu_machines)

    async def _authenticate(self, context: Context) -> None:
        shown = dict(context.invocation_metadata() or ()).get(rpc.TOKEN_KEY, "")
        if not auth.is_valid(str(shown), self._settings.secret, "control", self._settings.job):
            why = "the cluster secrets differ" if shown else "it needs the cluster secret"
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                f"{why}, or the jobs do: set the same BYTEPS_SECRET or BYTEPS_SECRET_FILE, and the same BYTEPS_JOB_ID "
                "or scheduler address, everywhere",
            )


def listening_address(settings: Settings) -> tuple[str, int]:
    """The numeric address to listen on. Raises ConfigurationError if it is missing, unsafe, foreign or taken."""
    if not settings.scheduler_address:
        raise ConfigurationError("a scheduler needs DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT: where it listens")
    name, port = settings.scheduler_host, settings.scheduler_port
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigurationError(f"DMLC_PS_ROOT_URI={name} is not known: {error}") from error
    family, kind, proto, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    host = str(address[0])
    require_secret(host, settings)
    # gRPC says only that binding failed, not why; a plain socket does.
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigurationError(
                f"the scheduler can't listen on DMLC_PS_ROOT_URI={name}, DMLC_PS_ROOT_PORT={port}: {error.strerror}. "
                "The address must be this machine's, and the port free: does another job's scheduler use it?"
            ) from error
    return host, port
