"""Threads that serve connections between ranks while no thread of the program waits for messages."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from typing import Protocol

#: A thread that waits for messages sends waiting bytes. The background thread does so only if there is none after this
#: time.
_GRACE_S = 0.002
_IDLE_S = 5.0
_POLL_MS = 250
_JOIN_LIMIT_S = 2.0


class Sending(Protocol):
    """A connection over which bytes may wait to be sent."""

    @property
    def waiting_descriptors(self) -> list[int]: ...

    @property
    def has_waiting(self) -> bool: ...

    def send_waiting(self) -> None: ...


class BackgroundSender:
    """A thread that sends waiting bytes while no thread waits for messages; it ends when nothing is left for a while.
    ``is_read``: true if a thread waits, which then sends. ``wake`` makes that thread check again."""

    def __init__(self, is_read: Callable[[], bool], wake: Callable[[], None]) -> None:
        self._is_read = is_read
        self._wake = wake
        self._changed = threading.Condition()
        self._connections: set[Sending] = set()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(self, connection: Sending) -> None:
        """Bytes of ``connection`` wait."""
        with self._changed:
            self._connections.add(connection)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="byteps-sender", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self, is_forked: bool = False) -> None:
        """End the thread."""
        self._is_closed = True
        if not is_forked:
            with self._changed:
                self._changed.notify()
                thread = self._thread
            if thread is not None:
                thread.join(_JOIN_LIMIT_S)

    def _serve(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._connections or self._is_closed, _IDLE_S) or self._is_closed:
                    self._thread = None
                    return
                connections = list(self._connections)
            time.sleep(_GRACE_S)
            if self._is_read():
                continue
            writable = select.poll()
            for connection in connections:
                for fd in connection.waiting_descriptors if connection.has_waiting else ():
                    writable.register(fd, select.POLLOUT)
            writable.poll(_POLL_MS)
            for connection in connections:
                connection.send_waiting()
                with self._changed:
                    if not connection.has_waiting:
                        self._connections.discard(connection)
            self._wake()


class LinkKeeper:
    """A thread that calls ``check_links`` every ``interval_s`` seconds. It begins with ``start``."""

    def __init__(self, check_links: Callable[[], None], interval_s: float) -> None:
        self._check_links, self._interval_s = check_links, interval_s
        self._closed = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless it has begun or is closed. Ranks connect on a thread, while another one may call ``close``."""
        with self._starting:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._serve, name="byteps-links", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        while not self._closed.wait(self._interval_s):
            self._check_links()

    def close(self, is_forked: bool = False) -> None:
        """End the thread."""
        if not is_forked:
            self._closed.set()
            with self._starting:
                thread = self._thread
            if thread is not None:
                thread.join(_JOIN_LIMIT_S)
