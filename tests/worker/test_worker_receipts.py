"""Which pieces have come, and what has yet to be said of it."""

from __future__ import annotations

from byteps_py.worker.core.pieces import Receipts, Way

WAY = Way(1, 7, 0, 2)


def test_a_piece_has_come_with_its_last_byte() -> None:
    receipts = Receipts()
    receipts.arrived(WAY, 1, 4, 10)
    receipts.arrived(WAY, 1, 4, 10)
    assert not receipts.are_due
    assert receipts.say(WAY) == 0
    receipts.arrived(WAY, 1, 2, 10)
    assert receipts.are_due
    assert receipts.say(WAY._replace(target=3)) == 0
    assert receipts.say(WAY) == 1
    assert not receipts.are_due


def test_rounds_may_end_in_another_order_and_each_is_said_once() -> None:
    """A round that has failed goes on coming after the next one has begun."""
    receipts = Receipts()
    receipts.arrived(WAY, 1, 4, 8)
    receipts.arrived(WAY, 2, 8, 8)
    receipts.arrived(WAY, 1, 4, 8)
    assert receipts.say(WAY) == 2
    assert receipts.take_due() == [(WAY, 1)]
    assert receipts.take_due() == []


def test_of_an_empty_piece_nobody_needs_to_hear() -> None:
    receipts = Receipts()
    receipts.arrived(WAY, 1, 0, 0)
    assert not receipts.are_due


def test_on_a_new_connection_the_last_two_rounds_are_said_again() -> None:
    receipts = Receipts()
    other = WAY._replace(machine=2)
    for round_ in (1, 2, 3):
        receipts.arrived(WAY, round_, 8, 8)
    receipts.arrived(other, 1, 8, 8)
    receipts.take_due()
    assert list(receipts.sent_to(1)) == [(WAY, 2), (WAY, 3)]
    assert list(receipts.sent_to(2)) == [(other, 1)]
    receipts.clear()
    assert list(receipts.sent_to(1)) == []
