"""A partition's rounds in flight on a summation server, or what it accumulates, and the actions that these ask of the
shell. Pure; time is an argument. The rules are in rounds.py and accumulators.py.

The machines of a quorum get their copies of accumulated values together, in waves (``Waves``). A machine whose change
was added waits. Once a quorum waits, the wave is open for a grace window more, and machines that come within it get the
same copy. A machine that misses the wave is late: its change is added when it comes, and it gets its copy at once, as a
late member of that wave. So no machine waits for a slow or lost one, and no change is lost.

    first arrival ──── quorum is there ──── median + 4 MAD after the first arrival ────► copies for all that wait
                                      └──── all are there ──────────────────────────────┘

The window is measured, not set: the median of how long after the first of their wave machines arrived lately, and four
median absolute deviations, which a minority of slow machines does not move (Decoupled DiLoCo, 2026, waits for a fixed
time). Until the first waves have been measured, all machines are waited for.
"""

from __future__ import annotations

import enum
import itertools
import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from byteps_py.errors import BytePSError
from byteps_py.tensors import NO_BOUND
from byteps_py.wire.data_link import MAX_NAMES, Header, RoundName, name_of

#: Arrivals that count. Also the number of deviations, and the shortest window: timers are not better.
_ARRIVALS = 64
_DEVIATIONS = 4
_LEAST_WINDOW_S = 0.05


class Waves:
    """Those of one accumulator. ``open``: machines that get the present values before anything else is added.
    ``answered``: by machine, its last round that was in a wave which has ended. If the copy was lost on its way, the
    machine gets another one at once: those of that wave have gone on, perhaps to wait for it elsewhere."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.answered: dict[int, int] = {}
        self._began_at: float | None = None
        self._last_began_at = 0.0
        self._members: set[int] | None = None  # of the last wave; None: nobody can be late
        self._arrivals: deque[float] = deque(maxlen=_ARRIVALS)

    def restart(self) -> None:
        """A new epoch: machines wait anew, and none is late."""
        self.open.clear()
        self.answered.clear()
        self._began_at = self._members = None

    def is_late(self, machine: int) -> bool:
        """It missed the last wave, and no other one has begun."""
        return self._members is not None and self._began_at is None and machine not in self._members

    def arrived(self, machine: int, now: float) -> None:
        """A machine's change was added."""
        if self.is_late(machine) and self._members is not None:
            self._members.add(machine)
            self._arrivals.append(now - self._last_began_at)
            return
        if self._began_at is None:
            self._began_at = now
        self._arrivals.append(now - self._began_at)

    def window_s(self, machines: int) -> float:
        """For how long after its first arrival a wave of so many machines is open."""
        if len(self._arrivals) < 2 * machines:
            return float("inf")
        median = statistics.median(self._arrivals)
        deviation = statistics.median(abs(each - median) for each in self._arrivals)
        return max(median + _DEVIATIONS * deviation, _LEAST_WINDOW_S)

    def release(self, waiting: Collection[int], present: Collection[int], quorum: int, now: float) -> bool:
        """Let those who wait have their copies if it is time. Returns True if only time is missing. ``present``: the
        machines that have not joined."""
        self.open.intersection_update(waiting)  # of the others, connections were lost
        if self.open or not waiting or len(waiting) < needed(present, quorum):
            return False
        if self._began_at is None:
            self._began_at = now
        if not set(present) <= set(waiting) and now < self._began_at + self.window_s(len(present)):
            return True
        self.open, self._members = set(waiting), set(waiting)
        self._last_began_at, self._began_at = self._began_at, None
        return False


def needed(present: Collection[int], quorum: int) -> int:
    """How many machines a wave needs: a quorum, or all that are left."""
    return min(quorum, max(len(present), 1))


#: Machines that push in the same order contribute at about the same time. One that is later has another order.
AWAITED_AFTER_S = 0.01
#: Machines that send a round again do so at about the same time. Only machines that have not by then are asked.
WANT_AFTER_S = 0.02
WANT_AGAIN_S = 0.25


@dataclass(slots=True, eq=False)
class Contribution:
    """One machine's contribution to one round. ``origin``: the peer to answer, compared by identity.

    ``nbytes``: the size of the payload that arrived. In a subclass the shell adds where the payload lies.
    """

    header: Header
    origin: object
    nbytes: int


C = TypeVar("C", bound=Contribution)


class RoundState(enum.Enum):
    """See the table in rounds.py."""

    COLLECTING = "waiting for contributions"
    REDUCING = "has all contributions"
    DROPPED = "superseded"


@dataclass(slots=True, eq=False)
class Round(Generic[C]):
    """One round in flight.

    ``is_resent``: a machine lacks the result, which others may have. At ``want_at`` (s), machines that have not
    contributed are asked for their contributions. ``redirected``: by machine, the contribution to answer instead of the
    one that is summed.
    """

    partition: PartitionRounds[C]
    number: int
    since_s: float
    state: RoundState = RoundState.COLLECTING
    is_resent: bool = False
    want_at: float = 0.0
    contributions: dict[int, C] = field(default_factory=dict)
    redirected: dict[int, C] = field(default_factory=dict)

    def in_order(self) -> list[C]:
        """Contributions by machine index: the order in which they are added."""
        return [self.contributions[machine] for machine in sorted(self.contributions)]

    def waiting(self) -> list[C]:
        """The contributions to answer, in machine order."""
        asked = (self.redirected.get(c.header.sender, c) for c in self.in_order())
        return [c for c in asked if not c.header.is_supply]


