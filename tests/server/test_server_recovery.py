"""A summation server takes a sum again for machines that lack it, from what the others gave and have kept."""

from __future__ import annotations

import dataclasses

import pytest
from test_server_rounds import Actions, answered, given, reduction, refusal, started

from byteps_py.server.round_state import WANT_AFTER_S, WANT_AGAIN_S, Contribution, Want
from byteps_py.server.rounds import Rounds
from byteps_py.wire.data_link import RESENT, SUPPLY, Header, Kind


def wanted(actions: Actions) -> tuple[int, tuple[int, ...]]:
    """(round, machines that are asked for it) of the only action."""
    (action,) = actions
    assert isinstance(action, Want)
    return action.header.round, action.machines


def after_round_1(machines: int) -> Rounds[Contribution]:
    rounds = started(machines)
    for machine in range(machines - 1):
        rounds.contribution(given(machine), 0.0)
    rounds.reduced(reduction(rounds.contribution(given(machines - 1), 0.0)))
    return rounds


def test_only_a_machine_that_lacks_a_completed_round_gets_it_again() -> None:
    rounds = after_round_1(3)
    assert rounds.contribution(given(1, flags=RESENT, origin="a new connection"), 1.0) == []
    assert rounds.is_wanting
    assert rounds.tick(1.0 + WANT_AFTER_S / 2) == []  # others may be about to say the same
    assert wanted(rounds.tick(1.0 + WANT_AFTER_S)) == (1, (0, 2))
    assert rounds.contribution(given(2, flags=RESENT | SUPPLY), 1.1) == []
    assert rounds.tick(1.1) == []
    assert wanted(rounds.tick(1.0 + WANT_AFTER_S + WANT_AGAIN_S)) == (1, (0,))
    round_ = reduction(rounds.contribution(given(0, flags=RESENT | SUPPLY), 1.5))
    assert not rounds.is_wanting
    assert [c.header.sender for c in round_.in_order()] == [0, 1, 2]
    assert [c.origin for c in answered(rounds.reduced(round_))] == ["a new connection"]
    assert rounds.contribution(given(0, flags=RESENT | SUPPLY), 1.6) == []  # it was asked twice
    assert (rounds.counters.bytes_in_flight, rounds.counters.wanted) == (0, 2)


@pytest.mark.parametrize("is_reducing", [False, True])
def test_a_machine_that_resent_for_others_and_then_lacks_the_result_is_answered(is_reducing: bool) -> None:
    rounds = after_round_1(3)
    lacks = given(1, flags=RESENT)
    rounds.contribution(lacks, 1.0)
    rounds.contribution(given(2, flags=RESENT | SUPPLY), 1.1)
    lacks_too = given(2, flags=RESENT)
    if not is_reducing:
        assert rounds.contribution(lacks_too, 1.2) == []
    round_ = reduction(rounds.contribution(given(0, flags=RESENT | SUPPLY), 1.3))
    if is_reducing:
        assert rounds.contribution(lacks_too, 1.4) == []
    assert rounds.contribution(given(2, flags=RESENT | SUPPLY), 1.5) == []  # does not take its question back
    assert answered(rounds.reduced(round_)) == [lacks, lacks_too]
    assert rounds.counters.bytes_in_flight == 0


@pytest.mark.parametrize("first", ["who is ahead", "who is behind"])
def test_on_a_new_server_one_machine_may_be_a_round_ahead(first: str) -> None:
    """It had the answer of the server before this one, another had not."""
    rounds = started(2)
    ahead, behind = given(0, round=6), given(1, round=5, flags=RESENT)
    for contribution in (ahead, behind) if first == "who is ahead" else (behind, ahead):
        assert rounds.contribution(contribution, 0.0) == []
    assert wanted(rounds.tick(1.0)) == (5, (0,))
    round_ = reduction(rounds.contribution(given(0, round=5, flags=RESENT | SUPPLY), 1.1))
    assert answered(rounds.reduced(round_)) == [behind]
    round_ = reduction(rounds.contribution(given(1, round=6), 1.2))
    assert answered(rounds.reduced(round_))[0] is ahead
    assert rounds.counters.bytes_in_flight == 0


