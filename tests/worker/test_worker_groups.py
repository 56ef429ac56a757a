"""Tensors of some of the ranks on one machine: whose votes count, what becomes of those who disagree."""

from __future__ import annotations

import pytest
from support.worker_core import slot, tensor

from byteps_py.errors import MismatchError
from byteps_py.proto import control_pb2 as pb
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.wire.chunks import CHUNK_BYTES
from byteps_py.worker.core.agreement import Agreement
from byteps_py.worker.core.credit import PushQueue
from byteps_py.worker.core.events import (
    Answered,
    BeginTensor,
    BytesReady,
    Computed,
    Fail,
    NameAccepted,
    NameDeclared,
    NameRejected,
    Push,
    SendBallot,
    TensorAgreed,
    TensorEnded,
    TensorVoid,
)
from byteps_py.worker.core.placement_view import NO_SERVER, PlacementView
from byteps_py.worker.core.round_pipeline import RoundPipeline
from byteps_py.worker.core.tensor import Compute, RankSlot, Tensor
from byteps_py.worker.core.topology import Topology

ERROR = MismatchError("tensor 'w': …")


def among(*group: int, count: int = 4, **facts: object) -> TensorSpec:
    return TensorSpec("w", DType.FLOAT32, (count,), group=group, **facts)  # type: ignore[arg-type]


def machine() -> Agreement:
    """Ranks 4 to 6."""
    return Agreement(3, first_rank=4)


def agreed(agreement: Agreement, what: TensorSpec, *local_ranks: int, generation: int = 1) -> Tensor:
    for rank in local_ranks:
        agreement.handle(NameDeclared(slot(rank, what)))
    (begun,) = agreement.handle(NameAccepted("w", generation, what))
    assert isinstance(begun, BeginTensor)
    return begun.tensor


def waits(agreement: Agreement, what: RankSlot) -> list[object]:
    what.ready_bytes = what.spec.nbytes
    return list(agreement.handle(BytesReady(what, 1, what.ready_bytes)))


# ---- votes -------------------------------------------------------------------------------------------------------


def test_only_local_ranks_of_the_group_vote() -> None:
    agreement, what = machine(), among(1, 4, 6, 9)
    assert agreement.handle(NameDeclared(slot(2, what))) == []
    assert agreement.handle(NameDeclared(slot(0, what))) == [SendBallot("w", 1, 0, ((what, (0, 2)),))]
    assert [each.local_rank for each in agreed(agreement, what).slots] == [0, 2]


def test_who_disagrees_about_the_group_is_not_waited_for() -> None:
    agreement, one, other = machine(), among(4, 5, 6), among(5, 6)
    agreement.handle(NameDeclared(slot(0, one)))
    assert agreement.handle(NameDeclared(slot(1, other))) == [SendBallot("w", 1, 0, ((one, (0,)), (other, (1,))))]


def test_a_machine_without_members_counts_generations_all_the_same() -> None:
    agreement, what = machine(), among(0, 1)
    assert agreement.handle(NameAccepted("w", 1, what)) == []
    assert agreement.handle(NameRejected("w", 2, ERROR)) == []
    ours = among(4)
    assert agreement.handle(NameDeclared(slot(0, ours))) == [SendBallot("w", 3, 0, ((ours, (0,)),))]


# ---- disagreement ------------------------------------------------------------------------------------------------


def test_who_is_late_gets_the_error_of_the_vote_that_it_missed() -> None:
    agreement, what = machine(), among(4, 5, 6)
    declared = slot(0, what)
    agreement.handle(NameDeclared(declared))
    assert agreement.handle(NameRejected("w", 1, ERROR, late=[4, 5, 6, 9])) == [Fail((declared,), ERROR)]
    late = slot(1, what)
    assert agreement.handle(NameDeclared(late)) == [Fail((late,), ERROR)]
    actions = [agreement.handle(NameDeclared(slot(rank, what)))[-1] for rank in (0, 1)]
    assert not any(isinstance(action, SendBallot) for action in actions)  # rank 6 has yet to hear of it
    also_late = slot(2, what)
    assert agreement.handle(NameDeclared(also_late)) == [Fail((also_late,), ERROR)]
    assert agreement.handle(NameDeclared(slot(2, what)))[-1] == SendBallot("w", 2, 0, ((what, (0, 1, 2)),))


def test_who_is_late_twice_gets_both_errors() -> None:
    agreement, what, again = machine(), among(4, 5), MismatchError("again")
    agreement.handle(NameRejected("w", 1, ERROR, late=[4, 5]))
    agreement.handle(NameRejected("w", 2, again, late=[4, 5]))
    slots = [slot(0, what), slot(0, what)]
    assert [agreement.handle(NameDeclared(each))[-1] for each in slots] == [
        Fail((slots[0],), ERROR),
        Fail((slots[1],), again),
    ]


def test_what_was_declared_after_the_ballot_was_a_vote_on_it_too() -> None:
    agreement, one, other = machine(), among(4, 5, 6), among(5, 6)
    slots = [slot(0, one), slot(1, other), slot(2, one)]
    for each in slots:
        agreement.handle(NameDeclared(each))
    (fail,) = agreement.handle(NameRejected("w", 1, ERROR))
    assert isinstance(fail, Fail)
    assert set(fail.slots) == set(slots)


