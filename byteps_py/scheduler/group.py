"""The ranks that work together, from the epoch that made them a group to the next: what they agree on. Pure."""

from __future__ import annotations

from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.barrier import Barriers
from byteps_py.scheduler.declarations import Decided, Declarations, Reopened
from byteps_py.scheduler.job import Job, ranks_of
from byteps_py.scheduler.joining import JoinTracker
from byteps_py.scheduler.member import MemberRecord
from byteps_py.scheduler.outgoing import Outgoing, failure, to_each
from byteps_py.scheduler.shutdown_tracker import ShutdownTracker
from byteps_py.wording import ranks_text


class RankGroup:
    """``size`` ranks on ``num_machines`` machines. Starts with nothing declared."""

    def __init__(self, job: Job, num_machines: int, size: int) -> None:
        self._job = job
        self.declarations = Declarations(num_machines, size)
        self.joining = JoinTracker(num_machines)
        self._barriers = Barriers(num_machines)
        self._shutdown_tracker = ShutdownTracker()

    def declare(self, member: MemberRecord, declare: pb.Declare) -> Outgoing:
        if not self._job.takes("declare"):
            return []
        verdicts: list[pb.Verdict] = []
        out: Outgoing = []
        others = [m for m in self._job.roster.workers() if m is not member]
        for ballot in declare.ballots:
            match self.declarations.cast(member.facts.machine_index, ranks_of(member), ballot):
                case Decided(verdict):
                    verdicts.append(verdict)
                case Reopened(reopen):
                    out += to_each(others, pb.SchedulerMessage(reopen=reopen))
        return out + self._decided(verdicts)

    def _decided(self, verdicts: list[pb.Verdict]) -> Outgoing:
        return self._to_all(pb.SchedulerMessage(verdicts=pb.Verdicts(verdicts=verdicts))) if verdicts else []

    def arrive(self, member: MemberRecord, sequence: int) -> Outgoing:
        """A machine is at a barrier."""
        if not self._job.takes("arrive"):
            return []
        ranks_of(member)
        is_last = self._barriers.arrive(member.facts.machine_index, sequence)
        return self._release([sequence] if is_last else [])

    def _release(self, sequences: list[int]) -> Outgoing:
        out: Outgoing = []
        for sequence in sequences:
            out += self._to_all(pb.SchedulerMessage(release=pb.Release(sequence=sequence)))
        return out

    def join(self, member: MemberRecord, join: pb.Join) -> Outgoing:
        """A rank has no more data."""
        if not self._job.takes("join"):
            return []
        ranks = ranks_of(member)
        is_new = self.joining.join(ranks, join.rank)
        out = self._to_all(pb.SchedulerMessage(joined=join))
        if is_new:
            out += self._decided(self.declarations.join(join.rank))
        if self.joining.ranks.issuperset(ranks):
            out += self._release(self._barriers.excuse(member.facts.machine_index))
        return out

    def idle(self, member: MemberRecord, idle: pb.Idle) -> Outgoing:
        """All ranks of a machine have joined, and none waits for anything."""
        if not self._job.takes("idle"):
            return []
        over = self.joining.idle(member.facts.machine_index, ranks_of(member), idle.direct_round)
        if over is None:
            return []
        self.declarations.start_anew()
        self._barriers.expect_all()
        return self._to_all(pb.SchedulerMessage(all_joined=over))

    def gone(self, member: MemberRecord, gone: pb.Gone) -> Outgoing:
        """Its ranks have ended and won't come back. To others that is no different from a worker that left."""
        if not self._job.takes("gone"):
            return []
        if not gone.ranks or not set(gone.ranks) <= set(ranks_of(member)):
            raise ProtocolError(f"it says that {ranks_text(gone.ranks)} have shut down, which are not all its own")
        if set(gone.ranks) == set(member.ranks):
            count = len(gone.ranks)
            text = f"{member.describe()} has shut down: its {'rank has' if count == 1 else 'ranks have'} ended"
        else:
            text = f"{ranks_text(gone.ranks)} of {member.describe()} has shut down"
        others = [m for m in self._job.roster.workers() if m is not member]
        self._shutdown_tracker.gone(gone.ranks)
        return to_each(others, failure("PeerLostError", text, gone.ranks)) + self._dismiss()

    def left(self, member: MemberRecord, text: str) -> Outgoing:
        """The machine is no member any more. Orderly: others raise ``text`` only if they still want something, so
        that at a normal end nobody sees it."""
        self._shutdown_tracker.gone(member.ranks)
        return self._to_all(failure("PeerLostError", text, member.ranks)) + self._dismiss()

    def settled(self, member: MemberRecord, settled: pb.Gone) -> Outgoing:
        """It lacks no result of what these ranks, which are gone, took part in."""
        ranks_of(member)
        self._shutdown_tracker.settled(member, settled.ranks)
        return self._dismiss()

    def _dismiss(self) -> Outgoing:
        """Machines whose ranks have shut down, once no other machine needs what they have kept."""
        free = self._shutdown_tracker.free(self._job.roster.workers())
        return to_each(free, pb.SchedulerMessage(dismissed=pb.Dismissed()))

    def _to_all(self, message: pb.SchedulerMessage) -> Outgoing:
        return to_each(self._job.roster.workers(), message)
