"""The core of gathers and exchanges, one event at a time: what it refuses, keeps and lets go."""

from __future__ import annotations

import pytest
from support.worker_core import slot as make_slot

from byteps_py.errors import ProtocolError
from byteps_py.tensors import DType, Layout, Op, TensorSpec
from byteps_py.worker.core.credit import PushQueue
from byteps_py.worker.core.events import PieceArrived, PieceCopied, PiecesDeclared, PiecesReady
from byteps_py.worker.core.piece_exchange import PieceExchange
from byteps_py.worker.core.piece_rounds import needs
from byteps_py.worker.core.pieces import (
    ALL,
    Copy,
    CopyHere,
    Delivered,
    FetchPiece,
    Outgrown,
    PieceRequest,
    Receipt,
    RefusePiece,
    Serve,
    Transfer,
)
from byteps_py.worker.core.tensor import AskSum, RankSlot


def make_spec(op: Op, group: tuple[int, ...] = ()) -> TensorSpec:
    return TensorSpec("x", DType.UINT8, (64, 512), op, group=group)


def local(op: Op = Op.EXCHANGE) -> tuple[PieceExchange, list[RankSlot]]:
    direct = PieceExchange(0, [0, 0, 1], 100, 100, PushQueue(0), 1 << 18)
    slots = [make_slot(i, make_spec(op), inputs=2) for i in range(2)]
    for rank, each in enumerate(slots):
        direct.handle(PiecesDeclared(rank, each), 0.0)
    return direct, slots


def test_a_round_out_of_turn_breaks_the_protocol() -> None:
    direct, (slot, _) = local()
    nothing = Layout(((0, 0),) * 3, ((0, 0),) * 3)
    with pytest.raises(ProtocolError, match="gave no layout"):
        direct.handle(PiecesReady(slot, 1, None), 0.0)
    with pytest.raises(ProtocolError, match="handed over round 2 after round 0"):
        direct.handle(PiecesReady(slot, 2, nothing), 0.0)
    assert direct.handle(PiecesReady(slot, 1, nothing), 0.0) == [Delivered(slot, 1)]


def test_other_machines_get_what_is_theirs_and_no_more() -> None:
    direct, (slot, _) = local()
    request = PieceRequest(None, 1, 0, 1, 0, 2, 0, 4, 4)
    request.key = next(iter(direct.members()))[0].key
    assert direct.handle(request, 0.0) == []  # it has not come to the round
    (serve,) = direct.handle(PiecesReady(slot, 1, Layout(((0, 0), (0, 0), (8, 4)), ((0, 0),) * 3)), 0.0)[:1]
    assert isinstance(serve, Serve)
    assert (serve.block, serve.offset) == (slot.inputs[0], 8)
    for wrong, error, text in (
        (PieceRequest(None, 1, request.key, 1, 0, 2, 2, 4, 4), ProtocolError, "does not have"),
        (PieceRequest(None, 1, request.key, 1, 0, 9, 0, 4, 4), ProtocolError, "has no part"),
        (PieceRequest(None, 1, request.key, 1, 2, 2, 0, 4, 4), ProtocolError, "is not a rank of this machine"),
        (PieceRequest(None, 1, request.key, 1, 0, ALL, 0, 4, 4), ProtocolError, "a gather's piece is for a machine"),
        (PieceRequest(None, 0, request.key, 1, 0, 2, 0, 4, 4), ProtocolError, "machine 0 asks for another's rank"),
    ):
        with pytest.raises(error, match=text):
            direct.handle(wrong, 0.0)
    (refuse,) = direct.handle(PieceRequest(None, 1, request.key, 1, 0, 2, 0, 5, 5), 0.0)
    assert isinstance(refuse, RefusePiece)
    assert "rank 0 sends 4 bytes to rank 2, which expects 5" in str(refuse.error)


def test_who_leaves_is_waited_for_until_it_says_what_it_has_taken() -> None:
    direct, (slot, _) = local()
    direct.handle(PiecesReady(slot, 1, Layout(((0, 0), (0, 0), (8, 4)), ((0, 0),) * 3)), 0.0)
    key = next(iter(direct.members()))[0].key
    assert direct.keeps_for({2})
    assert not direct.keeps_for({0, 1})
    direct.handle(PieceRequest(None, 1, key, 1, 0, 2, 0, 4, 4), 0.0)
    assert direct.keeps_for({2})  # what was sent may be lost
    direct.handle(Receipt(1, key, 1, 0, 2), 0.0)
    assert not direct.keeps_for({2})


def test_a_gather_waits_for_all_ranks_of_this_machine_too_as_the_last_asks_for_all() -> None:
    direct, (slot, other) = local(Op.GATHER)
    layout = Layout(((0, 0),) * 3, ((0, 0), (0, 0), (8, 4)))  # nothing but rank 2's piece
    assert direct.handle(PiecesReady(slot, 1, layout), 0.0) == []
    channel, member = next(iter(direct.members(0)))
    assert needs(channel, member) == {1, 2}
    (fetch,) = direct.handle(PiecesReady(other, 1, layout), 0.0)
    assert isinstance(fetch, FetchPiece)
    assert needs(channel, member) == {2}


