"""The states of a local rank: what can happen in each, and what follows; and how a group takes ranks in."""

from __future__ import annotations

import pytest

from byteps_py.worker.core import IllegalTransitionError
from byteps_py.worker.core.local_ranks import (
    TRANSITIONS,
    LocalRank,
    LocalRanks,
    RankEvent,
    RankState,
)

A, L, W, P, D, R, T, G = (
    RankState.ABSENT, RankState.LATE, RankState.WAITING, RankState.PRESENT, RankState.DRAINING, RankState.RETURNING,
    RankState.LEFT, RankState.GONE,
)  # fmt: skip
#: A row for each event, a column for each state; None: it can't happen.
EXPECTED: dict[RankEvent, tuple[RankState | None, ...]] = {
    #                          A     L     W     P     D     R     T     G
    RankEvent.COMES:          (W,    W,    None, None, None, W,    W,    W),
    RankEvent.IS_EXPECTED:    (L,    L,    None, None, None, None, None, None),
    RankEvent.IS_WELCOMED:    (None, None, P,    None, None, None, None, None),
    RankEvent.IS_TURNED_AWAY: (None, None, A,    A,    None, None, None, None),
    RankEvent.DRAINS:         (None, None, None, D,    D,    None, None, None),
    RankEvent.IS_DRAINED:     (None, None, None, None, P,    None, None, None),
    RankEvent.GOES_BACK:      (None, None, None, R,    R,    None, None, None),
    RankEvent.SHUTS_DOWN:     (None, None, None, T,    T,    T,    None, None),
    RankEvent.ENDS:           (None, None, A,    A,    A,    A,    G,    None),
    RankEvent.IS_FORGOTTEN:   (A,    A,    None, None, None, None, A,    A),
}  # fmt: skip
STATES = (A, L, W, P, D, R, T, G)


@pytest.mark.parametrize("event", RankEvent)
@pytest.mark.parametrize("state", RankState)
def test_every_event_in_every_state(state: RankState, event: RankEvent) -> None:
    rank = LocalRank[str](3)
    rank.state, rank.connection = state, "it"
    after = EXPECTED[event][STATES.index(state)]
    if after is None:
        with pytest.raises(IllegalTransitionError, match=f"local rank 3 is {state.name} .*: {event.name} can't"):
            rank.happens(event)
        assert rank.state is state
    else:
        rank.happens(event)
        assert rank.state is after
        assert rank.connection == (None if after in (A, L, G) else "it")


def test_every_state_can_be_reached_and_left() -> None:
    reached = {A}
    while more := {after for state in reached for after in TRANSITIONS[state].values()} - reached:
        reached |= more
    assert reached == set(RankState)
    assert all(set(TRANSITIONS[state].values()) - {state} for state in RankState)


def test_the_first_group_takes_its_ranks_by_their_seats_and_waits_for_those_that_are_late() -> None:
    ranks = LocalRanks[str](3, is_elastic=True)
    for seat in (2, 0):
        ranks.comes(ranks[seat], f"process {seat}", False, 0)
    assert not ranks.is_whole
    assert [(rank.seat, rank.local_rank) for rank in ranks.begins(3)] == [(0, 0), (2, 2)]
    assert [rank.state for rank in ranks.group] == [P, L, P]
    assert not ranks.is_whole
    assert [rank.seat for rank in ranks.forget_late()] == [1]
    assert ranks.is_whole


def test_the_only_group_of_a_job_takes_its_ranks_as_they_came() -> None:
    ranks = LocalRanks[str](3)
    for seat in (2, 0, 1):
        ranks.comes(ranks[seat], f"process {seat}", False, 0)
    assert [(rank.seat, rank.local_rank) for rank in ranks.begins(3)] == [(2, 2), (0, 0), (1, 1)]


def test_a_later_group_takes_those_that_wait_by_their_states_and_knows_nothing_of_the_last_one() -> None:
    ranks = LocalRanks[str](3, is_elastic=True)
    for seat in range(3):
        ranks.comes(ranks[seat], "before", False, 0)
    ranks.begins(3)
    ranks[0].happens(RankEvent.SHUTS_DOWN)
    ranks[0].left_s = 4.0
    for seat in (1, 2):
        ranks[seat].happens(RankEvent.GOES_BACK)
        ranks.comes(ranks[seat], "again", True, synced_in=seat)
    assert ranks.left == {0: 4.0}
    assert ranks.is_whole
    assert [(rank.seat, rank.local_rank) for rank in ranks.begins(2)] == [(2, 0), (1, 1)]
    assert ranks[0].state is A
    assert ranks.left == {}


def test_ranks_that_keep_their_numbers_do_so_whatever_state_they_have() -> None:
    ranks = LocalRanks[str](3, is_elastic=True)
    ranks.keep_numbers = True
    for seat in range(3):
        ranks.comes(ranks[seat], "before", False, 0)
    ranks.begins(3)
    for seat in (2, 1):
        ranks[seat].happens(RankEvent.GOES_BACK)
        ranks.comes(ranks[seat], "again", True, synced_in=seat)
    ranks[0].happens(RankEvent.ENDS)
    ranks.comes(ranks[0], "another process", False, 0)
    assert [(rank.seat, rank.local_rank) for rank in ranks.begins(3)] == [(0, 0), (1, 1), (2, 2)]


def test_ranks_that_keep_their_numbers_do_not_move_up_when_one_dies_after_it_was_counted() -> None:
    ranks = LocalRanks[str](2, is_elastic=True)
    ranks.keep_numbers = True
    for seat in range(2):
        ranks.comes(ranks[seat], "before", False, 0)
    ranks.begins(2)
    for seat in range(2):
        ranks[seat].happens(RankEvent.GOES_BACK)
        ranks.comes(ranks[seat], "again", True, synced_in=1)
    ranks[0].happens(RankEvent.ENDS)
    assert [(rank.seat, rank.local_rank) for rank in ranks.begins(2)] == [(1, 1)]
    assert ranks.in_state(RankState.LATE) == []


def test_a_rank_that_has_left_and_its_process_are_counted_until_it_is_taken_in_again() -> None:
    ranks = LocalRanks[str](2)
    for seat in range(2):
        ranks.comes(ranks[seat], "a process", False, 0)
    ranks.begins(2)
    rank = ranks[1]
    rank.happens(RankEvent.SHUTS_DOWN)
    rank.left_s = 4.0
    rank.happens(RankEvent.ENDS)
    rank.gone_s = 5.0
    assert (ranks.left, ranks.gone) == ({1: 4.0}, {1: 5.0})
    ranks.comes(rank, "another process", False, 0)
    assert (ranks.left, ranks.gone) == ({1: 4.0}, {1: 5.0})
    ranks.is_welcomed(rank)
    assert (ranks.left, ranks.gone) == ({}, {})
    assert ranks.connections(P) == ["a process", "another process"]
