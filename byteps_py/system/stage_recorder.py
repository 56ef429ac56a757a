"""Records the stages of partitions on a service, for the trace of the job: while BYTEPS_TRACE_ON=1 only.

The memory is that of a flight recorder; each partition counts as a group. One thread, that of the service's loop.
"""

from __future__ import annotations

from byteps_py.config.settings import Settings
from byteps_py.system.flight_recorder import OPERATIONS, FlightRecorder

#: With a trace, each process keeps at least so many operations.
TRACED_OPERATIONS = 1 << 16
LOCAL_REDUCE, EXCHANGE, WAIT_FOR_MACHINES, SUM, LOCAL_BROADCAST = map(
    OPERATIONS.index, ("local_reduce", "exchange", "wait_for_machines", "sum", "local_broadcast")
)
#: Steps of hosted optimizers, on communication services; and of the copies of their states, on summation servers.
OPTIMIZER_STEP, SHADOW_STEP = map(OPERATIONS.index, ("optimizer_step", "shadow_step"))


class StageRecorder:
    """``who``: of the service, as "worker 0". ``epoch``: that brought the group of ranks, whose stages these are."""

    def __init__(self, who: str, epoch: int) -> None:
        self.who = who
        self.recorder = FlightRecorder(TRACED_OPERATIONS, {"role": who, "epoch": epoch})
        self._open: dict[tuple[int, str, int], int] = {}

    def begin(self, stage: int, name: str, index: int, round_: int, nbytes: int, at_s: float | None = None) -> None:
        """A stage of a partition begins. ``name``: of its tensor, or its key. ``at_s``: on the monotonic clock."""
        group = self.recorder.group(name, str(index), (), "stage")
        group.count = round_ - 1
        at_ns = None if at_s is None else int(at_s * 1e9)
        self._open[stage, name, index] = number = self.recorder.begin(group, stage, nbytes, at_ns=at_ns)
        self.recorder.start(number)

    def end(self, stage: int, name: str, index: int) -> None:
        """It is over; nothing if it was not begun."""
        if number := self._open.pop((stage, name, index), 0):
            self.recorder.end(number)

    def close(self) -> None:
        """Release the memory."""
        self.recorder.close()


def stage_recorder(settings: Settings, who: str, epoch: int = 0) -> StageRecorder | None:
    """A recorder if there is to be a trace."""
    return StageRecorder(who, epoch) if settings.trace_on else None
