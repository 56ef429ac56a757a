"""Whether the ranks of a machine add a round of a name up among themselves, and what each says to the others for it.
Pure; one thread at a time.

Names may be called in any order, and need not be waited for, so no rank knows what the others do next. But most do what
they did in the round before. So a rank tells the others that it waits for a round, in the next one it offers to add up
if all have waited, and all that have waited say something about the next one, too. They are taken to have waited before
the first. A rank that has not, and does not now, says nothing: what nobody waits for costs no message.

    of the round before                   in this round           says
    -----------------------------------   ---------------------   ---------------
    all have waited                       waits, is able          OFFERS
    somebody has not; or not able         waits                   WAITS
    it has waited itself                  does not wait           IS_ABSENT
    it has not                            does not wait           nothing

If all offer the same, they add up among themselves. Else all go through the service; who has not offered may do so at
once, who has hears from all others: as they have waited, each says something. What is said of a round comes before its
speaker's contribution to it, so it is there when the next one begins; where it is not, the rank merely does not offer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

#: What a rank says of a round; an offer is a number from 0 on that says what is to be added up.
IS_ABSENT, WAITS = -1, -2


class SharedRounds:
    """Of one name, as one rank sees them. ``others``: the other ranks."""

    def __init__(self, others: Collection[int]) -> None:
        self._others = others
        self.number = 0  # of the round that has begun last
        self._has_waited = True
        self._offer = -1  # in that round

    def begin(self, offer: int, is_waiting: bool, is_able: bool, said: Mapping[int, int]) -> int | None:
        """The next round. Returns what to say to all others, or None. ``said``: what they have said of the round
        before."""
        self.number += 1
        has_waited, self._has_waited = self._has_waited, is_waiting
        self._offer = -1
        if not is_waiting:
            return IS_ABSENT if has_waited else None
        if not (is_able and has_waited and (self.number == 1 or self._all_waited(said))):
            return WAITS
        self._offer = offer
        return offer

    def verdict(self, joined: Collection[int], said: Mapping[int, int]) -> bool | None:
        """Whether this round, for which this rank has offered, is added up here. None: others have yet to say
        something. ``joined``: ranks that say nothing any more; ``said``: of this round, looked at after that."""
        answers = [said.get(other) for other in self._others]
        offers, missing = answers.count(self._offer), answers.count(None)
        if not missing or offers + missing < len(answers):
            return offers == len(answers)
        if not joined:
            return None
        return False if any(other in joined for other in self._others if other not in said) else None

    def _all_waited(self, said: Mapping[int, int]) -> bool:
        return all(said.get(other, IS_ABSENT) != IS_ABSENT for other in self._others)
