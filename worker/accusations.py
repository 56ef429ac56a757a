"""Servers that this machine can't reach, and whether that may be its own fault. Pure; time is an argument.

    can't be reached ──unsure──► the scheduler asks ──a timeout later, and still not──sure──► its keys go to others

Who hears nobody is not asked, and who was not heard is asked when all is well again. Else one machine that is cut off
from the others would take their servers away.
"""

from __future__ import annotations


class Accusations:
    """``valid_s``: for so long a question may be answered."""

    def __init__(self, valid_s: float) -> None:
        self._valid_s = valid_s
        self._asked: dict[int, float] = {}  # when, by member id

    def asked(self, member_id: int, now: float) -> None:
        """The scheduler wants to know whether it still is so."""
        self._asked[member_id] = now

    def is_sure(self, member_id: int, now: float) -> bool:
        """It could not be reached again, since the scheduler has asked."""
        asked_s = self._asked.pop(member_id, None)
        return asked_s is not None and now <= asked_s + self._valid_s
