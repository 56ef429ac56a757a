"""The life of every partition on a summation server. Pure: no sockets, threads, clocks; time is an argument.

Owns which contributions belong together, when they are complete, and who is answered or refused. Must not know
where a contribution's bytes lie or how an answer travels: it passes the shell's objects through. One thread.

A partition is one object (partition.py), and its state is one of

    IDLE        ──first contribution──►  COLLECTING     of round r
    COLLECTING  ──all machines gave────► REDUCING       the engine reads and writes the contributions' memory
    COLLECTING  ──all givers gone──────► IDLE
    COLLECTING  ──machines disagree────► BROKEN         all who gave are refused; late ones get the same sentence
    REDUCING    ──reduced──────────────► IDLE           all are answered, r is the last completed round
    REDUCING    ──the engine failed────► BROKEN
    BROKEN      ──newer round──────────► COLLECTING     a newer epoch makes it IDLE
    any         ──newer generation of the key, or another number of machines──► DROPPED, and forgotten

All machines give, or as many as their messages say; who they are is for them to agree on (the control plane's vote).
Each is identified by its machine: what one gives twice counts once. A machine whose ranks have joined gives nothing,
and says so; a round in which all say so never ends. Memory is held for rounds in flight only; it is
given back when the last reference to a contribution goes, so there is no action that says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

from byteps_py.errors import BytePSError, CommunicationError, ProtocolError
from byteps_py.server.checks import Facts, difference, objection
from byteps_py.server.partition import C, Partition, State
from byteps_py.wire import Header, Kind

#: Contributions that wait for news of a newer epoch; beyond either limit they are refused.
HELD_COUNT = 4096
HELD_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Reduce(Generic[C]):
    """Combine ``partition.in_order()``, then report it with ``Rounds.reduced``."""

    partition: Partition[C]


@dataclass(frozen=True, slots=True)
class Answer(Generic[C]):
    """Send the result to all who contributed, in machine order."""

    contributions: list[C]


@dataclass(frozen=True, slots=True)
class Refuse(Generic[C]):
    """Tell these senders that, and why, their contributions are not used. ``error``: a type of byteps_py.errors."""

    contributions: list[C]
    error: type[BytePSError]
    text: str


Action = Reduce[C] | Answer[C] | Refuse[C]


@dataclass(frozen=True, slots=True)
class Stall:
    """A round that waits for machines. ``machines``: how many are to contribute; ``missing``: those of all that have
    not, whether they are to or not."""

    key: int
    index: int
    round: int
    age_s: float
    machines: int
    missing: tuple[int, ...]


@dataclass(slots=True)
class Counters:
    """Since the start. ``bytes_summed``: bytes of results, each once."""

    rounds: int = 0
    bytes_summed: int = 0
    duplicates: int = 0
    refused: int = 0
    bytes_in_flight: int = 0


class Rounds(Generic[C]):
    """All partitions of one server. Events are methods; each returns what is to be done, in order."""

    def __init__(self, partition_bytes: int) -> None:
        self.epoch = 0
        self.num_machines = 0
        self.counters = Counters()
        self._partition_bytes = partition_bytes
        self._generations: dict[int, dict[int, Partition[C]]] = {}  # by key: the newest generation's, by index
        self._held: list[C] = []
        self._held_bytes = 0

    # ---- events ------------------------------------------------------------------------------------------

    def membership(self, epoch: int, num_machines: int, now: float) -> list[Action[C]]:
        """A newer membership. Rounds in flight stay, unless machines were renumbered by a new count."""
        if epoch <= self.epoch:
            return []
        if num_machines != self.num_machines:
            for partitions in self._generations.values():
                self._drop(partitions)
            self._generations.clear()
        for partition in self._partitions(State.BROKEN):
            partition.state = State.IDLE
        self.epoch, self.num_machines = epoch, num_machines
        held, self._held = self._held, []
        self.counters.bytes_in_flight -= self._held_bytes
        self._held_bytes = 0
        return [action for contribution in held for action in self.contribution(contribution, now)]

    def contribution(self, new: C, now: float) -> list[Action[C]]:
        """A machine gave its part of a round, or, for a broadcast, asks for the result."""
        header = new.header
        if header.epoch > self.epoch:
            return self._hold(new)
        text = objection(header, new.nbytes, self.epoch, self.num_machines, self._partition_bytes)
        if text:
            return self._refuse([new], ProtocolError, text)
        partition = self._find(header)
        if partition is None and header.kind is Kind.PASS:
            return []  # it does not know yet that the others have moved on without it, and misses nothing
        if partition is None:
            return self._refuse([new], ProtocolError, f"stale: tensor key {header.key:#018x} was declared again")
        if header.round <= partition.last_round:
            text = f"stale: round {header.round} of {partition}; round {partition.last_round} is complete"
            return self._refuse([new], ProtocolError, text)
        if partition.state is State.BROKEN and header.round <= partition.round:
            return self._refuse([new], ProtocolError, partition.reason)
        if partition.state is State.REDUCING:
            return self._late(partition, new)
        return self._collect(partition, new, now)

    def reduced(self, partition: Partition[C], error: BaseException | None = None) -> list[Action[C]]:
        """The engine is done with a partition's memory, well or with ``error``."""
        contributions = partition.in_order()
        self._forget(partition)
        if partition.state is not State.REDUCING:  # dropped meanwhile: nobody waits for the result
            return []
        if error is not None:
            partition.state = State.BROKEN
            partition.reason = f"{partition}, round {partition.round}: could not be reduced: {error}"
            return self._refuse(contributions, CommunicationError, partition.reason)
        partition.state = State.IDLE
        partition.last_round = partition.round
        self.counters.rounds += 1
        self.counters.bytes_summed += contributions[0].header.length
        return [Answer(contributions)]

    def gone(self, origin: object) -> None:
        """Nobody can be answered at ``origin`` any more. What is being reduced goes on, for the others."""
        for contribution in [c for c in self._held if c.origin is origin]:
            self._held.remove(contribution)
            self._held_bytes -= contribution.nbytes
            self.counters.bytes_in_flight -= contribution.nbytes
        for partition in self._partitions(State.COLLECTING):
            for machine in [m for m, c in partition.contributions.items() if c.origin is origin]:
                self.counters.bytes_in_flight -= partition.contributions.pop(machine).nbytes
            if not partition.contributions:
                partition.state = State.IDLE

    # ---- questions ---------------------------------------------------------------------------------------

    def stalled(self, now: float, older_than_s: float = 0.0) -> list[Stall]:
        """Rounds that have waited ``older_than_s`` or longer, and for which machines; the oldest first."""
        stalls = [
            Stall(
                partition.key,
                partition.index,
                partition.round,
                now - partition.since_s,
                next(iter(partition.contributions.values())).header.machines or self.num_machines,
                tuple(m for m in range(self.num_machines) if m not in partition.contributions),
            )
            for partition in self._partitions(State.COLLECTING)
            if now - partition.since_s >= older_than_s
        ]
        return sorted(stalls, key=lambda stall: -stall.age_s)

    # ---- inside ------------------------------------------------------------------------------------------

    def _find(self, header: Header) -> Partition[C] | None:
        """The partition that ``header`` names; None if its key has a newer generation. A newer one takes over."""
        partitions = self._generations.setdefault(header.key, {})
        partition = partitions.get(header.index)
        if partition is None or partition.generation != header.generation:
            known = next(iter(partitions.values())).generation if partitions else header.generation
            if header.generation < known:
                return None
            if header.generation > known:
                self._drop(partitions)
                partitions.clear()
            partition = partitions[header.index] = Partition(header.key, header.generation, header.index)
        return partition

    def _collect(self, partition: Partition[C], new: C, now: float) -> list[Action[C]]:
        machine = new.header.sender
        if partition.state is not State.COLLECTING:
            partition.state, partition.round, partition.since_s = State.COLLECTING, new.header.round, now
        others = partition.contributions
        if others and (text := self._disagreement(partition, new)):
            refused = [*partition.in_order(), new]
            self._forget(partition)
            partition.state, partition.reason = State.BROKEN, text
            partition.round = max(partition.round, new.header.round)
            return self._refuse(refused, ProtocolError, text)
        if (known := others.get(machine)) is not None:
            self.counters.duplicates += 1
            if known.origin is new.origin:
                return []
            # The machine has connected again and repeats itself: the same bits, but the answer goes there.
            self.counters.bytes_in_flight -= known.nbytes
        others[machine] = new
        self.counters.bytes_in_flight += new.nbytes
        if len(others) < (new.header.machines or self.num_machines):
            return []
        if all(contribution.header.kind is Kind.PASS for contribution in others.values()):
            return []  # all ranks of the group have joined: there will be nothing to sum
        partition.state = State.REDUCING
        return [Reduce(partition)]

    def _late(self, partition: Partition[C], new: C) -> list[Action[C]]:
        """All machines have given, and the result is on its way: a repetition, or a machine out of step."""
        if new.header.round == partition.round:
            self.counters.duplicates += 1
            return []
        text = f"round {new.header.round} of {partition}: round {partition.round} is not delivered yet"
        return self._refuse([new], ProtocolError, text)

    def _disagreement(self, partition: Partition[C], new: C) -> str:
        facts = Facts.of(new.header)
        first = next(iter(partition.contributions.values()))
        if Facts.of(first.header) == facts:  # the first speaks for all that are there
            return ""
        gave = [(c.header.sender, Facts.of(c.header)) for c in partition.in_order()]
        return f"{partition}: {difference([*gave, (new.header.sender, facts)])}"

    def _hold(self, new: C) -> list[Action[C]]:
        if len(self._held) >= HELD_COUNT or self._held_bytes + new.nbytes > HELD_BYTES:
            text = f"epoch {new.header.epoch} is not known here yet (epoch {self.epoch} is), and too much waits for it"
            return self._refuse([new], ProtocolError, text)
        self._held.append(new)
        self._held_bytes += new.nbytes
        self.counters.bytes_in_flight += new.nbytes
        return []

    def _refuse(self, refused: list[C], error: type[BytePSError], text: str) -> list[Action[C]]:
        self.counters.refused += len(refused)
        return [Refuse(refused, error, text)]

    def _drop(self, partitions: dict[int, Partition[C]]) -> None:
        for partition in partitions.values():
            if partition.state is not State.REDUCING:  # else the engine still works in its memory
                self._forget(partition)
            partition.state = State.DROPPED

    def _forget(self, partition: Partition[C]) -> None:
        self.counters.bytes_in_flight -= sum(c.nbytes for c in partition.contributions.values())
        partition.contributions.clear()

    def _partitions(self, state: State) -> Iterator[Partition[C]]:
        return (p for group in self._generations.values() for p in group.values() if p.state is state)
