"""The table on which the compiled steps of a sum in shared memory (jit/all_reduce_kernels.py) work: unsigned 64-bit
numbers, which are their input, and the control lines and slots of each rank. Pure; any thread.

Sizes and offsets within the tensor are in bytes; addresses are those of this process.
"""

from __future__ import annotations

import enum
from array import array

#: Slots of a rank: a power of two. Two would be enough, but the slot of two steps ago is still in the caches of its
#: readers and has to be fetched from there: with four, sums of 4 MB take half of the time where that is slow, and
#: nowhere longer.
SLOTS = 4
#: Offsets in a rank's control lines, to which only that rank writes. WORD: steps published so far, in all operations of
#: its era. ASLEEP: whether it sleeps. RECORDS: its current operation, and the one before or after it.
WORD, ASLEEP, RECORDS = 0, 64, 128
#: The bit from which on a word holds the era; the largest lead of one rank over another within an era.
ERA_BIT, AHEAD = 40, 1 << 39


class Status(enum.IntEnum):
    """Why the steps have returned: what the caller has to do before it calls again."""

    DONE = 0
    WAITS = 1  # they have polled long enough for the steps of others: sleep until those are published
    WAKE = 2  # a member sleeps that waits for the step just published: wake it
    ADD = 3  # no instructions exist for the sum of the own share: add it
    DIFFERS = 4  # a member is in another operation: report it


class TableEntry(enum.IntEnum):
    """Indices into the table. Entries before BASE change during the operation."""

    STATUS = 0
    STEP = 1  # the next step, or the one under way
    IS_ADDED = 2  # the caller has added, in this step
    IS_TRY = 3  # the next copy goes the other way than IS_PAST says
    TOOK_NS = 4  # duration of copies through the caches, and their bytes
    TOOK_BYTES = 5
    TOOK_PAST_NS = 6  # the same, past the caches
    TOOK_PAST_BYTES = 7
    FIRST_STEP_ONLY = 8  # write the first step, and no more
    BASE = 9  # steps published in operations before this one, as WORD counts
    CHUNKS = 10
    FIRST_STEP_KNOWN = 11  # the others are known to have written their first step, perhaps without publishing it
    OWN = 12  # this member's position
    SOURCE = 13  # address
    TARGET = 14  # address, always of the whole tensor; 0: only the others need the result
    SCATTERS = 15  # each member needs its own share only
    SHARE = 16
    CHUNK_BYTES = 17
    TOTAL = 18
    KEY = 19  # of the operation's name
    RECORD = 20  # offset of the operation's record in the control lines
    SLOT_BYTES = 21
    FIRST_SPIN_NS = 22  # how long to poll before sleeping: for the first step
    SPIN_NS = 23  # and for later steps
    IS_PAST = 24  # copies go past the caches
    STREAM = 25  # address of the function that copies past the caches
    ADD = 26  # address of the function that adds, or 0
    ADD_PAST = 27  # the same, with the copy past the caches
    MEMBERS = 28
    CONTROLS = 29  # the first of the addresses of the members' control lines, by position


def slots_at(members: int) -> int:
    """The index of the first of the addresses of the members' slots, by position."""
    return TableEntry.CONTROLS + members


def rows_at(members: int) -> int:
    """The index of the first of the addresses for an addition: each member's row by position, the result, and its
    copy."""
    return TableEntry.CONTROLS + 2 * members


def new_table(members: int) -> array[int]:
    """A table of zeros, except MEMBERS."""
    table = array("Q", bytes(8 * (rows_at(members) + members + 2)))
    table[TableEntry.MEMBERS] = members
    return table
