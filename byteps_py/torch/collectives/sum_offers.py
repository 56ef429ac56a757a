"""Whether the ranks of a machine add a round of a named sum themselves: the votes, and their result. Pure; one thread
at a time.

Names may be called in any order, and need not be waited for, so no rank knows what the others do next. But most ranks
do what they did in the previous round. So a rank tells the others that it waits for a round. If all have waited for a
round, each offers to add the next one, and every rank that has waited votes on the next one in any case. All ranks
count as having waited before the first round. A rank that has not waited, and does not wait now, casts no vote: a round
for which no rank waits costs no message.

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
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

#: Votes on a round. An offer is a number from 0 on that identifies the sum.
IS_ABSENT, WAITS = -1, -2


class SharedRounds:
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
