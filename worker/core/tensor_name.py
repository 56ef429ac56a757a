"""One tensor name on one machine: declarations, votes, the tensor it stands for, and those that it has stood for. Pure.

All that a communication service knows of a name is in one object, and only its methods write there. A name goes from
generation to generation; a verdict of the scheduler ends each:

    no proposal ─a local rank declares, or another machine votes─► open ─all have voted─► sent ─verdict─► no proposal

Beside that, whatever the proposal, the name stands for one tensor or none, and remembers up to two kinds of older ones:
those that are ENDING, and the one that is KEPT (see TensorState).

Gathers and exchanges are not voted on; of their names only ``last_rounds`` is known here.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from byteps_py.errors import BytePSError
from byteps_py.tensors import TensorSpec
from byteps_py.worker.core.events import Action, Fail, Release, SendBallot
from byteps_py.worker.core.tensor import RankSlot, SlotState, Tensor


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
