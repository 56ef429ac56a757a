"""What a tensor is, as the ranks agree on it: one object per name, one vote per rank and generation. Pure.

A name's life:   VOTING(1) ─► ACCEPTED(1) ─► VOTING(2) ─► REJECTED(2) ─► VOTING(3) ─► …
The first ballot of the next generation opens the vote. If the name was accepted, the other machines may not know of
the new vote, so they get Reopen. After a rejection every machine knows that it has to vote again.

A vote is over when every rank of the tensor's group has voted. A name belongs to one group at a time: two votes that
name different groups are a disagreement. It is then unknown which ranks have yet to vote, so the vote is over at once.
The verdict names the ranks of these groups that had not voted (``late``): their next declaration of the name counts as
their vote on this generation, and gets the same error. So all ranks of all named groups get the error, and all count
the same generations. Verdicts go to all machines, also to those without a rank in the group.

A vote does not wait for a rank that has joined. An operation that needs such a rank is rejected.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.spec_messages import to_message, to_spec
from byteps_py.tensors import Op, TensorSpec, unsupported
from byteps_py.wording import ranks_text

_Votes = list[tuple[tuple[int, ...], TensorSpec]]  # (ranks, their spec), of one machine


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
    """``votes``: machine index → its ranks' specs, while the generation is being voted on."""

    name: str
    generation: int = 0
    is_decided: bool = True
    accepted: TensorSpec | None = None
    votes: dict[int, _Votes] = field(default_factory=dict)
    voted: int = 0  # number of ranks
    rounds: int = 0  # the most rounds of the previous generation that a voter has received

    def voters(self) -> Iterable[int]:
        return (rank for votes in self.votes.values() for ranks, _ in votes for rank in ranks)


class Declarations:
    """All names of one group. ``accepted_count``, ``accepted_bytes``: of the tensors that are accepted now."""

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

    def cast(self, machine_index: int, ranks: range, ballot: pb.Ballot) -> Outcome:
        """Take the votes of one machine, whose global ranks are ``ranks``; those in the tensor's group vote.

        Raises ProtocolError for a ballot that no correct machine sends.
        """
        votes = _read_votes(ballot, ranks, self._size, self._joined)
        declaration = self._by_name.setdefault(ballot.name, _Declaration(ballot.name))
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
        declaration.rounds = max(declaration.rounds, ballot.rounds)
        declaration.voted += sum(len(voters) for voters, _ in votes)
        return Decided(self._decide(declaration)) if self._is_over(declaration) else outcome

    def _is_over(self, declaration: _Declaration) -> bool:
        """True if all ranks of the group have voted, or the votes name different groups."""
        groups = {spec.group for votes in declaration.votes.values() for _, spec in votes}
        if len(groups) > 1:
            return True
        members = groups.pop() or range(self._size)
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
            verdict.spec.CopyFrom(to_message(spec))
        else:
            named = {rank for _, spec in votes for rank in spec.members(self._size)}
            verdict.late.extend(sorted(named - voters - self._joined))
        return verdict

    def _impossible(self, spec: TensorSpec) -> str:
        if spec.op is Op.BROADCAST and spec.root >= self._size:
            return f"tensor {spec.name!r}: rank {spec.root} is to broadcast it, but the last rank is {self._size - 1}"
        return ""


def _disagreement(name: str, votes: _Votes) -> str:
    """Which ranks gave which specs, in words, if they do not agree; else empty."""
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
    else:
        remedy = "use the same shape, dtype and operation on every rank"
    return f"tensor {name!r}: {gave}{more}; {remedy}"


def _read_votes(ballot: pb.Ballot, ranks: range, size: int, joined: set[int]) -> _Votes:
    """One vote of each rank of ``ranks`` that is in the group and has not joined since it voted. If they disagree about
    the group, some of them may be missing. Raises ProtocolError for votes that no correct machine sends."""
    votes = [(tuple(sorted(vote.ranks)), to_spec(ballot.name, vote.spec)) for vote in ballot.votes if vote.ranks]
    voted = sorted(rank for voters, _ in votes for rank in voters)
    groups = {spec.group for _, spec in votes}
    for voters, spec in votes:
        if spec.group and spec.group[-1] >= size:
            raise ProtocolError(f"tensor {ballot.name!r}: {spec.describe()}, but the last rank is {size - 1}")
        if not set(voters) <= set(spec.members(size)):
            raise ProtocolError(
                f"tensor {ballot.name!r}: {ranks_text(voters)} voted for {spec.describe()}, "
                "but not all of them are in that group"
            )
    due = [rank for rank in ranks if any(rank in spec.members(size) for _, spec in votes)]
    due = [rank for rank in due if rank in voted or not (len(groups) > 1 or rank in joined)]
    if not voted or voted != due:
        raise ProtocolError(
            f"tensor {ballot.name!r}: the machine of {ranks_text(ranks)} sent votes of {ranks_text(voted)}"
        )
    return votes
