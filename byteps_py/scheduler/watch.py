"""What heartbeats show of the ranks at work: who is waited for, and who is slow. Pure; decides nothing."""

from __future__ import annotations

from collections.abc import Iterable

from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import stalls
from byteps_py.scheduler.group import RankGroup
from byteps_py.scheduler.job import Job, ranks_of
from byteps_py.scheduler.member import MemberRecord
from byteps_py.scheduler.outgoing import Outgoing, to_each
from byteps_py.scheduler.pace import PaceWatch, Slow, sentences

#: A slow member shows after seconds, and each of many machines tells of as many servers.
_COMPARE_S = 0.5


class GroupWatch:
    """Over one group."""

    def __init__(self, job: Job, group: RankGroup) -> None:
        self._job, self._group = job, group
        self._stalls = stalls.StallWatch(job.config.stall_warn_s)
        self._pace = PaceWatch(job.config.straggler, job.config.stall_warn_s)
        self._compared_s = -_COMPARE_S

    def heartbeat(self, member: MemberRecord, heartbeat: pb.Heartbeat, now_s: float) -> Outgoing:
        if heartbeat.bare:
            return []
        member.statistics = heartbeat.statistics
        self._stalls.report(member.id, heartbeat.waiting)
        if not all(pace.rank in member.ranks for pace in heartbeat.ranks):
            raise ProtocolError("it says how ranks keep up that are not its own")
        self._pace.report(member.id, heartbeat.ranks, heartbeat.servers)
        roster, out = self._job.roster, Outgoing()
        if now_s - self._compared_s >= _COMPARE_S:
            self._compared_s = now_s
            for sentence in self._sentences(self._pace.due(self._slow(), now_s)):
                out += to_each(roster.workers(), pb.SchedulerMessage(slow=pb.Slow(message=sentence)))
        if not heartbeat.waiting or not self._job.is_running:
            return out
        due = self._stalls.due(self._current_stalls(), now_s)
        for sentence, missing in stalls.told(due, self._who):
            stalled = pb.Stalled(message=sentence, missing=missing)
            out += to_each(roster.present(), pb.SchedulerMessage(stalled=stalled))
        return out

    def sight(self, member: MemberRecord, sight: pb.Sight) -> Outgoing:
        """What a rank is doing, which others wait for."""
        if sight.rank not in ranks_of(member):
            raise ProtocolError(f"it says what rank {sight.rank} is doing, which is not its own")
        return to_each(self._job.roster.workers(), pb.SchedulerMessage(sight=sight))

    def gone(self, member: MemberRecord) -> None:
        """It waits for nothing any more."""
        self._stalls.report(member.id, [])

    def contradiction(self) -> str:
        """Why ranks wait in vain, as far as heartbeats show; empty if they don't."""
        if not self._job.is_running:
            return ""
        return self._stalls.contradiction(self._job.roster.size, self._group.declarations.describe)

    def stalled(self) -> list[str]:
        """Sentences on what waits for too long."""
        return stalls.sentences(self._current_stalls(), self._who) if self._job.is_running else []

    def slow(self) -> list[str]:
        """Sentences on who is slow."""
        return self._sentences(self._slow())

    def _current_stalls(self) -> list[stalls.Stall]:
        size = sum(len(m.ranks) for m in self._job.roster.workers())
        return self._stalls.stalls(size, self._group.declarations.undecided_voters, self._group.joining.ranks)

    def _slow(self) -> list[Slow]:
        return self._pace.slow([m.id for m in self._job.roster.present()]) if self._job.is_running else []

    def _sentences(self, slow: list[Slow]) -> list[str]:
        if not slow:
            return []
        servers = {m.id: m.describe() for m in self._job.roster.everyone if not m.is_worker}
        return sentences(slow, self._who, servers, self._job.roster.size)

    def _who(self, ranks: Iterable[int]) -> str:
        wanted = set(ranks)
        return "; ".join(m.describe() for m in self._job.roster.everyone if wanted.intersection(m.ranks))
