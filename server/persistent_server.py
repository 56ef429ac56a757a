"""A server that outlives its job: it keeps states from which a restarted job can go on, or was left out of a restart.

When a job fails, a server on a CPU machine that keeps durable states does not end. It makes a new service around the
same states, which registers at the same scheduler's address, until a scheduler is there or the time is over. Where all
other processes of a job were killed and have been started again, the server joins the new job, with states or without;
without, it asks once, as a server that was started again may have its place. ``run`` belongs to one thread; any thread,
or a signal handler, may call ``stop``.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError
from byteps_py.server.service import SummationService
from byteps_py.server.shadow import ShadowStore
from byteps_py.server.shadow_state import JobReplaced
from byteps_py.system.log import logger
from byteps_py.wording import count_text

#: ``new_service(settings, shadows)``: a service that has not run.
NewService = Callable[[Settings, ShadowStore | None], SummationService]
_RETRY_S = 0.5


class PersistentServer:
    """``keep_s``: how long states are kept after a job has failed; 0: the server ends with its job."""

    def __init__(self, settings: Settings, keep_s: float, new_service: NewService) -> None:
        self._settings = settings
        self._keep_s = keep_s
        self._new_service = new_service
        self._stopped = threading.Event()
        self._service: SummationService = new_service(settings, None)

    def stop(self, reason: str) -> None:
        """End, in order: see SummationService.stop."""
        self._stopped.set()
        self._service.stop(reason)

    @property
    def service(self) -> SummationService:
        """The present one."""
        return self._service

    def run(self) -> int:
        """Serve one job after another. Returns the exit status of the last one that was complete, or raises its
        error."""
        status = self._service.run()
        while self._is_needed():
            store = self._service.shadows.store
            kept = store.durable()
            if kept is None:
                logger.warning("%s: this server is to join it", self._service.reason)
                following = self._serve_next(store, time.monotonic() + self._settings.start_timeout_s, is_once=True)
            else:
                logger.warning(
                    "%s; the states of %s as of step %d are kept for %g s for a restarted job",
                    self._service.reason, count_text(kept[0], "partition"), kept[1], self._keep_s,
                )  # fmt: skip
                following = self._serve_next(store, time.monotonic() + self._keep_s)
            if following is None:
                text = "this server ends" if kept is None else "the states that were kept for it are dropped"
                logger.warning("no restarted job has come that needs this server: %s", text)
                return status
            status = following
        return status

    def _is_needed(self) -> bool:
        """The job did not end in order, and a restarted one may go on from what is kept, or has begun already."""
        has_use = self._service.is_replaced or self._service.shadows.store.durable() is not None
        return self._service.is_abandoned and has_use and self._keep_s > 0 and not self._stopped.is_set()

    def _serve_next(self, store: ShadowStore, until_s: float, is_once: bool = False) -> int | None:
        """Serve the next job that is complete. Returns its exit status; None if there is none until ``until_s``, or if
        this server is to stop. ``is_once``: or if one does not want it."""
        while not self._stopped.is_set() and (left_s := until_s - time.monotonic()) > 0:
            store.handle(JobReplaced(), time.monotonic())
            start_s = max(0.1, min(self._settings.start_timeout_s, left_s))
            try:
                settings = dataclasses.replace(self._settings, start_timeout_s=start_s)
                service = self._service = self._new_service(settings, store)
                if self._stopped.is_set():  # before there was a service to stop
                    service.stop("the server is to end")
                status = service.run()
                if service.was_member:
                    return status
            except BytePSError as error:
                logger.info("no restarted job yet: %s", error)
            if is_once or not self._service.has_closed:
                return None  # its thread pool still uses the states, if it has not closed
            self._stopped.wait(min(_RETRY_S, max(0.0, until_s - time.monotonic())))
        return None
