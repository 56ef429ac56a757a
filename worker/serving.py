"""What another machine asks for, and says that it has: which piece is meant, and whether it may have it. Pure.

A piece stays where it lies until its taker says that it has come: what was sent may be lost with the connection, and is
asked for again on the next one.
"""

from __future__ import annotations

from collections.abc import Iterator

from byteps_py.errors import MismatchError, ProtocolError
from byteps_py.tensors import differing
from byteps_py.worker.actions import DirectAction
from byteps_py.worker.endings import seen, untaken
from byteps_py.worker.pieces import ALL, ExchangedTensor, Member, PieceRequest, Receipt, RefusePiece, Serve


def parties(channel: ExchangedTensor, asked: PieceRequest | Receipt) -> tuple[Member | None, int, int]:
    """The member who has the piece, if it has declared the name; who takes it, as in ``Offer.left``; and for whom, the
    position of the rank or of the first of them. Raises ProtocolError for what no correct machine asks."""
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
    """The ranks that a member's round waits for: who has something for it, or has yet to take, or to agree to, what it
    has for them."""
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
