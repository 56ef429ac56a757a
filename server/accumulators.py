"""The sums that a summation server keeps: machines add to them one by one, each in its own time. Pure; time is an
argument.

Asynchronous training accumulates the changes of parameters (BytePS, section 5). An Accumulator holds the values of one
partition. A machine's contribution to its round number r is added when it comes, once, and its answer is a copy of the
values as they are then. With a bound on staleness, the answer waits until all machines have given to round
r - staleness, so that no machine is further ahead of the slowest one (stale synchronous parallel, Ho et al. 2013);
machines whose ranks have joined are not waited for. With a quorum, it waits for some of the others, in waves: see
round_state.py. A clock says which changes a copy contains: by machine, the last of
its rounds. Round 1 brings the first value, which is the same on all machines.

No server has to be trusted to stay. Each machine keeps the latest copy that it got, with its clock, and its
contribution until it is answered. A change that is in no machine's copy was made by a machine that has no answer for
it, and gives it again. So the newest copy and what is in flight are all there is, and each epoch begins with them:

    GATHERING ─the clocks of all machines are there─► FETCHING ─the newest copy is there─► SERVING
    GATHERING ─the same, and no copy has more than the server's own values─► SERVING
    any state ─the first message of a newer epoch─► GATHERING

With a codec, changes travel coded, and values as they are. What a server adds is what a code decodes to. It keeps the
codes that it has added last, and a machine that says which version it has gets those that it lacks, if they are shorter
than the values: it makes the same additions in the same order, so its copy has the same bits, and is as good as any for
a server that has lost them.

Servers and machines ignore messages of an older epoch: answers and additions of the server before never count once its
successor has gathered. Values end with their group of machines: the next one brings a first
value again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Generic

from byteps_py.errors import BytePSError, CommunicationError, ProtocolError
from byteps_py.server.admission import AdmissionLimit, Facts, difference
from byteps_py.server.round_state import (
    WANT_AFTER_S,
    WANT_AGAIN_S,
    Accumulator,
    AccumulatorState,
    Action,
    C,
    Counters,
    Load,
    Merge,
    RefuseContributions,
    RoundStall,
    SendCopy,
    Want,
)
from byteps_py.wire.data_link import SUPPLY, Header, Kind, RoundName, changes_nbytes, name_of

GATHERING, FETCHING, SERVING = AccumulatorState
#: Of one server: far more than the partitions of any model.
MOST_ORDERS = 1 << 20


class Accumulators(Generic[C]):
    """All of one server. ``num_machines``: how many the job has. Events are methods, see Rounds, which passes them
    on."""

    def __init__(self, counters: Counters, limit: AdmissionLimit) -> None:
        self.num_machines = 0
        self._counters = counters
        self._limit = limit
        self._by_key: dict[int, dict[int, Accumulator[C]]] = {}
        self._orders: dict[tuple[int, RoundName], tuple[int, int]] = {}  # of a replay, by machine and round
        self._is_replay = False
        self._wanting: dict[Accumulator[C], None] = {}
        self._closing: dict[Accumulator[C], None] = {}  # whose quorum is there, and waits for the others

    # ---- events ------------------------------------------------------------------------------------------

    def restart(self, num_machines: int) -> None:
        """The machines have changed, or other servers have all partitions."""
        self.num_machines = num_machines
        for accumulator in list(self._all()):
            self._drop(accumulator)
        self._by_key.clear()
        self._orders.clear()

    def contribution(self, new: C, now: float) -> list[Action[C]]:
        """A machine gives to a round (PUSH), sends the copy that was wanted (with SUPPLY), or gives nothing more
        (PASS)."""
        header = new.header
        known = self._by_key.get(header.key, {}).get(header.index)
        if header.is_supply and (known is None or known.header.generation != header.generation):
            return []
        if known is None and (text := self._limit.objection(header.key)):
            return self._refuse([new], text)
        found = self._find(header)
        if found is None or header.epoch < found.header.epoch:
            return []  # its machine does not know of the newer epoch, or generation, yet
        if (mine := _facts(found.header)) != (its := _facts(header)):
            gave = [(found.header.sender, mine), (header.sender, its)]
            return self._refuse([new], f"{found}: {difference(gave)}")
        if header.epoch > found.header.epoch:
            self._begin_epoch(found, header)
        if found.broken:
            return self._refuse([new], found.broken)
        if header.is_supply:
            return self._supplied(found, new)
        if header.kind is Kind.PASS:
            found.joined.add(header.sender)
            self._take_back(found, header.sender)
        elif header.sender in found.joined or not self._is_new(found, new):
            self._counters.duplicates += 1
            return []
        elif self._is_replay and (header.sender, name_of(header)) not in self._orders:
            text = f"{found}: machine {header.sender}'s contribution to round {header.round} came without its order"
            return self._refuse([new], f"{text}, and others are replayed: set BYTEPS_REPLAY_ARRIVALS on all machines")
        else:
            self._give(found, new, now)
        if header.round == 1:
            found.clocks.setdefault(header.sender, (0,) * self.num_machines)
        if (header.is_resent or header.round > 1) and not found.is_resent:
            found.is_resent, found.want_at = True, now + WANT_AFTER_S
        return self._advance(found, now)

    def clock(self, header: Header, clock: tuple[int, ...], now: float) -> list[Action[C]]:
        """The clock of a machine's copy. Raises ProtocolError if it is not one number for each machine."""
        found = self._by_key.get(header.key, {}).get(header.index)
        if found is None or (header.generation, header.epoch) != (found.header.generation, found.header.epoch):
            return []
        if len(clock) != self.num_machines or clock[header.sender] != header.round:
            raise ProtocolError(
                f"{found}: machine {header.sender} says of its copy of round {header.round} that it has the rounds "
                f"{list(clock)} of {self.num_machines} machines"
            )
        if found.state is not GATHERING:
            return []
        found.clocks[header.sender] = clock
        return self._advance(found, now)

    def order(self, header: Header, added_at: int, answered_at: int) -> None:
        """A replay: the machine's contribution to this round, which follows, is added as the one that makes version
        ``added_at``, and answered with the values of version ``answered_at``. Raises ProtocolError if too much is
        ordered."""
        if len(self._orders) >= MOST_ORDERS:
            raise ProtocolError(f"machine {header.sender}: orders of {MOST_ORDERS} contributions wait already")
        self._orders[header.sender, name_of(header)] = added_at, answered_at
        self._is_replay = True

    def loaded(self, found: Accumulator[C], values: object, error: BaseException | None, now: float) -> list[Action[C]]:
        """A Load has ended: the copy lies in ``values``."""
        copy, found.working = found.working, None
        if found.is_dropped or copy is None:
            return []
        if error is not None:
            return self._break(found, error)
        if found.header.epoch != copy.header.epoch or found.state is not FETCHING:
            return self._advance(found, now)
        found.values, found.clock = values, [*found.clocks[found.source]]
        found.added_at.clear()
        found.changes.clear()
        self._serve(found)
        return self._advance(found, now)

    def merged(self, merge: Merge[C], error: BaseException | None, now: float) -> list[Action[C]]:
        """A Merge has ended."""
        found, new = merge.accumulator, merge.contribution
        found.working = None
        if found.is_dropped:
            return []
        if error is not None:
            return self._break(found, error)
        machine, round_ = new.header.sender, new.header.round
        if round_ == found.clock[machine] + 1:
            found.clock[machine] = round_
            if found.header.codec:
                found.changes.add(found.version, new, is_change=round_ > 1)
            found.added_at[machine] = found.version
            self._counters.rounds += 1
            self._counters.bytes_summed += new.header.length
            if found.header.quorum and round_ > 1:
                found.waves.arrived(machine, now)
        actions: list[Action[C]] = []
        if merge.answers and self._given(found, machine) is new:
            self._take_back(found, machine)
            found.waves.open.discard(machine)
            found.waves.answered[machine] = round_
            self._orders.pop((machine, name_of(new.header)), None)
            changes = None if merge.lacking is None else [*merge.lacking, *[new] * merge.adds]
            actions.append(SendCopy(new, tuple(found.clock), found.added_at.get(machine, 0), changes))
        return actions + self._advance(found, now)

    def withdraw(self, header: Header) -> None:
        """A machine takes back what it gave in an earlier epoch; if the header's flag NO_RESULT is set, another server
        has the partition."""
        found = self._by_key.get(header.key, {}).get(header.index)
        if found is None or found.header.generation != header.generation or header.epoch <= found.header.epoch:
            return
        if header.wants_result:
            self._take_back(found, header.sender)
        else:
            self._forget(found)

    def on_origin_lost(self, origin: object) -> None:
        """The peer ``origin`` has disconnected: it can't be answered."""
        for found in list(self._all()):
            for machine in [m for m, (new, _) in found.given.items() if new.origin is origin]:
                self._take_back(found, machine)
            if not (found.given or found.clocks or found.joined or found.has_served):
                self._forget(found)

    def tick(self, now: float) -> list[Action[C]]:
        """Ask machines for clocks and copies, and end waves, while ``is_wanting``."""
        actions: list[Action[C]] = []
        for found in list(self._closing):
            actions += self._advance(found, now)
        for found in list(self._wanting):
            if now < found.want_at:
                continue
            found.want_at = now + WANT_AGAIN_S
            self._counters.wanted += 1
            is_copy = found.state is FETCHING
            machines = (found.source,) if is_copy else self._without_clock(found)
            actions.append(Want(replace(found.header, flags=SUPPLY if is_copy else 0), machines))
        return actions

    # ---- questions ---------------------------------------------------------------------------------------

    @property
    def is_wanting(self) -> bool:
        """Machines may have to be asked, or waves end."""
        return bool(self._wanting or self._closing)

    def stalled(self, now: float, older_than_s: float) -> list[RoundStall]:
        """The contributions that have waited longer for their answers, and for which machines."""
        return [
            RoundStall(header.key, header.index, header.round, now - since_s, self.num_machines, missing)
            for found in self._all()
            for new, since_s in found.given.values()
            if now - since_s >= older_than_s
            for header in [new.header]
            if (missing := self._missing(found, header))
        ]

    # ---- inside ------------------------------------------------------------------------------------------

    def _missing(self, found: Accumulator[C], header: Header) -> tuple[int, ...]:
        if found.state is SERVING:
            return found.waits_for(header.sender, header.round)
        return (found.source,) if found.state is FETCHING else self._without_clock(found)

    def _without_clock(self, found: Accumulator[C]) -> tuple[int, ...]:
        return tuple(machine for machine in range(self.num_machines) if machine not in found.clocks)

    def _find(self, header: Header) -> Accumulator[C] | None:
        """The accumulator that ``header`` names, made if need be; None if its key has a newer generation."""
        by_index = self._by_key.setdefault(header.key, {})
        known = next(iter(by_index.values())).header.generation if by_index else header.generation
        if header.generation < known:
            return None
        if header.generation > known:
            for old in list(by_index.values()):
                self._drop(old)
            by_index.clear()
        found = by_index.get(header.index)
        if found is None:
            found = by_index[header.index] = Accumulator(replace(header, flags=0), [0] * self.num_machines)
            self._limit.begun(header.key)
        return found

    def _begin_epoch(self, found: Accumulator[C], header: Header) -> None:
        """All machines give again what has no answer, and say again whether they have joined. The values stay, with
        what the thread pool still adds to them."""
        for machine in list(found.given):
            self._take_back(found, machine)
        found.header, found.state, found.source = replace(header, flags=0), GATHERING, -1
        found.is_resent = False
        found.clocks.clear()
        found.joined.clear()
        found.waves.restart()
        found.changes.clear()
        self._wanting.pop(found, None)
        self._closing.pop(found, None)

    def _is_new(self, found: Accumulator[C], new: C) -> bool:
        """False if a contribution only repeats what is there, or what was answered on the same connection."""
        header = new.header
        known = self._given(found, header.sender)
        if known is not None and header.round <= known.header.round:
            is_elsewhere = known.origin is not new.origin or known.header.answer_place != header.answer_place
            return header.round == known.header.round and is_elsewhere
        if found.state is not SERVING:
            return True
        last = found.clock[header.sender]
        return header.round > last or (header.round == last and header.is_resent)

    def _give(self, found: Accumulator[C], new: C, now: float) -> None:
        machine = new.header.sender
        since_s = found.given[machine][1] if machine in found.given else now
        self._take_back(found, machine)
        found.given[machine] = new, since_s
        self._counters.bytes_in_flight += new.nbytes

    @staticmethod
    def _given(found: Accumulator[C], machine: int) -> C | None:
        new, _ = found.given.get(machine, (None, 0.0))
        return new

    def _take_back(self, found: Accumulator[C], machine: int) -> None:
        if (known := found.given.pop(machine, None)) is not None:
            self._counters.bytes_in_flight -= known[0].nbytes

    def _supplied(self, found: Accumulator[C], copy: C) -> list[Action[C]]:
        machine = copy.header.sender
        is_wanted = found.state is FETCHING and found.working is None and machine == found.source
        if not is_wanted or copy.header.round != found.clocks[machine][machine]:
            return []
        self._wanting.pop(found, None)
        found.working = copy
        return [Load(found, copy)]

    def _advance(self, found: Accumulator[C], now: float) -> list[Action[C]]:
        """The next action, unless the thread pool is at work on the last one."""
        if found.working is not None or found.broken:
            return []
        if found.state is GATHERING:
            return self._gather(found, now)
        if found.header.quorum and found.state is SERVING and not self._is_replay:
            self._closing.pop(found, None)
            if found.release(now):
                self._closing[found] = None
        return self._merge_next(found) if found.state is SERVING else []

    def _gather(self, found: Accumulator[C], now: float) -> list[Action[C]]:
        if self._without_clock(found):
            if found.is_resent:
                self._wanting[found] = None
            return []
        self._wanting.pop(found, None)
        for machine in found.clocks:  # another machine has a copy with its change, of a wave of both
            others = [clock[machine] for other, clock in found.clocks.items() if other != machine]
            found.waves.answered[machine] = max(1, *others)
        newest = max(found.clocks, key=lambda machine: (sum(found.clocks[machine]), -machine))
        if found.values is not None and _contains(found.clock, found.clocks.values()):
            self._serve(found)
            return self._advance(found, now)
        if not _contains(found.clocks[newest], found.clocks.values()):
            said = "; ".join(f"machine {machine} {list(clock)}" for machine, clock in sorted(found.clocks.items()))
            return self._break(found, ProtocolError(f"no machine's copy has all that the others' have: {said}"))
        if not any(found.clocks[newest]):  # nobody has had an answer yet: any contribution is the first value
            first = next((new for new, _ in found.given.values() if new.header.round == 1), None)
            if first is None:
                return []  # all machines that are here have joined before their first round
            found.state, found.source, found.working = FETCHING, first.header.sender, first
            return [Load(found, first)]
        found.state, found.source, found.want_at = FETCHING, newest, now + WANT_AGAIN_S
        self._wanting[found] = None
        self._counters.wanted += 1
        return [Want(replace(found.header, flags=SUPPLY), (newest,))]

    def _serve(self, found: Accumulator[C]) -> None:
        found.state = SERVING
        if not found.has_served:
            found.has_served = True
            self._limit.ended(found.header.key)

    def _merge_next(self, found: Accumulator[C]) -> list[Action[C]]:
        """The oldest contribution that can be added, or answered."""
        first = found.waves.open & found.given.keys()
        for machine, (new, _) in list(found.given.items()):
            if first and machine not in first:
                continue
            last, round_ = found.clock[machine], new.header.round
            if not last <= round_ <= last + 1:
                self._take_back(found, machine)
                text = f"{found}: machine {machine} gives to round {round_}, but its last one was round {last}"
                return [*self._refuse([new], text), *self._merge_next(found)]
            is_next = round_ == last + 1
            answers = not found.waits_for(machine, round_)
            if found.header.quorum:
                answers = found.gets_copy(machine, round_)
            if (order := self._orders.get((machine, name_of(new.header)))) is not None:
                version = found.version + is_next
                answers = version == order[1]
                is_next = is_next and version == order[0] and not self._is_copy_due(found)
                answers = answers and (is_next or round_ == last)
            if answers or is_next:
                found.working = new
                lacking = self._lacking(found, new, is_next) if answers else None
                return [Merge(found, new, is_next and round_ > 1, answers, lacking)]
        return []

    @staticmethod
    def _lacking(found: Accumulator[C], new: C, is_next: bool) -> list[C] | None:
        """The changes that a machine lacks of the present values; None if they are not known, or longer than these."""
        header = new.header
        version = header.drawn if header.is_coded else 0
        if not version:
            return None
        lacking = [] if is_next and version == found.version else found.changes.since(version)
        if lacking is None:
            return None
        others = sum(change.nbytes for change in lacking if change.header.sender != header.sender)
        return lacking if changes_nbytes(len(lacking) + is_next, others) < header.length else None

    def _is_copy_due(self, found: Accumulator[C]) -> bool:
        """In a replay: a machine gets the values as they are now, before anything else is added."""
        return any(
            found.clock[machine] == new.header.round
            and (order := self._orders.get((machine, name_of(new.header)))) is not None
            and order[1] == found.version
            for machine, (new, _) in found.given.items()
        )

    def _break(self, found: Accumulator[C], error: BaseException) -> list[Action[C]]:
        found.broken = f"{found}: {error}"
        refused = [new for new, _ in found.given.values()]
        for machine in list(found.given):
            self._take_back(found, machine)
        self._wanting.pop(found, None)
        self._closing.pop(found, None)
        kind = type(error) if isinstance(error, BytePSError) else CommunicationError
        return self._refuse(refused, found.broken, kind)

    def _refuse(self, refused: list[C], text: str, error: type[BytePSError] = ProtocolError) -> list[Action[C]]:
        self._counters.refused += len(refused)
        return [RefuseContributions(refused, error, text)]

    def _forget(self, found: Accumulator[C]) -> None:
        self._drop(found)
        by_index = self._by_key[found.header.key]
        del by_index[found.header.index]
        if not by_index:
            del self._by_key[found.header.key]

    def _drop(self, found: Accumulator[C]) -> None:
        for machine in list(found.given):
            self._take_back(found, machine)
        found.is_dropped = True
        self._wanting.pop(found, None)
        self._closing.pop(found, None)
        if not found.has_served:
            self._limit.ended(found.header.key)

    def _all(self) -> Iterator[Accumulator[C]]:
        return (found for by_index in self._by_key.values() for found in by_index.values())


def _facts(header: Header) -> Facts:
    """The facts that all contributions to it have in common."""
    return Facts.of(header)._replace(round=0)


def _contains(clock: Sequence[int], others: Iterable[tuple[int, ...]]) -> bool:
    """A copy with this clock has all that the others have."""
    return all(mine >= its for other in others for mine, its in zip(clock, other, strict=True))
