"""What each machine gave to each round, and what came back: it is the same however often it is given, and asked for.

A round may be summed more than once (its server died, its keys moved, a connection broke). What holds then is that a
machine always gives the same bytes to it, and that all machines, wherever their answer comes from, accept the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from byteps_py.system.shm import Block
from byteps_py.tensors import Op
from byteps_py.worker.core.credit import PushQueue
from byteps_py.worker.core.hosted_steps import MakeStep, OwnedPart
from byteps_py.worker.core.tensor import AccumulatedPart, Part
from byteps_py.worker.io.network import Network

from .codecs import coded, decoded, from_floats
from .memory import Memory, combine
from .network import TcpLink
from .world import InvariantError

Round = tuple[int, int, int, int, int]  # group of ranks, key, generation, index, round
Owners = tuple[tuple[int, int, int], ...]  # (first element, number of elements, rank)


#: In place of a machine: the one that owns, or what all machines have alike.
_ANY, _ALIKE = -1, -2


def _describe(part: Part, round_: int) -> str:
    return f"round {round_} of {part.tensor.name} ({part.tensor.key:x}/{part.tensor.generation}/{part.index})"


class Ledger:
    """``group``: the one that whoever calls is in."""

    def __init__(self, memory: Memory, group: Callable[[], int]) -> None:
        self.memory = memory
        self._group = group
        self.lost_answers = 0  # blocks that a frozen server may yet write to, and so nobody else uses
        self._given: dict[tuple[int, Round], bytes | None] = {}  # None: nothing, its ranks have joined
        self._results: dict[Round, bytes] = {}
        self._owners: dict[tuple[int, str, int], Owners] = {}  # by group, name of the sum, and machine
        self._armed: dict[tuple[int, int, int, int], list[bool]] = {}  # by group, rank, slot, round: last step, or not
        self._begun_with: dict[tuple[int, str, int], set[int]] = {}
        self._begun: dict[tuple[Round, int], int] = {}  # of gradients: how many of their steps
        self._stepping: set[tuple[Round, int]] = set()
        self._sent: set[Round] = set()  # of parameters
        self._stepped: set[Round] = set()  # of parameters: what can be sent

    def gives(self, machine: int, part: Part, round_: int, data: bytes | None) -> None:
        known = self._given.setdefault((machine, self._name(part, round_)), data)
        if known != data:
            raise InvariantError(f"machine {machine} gives other bytes to {_describe(part, round_)} than before")

    def supplies(self, machine: int, part: Part, round_: int, data: bytes | None) -> None:
        if (machine, self._name(part, round_)) not in self._given:
            raise InvariantError(f"machine {machine} supplies {_describe(part, round_)}, which it never gave")
        self.gives(machine, part, round_, data)

    def accepts(self, machine: int, part: Part, round_: int, address: int) -> None:
        """``address``: of the answer; 0 if it has none."""
        if not address:
            return
        data = self.memory.at(address, part.length).tobytes()
        if self._results.setdefault(self._name(part, round_), data) != data:
            raise InvariantError(f"machine {machine} gets another result of {_describe(part, round_)} than others")

    # ---- partitions with owners ----------------------------------------------------------------------------------

    def owns(self, name: str, owners: Owners, machine: int, is_replicated: bool) -> None:
        """A rank of ``machine`` is told who owns what of the sum with this name."""
        group = self._group()
        known = self._owners.setdefault((group, name, machine if is_replicated else _ANY), owners)
        if known != owners:
            raise InvariantError(f"the owners of {name} are {owners}, and were {known}")
        # Each machine divides the elements among its ranks of the sum's group in the same way.
        ranks = sorted({owner for _, _, owner in owners})
        divided = tuple((start, count, ranks.index(owner)) for start, count, owner in owners)
        if is_replicated and self._owners.setdefault((group, name, _ALIKE), divided) != divided:
            raise InvariantError(f"machine {machine} divides {name} as {divided}, others otherwise")

    def begins_with(self, name: str, use: int, rank: int) -> set[int]:
        """A rank has the parameters of a model, from which ranks go on with changes. Returns the ranks that have."""
        there = self._begun_with.setdefault((self._group(), name, use), set())
        there.add(rank)
        return there

    def arms(self, rank: int, slot: int, round_: int, is_last: bool) -> None:
        """A rank wants a step made with its partitions."""
        self._armed.setdefault((self._group(), rank, slot, round_), []).append(is_last)

    def steps(self, machine: int, step: MakeStep, machines: Sequence[int]) -> None:
        """As often in a round as its owner has said, in that order, with the sum of all that was given to it by
        ``machines``, those of its group."""
        part, round_ = step.part, step.part.tensor.round
        what = _describe(part, round_)
        name = self._name(part, round_)
        place = machine if part.tensor.spec.is_replicated else _ANY
        if (part.first, part.count, part.owner) not in self._owners.get((name[0], part.tensor.name, place), ()):
            raise InvariantError(f"machine {machine} steps {what} for rank {part.owner}, which does not own it")
        begun = self._begun.get((name, place), 0)
        slots = [slot for slot in part.tensor.slots if slot.local_rank == part.owner - part.tensor.first_rank]
        said = [
            is_last for slot in slots for is_last in self._armed.get((name[0], part.owner, slot.id, slot.round), ())
        ]
        if said[begun : begun + 1] != [step.is_last]:
            raise InvariantError(f"machine {machine} steps {what} once more: {begun} times, its owner said {said}")
        if (name, place) in self._stepping:
            raise InvariantError(f"machine {machine} begins another step of {what} before the last one is made")
        self._begun[name, place] = begun + 1
        self._stepping.add((name, place))
        if part.tensor.is_alone:
            return  # the ranks' gradients themselves
        given = [self._given.get((each, name)) for each in machines]
        if any(each is None for each in given):
            raise InvariantError(f"machine {machine} steps {what}, to which not all machines have given")
        dtype, sums = part.tensor.spec.dtype, [np.frombuffer(each, np.uint8) for each in given if each is not None]
        if part.tensor.codec is None:
            due = combine(Op.SUM, dtype, sums)
        else:
            answer = coded([decoded(each) for each in sums]) if len(sums) > 1 else sums[0]
            due = from_floats(dtype, decoded(answer)[: part.count])
        if [self.memory.at(address, part.dense_length).tobytes() for address in step.inputs] != [due.tobytes()]:
            raise InvariantError(f"machine {machine} steps {what} with another sum than that of its contributions")

    def stepped(self, machine: int, step: MakeStep) -> None:
        """After the last one of a round, its parameters lie where they are sent from."""
        place = machine if step.part.tensor.spec.is_replicated else _ANY
        self._stepping.discard((self._name(step.part, step.part.tensor.round), place))
        if step.is_last:
            self._stepped |= {self._name(part, step.parameters.round) for part in step.targets}

    def sends_parameters(self, machine: int, part: OwnedPart, round_: int) -> None:
        if self._name(part, round_) not in self._stepped:
            raise InvariantError(f"machine {machine} sends {_describe(part, round_)} before its step is made")
        if self._name(part, round_) in self._sent and not part.is_resent:
            raise InvariantError(f"machine {machine} sends {_describe(part, round_)} twice")
        self._sent.add(self._name(part, round_))

    def _name(self, part: Part, round_: int) -> Round:
        return (self._group(), part.tensor.key, part.tensor.generation, part.index, round_)


class LedgerNetwork(Network):
    """The real one over simulated links, with its books kept."""

    tcp_link_class = TcpLink

    @property
    def ledger(self) -> Ledger:
        return self._runtime.ledger

    def push(self, part: Part, round_: int) -> None:
        tensor = part.tensor
        if isinstance(part, OwnedPart) and part.is_own and not part.is_sum:
            self.ledger.sends_parameters(self._me, part, round_)
        if part.contributes or tensor.spec.op is not Op.BROADCAST:
            codec, nbytes = tensor.codec, part.length
            if isinstance(part, AccumulatedPart):
                is_coded = codec is not None and part.codes_change(round_)
                nbytes = codec.coded_nbytes(part.count) if codec is not None and is_coded else part.dense_length
            given = self._bytes(part.contribution if part.contributes else None, nbytes)
            self.ledger.gives(self._me, part, round_, given)
        super().push(part, round_)

    def supply(self, part: Part, round_: int, server: int) -> None:
        is_asked = part.tensor.spec.op is Op.BROADCAST and not (isinstance(part, OwnedPart) and part.is_own)
        if not is_asked and server in self._links:
            nbytes = part.dense_length if isinstance(part, AccumulatedPart) else part.length
            self.ledger.supplies(self._me, part, round_, self._bytes(part.given(round_), nbytes))
        super().supply(part, round_, server)

    def _bytes(self, place: tuple[Block, int] | None, nbytes: int) -> bytes | None:
        if place is None:
            return None
        block, offset = place
        return self.ledger.memory.at(block.address + offset, nbytes).tobytes()

    def withdraw(self, part: Part, round_: int, server: int) -> None:
        before: Any = part.answer if server not in self._links else None
        super().withdraw(part, round_, server)
        self.ledger.lost_answers += before is not None


class Queue(PushQueue):
    """The real queue, and a count of its own of what it lets pass. Only what breaks the rules is an error."""

    def __init__(self) -> None:
        super().__init__()
        self._pushed: dict[Part, float] = {}
        self._awaited: set[Part] = set()

    @property
    def pushed_bytes(self) -> int:
        """Not given back yet."""
        return sum(part.length for part in self._pushed)

    def give_back(self, part: Part) -> None:
        super().give_back(part)
        self._pushed.pop(part, None)

    def add(self, part: Part, priority: int, is_awaited: bool = False) -> None:
        super().add(part, priority, is_awaited)
        if is_awaited:
            self._awaited.add(part)

    def hasten(self, parts: set[Part]) -> None:
        super().hasten(parts)
        self._awaited |= parts

    def take(self, now: float) -> Part | None:
        part = super().take(now)
        if part is not None:
            in_flight = sum(other.length for other, at in self._pushed.items() if at > now - self.patience_s)
            is_too_much = self.credit_bytes and in_flight and in_flight + part.length > self.credit_bytes
            if is_too_much and part not in self._awaited:
                raise InvariantError(f"{in_flight + part.length} bytes in flight with a credit of {self.credit_bytes}")
            self._awaited.discard(part)
            self._pushed[part] = now
        return part
