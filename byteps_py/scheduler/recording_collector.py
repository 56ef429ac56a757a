"""The contents of flight recorders, collected over the control plane by the scheduler: for `bps`, and for the one trace
of a job (BYTEPS_TRACE_ON=1).

    bps ── Collect ──► scheduler ── Ask ──► communication services, summation services
        ◄── Answer ──            ◄─ Answer ─

The scheduler first asks each member some times what its clock shows. A message takes as long there as back, to within
the time that both took: so the offset of a member's clock is known to within half of the shortest round trip. Nothing
here is part of the job's protocol, or in the journal.

``TraceWriter`` collects what all processes have recorded once all ranks are past the last step, or what is there when
the job ends before. One asyncio thread, the scheduler's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from byteps_py.config.settings import Settings
from byteps_py.errors import UsageError
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.roster import MemberRecord
from byteps_py.system.cluster_trace import TracePart, chrome_trace
from byteps_py.system.flight_recorder import parse_recording
from byteps_py.system.log import logger

#: How often each member is asked for its clock, and how long that may take.
_LOOKS = 8
_LOOKS_S = 2.0


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """The scheduler's monotonic clock minus that of a member, in ns, and how wrong that may be."""

    offset_ns: int
    error_ns: int

    @classmethod
    def of(cls, asked_ns: int, received_ns: int, sent_ns: int, answered_ns: int) -> ClockOffset:
        """From one round trip: asked and answered by the scheduler's clock, received and sent by the member's.

        >>> ClockOffset.of(asked_ns=1000, received_ns=51_100, sent_ns=51_150, answered_ns=1250)
        ClockOffset(offset_ns=-50000, error_ns=100)
        """
        offset_ns = (asked_ns + answered_ns - received_ns - sent_ns) // 2
        return cls(offset_ns, max(0, (answered_ns - asked_ns) - (sent_ns - received_ns)) // 2)


class Collector:
    """Asks the members of a job. ``send(stream, message)``; ``present()``: the members by stream. One asyncio
    thread."""

    def __init__(
        self, send: Callable[[int, pb.SchedulerMessage], None], present: Callable[[], Mapping[int, MemberRecord]]
    ) -> None:
        self._send = send
        self._present = present
        self._requests = itertools.count(1)
        self._waiting: dict[int, asyncio.Queue[tuple[int, int, pb.Answer]]] = {}

    def answered(self, stream: int, found: pb.Answer) -> None:
        """A member has answered. One that is too late is dropped."""
        if (queue := self._waiting.get(found.request)) is not None:
            queue.put_nowait((stream, time.monotonic_ns(), found))

    async def collect(self, timeout_s: float, ends_trace: bool = False) -> AsyncIterator[pb.Answer]:
        """The recordings of all members; for a member that does not answer in time, an Answer with an error.
        ``ends_trace``: for the trace of the job."""
        members = dict(self._present())
        offsets = await self.clocks(members, min(timeout_s / 2, _LOOKS_S))
        deadline_s = time.monotonic() + timeout_s
        ask = pb.Ask(recordings=True, ends_trace=ends_trace)
        async for stream, _, found in self._ask(members, deadline_s, ask):
            if found is None:
                member = members[stream]
                late = "it has not answered" if stream in self._present() else "it has left the job, or is lost"
                yield pb.Answer(error=late, is_last=True, member=member.describe(), ranks=member.ranks)
                continue
            if (known := offsets.get(stream)) is not None:
                found.offset_ns, found.error_ns = known.offset_ns, known.error_ns
            found.member = members[stream].describe()
            yield found

    async def clocks(self, members: Mapping[int, MemberRecord], timeout_s: float = _LOOKS_S) -> dict[int, ClockOffset]:
        """The offsets of the members' clocks, by stream; without those that do not answer in time."""
        best: dict[int, ClockOffset] = {}
        deadline_s = time.monotonic() + timeout_s
        for _ in range(_LOOKS):
            asked_ns = time.monotonic_ns()
            async for stream, answered_ns, found in self._ask(members, deadline_s, pb.Ask()):
                if found is not None:
                    offset = ClockOffset.of(asked_ns, found.received_ns, found.sent_ns, answered_ns)
                    if stream not in best or offset.error_ns < best[stream].error_ns:
                        best[stream] = offset
        return best

    async def _ask(
        self, members: Mapping[int, MemberRecord], deadline_s: float, ask: pb.Ask
    ) -> AsyncIterator[tuple[int, int, pb.Answer | None]]:
        """The answers with their streams and times; None for each member that has sent no last one in time."""
        ask.request = request = next(self._requests)
        queue = self._waiting[request] = asyncio.Queue()
        missing = set(members)
        try:
            for stream in members:
                self._send(stream, pb.SchedulerMessage(ask=ask))
            while missing:
                try:
                    async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                        stream, at_ns, found = await queue.get()
                except TimeoutError:
                    break
                if stream in missing:
                    if found.is_last:
                        missing.discard(stream)
                    yield stream, at_ns, found
            for stream in sorted(missing):
                yield stream, 0, None
        finally:
            del self._waiting[request]


NAME = "trace.json"
_COLLECT_S = 60.0
_MAX_BYTES = 1 << 28


class TraceWriter:
    """``tick`` it a few times per second, and ``finish`` it once the job is over."""

    def __init__(self, settings: Settings, collector: Collector) -> None:
        self._settings = settings
        self._collector = collector
        self._steps = settings.trace_start_step, settings.trace_end_step
        self._began = time.monotonic_ns(), time.time_ns()
        self._parts: dict[tuple[str, int], TracePart] = {}  # by process, and the recorder's beginning
        self._missing: list[str] = []
        self._offsets: dict[int, ClockOffset] = {}
        self._members: dict[int, str] = {}
        self._work: asyncio.Task[None] | None = None
        self._looked_at: set[int] = set()  # the streams of members whose clocks were looked at
        self._is_written = not settings.trace_on

    def tick(self, present: Mapping[int, MemberRecord], is_running: bool) -> None:
        """Begin what is due."""
        if self._is_written or not is_running or (self._work is not None and not self._work.done()):
            return
        self._members.update((stream, each.describe()) for stream, each in present.items())
        if new := {stream: each for stream, each in present.items() if stream not in self._looked_at}:
            self._looked_at.update(new)
            self._work = asyncio.create_task(self._look_at_clocks(new))
            return
        workers = [each for each in present.values() if each.is_worker]
        steps = [rank.steps for each in workers for rank in each.progress]
        if steps and len(steps) >= sum(len(each.ranks) for each in workers) and min(steps) > self._steps[1]:
            self._work = asyncio.create_task(self._collect())

    def final(self, stream: int, found: pb.Answer) -> None:
        """A member that leaves sends what it has."""
        if not self._is_written:
            offset = self._offsets.get(stream, ClockOffset(0, 0))
            found.offset_ns, found.error_ns = offset.offset_ns, offset.error_ns
            found.member = self._members.get(stream, "")
            if found.error and not found.recording:
                return  # of a rank that had not come, or has left
            self._take(found)

    async def finish(self) -> None:
        """The job is over: write what there is, unless that was done."""
        if self._work is not None and not self._work.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._work
        if not self._is_written:
            heard = {part.machine for part in self._parts.values()}
            silent = [who for who in self._members.values() if who not in heard]
            missing = [*self._missing, *(f"{who} has sent nothing" for who in silent)]
            if not self._is_past_the_end():
                missing.append(f"the job ended before all ranks were past step {self._steps[1]}")
            self._write(missing)

    def _is_past_the_end(self) -> bool:
        """All ranks of the last group that have sent something have a later step."""
        ranks = [part.recording for part in self._parts.values() if part.who.startswith("rank ")]
        last = max((each.about.get("epoch", 0) for each in ranks), default=0)
        latest = [max((s.step for s in each.spans), default=-1) for each in ranks if each.about.get("epoch", 0) == last]
        return bool(latest) and min(latest) > self._steps[1]

    async def _look_at_clocks(self, present: Mapping[int, MemberRecord]) -> None:
        self._offsets.update(await self._collector.clocks(present))

    async def _collect(self) -> None:
        async for found in self._collector.collect(_COLLECT_S, ends_trace=True):
            self._take(found)
        self._write(self._missing)

    def _take(self, found: pb.Answer) -> None:
        if found.recording:
            try:
                data = zlib.decompressobj().decompress(found.recording, _MAX_BYTES)
                recording = parse_recording(data)
            except (UsageError, zlib.error) as error:
                self._missing.append(f"{found.who}: {error}")
                return
            part = TracePart(found.who, found.member, recording, found.offset_ns, found.error_ns)
            self._parts[found.who, recording.monotonic_ns] = part
        elif found.error:
            self._missing.append(f"{found.who or found.member}: {found.error}")

    def _write(self, missing: Sequence[str]) -> None:
        self._is_written = True
        path = Path(self._settings.trace_dir) / NAME
        trace = chrome_trace(list(self._parts.values()), missing, self._steps, self._began)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".new")
            unfinished.write_text(json.dumps(trace))
            unfinished.replace(path)
        except OSError as error:
            logger.error("the trace can't be written to %s: %s", path, error.strerror)
            return
        errors = trace["otherData"]["clock_error_us"]
        logger.warning(
            "the trace of steps %d to %d is in %s: %d processes, clocks known to within %.0f µs%s", *self._steps,
            path.resolve(), len(errors), max(errors.values(), default=0.0), "".join(f"; {each}" for each in missing),
        )  # fmt: skip
