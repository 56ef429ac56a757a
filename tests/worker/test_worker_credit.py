"""Which partition is pushed next: events in, partitions out."""

from __future__ import annotations

import pytest
from support import worker_core as core

from byteps_py.worker.core.credit import PushQueue
from byteps_py.worker.core.tensor import Part


def parts(*lengths: int) -> list[Part]:
    tensor = core.tensor([core.slot(0)])
    return [Part(tensor, i, 0, length, 0) for i, length in enumerate(lengths)]


def taken(queue: PushQueue, now: float = 0.0) -> list[int]:
    """Indices of all that may go now."""
    found = []
    while (part := queue.take(now)) is not None:
        found.append(part.index)
    return found


# (credit, [(length, priority)], what goes at once)
AT_ONCE = [
    (0, [], []),
    (0, [(9, 0), (9, 0)], [0, 1]),  # 0: no limit
    (10, [(4, 0), (6, 0), (1, 0)], [0, 1]),  # up to the limit, and not beyond
    (10, [(4, 0), (7, 5), (1, 9)], [2, 1]),  # higher priority first
    (10, [(4, 1), (4, 1), (4, 1)], [0, 1]),  # first come, first served within one
    (10, [(11, 0), (1, 0)], [0]),  # larger than the credit: goes alone
    (10, [(1, 0), (11, 0)], [0]),  # but not beside others
    (10, [(8, 2), (5, 1), (1, 0)], [0]),  # what is due next is not overtaken by what would fit
    (10, [(1, -3), (1, 3), (1, 0)], [1, 2, 0]),
]


@pytest.mark.parametrize(("credit_bytes", "queued", "expected"), AT_ONCE)
def test_what_goes_at_once(credit_bytes: int, queued: list[tuple[int, int]], expected: list[int]) -> None:
    queue = PushQueue(credit_bytes)
    for part, (_, priority) in zip(parts(*(length for length, _ in queued)), queued, strict=True):
        queue.add(part, priority)
    assert taken(queue) == expected
    assert queue.in_flight_bytes == sum(queued[i][0] for i in expected)
    assert len(queue) == len(queued) - len(expected)


def test_credit_given_back_lets_the_next_go() -> None:
    queue = PushQueue(10)
    first, second, third = parts(6, 4, 5)
    for part in (first, second, third):
        queue.add(part, 0)
    assert taken(queue) == [0, 1]
    queue.give_back(second)
    assert taken(queue) == []  # 6 + 5 are too many
    queue.give_back(first)
    assert taken(queue) == [2]
    queue.give_back(third)
    assert queue.in_flight_bytes == 0


def test_what_others_wait_for_goes_whatever_is_in_flight() -> None:
    queue = PushQueue(10)
    tensor = core.tensor([core.slot(0)])
    made = [Part(tensor, index, 0, 6, server) for index, server in enumerate((1, 1, 2, 2, 1))]
    for part in made[:4]:
        queue.add(part, 0)
    assert taken(queue) == [0]
    queue.hasten({made[3]})
    queue.add(made[4], -1, is_awaited=True)
    assert taken(queue) == [3, 4]  # server 2's turn comes first
    assert queue.in_flight_bytes == 18
    queue.give_back(made[0])
    queue.give_back(made[4])
    assert taken(queue) == []  # 6 + 6 are too many for what nobody waits for
    queue.give_back(made[3])
    assert taken(queue) == [2]


def test_who_is_very_late_holds_no_credit_of_others() -> None:
    queue = PushQueue(10)
    queue.patience_s = 1.0
    first, second, *others = parts(5, 5, 5, 10, 10)
    for part in (first, second, *others):
        queue.add(part, 0)
    assert taken(queue, 1.0) == [0, 1]
    queue.give_back(first)
    assert taken(queue, 1.5) == [2]
    assert taken(queue, 1.9) == []
    assert taken(queue, 2.0) == []  # the second holds none any more; the third has its time, too
    assert queue.in_flight_bytes == 5
    assert taken(queue, 2.5) == [3]
    queue.give_back(second)  # late: it has given its credit back already
    assert queue.in_flight_bytes == 10
    assert taken(queue, 3.0) == []
    assert taken(queue, 3.5) == [4]


def test_dropped_partitions_are_forgotten_and_the_rest_keeps_its_order() -> None:
    queue = PushQueue(0)
    all_parts = parts(1, 1, 1, 1)
    for part, priority in zip(all_parts, (0, 3, 2, 1), strict=True):
        queue.add(part, priority)
    queue.drop({all_parts[2]})
    assert taken(queue) == [1, 3, 0]
    queue.drop(set(all_parts))
    assert taken(queue) == []


def test_servers_take_turns_in_proportion_to_their_weights() -> None:
    queue = PushQueue(0)
    queue.set_weights({1: 3, 2: 1})
    tensor = core.tensor([core.slot(0)])
    for index in range(12):  # all of server 1's first, as one large tensor may well be placed
        queue.add(Part(tensor, index, 0, 6, 1 if index < 9 else 2), 0)
    order = []
    while (part := queue.take(0.0)) is not None:
        order.append(part.server)
    assert order == [1, 2, 1, 1] * 3


