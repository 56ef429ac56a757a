"""The event loop of a service process: sockets, descriptors, timers, and calls from other threads.

One thread runs the loop and owns everything that is registered with it. Other threads may call only ``post``, ``stop``
and ``time``. epoll can't wait for ZeroMQ sockets, so once one is registered, ZeroMQ's poller waits for all sources.
Until then (always, in a job of one machine) epoll waits, in two thirds of the time.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import math
import os
import select
import time
from collections.abc import Callable
from typing import Any

import zmq

from byteps_py.system.spin_policy import LOOK_S, SpinPolicy

Callback = Callable[[], None]


#: After this many seconds a late timer counts for half.
_HALF_LIFE_S = 60.0


class EventLoop:
    """Calls registered callbacks in the thread that calls ``run``.

    >>> loop = EventLoop()
    >>> loop.call_later(0.0, loop.stop)
    >>> loop.run()
    >>> loop.close()
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._poller: zmq.Poller | None = None  # once there is a ZeroMQ socket
        self._readers: dict[Any, Callback] = {}
        self._writers: dict[int, Callback] = {}
        self._posted: collections.deque[Callback] = collections.deque()
        self._timers: list[tuple[float, int, Callback]] = []
        self._order = itertools.count()
        self._late_s, self._late_at = 0.0, 0.0  # delay of the most delayed timer, and when it was
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._spin_policy = SpinPolicy()
        self._stopped = False

    def add_reader(self, source: zmq.Socket[bytes] | int, callback: Callback) -> None:
        """Call ``callback`` whenever ``source`` (a ZeroMQ socket or a descriptor) can be read."""
        self._readers[source] = callback
        if isinstance(source, int):
            self._epoll.register(source, select.EPOLLIN)
        elif self._poller is None:
            self._poller = zmq.Poller()
            for fd in (self._wake, *(fd for fd in self._readers if isinstance(fd, int))):
                self._poller.register(fd, zmq.POLLIN | (zmq.POLLOUT if fd in self._writers else 0))
        if self._poller is not None:
            self._poller.register(source, zmq.POLLIN)

    def change_reader(self, source: zmq.Socket[bytes] | int, callback: Callback) -> None:
        """Replace the callback of a source that is registered."""
        self._readers[source] = callback

    def add_writer(self, fd: int, callback: Callback) -> None:
        """Also call ``callback`` whenever ``fd``, which is registered for reading, can be written."""
        self._writers[fd] = callback
        self._epoll.modify(fd, select.EPOLLIN | select.EPOLLOUT)
        if self._poller is not None:
            self._poller.register(fd, zmq.POLLIN | zmq.POLLOUT)

    def remove_writer(self, fd: int) -> None:
        """Undo ``add_writer``; ``fd`` stays registered for reading."""
        if self._writers.pop(fd, None):
            self._epoll.modify(fd, select.EPOLLIN)
            if self._poller is not None:
                self._poller.register(fd, zmq.POLLIN)

    def remove(self, source: zmq.Socket[bytes] | int) -> None:
        """Forget ``source``; nothing happens if it is not registered."""
        if self._readers.pop(source, None) is None:
            return
        if isinstance(source, int):
            self._writers.pop(source, None)
            self._epoll.unregister(source)
        if self._poller is not None:
            self._poller.unregister(source)

    def time(self) -> float:
        """The loop's monotonic clock, in seconds. Any thread."""
        return time.monotonic()

    def call_later(self, delay_s: float, callback: Callback) -> None:
        """Call ``callback`` once, after ``delay_s`` seconds."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), callback))

    @property
    def lateness_s(self) -> float:
        """The longest recent delay of a timer, in seconds: a measure of how busy this process or its machine is."""
        return self._late_s * math.exp2((self._late_at - time.monotonic()) / _HALF_LIFE_S)

    def post(self, callback: Callback) -> None:
        """Call ``callback`` soon in the loop's thread. Any thread."""
        self._posted.append(callback)
        with contextlib.suppress(OSError):  # the loop is closed, and calls nothing any more
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Make ``run`` return. Any thread, and signal handlers."""
        self._stopped = True
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """Call callbacks until ``stop``. An exception of a callback ends the loop, and is raised here."""
        while not self._stopped:
            self.run_once()

    def run_once(self, until_s: float = math.inf) -> None:
        """Call the callbacks that are due. If there are none, wait for the first ones, and until ``until_s`` on this
        loop's clock at most."""
        self._run_timers()
        timeout_ms = self._timeout_ms(until_s)
        if self._poller is not None:
            self._dispatch(self._poller.poll(timeout_ms), zmq.POLLOUT)
        else:
            self._dispatch(self._await_events(timeout_ms), select.EPOLLOUT)

    def _await_events(self, timeout_ms: int | None) -> list[tuple[int, int]]:
        """Poll for a while if that has paid lately (see ``SpinPolicy``), then sleep."""
        if timeout_ms != 0 and self._spin_policy.is_due():
            limit = time.perf_counter() + LOOK_S
            while not (events := self._epoll.poll(0)) and time.perf_counter() < limit:
                os.sched_yield()
            self._spin_policy.ended(paid=bool(events))
            if events:
                return events
        return self._epoll.poll(None if timeout_ms is None else timeout_ms / 1000)

    def _dispatch(self, events: list[tuple[Any, int]], writable: int) -> None:
        for source, event in events:
            if source == self._wake:
                os.eventfd_read(self._wake)
                self._run_posted()
                continue
            if event & writable and (callback := self._writers.get(source)):
                callback()
            if event & ~writable and (callback := self._readers.get(source)):
                callback()

    def _timeout_ms(self, until_s: float) -> int | None:
        if self._timers:
            until_s = min(until_s, self._timers[0][0])
        return max(0, int((until_s - time.monotonic()) * 1000) + 1) if until_s < math.inf else None

    def _run_timers(self) -> None:
        now = time.monotonic()
        if self._timers and now - self._timers[0][0] > self._late_s * math.exp2((self._late_at - now) / _HALF_LIFE_S):
            self._late_s, self._late_at = now - self._timers[0][0], now
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()

    def _run_posted(self) -> None:
        # Only callbacks that were posted before: a callback that posts again must not starve the sockets.
        for _ in range(len(self._posted)):
            self._posted.popleft()()

    def close(self) -> None:
        """Release the loop's descriptors; ``run`` must have returned."""
        self._epoll.close()
        os.close(self._wake)
