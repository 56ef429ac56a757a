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

What is known of a name lies in its TensorName; what joining ranks and kept tensors need of names is asked here, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from byteps_py.errors import BytePSError, MismatchError
from byteps_py.tensors import TensorSpec
from byteps_py.worker.core.actions import Action, Fail
from byteps_py.worker.core.tensor import RankSlot, SlotState, Tensor
from byteps_py.worker.core.tensor_name import MissedError, TensorName

#: Void slots that ranks are told of in one message.
_MAX_SLOTS = 4096


def fail_all(slots: Sequence[RankSlot], error: BytePSError) -> list[Action]:
    """Tell ranks of any number of void slots."""
    return [Fail(tuple(slots[i : i + _MAX_SLOTS]), error) for i in range(0, len(slots), _MAX_SLOTS)]


class Agreement:
    """All names of one machine. ``local_size``: number of its ranks; ``first_rank``: the global number of the first
    one. ``joined``: local ranks that have joined; they vote no more."""

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

    def _name(self, name: str) -> TensorName:
        return self._names.setdefault(name, TensorName(name))

    # ---- votes -----------------------------------------------------------------------------------------

    def declare(self, slot: RankSlot) -> list[Action]:
        """A rank declares a name; ``slot`` is its memory."""
        name = self._name(slot.spec.name)
        actions = name.declare(slot)
        if slot.state is SlotState.VOID:
            return actions
        self._undecided[name.name] = name
        return actions + self._poll(name)

    def came(self, slot: RankSlot) -> list[Action]:
        """A rank handed over a round of ``slot``."""
        name = self._names[slot.spec.name]
        name.came(slot)
        return self._poll(name)

    def reopened(self, name_: str, generation: int, rounds: int) -> list[Action]:
        """Another machine, which had got ``rounds`` rounds of it, votes on the next generation of a name that
        is agreed here. This machine will get them too, so a rank that waits in one of them does not vote by that."""
        name = self._name(name_)
        name.reopen(generation, rounds)
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

    def tensors(self) -> list[Tensor]:
        return [name.tensor for name in self._names.values() if name.tensor is not None]

    # ---- verdicts --------------------------------------------------------------------------------------

    def accepted(
        self, name_: str, generation: int, spec: TensorSpec, rounds: int = 0
    ) -> tuple[Tensor | None, Tensor | None, list[Action]]:
        """All ranks of its group agree on ``spec``. Returns the new tensor, if a local rank is in the group, and the
        one that it replaces, which is to be retired. ``rounds``: of that one, which will be delivered.

        A rank that was waiting in the old generation keeps its slot, and its place, in the new one.
        """
        name = self._name(name_)
        members = self._local(spec.group)
        proposal = name.current_proposal(generation)
        if proposal is None or not self._has_all(proposal.votes, members):
            return None, None, []  # without this machine's ballot, the scheduler would be wrong
        old = name.finished(rounds)
        slots = {slot.local_rank: slot for slot in (*old.slots, *old.joined)} if old else {}
        slots |= proposal.slots
        voters = [rank for rank in members if rank in proposal.votes]
        tensor = (
            self.tensor_class(name_, generation, spec, tuple(slots.pop(rank) for rank in voters)) if members else None
        )
        error = MismatchError(
            f"tensor {name_!r}: other ranks agree on {spec.describe()}, without a rank that used it as another; let "
            "all ranks of a group name the same group, and give each group a name of its own"
        )
        name.decide(generation, tensor, rounds, error)
        name.late.clear()
        return tensor, old, name.void(slots.values(), error)

    def rejected(
        self, name_: str, generation: int, error: BytePSError, late: Iterable[int] = (), rounds: int = 0
    ) -> tuple[list[Action], Tensor | None]:
        """The ranks disagree: the name is undeclared. Returns the tensor to be retired, if there was one. ``late``:
        global ranks that should have voted, and whose votes the scheduler does not know. ``rounds``: as for
        ``accepted``."""
        name = self._name(name_)
        proposal = name.current_proposal(generation)
        if proposal is None:
            return [], None
        known, old = name.tensor, name.finished(rounds)
        declared = {**name.undecided_votes(proposal), **proposal.slots}
        name.decide(generation, None, rounds, error)
        in_old = (*old.slots, *old.joined) if old else ()
        failed = [*declared.values(), *(slot for slot in in_old if slot.local_rank not in declared)]
        voted = {slot.local_rank for slot in failed if slot.local_rank in declared or slot.waits}
        for rank in self._local(tuple(late)) if late else ():
            if rank not in voted:
                before = next((slot for slot in (known.slots if known else ()) if slot.local_rank == rank), None)
                name.expect_late(rank, MissedError(error, before))
        return name.void(failed, error), old

    def decided(self, name_: str) -> list[Action]:
        """The decision is carried out: continue with the declarations that local ranks made meanwhile."""
        return self._poll(self._names[name_])

    def end_after(self, tensor: Tensor, round_: int, error: BytePSError) -> bool:
        """A tensor is void after ``round_``. True if that is over."""
        self._names[tensor.name].end_after(tensor, round_, error)
        return tensor.is_past(round_)

    def ended(self, tensor: Tensor) -> list[Action]:
        """The last round of a tensor that is ENDING has been delivered; it is to be retired."""
        return self._names[tensor.name].end(tensor, self.joined)

    # ---- tensors that are kept -------------------------------------------------------------------------

    def keep(self, tensor: Tensor) -> Tensor | None:
        """A tensor is void, and another machine may lack its last result. Returns what was kept of that name before:
        no machine lacks that any more."""
        self._keeping.pop(tensor.name, None)
        name = self._keeping[tensor.name] = self._name(tensor.name)
        before = name.forget_kept()
        name.keep(tensor)
        return before

    def forget_kept(self, name_: str | None = None) -> list[Tensor]:
        """No machine lacks a result of a tensor that had this name, or any, before. Returns those that were kept."""
        names = [self._keeping.pop(each, None) for each in ([*self._keeping] if name_ is None else [name_])]
        return [kept for name in names if name is not None and (kept := name.forget_kept()) is not None]

    def kept(self) -> list[Tensor]:
        return [name.kept for name in self._keeping.values() if name.kept is not None]

    # ---- ranks that join, or leave ---------------------------------------------------------------------

    def join(self, local_rank: int) -> list[Action]:
        """A rank votes no more, unless it has already."""
        self.joined.add(local_rank)
        return [action for name in self._names.values() for action in self._poll(name)]

    def rank_joined(self, rank: int, last_rounds: Iterable[tuple[str, int]]) -> None:
        """Global ``rank`` has joined; ``last_rounds``: its last ones of gathers and exchanges, by name."""
        for name, round_ in last_rounds:
            self._name(name).rank_joined(rank, round_)

    def last_round(self, name_: str, rank: int) -> int:
        """Of a gather or an exchange, in which global ``rank``, which has joined, took part; 0 if in none."""
        name = self._names.get(name_)
        return name.last_rounds.get(rank, 0) if name is not None else 0

    def is_awaited(self) -> bool:
        """A local rank waits for a round."""
        tensors = [*self.tensors(), *(tensor for name in self._names.values() for tensor in name.ending)]
        return bool(self.undecided()) or any(slot.waits for tensor in tensors for slot in tensor.slots)

    def start_anew(self, error: BytePSError) -> tuple[list[Action], list[Tensor]]:
        """All ranks have joined, and none waits: all declarations are void. Returns the tensors, which are to be
        retired. Generations go on, so that what servers still hold is not mistaken for something new."""
        self.joined.clear()
        tensors = self.tensors()
        failed = [slot for name in self._names.values() for slot in name.start_anew(error)]
        self._names = {each: name for each, name in self._names.items() if name.was_declared}
        return fail_all(failed, error), tensors

    def forget_rank(self, local_rank: int) -> list[Action]:
        """A rank has left: what it declared and is not agreed on yet is no vote any more."""
        return [action for name in self._names.values() for action in name.forget_rank(local_rank)]
