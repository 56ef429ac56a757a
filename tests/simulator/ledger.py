"""What each machine gave to each round, and what came back: it is the same however often it is given, and asked for.

A round may be summed more than once (its server died, its keys moved, a connection broke). What holds then is that a
machine always gives the same bytes to it, and that all machines, wherever their answer comes from, accept the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from byteps_py.tensors import Op
from byteps_py.worker.core.credit import PushQueue
from byteps_py.worker.core.tensor import Part
from byteps_py.worker.io.network import Network

from .memory import Memory
from .network import TcpLink
from .world import InvariantError

Round = tuple[int, int, int, int, int]  # group of ranks, key, generation, index, round


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
        if tensor.contributes or tensor.spec.op is not Op.BROADCAST:
            address = tensor.contribution.address + part.offset if tensor.contributes else 0
            self.ledger.gives(self._me, part, round_, self._bytes(address, part))
        super().push(part, round_)

    def supply(self, part: Part, round_: int, server: int) -> None:
        if part.tensor.spec.op is not Op.BROADCAST and server in self._links:
            block = part.tensor.given(round_)
            data = self._bytes(block.address + part.offset if block is not None else 0, part)
            self.ledger.supplies(self._me, part, round_, data)
        super().supply(part, round_, server)

    def _bytes(self, address: int, part: Part) -> bytes | None:
        return self.ledger.memory.at(address, part.length).tobytes() if address else None

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
