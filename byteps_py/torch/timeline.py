"""The timeline of a rank's tensors (a Chrome trace), and the speed of its results.

Owns the observer of a session, which is another one while a timeline is recorded. Must not know what tensors are for.
The session calls it on any of its threads; any thread may call the public functions. A tensor's time goes from its
hand-over to the moment when this rank learns of its result, which happens whenever the rank waits or polls.

    Session ─ ResultRate ─► get_pushpull_speed
    Session ─ TimelineObserver ┬ ResultRate
                               └ Timeline ─► file of this rank
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from byteps_py.config.settings import Settings
from byteps_py.errors import UsageError
from byteps_py.session import Observer, ResultRate, Slot
from byteps_py.tensors import Op, TensorSpec
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.context import Context

__all__ = ["get_pushpull_speed", "start_timeline", "stop_timeline"]

#: Events are written when there are this many, or when no tensor is in flight. A crash loses at most this many.
_BUFFERED = 512
#: Horovod's names, which programs for its timelines look for. Other operations are an ALLREDUCE.
_KINDS = {Op.BROADCAST: "BROADCAST", Op.GATHER: "ALLGATHER", Op.EXCHANGE: "ALLTOALL"}


class Timeline:
    """Writes a Chrome trace. Open it in chrome://tracing or ui.perfetto.dev.

    Each tensor has a row. For each of its rounds from ``first`` to ``last``, the row has a mark at the hand-over (named
    NEGOTIATE_ALLREDUCE, …, as in Horovod) and an event (of category ALLREDUCE, …). mark_cycles: also mark each
    hand-over while no other tensor is in flight. ``close`` completes the JSON array; viewers also read an incomplete
    file.
    """

    def __init__(
        self, path: Path, rank: int, mark_cycles: bool = False, first: int = 0, last: int | None = None
    ) -> None:
        self._rank = rank
        self._mark_cycles = mark_cycles
        self._first, self._last = first, last
        self._lock = threading.Lock()
        self._begun: dict[Slot, int] = {}
        self._rows: dict[str, int] = {}
        self._events: list[dict[str, Any]] = []
        # Wall-clock times, so that files of several ranks can be merged.
        self._to_wall_ns = time.time_ns() - time.perf_counter_ns()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w")
        except OSError as error:
            raise UsageError(f"the timeline can't be written to {path}: {error.strerror}") from error
        self._file.write("[\n")
        self._separator = ""
        about = {"name": f"rank {rank}", "start_time_since_epoch_in_micros": time.time_ns() // 1000}
        self.path = path
        self._add({"ph": "M", "name": "process_name", "args": about}, row=0)
        self._flush()

    def begun(self, slot: Slot, at_ns: int) -> None:
        if slot.round < self._first or (self._last is not None and slot.round > self._last):
            return
        with self._lock:
            if self._mark_cycles and not self._begun:
                self._add({"ph": "i", "name": "CYCLE_START", "s": "p", "ts": self._us(at_ns)}, row=0)
            self._begun[slot] = at_ns
            mark = {"ph": "i", "name": f"NEGOTIATE_{_kind(slot.spec)}", "s": "t", "ts": self._us(at_ns)}
            self._add(mark, self._row(slot.spec.name))

    def delivered(self, slot: Slot) -> None:
        with self._lock:
            start = self._begun.pop(slot, None)
            if start is None or self._file.closed:
                return
            spec = slot.spec
            event = {
                "ph": "X",
                "cat": _kind(spec),
                "name": "AVERAGE" if spec.average else spec.op.name,
                "ts": self._us(start),
                "dur": (time.perf_counter_ns() - start) / 1e3,
                "args": {"what": spec.describe(), "bytes": spec.nbytes, "round": slot.round},
            }
            self._add(event, self._row(spec.name))
            if len(self._events) >= _BUFFERED or not self._begun:
                self._flush()

    def close(self) -> None:
        """Write the remaining events and end the file. Tensors in flight are not written."""
        with self._lock:
            if not self._file.closed:
                self._flush()
                self._file.write("\n]\n")
                self._file.close()

    def _row(self, name: str) -> int:
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = len(self._rows) + 1
            self._add({"ph": "M", "name": "thread_name", "args": {"name": name}}, row)
        return row

    def _us(self, at_ns: int) -> float:
        return (at_ns + self._to_wall_ns) / 1e3

    def _add(self, event: dict[str, Any], row: int) -> None:
        self._events.append({**event, "pid": self._rank, "tid": row})

    def _flush(self) -> None:
        for event in self._events:
            self._file.write(self._separator + json.dumps(event))
            self._separator = ",\n"
        self._events.clear()
        self._file.flush()


def _kind(spec: TensorSpec) -> str:
    return "REDUCESCATTER" if spec.scatters else _KINDS.get(spec.op, "ALLREDUCE")


class TimelineObserver(Observer):
    """The observer of a session whose timeline is recorded. ``rate``: the one that it has otherwise."""

    def __init__(self, timeline: Timeline, rate: ResultRate) -> None:
        self.timeline, self.rate = timeline, rate

    def begun(self, slot: Slot, at_ns: int | None = None) -> None:
        """See Observer."""
        self.timeline.begun(slot, time.perf_counter_ns() if at_ns is None else at_ns)

    def delivered(self, slot: Slot) -> None:
        """See Observer."""
        self.rate.delivered(slot)
        self.timeline.delivered(slot)

    def closed(self) -> None:
        """See Observer."""
        self.timeline.close()

    @property
    def total_bytes(self) -> int:
        """See Observer."""
        return self.rate.total_bytes


def set_up(context: Context) -> None:
    """For ``init``: observe the session, with a timeline if the settings name one."""
    _rate_of(context)
    settings, rank = context.settings, context.session.rank
    if settings.timeline and settings.timeline.upper() != "DYNAMIC":
        _record(context, Timeline(_file_of(settings.timeline, rank), rank, settings.timeline_mark_cycles))
    elif settings.trace_on:
        _record(context, _trace(settings, rank))


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to record when this rank's tensors are in flight, as a Chrome trace.

    Rank 0 writes to ``file_path``, rank N to ``file_path`` with ".rankN" appended; ``stop_timeline`` or ``shutdown``
    completes the files. mark_cycles: also mark each hand-over while no other tensor is in flight.
    Has no effect if this file is being recorded already. Any thread may call it. Raises NotInitializedError, and
    UsageError if another file is being recorded or the file can't be written.

    >>> import byteps_py as bps, os, tempfile
    >>> bps.init()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     bps.start_timeline(f"{folder}/timeline.json")
    ...     bps.stop_timeline()
    ...     os.listdir(folder)
    ['timeline.json']
    >>> bps.shutdown()
    """
    context = contexts.current()
    observer, rank = context.session.observer, context.session.rank
    path = _file_of(file_path, rank)
    if not isinstance(observer, TimelineObserver):
        _record(context, Timeline(path, rank, mark_cycles))
    elif observer.timeline.path != path:
        raise UsageError(
            f"a timeline is being recorded already, to {observer.timeline.path}; call stop_timeline() before {path}"
        )