def test_what_others_wait_for_goes_before_what_is_more_urgent() -> None:
    queue = PushQueue(0)
    all_parts = parts(1, 1, 1, 1, 1)
    for part, priority, is_awaited in zip(all_parts, (0, 9, 3, 1, 2), (0, 0, 1, 0, 0), strict=True):
        queue.add(part, priority, bool(is_awaited))
    queue.hasten({all_parts[0], all_parts[3]})
    queue.hasten(set())
    assert taken(queue) == [2, 3, 0, 1, 4]  # by priority among these


def test_what_others_wait_for_is_so_with_another_server_too_and_takes_turns_there() -> None:
    queue = PushQueue(0)
    tensor = core.tensor([core.slot(0)])
    made = [Part(tensor, index, 0, 6, 1 + index % 2) for index in range(6)]
    for part in made:
        queue.add(part, -part.index)
    queue.hasten({made[4], made[5]})
    made[4].server = 2
    queue.move(made[4], 1)
    assert taken(queue) == [4, 0, 5, 2, 1, 3]


def test_an_idle_server_saves_up_no_turns() -> None:
    queue = PushQueue(0)
    tensor = core.tensor([core.slot(0)])
    for index in range(4):
        queue.add(Part(tensor, index, 0, 6, 1), 0)
    assert [queue.take(0.0).server for _ in range(3)] == [1, 1, 1]  # type: ignore[union-attr]
    for index in range(4, 7):
        queue.add(Part(tensor, index, 0, 6, 2), 0)
    assert [queue.take(0.0).server for _ in range(4)] == [2, 1, 2, 2]  # type: ignore[union-attr]


# ---- servers take turns ------------------------------------------------------------------------------------------


def queued(weights: dict[int, int], lengths: dict[int, list[int]]) -> tuple[PushQueue, list[Part]]:
    """A queue without a limit, in which each server's partitions wait."""
    queue = PushQueue(0)
    queue.set_weights(weights)
    tensor = core.tensor([core.slot(0)])
    waiting = [Part(tensor, i, 0, length, server) for server in lengths for i, length in enumerate(lengths[server])]
    for part in waiting:
        queue.add(part, 0)
    return queue, waiting


def order(queue: PushQueue, count: int = 100) -> list[int]:
    """The servers of the next ``count`` partitions."""
    found = []
    while len(found) < count and (part := queue.take(0.0)) is not None:
        found.append(part.server)
    return found


# (weights, each server's partitions' lengths, servers in the order of their turns)
TURNS = [
    ({1: 1, 2: 1}, {1: [8] * 3, 2: [8] * 3}, [1, 2, 1, 2, 1, 2]),
    ({1: 3, 2: 1}, {1: [9] * 6, 2: [9] * 2}, [1, 2, 1, 1, 1, 2, 1, 1]),
    ({1: 1, 2: 1}, {1: [4] * 4, 2: [8] * 2}, [1, 2, 1, 1, 2, 1]),  # bytes count, not partitions
    ({}, {1: [8], 2: [8, 8]}, [1, 2, 2]),  # unknown ones count as 1
]


@pytest.mark.parametrize(("weights", "lengths", "expected"), TURNS)
def test_servers_take_turns_by_weight(
    weights: dict[int, int], lengths: dict[int, list[int]], expected: list[int]
) -> None:
    queue, _ = queued(weights, lengths)
    assert order(queue) == expected


def test_a_head_start_is_granted_whenever_nothing_is_in_flight_and_only_then() -> None:
    queue = PushQueue(0)
    queue.set_weights({}, {1: 16})
    tensor = core.tensor([core.slot(0)])
    waiting = [Part(tensor, i, 0, 8, 1 + i // 4) for i in range(8)]
    with_head_start = [1, 1, 1, 2, 1, 2, 2, 2]
    for part in waiting:
        queue.add(part, 0)
    assert order(queue) == with_head_start
    for part in waiting[1:]:
        queue.give_back(part)
    more = [Part(tensor, i, 0, 8, 2 - i % 2) for i in range(4)]
    for part in more:  # beside one that is in flight
        queue.add(part, 0)
    assert order(queue) == [1, 2, 1, 2]
    for part in (waiting[0], *more):
        queue.give_back(part)
    for part in waiting:
        queue.add(part, 0)
    assert order(queue) == with_head_start


def test_a_server_that_comes_later_has_its_head_start_before_those_that_wait() -> None:
    queue, waiting = queued({}, {2: [8] * 6})
    queue.set_weights({}, {1: 16})
    assert order(queue, 2) == [2, 2]
    for i in range(4):
        queue.add(Part(waiting[0].tensor, i, 0, 8, 1), 0)
    assert order(queue) == [1, 1, 1, 2, 1, 2, 2, 2]


def test_a_server_saves_no_turns_while_it_has_nothing() -> None:
    queue, waiting = queued({}, {1: [8] * 6})
    assert order(queue, 3) == [1, 1, 1]
    for i in range(4):
        queue.add(Part(waiting[0].tensor, i, 0, 8, 2), 0)
    assert order(queue) in ([1, 2, 1, 2, 1, 2, 2], [2, 1, 2, 1, 2, 1, 2])


def test_a_server_whose_partitions_were_dropped_is_left_out() -> None:
    queue, waiting = queued({}, {1: [8, 8], 2: [8, 8]})
    queue.drop({part for part in waiting if part.server == 1})
    assert len(queue) == 2
    assert order(queue) == [2, 2]
