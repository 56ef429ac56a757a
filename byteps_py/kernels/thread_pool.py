"""A small pool of threads that runs work by priority, for work that releases the GIL.

Owns its threads and the queue of waiting work; must not know what the work does. Any thread may call ``submit`` and
``close``, except that the pool's own threads must not call ``close``.
"""

from __future__ import annotations

import heapq
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable

from byteps_py.errors import CommunicationError, StallError, UsageError
from byteps_py.system.log import logger

Work = Callable[[], None]
Done = Callable[[BaseException | None], None]

_MAX_DEFAULT_THREADS = 4  # a few cores saturate a machine's memory


def default_threads(configured: int) -> int:
    """``configured`` if above 0, else one thread for each core this process may use, at most 4."""
    return configured if configured > 0 else min(len(os.sched_getaffinity(0)), _MAX_DEFAULT_THREADS)


class ThreadPool:
    """``threads`` daemon threads, named ``name-0``, ``name-1``, … Raises UsageError if there is none.

    >>> pool = ThreadPool(threads=1, name="sum")
    >>> finished = threading.Event()
    >>> pool.submit(0, lambda: None, lambda error: finished.set())
    >>> finished.wait(10)
    True
    >>> pool.close()
    """

    def __init__(self, threads: int, name: str) -> None:
        if threads < 1:
            raise UsageError(f"thread pool {name!r} needs at least one thread, got {threads}")
        self._name = name
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, int, Work, Done]] = []  # a heap: highest priority, then oldest, first
        self._order = itertools.count()
        # One token for each piece of work, and at the end one for each thread. SimpleQueue waits in C: a round trip
        # through the thread pool takes 12 µs, with a Condition 13.
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, priority: int, work: Work, done: Done) -> None:
        """Run ``work()`` on a pool thread, then ``done(None)``, or ``done(error)`` if ``work`` raised ``error``.

        Work of a higher priority starts first; work of one priority starts in the order of submission. ``done`` is
        called exactly once, on the pool's thread, and must not raise. Raises ``UsageError`` after ``close``.
        """
        with self._lock:
            if self._closed:
                raise UsageError(f"thread pool {self._name!r} is closed: nothing can be submitted to it")
            heapq.heappush(self._waiting, (-priority, next(self._order), work, done))
        self._tokens.put(None)

    def close(self, timeout_s: float = 10.0) -> None:
        """Let running work finish, fail work that has not started with ``CommunicationError``, join the threads.

        When ``close`` returns, no work runs and every ``done`` was called. It raises ``StallError`` if work is still
        running after ``timeout_s`` seconds; the caller must then keep the memory that the work uses. A second call only
        joins again.
        """
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            for _ in self._threads:
                self._tokens.put(None)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        if stuck:
            raise StallError(f"thread pool {self._name!r}: {', '.join(stuck)} still busy {timeout_s:g} s after close()")

    def _run(self) -> None:
        while True:
            self._tokens.get()  # unbounded on purpose: close() sends one token to each thread
            with self._lock:
                if not self._waiting:
                    return  # only close() sends tokens without work
                _, _, work, done = heapq.heappop(self._waiting)
                closed = self._closed
            self._run_one(None if closed else work, done)
            del work, done  # an idle thread must not keep memory of finished work alive

    def _run_one(self, work: Work | None, done: Done) -> None:
        error: BaseException | None = None
        if work is None:
            error = CommunicationError(f"thread pool {self._name!r} was closed before this work started")
        else:
            try:
                work()
            except BaseException as raised:  # the caller that waits for the work handles it, SystemExit included
                error = raised
        try:
            done(error)
        except Exception:
            # A defect of the caller. The thread goes on: otherwise all later work would hang silently.
            logger.exception("thread pool %r: the callback of finished work failed", self._name)