def test_rounds_that_no_machine_lacks_may_not_overlap() -> None:
    rounds = started(2)
    rounds.contribution(given(0, round=5), 0.0)
    assert refusal(rounds.contribution(given(1, round=6), 0.0))[0] == [0, 1]


def test_an_answer_goes_to_the_newer_connection() -> None:
    rounds = started(2)
    rounds.contribution(given(0), 0.0)
    round_ = reduction(rounds.contribution(given(1), 0.0))
    assert rounds.contribution(given(1, origin="a new connection", flags=RESENT), 0.0) == []
    assert [c.origin for c in answered(rounds.reduced(round_))] == ["connection of machine 0", "a new connection"]


@pytest.mark.parametrize("is_reducing", [False, True])
def test_an_answer_goes_to_the_place_where_it_is_wanted_now(is_reducing: bool) -> None:
    """The partition left the server of machine 1, and is there again before that has added it up. What took it back
    came too late, or was not needed."""
    rounds = started(2)
    before, other = given(1, answer_segment=1, answer_offset=64), given(0)
    now = given(1, answer_segment=1, answer_offset=128, flags=RESENT)
    same = given(1, answer_segment=1, answer_offset=128, flags=RESENT)
    rounds.contribution(before, 0.0)
    if not is_reducing:
        assert rounds.contribution(now, 0.0) == []
    round_ = reduction(rounds.contribution(other, 0.0))
    if is_reducing:
        rounds.withdraw(withdrawal(before))
        assert rounds.contribution(now, 0.0) == []
    assert rounds.contribution(same, 0.0) == []  # a mere repetition
    assert answered(rounds.reduced(round_)) == [other, now]
    assert rounds.counters.bytes_in_flight == 0


@pytest.mark.parametrize("is_reducing", [False, True])
def test_what_comes_late_from_a_closed_connection_replaces_nothing(is_reducing: bool) -> None:
    """Machine 1 has closed it, and opened another one to the same server; then its end is noticed, too."""
    rounds = started(2)
    late, now = given(1, origin="closed", flags=RESENT), given(1, epoch=2, origin="open", flags=RESENT)
    other = given(0, epoch=2)
    rounds.epoch = 2
    rounds.contribution(now, 0.0)
    if not is_reducing:
        assert rounds.contribution(late, 0.0) == []
        rounds.on_origin_lost("closed")
    round_ = reduction(rounds.contribution(other, 0.0))
    if is_reducing:
        assert rounds.contribution(late, 0.0) == []
    assert answered(rounds.reduced(round_)) == [other, now]
    assert rounds.counters.bytes_in_flight == 0


def test_what_was_given_before_the_partition_moved_and_came_back_may_arrive_after_the_next_round() -> None:
    """Another server has added round 1 meanwhile. This one was frozen, and reads its connections in any order."""
    rounds = started(3)
    rounds.epoch = 3
    last, *others = [given(machine, round=2, epoch=3, flags=RESENT) for machine in (1, 0, 2)]
    for contribution in others:
        assert rounds.contribution(contribution, 0.0) == []
    assert rounds.contribution(given(1, origin="an older connection"), 0.0) == []
    assert len(answered(rounds.reduced(reduction(rounds.contribution(last, 0.0))))) == 3
    assert rounds.counters.bytes_in_flight == 0


def test_all_resend_at_once_and_no_machine_is_asked() -> None:
    rounds = started(2)
    rounds.contribution(given(0, flags=RESENT), 0.0)
    round_ = reduction(rounds.contribution(given(1, flags=RESENT), 0.0))
    assert rounds.tick(1.0) == []
    assert len(answered(rounds.reduced(round_))) == 2


def withdrawal(contribution: Contribution) -> Header:
    """Of ``contribution``, because the partition goes to another server in the next epoch."""
    return dataclasses.replace(contribution.header, epoch=contribution.header.epoch + 1)


