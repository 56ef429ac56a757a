"""What has taken longer than BYTEPS_STALL_LIMIT_S allows, in words. Pure; time is an argument."""

from __future__ import annotations

from byteps_py.errors import StallError
from byteps_py.proto import control_pb2 as pb
from byteps_py.worker.requests import describe_waiting

_SAID_KEPT = 20


class StallDeadline:
    """``limit_s``: 0 if nothing ever is."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.away_since_s: float | None = None  # the scheduler
        self._said: list[str] = []  # by the scheduler about stalls, the latest first

    def said(self, sentence: str) -> None:
        """The scheduler knows whom others wait for."""
        self._said = [sentence, *self._said[:_SAID_KEPT]]

    def away(self, now: float) -> None:
        """The scheduler is, since now if it was not before."""
        if self.away_since_s is None:
            self.away_since_s = now

    def is_alone(self, now: float) -> bool:
        """The scheduler is away for too long."""
        return bool(self.limit_s) and self.away_since_s is not None and now - self.away_since_s > self.limit_s

    def wait(self, waiting: pb.Waiting) -> StallError:
        """Ranks wait for too long."""
        name = repr(waiting.name) if waiting.name else "a barrier"
        why = next((f": {sentence}" for sentence in self._said if name in sentence), "")
        if self.away_since_s is not None:
            why = "; the scheduler is away, and new tensors and barriers need it"
        return StallError(f"{describe_waiting(waiting)} longer than {self._limit} allows{why}")

    def join(self) -> StallError:
        """Ranks have joined, and no scheduler says that all have."""
        text = f"join(): the scheduler is away for longer than {self._limit}, and only it knows"
        return StallError(f"{text} when all have joined")

    @property
    def _limit(self) -> str:
        return f"BYTEPS_STALL_LIMIT_S={self.limit_s:g}"
