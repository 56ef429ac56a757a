"""Decides whether the ranks carry out a round of a named operation themselves: votes, and their result.

Names may be called in any order, and need not be waited for, so no rank knows the next operation of the others. But
most ranks repeat the operation of the previous round. So a rank tells the others that it waits for a round. If all have
waited for a round, each offers to add the next one, and every rank that has waited votes on the next one in any case.
All ranks count as having waited before the first round. A rank that has not waited, and does not wait now, casts no
vote: a round for which no rank waits costs no message.

    in the previous round                   in this round           vote
    -------------------------------------   ---------------------   ---------------
    all have waited                         waits, is able          an offer
    a rank has not waited; or not able      waits                   WAITS
    this rank has waited                    does not wait           IS_ABSENT
    this rank has not waited                does not wait           none

If all ranks make the same offer, they add the round themselves. Otherwise all go through the service. A rank that has
not offered may do so at once. A rank that has offered receives a vote of every other: as they have waited, each casts
one. A vote on a round is sent before its rank's contribution to the round, so it has arrived when the next round
begins. Where it has not, the rank merely does not offer.

``OfferVotes`` is pure, for one thread at a time; all else: any thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import cast

from byteps_py.session.peers import PeerTransport
from byteps_py.torch.collectives.context import Context

#: The service ends waits that exceed the stall limit; a rank gives it this much time before it gives up itself.
_PATIENCE_S = 10.0
_FOREVER_S = 1e9  # no limit

#: Votes on a round. An offer is a number from 0 on that identifies the sum.
IS_ABSENT, WAITS = -1, -2


class OfferVotes:
    """The rounds of one name, as one rank sees them. ``others``: the other ranks."""

    def __init__(self, others: Collection[int]) -> None:
        self._others = others
        self.number = 0  # of the latest round
        self._has_waited = True
        self._offer = -1  # of this rank, in that round; -1: none

    def begin(self, offer: int, is_waiting: bool, is_able: bool, votes: Mapping[int, int]) -> int | None:
        """Begin the next round. Returns the vote for all others, or None. ``votes``: those of the others on the
        previous round. ``is_able``: this rank can add it."""
        self.number += 1
        has_waited, self._has_waited = self._has_waited, is_waiting
        self._offer = -1
        if not is_waiting:
            return IS_ABSENT if has_waited else None
        if not (is_able and has_waited and (self.number == 1 or self._all_waited(votes))):
            return WAITS
        self._offer = offer
        return offer

    def verdict(self, joined: Collection[int], votes: Mapping[int, int]) -> bool | None:
        """True if the ranks add this round, in which this rank has offered; None: votes are missing. ``joined``: ranks
        that cast no more votes. ``votes``: those on this round, read after ``joined``."""
        answers = [votes.get(other) for other in self._others]
        offers, missing = answers.count(self._offer), answers.count(None)
        if not missing or offers + missing < len(answers):
            return offers == len(answers)
        if not joined:
            return None
        return False if any(other in joined for other in self._others if other not in votes) else None

    def _all_waited(self, votes: Mapping[int, int]) -> bool:
        return all(votes.get(other, IS_ABSENT) != IS_ABSENT for other in self._others)


class VotingGroup:
    """The ``ranks`` that vote, () for all. Raises StallError and the error that ends the session."""

    def __init__(self, context: Context, ranks: Sequence[int]) -> None:
        self.session = session = context.session
        self.peers = cast(PeerTransport, session.peers)
        self.peers.directory.wait_for_all()
        limit_s = context.settings.stall_limit_s
        #: The time to wait for the others.
        self.timeout_s = limit_s + _PATIENCE_S if limit_s else _FOREVER_S
        self.ranks = ranks or range(session.size)
        machines = context.connections.machines if context.connections is not None else None
        #: The positions on each machine; empty: all are on one.
        self.machines = machines.of(self.ranks).positions if machines is not None else ()
        self.own = self.ranks.index(session.rank)
        self.count = len(self.ranks)
        #: The ranks of the other members, by position.
        self.others = {p: rank for p, rank in enumerate(self.ranks) if p != self.own}
        #: The suffix of the names of the group's streams.
        self.suffix = f"among ranks {', '.join(map(str, self.ranks))}#{session.incarnation}"


class VotedRounds:
    """The rounds of one name, one at a time."""

    def __init__(self, group: VotingGroup, name: str) -> None:
        self._group = group
        self._name = name
        others = tuple(group.others.values())
        self._rounds = OfferVotes(others)
        self._votes = group.peers.votes(f"{name} {group.suffix}", others)

    @property
    def number(self) -> int:
        """The number of the latest round."""
        return self._rounds.number

    def begin_elsewhere(self) -> None:
        """Begin the next round, in which this rank goes through the service without waiting."""
        self.cast(self._rounds.begin(IS_ABSENT, is_waiting=False, is_able=False, votes={}))

    def begin(self, offer: int, is_able: bool) -> int | None:
        """Begin the next round, for which the caller is about to wait. Returns the vote to ``cast``: ``offer``, if this
        rank offers to carry the round out."""
        return self._rounds.begin(offer, is_waiting=True, is_able=is_able, votes=self._previous_votes())

    def cast(self, vote: int | None, address: int = 0, nbytes: int = 0) -> None:
        """Send the vote to all others, if there is one, with the ``nbytes`` bytes at ``address``."""
        if vote is not None:
            self._votes.cast(self._rounds.number, vote, address, nbytes)
        self._votes.forget(self._rounds.number - 1)

    def is_offered_by_all(self) -> bool:
        """Wait for the result of the vote on this round, in which this rank has offered. Raises StallError and the
        error that ends the session."""
        votes, number = self._votes, self._rounds.number

        found: bool | None = None

        def is_known() -> bool:
            nonlocal found
            found = self._rounds.verdict(votes.joined, votes.received(number))
            return found is not None

        votes.wait_until_known(number, is_known, self._name, self._group.timeout_s)
        return bool(found)

    def fetch(self, rank: int, address: int, nbytes: int) -> None:
        """Copy the bytes that came with the vote of ``rank`` to ``address``. Raises ProtocolError if it carries another
        number of bytes."""
        self._votes.fetch(self._rounds.number, rank, address, nbytes)

    def _previous_votes(self) -> dict[int, int]:
        """The others' votes on the previous round."""
        votes = self._votes.received(self._rounds.number)
        if len(votes) < len(self._group.others) and self._rounds.number:
            self._group.peers.take_messages()
            votes = self._votes.received(self._rounds.number)
        return votes
