"""Tells Kubeflow Trainer how far its TrainJob is: the field trainerStatus, which `kubectl get trainjob` shows.

The training thread calls. A thread of this module sends, at most every PERIOD_S seconds: training never waits, except
for the last report. What can't be sent is logged once, and training goes on.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from byteps_py.config.launchers import TrainJobStatus
from byteps_py.system.log import logger

PERIOD_S = 5.0
_LIMIT_S = 5.0


class TrainJobProgress:
    """Reports of one run. ``clock``: seconds of a steady clock."""

    def __init__(self, target: TrainJobStatus, clock: Callable[[], float] = time.monotonic) -> None:
        self._target = target
        self._clock = clock
        self._began_s = clock()
        self._first: float | None = None  # the share that was done when this process began
        self._next_s = self._began_s
        self._sender: threading.Thread | None = None
        self._has_warned = False

    def report(self, share: float) -> None:
        """``share`` of the run is done, from 0 to 1."""
        now_s = self._clock()
        if self._first is None:
            self._first, self._began_s = share, now_s
        if now_s < self._next_s or (self._sender is not None and self._sender.is_alive()):
            return
        self._next_s = now_s + PERIOD_S
        self._sender = threading.Thread(target=self._send, args=(self._status(share, now_s),), name="TrainJob progress")
        self._sender.start()

    def finish_sending(self) -> None:
        """Return when what was reported is sent."""
        if self._sender is not None:
            self._sender.join()

    def finish(self) -> None:
        """All is done."""
        self.finish_sending()
        self._send({"progressPercentage": 100, "estimatedRemainingSeconds": 0})

    def _status(self, share: float, now_s: float) -> dict[str, int]:
        found = {"progressPercentage": min(99, int(100 * share))}
        done = share - (self._first or 0.0)
        if done > 0:
            found["estimatedRemainingSeconds"] = int((1 - share) / done * (now_s - self._began_s))
        return found

    def _send(self, status: dict[str, int]) -> None:
        try:
            told = {**status, "lastUpdatedTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
            request = urllib.request.Request(
                self._target.url,
                data=json.dumps({"trainerStatus": told}).encode(),
                headers={
                    "Authorization": f"Bearer {Path(self._target.token_file).read_text().strip()}",
                    "Content-Type": "application/json",
                },
                method="POST",
            )
            context = None
            if self._target.certificate_file:
                context = ssl.create_default_context(cafile=self._target.certificate_file)
            with urllib.request.urlopen(request, timeout=_LIMIT_S, context=context):
                pass
        except (OSError, ValueError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # the answer's connection
            if not self._has_warned:
                self._has_warned = True
                logger.warning("the progress of the TrainJob can't be told to %s: %s", self._target.url, error)
