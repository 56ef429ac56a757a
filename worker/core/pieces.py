"""What gathers and exchanges are made of on one machine: channels, members, offers, transfers. Data only.

``Receipts``: pieces of other machines' ranks that have come here whole, and whether the machines that gave them know.
These keep a piece until they know: what they have sent may be lost with a connection. It is said along with the next
request for the same rank's pieces, as it is where ranks go from round to round; else after a while by itself. What was
on a connection that broke is said again: of each name two rounds at most, more no machine keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from byteps_py.errors import BytePSError, MismatchError
from byteps_py.system.shm import Block
from byteps_py.tensors import Layout, Op, Sizes, TensorSpec
from byteps_py.worker.core.credit import PushQueue
from byteps_py.worker.core.tensor import AskSum, RankSlot

#: What is asked for takes credit for so long at most: its owner may not have it yet.
PATIENCE_S = 0.05
#: The target of a Fetch on behalf of all ranks of a machine.
ALL = 0xFFFFFFFF


@dataclass(slots=True, eq=False)
class Offer:
    """The pieces that a member has handed over in one round. ``left``: bytes that takers still need, by position in
    the group; a machine, which takes a GATHER for all its ranks, counts as -1 - its index. ``unseen``: takers that
    have yet to say what they expect, if the round is not over before."""

    block: Block
    layout: Layout
    left: dict[int, int]
    unseen: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Member:
    """A local rank of the group. ``due``: bytes still to come in the current round, by source's position; 0: nothing,
    but the source has yet to agree. ``error``: how the round will end. ``served``: by taker, the last round in which
    it took all that was for it; ``refused``: the same of a round in which it could not."""

    position: int
    slot: RankSlot
    offers: dict[int, Offer] = field(default_factory=dict)  # by round
    due: dict[int, int] = field(default_factory=dict)
    layout: Layout | None = None  # of the last round
    expects: dict[int, int] = field(default_factory=dict)  # ``due`` at the beginning of a round with this layout
    takers: dict[int, int] = field(default_factory=dict)  # ``left`` of an offer with this layout
    outgrown: list[tuple[int, RankSlot]] = field(default_factory=list)  # the last round that used it, and the slot
    error: BytePSError | None = None
    served: dict[int, int] = field(default_factory=dict)
    refused: dict[int, tuple[int, MismatchError]] = field(default_factory=dict)

    @property
    def round(self) -> int:
        return self.slot.round

    @property
    def is_open(self) -> bool:
        """It has begun a round that is not delivered."""
        return self.slot.ready_bytes >= 0

    @property
    def sizes(self) -> Sizes:
        return self.layout.sizes if self.layout is not None else Sizes.PLAIN

    @property
    def is_waited_for(self) -> bool:
        """Its rank needs the end of its round: not of one that was begun in case a message comes."""
        return self.slot.waits and self.sizes is not Sizes.TENTATIVE

    def is_at(self, round_: int) -> bool:
        """It has begun this round, which is not over."""
        return self.is_open and self.round == round_

    def awaits(self, source: int, round_: int) -> bool:
        return self.is_at(round_) and source in self.due

    def lacks(self, source: int, error: BytePSError) -> None:
        """The pieces of ``source`` will not arrive; the round ends with that error."""
        self.due.pop(source, None)
        self.error = self.error or error


#: Requests for what no local rank has declared, or handed over, yet; more can't come from correct machines.
MAX_EARLY = 1 << 16


@dataclass(slots=True, eq=False)
class ExchangedTensor:
    """One name. ``ranks`` and ``machines``: by position; ``here``: positions of this machine's ranks; ``members``:
    those of them that have declared it."""

    spec: TensorSpec
    ranks: Sequence[int]
    machines: Sequence[int]
    here: Sequence[int]
    key: int
    members: dict[int, Member] = field(default_factory=dict)
    requests: list[PieceRequest] = field(default_factory=list)  # of other machines, that came before the round did
    most_requests: int = MAX_EARLY

    @property
    def is_gather(self) -> bool:
        return self.spec.op is Op.GATHER

    def ranks_of(self, machine: int) -> list[int]:
        """Those that take part."""
        return [rank for rank, other in zip(self.ranks, self.machines, strict=True) if other == machine]

    def takers(self, member: Member, layout: Layout, machine: int) -> dict[int, int]:
        """How many bytes of an offer each taker needs, perhaps 0, as in ``Offer.left``. Of a GATHER, one may have its
        own."""
        if not self.is_gather:
            return {position: nbytes for position, (_, nbytes) in enumerate(layout.sends)}
        others = {-1 - other for other in self.machines if other != machine}
        takers = dict.fromkeys([*self.here, *others], layout.sends[0][1])
        if not layout.receives[member.position][1]:
            del takers[member.position]
        return takers


@dataclass(slots=True, eq=False)
class Receipt:
    """Another machine has all of the piece that ``source`` had for ``target`` (global ranks) in ``round``."""

    machine: int
    key: int
    round: int
    source: int
    target: int


@dataclass(slots=True, eq=False)
class PieceRequest:
    """Another machine wants ``length`` bytes at ``offset`` of the piece, of ``total`` bytes, that ``source`` has for
    ``target`` (both global ranks). ``origin``: where to send it, and as what; opaque."""

    origin: object
    machine: int
    key: int
    round: int
    source: int
    target: int
    offset: int
    length: int
    total: int
    is_tentative: bool = False


@dataclass(slots=True, eq=False)
class Transfer:
    """``length`` bytes at ``offset`` of a piece, perhaps an empty one, on its way to ``targets``. ``server``: the
    machine it comes from."""

    channel: ExchangedTensor
    round: int
    source: int
    targets: tuple[Member, ...]
    offset: int
    length: int
    total: int
    server: int
    places: tuple[RankSlot, ...] = ()  # where it is being copied to

    @property
    def target(self) -> int:
        """The global rank it is for, or ALL of its group on this machine."""
        return ALL if self.channel.is_gather else self.channel.ranks[self.targets[0].position]

    @property
    def is_tentative(self) -> bool:
        return self.targets[0].sizes is Sizes.TENTATIVE


@dataclass(slots=True)
class FetchPiece:
    """Ask machine ``item.server`` for it; its bytes go to ``PieceExchange.arrived``, or to ``Scatter.arrived``."""

    item: Transfer | AskSum


@dataclass(slots=True)
class Copy:
    """Copy ``transfer.length`` bytes to ``outputs``, then call ``PieceExchange.copied``. ``source``: an address."""

    transfer: Transfer
    source: int
    outputs: tuple[int, ...]


#: source, target, the addresses from and to which a piece is copied, its bytes
Pair = tuple[Member, Member, int, int, int]


@dataclass(slots=True)
class CopyHere:
    """Make these copies, all small, at once and without another thread; then call ``PieceExchange.copied_here``."""

    pairs: list[Pair]


@dataclass(slots=True)
class Serve:
    """Send these bytes of ``member``'s memory, which stay as they are until ``PieceExchange.received``."""

    request: PieceRequest
    channel: ExchangedTensor
    member: Member
    block: Block
    offset: int


