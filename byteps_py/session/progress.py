"""The progress of a rank since it began to train: its steps, tokens, and the time that it has waited for communication.

``Progress`` lives as long as its process is a rank, through every session. The training thread writes, and any thread
may read: a number that is read is one that was true a moment ago. Nothing here takes a lock. Knows no sockets.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

#: Rates are of so many seconds.
WINDOW_S = 10.0
_LOOKS = 32  # that are kept at most
#: Threads of this package. They wait beside the training thread, which may compute meanwhile.
_OWN_THREADS = "byteps"


class _Look(NamedTuple):
    at_s: float
    steps: int
    tokens: int
    samples: int
    exposed_s: float


class Progress:
    """The counters of one rank. ``clock``: steady, in seconds; ``wall_clock``: in seconds since 1970.

    Attributes:
        steps: optimizer steps. Of several optimizers, those of the one that steps most often. A job that goes on from
            a step begins with that number.
        step_s: from the step before the latest to the latest one, in seconds.
        last_step_at_s: when that was, by the wall clock; 0: there was none.
        tokens: of this rank's batches, as the script counts them.
        samples: likewise.
        groups: how many sessions this process has been part of.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._wall_clock = clock, wall_clock
        self.steps = self.tokens = self.samples = self.groups = 0
        self.step_s = self.last_step_at_s = 0.0
        self._waited_s = self._futures_s = 0.0
        self._futures = 0  # that are not complete
        self._futures_lock = threading.Lock()
        self._future_begun_s = 0.0
        self._stepped_s = 0.0  # 0: this process has made no step
        self._stepped: set[int] = set()  # the optimizers that have made the latest step
        self._looks: deque[_Look] = deque([_Look(clock(), 0, 0, 0, 0.0)], maxlen=_LOOKS)

    def stepped(self, optimizer: int) -> None:
        """The optimizer with this number has made a step."""
        if self._stepped and optimizer not in self._stepped:
            self._stepped.add(optimizer)  # another one, in the same step of the training
        else:
            self._stepped = {optimizer}
            now_s = self._clock()
            if self._stepped_s:
                self.step_s = now_s - self._stepped_s
            self._stepped_s = now_s
            self.steps += 1
        self.last_step_at_s = self._wall_clock()

    def waited(self, since_s: float) -> None:
        """This thread has waited for communication since then, by time.monotonic()."""
        if not threading.current_thread().name.startswith(_OWN_THREADS):
            self._waited_s += time.monotonic() - since_s

    def future_begun(self) -> None:
        """The script has asked for the future of an operation, for which no thread of its own waits."""
        with self._futures_lock:
            self._futures += 1
            self._future_begun_s = time.monotonic()

    def future_ended(self) -> None:
        """It is complete. From the last one that was asked for until all are, the training is taken to wait: so torch's
        DistributedDataParallel waits, in C++."""
        with self._futures_lock:
            self._futures -= 1
            if not self._futures:
                self._futures_s += time.monotonic() - self._future_begun_s

    @property
    def exposed_s(self) -> float:
        """How long the training has waited for communication, in seconds."""
        return self._waited_s + self._futures_s

    def rates(self) -> dict[str, float]:
        """Per second of the last ten seconds or so: steps, tokens, samples; and the share of the time that went into
        waiting, from 0 to 1. Any thread may call it as often as it wants; it remembers one look a second."""
        look = _Look(self._clock(), self.steps, self.tokens, self.samples, self.exposed_s)
        looks = list(self._looks)
        if look.at_s - looks[-1].at_s >= 1.0:
            self._looks.append(look)
        before = next((each for each in looks if look.at_s - each.at_s <= WINDOW_S), looks[-1])
        span_s = max(look.at_s - before.at_s, 1e-9)
        return {
            "steps_per_second": (look.steps - before.steps) / span_s,
            "tokens_per_second": (look.tokens - before.tokens) / span_s,
            "samples_per_second": (look.samples - before.samples) / span_s,
            "exposed_communication_ratio": min(1.0, (look.exposed_s - before.exposed_s) / span_s),
        }

    def facts(self, result_bytes: int) -> dict[str, Any]:
        """The numbers that others are told, by the names of ProgressMade and RankProgress. Any thread."""
        rates = self.rates()
        return {
            "steps": self.steps,
            "step_s": self.step_s,
            "last_step_at_s": self.last_step_at_s,
            "tokens": self.tokens,
            "samples": self.samples,
            "exposed_s": self.exposed_s,
            "result_bytes": result_bytes,
            "recoveries": self.recoveries,
            "tokens_per_s": rates["tokens_per_second"],
            "exposed_share": rates["exposed_communication_ratio"],
        }

    @property
    def recoveries(self) -> int:
        """How often the rank has gone on in another group."""
        return max(0, self.groups - 1)