def test_a_late_withdrawal_takes_no_newer_contribution() -> None:
    """The partition went away in epoch 2 and came back in epoch 3; the withdrawal comes twice."""
    rounds = started(2)
    rounds.contribution(given(0), 0.0)
    for epoch in (2, 3):
        assert rounds.membership(epoch, 2, 0.1, since_epoch=1) == []
    late = withdrawal(given(0))
    rounds.withdraw(late)
    assert rounds.contribution(given(0, epoch=3, flags=RESENT), 0.2) == []
    rounds.withdraw(late)
    assert len(answered(rounds.reduced(reduction(rounds.contribution(given(1, epoch=3), 0.3))))) == 2

    rounds = started(2)  # it does not know of epoch 3 yet
    rounds.contribution(given(0, epoch=3, flags=RESENT), 0.0)
    rounds.withdraw(late)
    rounds.contribution(given(1, epoch=3), 0.0)
    (action,) = rounds.membership(3, 2, 0.1, since_epoch=1)
    assert reduction([action]).in_order()


def test_a_contribution_that_is_given_again_before_its_withdrawal_comes_stays() -> None:
    """The partition went away in epoch 2 and came back in epoch 3; the withdrawal comes after that."""
    rounds = started(2)
    rounds.contribution(given(0), 0.0)
    for epoch in (2, 3):
        assert rounds.membership(epoch, 2, 0.1, since_epoch=1) == []
    assert rounds.contribution(given(0, epoch=3, flags=RESENT), 0.2) == []
    rounds.withdraw(withdrawal(given(0)))
    assert rounds.contribution(given(0), 0.2) == []  # the first one comes once more
    rounds.withdraw(withdrawal(given(0)))
    assert rounds.counters.bytes_in_flight == 64
    assert len(answered(rounds.reduced(reduction(rounds.contribution(given(1, epoch=3), 0.3))))) == 2


def test_contributions_for_another_server_are_withdrawn() -> None:
    rounds = started(2)
    contribution = given(0)
    rounds.contribution(contribution, 0.0)
    rounds.withdraw(withdrawal(contribution))
    assert (rounds.counters.bytes_in_flight, rounds.stalled(9.0)) == (0, [])
    rounds.withdraw(withdrawal(given(0, key=99)))
    rounds.withdraw(withdrawal(given(0, generation=9)))
    round_ = reduction([*rounds.contribution(given(0), 0.0), *rounds.contribution(given(1), 0.0)])
    rounds.withdraw(withdrawal(given(0)))  # too late: the thread pool reads it
    assert len(answered(rounds.reduced(round_))) == 2


@pytest.mark.parametrize("first", [1, 2])
def test_contributions_of_an_earlier_connection_do_not_count(first: int) -> None:
    """The partition went to another server, which completed round 1, and moved back; the withdrawal was lost."""
    rounds = started(2)
    old, new = given(0, round=1), given(0, round=2, origin="a new connection", flags=RESENT)
    for contribution in (old, new) if first == 1 else (new, old):
        assert rounds.contribution(contribution, 0.0) == []
    assert rounds.counters.bytes_in_flight == new.nbytes
    round_ = reduction(rounds.contribution(given(1, round=2), 0.1))
    assert [c.header.round for c in round_.in_order()] == [2, 2]
    rounds.reduced(round_)
    assert rounds.counters.bytes_in_flight == 0


def test_contributions_of_an_earlier_epoch_do_not_count() -> None:
    """As before, but another machine is the first to return."""
    rounds = started(3)
    for machine in (0, 1):
        assert rounds.contribution(given(machine, round=1), 0.0) == []
    assert rounds.membership(rounds.epoch + 2, 3, 0.1, since_epoch=1) == []
    new = [given(machine, round=2, epoch=rounds.epoch, origin="new", flags=RESENT) for machine in (1, 2, 0)]
    assert rounds.contribution(new[0], 0.1) == []
    assert rounds.counters.bytes_in_flight == new[0].nbytes
    assert rounds.contribution(new[1], 0.1) == []
    round_ = reduction(rounds.contribution(new[2], 0.1))
    assert [c.header.round for c in round_.in_order()] == [2, 2, 2]
    rounds.reduced(round_)
    assert rounds.counters.bytes_in_flight == 0


