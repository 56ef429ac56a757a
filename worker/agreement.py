"""How names become tensors: this machine's side of the declaration protocol. Pure; time is an argument.

A rank's nth declaration of a name is its vote on the nth *generation* of it. When all local ranks of the tensor's
group have voted, the machine's ballot goes to the scheduler; when the ballots of all of the group are there, its
verdict comes to all machines, which count generations alike. A rank that declares an agreed name anew opens the next
generation; ranks that wait in a round which it has not joined are thereby voters for the old spec, so that a
disagreement ends in an error on every rank, not in a hang. After a mismatch the name is undeclared and may be used
again.

A disagreement about the group itself is found at once, before all have voted (see the scheduler's declarations.py).
Who was named in it, and comes late, gets the same error. When others agree on a group without a rank that uses the
name, or votes on it, that rank gets an error, too. Both can happen while this machine still waits for the result of
a round that others have got: then the tensor is *ending*, and void only after that.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from byteps_py.errors import BytePSError, MismatchError
from byteps_py.tensors import TensorSpec
from byteps_py.worker.actions import Action, Fail, Release, SendBallot
from byteps_py.worker.tensor import RankSlot, SlotState, Tensor

#: Void slots that ranks are told of in one message.
_MAX_SLOTS = 4096


@dataclass(slots=True)
class _Proposal:
    """``votes``: by local rank. ``slots``: of the local ranks that voted by declaring. ``rounds``: of the
    generation before, that all ranks have got or will get. ``is_reopened``: another machine votes on it."""

    generation: int
    rounds: int = 0
    is_reopened: bool = False
    votes: dict[int, TensorSpec] = field(default_factory=dict)
    slots: dict[int, RankSlot] = field(default_factory=dict)
    sent: bool = False


@dataclass(frozen=True, slots=True)
class _Missed:
    """An error that a rank has yet to get. ``slot``: whose use, which crosses the news, would get it. ``spec``: it is
    only for who declares this once more; None if it is for any declaration."""

    error: BytePSError
    slot: RankSlot | None
    spec: TensorSpec | None = None


@dataclass(slots=True)
class _Name:
    """By local rank: ``later``, declarations that came before the generation ahead of theirs was decided;
    ``failed``, slots that are void, but whose memory the rank may write to until it declares the name again;
    ``late``, what becomes of the next declarations, which are votes on generations that are rejected already."""

    name: str
    generation: int = 0  # the last one decided, either way
    tensor: Tensor | None = None
    rounds: int = 0  # of the last generation's tensor, if it has ended by itself
    proposal: _Proposal | None = None
    later: dict[int, deque[RankSlot]] = field(default_factory=dict)
    failed: dict[int, list[RankSlot]] = field(default_factory=dict)
    late: dict[int, deque[_Missed]] = field(default_factory=dict)

    def void(self, slots: Iterable[RankSlot], error: BytePSError) -> list[Action]:
        """These declarations have failed."""
        failed = tuple(slots)
        for slot in failed:
            slot.move_to(SlotState.VOID)
            self.failed.setdefault(slot.local_rank, []).append(slot)
        return [Fail(failed, error)] if failed else []


def fail_all(slots: Sequence[RankSlot], error: BytePSError) -> list[Action]:
    """Tell ranks of any number of void slots."""
    return [Fail(tuple(slots[i : i + _MAX_SLOTS]), error) for i in range(0, len(slots), _MAX_SLOTS)]


class Agreement:
    """All names of one machine. ``local_size``: number of its ranks; ``first_rank``: the global number of the first
    one, to be set before any is declared."""

    tensor_class: type[Tensor] = Tensor

    def __init__(self, local_size: int, first_rank: int = 0) -> None:
        self.first_rank = first_rank
        self._local_size = local_size
        self._joined: set[int] = set()
        self._ending: list[Tensor] = []
        self._names: dict[str, _Name] = {}
        self._open: dict[str, _Name] = {}  # those with declarations that are not decided, and perhaps others

    def declare(self, slot: RankSlot) -> list[Action]:
        """A rank declares a name; ``slot`` is its memory."""
        name = self._names.setdefault(slot.spec.name, _Name(slot.spec.name))
        actions = self._let_go(name, slot.local_rank)
        if late := name.late.get(slot.local_rank):
            missed = late.popleft()
            if missed.spec is None or missed.spec.agrees_with(slot.spec):
                return actions + name.void([slot], missed.error)
        name.later.setdefault(slot.local_rank, deque()).append(slot)
        self._open[name.name] = name
        return actions + self._poll(name)

    def came(self, slot: RankSlot) -> list[Action]:
        """A rank handed over a round of ``slot``."""
        name = self._names[slot.spec.name]
        if slot.state is SlotState.VOID and (late := name.late.get(slot.local_rank)) and late[0].slot is slot:
            late.popleft()  # it gets the error for that round
        return self._poll(name)

    def reopened(self, name_: str, generation: int, rounds: int) -> list[Action]:
        """Another machine, which had got ``rounds`` rounds of it, votes on the next generation of a name that
        is agreed here. This machine will get them too, so who waits in one of them does not vote by that."""
        name = self._names.setdefault(name_, _Name(name_))
        if generation != name.generation + 1:
            return []  # decided meanwhile
        if name.proposal is None:
            name.proposal = _Proposal(generation)
        name.proposal.rounds, name.proposal.is_reopened = rounds, True
        return self._poll(name)

    def _poll(self, name: _Name) -> list[Action]:
        """Send the ballot once every local rank of the group has voted, in words or by waiting for the old
        generation; or once two disagree about the group."""
        if name.proposal is None and any(name.later.values()):
            name.proposal = _Proposal(name.generation + 1)
        proposal = name.proposal
        if proposal is None or proposal.sent:
            return []
        for rank, slots in name.later.items():
            if slots and rank not in proposal.slots:
                slot = proposal.slots[rank] = slots.popleft()
                proposal.votes[rank] = slot.spec
                # Who declares anew has got all its rounds, and joins no more of them.
                proposal.rounds = name.tensor.round - 1 if name.tensor is not None else name.rounds
        if name.tensor is not None and name.tensor.round > proposal.rounds:
            for slot in name.tensor.slots:
                if slot.waits:
                    proposal.votes.setdefault(slot.local_rank, slot.spec)
        if not self._is_complete(proposal.votes):
            return []
        proposal.sent = True
        by_signature: dict[object, tuple[TensorSpec, list[int]]] = {}
        for rank in sorted(proposal.votes):
            spec = proposal.votes[rank]
            by_signature.setdefault(spec.signature(), (spec, []))[1].append(rank)
        votes = tuple((spec, tuple(ranks)) for spec, ranks in by_signature.values())
        return [SendBallot(name.name, proposal.generation, proposal.rounds, votes)]

    def _is_complete(self, votes: dict[int, TensorSpec]) -> bool:
        groups = {spec.group for spec in votes.values()}
        return len(groups) > 1 or (len(groups) == 1 and self._has_all(votes, self._local(groups.pop())))

    def _has_all(self, votes: dict[int, TensorSpec], members: Sequence[int]) -> bool:
        """Those of all ``members`` that have not joined."""
        return all(rank in votes or rank in self._joined for rank in members)

    def _local(self, group: Sequence[int]) -> Sequence[int]:
        """The local ranks of this machine in ``group``."""
        here = range(self._local_size)
        return [rank - self.first_rank for rank in group if rank - self.first_rank in here] if group else here

    def accepted(
        self, name_: str, generation: int, spec: TensorSpec, rounds: int = 0
    ) -> tuple[Tensor | None, Tensor | None, list[Action]]:
        """All ranks of its group agree on ``spec``. Returns the new tensor, if a local rank is in the group, and the
        one that it replaces, which is to be retired. ``rounds``: of that one, which will be delivered.

        A rank that was waiting in the old generation keeps its slot, and its place, in the new one.
        """
        name = self._names.setdefault(name_, _Name(name_))
        members = self._local(spec.group)
        proposal = name.proposal or _Proposal(name.generation + 1)
        if proposal.generation != generation:
            return None, None, []
        if not self._has_all(proposal.votes, members):
            return None, None, []  # a verdict without this machine's ballot: the scheduler would be wrong
        old = name.tensor if name.tensor is not None and name.tensor.is_past(rounds) else None
        slots = {slot.local_rank: slot for slot in (*old.slots, *old.joined)} if old else {}
        slots |= proposal.slots
        voters = [rank for rank in members if rank in proposal.votes]
        tensor = (
            self.tensor_class(name_, generation, spec, tuple(slots.pop(rank) for rank in voters)) if members else None
        )
        for slot in tensor.slots if tensor is not None else ():
            slot.tensor = tensor
        error = MismatchError(
            f"tensor {name_!r}: other ranks agree on {spec.describe()}, without a rank that used it as another; let "
            "all ranks of a group name the same group, and give each group a name of its own"
        )
        if name.tensor is not None and old is None:
            self.end_after(name.tensor, rounds, error)
        name.generation, name.tensor, name.proposal, name.rounds = generation, tensor, None, 0
        name.late.clear()
        return tensor, old, name.void(slots.values(), error)

    def rejected(
        self, name_: str, generation: int, error: BytePSError, late: Iterable[int] = (), rounds: int = 0
    ) -> tuple[list[Action], Tensor | None]:
        """The ranks disagree: the name is undeclared. Returns the tensor to be retired, if there was one. ``late``:
        global ranks that should have voted, and whose votes the scheduler does not know. ``rounds``: as for
        ``accepted``."""
        name = self._names.setdefault(name_, _Name(name_))
        proposal = name.proposal or _Proposal(name.generation + 1)
        if proposal.generation != generation:
            return [], None
        known = name.tensor
        old = known if known is not None and known.is_past(rounds) else None
        if known is not None and old is None:
            self.end_after(known, rounds, error)
        # Who declared it after the ballot went, which did not wait, voted on this generation, too.
        after = {rank: slots.popleft() for rank, slots in name.later.items() if slots and rank not in proposal.slots}
        declared = {**after, **proposal.slots}
        in_old = (*old.slots, *old.joined) if old else ()
        failed = [*declared.values(), *(slot for slot in in_old if slot.local_rank not in declared)]
        name.generation, name.tensor, name.proposal, name.rounds = generation, None, None, 0
        voted = {slot.local_rank for slot in failed if slot.local_rank in declared or slot.waits}
        for rank in self._local(tuple(late)) if late else ():
            if rank not in voted:
                before = next((slot for slot in (known.slots if known else ()) if slot.local_rank == rank), None)
                name.late.setdefault(rank, deque()).append(_Missed(error, before))
        return name.void(failed, error), old

    def end_after(self, tensor: Tensor, round_: int, error: BytePSError) -> bool:
        """A tensor is void after ``round_``. True if that is over."""
        tensor.end_after(round_, error)
        self._ending.append(tensor)
        return tensor.is_past(round_)

    def ended(self, tensor: Tensor) -> list[Action]:
        """The last round of a tensor that is ending has been delivered; it is to be retired."""
        name = self._names[tensor.name]
        self._ending = [other for other in self._ending if other is not tensor]
        if name.tensor is tensor and tensor.ending is not None:  # not by a vote: who does not wait has yet to learn it
            name.tensor, name.rounds = None, tensor.round - 1
            anew = {*(name.proposal.slots if name.proposal else ()), *(r for r, slots in name.later.items() if slots)}
            for slot in tensor.slots:
                if not slot.waits and slot.local_rank not in self._joined | anew:
                    missed = _Missed(tensor.ending, slot, tensor.spec)
                    name.late.setdefault(slot.local_rank, deque()).append(missed)
        return name.void((*tensor.slots, *tensor.joined), tensor.ending) if tensor.ending is not None else []

    # ---- joining -----------------------------------------------------------------------------------------

    def join(self, local_rank: int) -> list[Action]:
        """A rank votes no more, unless it has already."""
        self._joined.add(local_rank)
        return [action for name in self._names.values() for action in self._poll(name)]

    def is_awaited(self) -> bool:
        """A local rank waits for a round."""
        tensors = [*self.tensors(), *self._ending]
        return bool(self.undecided()) or any(slot.waits for tensor in tensors for slot in tensor.slots)

    def start_anew(self, error: BytePSError) -> tuple[list[Action], list[Tensor]]:
        """All ranks have joined, and none waits: all declarations are void. Returns the tensors, which are to be
        retired. Generations go on, so that what servers still hold is not mistaken for something new."""
        self._joined.clear()
        tensors = self.tensors()
        failed: list[RankSlot] = []
        for name in self._names.values():
            slots = [slot for slots in name.later.values() for slot in slots]
            slots += name.proposal.slots.values() if name.proposal is not None else ()
            slots += (*name.tensor.slots, *name.tensor.joined) if name.tensor is not None else ()
            name.void(slots, error)
            failed += slots
            name.tensor = name.proposal = None
            name.rounds = 0
            name.later.clear()
            name.late.clear()
        return fail_all(failed, error), tensors

    # ---- leaving -----------------------------------------------------------------------------------------

    def _let_go(self, name: _Name, local_rank: int) -> list[Action]:
        """The rank does not write to its void slots any more; nor does the service, if no kernel runs there."""
        slots = name.failed.pop(local_rank, [])
        for slot in slots:
            slot.move_to(SlotState.RELEASED)
        idle = tuple(slot for slot in slots if slot.tensor is None or not slot.tensor.is_used)
        return [Release(idle)] if idle else []

    def decided(self, name_: str) -> list[Action]:
        """What was decided is carried out: go on with what local ranks declared meanwhile."""
        return self._poll(self._names[name_])

    def forget_rank(self, local_rank: int) -> list[Action]:
        """A rank has left: what it declared and nobody has agreed to yet is no vote any more."""
        actions: list[Action] = []
        for name in self._names.values():
            actions += self._let_go(name, local_rank)
            name.late.pop(local_rank, None)
            slots = [
                *(name.tensor.slots if name.tensor else ()),
                *(name.proposal.slots.values() if name.proposal else ()),
            ]
            for slot in slots:
                if slot.local_rank == local_rank:
                    slot.rank_left()
            if later := name.later.pop(local_rank, None):
                actions.append(Release(tuple(later)))
            if name.proposal is not None and not name.proposal.sent:
                name.proposal.votes.pop(local_rank, None)
                declared = name.proposal.slots.pop(local_rank, None)
                if declared is not None:
                    actions.append(Release((declared,)))
                if not name.proposal.votes and not name.proposal.is_reopened:
                    name.proposal = None
        return actions

    def undecided(self) -> list[tuple[str, list[RankSlot]]]:
        """Names that local ranks wait for though not all ranks have declared them, and these ranks' slots."""
        waiting = []
        for name in [*self._open.values()]:
            declared = [*itertools.chain.from_iterable(name.later.values())]
            declared += name.proposal.slots.values() if name.proposal is not None else ()
            if not declared:
                del self._open[name.name]
            slots = [slot for slot in declared if slot.waits]
            if slots:
                waiting.append((name.name, slots))
        return waiting

    def tensors(self) -> list[Tensor]:
        return [name.tensor for name in self._names.values() if name.tensor is not None]
