"""Which pages are locked for copies of a device: each copy lies in one locked range, and no page is locked twice."""

from __future__ import annotations

import random

from byteps_py.system.shm import PAGE
from byteps_py.torch.collectives.cuda import LockedPages


def test_a_slot_that_begins_where_a_smaller_one_began_is_locked_as_a_whole() -> None:
    pages, memory = LockedPages(), memoryview(bytearray(8 * PAGE))
    assert pages.add(PAGE, memory[: 2 * PAGE]) == ([], range(PAGE, 3 * PAGE))
    assert pages.add(PAGE, memory[:PAGE]) == ([], None)
    assert pages.add(PAGE, memory[: 5 * PAGE]) == ([range(PAGE, 3 * PAGE)], range(PAGE, 6 * PAGE))


def test_no_page_is_locked_twice_and_none_is_unlocked() -> None:
    rng = random.Random(1)
    for _ in range(200):
        pages, memory = LockedPages(), memoryview(bytearray(40 * PAGE))
        locked: set[range] = set()
        wanted: list[range] = []
        for _ in range(20):
            start, count = rng.randrange(30), rng.randint(1, 10)
            stop = (start + count) * PAGE - rng.choice((0, 100))
            wanted.append(range(start * PAGE, stop))
            stale, whole = pages.add(start * PAGE, memory[start * PAGE : stop])
            locked -= set(stale)
            if whole is not None:
                assert all(whole.stop <= one.start or one.stop <= whole.start for one in locked)
                locked.add(whole)
            assert all(any(a.start <= w.start and w.stop <= a.stop for a in locked) for w in wanted)
        assert set(pages.clear()) == locked
