"""Threads that complete operations for which no caller waits, and the order in which futures complete.

``Pool``: as many threads as are needed at one time, each kept for a moment for the next task. A task may block, and may
start collectives and wait for them: it never keeps another task from running. ``Completer``: completes the futures of
one group in the order of the calls. A future's callbacks run on the thread that completes it and may start collectives
themselves, so it is never a thread that carries operations out. Any thread may call.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

_IDLE_S = 5.0
_JOIN_LIMIT_S = 5.0
_log = logging.getLogger("byteps_py")

Task = Callable[[], None]


class Pool:
    """Runs every task at once: on an idle thread, otherwise on a new one. ``idle_s``: how long one waits for a task."""

    def __init__(self, name: str, idle_s: float = _IDLE_S) -> None:
        self._name, self._idle_s = name, idle_s
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Task | None]] = []
        self._threads: set[threading.Thread] = set()
        self._ending: set[threading.Thread] = set()  # those for which ``close`` waits

    def run(self, task: Task) -> None:
        """Run ``task`` on another thread. An exception of it is logged."""
        with self._lock:
            if self._idle:
                self._idle.pop().put(task)  # the thread that became idle last
                return
            inbox: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
            inbox.put(task)
            thread = threading.Thread(target=self._serve, args=(inbox,), name=self._name, daemon=True)
            self._threads.add(thread)
            thread.start()  # here: ``close`` joins the threads of the set

    def close(self) -> None:
        """Wait, within a time limit, for the running threads to end. Tasks may still be added afterwards."""
        with self._lock:
            idle, self._idle = self._idle, []
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
            self._ending.update(threads)
        for inbox in idle:
            inbox.put(None)
        for thread in threads:
            thread.join(_JOIN_LIMIT_S)

    def _serve(self, inbox: queue.SimpleQueue[Task | None]) -> None:
        torch.set_grad_enabled(False)  # on in new threads; callbacks copy into tensors that require gradients
        try:
            while (task := self._next(inbox)) is not None:
                try:
                    task()
                except Exception:
                    _log.exception("a task of the pool failed")
                del task  # it holds tensors
                with self._lock:
                    if threading.current_thread() in self._ending:
                        return
                    self._idle.append(inbox)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
                self._ending.discard(threading.current_thread())

    def _next(self, inbox: queue.SimpleQueue[Task | None]) -> Task | None:
        try:
            return inbox.get(timeout=self._idle_s)
        except queue.Empty:
            with self._lock:
                if inbox in self._idle:
                    self._idle.remove(inbox)
                    return None
            return inbox.get()  # a task was added just now


POOL = Pool("byteps-pool")
atexit.register(POOL.close)


class Completable(Protocol):
    """An operation with a future."""

    def complete_or_fail(self) -> None:
        """Return when the operation is over, successful or not. Raises nothing."""

    def fire(self) -> None:
        """Complete the future. Its callbacks run on this thread."""


class Completer:
    """Completes the futures of one group in the order of the calls. Callbacks of one future do not delay the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Completable] = deque()
        self._is_served = False

    def add(self, work: Completable) -> None:
        """Complete the future of ``work`` after those added before. Returns at once."""
        with self._lock:
            self._waiting.append(work)
            if self._is_served:
                return
            self._is_served = True
        POOL.run(self._serve)

    def _serve(self) -> None:
        with self._lock:
            work = self._waiting.popleft()
        work.complete_or_fail()
        with self._lock:
            self._is_served = bool(self._waiting)
            more = self._is_served
        if more:
            POOL.run(self._serve)  # another thread waits for the next work while callbacks run on this thread
        work.fire()
