"""A member's round of a gather or an exchange: what other machines ask of it, and how it ends. Pure.

A piece stays where it lies until its taker says that it has come: what was sent may be lost with the connection, and is
asked for again on the next one. A round ends for a rank with all that is due, or because ranks disagree:

    over: nothing is due any more, no rank still needs what it offered a round ago, and, where sizes are compared
    together, all have said what they expect of what it offers now

Works on the members of an exchanged tensor; knows neither connections nor how bytes travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from byteps_py.errors import MismatchError, ProtocolError
from byteps_py.tensors import Sizes, differing
from byteps_py.worker.core.events import DirectAction, Fail, Show
from byteps_py.worker.core.pieces import (
    ALL,
    Delivered,
    ExchangedTensor,
    Member,
    Outgrown,
    PieceRequest,
    Receipt,
    RefusePiece,
    Serve,
    Transfer,
)


def finish(member: Member) -> list[DirectAction]:
    """End the member's round if it is over."""
    if not member.is_open or member.due or member.round - 1 in member.offers:
        return []
    offer = member.offers.get(member.round)
    if offer is not None and offer.unseen:
        return []
    member.slot.ready_bytes = -1
    error, member.error = member.error, None
    if error is None:
        return [Delivered(member.slot, member.round)]
    if member.sizes is Sizes.TENTATIVE:
        member.slot.round -= 1
    return [Fail((member.slot,), error)]


def arrived(member: Member, transfer: Transfer) -> list[DirectAction]:
    """A transfer lies in the member's result: its rank may take what of that is complete."""
    arriving, layout = member.slot.arriving, member.layout
    if arriving is None or layout is None or not member.due:
        return []
    chunks = arriving.add(layout.receives[transfer.source][0] + transfer.offset, transfer.length)
    return [Show(member.slot, chunks)] if chunks else []


def release(member: Member) -> list[DirectAction]:
    """Slots it has outgrown, whose rounds are all over, and to which nothing is copied any more: a round may have been
    abandoned in the middle."""
    over = [
        (last, slot) for last, slot in member.outgrown if not slot.copies and not any(r <= last for r in member.offers)
    ]
    member.outgrown = [entry for entry in member.outgrown if entry not in over]
    return [Outgrown(slot) for _, slot in over]


def drop_if_taken(member: Member, round_: int) -> bool:
    """Forget an offer that no rank needs any more."""
    offer = member.offers.get(round_)
    if offer is None or offer.left or offer.unseen:
        return False
    del member.offers[round_]
    return True


def taken(member: Member, round_: int, taker: int, nbytes: int | None = None) -> list[DirectAction]:
    """``taker`` has got ``nbytes`` more of what the member offers; None: all of it, which may be said again."""
    offer = member.offers.get(round_)
    if offer is None or taker not in offer.left:
        return []
    offer.left[taker] -= offer.left[taker] if nbytes is None else nbytes
    if not offer.left[taker]:
        del offer.left[taker]
        member.served[taker] = round_
    return [] if offer.left else end(member, round_)


def seen(member: Member, round_: int, taker: int) -> list[DirectAction]:
    """``taker`` agrees about what the member has for it."""
    offer = member.offers.get(round_)
    if offer is None or taker not in offer.unseen:
        return []
    offer.unseen.discard(taker)
    return [] if offer.unseen else end(member, round_)


def untaken(member: Member, round_: int, taker: int, error: MismatchError) -> list[DirectAction]:
    """``taker`` expects something else than the member has for it."""
    offer = member.offers.get(round_)
    if offer is not None:
        offer.left.pop(taker, None)
        offer.unseen.discard(taker)
    member.refused[taker] = round_, error
    if member.is_at(round_) and member.sizes is Sizes.TOGETHER:  # else it is chance whether its round is over
        member.error = member.error or error
    return end(member, round_)


def compare(channel: ExchangedTensor, source: Member, sent: int, target: Member, due: int, round_: int) -> None:
    """Two local members between whom nothing travels: they agree about that, or disagree about what should.

    ``end`` must be called for both.
    """
    offer = source.offers.get(round_)
    waits = target.is_at(round_)
    if sent == due:
        target.due.pop(source.position, None)
    else:
        ranks = channel.ranks
        text = differing(channel.spec.name, ranks[source.position], sent, ranks[target.position], due)
        error = MismatchError(text)
        if waits:
            target.lacks(source.position, error)
            if target.sizes is Sizes.TENTATIVE:
                return
        if source.is_at(round_) and (source.sizes is Sizes.TOGETHER or not waits):
            source.error = source.error or error
        if offer is not None:
            offer.left.pop(target.position, None)
    if offer is not None:
        offer.unseen.discard(target.position)


def end(member: Member, round_: int) -> list[DirectAction]:
    """All that may have come to its end: what was offered in a round, the current one, memory."""
    drop_if_taken(member, round_)
    return [*finish(member), *release(member)]


