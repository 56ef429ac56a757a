"""Threads for what must go on although nobody waits for it: the second round of an operation just started.

Without them a rank that does something else first would hold up all others, and ranks that wait for two operations in
different orders would wait for ever. One thread for each operation that is under way, used again by later ones; none
for synchronous calls. They end with the context: the session is closed first, so that none is still waiting.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import cast

from byteps_py.torch.engine.context import Context

_END_S = 10.0


class Workers:
    """Runs functions, each at once. Any thread may call ``start``."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._lock = threading.Lock()

    def start(self, task: Callable[[], None]) -> None:
        """Run ``task``, which must not raise, on a thread of its own."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                # Daemons: a program that ends does not wait for them; closing the session ends them.
                thread = threading.Thread(target=self._run, name=f"byteps-round-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._tasks.put(task)

    def close(self) -> None:
        """End the threads. Call it with the session closed."""
        with self._lock:
            threads, self._threads = self._threads, []
            for _ in threads:
                self._tasks.put(None)
        for thread in threads:
            thread.join(_END_S)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            with self._lock:
                self._idle += 1


def workers_of(context: Context) -> Workers:
    """The workers of the context's session."""
    with context.lock:
        context.session  # noqa: B018  raises NotInitializedError
        found = context.belongings.setdefault(Workers, Workers())
        return cast(Workers, found)
