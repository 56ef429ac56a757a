"""The scheduler's shell: a gRPC server that carries events to the links, and their messages to the members.

Everything runs in one asyncio thread. This module decides nothing. A message is held back until the event that it
follows from is in the journal; the events of one turn of the loop are written together.
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

from byteps_py.config.addresses import is_loopback, joined
from byteps_py.config.settings import Settings
from byteps_py.dataplane.traffic import Traffic
from byteps_py.errors import ConfigurationError, UsageError
from byteps_py.proto import control_pb2 as pb, control_pb2_grpc
from byteps_py.scheduler import job as states
from byteps_py.scheduler.call_authenticator import CallAuthenticator
from byteps_py.scheduler.core import ClockTicked, ScaleRequested, StopRequested
from byteps_py.scheduler.job import Finish
from byteps_py.scheduler.member_links import journal as journals
from byteps_py.scheduler.member_links.journal import Journal, Restored, journal_path
from byteps_py.scheduler.member_links.links import MemberLinks, Sent, StreamClosed, StreamMessage, StreamOpened
from byteps_py.scheduler.recording_collector import Collector, TraceWriter
from byteps_py.scheduler.roster import ClusterConfig, MemberRecord, describe
from byteps_py.scheduler.rpc import retry_steadily
from byteps_py.system.log import logger
from byteps_py.system.machine import require_routable, require_secret
from byteps_py.wire.launch_protocol import Blame, send_notice

TICK_S = 0.2
STOP_GRACE_S = 1.0
UNREGISTERED = "a process"  # the name of a connection that has not registered
MAX_BACKLOG = 20_000  # messages that wait for one connection; one that has more is cut off

MOST_COLLECT_S = 600.0

Context = grpc.aio.ServicerContext[pb.MemberMessage, pb.SchedulerMessage]
CollectContext = grpc.aio.ServicerContext[pb.CollectRequest, pb.Answer]


class _MemberStream:
    """The scheduler's end of one stream. None in the backlog ends it."""

    def __init__(self) -> None:
        self.backlog: asyncio.Queue[Sent | None] = asyncio.Queue(MAX_BACKLOG)
        self.handler = asyncio.current_task()
        self.who = UNREGISTERED

    def put(self, sent: Sent | None) -> None:
        try:
            self.backlog.put_nowait(sent)
        except asyncio.QueueFull:
            if self.handler is not None:
                self.handler.cancel()