def test_a_machine_that_lacks_a_result_since_an_earlier_epoch_still_gets_it() -> None:
    """The partition stayed where it is when the epoch changed."""
    rounds = started(2)
    behind = given(0, round=1, flags=RESENT)
    assert rounds.contribution(behind, 0.0) == []
    assert rounds.membership(rounds.epoch + 1, 2, 0.0, since_epoch=1) == []
    assert rounds.contribution(given(1, round=2, epoch=rounds.epoch), 0.1) == []
    assert wanted(rounds.tick(1.0)) == (1, (1,))
    round_ = reduction(rounds.contribution(given(1, round=1, flags=RESENT | SUPPLY), 1.1))
    assert answered(rounds.reduced(round_)) == [behind]


def test_a_sum_that_takes_longer_than_another_server_does_not_hold_up_later_rounds() -> None:
    """The partition went there while this one was adding round 1 up, and is back with round 2."""
    rounds = started(2)
    rounds.contribution(given(0), 0.0)
    slow = reduction(rounds.contribution(given(1), 0.0))
    assert "round 1 is not delivered yet" in refusal(rounds.contribution(given(0, round=2), 0.0))[1]
    assert rounds.membership(rounds.epoch + 2, 2, 0.1, since_epoch=1) == []
    rounds.withdraw(withdrawal(given(0)))  # too late
    new = [given(machine, round=2, epoch=rounds.epoch) for machine in range(2)]
    assert rounds.contribution(new[0], 0.1) == []
    round_ = reduction(rounds.contribution(new[1], 0.1))
    rounds.reduced(slow)
    assert answered(rounds.reduced(round_)) == new
    assert "round 2 is complete" in refusal(rounds.contribution(given(0, epoch=rounds.epoch), 0.2))[1]
    assert rounds.counters.bytes_in_flight == 0


@pytest.mark.parametrize("flags", [0, RESENT])
def test_contributions_to_a_round_that_all_have_do_not_count(flags: int) -> None:
    """It was given here, then the partition went to another server, and word of it was lost; now it comes back: who
    gives to round 7 has the result of round 6, to which all gave, with that of round 5."""
    rounds = started(2)
    left, new = given(0, round=5, flags=flags), given(1, round=7)
    assert rounds.contribution(left, 0.0) == []
    machines, text = refusal(rounds.contribution(new, 0.0))  # should it wait for that after all, it ends the job
    assert machines == [0]
    assert "machine 0 gave round 5" in text
    assert rounds.counters.bytes_in_flight == new.nbytes
    assert not rounds.is_wanting
    machines, text = refusal(rounds.contribution(given(0, round=5, flags=flags), 0.0))
    assert machines == [0]
    assert "round 7 is in flight" in text
    round_ = reduction(rounds.contribution(given(0, round=7), 0.1))
    assert [c.header.round for c in round_.in_order()] == [7, 7]


def test_resent_contributions_are_forgotten_with_the_last_waiting_machine() -> None:
    """The partition goes to another server while this one asks for what a machine lacks."""
    rounds = started(3)
    lacks = given(1, round=5, flags=RESENT)
    rounds.contribution(lacks, 0.0)
    rounds.contribution(given(0, round=5, flags=RESENT | SUPPLY), 0.1)
    rounds.withdraw(withdrawal(lacks))
    assert (rounds.counters.bytes_in_flight, rounds.is_wanting, rounds.stalled(9.0)) == (0, False, [])
    assert rounds.contribution(given(1, round=33), 1.0) == []  # it has come back


def test_contributions_that_wait_for_a_newer_epoch_are_withdrawn_too() -> None:
    """The partition came here and went away again before this server heard of either."""
    rounds = started(2)
    rounds.contribution(given(0, round=5, epoch=rounds.epoch + 1), 0.0)
    kept = given(1, round=5, epoch=rounds.epoch + 1)
    rounds.contribution(kept, 0.0)
    rounds.withdraw(withdrawal(given(0, round=5, epoch=rounds.epoch + 1)))
    assert rounds.counters.bytes_in_flight == kept.nbytes
    rounds.withdraw(withdrawal(kept))
    assert rounds.membership(rounds.epoch + 2, 2, 0.1) == []
    assert rounds.counters.bytes_in_flight == 0
    assert rounds.contribution(given(1, round=33), 1.0) == []  # it has come back


