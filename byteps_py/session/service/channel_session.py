"""The channel between a rank and its communication service. It has no thread of its own: one of the waiting threads
reads, for all of them.

The GIL is released while a thread waits. Any thread may call; a forked child gets a UsageError.
"""

from __future__ import annotations

import contextlib
import functools
import select
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable

from byteps_py.config.settings import Settings
from byteps_py.dataplane.nixl_agent import new_rdma_lane
from byteps_py.errors import BytePSError, NotInitializedError, PeerLostError, ProtocolError, StallError
from byteps_py.session import base, failure_reports
from byteps_py.session.base import Session
from byteps_py.session.peers import PeerTransport
from byteps_py.session.progress import Progress
from byteps_py.system.channel import Channel
from byteps_py.wire import rank_link as protocol

#: The service itself reports a stall at the stall limit. The session waits this much longer for its report.
PATIENCE_S = 30.0
#: A rank tells its progress no more often.
TELL_PROGRESS_S = 1.0


class ChannelSession(Session):
    """A session over ``channel``. ``state`` guards all that messages change. A service that is silent for ``silence_s``
    seconds while this rank needs it counts as lost. ``stall_limit_s``: after which it reports a stall; 0: never."""

    #: With this, this rank connects to ranks of other machines.
    connects: Settings | None = None
    #: After this time without a message, a rank that waits reports its steps.
    report_after_s = 1.0

    def __init__(self, channel: Channel, silence_s: float, stall_limit_s: float = 0.0) -> None:
        self.progress = Progress()
        self._tell_progress_s = 0.0  # by the steady clock: not before
        self._channel = channel
        self._stall_limit_s = stall_limit_s
        self._requests = 0
        self._silence_s = silence_s
        self._forks = base.fork_count
        self._is_welcome = False  # until then, the service does not answer a Ping
        self._has_pinged = False  # the service was asked whether it is alive
        self._reported_steps = self.steps_begun  # as last reported to the service
        self._fatal: BytePSError | None = None
        self._closed = False
        self._reading = False
        self.state = threading.Condition()
        self._peers: PeerTransport | None = None
        self._readable: select.poll | None = None  # for the channel and the inbox of the peers, once there are peers

    @abstractmethod
    def _handle(self, message: bytes, fds: list[int]) -> None:
        """Process one message and its descriptors. Called with ``state`` held."""

    @property
    def is_forked(self) -> bool:
        """True in a child of the process that is the rank."""
        return self._forks != base.fork_count

    @property
    def peers(self) -> PeerTransport | None:
        with self.state:
            if self._peers is None and (self.local_size > 1 or (self.connects and self.num_machines > 1)):
                first = self.rank - self.local_rank
                local_ranks = range(first, first + self.local_size)
                settings = self.connects if self.num_machines > 1 else None
                new_lane = (
                    functools.partial(new_rdma_lane, settings) if settings is not None and settings.rdma else None
                )
                self._peers = PeerTransport(self, self.rank, local_ranks, settings, self.since_epoch, new_lane)
                if self._peers.connector is not None:
                    self._peers.connector.slowest_mbit = self.machine_facts.slowest_mbit
                self._readable = select.poll()
                for fd in (self._channel.fileno(), self._peers.fileno()):
                    self._readable.register(fd, select.POLLIN)
            return self._peers

    def next_request(self) -> int:
        """The number of a request that the service answers."""
        with self.state:
            self._requests += 1
            return self._requests

    def time_limit(self, timeout_s: float | None) -> float | None:
        """The time limit of a wait in seconds; None: no limit. By default longer than the stall limit, at which the
        service gives up."""
        return self._stall_limit_s + PATIENCE_S if timeout_s is None and self._stall_limit_s else timeout_s

    def read_available(self) -> None:
        """Process the messages that have arrived. Never blocks."""
        with self.state:
            while not self._reading and self._fatal is None and self._read(0):
                pass

    @property
    def is_being_read(self) -> bool:
        """True while a thread reads the channel. Called with ``state`` held."""
        return self._reading

    def send(self, message: object, fds: tuple[int, ...] = ()) -> None:
        """Send a message of rank_link.py to the service, with descriptors that stay the caller's. Raises the error that
        ends the session."""
        self.check_open()
        data = protocol.encode(message)
        try:
            self._channel.send(data, fds)
            return
        except PeerLostError as lost:
            error = lost
        with self.state:
            while not self._reading and self._read(0):
                pass  # its last messages may say why
            self._fail(error)
        self.check_open()  # here, so that no broken pipe precedes the reason in the traceback

    def check_open(self) -> None:
        """See Session.check_open. Does not block."""
        if self._fatal is not None:
            raise type(self._fatal)(*self._fatal.args)
        if self._closed:
            raise NotInitializedError("the session is closed; call byteps_py.init() first")
        if self.is_forked:
            raise base.forked_error(getattr(self, "rank", "?"))

    def wait_until(
        self, condition: Callable[[], bool], timeout_s: float | None, waiting_for: Callable[[], str]
    ) -> None:
        """Return when ``condition`` holds; meanwhile read messages, or let another thread read them. ``condition`` is
        called with ``state`` held.

        Raises StallError after ``timeout_s`` seconds (None: no limit), and the error that ends the session. Both
        messages contain the text of ``waiting_for``.
        """
        began_s = time.monotonic()
        deadline = None if timeout_s is None else began_s + timeout_s
        with self.state:
            if condition():
                return
            number = self.flight.begin_wait() if self.flight is not None else 0
            profiled = self.profile_wait(waiting_for) if self.profile_wait is not None else contextlib.nullcontext()
            try:
                with profiled:
                    self._wait_until(condition, deadline, timeout_s, waiting_for)
            finally:
                self.progress.waited(began_s)
                if number and self.flight is not None:
                    self.flight.end_wait(number)

    def _wait_until(
        self,
        condition: Callable[[], bool],
        deadline: float | None,
        timeout_s: float | None,
        waiting_for: Callable[[], str],
    ) -> None:
        """Called with ``state`` held."""
        while not condition():
            if self._fatal is not None and self._is_welcome:
                raise failure_reports.while_waiting(self._fatal, waiting_for())
            self.check_open()
            left = 3600.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                # The message, or the reason for its absence, may have arrived in time while this process did not
                # have the processor.
                if not self._reading and (self._read(0.0) or (self._fatal is not None and self._is_welcome)):
                    continue
                raise StallError(f"{waiting_for()} within {timeout_s:g} s")
            if self._reading:
                self.state.wait(left)
            elif not self._is_welcome:
                self._read(left)
            else:
                self._read_or_ping(left)

    def _read_or_ping(self, timeout_s: float) -> None:
        """``_read``; after half of the silence limit without a message, send a Ping. A service whose process has ended
        closes the channel, but a frozen one does nothing."""
        patience_s = self._silence_s / 2
        quiet_s = min(timeout_s, patience_s)
        came = self._read(min(quiet_s, self.report_after_s))
        if not came and quiet_s > self.report_after_s and self._fatal is None and not self._closed:
            self._report_steps()
            came = self._read(quiet_s - self.report_after_s)
        if came:
            self._has_pinged = False
        elif timeout_s > patience_s and self._fatal is None and not self._closed:
            if self._has_pinged:
                self._fail(failure_reports.service_frozen(self._channel.peer_pid, self._silence_s))
            self._has_pinged = True
            with contextlib.suppress(PeerLostError):  # the next read reports it
                self._channel.try_send(protocol.encode(protocol.Ping()))

    def tell_progress(self, at_once: bool = False) -> None:
        now_s = time.monotonic()
        if (now_s < self._tell_progress_s and not at_once) or self._closed or self._fatal is not None:
            return
        self._tell_progress_s = now_s + TELL_PROGRESS_S
        self.tell(protocol.ProgressMade(**self.progress.facts(self.result_bytes)))

    def tell(self, message: object) -> None:
        if not self._closed and self._fatal is None:
            with contextlib.suppress(BytePSError):  # the next read reports it
                self._channel.try_send(protocol.encode(message))

    def _report_steps(self) -> None:
        if self.progress.steps:
            self.tell_progress()
        begun = self.steps_begun
        if begun is not self._reported_steps:
            counts = [protocol.StepCount(steps, optimizers, name) for name, (steps, optimizers) in begun.items()]
            with contextlib.suppress(PeerLostError):  # the next read reports it
                if self._channel.try_send(protocol.encode(protocol.StepsBegun(tuple(counts)))):
                    self._reported_steps = begun

    def _read(self, timeout_s: float) -> bool:
        """Read one message. True if one arrived. Called with ``state`` held, which is released while the channel is
        polled."""
        self._reading = True
        try:
            message, came = None, False
            peers, readable = self._peers, self._readable
            ready: Iterable[int] = ()
            if timeout_s:
                self.state.release()
            try:
                if peers is None or readable is None:
                    message = self._channel.receive(timeout_s)
                else:
                    ready = [fd for fd, _ in readable.poll(timeout_s * 1000)]
            finally:
                if timeout_s:
                    self.state.acquire()
            if peers is not None and ready and not self._closed:
                if peers.fileno() in ready:
                    came = peers.take_message()
                if self._channel.fileno() in ready:
                    message = self._channel.receive(0)
            if message is not None:
                self._handle(*message)
            return came or message is not None
        except PeerLostError:
            if not self._closed:
                self._fail(failure_reports.service_lost(self._channel.peer_pid))
            return False
        except ProtocolError as error:
            self._fail(error)
            return False
        finally:
            self._reading = False
            self.state.notify_all()

    def _fail(self, error: BytePSError) -> None:
        if self._fatal is None:
            self._fatal = error
            if self.flight is not None:
                self.flight.dump.dump_at(error, is_end=False)
