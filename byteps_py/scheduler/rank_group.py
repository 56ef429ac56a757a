"""The ranks that work together from one epoch that formed the group to the next: what they agree on. Pure.

A group has declarations (declarations.py), barriers, ranks that have joined, and machines that shut down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.declarations import Decided, Declarations, Reopened
from byteps_py.scheduler.job import Job, MessageHandler, Outgoing, failure, ranks_of, to_each
from byteps_py.scheduler.roster import MemberRecord
from byteps_py.wording import ranks_text


class Barriers:
    """Which machines have arrived at which barriers. Barrier numbers rise by one; a machine arrives at each at most
    once. Barriers do not wait for machines whose ranks have all joined."""

    def __init__(self, num_machines: int) -> None:
        self._num_machines = num_machines
        self._latest: dict[int, int] = {}
        self._arrived: dict[int, set[int]] = {}  # barrier → the machines that have arrived
        self._excused: set[int] = set()

    def arrive(self, machine_index: int, sequence: int) -> bool:
        """True if this machine was the last one. Raises ProtocolError if it has arrived there before."""
        latest = self._latest.get(machine_index, -1)
        if sequence <= latest:
            raise ProtocolError(f"it arrived at barrier {sequence} after barrier {latest}")
        self._latest[machine_index] = sequence
        self._arrived.setdefault(sequence, set()).add(machine_index)
        return self._end_if_complete(sequence)

    def excuse(self, machine_index: int) -> list[int]:
        """All ranks of a machine have joined. Returns the barriers that waited only for this machine."""
        self._excused.add(machine_index)
        return [sequence for sequence in sorted(self._arrived) if self._end_if_complete(sequence)]

    def expect_all(self) -> None:
        """From now on barriers wait for all machines again."""
        self._excused.clear()

    def _end_if_complete(self, sequence: int) -> bool:
        if len(self._arrived[sequence] | self._excused) < self._num_machines:
            return False
        del self._arrived[sequence]
        return True


class JoinTracker:
    """Ranks that have no more data.

    A rank that has joined votes on nothing, and no barrier waits for it. The join is over when all ranks have joined
    and every machine is idle: none of its ranks waits for a round that it had handed over.
    """

    def __init__(self, num_machines: int) -> None:
        self._num_machines = num_machines
        self._order: dict[int, None] = {}
        self._idle: set[int] = set()
        self._direct_round = 0

    @property
    def ranks(self) -> set[int]:
        """The ranks that have joined."""
        return set(self._order)

    def join(self, ranks: range, rank: int) -> bool:
        """A rank of a machine with ``ranks`` has joined. False if it had joined before. Raises ProtocolError for a rank
        of another machine."""
        if rank not in ranks:
            raise ProtocolError(f"it sent Join for rank {rank}, which is not one of its ranks")
        is_new = rank not in self._order
        self._order[rank] = None
        return is_new

    def idle(self, machine_index: int, ranks: range, direct_round: int) -> pb.AllJoined | None:
        """A machine is idle. ``direct_round``: the highest round of its gathers and exchanges.

        Returns the message that ends the join if this machine is the last one; then no rank has joined any more. Raises
        ProtocolError if a rank of the machine has not joined.
        """
        if not self.ranks.issuperset(ranks):
            raise ProtocolError("it sent Idle before all of its ranks had joined")
        self._idle.add(machine_index)
        self._direct_round = max(self._direct_round, direct_round)
        if len(self._idle) < self._num_machines:
            return None
        last = list(self._order)[-1]
        self._order.clear()
        self._idle.clear()
        return pb.AllJoined(last=last, direct_round=self._direct_round)


class ShutdownTracker:
    """Which machines may exit. A machine whose ranks have all shut down stays a while: others may need once more what
    its ranks gave last.

    The machine may exit once every other machine has said that it lacks no result of those ranks, or has shut down
    itself.

    An answer that is in flight when a server dies, or a connection breaks, is lost. Then the sum is taken again from
    what each machine has kept. Only the machine that lacks the result knows that it does.
    """

    def __init__(self) -> None:
        self._gone: set[int] = set()  # ranks that have shut down
        self._settled: dict[int, set[int]] = {}  # by member id: ranks that have shut down and of which it lacks nothing
        self._dismissed: set[int] = set()  # member ids

    def gone(self, ranks: Iterable[int]) -> None:
        """These ranks have shut down."""
        self._gone.update(ranks)

    def settled(self, member: MemberRecord, ranks: Iterable[int]) -> None:
        """A machine lacks no result of the rounds in which these ranks, which have shut down, took part."""
        self._settled.setdefault(member.id, set()).update(ranks)

    def dismiss(self, workers: Sequence[MemberRecord]) -> list[MemberRecord]:
        """Dismiss those of the ``workers``, all that are connected, that may exit. Returns them, each only once."""
        leaving = [worker for worker in workers if self._gone.issuperset(worker.ranks)]
        others = [worker for worker in workers if worker not in leaving]
        free = [
            worker
            for worker in leaving
            if worker.id not in self._dismissed
            and all(self._settled.get(other.id, set()).issuperset(worker.ranks) for other in others)
        ]
        self._dismissed.update(worker.id for worker in free)
        return free


class RankGroup:
    """``size`` ranks on ``num_machines`` machines. Starts with nothing declared.

    Its messages are those of ``message_handlers``.
    """

    def __init__(self, job: Job, num_machines: int, size: int) -> None:
        self._job = job
        self.declarations = Declarations(num_machines, size)
        self.joining = JoinTracker(num_machines)
        self._barriers = Barriers(num_machines)
        self._shutdown_tracker = ShutdownTracker()
        self.keeps_states = False  # a rank has ended without saying that training is done

    def message_handlers(self) -> Mapping[str, MessageHandler]:
        """By kind, for the messages that a communication service sends of its ranks."""
        return {
            "arrive": self._arrive,
            "declare": self._declare,
            "gone": self._gone,
            "idle": self._idle,
            "join": self._join,
            "keep_states": self._keep_states,
            "settled": self._settled,
        }

    def _declare(self, member: MemberRecord, declare: pb.Declare, now_s: float) -> Outgoing:
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

    def _arrive(self, member: MemberRecord, arrive: pb.Arrive, now_s: float) -> Outgoing:
        if not self._job.takes("arrive"):
            return []
        ranks_of(member)
        is_last = self._barriers.arrive(member.facts.machine_index, arrive.sequence)
        return self._release([arrive.sequence] if is_last else [])

    def _release(self, sequences: list[int]) -> Outgoing:
        out: Outgoing = []
        for sequence in sequences:
            out += self._to_all(pb.SchedulerMessage(release=pb.Release(sequence=sequence)))
        return out

    def _join(self, member: MemberRecord, join: pb.Join, now_s: float) -> Outgoing:
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

    def _idle(self, member: MemberRecord, idle: pb.Idle, now_s: float) -> Outgoing:
        if not self._job.takes("idle"):
            return []
        over = self.joining.idle(member.facts.machine_index, ranks_of(member), idle.direct_round)
        if over is None:
            return []
        self.declarations.void_all()
        self._barriers.expect_all()
        return self._to_all(pb.SchedulerMessage(all_joined=over))

    def _gone(self, member: MemberRecord, gone: pb.Gone, now_s: float) -> Outgoing:
        """Ranks of a machine have shut down for good. To others that is the same as a worker that has left."""
        if not self._job.takes("gone"):
            return []
        if not gone.ranks or not set(gone.ranks) <= set(ranks_of(member)):
            raise ProtocolError(f"it sent Gone for {ranks_text(gone.ranks)}, which are not all its own ranks")
        if set(gone.ranks) == set(member.ranks):
            count = len(gone.ranks)
            text = f"{member.describe()} has shut down: its {'rank has' if count == 1 else 'ranks have'} ended"
        else:
            text = f"{ranks_text(gone.ranks)} of {member.describe()} has shut down"
        others = [m for m in self._job.roster.workers() if m is not member]
        self._shutdown_tracker.gone(gone.ranks)
        return to_each(others, failure("PeerLostError", text, gone.ranks)) + self._dismiss()

    def left(self, member: MemberRecord, text: str) -> Outgoing:
        """The machine has left in order. Others raise ``text`` as an error only if they still wait for its ranks, so
        that nobody sees it at a normal end."""
        self._shutdown_tracker.gone(member.ranks)
        return self._to_all(failure("PeerLostError", text, member.ranks)) + self._dismiss()

    def _keep_states(self, member: MemberRecord, keep_states: pb.KeepStates, now_s: float) -> Outgoing:
        ranks_of(member)
        self.keeps_states = True
        return []

    def _settled(self, member: MemberRecord, settled: pb.Gone, now_s: float) -> Outgoing:
        """The machine lacks no result of the rounds of these ranks, which have shut down."""
        ranks_of(member)
        self._shutdown_tracker.settled(member, settled.ranks)
        return self._dismiss()

    def _dismiss(self) -> Outgoing:
        """Let machines exit whose ranks have shut down, once no other machine needs what they have kept."""
        free = self._shutdown_tracker.dismiss(self._job.roster.workers())
        return to_each(free, pb.SchedulerMessage(dismissed=pb.Dismissed()))

    def _to_all(self, message: pb.SchedulerMessage) -> Outgoing:
        return to_each(self._job.roster.workers(), message)
