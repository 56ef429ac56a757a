"""Gathers and exchanges: a piece goes straight from the rank that has it to the one it is for. Pure.

    a rank hands over a round, with its layout: an Offer
      ├─ from each rank of this machine that has come to the round too:  Copy
      └─ from each rank of another machine:  Fetch ─► there, once the rank has come:  Serve ─► here:  Copy
    all its pieces are copied, and no rank still needs what it offered a round ago: Delivered

The receiver asks, so nothing comes for which there is no place, and what is asked for twice is the same. It says when a
piece has come, so that what is lost with a connection is there to be sent again. Ranks go through the rounds of a name
at their own pace, each at most one ahead of a rank that still needs a piece of the round before: a rank's two inputs
are used in turn. Nothing is voted on: a key is a name, a name says which ranks take part (its ranks disagree about that
only by a fault of the front end), and sizes are compared where they meet. A piece whose sizes differ counts as taken,
so that rounds stay in step; the rank that expects it gets an error for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from byteps_py.errors import ProtocolError
from byteps_py.tensors import Sizes, key_of
from byteps_py.worker.core.credit import PushQueue
from byteps_py.worker.core.events import (
    CopiedHere,
    DirectAction,
    MachineLost,
    PieceArrived,
    PieceCopied,
    PieceEvent,
    PieceRefused,
    PiecesDeclared,
    PiecesReady,
)
from byteps_py.worker.core.piece_rounds import (
    agreeing,
    arrived,
    compare,
    drop_if_taken,
    end,
    finish,
    parties,
    release,
    serve,
    taken,
    takers,
)
from byteps_py.worker.core.pieces import (
    MAX_EARLY,
    Copy,
    CopyHere,
    ExchangedTensor,
    Member,
    Offer,
    Pair,
    PieceRequest,
    Receipt,
    RefusePiece,
    Transfer,
    due,
)
from byteps_py.worker.core.tensor import AskSum, RankSlot


class PieceExchange:
    """``machine``: the index of this one; ``machine_of``: of each rank; ``piece_bytes``: a transfer's limit;
    ``local_piece_bytes``: that of a copy on this machine; pieces up to ``joint_copy_bytes`` are copied together.

    ``handle`` takes what happens; ``abandon`` and ``start_anew`` are for ranks that join."""

    _serve = staticmethod(serve)

    def __init__(
        self,
        machine: int,
        machine_of: Sequence[int],
        piece_bytes: int,
        local_piece_bytes: int,
        queue: PushQueue[Transfer | AskSum],
        joint_copy_bytes: int,
    ) -> None:
        self._joint_copy_bytes = joint_copy_bytes
        self._machine = machine
        self._machine_of = machine_of
        self._piece_bytes = piece_bytes
        self._local_piece_bytes = local_piece_bytes
        self._queue = queue
        self._channels: dict[int, ExchangedTensor] = {}
        self._before = 0  # rounds up to this one were before all ranks joined
        self._early: dict[int, list[PieceRequest]] = {}
        self._by_slot: dict[int, tuple[ExchangedTensor, Member]] = {}  # by its id
        self._handlers: Mapping[type, Callable[[Any, float], list[DirectAction]]] = {
            PiecesDeclared: self._declare,
            PiecesReady: self._ready,
            PieceRequest: self._requested,
            Receipt: self._received,
            PieceArrived: self._arrived,
            PieceRefused: self._refused,
            PieceCopied: self._copied,
            CopiedHere: self._copied_here,
            MachineLost: self._machine_lost,
        }

    def handle(self, event: PieceEvent, now: float) -> list[DirectAction]:
        """Return the actions that ``event`` requires. Raises ProtocolError for what no correct rank or machine does."""
        return self._handlers[type(event)](event, now)

    # ---- events ----------------------------------------------------------------------------------------

    def _declare(self, event: PiecesDeclared, now: float) -> list[DirectAction]:
        rank, slot = event.rank, event.slot
        spec = slot.spec
        key = key_of(spec.name)
        channel = self._channels.get(key)
        if channel is None:
            ranks = spec.members(len(self._machine_of))
            machines = [self._machine_of[r] for r in ranks]
            here = [i for i, m in enumerate(machines) if m == self._machine]
            channel = self._channels[key] = ExchangedTensor(spec, ranks, machines, here, key)
            channel.requests = self._early.pop(key, [])
        elif not channel.spec.agrees_with(spec):
            raise ProtocolError(
                f"tensor {spec.name!r}: rank {rank} declares it for {spec.describe()}, others of this machine for "
                f"{channel.spec.describe()}"
            )
        position = channel.ranks.index(rank)
        member = channel.members.get(position)
        if member is None:
            slot.round = self._before
            member = channel.members[position] = Member(position, slot)
            self._by_slot[slot.id] = (channel, member)
            return []
        old, member.slot = member.slot, slot
        self._by_slot[slot.id] = self._by_slot.pop(old.id)
        slot.round = old.round
        member.outgrown.append((old.round, old))
        return release(member)

    def _ready(self, event: PiecesReady, now: float) -> list[DirectAction]:
        slot, round_, layout = event.slot, event.round, event.layout
        channel, member = self._by_slot.get(slot.id, (None, None))
        if channel is None or member is None or member.is_open or round_ != slot.round + 1:
            raise ProtocolError(
                f"tensor {slot.spec.name!r}: local rank {slot.local_rank} handed over round {round_} after round "
                f"{slot.round}"
            )
        if layout is not None:
            member.layout = layout
            asks_all = layout.sizes is not Sizes.PLAIN
            member.expects = {
                source: nbytes
                for source, (_, nbytes) in enumerate(layout.receives)
                if nbytes or (asks_all and source != member.position)
            }
            member.takers = channel.takers(member, layout, self._machine)
        elif member.layout is None:
            raise ProtocolError(f"tensor {slot.spec.name!r}: local rank {slot.local_rank} gave no layout")
        slot.round, slot.ready_since, slot.ready_bytes = round_, now, slot.spec.nbytes
        if slot.arriving is not None:
            slot.arriving.begin()
        member.due = member.expects.copy()
        left = {taker: nbytes for taker, nbytes in member.takers.items() if nbytes}
        offer = member.offers[round_] = Offer(slot.input, member.layout, left)
        if member.sizes is Sizes.TOGETHER:
            offer.unseen = member.takers.keys() - {member.position}
        actions = self._match_here(channel, member)
        if len(channel.here) < len(channel.ranks):
            actions += self._ask(channel, member, now)
            requests, channel.requests = channel.requests, []
            for request in requests:
                try:
                    actions += self._serve(channel, request)
                except ProtocolError as error:  # the fault of the machine that asked, not of the rank that has come
                    actions.append(RefusePiece(request, error))
        drop_if_taken(member, round_)
        return actions + finish(member)

    def _requested(self, request: PieceRequest, now: float) -> list[DirectAction]:
        if request.round <= self._before:
            return []  # it was abandoned when all joined, and its name is perhaps other ranks' by now
        channel = self._channels.get(request.key)
        if channel is not None:
            return self._serve(channel, request)
        if sum(map(len, self._early.values())) >= MAX_EARLY:
            raise ProtocolError(f"machine {request.machine} asks for too much that no rank here has declared")
        self._early.setdefault(request.key, []).append(request)
        return []

    def _arrived(self, event: PieceArrived, now: float) -> list[DirectAction]:
        transfer, source = event.transfer, event.source
        self._queue.give_back(transfer)
        outputs = self._outputs(transfer)
        actions: list[DirectAction] = []
        if not transfer.length:
            actions += self._taken(transfer)
        elif outputs:
            actions.append(_begin_copy(transfer, source, outputs))
        return [*actions, *due(self._queue, now)]

    def _refused(self, event: PieceRefused, now: float) -> list[DirectAction]:
        transfer, error = event.transfer, event.error
        self._queue.give_back(transfer)
        actions: list[DirectAction] = []
        for member in transfer.targets:
            if member.awaits(transfer.source, transfer.round):
                member.lacks(transfer.source, error)
                actions += finish(member)
        return [*actions, *due(self._queue, now)]

    def _copied_here(self, event: CopiedHere, now: float) -> list[DirectAction]:
        actions: list[DirectAction] = []
        for source, target, _, _, _ in event.pairs:
            target.due.pop(source.position, None)  # unless it was abandoned
            round_ = target.round
            del source.offers[round_].left[target.position]
            if drop_if_taken(source, round_):
                if source.outgrown:
                    actions += release(source)
                if source is not target:
                    actions += finish(source)
            actions += finish(target)
        return actions

    def _copied(self, event: PieceCopied, now: float) -> list[DirectAction]:
        return self._taken(event.transfer)

    def _taken(self, transfer: Transfer) -> list[DirectAction]:
        """A transfer lies where it is to be."""
        actions: list[DirectAction] = []
        for slot in transfer.places:
            slot.copies -= 1
        for member in transfer.targets:
            if member.outgrown:
                actions += release(member)
            if not member.awaits(transfer.source, transfer.round):
                continue  # it was abandoned
            member.due[transfer.source] -= transfer.length
            if not member.due[transfer.source]:
                del member.due[transfer.source]
            actions += [*arrived(member, transfer), *finish(member)]
        source = transfer.channel.members.get(transfer.source)
        if source is not None:
            for member in transfer.targets:
                actions += taken(source, transfer.round, member.position, transfer.length)
        return actions

    def _received(self, receipt: Receipt, now: float) -> list[DirectAction]:
        channel = self._channels.get(receipt.key)
        if channel is None or receipt.round <= self._before:
            return []  # of names that were given up
        member, taker, _ = parties(channel, receipt)
        return taken(member, receipt.round, taker) if member is not None else []

    def _machine_lost(self, event: MachineLost, now: float) -> list[DirectAction]:
        for requests in [*self._early.values(), *(channel.requests for channel in self._channels.values())]:
            requests[:] = [request for request in requests if request.machine != event.machine]
        return []

    def abandon(self, member: Member) -> None:
        """The member's round will never be complete, and its rank knows."""
        member.slot.ready_bytes = -1
        member.due = {}
        member.error = None

    def start_anew(self, round_: int) -> list[RankSlot]:
        """All ranks have joined, and none waits: nothing is declared any more. Returns the slots. All names go on with
        the round after ``round_``: a machine that hears of this earlier may ask for it already."""
        self._before = round_
        early = [*self._early.values(), *(channel.requests for channel in self._channels.values())]
        slots = []
        for _, member in self.members():
            slots += [member.slot, *(old for _, old in member.outgrown)]
            member.outgrown.clear()  # what still leaves, or is copied, lets go of nothing
        self._channels.clear()
        self._by_slot.clear()
        self._early.clear()
        for request in (request for requests in early for request in requests if request.round > round_):
            self._early.setdefault(request.key, []).append(request)
        return slots

    # ---- questions -------------------------------------------------------------------------------------

    def members(self, local_rank: int | None = None) -> Iterable[tuple[ExchangedTensor, Member]]:
        """All, or those of one local rank."""
        for channel in self._channels.values():
            for member in channel.members.values():
                if local_rank is None or member.slot.local_rank == local_rank:
                    yield channel, member

    def lacks(self, ranks: set[int]) -> bool:
        """A local rank waits for a piece that one of these has for it."""
        return any(
            member.is_waited_for and any(channel.ranks[source] in ranks for source in member.due)
            for channel, member in self.members()
        )

    def owes(self, gone: set[int], local_rank: int | None = None) -> bool:
        """A rank of another machine has yet to take what one of this machine, or this one, has for it, and is not
        ``gone``."""
        return any(not gone.issuperset(ranks) for ranks in self._takers(local_rank))

    def keeps_for(self, gone: set[int]) -> bool:
        """One of these, of another machine, has not said that it has taken what one of this machine has for it."""
        return any(not gone.isdisjoint(ranks) for ranks in self._takers())

    def _takers(self, local_rank: int | None = None) -> Iterator[list[int]]:
        for channel, member in self.members(local_rank):
            yield from takers(channel, member, self._machine)

    # ---- pieces ----------------------------------------------------------------------------------------

    def _match_here(self, channel: ExchangedTensor, member: Member) -> list[DirectAction]:
        """Copy between ``member`` and the local members that have come to its round, both ways."""
        actions: list[DirectAction] = []
        pairs: list[Pair] = []
        compared: list[Member] = []  # between whom nothing travels
        round_ = member.slot.round
        mine = member.offers[round_]
        for other in channel.members.values():
            if (offer := other.offers.get(round_)) is not None:
                self._copy(channel, other, offer, member, pairs, actions, compared)
            elif other.slot.round >= round_ and other.position in member.due:  # it has nothing for any rank
                compare(channel, other, 0, member, member.due[other.position], round_)
                compared.append(other)
            if other is member:
                continue
            if other.slot.round == round_ and other.slot.ready_bytes >= 0:
                self._copy(channel, member, mine, other, pairs, actions, compared)
            elif other.slot.round >= round_ and (nbytes := mine.left.get(other.position, 0)):  # it has gone on without
                compare(channel, member, nbytes, other, 0, round_)
        for other in compared:
            if other is not member:
                actions += end(other, round_)
        return [CopyHere(pairs), *actions] if pairs else actions

    def _copy(
        self,
        channel: ExchangedTensor,
        source: Member,
        offer: Offer,
        target: Member,
        pairs: list[Pair],
        actions: list[DirectAction],
        compared: list[Member],
    ) -> None:
        """Add what ``source`` has for ``target`` to ``pairs``, or to ``actions`` if it is large; both of them to
        ``compared`` if there is nothing, or nothing that they agree about."""
        start, nbytes = offer.layout.sends[0 if channel.is_gather else target.position]
        due = target.due.get(source.position, 0)
        if source is target and channel.is_gather and not due:
            return
        if nbytes != due or not nbytes:
            if nbytes or due or offer.unseen or source.position in target.due:
                compare(channel, source, nbytes, target, due, target.round)
                compared += (source, target)
            return
        if offer.unseen:
            offer.unseen.discard(target.position)
            compared.append(source)
        address = offer.block.address + start
        if nbytes <= self._joint_copy_bytes and target.layout is not None:
            place = target.slot.result.address + target.layout.receives[source.position][0]
            pairs.append((source, target, address, place, nbytes))
            return
        for offset, length in _pieces(nbytes, self._local_piece_bytes):
            transfer = Transfer(
                channel, target.round, source.position, (target,), offset, length, nbytes, self._machine
            )
            actions.append(_begin_copy(transfer, address + offset, self._outputs(transfer)))

    def _outputs(self, transfer: Transfer) -> tuple[int, ...]:
        waiting = (m for m in transfer.targets if m.awaits(transfer.source, transfer.round))
        return tuple(
            m.slot.result.address + m.layout.receives[transfer.source][0] + transfer.offset
            for m in waiting
            if m.layout is not None
        )

    def _ask(self, channel: ExchangedTensor, member: Member, now: float) -> list[DirectAction]:
        """Fetch what other machines have for ``member``, the next machine's first: all machines begin with another."""
        targets: tuple[Member, ...] = (member,)
        if channel.is_gather:
            targets = tuple(channel.members[p] for p in channel.here if p in channel.members)
            if len(targets) < len(channel.here) or not all(t.is_at(member.round) for t in targets):
                return []  # the last of them to come asks for all
        sources = {source for target in targets for source in target.due}
        remote = [source for source in sources if channel.machines[source] != self._machine]
        machines = max(channel.machines) + 1
        remote.sort(key=lambda source: ((channel.machines[source] - self._machine) % machines, source))
        actions: list[DirectAction] = []
        for source in remote:
            askers, ends = agreeing(channel, source, targets)
            actions += ends
            total = askers[0].due[source]
            for offset, length in _pieces(total, self._piece_bytes):
                transfer = Transfer(
                    channel, member.round, source, askers, offset, length, total, channel.machines[source]
                )
                self._queue.add(transfer, channel.spec.priority)
        return [*actions, *due(self._queue, now)] if remote else []


def _begin_copy(transfer: Transfer, source: int, outputs: tuple[int, ...]) -> Copy:
    """To those that await it."""
    transfer.places = tuple(m.slot for m in transfer.targets if m.awaits(transfer.source, transfer.round))
    for slot in transfer.places:
        slot.copies += 1
    return Copy(transfer, source, outputs)


def _pieces(nbytes: int, limit: int) -> Iterable[tuple[int, int]]:
    """An empty piece is one, too."""
    return ((offset, min(limit, nbytes - offset)) for offset in range(0, nbytes or 1, limit))
