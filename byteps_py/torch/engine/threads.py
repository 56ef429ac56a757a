"""Threads that complete futures: as many as are needed at one time, each kept for a moment for the next task.

Owns the threads, not what they do. Any thread may call. A task may block, and may start collectives and wait for them:
it never keeps another task from running.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections.abc import Callable

import torch

_IDLE_S = 5.0
_JOIN_LIMIT_S = 5.0
_log = logging.getLogger("byteps_py")

Task = Callable[[], None]


class Pool:
    """Runs every task at once: on an idle thread, else on a new one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Task | None]] = []
        self._threads: set[threading.Thread] = set()

    def run(self, task: Task) -> None:
        """Begin ``task`` on a thread of its own. What it raises is logged."""
        with self._lock:
            if self._idle:
                self._idle.pop().put(task)  # the one that became idle last
                return
            inbox: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
            inbox.put(task)
            thread = threading.Thread(target=self._serve, args=(inbox,), name=self._name, daemon=True)
            self._threads.add(thread)
        thread.start()

    def close(self) -> None:
        """Wait for the threads that run to end, for a while; more tasks may come later all the same."""
        with self._lock:
            idle, self._idle = self._idle, []
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        for inbox in idle:
            inbox.put(None)
        for thread in threads:
            thread.join(_JOIN_LIMIT_S)

    def _serve(self, inbox: queue.SimpleQueue[Task | None]) -> None:
        torch.set_grad_enabled(False)  # a new thread's is on; callbacks copy into tensors that require gradients
        try:
            while (task := self._next(inbox)) is not None:
                try:
                    task()
                except Exception:
                    _log.exception("a callback of a collective failed")
                del task  # and with it the tensors that it holds
                with self._lock:
                    self._idle.append(inbox)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _next(self, inbox: queue.SimpleQueue[Task | None]) -> Task | None:
        try:
            return inbox.get(timeout=_IDLE_S)
        except queue.Empty:
            with self._lock:
                if inbox in self._idle:
                    self._idle.remove(inbox)
                    return None
            return inbox.get()  # a task was given to it just now


POOL = Pool("byteps-futures")
atexit.register(POOL.close)
