"""What a communication service may conclude from time and silence. Pure; time is an argument.

Start-up: until this machine's processes have started they starve each other, and silence proves little.

A server that can't be reached, which may be this machine's own fault:

    can't be reached ──unsure──► the scheduler asks ──a timeout later, and still not──sure──► its keys go to others

A machine that hears no other process is not asked, and a server that was not heard is asked for again when all is well.
Else one machine that is cut off from the others would take their servers away.

A wait that has taken longer than BYTEPS_STALL_LIMIT_S allows becomes an error, in words.
"""

from __future__ import annotations

from collections.abc import Callable

from byteps_py.errors import StallError
from byteps_py.proto import control_pb2 as pb
from byteps_py.wording import ranks_text, tensor_text


class Starting:
    """The start-up of this machine's processes. It calls ``done()`` once: when the kernels are loaded, and all of the
    ``local_size`` ranks have been here at the same time."""

    def __init__(self, local_size: int, done: Callable[[], None]) -> None:
        self._local_size = local_size
        self._done = done
        self._is_loaded = False
        self._most_ranks = 0
        self._is_over = False

    @property
    def has_had_ranks(self) -> bool:
        """A rank has been here."""
        return self._most_ranks > 0

    def loaded(self) -> None:
        self._is_loaded = True
        self._check()

    def ranks_here(self, count: int) -> None:
        self._most_ranks = max(self._most_ranks, count)
        self._check()

    def _check(self) -> None:
        if self._is_loaded and self._most_ranks >= self._local_size and not self._is_over:
            self._is_over = True
            self._done()


class FailureSuspicions:
    """Servers that this machine can't reach, as far as the scheduler has asked about them."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}  # by member id

    def asked(self, member_id: int, now: float, valid_s: float) -> None:
        """The scheduler asks whether this server still can't be reached. ``valid_s``: how long the question holds."""
        self._until[member_id] = now + valid_s

    def is_sure(self, member_id: int, now: float) -> bool:
        """The server, which can't be reached, could not be reached before the scheduler asked, either."""
        until_s = self._until.pop(member_id, None)
        return until_s is not None and now <= until_s


_SAID_KEPT = 20


def describe_waiting(waiting: pb.Waiting) -> str:
    """``tensor 'w': ranks 0-1 wait for other ranks``"""
    what = tensor_text(waiting.name) if waiting.name else "a barrier"
    verb = "waits" if len(waiting.ready_ranks) == 1 else "wait"
    return f"{what}: {ranks_text(waiting.ready_ranks)} {verb} for other ranks"


class StallDeadline:
    """Waits that take longer than BYTEPS_STALL_LIMIT_S allows. ``limit_s``: that limit; 0 for none."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.away_since_s: float | None = None  # of the scheduler; None while it is here
        self._said: list[str] = []  # by the scheduler about stalls, the latest first

    def explained(self, sentence: str) -> None:
        """The scheduler has named ranks that others wait for."""
        self._said = [sentence, *self._said[:_SAID_KEPT]]

    def away(self, now: float) -> None:
        """The scheduler is away: since ``now``, unless it was before."""
        if self.away_since_s is None:
            self.away_since_s = now

    def is_alone(self, now: float) -> bool:
        """The scheduler has been away for longer than the limit."""
        return bool(self.limit_s) and self.away_since_s is not None and now - self.away_since_s > self.limit_s

    def wait(self, waiting: pb.Waiting) -> StallError:
        """The error of ranks that wait too long."""
        name = repr(waiting.name) if waiting.name else "a barrier"
        why = next((f": {sentence}" for sentence in self._said if name in sentence), "")
        if self.away_since_s is not None:
            why = "; the scheduler is away, and new tensors and barriers need it"
        return StallError(f"{describe_waiting(waiting)} longer than {self._limit} allows{why}")

    def join(self) -> StallError:
        """The error of ranks that have joined, and that no scheduler tells when all have."""
        text = f"join(): the scheduler is away for longer than {self._limit}, and only it knows"
        return StallError(f"{text} when all have joined")

    @property
    def _limit(self) -> str:
        return f"BYTEPS_STALL_LIMIT_S={self.limit_s:g}"