def stop_timeline() -> None:
    """Complete the timeline. Has no effect if none is recorded. Raises NotInitializedError."""
    session = contexts.current().session
    observer = session.observer
    if isinstance(observer, TimelineObserver):
        session.observer = observer.rate
        observer.timeline.close()


def get_pushpull_speed() -> tuple[int, float]:
    """The speed at which this rank receives results: (time in ms since the epoch, MB/s).

    The average over the last complete interval of ten seconds; before that, since ``init``. Any thread may call it.
    Raises NotInitializedError.
    """
    return _rate_of(contexts.current()).speed()


def _record(context: Context, timeline: Timeline) -> None:
    context.session.observer = TimelineObserver(timeline, _rate_of(context))


def _rate_of(context: Context) -> ResultRate:
    observer = context.session.observer
    if isinstance(observer, TimelineObserver):
        return observer.rate
    if not isinstance(observer, ResultRate):
        observer = context.session.observer = ResultRate()
    return observer


def _file_of(path: str, rank: int) -> Path:
    return Path(path if rank == 0 else f"{path}.rank{rank}")


def _trace(settings: Settings, rank: int) -> Timeline:
    path = Path(settings.trace_dir) / str(rank) / "comm.json"
    return Timeline(path, rank, first=settings.trace_start_step, last=settings.trace_end_step)
