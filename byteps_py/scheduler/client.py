"""A member's link to the scheduler, over gRPC or, on a single machine without one, to a core in-process.

Callbacks run in the event loop's thread, and never after ``close``. Trainers must not import this module.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import grpc

from byteps_py import machine
from byteps_py.errors import BytePSError, CommunicationError, from_name
from byteps_py.loop import EventLoop
from byteps_py.proto import control_pb2 as pb
from byteps_py.proto import control_pb2_grpc
from byteps_py.scheduler import rpc
from byteps_py.scheduler.cluster import PROTOCOL_VERSION
from byteps_py.settings import Settings

CLOSE_TIMEOUT_S = 5.0
RETRY_S = 0.1


class ControlLink(Protocol):
    """One member's link. ``send`` may be called by any thread, ``close`` by the loop's or once that has ended."""

    def send(self, message: pb.MemberMessage) -> None:
        """Send soon, in order. Dropped when the link is closed or lost: ``on_lost`` has told so."""

    def close(self, reason: str = "") -> None:
        """Leave the cluster and end the link; returns within seconds, whatever the scheduler does."""


def connect(
    settings: Settings,
    register: pb.Register,
    loop: EventLoop,
    on_message: Callable[[pb.SchedulerMessage], None],
    on_lost: Callable[[BytePSError], None],
    heartbeat: Callable[[], pb.Heartbeat],
) -> ControlLink:
    """Register with the scheduler and stay in touch. Returns at once; what comes arrives through the callbacks.

    Fields of ``register`` that are left empty and that ``settings`` know are filled in. ``on_lost`` is called at most
    once: RendezvousError (no scheduler by ``settings.start_timeout_s``, or not with this secret), the error of a
    refusal (after ``on_message`` got it), PeerLostError (the connection broke; not after the scheduler said Stop).
    Raises ConfigurationError if the cluster is larger than this machine and there is no scheduler's address.
    """
    register = complete(register, settings)
    if not settings.scheduler_address:
        from byteps_py.scheduler.local import LocalControl

        return LocalControl(settings, register, loop, on_message, on_lost, heartbeat)
    return _RemoteControl(settings, register, loop, on_message, on_lost, heartbeat)


def complete(register: pb.Register, settings: Settings) -> pb.Register:
    """A copy with the empty fields filled that every member fills alike."""
    filled = pb.Register()
    filled.CopyFrom(register)
    filled.protocol = filled.protocol or PROTOCOL_VERSION
    filled.job = filled.job or settings.job
    filled.machine_id = filled.machine_id or machine.machine_id(settings)
    filled.num_workers = filled.num_workers or settings.num_workers
    filled.num_servers = filled.num_servers or settings.num_servers
    filled.partition_bytes = filled.partition_bytes or settings.partition_bytes or 0
    filled.link_mbit = filled.link_mbit or machine.link_mbit(settings)
    filled.host = filled.host or socket.gethostname()
    filled.elastic = filled.elastic or settings.elastic
    filled.pid = filled.pid or os.getpid()
    return filled


class _RemoteControl:
    """Threads: ``byteps-control`` reads the stream; gRPC's own thread takes the outbox. Both end with the stream."""

    def __init__(
        self,
        settings: Settings,
        register: pb.Register,
        loop: EventLoop,
        on_message: Callable[[pb.SchedulerMessage], None],
        on_lost: Callable[[BytePSError], None],
        heartbeat: Callable[[], pb.Heartbeat],
    ) -> None:
        self._settings = settings
        self._address = settings.scheduler_address
        self._register = register
        self._loop = loop
        self._on_message = on_message
        self._on_lost = on_lost
        self._heartbeat = heartbeat
        self._outbox: queue.SimpleQueue[pb.MemberMessage | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._cancel: Callable[[], object] | None = None  # ends the current attempt's stream
        self._sender: threading.Thread | None = None
        self._is_accepted = False  # the scheduler has answered on this stream
        self._is_dismissed = False  # the scheduler said Stop: the end of the stream is no loss
        self._is_late = False  # the deadline for the first answer has passed
        self._is_over = False
        self._put_off: BytePSError | None = None  # what the scheduler of the job before this one said
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="byteps-control", daemon=True)
        loop.post(lambda: loop.call_later(settings.start_timeout_s, self._expire))
        self._thread.start()

    # ---- any thread ------------------------------------------------------------------------------------------

    def send(self, message: pb.MemberMessage) -> None:
        if not self._is_over and not self._closing.is_set():
            self._outbox.put(message)

    def close(self, reason: str = "") -> None:
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            cancel, accepted = self._cancel, self._is_accepted
        if accepted:  # the last figures, so that a report at the job's end is complete
            self._outbox.put(pb.MemberMessage(heartbeat=self._heartbeat()))
        self._outbox.put(pb.MemberMessage(leave=pb.Leave(reason=reason)))
        self._outbox.put(None)
        if accepted:
            self._thread.join(CLOSE_TIMEOUT_S)  # the scheduler ends the stream once it has our Leave
        if cancel is not None:
            cancel()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._sender is not None:
            self._sender.join(CLOSE_TIMEOUT_S)

    # ---- byteps-control --------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: BytePSError | None
        try:
            with rpc.open_channel(self._settings) as channel:
                error = self._attend(control_pb2_grpc.SchedulerStub(channel))  # type: ignore[no-untyped-call]
        except Exception as bug:
            error = CommunicationError(f"the link to the scheduler at {self._address} broke: {bug!r}")
        self._is_over = True
        self._outbox.put(None)
        if error is not None:
            self._post(lambda: self._on_lost(error))

    def _attend(self, stub: control_pb2_grpc.SchedulerStub) -> BytePSError | None:
        """Try until the scheduler answers, then read to the end. Returns why the link is lost, None if in order."""
        started_s = time.monotonic()
        while True:
            failure = self._read_stream(stub)
            if self._closing.is_set() or self._is_dismissed or isinstance(failure, BytePSError):
                return failure if isinstance(failure, BytePSError) else None
            details = "" if failure is None else failure.details() or ""
            if self._is_accepted:
                return rpc.lost(self._address, details)
            waited_s = time.monotonic() - started_s
            if self._is_late or waited_s >= self._settings.start_timeout_s:
                if self._put_off is not None:
                    return self._put_off
                return rpc.absent(self._address, self._settings.start_timeout_s, details)
            if failure is not None and not rpc.is_not_up_yet(failure):
                return rpc.explain(self._address, failure, waited_s)
            self._closing.wait(RETRY_S)

    def _read_stream(self, stub: control_pb2_grpc.SchedulerStub) -> BytePSError | grpc.RpcError | None:
        """One attempt. Returns the refusal or the error that ended it, None if the scheduler ended it."""
        answered = threading.Event()
        call = stub.Attend(self._requests(answered), metadata=rpc.metadata(self._settings))
        with self._lock:
            self._cancel = call.cancel
            if self._closing.is_set() or self._is_late:
                call.cancel()
        try:
            for message in call:
                if message.refused.later:
                    self._put_off = from_name(message.refused.error, message.refused.message)
                    call.cancel()
                    return None
                with self._lock:
                    self._is_accepted = True
                answered.set()
                self._receive(message)
                if message.HasField("refused"):
                    return from_name(message.refused.error, message.refused.message)
        except grpc.RpcError as error:
            return error
        finally:
            answered.set()
        return None

    def _requests(self, answered: threading.Event) -> Iterator[pb.MemberMessage]:
        # Runs in gRPC's thread. An attempt that gets no answer must not take anything out of the outbox.
        self._sender = threading.current_thread()
        yield pb.MemberMessage(register=self._register)
        answered.wait()
        if self._is_accepted:
            while (message := self._outbox.get()) is not None:
                yield message

    def _receive(self, message: pb.SchedulerMessage) -> None:
        self._is_dismissed = self._is_dismissed or message.HasField("stop")
        self._post(lambda: self._on_message(message))
        if message.HasField("welcome"):
            self._post(self._beat)

    def _post(self, callback: Callable[[], None]) -> None:
        self._loop.post(lambda: None if self._closing.is_set() else callback())

    # ---- the loop's thread -----------------------------------------------------------------------------------

    def _beat(self) -> None:
        if self._is_over or self._closing.is_set():
            return
        self.send(pb.MemberMessage(heartbeat=self._heartbeat()))
        self._loop.call_later(self._settings.heartbeat_interval_s, self._beat)

    def _expire(self) -> None:
        with self._lock:
            self._is_late = not self._is_accepted
            cancel = self._cancel
        if self._is_late and cancel is not None:
            cancel()