def test_memory_to_which_a_piece_is_being_copied_is_kept_though_its_round_was_abandoned() -> None:
    queue: PushQueue[Transfer | AskSum] = PushQueue(0)
    direct = PieceExchange(0, [0, 1], 100, 100, queue, 1 << 18)
    small, large = (make_slot(0, TensorSpec("x", DType.UINT8, (4, room), Op.GATHER), inputs=2) for room in (8, 16))
    direct.handle(PiecesDeclared(0, small), 0.0)
    (fetch,) = direct.handle(PiecesReady(small, 1, Layout(((0, 0),), ((0, 0), (0, 4)))), 0.0)
    assert isinstance(fetch, FetchPiece)
    assert isinstance(fetch.item, Transfer)
    (copy,) = direct.handle(PieceArrived(fetch.item, 77), 0.0)
    assert isinstance(copy, Copy)
    ((_, member),) = direct.members()
    direct.abandon(member)
    assert direct.handle(PiecesDeclared(0, large), 0.0) == []
    assert direct.handle(PieceCopied(fetch.item), 0.0) == [Outgrown(small)]


def test_a_wrong_request_that_came_too_early_is_refused_not_held_against_the_rank() -> None:
    direct, (slot, _) = local()
    key = next(iter(direct.members()))[0].key
    wrong = PieceRequest(None, 1, key, 1, 0, 2, 2, 4, 4)
    assert direct.handle(wrong, 0.0) == []
    actions = direct.handle(PiecesReady(slot, 1, Layout(((0, 0), (0, 0), (8, 4)), ((0, 0),) * 3)), 0.0)
    assert [action.request for action in actions if isinstance(action, RefusePiece)] == [wrong]
    assert not any(isinstance(action, Serve) for action in actions)


def test_requests_for_rounds_to_come_are_kept_up_to_a_limit() -> None:
    direct, _ = local()
    channel = next(iter(direct.members()))[0]
    channel.most_requests, key = 3, channel.key
    for _ in range(3):
        assert direct.handle(PieceRequest(None, 1, key, 7, 0, 2, 0, 4, 4), 0.0) == []
    with pytest.raises(ProtocolError, match="machine 1 asks for too much too soon"):
        direct.handle(PieceRequest(None, 1, key, 7, 0, 2, 0, 4, 4), 0.0)


def test_a_round_from_before_all_joined_is_not_looked_at() -> None:
    """It may be asked for once more, when its name is other ranks'."""
    direct = PieceExchange(0, [0, 0, 1], 100, 100, PushQueue(0), 1 << 18)
    direct.start_anew(3)
    slot = make_slot(0, make_spec(Op.EXCHANGE, (0, 2)), inputs=2)
    direct.handle(PiecesDeclared(0, slot), 0.0)
    request = PieceRequest(None, 1, next(iter(direct.members()))[0].key, 3, 1, 2, 0, 4, 4)
    assert direct.handle(request, 0.0) == []
    request.round = 4
    assert direct.handle(request, 0.0) == []  # perhaps all have joined again, and the name is another group's by then
    actions = direct.handle(PiecesReady(slot, 4, Layout(((0, 0),) * 2, ((0, 0),) * 2)), 0.0)
    (refuse,) = [action for action in actions if isinstance(action, RefusePiece)]
    assert refuse.request is request
    assert "has no part" in str(refuse.error)


def test_a_round_from_before_all_joined_is_not_kept_for_a_name_that_nobody_has_declared_again() -> None:
    direct = PieceExchange(0, [0, 0, 1], 100, 100, PushQueue(0), 1 << 18)
    direct.start_anew(3)
    slot = make_slot(0, make_spec(Op.EXCHANGE, (0, 2)), inputs=2)
    direct.handle(PiecesDeclared(0, slot), 0.0)
    key = next(iter(direct.members()))[0].key
    direct.start_anew(3)
    assert direct.handle(PieceRequest(None, 1, key, 3, 1, 2, 0, 4, 4), 0.0) == []
    direct.handle(PiecesDeclared(0, make_slot(0, make_spec(Op.EXCHANGE, (0, 2)), inputs=2)), 0.0)
    slot = next(iter(direct.members()))[1].slot
    assert not any(
        isinstance(action, RefusePiece)
        for action in direct.handle(PiecesReady(slot, 4, Layout(((0, 0),) * 2, ((0, 0),) * 2)), 0.0)
    )


def test_who_knows_first_that_all_have_joined_may_use_a_name_for_other_ranks() -> None:
    other = make_slot(1, make_spec(Op.GATHER, (1, 2)), inputs=2)
    direct = PieceExchange(0, [0, 0, 1], 100, 100, PushQueue(0), 1 << 18)
    direct.handle(PiecesDeclared(0, make_slot(0, make_spec(Op.EXCHANGE, (0, 2)), inputs=2)), 0.0)
    key = next(iter(direct.members()))[0].key
    request = PieceRequest(None, 1, key, 1, 1, ALL, 0, 4, 4)
    assert direct.handle(request, 0.0) == []
    direct.start_anew(0)
    direct.handle(PiecesDeclared(1, other), 0.0)
    actions = direct.handle(PiecesReady(other, 1, Layout(((0, 4),), ((0, 4), (4, 0)))), 0.0)
    assert [type(action) for action in actions if not isinstance(action, CopyHere)] == [Serve]


def test_one_name_has_one_group_and_kind() -> None:
    direct, _ = local()
    with pytest.raises(ProtocolError, match="rank 1 declares it for gather of bytes, others of this machine for exch"):
        direct.handle(PiecesDeclared(1, make_slot(1, make_spec(Op.GATHER), inputs=2)), 0.0)