@dataclass(slots=True)
class RefusePiece:
    """Say to the machine that asked why it gets nothing."""

    request: PieceRequest
    error: BytePSError


@dataclass(slots=True)
class Delivered:
    """A member's round is over."""

    slot: RankSlot
    round: int


@dataclass(slots=True)
class Outgrown:
    """Nothing uses this memory any more."""

    slot: RankSlot


def due(queue: PushQueue[Transfer | AskSum], now: float) -> list[FetchPiece]:
    """The requests that the credit allows. Also to be called from time to time, see PushQueue."""
    fetches = []
    while (item := queue.take(now)) is not None:
        fetches.append(FetchPiece(item))
    return fetches


class Way(NamedTuple):
    """The machine and rank that pieces come from, the rank they are for, and their name: ``source`` and ``target`` are
    global ranks."""

    machine: int
    key: int
    source: int
    target: int


class Receipts:
    """The messages to machines: pairs of a Way and a round."""

    def __init__(self) -> None:
        self._parts: dict[tuple[Way, int], int] = {}  # bytes that have come, of pieces that have not come whole
        self._whole: dict[Way, list[int]] = {}  # the last two rounds
        self._unsaid: dict[Way, list[int]] = {}

    def arrived(self, way: Way, round_: int, nbytes: int, total: int) -> None:
        """``nbytes`` more of the piece of a round, which has ``total``."""
        if not total:
            return  # no machine keeps anything
        got = self._parts.pop((way, round_), 0) + nbytes
        if got < total:
            self._parts[way, round_] = got
            return
        self._whole[way] = [*self._whole.get(way, [])[-1:], round_]
        self._unsaid.setdefault(way, []).append(round_)

    def say(self, way: Way) -> int:
        """The round to say along with a request; 0 if there is none."""
        rounds = self._unsaid.get(way)
        if not rounds:
            return 0
        round_ = rounds.pop(0)
        if not rounds:
            del self._unsaid[way]
        return round_

    @property
    def are_due(self) -> bool:
        """Something is not said yet."""
        return bool(self._unsaid)

    def take_due(self) -> list[tuple[Way, int]]:
        """Take the messages that have not been sent yet."""
        due = [(way, round_) for way, rounds in self._unsaid.items() for round_ in rounds]
        self._unsaid.clear()
        return due

    def sent_to(self, machine: int) -> Iterable[tuple[Way, int]]:
        """The messages to a machine that it may not have received, sent or not."""
        return [(way, round_) for way, rounds in self._whole.items() if way.machine == machine for round_ in rounds]

    def clear(self) -> None:
        self._parts.clear()
        self._whole.clear()
        self._unsaid.clear()
