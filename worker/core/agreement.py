"""How names become tensors: this machine's side of the declaration protocol, and its table of names. Pure.

A rank's nth declaration of a name is its vote on the nth *generation* of it. When all local ranks of the tensor's
group have voted, the machine's ballot goes to the scheduler; when the ballots of all of the group are there, its
verdict comes to all machines, which count generations alike. A rank that declares an agreed name anew opens the next
generation; ranks that wait in a round which it has not joined are thereby voters for the old spec, so that a
disagreement ends in an error on every rank, not in a hang. After a mismatch the name is undeclared and may be used
again.

A disagreement about the group itself is found at once, before all have voted (see the scheduler's rank_group.py).
A rank that was named in it, and comes late, gets the same error. When others agree on a group without a rank that uses
the name, or votes on it, that rank gets an error, too. Both can happen while this machine still waits for the result of
a round that others have got: then the tensor is ENDING, and void only after that.

All that a communication service knows of a name is in its ``TensorName``, and only its methods write there:
declarations, votes, the tensor it stands for, and those that it has stood for. What joining ranks and kept tensors need
of names is asked of ``Agreement``. A name goes from generation to generation; a verdict of the scheduler ends each:

    no proposal ─a local rank declares, or another machine votes─► open ─all have voted─► sent ─verdict─► no proposal

Beside that, whatever the proposal, the name stands for one tensor or none, and remembers up to two kinds of older ones:
those that are ENDING, and the one that is KEPT (see TensorState).

Gathers and exchanges are not voted on; of their names only ``last_rounds`` is known here.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from byteps_py.errors import BytePSError, JoinedError, MismatchError
from byteps_py.tensors import TensorSpec, unsupported
from byteps_py.worker.core.events import (
    Action,
    AgreementEvent,
    AllRanksJoined,
    BeginTensor,
    BytesReady,
    Fail,
    LocalRankJoined,
    NameAccepted,
    NameDeclared,
    NameRejected,
    NameReopened,
    RankJoined,
    RankLeft,
    Release,
    SendBallot,
    TensorEnded,
    TensorForgotten,
    TensorVoid,
    VerdictApplied,
)
from byteps_py.worker.core.tensor import RankSlot, SlotState, Tensor, TensorState


@dataclass(slots=True)
class Proposal:
    """``votes``: by local rank. ``slots``: of the local ranks that voted by declaring. ``rounds``: of the
    generation before, that all ranks have got or will get. ``is_reopened``: another machine votes on it."""

    generation: int
    rounds: int = 0
    is_reopened: bool = False
    votes: dict[int, TensorSpec] = field(default_factory=dict)
    slots: dict[int, RankSlot] = field(default_factory=dict)
    sent: bool = False


@dataclass(frozen=True, slots=True)
class MissedError:
    """An error that a rank has yet to get. ``slot``: whose use, which crosses the news, would get it. ``spec``: only a
    rank that declares this once more gets it; None if any declaration does."""

    error: BytePSError
    slot: RankSlot | None
    spec: TensorSpec | None = None


@dataclass(slots=True)
class TensorName:
    """A part of Agreement, whose handlers ask it and write to it by many small methods.

    By local rank: ``later``, declarations that came before the generation ahead of theirs was decided;
    ``failed``, slots that are void, but whose memory the rank may write to until it declares the name again;
    ``late``, what becomes of the next declarations, which are votes on generations that are rejected already.
    ``ending``: tensors that are ENDING. ``last_rounds``: of a gather or an exchange, by global rank that has joined.
    """

    name: str
    generation: int = 0  # the last one decided, either way
    tensor: Tensor | None = None
    rounds: int = 0  # of the last generation's tensor, if it has ended by itself
    proposal: Proposal | None = None
    kept: Tensor | None = None
    ending: list[Tensor] = field(default_factory=list)
    later: dict[int, deque[RankSlot]] = field(default_factory=dict)
    failed: dict[int, list[RankSlot]] = field(default_factory=dict)
    late: dict[int, deque[MissedError]] = field(default_factory=dict)
    last_rounds: dict[int, int] = field(default_factory=dict)

    # ---- votes -----------------------------------------------------------------------------------------

    def declare(self, slot: RankSlot) -> list[Action]:
        """A rank votes, unless its declaration has failed already: then ``slot`` is void by now."""
        actions = self.release(slot.local_rank)
        if late := self.late.get(slot.local_rank):
            missed = late.popleft()
            if missed.spec is None or missed.spec.agrees_with(slot.spec):
                return actions + self.void([slot], missed.error)
        self.later.setdefault(slot.local_rank, deque()).append(slot)
        return actions

    def ready(self, slot: RankSlot) -> None:
        """A rank handed over a round of ``slot``: of a void one, it gets the error for that round."""
        if slot.state is SlotState.VOID and (late := self.late.get(slot.local_rank)) and late[0].slot is slot:
            late.popleft()

    def reopen(self, generation: int, rounds: int) -> None:
        """Another machine, which had got ``rounds`` rounds, votes on this generation."""
        if generation == self.generation + 1:  # else it is decided by now
            if self.proposal is None:
                self.proposal = Proposal(generation)
            self.proposal.rounds, self.proposal.is_reopened = rounds, True

    def open_proposal(self) -> Proposal | None:
        """The votes so far, in words or by waiting in a round; None if no rank votes, or the ballot has been sent."""
        if self.proposal is None and any(self.later.values()):
            self.proposal = Proposal(self.generation + 1)
        proposal = self.proposal
        if proposal is None or proposal.sent:
            return None
        for rank, slots in self.later.items():
            if slots and rank not in proposal.slots:
                slot = proposal.slots[rank] = slots.popleft()
                proposal.votes[rank] = slot.spec
                # A rank that declares anew has got all its rounds, and joins no more of them.
                proposal.rounds = self.tensor.round - 1 if self.tensor is not None else self.rounds
        if self.tensor is not None and self.tensor.round > proposal.rounds:
            for slot in self.tensor.slots:
                if slot.waits:
                    proposal.votes.setdefault(slot.local_rank, slot.spec)
        return proposal

    def send(self, proposal: Proposal) -> SendBallot:
        """All local ranks have voted."""
        proposal.sent = True
        by_signature: dict[object, tuple[TensorSpec, list[int]]] = {}
        for rank in sorted(proposal.votes):
            spec = proposal.votes[rank]
            by_signature.setdefault(spec.signature(), (spec, []))[1].append(rank)
        votes = tuple((spec, tuple(ranks)) for spec, ranks in by_signature.values())
        return SendBallot(self.name, proposal.generation, proposal.rounds, votes)

    def current_proposal(self, generation: int) -> Proposal | None:
        """The proposal that a verdict on this generation decides; None if it is decided already."""
        proposal = self.proposal or Proposal(self.generation + 1)
        return proposal if proposal.generation == generation else None

    # ---- verdicts --------------------------------------------------------------------------------------

    def finished(self, rounds: int) -> Tensor | None:
        """The tensor, if no local rank waits for one of these rounds of it, or will."""
        return self.tensor if self.tensor is not None and self.tensor.is_past(rounds) else None

    def decide(self, generation: int, tensor: Tensor | None, rounds: int, error: BytePSError) -> None:
        """The name stands for ``tensor`` now. The one before, unless it is finished, ends with ``error`` after
        ``rounds``."""
        if self.tensor is not None and self.finished(rounds) is None:
            self.end_after(self.tensor, rounds, error)
        self.generation, self.tensor, self.proposal, self.rounds = generation, tensor, None, 0
        if tensor is not None:
            for slot in tensor.slots:
                slot.tensor = tensor

    def undecided_votes(self, proposal: Proposal) -> dict[int, RankSlot]:
        """Take the declarations that came after the ballot went, which did not wait for them: they are votes on the
        same generation."""
        return {rank: slots.popleft() for rank, slots in self.later.items() if slots and rank not in proposal.slots}

    def expect_late(self, local_rank: int, missed: MissedError) -> None:
        """The rank's next declaration fails."""
        self.late.setdefault(local_rank, deque()).append(missed)

    # ---- ends ------------------------------------------------------------------------------------------

    def void(self, slots: Iterable[RankSlot], error: BytePSError) -> list[Action]:
        """These declarations have failed."""
        failed = tuple(slots)
        for slot in failed:
            slot.move_to(SlotState.VOID)
            self.failed.setdefault(slot.local_rank, []).append(slot)
        return [Fail(failed, error)] if failed else []

    def end_after(self, tensor: Tensor, round_: int, error: BytePSError) -> None:
        tensor.end_after(round_, error)
        self.ending.append(tensor)

    def end(self, tensor: Tensor, joined: set[int]) -> list[Action]:
        """The last round of a tensor that is ENDING has been delivered. ``joined``: local ranks that declare nothing
        any more."""
        self.ending = [other for other in self.ending if other is not tensor]
        if tensor.ending is None:
            return []
        if self.tensor is tensor:  # not by a vote: ranks that do not wait have yet to learn it
            self.tensor, self.rounds = None, tensor.round - 1
            anew = {*(self.proposal.slots if self.proposal else ()), *(r for r, slots in self.later.items() if slots)}
            for slot in tensor.slots:
                if not slot.waits and slot.local_rank not in joined | anew:
                    self.expect_late(slot.local_rank, MissedError(tensor.ending, slot, tensor.spec))
        return self.void((*tensor.slots, *tensor.joined), tensor.ending)

    def keep(self, tensor: Tensor) -> None:
        """It is void, but another machine may lack its last result. The one kept before must be forgotten first."""
        self.kept = tensor

    def forget_kept(self) -> Tensor | None:
        """No machine lacks a result of what the name stood for before. Returns what was kept."""
        kept, self.kept = self.kept, None
        return kept

    def start_anew(self, error: BytePSError) -> list[RankSlot]:
        """All ranks have joined: all declarations are void. Returns their slots."""
        slots = [slot for slots in self.later.values() for slot in slots]
        slots += self.proposal.slots.values() if self.proposal is not None else ()
        slots += (*self.tensor.slots, *self.tensor.joined) if self.tensor is not None else ()
        self.void(slots, error)
        self.tensor = self.proposal = None
        self.rounds = 0
        self.later.clear()
        self.late.clear()
        self.last_rounds.clear()
        return slots

    # ---- ranks -----------------------------------------------------------------------------------------

    def release(self, local_rank: int) -> list[Action]:
        """The rank does not write to its void slots any more; nor does the service, if no kernel runs there."""
        slots = self.failed.pop(local_rank, [])
        for slot in slots:
            slot.move_to(SlotState.RELEASED)
        idle = tuple(slot for slot in slots if slot.tensor is None or not slot.tensor.is_used)
        return [Release(idle)] if idle else []

    def forget_rank(self, local_rank: int) -> list[Action]:
        """A rank has left: what it declared and is not agreed on yet is no vote any more."""
        actions = self.release(local_rank)
        self.late.pop(local_rank, None)
        slots = [*(self.tensor.slots if self.tensor else ()), *(self.proposal.slots.values() if self.proposal else ())]
        for slot in slots:
            if slot.local_rank == local_rank:
                slot.rank_left()
        if later := self.later.pop(local_rank, None):
            actions.append(Release(tuple(later)))
        if self.proposal is not None and not self.proposal.sent:
            self.proposal.votes.pop(local_rank, None)
            declared = self.proposal.slots.pop(local_rank, None)
            if declared is not None:
                actions.append(Release((declared,)))
            if not self.proposal.votes and not self.proposal.is_reopened:
                self.proposal = None
        return actions

    def rank_joined(self, rank: int, last_round: int) -> None:
        """Global ``rank`` takes part in no round of this gather or exchange after ``last_round``."""
        self.last_rounds[rank] = last_round

    @property
    def was_declared(self) -> bool:
        """A rank has voted on it, or will get an error for that; False of a gather or an exchange."""
        return bool(self.generation or self.proposal or self.later or self.failed or self.late)

    @property
    def undecided(self) -> list[RankSlot]:
        """Slots of local ranks that have declared it, and know of no verdict."""
        proposed = self.proposal.slots.values() if self.proposal is not None else ()
        return [*itertools.chain.from_iterable(self.later.values()), *proposed]


