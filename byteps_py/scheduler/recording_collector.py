"""The contents of flight recorders, collected over the control plane by the scheduler.

    bps ── Collect ──► scheduler ── Ask ──► communication services, summation services
        ◄── Answer ──            ◄─ Answer ─

The scheduler first asks each member some times what its clock shows. A message takes as long there as back, to within
the time that both took: so the offset of a member's clock is known to within half of the shortest round trip. Nothing
here is part of the job's protocol, or in the journal.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.roster import MemberRecord

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
