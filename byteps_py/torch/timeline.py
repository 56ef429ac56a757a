"""What a rank's tensors did and when: the timeline (a Chrome trace), and how fast bytes come back.

Owns the observer of a session. Must not know what the tensors are for. The session calls it on any of its threads, the
user's functions run on any thread. A tensor's time on the way goes from its hand-over to when this rank learns that its
result is there, which it does whenever it waits for anything, or polls.

    Session ─ Watch ┬ bytes ─► get_pushpull_speed
                    └ Timeline ─► file of this rank
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from byteps_py.errors import UsageError
from byteps_py.session import Observer, Slot
from byteps_py.settings import Settings
from byteps_py.tensors import Op, TensorSpec
from byteps_py.torch.engine import context as contexts
from byteps_py.torch.engine.context import Context

#: Events that are kept before they are written, unless nothing is on its way: a crash loses so many.
_BUFFERED = 512
#: Horovod's words, which programs that read its timelines look for; all other operations are an ALLREDUCE.
_KINDS = {Op.BROADCAST: "BROADCAST", Op.GATHER: "ALLGATHER", Op.EXCHANGE: "ALLTOALL"}
#: get_pushpull_speed tells the speed of the last span of this length that is over.
_SPAN_S = 10.0


class Timeline:
    """A Chrome trace that is being written: open it in chrome://tracing or ui.perfetto.dev.

    A row for each tensor, and in it, for each of its rounds from ``first`` to ``last``, a mark at its hand-over
    (NEGOTIATE_ALLREDUCE, …: what Horovod calls the begin of it) and an event (of category ALLREDUCE, …). With
    ``mark_cycles`` there is a mark wherever a tensor leaves while no other is on its way. The file is a JSON array
    once it is closed; before that its end is missing, which viewers don't mind.
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
        self._to_wall_ns = time.time_ns() - time.perf_counter_ns()  # so that files of several ranks go together
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
        """Write the rest; what is still on its way is left out."""
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
    """The observer of a rank's session: counts bytes, and keeps the timeline if there is one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.timeline: Timeline | None = None
        self._lock = threading.Lock()
        self._bytes = 0
        self._since = clock()
        self._speed: tuple[int, float] | None = None

    def begun(self, slot: Slot, at_ns: int | None = None) -> None:
        """See Observer."""
        timeline = self.timeline
        if timeline is not None:
            timeline.begun(slot, time.perf_counter_ns() if at_ns is None else at_ns)

    def delivered(self, slot: Slot) -> None:
        """See Observer."""
        with self._lock:
            now = self._clock()
            if now - self._since >= _SPAN_S:
                self._end_span(now)
            self._bytes += slot.spec.nbytes
        timeline = self.timeline
        if timeline is not None:
            timeline.delivered(slot)

    def speed(self) -> tuple[int, float]:
        """(ms since the epoch, MB/s), see get_pushpull_speed."""
        with self._lock:
            now = self._clock()
            if now - self._since >= _SPAN_S:
                self._end_span(now)
            return self._speed or self._measured(now)

    def _measured(self, now: float) -> tuple[int, float]:
        elapsed = now - self._since
        return int(time.time() * 1e3), self._bytes / elapsed / 1e6 if elapsed > 0 else 0.0

    def _end_span(self, now: float) -> None:
        self._speed = self._measured(now)
        self._bytes, self._since = 0, now

    def stop_timeline(self) -> None:
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            timeline.close()

    def closed(self) -> None:
        """See Observer."""
        self.stop_timeline()


def set_up(context: Context) -> None:
    """For ``init``: observe the session, with a timeline if the environment asks for one."""
    watch = _watch(context)
    settings, rank = context.settings, context.session.rank
    if settings.timeline and settings.timeline.upper() != "DYNAMIC":
        watch.timeline = Timeline(_file_of(settings.timeline, rank), rank, settings.timeline_mark_cycles)
    elif settings.trace_on:
        watch.timeline = _trace(settings, rank)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to record when this rank's tensors are on their way, as a Chrome trace.

    Rank 0 writes to ``file_path``, rank N to ``file_path`` with ".rankN" appended; ``stop_timeline`` or ``shutdown``
    completes the files. mark_cycles: also mark where a tensor leaves while no other is on its way.
    A no-op if that file is being written already. Raises UsageError if another one is, or if it can't be written.
    """
    context = contexts.current()
    watch = _watch(context)
    rank = context.session.rank
    path = _file_of(file_path, rank)
    if watch.timeline is None:
        watch.timeline = Timeline(path, rank, mark_cycles)
    elif watch.timeline.path != path:
        raise UsageError(
            f"a timeline is being recorded already, to {watch.timeline.path}; call stop_timeline() before {path}"
        )


def stop_timeline() -> None:
    """Complete the timeline; a no-op if none is recorded."""
    _watch(contexts.current()).stop_timeline()


def get_pushpull_speed() -> tuple[int, float]:
    """How fast results come back to this rank: (ms since the epoch, MB/s).

    The average of the last ten seconds that were measured; before there are any, of the time since ``init``.
    """
    return _watch(contexts.current()).speed()


def _watch(context: Context) -> TimelineObserver:
    session = context.session
    watch = session.observer
    if not isinstance(watch, TimelineObserver):
        watch = session.observer = TimelineObserver()
    return watch


def _file_of(path: str, rank: int) -> Path:
    return Path(path if rank == 0 else f"{path}.rank{rank}")


def _trace(settings: Settings, rank: int) -> Timeline:
    path = Path(settings.trace_dir) / str(rank) / "comm.json"
    return Timeline(path, rank, first=settings.trace_start_step, last=settings.trace_end_step)
