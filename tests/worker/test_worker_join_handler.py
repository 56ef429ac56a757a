"""Ranks that have no more data, on one machine: who votes, what is summed, what servers are told."""

from __future__ import annotations

from support.worker_core import slot, spec, tensor

from byteps_py.errors import UsageError
from byteps_py.tensors import Op, TensorSpec
from byteps_py.worker.core.agreement import Agreement
from byteps_py.worker.core.credit import PushQueue
from byteps_py.worker.core.events import (
    AllRanksJoined,
    Answered,
    BeginTensor,
    BytesReady,
    Computed,
    Fail,
    LocalRankJoined,
    NameAccepted,
    NameDeclared,
    Push,
    RankJoined,
    Release,
    RoundDone,
    SendBallot,
    SlotJoined,
    TensorAgreed,
    TensorEnded,
    TensorVoid,
)
from byteps_py.worker.core.round_pipeline import RoundPipeline
from byteps_py.worker.core.tensor import Compute, RankSlot, Tensor
from byteps_py.worker.ranks.join_handler import JoinHandler

OLD, NEW = spec(4), spec(5)
ERROR = UsageError("tensor 'w': …")


def agreed(local_size: int, what: TensorSpec = OLD) -> tuple[Agreement, Tensor]:
    agreement = Agreement(local_size)
    for rank in range(local_size):
        agreement.handle(NameDeclared(slot(rank, what)))
    return agreement, accept(agreement, what)


def accept(agreement: Agreement, what: TensorSpec) -> Tensor:
    (begun,) = agreement.handle(NameAccepted("w", 1, what))
    assert isinstance(begun, BeginTensor)
    return begun.tensor


# ---- votes -------------------------------------------------------------------------------------------------------


def test_nobody_waits_for_the_vote_of_a_rank_that_has_joined() -> None:
    agreement = Agreement(2)
    assert agreement.handle(NameDeclared(slot(0, OLD))) == []
    assert agreement.handle(LocalRankJoined(1)) == [SendBallot("w", 1, 0, ((OLD, (0,)),))]
    assert [each.local_rank for each in accept(agreement, OLD).slots] == [0]


def test_a_vote_that_was_cast_counts() -> None:
    agreement = Agreement(2)
    agreement.handle(NameDeclared(slot(1, OLD)))
    assert agreement.handle(LocalRankJoined(1)) == []
    assert agreement.handle(NameDeclared(slot(0, OLD))) == [SendBallot("w", 1, 0, ((OLD, (0, 1)),))]


def test_a_machine_whose_ranks_have_all_joined_takes_part_without_any() -> None:
    agreement, made = agreed(1)
    agreement.handle(LocalRankJoined(0))
    made.joined, made.slots = made.slots, ()
    fail, begun, void = agreement.handle(NameAccepted("w", 2, NEW))
    assert isinstance(begun, BeginTensor)
    assert begun.tensor.slots == ()
    assert void == TensorVoid(made)
    assert isinstance(fail, Fail)
    assert fail.slots == made.joined  # its rank would have to declare it again


def test_once_all_have_joined_everything_is_void_and_generations_go_on() -> None:
    agreement, made = agreed(2)
    later = slot(0, NEW)
    agreement.handle(NameDeclared(later))
    for rank in range(2):
        agreement.handle(LocalRankJoined(rank))
    fail, void = agreement.handle(AllRanksJoined(ERROR))
    assert isinstance(fail, Fail)
    assert set(fail.slots) == {*made.slots, later}
    assert void == TensorVoid(made)
    assert agreement.tensors() == []
    agreement.handle(NameDeclared(slot(0, OLD)))
    assert agreement.handle(NameDeclared(slot(1, OLD)))[-1] == SendBallot("w", 2, 0, ((OLD, (0, 1)),))


# ---- what can't do without a rank --------------------------------------------------------------------------------


def test_a_tensor_ends_after_the_last_round_that_the_rank_takes_part_in() -> None:
    agreement, made = agreed(2)
    assert agreement.handle(RankJoined(7, {("w", 1): 1})) == []
    made.round = 2  # delivered
    fail, void = agreement.handle(TensorEnded(made))
    assert isinstance(fail, Fail)
    assert (fail.slots, void) == (made.slots, TensorVoid(made, is_kept=True))
    assert agreement.tensors() == []
    again = slot(0, OLD)
    assert Fail((again,), fail.error) in agreement.handle(
        NameDeclared(again)
    )  # what others learn from the round that they wait for
    other = slot(1, NEW)
    assert not any(
        isinstance(action, Fail) for action in agreement.handle(NameDeclared(other))
    )  # it never wanted that round


# ---- rounds ------------------------------------------------------------------------------------------------------


def begun(made: Tensor, machines: int) -> RoundPipeline:
    made.machines = machines
    pipeline = RoundPipeline(4, PushQueue(0))
    pipeline.handle(TensorAgreed(made, [(0, made.spec.nbytes, 5)]), 0.0)
    return pipeline


def give(pipeline: RoundPipeline, each: RankSlot) -> list[object]:
    return list(pipeline.handle(BytesReady(each, each.round + 1, each.spec.nbytes), 0.0))


def test_who_has_joined_is_left_out_of_the_local_sum_even_if_others_wait_already() -> None:
    what = spec(4, average=True)
    slots = [slot(0, what), slot(1, what), slot(2, what)]
    made = tensor(slots)
    pipeline = begun(made, machines=1)
    assert give(pipeline, slots[0]) == []
    assert give(pipeline, slots[2]) == []
    (part,) = made.parts
    expected = Compute(part, Op.SUM, (10_000, 30_000), (10_000, 30_000), 4)  # the average is of all ranks
    assert pipeline.handle(SlotJoined(slots[1]), 0.0) == [expected]
    assert pipeline.handle(Computed(part), 0.0) == [RoundDone(made, ((0, slots[0].id, 1), (2, slots[2].id, 1)))]


def test_a_round_that_was_handed_over_before_counts() -> None:
    slots = [slot(0), slot(1)]
    made = tensor(slots)
    pipeline = begun(made, machines=1)
    give(pipeline, slots[1])
    assert pipeline.handle(SlotJoined(slots[1]), 0.0) == []
    (compute,) = give(pipeline, slots[0])
    assert isinstance(compute, Compute)
    assert compute.inputs == (10_000, 20_000)
    (done,) = pipeline.handle(Computed(made.parts[0]), 0.0)
    assert isinstance(done, RoundDone)
    assert len(done.slots) == 2
    (compute,) = give(pipeline, slots[0])
    assert isinstance(compute, Compute)
    assert compute.inputs == (10_000,)


def test_a_machine_without_data_says_so_round_by_round() -> None:
    only = slot(0, inputs=2)
    made = tensor([only])
    pipeline = begun(made, machines=2)
    (part,) = made.parts
    assert pipeline.handle(SlotJoined(only), 0.0) == [Push(part, 1)]
    assert not made.contributes
    assert pipeline.handle(Answered(part, 1, 0), 0.0) == [RoundDone(made, ()), Push(part, 2)]
    assert Release((only,), made) in pipeline.handle(TensorVoid(made), 0.0)


# ---- memory ------------------------------------------------------------------------------------------------------


def test_slots_from_before_are_given_back_once_nothing_is_copied_there() -> None:
    joining = object.__new__(JoinHandler)
    void = [slot(0), slot(1)]
    joining._void = list(void)
    void[1].copies = 1
    assert joining._idle_since_before() == ()
    void[1].copies = 0
    assert joining._idle_since_before() == tuple(void)
    assert joining._idle_since_before() == ()
