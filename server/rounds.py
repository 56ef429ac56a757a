"""The rounds of every partition on a summation server. Pure: no sockets, threads or clocks; time is an argument.

Owns which contributions belong together, when they are complete, and which are answered or refused. Must not know where
a contribution's bytes lie or how an answer travels: it passes the shell's objects through. One thread.

A round of a partition begins with its first contribution, and its state is one of

    COLLECTING  ──all machines contributed──────► REDUCING   the thread pool reads and writes the contributions' memory
    COLLECTING  ──all waiting peers disconnected► forgotten
    COLLECTING  ──a round two later begins──────► forgotten  its contributions are refused; another server answered them
    COLLECTING  ──contributions disagree────────► broken     all are refused; later ones get the same sentence
    REDUCING    ──reduced───────────────────────► forgotten  all are answered; it is the last completed round
    REDUCING    ──the thread pool failed────────► broken     until a newer round, or a newer epoch
    any state   ──newer generation of the key, or other machines──► DROPPED, and forgotten

All machines contribute, or as many as their messages say; which ones is agreed by vote on the control plane. A machine
counts once per round, even if it contributes twice. A machine whose ranks have all joined sends PASS instead; a round
in which all machines pass never ends. Memory is held for rounds in flight only. It is released with the last reference
to a contribution, so no action is needed for it.

Results are not kept after they are sent, and need not be. A machine that lacks a result (its server died, its
connection broke, the partition moved) contributes again, with RESENT. If other machines have the result already, the
server asks them for their contributions (WANT), which they keep until the next round is complete, and sums again. The
result has the same bits, because it does not depend on the server. Until then those machines may be one round ahead, so
a partition can have two rounds in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic

from byteps_py.errors import BytePSError, CommunicationError, PeerLostError, ProtocolError
from byteps_py.server.accumulators import Accumulators
from byteps_py.server.admission import (
    AdmissionLimit,
    Facts,
    difference,
    missing_root_reason,
    not_a_member_reason,
    objection,
    stale_epoch_reason,
)
from byteps_py.server.round_state import (
    WANT_AFTER_S,
    WANT_AGAIN_S,
    Action,
    Answer,
    AwaitedRounds,
    C,
    Contribution,
    Counters,
    PartitionRounds,
    Reduce,
    RefuseContributions,
    Round,
    RoundStall,
    RoundState,
    Want,
)
from byteps_py.tensors import Op
from byteps_py.wire.data_link import Header, Kind, name_of

#: Limits for contributions of an epoch that this server does not know yet; beyond either they are refused.
HELD_COUNT = 4096
HELD_BYTES = 256 << 20


class Rounds(Generic[C]):
    """All partitions of one server. Events are methods; each returns the actions to perform, in order.

    ``round_class``, ``accumulators_class``: the classes of its parts; tests name others in a subclass.
    """

    round_class: type[Round[C]] = Round
    accumulators_class: type[Accumulators[C]] = Accumulators

    def __init__(self, partition_bytes: int) -> None:
        self.epoch = 0
        self.num_machines = 0
        self.counters = Counters()
        self.awaited: AwaitedRounds[C] = AwaitedRounds()
        self._partition_bytes = partition_bytes
        self._has_share = True
        self._since_epoch = 0  # the epoch since which the machines are the same
        self._generations: dict[
            int, dict[int, PartitionRounds[C]]
        ] = {}  # by key: the partitions of the newest generation, by index
        self.admission_limit = AdmissionLimit()
        self.accumulators = self.accumulators_class(self.counters, self.admission_limit)
        self._wanting: dict[Round[C], None] = {}  # rounds that are resent and not complete
        self._held: list[C] = []
        self._held_bytes = 0

    # ---- events ------------------------------------------------------------------------------------------

    def membership(
        self, epoch: int, num_machines: int, now: float, since_epoch: int = 0, has_share: bool = True
    ) -> list[Action[C]]:
        """A newer membership. ``since_epoch``: the epoch since which the machines are the same; their rounds in flight
        stay. If the machines have changed, all rounds are dropped. ``has_share``: False if other servers sum all
        partitions. Then the machines have given there what waits here, and have no connection to say so."""
        if epoch <= self.epoch:
            return []
        if num_machines != self.num_machines or since_epoch != self._since_epoch or not has_share:
            self.accumulators.restart(num_machines)
        if num_machines != self.num_machines or since_epoch != self._since_epoch:
            for partitions in self._generations.values():
                self._drop(partitions)
            self._generations.clear()
        for partition in self._partitions():
            partition.broken_round = -1
        self.epoch, self.num_machines, self._since_epoch = epoch, num_machines, since_epoch
        self._has_share = has_share
        for round_ in [] if has_share else self._rounds(RoundState.COLLECTING):
            self._forget(round_)
            self._tidy(round_.partition)
        held, self._held = self._held, []
        self.counters.bytes_in_flight -= self._held_bytes
        self._held_bytes = 0
        return [action for contribution in held for action in self.contribution(contribution, now)]

    def contribution(self, new: C, now: float) -> list[Action[C]]:
        """A machine contributed to a round, or, for a broadcast, asks for the result."""
        header = new.header
        if header.epoch > self.epoch:
            return self._hold(new)
        if not self._has_share:
            return []  # its machine does not know of this epoch yet, and will give to another server
        if text := stale_epoch_reason(header, self._since_epoch):
            return self._refuse([new], PeerLostError, text)
        if text := objection(header, new.nbytes, self.num_machines, self._partition_bytes):
            return self._refuse([new], ProtocolError, text)
        if header.op is Op.ACCUMULATE:
            return self.accumulators.contribution(new, now)
        if header.index not in self._generations.get(header.key, {}) and (
            text := self.admission_limit.objection(header.key)
        ):
            return self._refuse([new], ProtocolError, text)
        partition = self._find(header)
        if partition is None and (header.kind is Kind.PASS or header.is_supply):
            return []  # the machine does not know yet that the tensor was declared again, and lacks nothing
        if partition is None:
            return self._refuse([new], ProtocolError, f"stale: tensor key {header.key:#018x} was declared again")
        if header.round < partition.last_round + (not header.is_resent):
            text = f"stale: round {header.round} of {partition}; round {partition.last_round} is complete"
            return [] if header.is_supply else self._refuse([new], ProtocolError, text)
        if header.round <= partition.broken_round:
            return self._refuse([new], ProtocolError, partition.reason)
        if header.is_supply:
            return self._accept(partition, new, now)
        latest = max(partition.rounds, default=0)
        if latest > header.round + 1:
            text = (
                f"stale: round {header.round} of {partition}; round {latest} is in flight, and the rounds before it "
                "are complete"
            )
            return self._refuse([new], ProtocolError, text)
        overtaken = self._overtake(partition, new)
        return [*overtaken, *([] if self._is_overtaken(partition, new) else self._accept(partition, new, now))]

    def reduced(self, round_: Round[C], error: BaseException | None = None) -> list[Action[C]]:
        """The thread pool has reduced a round, or failed with ``error``, and does not use its memory any more."""
        partition, contributions, waiting = round_.partition, round_.in_order(), round_.waiting()
        self._forget(round_)
        if round_.state is not RoundState.REDUCING:  # dropped meanwhile: no machine waits for the result
            return []
        if error is not None:
            partition.broken_round = round_.number
            partition.reason = f"{partition}, round {round_.number}: could not be reduced: {error}"
            return self._refuse(waiting, CommunicationError, partition.reason)
        if partition.last_round < 0:
            self.admission_limit.ended(partition.key)
        partition.last_round = max(partition.last_round, round_.number)
        self.counters.rounds += 1
        self.counters.bytes_summed += contributions[0].header.length
        return [Answer(waiting)]

    def withdraw(self, header: Header) -> None:
        """A machine takes its contribution back: since the epoch of ``header`` it goes to another server. If the
        partition has come back in a later epoch, and the withdrawal is late or comes twice, it does not concern the
        newer contribution."""
        self._release([c for c in self._held if _is_same(c.header, header) and c.header.epoch < header.epoch])
        self.accumulators.withdraw(header)
        partition = self._generations.get(header.key, {}).get(header.index)
        if partition is None or partition.generation != header.generation:
            return
        round_ = partition.rounds.get(header.round)
        if round_ is None or round_.state is not RoundState.COLLECTING:
            return
        given = round_.contributions.get(header.sender)
        if given is not None and given.header.epoch < header.epoch:
            self._take_back(round_, header.sender)
            self._tidy(partition)

    def on_origin_lost(self, origin: object) -> None:
        """The peer ``origin`` has disconnected: it can't be answered. Rounds that are being reduced go on, for the
        others."""
        self._release([c for c in self._held if c.origin is origin])
        self.accumulators.on_origin_lost(origin)
        for round_ in self._rounds(RoundState.COLLECTING):
            for machine in [m for m, c in round_.contributions.items() if c.origin is origin]:
                self._take_back(round_, machine)
            self._tidy(round_.partition)

    def tick(self, now: float) -> list[Action[C]]:
        """Ask for missing contributions of resent rounds. Call it soon after a contribution that is RESENT, and while
        ``is_wanting``."""
        actions = self.accumulators.tick(now)
        for round_ in self._wanting:
            if now < round_.want_at:
                continue
            round_.want_at = now + WANT_AGAIN_S
            header = next(iter(round_.contributions.values())).header
            self.counters.wanted += 1
            actions.append(Want(header, self._missing(round_)))
        return actions

    # ---- questions ---------------------------------------------------------------------------------------

    @property
    def is_wanting(self) -> bool:
        """True if resent rounds wait for contributions of machines that have their results already, or accumulators for
        what machines have of them."""
        return bool(self._wanting) or self.accumulators.is_wanting

    def stalled(self, now: float, older_than_s: float = 0.0) -> list[RoundStall]:
        """The rounds that have waited ``older_than_s`` seconds or longer, the oldest first."""
        stalls = [
            RoundStall(
                round_.partition.key,
                round_.partition.index,
                round_.number,
                now - round_.since_s,
                next(iter(round_.contributions.values())).header.machines or self.num_machines,
                self._missing(round_),
            )
            for round_ in self._rounds(RoundState.COLLECTING)
            if now - round_.since_s >= older_than_s
        ]
        stalls += self.accumulators.stalled(now, older_than_s)
        return sorted(stalls, key=lambda stall: -stall.age_s)

    # ---- inside ------------------------------------------------------------------------------------------

    def _find(self, header: Header) -> PartitionRounds[C] | None:
        """The partition that ``header`` names, made if need be; None if its key has a newer generation. A newer
        generation replaces an older one."""
        partitions = self._generations.setdefault(header.key, {})
        partition = partitions.get(header.index)
        if partition is None or partition.generation != header.generation:
            known = next(iter(partitions.values())).generation if partitions else header.generation
            if header.generation < known:
                return None
            if header.generation > known:
                self._drop(partitions)
                partitions.clear()
            partition = partitions[header.index] = PartitionRounds(header.key, header.generation, header.index)
            self.admission_limit.begun(header.key)
        return partition

    def _accept(self, partition: PartitionRounds[C], new: C, now: float) -> list[Action[C]]:
        header = new.header
        round_ = partition.rounds.get(header.round)
        if round_ is None:
            if header.is_supply:
                return []  # it was asked twice
            if text := self._out_of_step(partition, new):
                return self._break(partition, new, text)
            round_ = partition.rounds[header.round] = self.round_class(partition, header.round, now)
            self.awaited.begin(round_)
        if round_.state is RoundState.REDUCING:
            return self._late(round_, new)
        return self._collect(round_, new, now)

    def _collect(self, round_: Round[C], new: C, now: float) -> list[Action[C]]:
        machine, others = new.header.sender, round_.contributions
        if others and (text := self._disagreement(round_, new)):
            return self._break(round_.partition, new, text)
        if new.header.is_resent and not new.header.is_supply and not round_.is_resent:
            round_.is_resent, round_.want_at = True, now + WANT_AFTER_S
        if (known := others.get(machine)) is not None:
            self.counters.duplicates += 1
            if not (self._is_given_again(known, new) or self._wants_another_answer(known, new)):
                return []
            self.counters.bytes_in_flight -= known.nbytes
        count = new.header.machines or self.num_machines
        if known is None and len(others) == count:  # they all pass: there is no sum to add to
            return self._refuse([new], ProtocolError, not_a_member_reason(new.header, round_.partition))
        if known is None and len(others) == count - 1 and (text := missing_root_reason(new.header, {*others, machine})):
            return self._break(round_.partition, new, text)
        others[machine] = new
        self.counters.bytes_in_flight += new.nbytes
        if len(others) < count:
            if round_.is_resent:
                self._wanting[round_] = None
            return []
        if all(contribution.header.kind is Kind.PASS for contribution in others.values()):
            return []  # all ranks of the group have joined: there is nothing to sum
        round_.state = RoundState.REDUCING
        self._wanting.pop(round_, None)
        self.awaited.end(round_)
        for other in [r for r in round_.partition.rounds.values() if r.number < round_.number]:
            # All machines have its result by now, from the server that had the partition before.
            if other.state is RoundState.COLLECTING:
                self._forget(other)
        return [Reduce(round_)]

    def _late(self, round_: Round[C], new: C) -> list[Action[C]]:
        """A contribution to a round that is being reduced: all machines have contributed, so it is a repetition."""
        known = round_.contributions.get(new.header.sender)
        if known is None:
            return self._refuse([new], ProtocolError, not_a_member_reason(new.header, round_.partition))
        self.counters.duplicates += 1
        if self._wants_another_answer(round_.redirected.get(new.header.sender, known), new):
            round_.redirected[new.header.sender] = new
        return []

    @staticmethod
    def _is_given_again(known: Contribution, new: Contribution) -> bool:
        """True if a machine has taken a contribution back and given it again in a later epoch, and the withdrawal
        between the two is late: it must not take the newer one."""
        return not new.header.is_supply and new.header.epoch > known.header.epoch

    @staticmethod
    def _wants_another_answer(known: Contribution, new: Contribution) -> bool:
        """True if a repeated contribution, which has the same bits, wants its answer elsewhere: the machine has
        connected again, or the partition moved to another server and back. Or if the first one wanted no answer (it was
        resent for others) and this one does. One of an earlier epoch is late: it comes from a connection that the
        machine has closed, and says nothing new."""
        if new.header.epoch < known.header.epoch:
            return False
        is_elsewhere = known.origin is not new.origin or known.header.answer_place != new.header.answer_place
        return not new.header.is_supply and (is_elsewhere or known.header.is_supply)

    def _missing(self, round_: Round[C]) -> tuple[int, ...]:
        return tuple(m for m in range(self.num_machines) if m not in round_.contributions)

    def _overtake(self, partition: PartitionRounds[C], new: C) -> list[Action[C]]:
        """Forget rounds that are two or more older than a new contribution's.

        A machine that contributes to a round has the result of the round before. All machines contributed to that one,
        so all have the results of those before it: another server answered them. A machine that still waits for one
        counts rounds differently; the refusal ends its job."""
        actions: list[Action[C]] = []
        for other in [r for r in partition.rounds.values() if r.number < new.header.round - 1]:
            if other.state is RoundState.COLLECTING:
                refused = other.waiting()
                actions += self._refuse(refused, ProtocolError, self._disagreement(other, new)) if refused else []
                self._forget(other)
        return actions

    def _is_overtaken(self, partition: PartitionRounds[C], new: C) -> bool:
        """True if a later round shows that ``new`` is out of date. Also removes out-of-date contributions to older
        rounds.

        A machine that contributes to a round has the results of those before it. Its contributions to these on an
        earlier connection, and any machine's of an earlier epoch, date from the time when another server took over the
        partition. They were withdrawn, but the withdrawal got lost with the connection, or has not arrived yet. Such a
        contribution may also arrive only now, after those of other machines to the round that follows."""
        header = new.header
        for other in [r for r in partition.rounds.values() if r.state is RoundState.COLLECTING]:
            given = other.contributions.get(header.sender)
            is_outdated = given is not None and not given.header.is_supply and given.origin is not new.origin
            is_late = any(
                _is_outdated(header, contribution.header.epoch) for contribution in other.contributions.values()
            )
            if (is_outdated or is_late) and other.number > header.round:
                return True
            if other.number < header.round:
                earlier = [m for m, c in other.contributions.items() if _is_outdated(c.header, header.epoch)]
                for machine in [*earlier, *([header.sender] if is_outdated else [])]:
                    self._take_back(other, machine)
        return False

    def _out_of_step(self, partition: PartitionRounds[C], new: C) -> str:
        """Why a round can't begin beside those in flight; empty if it can. Machines may be one round apart only if one
        of them lacks a result."""
        for other in partition.rounds.values():
            if other.number < new.header.round - 1:
                continue  # all machines have its result, only the thread pool is not done: see _overtake
            if other.is_resent if other.number < new.header.round else new.header.is_resent:
                continue
            if other.state is not RoundState.REDUCING:
                return self._disagreement(other, new)
            given = other.contributions.get(new.header.sender)  # perhaps another server took over and answered first
            if given is None or not _is_outdated(given.header, new.header.epoch):
                return f"round {new.header.round} of {partition}: round {other.number} is not delivered yet"
        return ""

    def _disagreement(self, round_: Round[C], new: C) -> str:
        facts = Facts.of(new.header)
        first = next(iter(round_.contributions.values()))
        if Facts.of(first.header) == facts:  # those that are there agree with each other
            return ""
        gave = [(c.header.sender, Facts.of(c.header)) for c in round_.in_order()]
        return f"{round_.partition}: {difference([*gave, (new.header.sender, facts)])}"

    def _break(self, partition: PartitionRounds[C], new: C, text: str) -> list[Action[C]]:
        """Refuse ``new``, and all contributions to the partition that are not being reduced."""
        refused = []
        for round_ in [r for r in partition.rounds.values() if r.state is RoundState.COLLECTING]:
            refused += round_.in_order()
            partition.broken_round = max(partition.broken_round, round_.number)
            self._forget(round_)
        if refused:
            partition.broken_round, partition.reason = max(partition.broken_round, new.header.round), text
        return self._refuse([*refused, new], ProtocolError, text)

    def _hold(self, new: C) -> list[Action[C]]:
        if len(self._held) >= HELD_COUNT or self._held_bytes + new.nbytes > HELD_BYTES:
            text = (
                f"this server does not know epoch {new.header.epoch} yet (only {self.epoch}), and too much waits for it"
            )
            return self._refuse([new], ProtocolError, text)
        self._held.append(new)
        self._held_bytes += new.nbytes
        self.counters.bytes_in_flight += new.nbytes
        return []

    def _release(self, held: list[C]) -> None:
        for contribution in held:
            self._held.remove(contribution)
            self._held_bytes -= contribution.nbytes
            self.counters.bytes_in_flight -= contribution.nbytes

    def _refuse(self, refused: list[C], error: type[BytePSError], text: str) -> list[Action[C]]:
        self.counters.refused += len(refused)
        return [RefuseContributions(refused, error, text)]

    def _take_back(self, round_: Round[C], machine: int) -> None:
        given = round_.contributions.pop(machine, None)
        if given is not None:
            self.counters.bytes_in_flight -= given.nbytes
        if all(contribution.header.is_supply for contribution in round_.contributions.values()):
            self._forget(round_)  # no machine waits for its result

    def _tidy(self, partition: PartitionRounds[C]) -> None:
        """Forget a partition if all contributions to it were taken back."""
        if partition.rounds or partition.last_round >= 0 or partition.broken_round >= 0:
            return
        partitions = self._generations[partition.key]
        if partitions.pop(partition.index, None) is not None:
            self.admission_limit.ended(partition.key)
        if not partitions:
            del self._generations[partition.key]

    def _drop(self, partitions: dict[int, PartitionRounds[C]]) -> None:
        for partition in partitions.values():
            if partition.last_round < 0:
                self.admission_limit.ended(partition.key)
            for round_ in list(partition.rounds.values()):
                if round_.state is RoundState.COLLECTING:  # else the thread pool still uses its memory
                    self._forget(round_)
                round_.state = RoundState.DROPPED

    def _forget(self, round_: Round[C]) -> None:
        self.counters.bytes_in_flight -= sum(c.nbytes for c in round_.contributions.values())
        round_.contributions.clear()
        round_.redirected.clear()
        self._wanting.pop(round_, None)
        self.awaited.end(round_)
        round_.partition.rounds.pop(round_.number, None)

    def _partitions(self) -> Iterator[PartitionRounds[C]]:
        return (partition for group in self._generations.values() for partition in group.values())

    def _rounds(self, state: RoundState) -> list[Round[C]]:
        return [r for partition in self._partitions() for r in partition.rounds.values() if r.state is state]


def _is_outdated(given: Header, epoch: int) -> bool:
    """True for a contribution of an earlier epoch, by a machine that has the result if another one has. (A RESENT
    contribution may be of an epoch that did not move the partition.)"""
    return given.epoch < epoch and not given.is_resent


def _is_same(one: Header, other: Header) -> bool:
    """True if both headers are of one machine, and of one round of one partition."""
    return (one.sender, name_of(one)) == (other.sender, name_of(other))