class SchedulerService(control_pb2_grpc.SchedulerServicer):
    """Serves one job. ``run`` may be called once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._config = ClusterConfig.from_settings(settings)
        self._journal: Journal | None = None
        self._links = MemberLinks(self._config)
        self._clock_s = (
            -time.monotonic()
        )  # the scheduler's clock, which begins at 0, minus the system's monotonic clock
        self._streams: dict[int, _MemberStream] = {}
        self._numbers = itertools.count(1)
        self._strangers = Traffic()
        self._authenticator = CallAuthenticator(settings)
        self._held: list[Sent] = []  # until the journal has the events that they follow from
        self._is_flushing = False
        self._unknown: set[str] = set()  # processes that ask again and again, as members of another journal's job
        self._logged_reason = ""
        self._happened = asyncio.Event()
        self._collector = Collector(lambda stream, message: self._send(Sent(stream, message)), self._present)
        self._trace = TraceWriter(settings, self._collector)
        self._bug: Exception | None = None

    async def run(self) -> Finish:
        """Listen, and return once the job is over.

        Raises ConfigurationError if the address can't be used, JournalError if the journal can't.
        """
        host, port = listening_address(self._settings)
        name, machines = self._settings.scheduler_host, self._settings.num_workers + self._settings.num_servers
        if machines > 1 and is_loopback(host) and not is_loopback(name):
            logger.warning(
                "%s is %s on this machine, which other machines can't reach: let the name lead to the machine's own "
                "address (/etc/hosts), or set DMLC_PS_ROOT_URI to that address",
                name, host,
            )  # fmt: skip
        path = journal_path(self._settings)
        try:
            if path is not None:
                self._journal = Journal(path)
            return await self._serve(host, port)
        finally:
            if self._journal is not None:
                self._journal.close()

    async def _serve(self, host: str, port: int) -> Finish:
        restored = journals.restore(self._config, self._journal)
        self._adopt(restored)
        if self._links.restarts and self._journal is not None:
            logger.warning(
                "resuming the job of the journal %s (%d records): waiting for its members to come back",
                self._journal.path, restored.records,
            )  # fmt: skip
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):  # before any process can know that the scheduler runs
            loop.add_signal_handler(number, self.stop, f"the scheduler got {signal.Signals(number).name}")
        try:
            server, _ = self._authenticator.new_server(joined(host, port))
        except RuntimeError as error:
            raise ConfigurationError(f"the scheduler can't listen on {joined(host, port)}: {error}") from error
        control_pb2_grpc.add_SchedulerServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        await server.start()
        retry_steadily(port)
        self._authenticator.watch()
        logger.info("listening on %s for job %s", joined(host, port), self._settings.job)
        try:
            finish = await self._until_finished()
            if self._journal is not None:
                self._journal.delete()
            return finish
        finally:
            self._authenticator.unwatch()
            # A signal that arrives while the process exits must not change its status.
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)
            for stream in self._streams.values():
                stream.put(None)
            await server.stop(STOP_GRACE_S)
            # Calls that are over for their callers may still have lines to run. gRPC prints a traceback for each call
            # that the end of the event loop cuts off.
            if rest := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(rest, timeout=STOP_GRACE_S)

    def _adopt(self, restored: Restored) -> None:
        self._links, self._config = restored.links, restored.config
        self._clock_s = restored.at_s - time.monotonic()

    def _present(self) -> dict[int, MemberRecord]:
        return self._links.present()

    def _now_s(self) -> float:
        return self._clock_s + time.monotonic()

    async def _until_finished(self) -> Finish:
        while True:
            now_s = self._now_s()
            self._deliver(self._links.handle(ClockTicked(), now_s))
            if self._bug is not None:
                raise self._bug
            if self._links.is_abandoned:
                self._begin_new_job()
            self._trace.tick(self._present(), self._links.core.job.is_running)
            finish = self._links.finished(now_s)
            if finish is not None:
                self._flush()
                await self._trace.finish()
                return finish
            self._happened.clear()
            try:
                async with asyncio.timeout(TICK_S):
                    await self._happened.wait()
            except TimeoutError:
                pass

    def _begin_new_job(self) -> None:
        """No worker of the journal's job came back. Processes that are connected have been put off, and try again; the
        remaining members of the old job learn that it is over."""
        old = self._links
        logger.warning("no worker of the journal's job came back (%s): beginning a new job", old.core.reason)
        self._held.clear()
        for stream in self._streams.values():
            stream.put(None)
        self._streams.clear()
        config = ClusterConfig.from_settings(self._settings)
        restored = journals.begin(config, self._journal, old.core.job.roster.latest_epoch, self._now_s())
        restored.links.take_place_of(old)
        self._adopt(restored)

    def status(self) -> pb.StatusReply:
        """The job's status, also after its end. Call it in the server's thread."""
        reply = self._links.status(self._now_s())
        reply.journal = str(self._journal.path) if self._journal is not None else ""
        return reply

    def stop(self, reason: str) -> None:
        """End the job in order. Call it in the server's thread; it also serves as its signal handler."""
        self._deliver(self._links.handle(StopRequested(reason), self._now_s()))
        self._happened.set()

    # ---- sending ---------------------------------------------------------------------------------------------

    def _deliver(self, sent: list[Sent]) -> None:
        self._held += sent
        if not self._is_flushing and (self._held or (self._journal is not None and self._journal.unwritten)):
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush)
        core = self._links.core
        if self._logged_reason != core.reason:
            self._logged_reason = core.reason
            has_failed = core.state == states.FAILED
            text = f"byteps_py scheduler: {self._logged_reason}"
            if not (has_failed and send_notice(Blame.SERVICE, self._logged_reason, text)):
                logger.log(logging.ERROR if has_failed else logging.INFO, "%s", self._logged_reason)

    def _flush(self) -> None:
        """Write events to the journal, then send the messages that follow from them."""
        self._is_flushing = False
        if self._journal is not None:
            try:
                self._journal.flush()
                if self._journal.is_long:
                    journals.compact(self._config, self._journal, self._links, self._now_s())
            except OSError as error:
                self._give_up_journal(self._journal, error)
        held, self._held = self._held, []
        for sent in held:
            self._send(sent)
        warnings = [s.message.stalled.message or s.message.slow.message for s in held if s.message is not None]
        for sentence in dict.fromkeys(filter(None, warnings)):
            logger.info("%s", sentence)  # the workers warn

    def _send(self, sent: Sent) -> None:
        stream = self._streams.get(sent.stream)
        if stream is None:
            return
        if sent.message is not None and sent.message.HasField("refused"):
            refused = sent.message.refused
            if refused.later or (refused.unknown and stream.who in self._unknown):
                logger.debug("turned away %s: %s", stream.who, refused.message)
            elif stream.who == UNREGISTERED:
                self._strangers.note("turned away", stream.who, refused.message)  # logs few of many
            else:
                self._unknown |= {stream.who} if refused.unknown else set()
                logger.warning("turned away %s: %s", stream.who, refused.message)
        stream.put(sent if sent.message is not None else None)

    def _give_up_journal(self, journal: Journal, error: OSError) -> None:
        """Go on without a journal: one that lacks events would be worse than none."""
        logger.error(
            "the journal %s can't be written: %s; from now on a killed scheduler can't be resumed", journal.path, error
        )
        self._journal, self._links.write = None, None
        journal.delete()
        journal.close()

    # ---- calls -----------------------------------------------------------------------------------------------

    async def Attend(self, requests: AsyncIterator[pb.MemberMessage], context: Context) -> None:  # noqa: N802
        await self._authenticator.authenticate(context)
        number, stream = next(self._numbers), _MemberStream()
        self._streams[number] = stream
        self._deliver(self._links.handle(StreamOpened(number), self._now_s()))
        reader = asyncio.create_task(self._read(number, stream, requests))
        try:
            while (sent := await stream.backlog.get()) is not None:
                await context.write(sent.stamped())
        finally:
            # gRPC cancels this call when the member's process or connection has ended.
            self._streams.pop(number, None)
            self._deliver(self._links.handle(StreamClosed(number), self._now_s()))
            self._happened.set()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, number: int, stream: _MemberStream, requests: AsyncIterator[pb.MemberMessage]) -> None:
        try:
            async for message in requests:
                if message.HasField("register"):
                    stream.who = describe(message.register)
                if message.HasField("answer"):
                    if message.answer.request:
                        self._collector.answered(number, message.answer)
                    else:
                        self._trace.final(number, message.answer)
                    continue
                try:
                    self._deliver(self._links.handle(StreamMessage(number, message), self._now_s()))
                except Exception as error:
                    self._bug = error  # ``run`` raises it: a scheduler whose state is unknown must not go on
                    self._happened.set()
                    return
        finally:
            self._deliver([Sent(number, None)])  # after the messages that are still held back

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:  # noqa: N802
        await self._authenticator.authenticate(context)
        return self.status()

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.StopReply:  # noqa: N802
        await self._authenticator.authenticate(context)
        self.stop(request.reason)
        return pb.StopReply()

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.ScaleReply:  # noqa: N802
        await self._authenticator.authenticate(context)
        try:
            self._deliver(self._links.handle(ScaleRequested(request.servers, request.addresses), self._now_s()))
        except UsageError as error:
            return pb.ScaleReply(error=str(error))
        return pb.ScaleReply(servers=len(self._links.core.job.roster.cpu_servers()))

    async def Collect(self, request: pb.CollectRequest, context: CollectContext) -> None:  # noqa: N802
        await self._authenticator.authenticate(context)
        async for found in self._collector.collect(min(max(request.timeout_s, 0.1), MOST_COLLECT_S)):
            await context.write(found)


def listening_address(settings: Settings) -> tuple[str, int]:
    """The numeric address to listen on. Raises ConfigurationError if it is missing, not this machine's or taken, or if
    it can be reached from other machines and there is no secret."""
    if not settings.scheduler_address:
        raise ConfigurationError(
            "a scheduler needs the address to listen on: set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"
        )
    name, port = settings.scheduler_host, settings.scheduler_port
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigurationError(f"DMLC_PS_ROOT_URI={name} can't be resolved: {error}") from error
    family, kind, proto, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    host = str(address[0])
    require_routable(host, "DMLC_PS_ROOT_URI")
    require_secret(host, settings)
    # gRPC says that binding failed, but not why. A plain socket says why.
    try:
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigurationError(
            f"the scheduler can't listen on DMLC_PS_ROOT_URI={name}, DMLC_PS_ROOT_PORT={port}: {error.strerror}. "
            "The address must be this machine's, and the port free: does another job's scheduler use it?"
        ) from error
    return host, port
