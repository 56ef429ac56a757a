"""A member's link to the scheduler over gRPC; see client.py.

Threads: ``byteps-control`` reads one stream after another. A thread of gRPC sends the messages of a stream, and
heartbeats, so that heartbeats are sent even while the event loop is busy. Both threads end with the link.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError, CommunicationError, ProtocolError, from_name
from byteps_py.proto import control_pb2 as pb, control_pb2_grpc
from byteps_py.scheduler import rpc
from byteps_py.scheduler.member_links.protocol import MemberEnd
from byteps_py.scheduler.rpc import retry_steadily
from byteps_py.system.log import logger
from byteps_py.system.loop import EventLoop
from byteps_py.wire.control_link import ControlEvents

RETRY_S = 0.1
_HURRIED_TRIES = 100  # after so many, the link tries less often


class _Stream:
    """The member's end of one connection. ``outgoing``: the messages to send; None ends it."""

    def __init__(self) -> None:
        self.outgoing: queue.SimpleQueue[pb.MemberMessage | None] = queue.SimpleQueue()
        self.sender: threading.Thread | None = None
        self.cancel: Callable[[], object] = lambda: None


@dataclass(slots=True, eq=False)
class _Absence:
    """The time since the connection to the scheduler broke. ``is_reported``: ``on_away`` has been called. ``denial``:
    answers of another process at its address."""

    since_s: float
    why: str = ""
    is_reported: bool = False
    denial: BytePSError | None = None