def agreeing(
    channel: ExchangedTensor, source: int, targets: Sequence[Member]
) -> tuple[tuple[Member, ...], list[DirectAction]]:
    """Of the local members of a gather: those for whom a piece is fetched, all that expect what the first of them does.
    Their round ends with an error if others expect something else."""
    first = next(target for target in targets if source in target.due)
    total = first.due[source]
    askers = tuple(target for target in targets if target.due.get(source) == total)
    actions: list[DirectAction] = []
    for other in targets:
        if other not in askers:
            of, one, another = (channel.ranks[position] for position in (source, first.position, other.position))
            error = MismatchError(
                f"tensor {channel.spec.name!r}: rank {one} expects {total} bytes of rank {of}, rank {another} expects "
                f"{other.due.get(source, 0)}; give matching sizes on all"
            )
            other.lacks(source, error)
            first.error = first.error or error
            actions += finish(other)
    return askers, actions


def parties(channel: ExchangedTensor, asked: PieceRequest | Receipt) -> tuple[Member | None, int, int]:
    """The member that has the piece, if it has declared the name; the taker, as in ``Offer.left``; and the position of
    its target: the position of the rank or of the first of them. Raises ProtocolError for what no correct machine
    asks."""
    name, source, target = channel.spec.name, asked.source, asked.target
    if (target == ALL) != channel.is_gather:
        raise ProtocolError(f"tensor {name!r}: a gather's piece is for a machine, another's for a rank")
    if source not in channel.ranks or (target != ALL and target not in channel.ranks):
        raise ProtocolError(f"tensor {name!r}: rank {source} or {target} has no part")
    position = channel.ranks.index(source)
    if position not in channel.here:
        raise ProtocolError(f"tensor {name!r}: rank {source} is not a rank of this machine")
    if target == ALL and asked.machine not in channel.machines:
        raise ProtocolError(f"tensor {name!r}: machine {asked.machine} has no part")
    if target == ALL:
        taker, taking = -1 - asked.machine, channel.machines.index(asked.machine)
    else:
        taker = taking = channel.ranks.index(target)
        if channel.machines[taking] != asked.machine:
            raise ProtocolError(f"tensor {name!r}: machine {asked.machine} asks for another's rank")
    return channel.members.get(position), taker, taking


def serve(channel: ExchangedTensor, request: PieceRequest) -> list[DirectAction]:
    """Answer a request, or keep it until the round has come. Raises ProtocolError."""
    name = channel.spec.name
    if all(member.round < request.round for member in channel.members.values()):
        # All have joined, perhaps: then the name may be other ranks', and of another kind.
        return _keep(channel, request)
    member, taker, target = parties(channel, request)
    if member is None or member.round < request.round:
        return _keep(channel, request)
    offer = member.offers.get(request.round)
    start, nbytes, block = 0, 0, member.slot.input
    if offer is not None:
        (start, nbytes), block = offer.layout.sends[0 if request.target == ALL else target], offer.block
    elif member.served.get(taker) == request.round:
        raise ProtocolError(f"tensor {name!r}: machine {request.machine} has said that it has round {request.round}")
    refused, before = member.refused.get(taker, (0, None))
    if refused == request.round and before is not None:
        return [RefusePiece(request, before)]  # a further part, or said again
    if nbytes != request.total:
        error = MismatchError(differing(name, request.source, nbytes, channel.ranks[target], request.total))
        actions = [] if request.is_tentative else untaken(member, request.round, taker, error)
        return [RefusePiece(request, error), *actions]
    if request.offset + request.length > nbytes:
        raise ProtocolError(f"tensor {name!r}: bytes were asked for that a piece does not have")
    return [Serve(request, channel, member, block, start + request.offset), *seen(member, request.round, taker)]


def _keep(channel: ExchangedTensor, request: PieceRequest) -> list[DirectAction]:
    if len(channel.requests) >= channel.most_requests:
        raise ProtocolError(f"tensor {channel.spec.name!r}: machine {request.machine} asks for too much too soon")
    channel.requests.append(request)
    return []


def takers(channel: ExchangedTensor, member: Member, here: int) -> Iterator[list[int]]:
    """Of each piece that the member has for another machine than ``here``, and that is not known to have come there:
    the ranks it is for."""
    for offer in member.offers.values():
        for taker in (*offer.left, *offer.unseen):
            machine = channel.machines[taker] if taker >= 0 else -1 - taker
            if machine != here:
                yield _ranks(channel, taker)


def needs(channel: ExchangedTensor, member: Member) -> set[int]:
    """The ranks that a member's round waits for: those that have something for it, or have yet to take, or to agree to,
    what it has for them."""
    needed = {channel.ranks[source] for source in member.due}
    if channel.is_gather and any(source not in channel.here for source in member.due):
        # The last rank of this machine to come asks others for all.
        members = channel.members
        needed.update(channel.ranks[p] for p in channel.here if p not in members or members[p].round < member.round)
    for round_, offer in member.offers.items():
        for taker in offer.unseen.union(offer.left if round_ < member.round else ()):
            needed.update(_ranks(channel, taker))
    return needed


def _ranks(channel: ExchangedTensor, taker: int) -> list[int]:
    """As in ``Offer.left``: those for whom it takes."""
    return [channel.ranks[taker]] if taker >= 0 else channel.ranks_of(-1 - taker)
