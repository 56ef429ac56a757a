"""The ranks that work together from one epoch that formed the group to the next: what they agree on. Pure.

A group has declarations of tensors, barriers, ranks that have joined, and machines that shut down.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.job import Job, MessageHandler, Outgoing, failure, ranks_of, to_each
from byteps_py.scheduler.roster import MemberRecord
from byteps_py.tensors import Op, TensorSpec, unsupported
from byteps_py.wire.rank_link import pack_spec, unpack_spec
from byteps_py.wording import ranks_text

_Votes = list[tuple[tuple[int, ...], TensorSpec]]  # (ranks, their spec), of one machine
#: By their form in messages: specs, and the ranks that take part. Nearly all machines vote for the same one.
_Specs = dict[bytes, tuple[TensorSpec, Collection[int]]]


@dataclass(frozen=True, slots=True)
class Decided:
    """The vote is over. The verdict goes to all machines."""

    verdict: pb.Verdict


@dataclass(frozen=True, slots=True)
class Reopened:
    """All machines but the one that voted have to vote on this generation."""

    reopen: pb.Reopen


Outcome = Decided | Reopened | None


@dataclass(slots=True, eq=False)
class _Declaration:
    """``votes``: machine index → its ranks' specs, while the generation is being voted on. ``groups``: those that these
    specs name; ``specs``: read so far."""

    name: str
    generation: int = 0
    is_decided: bool = True
    accepted: TensorSpec | None = None
    votes: dict[int, _Votes] = field(default_factory=dict)
    groups: set[tuple[int, ...]] = field(default_factory=set)
    specs: _Specs = field(default_factory=dict)
    voted: int = 0  # number of ranks
    rounds: int = 0  # the most rounds of the previous generation that a voter has received

    def voters(self) -> Iterable[int]:
        return (rank for votes in self.votes.values() for ranks, _ in votes for rank in ranks)


class Declarations:
    """The declarations on which the ranks of one group agree: one object per name, one vote per rank and generation.
    ``accepted_count``, ``accepted_bytes``: of the tensors that are accepted now.

    A name's life:   VOTING(1) ─► ACCEPTED(1) ─► VOTING(2) ─► REJECTED(2) ─► VOTING(3) ─► …
    The first ballot of the next generation opens the vote. If the name was accepted, the other machines may not know of
    the new vote, so they get Reopen. After a rejection every machine knows that it has to vote again.

    A vote is over when every rank of the tensor's group has voted. A name belongs to one group at a time: two votes
    that name different groups are a disagreement. It is then unknown which ranks have yet to vote, so the vote is over
    at once. The verdict names the ranks of these groups that had not voted (``late``): their next declaration of the
    name counts as their vote on this generation, and gets the same error. So all ranks of all named groups get the
    error, and all count the same generations. Verdicts go to all machines, also to those without a rank in the group.

    A vote does not wait for a rank that has joined. An operation that needs such a rank is rejected.
    """

    def __init__(self, num_machines: int, size: int) -> None:
        """Each of ``num_machines`` gives at most one ballot per generation; ``size``: number of ranks."""
        self._num_machines = num_machines
        self._size = size
        self._by_name: dict[str, _Declaration] = {}
        self._joined: set[int] = set()
        self.accepted_count = 0
        self.accepted_bytes = 0

    def undecided_voters(self, name: str) -> set[int] | None:
        """Ranks that have voted on ``name`` while others have not; None if no vote is open."""
        declaration = self._by_name.get(name)
        if declaration is None or declaration.is_decided:
            return None
        return set(declaration.voters())

    def describe(self, name: str) -> str:
        """The spec that was accepted, or voted for, under ``name``, and the name; empty if there is no such spec."""
        declaration = self._by_name.get(name)
        specs = [spec for votes in declaration.votes.values() for _, spec in votes] if declaration else []
        spec = declaration.accepted if declaration else None
        spec = spec or next(iter(specs), None)
        return f"{spec.describe()} ({name!r})" if spec else ""

    def hosted_bytes(self, is_replicated: bool) -> int:
        """The bytes of accepted gradients of hosted optimizers, whose states are on each machine or have one owner."""
        return sum(spec.nbytes for spec in self._hosted() if spec.is_replicated is is_replicated)

    def hosted_remarks(self) -> list[str]:
        """Why these states are there, where hosted optimizers have chosen."""
        return sorted({spec.remark for spec in self._hosted() if spec.remark})

    def _hosted(self) -> list[TensorSpec]:
        accepted = (each.accepted for each in self._by_name.values() if each.accepted is not None)
        return [spec for spec in accepted if spec.ownership == spec.name]

    def cast(self, machine_index: int, ranks: range, ballot: pb.Ballot) -> Outcome:
        """Take the votes of one machine, whose global ranks are ``ranks``; those in the tensor's group vote.

        Raises ProtocolError for a ballot that no correct machine sends.
        """
        name = ballot.name
        declaration = self._by_name.get(name) or _Declaration(name)
        votes = _read_votes(ballot, ranks, self._size, self._joined, declaration.specs)
        self._by_name[name] = declaration
        outcome: Outcome = None
        if ballot.generation == declaration.generation + 1 and declaration.is_decided:
            if declaration.accepted is not None and self._num_machines > 1:
                outcome = Reopened(pb.Reopen(name=ballot.name, generation=ballot.generation, rounds=ballot.rounds))
            self._open(declaration)
        elif ballot.generation > declaration.generation:
            raise ProtocolError(
                f"tensor {ballot.name!r}: got a vote on generation {ballot.generation}, but generation "
                f"{declaration.generation} is {'the latest' if declaration.is_decided else 'still undecided'}"
            )
        elif ballot.generation < declaration.generation or declaration.is_decided:
            return None  # the ballot and the verdict crossed on their way
        elif machine_index in declaration.votes:
            raise ProtocolError(f"tensor {ballot.name!r}: machine {machine_index} voted twice on {ballot.generation}")
        declaration.votes[machine_index] = votes
        for voters, spec in votes:
            declaration.groups.add(spec.group)
            declaration.voted += len(voters)
        declaration.rounds = max(declaration.rounds, ballot.rounds)
        return Decided(self._decide(declaration)) if self._is_over(declaration) else outcome

    def _is_over(self, declaration: _Declaration) -> bool:
        """True if all ranks of the group have voted, or the votes name different groups."""
        if len(declaration.groups) > 1:
            return True
        (group,) = declaration.groups
        members = group or range(self._size)
        if not self._joined:
            return declaration.voted == len(members)
        return self._joined.union(declaration.voters()).issuperset(members)

    def join(self, rank: int) -> list[pb.Verdict]:
        """A rank has joined. Returns the verdicts of votes that waited only for it."""
        self._joined.add(rank)
        open_ = [each for each in self._by_name.values() if not each.is_decided]
        return [self._decide(each) for each in open_ if self._is_over(each)]

    def void_all(self) -> None:
        """All ranks have joined: every name is undeclared, and all ranks vote again. Generations go on."""
        self._joined.clear()
        self.accepted_count = self.accepted_bytes = 0
        for declaration in self._by_name.values():
            declaration.accepted = None

    def _open(self, declaration: _Declaration) -> None:
        if declaration.accepted is not None:
            self.accepted_count -= 1
            self.accepted_bytes -= declaration.accepted.nbytes
        declaration.generation += 1
        declaration.is_decided = False
        declaration.accepted = None

    def _decide(self, declaration: _Declaration) -> pb.Verdict:
        votes = [vote for _, machine in sorted(declaration.votes.items()) for vote in machine]
        declaration.is_decided = True
        verdict = pb.Verdict(name=declaration.name, generation=declaration.generation, rounds=declaration.rounds)
        declaration.votes.clear()
        declaration.groups.clear()
        declaration.specs.clear()
        declaration.voted = declaration.rounds = 0
        voters = {rank for ranks, _ in votes for rank in ranks}
        spec = votes[0][1]
        absent = self._joined.intersection(spec.members(self._size)) - voters
        verdict.error = _disagreement(declaration.name, votes) or self._impossible(spec)
        if not verdict.error and absent and spec.needs_all:
            verdict.error, verdict.unsupported = unsupported(spec, absent), True
        if not verdict.error:
            # Priorities may differ. The lowest rank's is taken, so that all machines have the same.
            spec = min(votes, key=lambda vote: vote[0])[1]
            declaration.accepted = spec
            self.accepted_count += 1
            self.accepted_bytes += spec.nbytes
            verdict.spec = pack_spec(spec)
        else:
            named = {rank for _, spec in votes for rank in spec.members(self._size)}
            verdict.late.extend(sorted(named - voters - self._joined))
        return verdict

    def _impossible(self, spec: TensorSpec) -> str:
        if spec.op is Op.BROADCAST and spec.root >= self._size:
            return f"tensor {spec.name!r}: rank {spec.root} is to broadcast it, but the last rank is {self._size - 1}"
        if spec.op is Op.ACCUMULATE and self._num_machines == 1:
            return f"tensor {spec.name!r}: servers accumulate what several machines give, but the job has one machine"
        return ""


def _disagreement(name: str, votes: _Votes) -> str:
    """A text with the specs that ranks gave, if they do not agree; else empty."""
    camps: dict[tuple[object, ...], tuple[TensorSpec, list[int]]] = {}
    for ranks, spec in votes:
        camps.setdefault(spec.signature(), (spec, []))[1].extend(ranks)
    if len(camps) == 1:
        return ""
    ordered = sorted(camps.values(), key=lambda camp: min(camp[1]))
    gave = ", ".join(f"{ranks_text(ranks)} gave {spec.describe()}" for spec, ranks in ordered[:6])
    more = f" and {len(ordered) - 6} other versions" if len(ordered) > 6 else ""
    if len({spec.group for spec, _ in camps.values()}) > 1:
        remedy = "name the same group on all ranks of it, and use another tensor name in each group"
    elif len({spec.codec for spec, _ in camps.values()}) > 1:
        remedy = "use the same compression, and the same BYTEPS_MIN_COMPRESS_BYTES, on every rank"
    else:
        remedy = "use the same shape, dtype and operation on every rank"
    return f"tensor {name!r}: {gave}{more}; {remedy}"


def _read_votes(ballot: pb.Ballot, ranks: range, size: int, joined: set[int], specs: _Specs) -> _Votes:
    """One vote of each rank of ``ranks`` that is in the group and has not joined since it voted. If they disagree about
    the group, some of them may be missing. Raises ProtocolError for votes that no correct machine sends."""
    for vote in ballot.votes:
        if vote.ranks and vote.spec not in specs:
            spec = unpack_spec(ballot.name, vote.spec)
            specs[vote.spec] = spec, frozenset(spec.group) or range(size)
    if len(ballot.votes) == 1 and not joined and ranks:  # as nearly always, and each of many machines has many tensors
        (vote,) = ballot.votes
        if len(vote.ranks) == len(ranks) and tuple(vote.ranks) == (voters := _all_of(ranks)):
            spec, _ = specs[vote.spec]
            if not spec.group:
                return [(voters, spec)]
    read = [(tuple(sorted(vote.ranks)), *specs[vote.spec]) for vote in ballot.votes if vote.ranks]
    voted = {rank for voters, _, _ in read for rank in voters}
    groups = {spec.group for _, spec, _ in read}
    for voters, spec, members in read:
        if spec.group and spec.group[-1] >= size:
            raise ProtocolError(f"tensor {ballot.name!r}: {spec.describe()}, but the last rank is {size - 1}")
        if not all(rank in members for rank in voters):
            raise ProtocolError(
                f"tensor {ballot.name!r}: {ranks_text(voters)} voted for {spec.describe()}, "
                "but not all of them are in that group"
            )
    due = {rank for rank in ranks if any(rank in members for _, _, members in read)}
    due = {rank for rank in due if rank in voted or not (len(groups) > 1 or rank in joined)}
    if not voted or voted != due or len(voted) < sum(len(voters) for voters, _, _ in read):
        sent = sorted(rank for voters, _, _ in read for rank in voters)
        raise ProtocolError(
            f"tensor {ballot.name!r}: the machine of {ranks_text(ranks)} sent votes of {ranks_text(sent)}"
        )
    return [(voters, spec) for voters, spec, _ in read]


@functools.lru_cache(maxsize=1 << 16)
def _all_of(ranks: range) -> tuple[int, ...]:
    """One object for all votes of a machine."""
    return tuple(ranks)


class Barriers:
    """The machines that have arrived at each barrier. Barrier numbers rise by one; a machine arrives at each at most
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
        """Let barriers wait for all machines again."""
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
    """Decides which machines may exit. A machine whose ranks have all shut down stays a while: others may need the last
    contributions of its ranks once more.

    The machine may exit once every other machine has said that it lacks no result of those ranks, or has shut down
    itself.

    An answer that is in flight when a server dies, or a connection breaks, is lost. Then the sum is made again from the
    contributions that each machine has kept. Only the machine that lacks the result knows that it does.
    """

    def __init__(self) -> None:
        self._shut_down: set[int] = set()  # ranks that have shut down
        self._confirmed: dict[int, set[int]] = {}  # by member id: ranks that have shut down, of which it lacks nothing
        self._dismissed: set[int] = set()  # member ids

    def on_shutdown(self, ranks: Iterable[int]) -> None:
        """These ranks have shut down."""
        self._shut_down.update(ranks)

    def on_receipts(self, member: MemberRecord, ranks: Iterable[int]) -> None:
        """A machine lacks no result of the rounds in which these ranks, which have shut down, took part."""
        self._confirmed.setdefault(member.id, set()).update(ranks)

    def dismiss(self, workers: Sequence[MemberRecord]) -> list[MemberRecord]:
        """Dismiss those of the ``workers``, all that are connected, that may exit. Returns them, each only once."""
        leaving = [worker for worker in workers if self._shut_down.issuperset(worker.ranks)]
        others = [worker for worker in workers if worker not in leaving]
        free = [
            worker
            for worker in leaving
            if worker.id not in self._dismissed
            and all(self._confirmed.get(other.id, set()).issuperset(worker.ranks) for other in others)
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
        """The handlers, by kind, of messages that a communication service sends of its ranks."""
        return {
            "arrive": self._arrive,
            "declare": self._declare,
            "idle": self._idle,
            "join": self._join,
            "keep_states": self._keep_states,
            "ranks_shut_down": self._ranks_shut_down,
            "shutdown_confirmed": self._shutdown_confirmed,
        }

    def _declare(self, member: MemberRecord, declare: pb.Declare, now_s: float) -> Outgoing:
        if not self._job.accepts("declare"):
            return []
        verdicts: list[pb.Verdict] = []
        out: Outgoing = []
        for ballot in declare.ballots:
            match self.declarations.cast(member.facts.machine_index, ranks_of(member), ballot):
                case Decided(verdict):
                    verdicts.append(verdict)
                case Reopened(reopen):
                    others = [m for m in self._job.roster.workers() if m is not member]
                    out += to_each(others, pb.SchedulerMessage(reopen=reopen))
        return out + self._decided(verdicts)

    def _decided(self, verdicts: list[pb.Verdict]) -> Outgoing:
        return self._to_all(pb.SchedulerMessage(verdicts=pb.Verdicts(verdicts=verdicts))) if verdicts else []

    def _arrive(self, member: MemberRecord, arrive: pb.Arrive, now_s: float) -> Outgoing:
        if not self._job.accepts("arrive"):
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
        if not self._job.accepts("join"):
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
        if not self._job.accepts("idle"):
            return []
        over = self.joining.idle(member.facts.machine_index, ranks_of(member), idle.direct_round)
        if over is None:
            return []
        self.declarations.void_all()
        self._barriers.expect_all()
        return self._to_all(pb.SchedulerMessage(all_joined=over))

    def _ranks_shut_down(self, member: MemberRecord, shut_down: pb.RanksShutDown, now_s: float) -> Outgoing:
        """Ranks of a machine have shut down for good. To others that is the same as a worker that has left."""
        if not self._job.accepts("ranks_shut_down"):
            return []
        if not shut_down.ranks or not set(shut_down.ranks) <= set(ranks_of(member)):
            raise ProtocolError(
                f"it reported a shutdown of {ranks_text(shut_down.ranks)}, which are not all its own ranks"
            )
        if set(shut_down.ranks) == set(member.ranks):
            count = len(shut_down.ranks)
            text = f"{member.describe()} has shut down: its {'rank has' if count == 1 else 'ranks have'} ended"
        else:
            text = f"{ranks_text(shut_down.ranks)} of {member.describe()} has shut down"
        others = [m for m in self._job.roster.workers() if m is not member]
        self._shutdown_tracker.on_shutdown(shut_down.ranks)
        return to_each(others, failure("PeerLostError", text, shut_down.ranks)) + self._dismiss()

    def left(self, member: MemberRecord, text: str) -> Outgoing:
        """The machine has left in order. Others raise ``text`` as an error only if they still wait for its ranks, so
        that nobody sees it at a normal end."""
        self._shutdown_tracker.on_shutdown(member.ranks)
        return self._to_all(failure("PeerLostError", text, member.ranks)) + self._dismiss()

    def _keep_states(self, member: MemberRecord, keep_states: pb.KeepStates, now_s: float) -> Outgoing:
        ranks_of(member)
        self.keeps_states = True
        return []

    def _shutdown_confirmed(self, member: MemberRecord, confirmed: pb.RanksShutDown, now_s: float) -> Outgoing:
        """The machine lacks no result of the rounds of these ranks, which have shut down."""
        ranks_of(member)
        self._shutdown_tracker.on_receipts(member, confirmed.ranks)
        return self._dismiss()

    def _dismiss(self) -> Outgoing:
        """Let machines exit whose ranks have shut down, once no other machine needs the contributions that they have
        kept."""
        free = self._shutdown_tracker.dismiss(self._job.roster.workers())
        return to_each(free, pb.SchedulerMessage(dismissed=pb.Dismissed()))

    def _to_all(self, message: pb.SchedulerMessage) -> Outgoing:
        return to_each(self._job.roster.workers(), message)