@dataclass(slots=True, eq=False)
class PartitionRounds(Generic[C]):
    """A piece of one generation of a tensor. ``last_round``: the last completed one; ``broken_round``: the last refused
    one, for ``reason``; -1: none yet."""

    key: int
    generation: int
    index: int
    last_round: int = -1
    broken_round: int = -1
    reason: str = ""
    rounds: dict[int, Round[C]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"partition {self.index} of tensor key {self.key:#018x}"


class AwaitedRounds(Generic[C]):
    """Rounds that have begun and wait for machines, which have not been told yet. Each machine is told once per round;
    one that is not ready to contribute remembers it.

    Machines push the most urgent of the partitions that are ready, and gradients never become ready everywhere at the
    same moment. So one machine begins with partitions that another one leaves for later, and the other way round. Each
    such partition holds memory and credit, and gets no answer. A machine that completes rounds of others sends one
    message for each, and all machines get an answer; so those rounds go first (worker/core/credit.py). With four
    machines, and computation that takes as long as communication, links carried answers at two thirds of their rate
    during a backward pass without this, and at nine tenths with it.

    ``after_s``: seconds from the first contribution until the others are told.
    """

    def __init__(self) -> None:
        self.after_s = AWAITED_AFTER_S
        self._begun: dict[Round[C], None] = {}  # oldest first

    def __bool__(self) -> bool:
        """True if there are rounds whose machines may have to be told."""
        return bool(self._begun)

    def begin(self, round_: Round[C]) -> None:
        """The round has its first contribution."""
        self._begun[round_] = None

    def end(self, round_: Round[C]) -> None:
        """The round waits for no machine any more."""
        self._begun.pop(round_, None)

    def due(self, now: float, machines: int) -> dict[int, list[RoundName]]:
        """By machine, the rounds to tell it about, at most MAX_NAMES. ``machines``: how many the job has; some may take
        no part in a round. Call it every AWAITED_AFTER_S."""
        told: dict[int, list[RoundName]] = {}
        for round_ in list(itertools.islice(self._begun, MAX_NAMES)):
            if now < round_.since_s + self.after_s:
                break
            del self._begun[round_]
            name = name_of(next(iter(round_.contributions.values())).header)
            for machine in range(machines):
                if machine not in round_.contributions:
                    told.setdefault(machine, []).append(name)
        return told


class ChangeLog(Generic[C]):
    """The codes of the changes that were added last to values, so that a machine with a copy of an earlier version gets
    these instead of all values. It begins anew with each epoch: what a copy of before contains may have been added in
    another order."""

    def __init__(self) -> None:
        self._added: deque[tuple[int, C | None]] = deque()  # (version that it made, a coded change), without gaps
        self._nbytes = 0

    def clear(self) -> None:
        self._added.clear()
        self._nbytes = 0

    def add(self, version: int, new: C, is_change: bool) -> None:
        """A contribution was added; or it was a first value. Forgets what is of no use: changes that are together as
        long as the values."""
        self._added.append((version, new if is_change else None))
        self._nbytes += new.nbytes * is_change
        while self._nbytes >= new.header.length:
            _, old = self._added.popleft()
            self._nbytes -= old.nbytes if old is not None else 0

    def since(self, version: int) -> list[C] | None:
        """The changes after a version, in order; None if not all of them are known."""
        if not self._added or self._added[0][0] > version + 1 or self._added[-1][0] < version:
            return None
        return [change for made, change in self._added if made > version and change is not None]


class AccumulatorState(enum.Enum):
    """See the table in accumulators.py."""

    GATHERING = "waits for the clocks of all machines"
    FETCHING = "waits for the newest copy"
    SERVING = "has the values"


@dataclass(slots=True, eq=False)
class Accumulator(Generic[C]):
    """One partition of an ACCUMULATE.

    ``header``: of a contribution of this epoch. ``values``: their memory, opaque; None: there are none. ``clock``: what
    they contain. ``clocks``: of the machines' copies. ``given``: by machine, the contribution that has no answer, in
    the order in which they came, and since when. ``added_at``: by machine, the version that its last contribution made
    here. ``joined``: machines whose ranks have joined. ``working``: what the thread pool is at. ``source``: the machine
    whose copy is the newest. ``broken``: why it serves no more. ``waves``: of a quorum. ``changes``: with a codec, the
    latest that were added in this epoch, see ChangeLog.
    """

    header: Header
    clock: list[int]
    state: AccumulatorState = AccumulatorState.GATHERING
    values: object | None = None
    clocks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    given: dict[int, tuple[C, float]] = field(default_factory=dict)
    added_at: dict[int, int] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    working: C | None = None
    source: int = -1
    is_resent: bool = False
    want_at: float = 0.0
    has_served: bool = False
    is_dropped: bool = False
    broken: str = ""
    waves: Waves = field(default_factory=Waves)
    changes: ChangeLog[C] = field(default_factory=lambda: ChangeLog())

    def __str__(self) -> str:
        return f"partition {self.header.index} of tensor key {self.header.key:#018x}"

    @property
    def version(self) -> int:
        """How many contributions the values contain."""
        return sum(self.clock)

    def waits_for(self, machine: int, round_: int) -> tuple[int, ...]:
        """The machines that have to give more before ``machine`` gets its answer to this round; of a quorum, those of
        which some have to."""
        if self.header.quorum:
            return self._quorum_lacks(machine, round_)
        if self.header.staleness == NO_BOUND:
            return ()
        least = round_ - self.header.staleness
        return tuple(
            other
            for other, last in enumerate(self.clock)
            if last < least and other != machine and other not in self.joined
        )

    def _quorum_lacks(self, machine: int, round_: int) -> tuple[int, ...]:
        waiting, present = {*self.waiting, machine}, self.present
        if self.gets_copy(machine, round_) or len(waiting) >= needed(present, self.header.quorum):
            return ()
        return tuple(other for other in present if other not in waiting)

    @property
    def present(self) -> list[int]:
        """The machines that have not joined."""
        return [machine for machine in range(len(self.clock)) if machine not in self.joined]

    @property
    def waiting(self) -> list[int]:
        """The machines whose changes were added, and that wait for a copy."""
        return [
            machine
            for machine, (new, _) in self.given.items()
            if new.header.round == self.clock[machine] > self.waves.answered.get(machine, 1)
        ]

    def release(self, now: float) -> bool:
        """Let machines of a quorum have their copies, if it is time and nothing more is to be added before. True if
        only time is missing."""
        are_all_added = all(new.header.round <= self.clock[machine] for machine, (new, _) in self.given.items())
        return are_all_added and self.waves.release(self.waiting, self.present, self.header.quorum, now)

    def gets_copy(self, machine: int, round_: int) -> bool:
        """A machine of a quorum gets its answer to a round now."""
        waves = self.waves
        is_repeated = round_ <= waves.answered.get(machine, 1)
        return is_repeated or machine in waves.open or (round_ > self.clock[machine] and waves.is_late(machine))


@dataclass(frozen=True, slots=True)
class Reduce(Generic[C]):
    """Combine ``round.in_order()``, then call ``Rounds.reduced``."""

    round: Round[C]


@dataclass(frozen=True, slots=True)
class Answer(Generic[C]):
    """Send the result to these contributions' origins. They are in machine order."""

    contributions: list[C]


@dataclass(frozen=True, slots=True)
class RefuseContributions(Generic[C]):
    """Tell these contributions' origins that, and why, the contributions are not used."""

    contributions: list[C]
    error: type[BytePSError]
    text: str


@dataclass(frozen=True, slots=True)
class Want:
    """Ask ``machines`` to resend their contributions to a round, or for what an accumulator lacks; ``header``: of
    another machine's contribution to it."""

    header: Header
    machines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load(Generic[C]):
    """Copy a contribution to memory of the server's own, then call ``Accumulators.loaded``."""

    accumulator: Accumulator[C]
    contribution: C


@dataclass(frozen=True, slots=True)
class Merge(Generic[C]):
    """Add a contribution to the accumulator's values if it ``adds``, and copy these to where its answer is sent from
    if it ``answers``, unless the answer has the changes that its machine lacks (``lacking``: those before this one);
    then call ``Accumulators.merged``."""

    accumulator: Accumulator[C]
    contribution: C
    adds: bool
    answers: bool
    lacking: list[C] | None = None

    @property
    def copies(self) -> bool:
        """The answer has values."""
        return self.answers and self.lacking is None


@dataclass(frozen=True, slots=True)
class SendCopy(Generic[C]):
    """Send the values that a Merge has copied to the contribution's origin, and before that what they contain, and the
    version that the contribution made; 0: another server added it. ``changes``: to be sent instead of values."""

    contribution: C
    clock: tuple[int, ...]
    added_at: int = 0
    changes: list[C] | None = None


Action = Reduce[C] | Answer[C] | RefuseContributions[C] | Want | Load[C] | Merge[C] | SendCopy[C]


@dataclass(frozen=True, slots=True)
class RoundStall:
    """A round that waits for machines. ``machines``: how many take part; ``missing``: all machines of the job that have
    not contributed, also those that take no part."""

    key: int
    index: int
    round: int
    age_s: float
    machines: int
    missing: tuple[int, ...]


@dataclass(slots=True)
class Counters:
    """Totals since the start. ``bytes_summed``: bytes of results, each counted once."""

    rounds: int = 0
    bytes_summed: int = 0
    duplicates: int = 0
    refused: int = 0
    wanted: int = 0
    bytes_in_flight: int = 0
