"""Servers that this machine can't reach, and whether that may be its own fault. Pure; time is an argument.

    can't be reached ──unsure──► the scheduler asks ──a timeout later, and still not──sure──► its keys go to others

Who hears nobody is not asked, and who was not heard is asked when all is well again. Else one machine that is cut off
from the others would take their servers away.
"""

from __future__ import annotations


class FailureSuspicions:
    def __init__(self) -> None:
        self._until: dict[int, float] = {}  # by member id

    def asked(self, member_id: int, now: float, valid_s: float) -> None:
        """The scheduler wants to know whether it still is so. ``valid_s``: for so long the question may be answered."""
        self._until[member_id] = now + valid_s

    def is_sure(self, member_id: int, now: float) -> bool:
        """It could not be reached again, since the scheduler has asked."""
        until_s = self._until.pop(member_id, None)
        return until_s is not None and now <= until_s
