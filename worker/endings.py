"""How a round of a gather or an exchange ends for a rank: with all that is due, or because ranks disagree. Pure.

    over: nothing is due any more, nobody still needs what the rank offered a round ago, and, where sizes are compared
    together, everybody has said what they expect of what it offers now

Works on the members of a channel; knows neither other machines nor how bytes travel.
"""

from __future__ import annotations

from collections.abc import Sequence

from byteps_py.errors import MismatchError
from byteps_py.tensors import Sizes, differing
from byteps_py.worker.actions import DirectAction, Fail, Show
from byteps_py.worker.pieces import Delivered, ExchangedTensor, Member, Outgrown, Transfer


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
    strips = arriving.add(layout.receives[transfer.source][0] + transfer.offset, transfer.length)
    return [Show(member.slot, strips)] if strips else []


def let_go(member: Member) -> list[DirectAction]:
    """Slots it has outgrown, whose rounds are all over, and to which nothing is copied any more: a round may have been
    abandoned in the middle."""
    over = [
        (last, slot) for last, slot in member.outgrown if not slot.copies and not any(r <= last for r in member.offers)
    ]
    member.outgrown = [entry for entry in member.outgrown if entry not in over]
    return [Outgrown(slot) for _, slot in over]


def drop_if_taken(member: Member, round_: int) -> bool:
    """Forget an offer that nobody needs any more."""
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
    return [*finish(member), *let_go(member)]


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
            who, one, another = (channel.ranks[position] for position in (source, first.position, other.position))
            error = MismatchError(
                f"tensor {channel.spec.name!r}: rank {one} expects {total} bytes of rank {who}, rank {another} expects "
                f"{other.due.get(source, 0)}; give matching sizes on all"
            )
            other.lacks(source, error)
            first.error = first.error or error
            actions += finish(other)
    return askers, actions