def test_a_resent_round_without_waiting_machines_does_not_delay_later_rounds() -> None:
    """A machine has said the same twice, and had its answer between."""
    rounds = after_round_1(2)
    again = [given(machine, flags=RESENT, origin="a new connection") for machine in range(2)]
    slow = reduction([*rounds.contribution(again[0], 0.0), *rounds.contribution(again[1], 0.0)])
    for number in (2, 3):
        new = [given(machine, round=number) for machine in range(2)]
        round_ = reduction([*rounds.contribution(new[0], 0.1), *rounds.contribution(new[1], 0.1)])
        assert answered(rounds.reduced(round_)) == new
    rounds.reduced(slow)
    assert "round 3 is complete" in refusal(rounds.contribution(given(0, round=3), 0.2))[1]
    assert rounds.counters.bytes_in_flight == 0


def test_of_a_round_before_the_last_nothing_is_known() -> None:
    rounds = after_round_1(2)
    rounds.contribution(given(0, round=2), 0.0)
    rounds.reduced(reduction(rounds.contribution(given(1, round=2), 0.0)))
    assert "round 2 is complete" in refusal(rounds.contribution(given(0, flags=RESENT), 0.0))[1]


def test_ranks_that_joined_are_asked_too() -> None:
    rounds = started(2)
    rounds.contribution(given(0, flags=RESENT), 0.0)
    assert wanted(rounds.tick(1.0)) == (1, (1,))
    answer = given(1, kind=Kind.PASS, nbytes=0, flags=RESENT | SUPPLY)
    assert len(answered(rounds.reduced(reduction(rounds.contribution(answer, 1.0))))) == 1


def test_a_round_that_no_machine_lacks_any_more_is_forgotten() -> None:
    """It was given to this server and then answered by the one before it after all."""
    rounds = started(2)
    rounds.contribution(given(0, round=5, flags=RESENT), 0.0)
    rounds.contribution(given(0, round=6), 0.1)
    rounds.reduced(reduction(rounds.contribution(given(1, round=6), 0.1)))
    assert (rounds.is_wanting, rounds.counters.bytes_in_flight) == (False, 0)
    rounds.contribution(given(0, round=7), 0.2)
    assert len(answered(rounds.reduced(reduction(rounds.contribution(given(1, round=7), 0.2))))) == 2


def test_a_server_without_a_share_keeps_nothing_that_waits() -> None:
    """Machines close their connections to it, and take nothing back."""
    rounds = started(3)
    assert rounds.contribution(given(0), 0.0) == []
    assert rounds.membership(rounds.epoch + 1, 3, 0.1, since_epoch=1, has_share=False) == []
    assert rounds.contribution(given(1), 0.2) == []  # it does not know of the epoch yet
    assert rounds.stalled(60.0) == []
    assert rounds.counters.bytes_in_flight == 0
    assert rounds.membership(rounds.epoch + 1, 3, 0.3, since_epoch=1) == []
    for machine in range(2):
        assert rounds.contribution(given(machine, round=5, epoch=rounds.epoch), 0.4) == []
    round_ = reduction(rounds.contribution(given(2, round=5, epoch=rounds.epoch), 0.4))
    assert [c.header.round for c in round_.in_order()] == [5, 5, 5]


def test_a_sum_under_way_when_the_share_goes_is_answered() -> None:
    rounds = started(2)
    contributions = [given(machine) for machine in range(2)]
    rounds.contribution(contributions[0], 0.0)
    round_ = reduction(rounds.contribution(contributions[1], 0.0))
    assert rounds.membership(rounds.epoch + 1, 2, 0.1, since_epoch=1, has_share=False) == []
    assert answered(rounds.reduced(round_)) == contributions
    assert rounds.counters.bytes_in_flight == 0