@pytest.mark.parametrize("uses_it_first", [False, True])
def test_a_rank_that_did_not_wait_learns_it_from_its_next_round(uses_it_first: bool) -> None:
    """Which it begins with the slot that it has, or with another if it hears in time that this one is void."""
    agreement, what = machine(), among(4, 5)
    made = agreed(agreement, what, 0, 1)
    waits(agreement, made.slots[0])
    agreement.handle(NameRejected("w", 2, ERROR, late=[4, 5]))
    anew = slot(1, what)
    if uses_it_first:
        assert agreement.handle(BytesReady(made.slots[1], 1, 0)) == []
        assert Fail((anew,), ERROR) not in agreement.handle(NameDeclared(anew))
    else:
        assert Fail((anew,), ERROR) in agreement.handle(NameDeclared(anew))


def test_others_agree_without_a_rank_that_uses_the_name() -> None:
    agreement = machine()
    made = agreed(agreement, among(4, 5), 0, 1)
    agreement.handle(NameDeclared(slot(2, among(2, 6))))
    fail, begun, void = agreement.handle(NameAccepted("w", 2, among(2, 6)))
    assert isinstance(begun, BeginTensor)
    assert void == TensorVoid(made, is_kept=True)  # other machines may lack a result
    assert isinstance(fail, Fail)
    assert fail.slots == made.slots
    assert "other ranks agree on sum of float32[4] among ranks 2, 6, without" in str(fail.error)


@pytest.mark.parametrize("accepted", [False, True])
def test_a_round_that_others_have_got_is_delivered_before_the_tensor_is_void(accepted: bool) -> None:
    agreement = machine()
    made = agreed(agreement, among(1, 4), 0)
    waits(agreement, made.slots[0])
    if accepted:
        assert agreement.handle(NameAccepted("w", 2, among(1, 2), rounds=1)) == []
    else:
        assert agreement.handle(NameRejected("w", 2, ERROR, rounds=1)) == []
    assert made.ending is not None
    assert agreement.tensors() == []
    assert agreement.handle(TensorEnded(made)) == [Fail(made.slots, made.ending), TensorVoid(made, is_kept=True)]


# ---- rounds ------------------------------------------------------------------------------------------------------


def begin(made: Tensor, machines: int, size: int = 8) -> tuple[RoundPipeline, list[object]]:
    made.machines = machines
    pipeline = RoundPipeline(size, PushQueue(0))
    actions = list(pipeline.handle(TensorAgreed(made, [(0, 16, 5)]), 0.0))
    for each in made.slots:
        actions += pipeline.handle(BytesReady(each, 1, 16), 0.0)
    return pipeline, actions


def test_on_one_machine_the_sum_goes_straight_to_the_groups_results() -> None:
    what = among(4, 6, average=True)
    made = tensor([slot(0, what), slot(2, what)])
    pipeline, actions = begin(made, machines=1)
    (part,) = made.parts
    assert actions == [Compute(part, Op.SUM, (10_000, 30_000), (10_000, 30_000), 2)]
    assert len(pipeline.handle(Computed(part), 0.0)) == 1  # done, and nothing pushed


def test_one_member_of_a_machine_of_several_ranks_gives_a_copy() -> None:
    what = among(1, 6, average=True)
    made = tensor([slot(2, what)], contributions=True)
    pipeline, actions = begin(made, machines=2)
    (part,) = made.parts
    assert actions == [Compute(part, Op.SUM, (30_000,), (200_000,), 1)]
    assert pipeline.handle(Computed(part), 0.0) == [Push(part, 1)]
    assert pipeline.handle(Answered(part, 1, 900_000), 0.0) == [Compute(part, Op.SUM, (900_000,), (30_000,), 2)]


def test_the_root_of_a_broadcast_is_found_among_the_members() -> None:
    what = among(4, 6, op=Op.BROADCAST, root=6)
    made = tensor([slot(0, what), slot(2, what)])
    made.root_slot = made.slots[1]
    _, actions = begin(made, machines=1)
    assert actions == [Compute(made.parts[0], Op.BROADCAST, (30_000,), (10_000,), 1)]


# ---- where things are --------------------------------------------------------------------------------------------


def topology(*local_sizes: int) -> Topology:
    firsts = [sum(local_sizes[:i]) for i in range(len(local_sizes))]
    workers = tuple(
        pb.Member(machine_index=i, first_rank=first, local_size=size)
        for i, (first, size) in enumerate(zip(firsts, local_sizes, strict=True))
    )
    servers = (pb.Member(member_id=9, weight=1),)
    return Topology(1, 0, workers, servers, 1 << 20, 1)


@pytest.mark.parametrize(
    ("local_sizes", "group", "machines"),
    [
        ((3,), (), 1),
        ((3,), (0, 2), 1),
        ((2, 3), (), 0),
        ((2, 3), (2, 4), 1),
        ((2, 3), (1, 2), 2),
        ((1, 1, 1), (0, 2), 2),
    ],
)
def test_how_many_machines_take_part(local_sizes: tuple[int, ...], group: tuple[int, ...], machines: int) -> None:
    assert topology(*local_sizes).machines_in(among(*group)) == machines


def test_what_stays_on_one_machine_is_no_servers_load() -> None:
    placing = PlacementView(topology(2, 2), 1 << 20, CHUNK_BYTES)
    wide, narrow = among(0, 2), TensorSpec("v", DType.FLOAT32, (4,), group=(0, 1))
    placing.add([wide, narrow])
    assert [tuple(piece) for piece in placing.pieces(wide)] == [(0, 16, 9)]
    assert list(placing.pieces(narrow)) == [(0, 16, NO_SERVER)]
