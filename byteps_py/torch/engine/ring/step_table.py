"""What the compiled steps of a sum in shares (steps.py) go by: a table of unsigned 64-bit numbers. Pure.

Sizes and places within the tensor are in bytes; addresses are those of this process.
"""

from __future__ import annotations

import enum
from array import array


class Status(enum.IntEnum):
    """Why the steps have returned: what the caller has to do before it calls again."""

    DONE = 0
    WAITS = 1  # they have looked for long enough whether others have laid theirs: to sleep until they have
    WAKE = 2  # somebody sleeps who waits for what has just been laid: to wake it
    ADD = 3  # the sum of the own share, for which there are no instructions: to add it
    DIFFERS = 4  # somebody is in another operation: to say so


class TableEntry(enum.IntEnum):
    """Places in the table. Those before BASE change."""

    STATUS = 0
    STEP = 1  # the one to be taken, or under way
    IS_ADDED = 2  # the caller has added, in this step
    IS_TRY = 3  # the next copy goes the other way than IS_PAST says
    TOOK_NS = 4  # copies through the caches, and what they copied
    TOOK_BYTES = 5
    TOOK_PAST_NS = 6  # the same, past the caches
    TOOK_PAST_BYTES = 7
    IS_OFFER = 8  # to write the first step, and no more
    BASE = 9  # steps laid in operations before this one, as WORD counts
    CHUNKS = 10
    IS_TOLD = 11  # others are known to have written their first step, which they may not have laid
    OWN = 12  # this member's position
    SOURCE = 13  # address
    TARGET = 14  # address, of the whole in any case; or 0: the result is for others only
    SCATTERS = 15  # each member has its own share only
    SHARE = 16
    ROOM = 17
    TOTAL = 18
    KEY = 19  # what all members call the operation
    RECORD = 20  # where members have it, within their control lines
    SLOT_BYTES = 21
    FIRST_PATIENCE_NS = 22  # how long to look before one sleeps, for the first step,
    PATIENCE_NS = 23  # and for others
    IS_PAST = 24  # copies go past the caches
    STREAM = 25  # address of what copies so
    ADD = 26  # address of what adds, or 0
    ADD_PAST = 27  # the same, with the copy past the caches
    MEMBERS = 28
    CONTROLS = 29  # from here on, by position, the addresses of members' control lines;


def slots_at(members: int) -> int:
    """the place of the first one's slots;"""
    return TableEntry.CONTROLS + members


def rows_at(members: int) -> int:
    """and that of the addresses of what is added: each member's, in order, the result, and its copy."""
    return TableEntry.CONTROLS + 2 * members


def new_table(members: int) -> array[int]:
    """All zeros but MEMBERS."""
    table = array("Q", bytes(8 * (rows_at(members) + members + 2)))
    table[TableEntry.MEMBERS] = members
    return table
