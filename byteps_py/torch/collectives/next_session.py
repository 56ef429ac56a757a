"""The next group of an elastic job, of which a thread waits to be part while the rank trains by itself."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future

from byteps_py.session import Session


class NextSession:
    """``opener`` ends the present session, and opens the next one; a thread calls it. Any thread."""

    def __init__(self, opener: Callable[[], Session]) -> None:
        self._session: Future[Session] = Future()
        run = contextvars.copy_context().run  # with the caller's context of ranks
        threading.Thread(target=run, args=(self._run, opener), name="byteps-next-group", daemon=True).start()

    def _run(self, opener: Callable[[], Session]) -> None:
        try:
            self._session.set_result(opener())
        except BaseException as error:  # ``take`` raises it
            self._session.set_exception(error)

    @property
    def is_ready(self) -> bool:
        """``take`` returns or raises at once."""
        return self._session.done()

    def wait(self) -> None:
        """Until it is ready: settings.start_timeout_s bounds it."""
        self._session.exception()

    def take(self) -> Session:
        """Waits. Raises the errors of ``opener``."""
        return self._session.result()