class GrpcControlLink:
    """A ControlLink. ``_lock`` guards the member's end, the stream and the flags about them."""

    close_timeout_s = 5.0

    #: A shorter absence of the scheduler is not reported.
    short_absence_s = 0.5

    #: A process that ends waits for an absent scheduler, to send Leave, until it has been away for this long.
    away_close_s = 2.0

    def __init__(
        self,
        settings: Settings,
        register: pb.Register,
        loop: EventLoop,
        events: ControlEvents,
    ) -> None:
        self.steady_connections = 0
        self._settings = settings
        self._address = settings.scheduler_address
        self._loop = loop
        self._events = events
        self._lock = threading.Lock()
        self._end = MemberEnd(register)
        self._attempt: _Stream | None = None  # being read
        self._stream: _Stream | None = None  # the same, once Welcome has arrived on it
        self._is_dismissed = False  # Stop has arrived: the end of the stream is no loss
        self._why_absent = ""  # before the first Welcome: why the last attempt failed
        self._is_late = False  # the deadline for the first answer has passed
        self._is_over = False
        # The refusal of a scheduler that may accept this process later, or of one that is not this member's.
        self._put_off: BytePSError | None = None
        self._absence: _Absence | None = None  # of the scheduler, once it has welcomed this member
        self._is_heartbeat_due = False  # the loop's thread is to make a heartbeat, and has not yet
        self._closing = threading.Event()
        self._gives_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="byteps-control", daemon=True)
        loop.post(lambda: loop.call_later(settings.start_timeout_s, self._expire))
        self._thread.start()

    # ---- any thread ------------------------------------------------------------------------------------------

    def send(self, message: pb.MemberMessage) -> None:
        with self._lock:
            if not self._is_over and not self._closing.is_set():
                self._send(message)

    def close(self, reason: str = "") -> None:
        last = pb.MemberMessage(heartbeat=self._events.heartbeat())  # so that the report at the job's end is complete
        with self._lock:
            if self._closing.is_set():
                return
            is_member, is_here, absence = self._end.is_member, self._stream is not None, self._absence
            self._send(last)
            self._send(pb.MemberMessage(leave=pb.Leave(reason=reason)))
            self._closing.set()
            if self._stream is not None:
                self._stream.outgoing.put(None)
        if is_member and not self._is_over:  # the scheduler ends the stream once it has received Leave
            away_s = 0.0 if absence is None else time.monotonic() - absence.since_s
            self._thread.join(self.close_timeout_s if is_here else max(0.0, self.away_close_s - away_s))
        with self._lock:
            self._gives_up.set()
            attempt = self._attempt
        if attempt is not None:
            attempt.cancel()
        self._thread.join(self.close_timeout_s)
        if attempt is not None and attempt.sender is not None:
            attempt.sender.join(self.close_timeout_s)

    def _send(self, message: pb.MemberMessage) -> None:
        """Send a message. Called with the lock held."""
        stamped = self._end.stamp(message)
        if self._stream is not None:
            self._stream.outgoing.put(stamped)

    # ---- byteps-control --------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: BytePSError | None
        try:
            with rpc.open_channel(self._settings) as channel:
                error = self._attend(control_pb2_grpc.SchedulerStub(channel))  # type: ignore[no-untyped-call]
        except Exception as bug:
            error = CommunicationError(f"the link to the scheduler at {self._address} broke: {bug!r}")
        self._is_over = True
        if error is not None:
            self._post(lambda: self._events.on_lost(error))

    def _attend(self, stub: control_pb2_grpc.SchedulerStub) -> BytePSError | None:
        """Read one stream after another. Returns why the link is lost for good; None if it ends in order."""
        started_s = time.monotonic()
        tries = 0
        while True:
            stream = _Stream()
            failure = self._read_stream(stub, stream)
            with self._lock:
                was_here, self._stream = self._stream is not None, None
            stream.outgoing.put(None)
            if self._gives_up.is_set() or (self._closing.is_set() and self._may_end(failure)):
                return None
            if isinstance(failure, BytePSError) or self._is_dismissed:
                return failure if isinstance(failure, BytePSError) else None
            if self._end.is_member:
                tries = 0 if was_here else tries + (1 if self._put_off is None else _HURRIED_TRIES)
                # Whatever the address answers meanwhile: the scheduler may be started again, and nothing is lost by
                # trying.
                if error := self._wait_for_scheduler("" if failure is None else failure.details() or ""):
                    return error
            elif error := self._first_failure(failure, time.monotonic() - started_s):
                return error
            self._gives_up.wait(0.0 if was_here else RETRY_S if tries < _HURRIED_TRIES else 5 * RETRY_S)

    def _may_end(self, failure: BytePSError | grpc.RpcError | None) -> bool:
        """While closing: True if the scheduler has Leave, has ended the stream, has never known this process, or has
        been away for too long."""
        with self._lock:
            if not isinstance(failure, grpc.RpcError) or not self._end.is_member or not self._end.unconfirmed:
                return True
            return self._absence is not None and time.monotonic() - self._absence.since_s >= self.away_close_s

    def _first_failure(self, failure: grpc.RpcError | None, waited_s: float) -> BytePSError | None:
        """Before the first Welcome: the error that ends the link; None if the scheduler may only be late."""
        details = "" if failure is None else failure.details() or ""
        if failure is not None and failure.code() is grpc.StatusCode.CANCELLED:  # by _expire: it says nothing
            details = self._why_absent
        self._why_absent = details or self._why_absent
        if self._is_late or waited_s >= self._settings.start_timeout_s:
            return self._put_off or rpc.absent(self._address, self._settings.start_timeout_s, details)
        if failure is not None and not rpc.is_not_up_yet(failure):
            return rpc.explain(self._address, failure, waited_s)
        return None

    def _read_stream(self, stub: control_pb2_grpc.SchedulerStub, stream: _Stream) -> BytePSError | grpc.RpcError | None:
        """One connection. Returns the refusal or the error that ended it; None if the scheduler ended it."""
        with self._lock:
            register = self._end.register()
        call = stub.Attend(self._requests(register, stream), metadata=rpc.metadata(self._settings))
        with self._lock:
            stream.cancel = call.cancel
            self._attempt = stream
            if self._gives_up.is_set() or self._is_late:
                call.cancel()
        try:
            for received in call:
                message = self._end.read(received)  # only this thread accepts messages
                if message.HasField("refused"):
                    error = from_name(message.refused.error, message.refused.message)
                    with self._lock:
                        is_final = not message.refused.later and not self._end.doubts(message)
                    if is_final:
                        self._pass_on(message)
                        return error
                    self._put_off = error
                    call.cancel()
                    return None
                if message.HasField("welcome"):
                    self.steady_connections = retry_steadily(self._settings.scheduler_port)
                self._receive(message, stream)
        except ProtocolError as error:
            call.cancel()
            with self._lock:
                if not self._end.is_member:
                    return error
            self._put_off = error  # it is not the scheduler that this member knows, which may come back
        except grpc.RpcError as error:
            return error
        return None

    def _receive(self, message: pb.SchedulerMessage, stream: _Stream) -> None:
        with self._lock:
            is_news = self._end.accept(message)
            is_first = not self._end.is_member
            if message.HasField("welcome"):
                is_news = is_first
                self._welcomed(message, stream)
        self._is_dismissed = self._is_dismissed or message.HasField("stop")
        if is_news:
            self._pass_on(message)

    def _pass_on(self, message: pb.SchedulerMessage) -> None:
        self._post(lambda: self._events.on_message(message))

    def _welcomed(self, message: pb.SchedulerMessage, stream: _Stream) -> None:
        """The link goes on, on this stream. With the lock held."""
        for kept in self._end.welcomed(message):
            stream.outgoing.put(kept)
        stream.outgoing.put(self._end.stamp(pb.MemberMessage(heartbeat=pb.Heartbeat(bare=True))))
        self._stream, self._put_off = stream, None
        if self._closing.is_set():
            stream.outgoing.put(None)
        if self._absence is not None:
            absence, self._absence = self._absence, None
            away_s = time.monotonic() - absence.since_s
            text = "the scheduler at %s is back after %.1f s: messages that waited for it are sent"
            if absence.is_reported:
                logger.warning(text, self._address, away_s)
                self._post(self._events.on_back)
            else:
                logger.info(text, self._address, away_s)

    def _wait_for_scheduler(self, details: str) -> BytePSError | None:
        """The scheduler is away, or another process answers at its address. Returns the error that ends the link; None
        while the link waits for it."""
        now_s = time.monotonic()
        with self._lock:
            if (absence := self._absence) is None:
                absence = self._absence = _Absence(now_s)
                self._post(lambda: self._loop.call_later(self.short_absence_s, lambda: self._report_absence(absence)))
            absence.why = details or absence.why
            if (denial := self._put_off) is not None and absence.denial is None:
                absence.denial = denial
                if absence.is_reported:
                    self._post(lambda: self._events.on_away(denial))
            is_waiting = bool(self._end.epoch) or now_s - absence.since_s < self._settings.start_timeout_s
            return None if is_waiting else absence.denial or rpc.lost(self._address, absence.why)

    def _requests(self, register: pb.MemberMessage, stream: _Stream) -> Iterator[pb.MemberMessage]:
        # Runs in gRPC's thread.
        stream.sender = threading.current_thread()
        interval_s = self._settings.heartbeat_interval_s * self._settings.control_pace
        yield register
        message = stream.outgoing.get()  # Welcome puts the first message there: nothing is sent before it
        next_beat_s = time.monotonic()
        while message is not None:
            yield message
            message = None
            while message is None:
                left_s = next_beat_s - time.monotonic()
                if left_s <= 0:
                    next_beat_s += interval_s - left_s
                    if (bare := self._request_heartbeat()) is not None:
                        yield bare
                    continue
                with contextlib.suppress(queue.Empty):
                    message = stream.outgoing.get(timeout=left_s)
                    if message is None:
                        return

    def _request_heartbeat(self) -> pb.MemberMessage | None:
        """Let the loop's thread make a heartbeat. While it is too busy for that, return a bare one: the process
        lives."""
        with self._lock:
            if self._is_heartbeat_due:
                return self._end.stamp(pb.MemberMessage(heartbeat=pb.Heartbeat(bare=True)))
            self._is_heartbeat_due = True
        self._loop.post(self._report)
        return None

    def _post(self, callback: Callable[[], None]) -> None:
        self._loop.post(lambda: None if self._closing.is_set() else callback())

    # ---- the loop's thread -----------------------------------------------------------------------------------

    def _report(self) -> None:
        if self._is_over or self._closing.is_set():
            return
        heartbeat = pb.MemberMessage(heartbeat=self._events.heartbeat())
        with self._lock:
            self._is_heartbeat_due = False
            self._send(heartbeat)

    def _report_absence(self, absence: _Absence) -> None:
        """Report an absence of the scheduler, unless it was short."""
        with self._lock:
            if self._is_over or self._is_dismissed or self._absence is not absence:
                return
            absence.is_reported = True
            error = absence.denial or rpc.lost(self._address, absence.why)
        self._events.on_away(error)

    def _expire(self) -> None:
        with self._lock:
            self._is_late = not self._end.is_member
            attempt = self._attempt
        if self._is_late and attempt is not None:
            attempt.cancel()
