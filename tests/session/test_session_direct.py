"""Gathers and exchanges beside a real communication service of one machine."""

from __future__ import annotations

import uuid

from support.sessions import WAIT_S, declare, failure, sum_once_more

from byteps_py.errors import MismatchError, StallError, UsageError
from byteps_py.session import Slot
from byteps_py.session.service.remote import RemoteSession
from byteps_py.tensors import DType, Layout, Op, Sizes, TensorSpec

EMPTY = (0, 0)


def spec(op: Op, room_in: int, room_out: int, name: str = "", **facts: object) -> TensorSpec:
    return TensorSpec(name or f"direct-{uuid.uuid4()}", DType.UINT8, (room_in, room_out), op, **facts)  # type: ignore[arg-type]


def give(session: RemoteSession, slot: Slot, data: bytes, layout: Layout | None = None) -> None:
    slot.input[: len(data)] = data
    session.hand_over(slot, layout=layout)


def got(session: RemoteSession, slot: Slot, nbytes: int) -> bytes:
    session.wait(slot, WAIT_S)
    return bytes(slot.result[:nbytes])


def test_a_gather_gives_all_to_all_whatever_their_lengths(ranks: list[RemoteSession]) -> None:
    slots = declare(ranks, spec(Op.GATHER, 8, 16))
    layouts = [Layout(((0, n),), ((0, 2), (2, 5))) for n in (2, 5)]
    for words in ((b"ab", b"12345"), (b"cd", b"67890"), (b"ef", b"abcde")):
        for session, slot, word, layout in zip(ranks, slots, words, layouts, strict=True):
            give(session, slot, word, layout)
        assert [got(s, slot, 7) for s, slot in zip(ranks, slots, strict=True)] == [b"".join(words)] * 2


def test_pieces_may_be_empty(ranks: list[RemoteSession]) -> None:
    slots = declare(ranks, spec(Op.GATHER, 8, 16))
    for words in ((b"", b"xyz"), (b"abc", b""), (b"", b"")):
        a, b = map(len, words)
        for session, slot, word in zip(ranks, slots, words, strict=True):
            give(session, slot, word, Layout(((0, len(word)),), ((0, a), (a, b))))
        assert [got(s, slot, a + b) for s, slot in zip(ranks, slots, strict=True)] == [b"".join(words)] * 2


def test_an_exchange_gives_each_its_piece(ranks: list[RemoteSession]) -> None:
    slots = declare(ranks, spec(Op.EXCHANGE, 16, 16))
    give(ranks[0], slots[0], b"aaBB", Layout(((0, 2), (2, 2)), ((0, 2), (2, 3))))
    give(ranks[1], slots[1], b"cccDDDD", Layout(((0, 3), (3, 4)), ((0, 2), (2, 4))))
    assert got(ranks[0], slots[0], 5) == b"aaccc"
    assert got(ranks[1], slots[1], 6) == b"BBDDDD"


def test_large_pieces(ranks: list[RemoteSession]) -> None:
    count = 5_000_001
    slots = declare(ranks, spec(Op.GATHER, count, 2 * count))
    layout = Layout(((0, count),), ((0, count), (count, count)))
    for fill in (1, 2, 3):
        for session, slot in zip(ranks, slots, strict=True):
            give(session, slot, bytes([fill + session.rank]) * count, layout)
        for session, slot in zip(ranks, slots, strict=True):
            result = got(session, slot, 2 * count)
            assert result == bytes([fill]) * count + bytes([fill + 1]) * count


def test_who_only_sends_is_done_at_once_but_one_round_ahead_at_most(ranks: list[RemoteSession]) -> None:
    slots = declare(ranks, spec(Op.EXCHANGE, 4, 4, group=(0, 1)))
    to_other, from_other = Layout((EMPTY, (0, 4)), (EMPTY, EMPTY)), Layout((EMPTY, EMPTY), ((0, 4), EMPTY))
    give(ranks[0], slots[0], b"one ", to_other)
    ranks[0].wait(slots[0], WAIT_S)
    give(ranks[0], slots[0], b"two ")
    assert isinstance(failure(lambda: ranks[0].wait(slots[0], 0.2)), StallError)  # nobody has taken the first
    for word in (b"one ", b"two "):
        ranks[1].hand_over(slots[1], layout=from_other)
        assert got(ranks[1], slots[1], 4) == word
    ranks[0].wait(slots[0], WAIT_S)


