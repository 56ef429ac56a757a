"""What a summation server knows of a partition's rounds in flight, and what the rounds ask the shell to do; and which
contributions it accepts: what one must satisfy, in what those of one round must agree, how many partitions may begin.

Pure; time is an argument. The rules are in rounds.py. Decisions come back as sentences: the refusal, the log and the
error on the ranks say the same. AdmissionLimit belongs to one thread; any thread may call the functions.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from byteps_py.errors import BytePSError
from byteps_py.tensors import DType, Op
from byteps_py.wire.data_link import MAX_NAMES, Header, Kind, RoundName, name_of

#: Machines that push in the same order contribute at about the same time. One that is later has another order.
AWAITED_AFTER_S = 0.01


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
    """Ask ``machines`` to resend their contributions to a round; ``header``: of another machine's contribution to
    it."""

    header: Header
    machines: tuple[int, ...]


Action = Reduce[C] | Answer[C] | RefuseContributions[C] | Want


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


class Facts(NamedTuple):
    """The facts that all contributions to one round of a partition must agree on. ``offset``, ``length``: in bytes;
    ``machines``: how many contribute, 0 for all."""

    round: int
    op: Op
    dtype: DType
    length: int
    offset: int
    root: int
    machines: int

    @classmethod
    def of(cls, header: Header) -> Facts:
        """The facts that a header states."""
        return cls(header.round, header.op, header.dtype, header.length, header.offset, header.root, header.machines)

    def __str__(self) -> str:
        root = f" from machine {self.root}" if self.op is Op.BROADCAST else ""
        group = f" among {self.machines} machines" if self.machines else ""
        return (
            f"round {self.round}, {self.op.name.lower()} of {self.dtype.name.lower()}{root}{group}, "
            f"{self.length} bytes at offset {self.offset}"
        )


def difference(gave: list[tuple[int, Facts]]) -> str:
    """One sentence: which facts differ, and the facts that each group of machines gave."""
    views: dict[Facts, list[int]] = {}
    for machine, facts in gave:
        views.setdefault(facts, []).append(machine)
    names = [name for i, name in enumerate(Facts._fields) if len({facts[i] for facts in views}) > 1]
    said = "; ".join(
        f"machine{'s' if len(machines) > 1 else ''} {', '.join(map(str, machines))} gave {facts}"
        for facts, machines in views.items()
    )
    return f"machines disagree about {' and '.join(names)}: {said}"


def not_a_member_reason(header: Header, partition: object) -> str:
    """Why a machine's contribution is refused when all machines that take part in the round are known already."""
    return f"machine {header.sender} is not among the machines that take part in round {header.round} of {partition}"


def missing_root_reason(header: Header, machines: Collection[int]) -> str:
    """Why ``machines``, which are all that take part, can't complete the round of ``header``; empty if they can."""
    if header.op is not Op.BROADCAST or header.root in machines:
        return ""
    who = ", ".join(map(str, sorted(machines)))
    return (
        f"partition {header.index} of tensor key {header.key:#018x}: machine {header.root}, the root of the broadcast "
        f"in round {header.round}, is not among the machines that take part, which are {who}"
    )


def stale_epoch_reason(header: Header, since_epoch: int) -> str:
    """Why a contribution is too old: the present machines work together since ``since_epoch``; empty if it is not."""
    if header.epoch >= max(since_epoch, 1):
        return ""
    return (
        f"the other machines have gone on without this one: its contribution is of epoch {header.epoch}, and the job's "
        f"machines have changed in epoch {since_epoch}"
    )


def objection(header: Header, nbytes: int, num_machines: int, partition_bytes: int) -> str:
    """Why a contribution with ``nbytes`` of payload can't be used, whatever other machines give; empty if it can."""
    what = f"partition {header.index} of tensor key {header.key:#018x} from machine {header.sender}"
    if header.sender >= num_machines:
        return f"{what}: machines of this job are numbered 0 to {num_machines - 1}"
    if header.machines == 1:
        return f"{what}: its header says that only one machine contributes, which needs no server"
    if header.machines > num_machines:
        return f"{what}: its header says that {header.machines} machines contribute, but the job has {num_machines}"
    if not 0 < header.length <= partition_bytes:
        return f"{what}: its length is {header.length} bytes, but a partition has 1 to {partition_bytes}"
    if header.length % header.dtype.itemsize or header.offset % header.dtype.itemsize:
        unit = f"{header.dtype.itemsize}, the size of {header.dtype.name.lower()}"
        return f"{what}: its length, {header.length}, and its offset, {header.offset}, must be multiples of {unit}"
    is_pull = header.kind is Kind.PULL
    is_pass = header.kind is Kind.PASS
    if is_pass and header.op is Op.BROADCAST:
        return f"{what}: every machine takes part in a broadcast, so none can pass"
    if header.op is Op.BROADCAST:
        if header.root >= num_machines:
            return f"{what}: the broadcast's root is machine {header.root}, but the last machine is {num_machines - 1}"
        if is_pull == (header.sender == header.root):
            return f"{what}: in a broadcast, machine {header.root}, the root, pushes and the others pull"
    elif is_pull:
        return f"{what}: only the result of a broadcast can be pulled, not that of a {header.op.name.lower()}"
    expected = 0 if is_pull or is_pass else header.length
    if nbytes != expected:
        return f"{what}: its header announces {expected} bytes of payload, but {nbytes} arrived"
    return ""


class AdmissionLimit:
    """How many partitions may exist that have not been summed for the first time.

    A server does not know in advance which tensors there are. It learns of a tensor from the first machine that
    contributes, and keeps the contribution until all machines have. Without a limit, a machine that invents keys or
    indices would fill the server's memory.
    """

    #: Far more than the tensors of any model. Each takes 1.8 KB, beside its contributions.
    most_keys = 1 << 16
    #: Of all keys together: 16 GB in the smallest partitions.
    most_partitions = 1 << 19

    def __init__(self) -> None:
        self._by_key: dict[int, int] = {}
        self._partitions = 0

    def objection(self, key: int) -> str:
        """Why no other partition of ``key`` may begin; empty if one may."""
        if len(self._by_key) >= self.most_keys and key not in self._by_key:
            what = f"{self.most_keys} other tensors"
        elif self._partitions >= self.most_partitions:
            what = f"{self.most_partitions} partitions"
        else:
            return ""
        return f"tensor key {key:#018x}: this server already holds {what} that wait for their first sum"

    def begun(self, key: int) -> None:
        """A partition of ``key`` has its first contribution."""
        self._by_key[key] = self._by_key.get(key, 0) + 1
        self._partitions += 1

    def ended(self, key: int) -> None:
        """A partition of ``key`` was summed for the first time, or is forgotten."""
        self._partitions -= 1
        self._by_key[key] -= 1
        if not self._by_key[key]:
            del self._by_key[key]
