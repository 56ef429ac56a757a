"""How names become tensors: this machine's side of the declaration protocol. Pure; time is an argument.

A rank's nth declaration of a name is its vote on the nth *generation* of it. When all local ranks have voted,
the machine's ballot goes to the scheduler; when all machines' ballots are there, its verdict comes to all. A
rank that declares an agreed name anew opens the next generation; ranks that wait in a round which it has not
joined are thereby voters for the old spec, so that a disagreement ends in an error on every rank, not in a
hang. After a mismatch the name is undeclared and may be used again.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

from byteps_py.errors import BytePSError
from byteps_py.tensors import TensorSpec
from byteps_py.worker.actions import Action, Fail, Release, SendBallot
from byteps_py.worker.tensor import RankSlot, Tensor


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


@dataclass(slots=True)
class _Name:
    """By local rank: ``later``, declarations that came before the generation ahead of theirs was decided;
    ``failed``, slots that are void, but whose memory the rank may write to until it declares the name again."""

    name: str
    generation: int = 0  # the last one decided, either way
    tensor: Tensor | None = None
    proposal: _Proposal | None = None
    later: dict[int, deque[RankSlot]] = field(default_factory=dict)
    failed: dict[int, list[RankSlot]] = field(default_factory=dict)


class Agreement:
    """All names of one machine. ``local_size``: number of its ranks."""

    def __init__(self, local_size: int) -> None:
        self._local_size = local_size
        self._names: dict[str, _Name] = {}

    def declare(self, slot: RankSlot) -> list[Action]:
        """A rank declares a name; ``slot`` is its memory."""
        name = self._names.setdefault(slot.spec.name, _Name(slot.spec.name))
        name.later.setdefault(slot.local_rank, deque()).append(slot)
        return self._let_go(name, slot.local_rank) + self._poll(name)

    def came(self, slot: RankSlot) -> list[Action]:
        """A rank handed over a round of ``slot``."""
        return self._poll(self._names[slot.spec.name])

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
        """Send the ballot once every local rank has voted, in words or by waiting for the old generation."""
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
                proposal.rounds = name.tensor.round - 1 if name.tensor is not None else 0
        if name.tensor is not None and name.tensor.round > proposal.rounds:
            for slot in name.tensor.slots:
                if slot.waits:
                    proposal.votes.setdefault(slot.local_rank, slot.spec)
        if len(proposal.votes) < self._local_size:
            return []
        proposal.sent = True
        by_signature: dict[object, tuple[TensorSpec, list[int]]] = {}
        for rank in sorted(proposal.votes):
            spec = proposal.votes[rank]
            by_signature.setdefault(spec.signature(), (spec, []))[1].append(rank)
        votes = tuple((spec, tuple(ranks)) for spec, ranks in by_signature.values())
        return [SendBallot(name.name, proposal.generation, proposal.rounds, votes)]

    def accepted(self, name_: str, generation: int, spec: TensorSpec) -> tuple[Tensor | None, Tensor | None]:
        """All ranks agree on ``spec``. Returns the new tensor and the one it replaces, which is to be retired.

        A rank that was waiting in the old generation keeps its slot, and its place, in the new one.
        """
        name = self._names[name_]
        proposal = name.proposal
        if proposal is None or proposal.generation != generation:
            return None, None
        old = name.tensor
        slots = []
        for rank in range(self._local_size):
            slot = proposal.slots.get(rank) or (old.slots[rank] if old else None)
            if slot is None:
                return None, None  # a verdict without this machine's ballot: the scheduler would be wrong
            slots.append(slot)
        tensor = Tensor(name_, generation, spec, tuple(slots))
        for slot in slots:
            slot.tensor = tensor
        name.generation, name.tensor, name.proposal = generation, tensor, None
        return tensor, old

    def rejected(self, name_: str, generation: int, error: BytePSError) -> tuple[list[Action], Tensor | None]:
        """The ranks disagree: the name is undeclared. Returns the tensor to be retired, if there was one."""
        name = self._names[name_]
        proposal = name.proposal
        if proposal is None or proposal.generation != generation:
            return [], None
        old = name.tensor
        voters_by_waiting = [slot for slot in old.slots if slot.local_rank not in proposal.slots] if old else []
        failed = (*proposal.slots.values(), *voters_by_waiting)
        for slot in failed:
            slot.is_kept = True
            name.failed.setdefault(slot.local_rank, []).append(slot)
        name.generation, name.tensor, name.proposal = generation, None, None
        return [Fail(failed, error)], old

    def _let_go(self, name: _Name, local_rank: int) -> list[Action]:
        """The rank does not write to its void slots any more; nor does the service, if no kernel runs there."""
        slots = name.failed.pop(local_rank, [])
        for slot in slots:
            slot.is_kept = False
        idle = tuple(slot for slot in slots if slot.tensor is None or not slot.tensor.running)
        return [Release(idle)] if idle else []

    def decided(self, name_: str) -> list[Action]:
        """What was decided is carried out: go on with what local ranks declared meanwhile."""
        return self._poll(self._names[name_])

    def forget_rank(self, local_rank: int) -> list[Action]:
        """A rank has left: what it declared and nobody has agreed to yet is no vote any more."""
        actions: list[Action] = []
        for name in self._names.values():
            actions += self._let_go(name, local_rank)
            slots = [
                *(name.tensor.slots if name.tensor else ()),
                *(name.proposal.slots.values() if name.proposal else ()),
            ]
            for slot in slots:
                slot.has_left = slot.has_left or slot.local_rank == local_rank
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
        for name in self._names.values():
            declared = [*itertools.chain.from_iterable(name.later.values())]
            declared += name.proposal.slots.values() if name.proposal is not None else ()
            slots = [slot for slot in declared if slot.waits]
            if slots:
                waiting.append((name.name, slots))
        return waiting

    def tensors(self) -> list[Tensor]:
        return [name.tensor for name in self._names.values() if name.tensor is not None]
