"""Writes the one trace of a job (BYTEPS_TRACE_ON=1): collects what all processes have recorded once all ranks are past
the last step, or what is there when the job ends before. One asyncio thread, the scheduler's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from byteps_py.config.settings import Settings
from byteps_py.errors import UsageError
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.recording_collector import ClockOffset, Collector
from byteps_py.scheduler.roster import MemberRecord
from byteps_py.system.cluster_trace import TracePart, chrome_trace
from byteps_py.system.flight_recorder import parse_recording
from byteps_py.system.log import logger

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