#: Void slots that ranks are told of in one message.
_MAX_SLOTS = 4096


def fail_all(slots: Sequence[RankSlot], error: BytePSError) -> list[Action]:
    """Tell ranks of any number of void slots."""
    return [Fail(tuple(slots[i : i + _MAX_SLOTS]), error) for i in range(0, len(slots), _MAX_SLOTS)]


class Agreement:
    """All names of one machine. ``local_size``: number of its ranks; ``first_rank``: the global number of the first
    one. ``joined``: local ranks that have joined; they vote no more. ``handle`` is the only method that changes
    anything; no deadline is kept here, so it takes no time."""

    tensor_class: type[Tensor] = Tensor

    def __init__(self, local_size: int, first_rank: int = 0) -> None:
        self._first_rank = first_rank
        self._local_size = local_size
        self.joined: set[int] = set()
        self._names: dict[str, TensorName] = {}
        # Which of thousands of names to look at: all with declarations that wait, and perhaps others; those that keep
        # a tensor, in the order in which they began to.
        self._undecided: dict[str, TensorName] = {}
        self._keeping: dict[str, TensorName] = {}
        self._handlers: Mapping[type, Callable[[Any], list[Action]]] = {
            NameDeclared: self._declare,
            BytesReady: self._ready,
            NameReopened: self._reopen,
            NameAccepted: self._accept,
            NameRejected: self._reject,
            VerdictApplied: lambda event: self._poll(self._names[event.name]),
            TensorEnded: lambda event: self._end(event.tensor),
            LocalRankJoined: self._join,
            RankJoined: self._rank_joined,
            AllRanksJoined: self._start_anew,
            RankLeft: self._forget_rank,
        }

    def handle(self, event: AgreementEvent) -> list[Action]:
        """Return the actions that ``event`` requires."""
        return self._handlers[type(event)](event)

    def _name(self, name: str) -> TensorName:
        return self._names.setdefault(name, TensorName(name))

    # ---- votes -----------------------------------------------------------------------------------------

    def _declare(self, event: NameDeclared) -> list[Action]:
        slot = event.slot
        name = self._name(slot.spec.name)
        actions = name.declare(slot)
        if slot.state is SlotState.VOID:
            return actions
        self._undecided[name.name] = name
        return actions + self._poll(name)

    def _ready(self, event: BytesReady) -> list[Action]:
        name = self._names[event.slot.spec.name]
        name.ready(event.slot)
        return self._poll(name)

    def _reopen(self, event: NameReopened) -> list[Action]:
        name = self._name(event.name)
        name.reopen(event.generation, event.rounds)
        return self._poll(name)

    def _poll(self, name: TensorName) -> list[Action]:
        """Send the ballot once every local rank of the group has voted, in words or by waiting for the old
        generation; or once two disagree about the group."""
        proposal = name.open_proposal()
        return [name.send(proposal)] if proposal is not None and self._is_complete(proposal.votes) else []

    def _is_complete(self, votes: dict[int, TensorSpec]) -> bool:
        groups = {spec.group for spec in votes.values()}
        return len(groups) > 1 or (len(groups) == 1 and self._has_all(votes, self._local(groups.pop())))

    def _has_all(self, votes: dict[int, TensorSpec], members: Sequence[int]) -> bool:
        """Those of all ``members`` that have not joined."""
        return all(rank in votes or rank in self.joined for rank in members)

    def _local(self, group: Sequence[int]) -> Sequence[int]:
        """The local ranks of this machine in ``group``."""
        here = range(self._local_size)
        return [rank - self._first_rank for rank in group if rank - self._first_rank in here] if group else here

    # ---- verdicts --------------------------------------------------------------------------------------

    def _accept(self, event: NameAccepted) -> list[Action]:
        """A rank that was waiting in the old generation keeps its slot, and its place, in the new one."""
        name, spec = self._name(event.name), event.spec
        forgotten = self._forget_kept([event.name])  # all of the group have voted, and so have all results
        members = self._local(spec.group)
        proposal = name.current_proposal(event.generation)
        if proposal is None or not self._has_all(proposal.votes, members):
            return forgotten  # without this machine's ballot, the scheduler would be wrong
        old = name.finished(event.rounds)
        slots = {slot.local_rank: slot for slot in (*old.slots, *old.joined)} if old else {}
        slots |= proposal.slots
        voters = [rank for rank in members if rank in proposal.votes]
        tensor = None
        if members:
            tensor = self.tensor_class(event.name, event.generation, spec, tuple(slots.pop(rank) for rank in voters))
        error = MismatchError(
            f"tensor {event.name!r}: other ranks agree on {spec.describe()}, without a rank that used it as another; "
            "let all ranks of a group name the same group, and give each group a name of its own"
        )
        name.decide(event.generation, tensor, event.rounds, error)
        name.late.clear()
        begun = [BeginTensor(tensor)] if tensor is not None else []
        retired = self._retire(old, may_be_wanted=old.spec.group != spec.group) if old is not None else []
        return [*name.void(slots.values(), error), *begun, *forgotten, *retired]

    def _reject(self, event: NameRejected) -> list[Action]:
        name, error, late = self._name(event.name), event.error, tuple(event.late)
        proposal = name.current_proposal(event.generation)
        if proposal is None:
            return []
        known, old = name.tensor, name.finished(event.rounds)
        declared = {**name.undecided_votes(proposal), **proposal.slots}
        name.decide(event.generation, None, event.rounds, error)
        in_old = (*old.slots, *old.joined) if old else ()
        failed = [*declared.values(), *(slot for slot in in_old if slot.local_rank not in declared)]
        voted = {slot.local_rank for slot in failed if slot.local_rank in declared or slot.waits}
        for rank in self._local(late) if late else ():
            if rank not in voted:
                before = next((slot for slot in (known.slots if known else ()) if slot.local_rank == rank), None)
                name.expect_late(rank, MissedError(error, before))
        return [*name.void(failed, error), *(self._retire(old) if old is not None else ())]

    def _end(self, tensor: Tensor) -> list[Action]:
        """The last round of a tensor that is ENDING has been delivered."""
        return [*self._names[tensor.name].end(tensor, self.joined), *self._retire(tensor)]

    def _retire(self, tensor: Tensor, may_be_wanted: bool = True) -> list[Action]:
        """A tensor is void. ``may_be_wanted``: another machine may lack its last result, and what was given here, be it
        nothing, is kept for it. No machine lacks what was kept of that name before."""
        if not may_be_wanted or tensor.is_alone:
            return [TensorVoid(tensor)]
        forgotten = self._forget_kept([tensor.name])
        name = self._keeping[tensor.name] = self._name(tensor.name)
        name.keep(tensor)
        return [*forgotten, TensorVoid(tensor, is_kept=True)]

    def _forget_kept(self, names: Iterable[str]) -> list[Action]:
        """No machine lacks a result of a tensor that had one of these names before."""
        kept = [self._keeping.pop(name).forget_kept() for name in names if name in self._keeping]
        return [TensorForgotten(tensor) for tensor in kept if tensor is not None]

    # ---- ranks that join, or leave ---------------------------------------------------------------------

    def _join(self, event: LocalRankJoined) -> list[Action]:
        self.joined.add(event.local_rank)
        return [action for name in self._names.values() for action in self._poll(name)]

    def _rank_joined(self, event: RankJoined) -> list[Action]:
        """Tensors that can't do without the rank end after the last round that it takes part in."""
        actions: list[Action] = []
        for (name, generation), round_ in event.last_rounds.items():
            if not generation:
                self._name(name).rank_joined(event.rank, round_)
        for tensor in self.tensors():
            last = event.last_rounds.get((tensor.name, tensor.generation))
            if last is not None and tensor.state is TensorState.ACTIVE:
                error = JoinedError(unsupported(tensor.spec, [event.rank]))
                self._names[tensor.name].end_after(tensor, last, error)
                actions += self._end(tensor) if tensor.is_past(last) else ()
        return actions

    def _start_anew(self, event: AllRanksJoined) -> list[Action]:
        """Generations go on, so that what servers still hold is not mistaken for something new."""
        self.joined.clear()
        void = [TensorVoid(tensor) for tensor in self.tensors()]
        failed = [slot for name in self._names.values() for slot in name.start_anew(event.error)]
        self._names = {each: name for each, name in self._names.items() if name.was_declared}
        return [*fail_all(failed, event.error), *self._forget_kept([*self._keeping]), *void]

    def _forget_rank(self, event: RankLeft) -> list[Action]:
        return [action for name in self._names.values() for action in name.forget_rank(event.local_rank)]

    # ---- what is known ---------------------------------------------------------------------------------

    def tensors(self) -> list[Tensor]:
        """What the names stand for."""
        return [name.tensor for name in self._names.values() if name.tensor is not None]

    def kept(self) -> list[Tensor]:
        """Void ones of which another machine may lack a result."""
        return [name.kept for name in self._keeping.values() if name.kept is not None]

    def undecided(self) -> list[tuple[str, list[RankSlot]]]:
        """Names that local ranks wait for though not all ranks have declared them, and these ranks' slots."""
        waiting = []
        for name in [*self._undecided.values()]:
            declared = name.undecided
            if not declared:
                del self._undecided[name.name]
            if slots := [slot for slot in declared if slot.waits]:
                waiting.append((name.name, slots))
        return waiting

    def last_round(self, name_: str, rank: int) -> int:
        """Of a gather or an exchange, in which global ``rank``, which has joined, took part; 0 if in none."""
        name = self._names.get(name_)
        return name.last_rounds.get(rank, 0) if name is not None else 0

    def is_awaited(self) -> bool:
        """A local rank waits for a round."""
        tensors = [*self.tensors(), *(tensor for name in self._names.values() for tensor in name.ending)]
        return bool(self.undecided()) or any(slot.waits for tensor in tensors for slot in tensor.slots)