def test_declared_with_more_room_it_goes_on(ranks: list[RemoteSession]) -> None:
    small = spec(Op.GATHER, 2, 4)
    slots = declare(ranks, small)
    for session, slot in zip(ranks, slots, strict=True):
        give(session, slot, b"ab", Layout(((0, 2),), ((0, 2), (2, 2))))
    for session, slot in zip(ranks, slots, strict=True):
        assert got(session, slot, 4) == b"abab"
    large = spec(Op.GATHER, 20_000, 40_000, small.name)
    grown = [ranks[0].declare([large])[0], slots[1]]
    give(ranks[0], grown[0], b"abc", Layout(((0, 3),), ((0, 3), (3, 1))))
    give(ranks[1], grown[1], b"d", Layout(((0, 1),), ((0, 3), (3, 1))))
    assert [got(s, slot, 4) for s, slot in zip(ranks, grown, strict=True)] == [b"abcd"] * 2
    assert ranks[0].declare([small])[0] is grown[0]


def test_sizes_that_do_not_match_end_that_round_only(ranks: list[RemoteSession]) -> None:
    what = spec(Op.EXCHANGE, 16, 16)
    text = f"tensor {what.name!r}: rank 0 sends 2 bytes to rank 1, which expects 3; give matching sizes on both"
    for how in (Sizes.PLAIN, Sizes.TOGETHER, Sizes.PLAIN):
        slots = declare(ranks, what)
        give(ranks[0], slots[0], b"12", Layout((EMPTY, (0, 2)), (EMPTY, EMPTY), how))
        give(ranks[1], slots[1], b"", Layout((EMPTY, EMPTY), ((0, 3), EMPTY), how))
        if how is Sizes.PLAIN:
            ranks[0].wait(slots[0], WAIT_S)  # who only sends does not wait to be told
        for number in (0, 1) if how is Sizes.TOGETHER else (1,):
            error = failure(lambda number=number, slots=slots: ranks[number].wait(slots[number], WAIT_S))  # type: ignore[misc]
            assert isinstance(error, MismatchError)
            assert str(error) == text
    slots = declare(ranks, what)
    give(ranks[0], slots[0], b"12", Layout((EMPTY, (0, 2)), (EMPTY, EMPTY)))
    ranks[1].hand_over(slots[1], layout=Layout((EMPTY, EMPTY), ((0, 2), EMPTY)))
    ranks[0].wait(slots[0], WAIT_S)
    assert got(ranks[1], slots[1], 2) == b"12"


def test_what_is_asked_for_tentatively_stays_where_it_is(ranks: list[RemoteSession]) -> None:
    what = spec(Op.EXCHANGE, 16, 16)
    slots = declare(ranks, what)
    for nbytes in (5, 0, 1):
        (slot,) = ranks[1].declare([what])
        layout = Layout((EMPTY, EMPTY), ((0, nbytes), EMPTY), Sizes.TENTATIVE)
        ranks[1].hand_over(slot, layout=layout)
        if nbytes == 5:
            give(ranks[0], slots[0], b"12", Layout((EMPTY, (0, 2)), (EMPTY, EMPTY)))
        assert "rank 0 sends 2 bytes" in str(failure(lambda slot=slot: ranks[1].wait(slot, WAIT_S)))  # type: ignore[misc]
    (slot,) = ranks[1].declare([what])
    ranks[1].hand_over(slot, layout=Layout((EMPTY, EMPTY), ((0, 2), EMPTY), Sizes.TENTATIVE))
    assert got(ranks[1], slot, 2) == b"12"
    ranks[0].wait(slots[0], WAIT_S)
    give(ranks[0], slots[0], b"345", Layout((EMPTY, (0, 3)), (EMPTY, EMPTY)))
    ranks[1].hand_over(slot, layout=Layout((EMPTY, EMPTY), ((0, 3), EMPTY)))
    assert got(ranks[1], slot, 3) == b"345"


def test_misuse(ranks: list[RemoteSession]) -> None:
    (slot,) = ranks[0].declare([spec(Op.GATHER, 4, 8, "g")])
    assert "needs a layout" in str(failure(lambda: ranks[0].hand_over(slot)))
    for layout in (
        Layout(((0, 5),), (EMPTY, EMPTY)),
        Layout(((0, 4),), ((0, 9), EMPTY)),
        Layout(((0, 4),), (EMPTY,)),
        Layout(((0, 4), EMPTY), (EMPTY, EMPTY)),
        Layout(((-1, 2),), (EMPTY, EMPTY)),
    ):
        assert isinstance(failure(lambda layout=layout: ranks[0].hand_over(slot, layout=layout)), UsageError)  # type: ignore[misc]
    sum_once_more(ranks)


def test_a_member_of_a_gather_may_leave_out_its_own(ranks: list[RemoteSession]) -> None:
    slots = declare(ranks, spec(Op.GATHER, 8, 16))
    layouts = [Layout(((0, 3),), (EMPTY, (0, 3))), Layout(((0, 3),), ((0, 3), (3, 3)))]
    for words in ((b"abc", b"123"), (b"def", b"456")):
        for session, slot, word, layout in zip(ranks, slots, words, layouts, strict=True):
            give(session, slot, word, layout)
        assert got(ranks[0], slots[0], 3) == words[1]
        assert got(ranks[1], slots[1], 6) == b"".join(words)
