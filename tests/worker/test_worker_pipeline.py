"""The rounds of tensors on one machine: what ranks, kernels and servers report in, what is due out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.worker_core import slot, spec, tensor

from byteps_py.errors import ProtocolError
from byteps_py.tensors import Op
from byteps_py.worker.core.credit import PATIENCE_S, PushQueue
from byteps_py.worker.core.events import (
    Action,
    Answered,
    BytesReady,
    Computed,
    Push,
    Release,
    ResultWanted,
    RoundDone,
    RoundsAwaited,
    Supply,
    TensorAgreed,
    TensorForgotten,
    TensorVoid,
    TimePassed,
)
from byteps_py.worker.core.round_pipeline import RoundPipeline
from byteps_py.worker.core.tensor import Compute, RankSlot, SlotState, Stage, Tensor

PIECES = [(0, 8, 5), (8, 8, 6)]  # offset, length, server
ANSWER = 900_000


def started(
    made: Tensor, machines: int, size: int, credit_bytes: int = 0, pieces: list[tuple[int, int, int]] | None = None
) -> RoundPipeline:
    pipeline = RoundPipeline(size, PushQueue(credit_bytes))
    made.machines = machines
    assert pipeline.handle(TensorAgreed(made, PIECES if pieces is None else pieces), 0.0) == []
    return pipeline


def ready(pipeline: RoundPipeline, *slots: RankSlot, nbytes: int | None = None, now: float = 0.0) -> list[Action]:
    """Each hands over its next round, or more of it."""
    actions = []
    for each in slots:
        round_ = each.round + (1 if each.ready_bytes < 0 else 0)
        actions += pipeline.handle(BytesReady(each, round_, each.spec.nbytes if nbytes is None else nbytes), now)
    return actions


def computes(actions: list[Action]) -> list[tuple[int, Op, tuple[int, ...], tuple[int, ...], int]]:
    """(partition, operation, inputs, outputs, divisor) of actions that are nothing but kernels."""
    assert all(isinstance(action, Compute) for action in actions)
    return [(a.part.index, a.op, a.inputs, a.outputs, a.divisor) for a in actions if isinstance(a, Compute)]


def pushes(actions: list[Action]) -> list[tuple[int, int]]:
    """(partition, round) of actions that are nothing but pushes."""
    assert all(isinstance(action, Push) for action in actions)
    return [(a.part.index, a.round) for a in actions if isinstance(a, Push)]


def done(made: Tensor) -> list[Action]:
    return [RoundDone(made, tuple((s.local_rank, s.id, s.round) for s in made.slots))]


# ---- one machine -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", [False, True])
def test_alone_the_sum_goes_straight_to_all_results(average: bool) -> None:
    what = spec(4, average=average)
    slots = [slot(0, what), slot(1, what)]
    made = tensor(slots)
    pipeline = started(made, machines=1, size=2)
    assert ready(pipeline, slots[1]) == []
    divisor = 2 if average else 1
    assert computes(ready(pipeline, slots[0])) == [
        (0, Op.SUM, (10_000, 20_000), (10_000, 20_000), divisor),
        (1, Op.SUM, (10_008, 20_008), (10_008, 20_008), divisor),
    ]
    assert made.running == 2
    assert pipeline.handle(Computed(made.parts[1]), 0.0) == []
    assert pipeline.handle(Computed(made.parts[0]), 0.0) == done(made)
    assert (made.round, made.running, made.ready_bytes) == (2, 0, -1)
    assert len(ready(pipeline, *slots)) == 2


def test_alone_a_broadcast_leaves_the_root_its_memory() -> None:
    what = spec(2, op=Op.BROADCAST, root=1)
    slots = [slot(0, what), slot(1, what), slot(2, what)]
    made = tensor(slots)
    made.root_slot = made.slots[1]
    pipeline = started(made, 1, 3, pieces=[(0, 8, -1)])
    assert computes(ready(pipeline, *slots)) == [(0, Op.BROADCAST, (20_000,), (10_000, 30_000), 1)]


# ---- several machines --------------------------------------------------------------------------------------------


def test_the_front_of_each_gradient_goes_as_they_become_ready_the_rest_by_priority() -> None:
    """So machines, for which gradients become ready at different moments, begin with the same partitions."""
    pipeline = RoundPipeline(1, PushQueue(4))
    pieces = [(4 * index, 4, 5) for index in range(8)]  # of 32 bytes: two are the first quarter
    made = []
    for name, priority in [("back", -3), ("middle", -2), ("front", 0)]:
        tensor_ = tensor([slot(0, replace(spec(8, name), priority=priority))])
        tensor_.machines = 2
        assert pipeline.handle(TensorAgreed(tensor_, pieces), 0.0) == []
        made.append(tensor_)
    back, middle, front = made
    (pushed,) = ready(pipeline, *back.slots)
    actions = [*ready(pipeline, *middle.slots), *ready(pipeline, *front.slots)]
    assert actions == []  # no credit
    order = []
    due: list[Action] = [pushed]
    while due:
        action = due.pop(0)
        part = action.part
        if isinstance(action, Push):
            order.append((part.tensor.name, part.index))
            due += pipeline.handle(Answered(part, 1, ANSWER), 0.0)
        elif isinstance(action, Compute):
            due += [after for after in pipeline.handle(Computed(part), 0.0) if not isinstance(after, RoundDone)]
    assert order == [
        ("back", 0),
        *[("front", index) for index in range(8)],  # it is waited for: at once
        ("back", 1),
        *[("middle", index) for index in range(8)],
        *[("back", index) for index in range(2, 8)],
    ]


def test_one_rank_is_its_machine_and_its_inputs_take_turns() -> None:
    """No local sum: the rank's input is the contribution, and outlives the round."""
    only = slot(0, inputs=2)
    made = tensor([only])
    pipeline = started(made, machines=2, size=2)
    assert pushes(ready(pipeline, only)) == [(0, 1), (1, 1)]
    assert made.contribution.address == 10_000
    assert computes(pipeline.handle(Answered(made.parts[0], 1, ANSWER), 0.0)) == [
        (0, Op.BROADCAST, (ANSWER,), (15_000,), 1)
    ]
    pipeline.handle(Computed(made.parts[0]), 0.0)
    pipeline.handle(Answered(made.parts[1], 1, ANSWER + 8), 0.0)
    assert pipeline.handle(Computed(made.parts[1]), 0.0) == done(made)
    assert pushes(ready(pipeline, only)) == [(0, 2), (1, 2)]
    assert made.contribution.address == 11_000


def test_several_ranks_are_summed_before_the_push_in_turns() -> None:
    slots = [slot(0), slot(1)]
    made = tensor(slots, contributions=True)
    pipeline = started(made, machines=2, size=4)
    for round_, contribution in ((1, 200_000), (2, 100_000)):
        assert computes(ready(pipeline, *slots)) == [
            (0, Op.SUM, (10_000, 20_000), (contribution,), 1),
            (1, Op.SUM, (10_008, 20_008), (contribution + 8,), 1),
        ]
        for part in made.parts:
            assert pushes(pipeline.handle(Computed(part), 0.0)) == [(part.index, round_)]
        for part in made.parts:
            assert len(pipeline.handle(Answered(part, round_, ANSWER), 0.0)) == 1
        assert pipeline.handle(Computed(made.parts[0]), 0.0) == []
        assert pipeline.handle(Computed(made.parts[1]), 0.0) == done(made)


def test_what_other_machines_wait_for_goes_whatever_is_in_flight_now_or_once_it_is_ready() -> None:
    back, front = slot(0, spec(4, "back"), inputs=2), slot(0, spec(4, "front"), inputs=2)
    made = [tensor([back]), tensor([front])]
    pipeline = started(made[0], machines=2, size=2, credit_bytes=8)
    made[1].machines = 2
    pipeline.handle(TensorAgreed(made[1], PIECES), 0.0)
    assert (
        pipeline.handle(RoundsAwaited([(made[1].parts[1], 1), (made[1].parts[0], 7)]), 0.0) == []
    )  # not ready; far away
    assert pushes(ready(pipeline, back)) == [(0, 1)]
    assert [a.part for a in ready(pipeline, front) if isinstance(a, Push)] == [made[1].parts[1]]
    # One waits, one was awaited in a round that is over, one is in flight.
    actions = pipeline.handle(RoundsAwaited([(made[0].parts[1], 1), (made[1].parts[0], 0), (made[0].parts[0], 1)]), 0.0)
    assert [a.part for a in actions if isinstance(a, Push)] == [made[0].parts[1]]
    answered = []
    for part in (made[0].parts[0], made[1].parts[1], made[0].parts[1]):
        actions = pipeline.handle(Answered(part, 1, ANSWER), 0.0) + pipeline.handle(Computed(part), 0.0)
        answered.append([a.part for a in actions if isinstance(a, Push)])
    assert answered == [[], [], [made[1].parts[0]]]  # it has to wait for credit


def test_an_average_is_divided_at_delivery_by_the_number_of_ranks() -> None:
    only = slot(0, spec(4, average=True), inputs=2)
    made = tensor([only])
    pipeline = started(made, machines=3, size=5)
    ready(pipeline, only)
    assert computes(pipeline.handle(Answered(made.parts[1], 1, ANSWER), 0.0)) == [(1, Op.SUM, (ANSWER,), (15_008,), 5)]


def test_the_root_of_a_broadcast_delivers_what_it_has() -> None:
    what = spec(4, op=Op.BROADCAST, root=1)
    slots = [slot(0, what), slot(1, what)]
    made = tensor(slots, contributions=True)
    made.root_slot = made.slots[1]
    pipeline = started(made, machines=2, size=4)
    assert computes(ready(pipeline, *slots))[0] == (0, Op.BROADCAST, (20_000,), (200_000,), 1)
    pipeline.handle(Computed(made.parts[0]), 0.0)
    assert computes(pipeline.handle(Answered(made.parts[0], 1, 0), 0.0)) == [
        (0, Op.BROADCAST, (200_000,), (10_000,), 1)
    ]


def test_a_root_that_is_alone_on_its_machine_has_its_result_copied() -> None:
    only = slot(0, spec(4, op=Op.BROADCAST, root=0), inputs=2)
    made = tensor([only])
    made.root_slot = made.slots[0]
    pipeline = started(made, machines=2, size=2)
    ready(pipeline, only)
    assert computes(pipeline.handle(Answered(made.parts[1], 1, 0), 0.0)) == [(1, Op.BROADCAST, (10_008,), (15_008,), 1)]


def test_a_broadcast_from_elsewhere_needs_no_kernel_before_the_pull() -> None:
    what = spec(4, op=Op.BROADCAST, root=3)
    slots = [slot(0, what), slot(1, what)]
    made = tensor(slots)
    pipeline = started(made, machines=2, size=4)
    assert not made.contributes
    assert pushes(ready(pipeline, *slots)) == [(0, 1), (1, 1)]
    assert computes(pipeline.handle(Answered(made.parts[0], 1, ANSWER), 0.0)) == [
        (0, Op.BROADCAST, (ANSWER,), (10_000, 20_000), 1)
    ]


# ---- handing over ------------------------------------------------------------------------------------------------


def test_partitions_go_as_soon_as_all_local_ranks_have_written_them() -> None:
    slots = [slot(0), slot(1)]
    made = tensor(slots)
    pipeline = started(made, 1, 2)
    assert ready(pipeline, slots[0], nbytes=16) == []
    assert ready(pipeline, slots[1], nbytes=7) == []
    assert [each[0] for each in computes(ready(pipeline, slots[1], nbytes=8))] == [0]
    assert ready(pipeline, slots[1], nbytes=15) == []
    assert [each[0] for each in computes(ready(pipeline, slots[1], nbytes=16))] == [1]


def test_what_was_handed_over_before_the_agreement_starts_with_it() -> None:
    slots = [slot(0), slot(1)]
    pipeline = RoundPipeline(2, PushQueue(0))
    assert ready(pipeline, *slots) == []
    made = tensor(slots)
    made.machines = 1
    assert [each[0] for each in computes(pipeline.handle(TensorAgreed(made, PIECES), 0.0))] == [0, 1]


def test_an_empty_tensor_is_done_when_all_local_ranks_have_come() -> None:
    slots = [slot(0, spec(0)), slot(1, spec(0))]
    made = tensor(slots)
    pipeline = started(made, machines=2, size=4, pieces=[])
    assert ready(pipeline, slots[0]) == []
    assert ready(pipeline, slots[1]) == done(made)
    assert ready(pipeline, slots[1]) == []
    assert ready(pipeline, slots[0]) == done(made)


# (rounds and bytes handed over before), the impossible one, what is said about it
IMPOSSIBLE = [
    ([], (2, 16), "16 of 16 bytes of round 2, round 1 is due"),
    ([], (0, 16), "round 1 is due"),
    ([], (1, 17), "17 of 16 bytes"),
    ([(1, 8)], (1, 7), "7 of 16 bytes of round 1"),
    ([(1, 8)], (2, 16), "round 1 is due"),
]


@pytest.mark.parametrize(("before", "message", "text"), IMPOSSIBLE)
def test_what_no_rank_can_hand_over(before: list[tuple[int, int]], message: tuple[int, int], text: str) -> None:
    only = slot(0, inputs=2)
    pipeline = started(tensor([only]), 2, 2)
    for round_, nbytes in before:
        pipeline.handle(BytesReady(only, round_, nbytes), 0.0)
    with pytest.raises(ProtocolError, match=text):
        pipeline.handle(BytesReady(only, *message), 0.0)


# ---- the network -------------------------------------------------------------------------------------------------


def test_the_credit_holds_pushes_back_and_answers_set_them_free() -> None:
    only = slot(0, inputs=2)
    made = tensor([only])
    pipeline = started(made, 2, 2, credit_bytes=8)
    assert pushes(ready(pipeline, only)) == [(0, 1)]
    assert [part.stage for part in made.parts] == [Stage.IN_FLIGHT, Stage.QUEUED]
    push, _ = pipeline.handle(Answered(made.parts[0], 1, ANSWER), 0.0)
    assert pushes([push]) == [(1, 1)]  # before the delivery: the network must not wait for it


def test_nothing_is_pushed_while_answers_wait_for_the_processor() -> None:
    only = slot(0, what=spec(count=8), inputs=2)
    made = tensor([only])
    pipeline = started(made, 2, 2, credit_bytes=8, pieces=[(8 * i, 8, 5) for i in range(4)])
    assert pushes(ready(pipeline, only)) == [(0, 1)]
    push, _ = pipeline.handle(Answered(made.parts[0], 1, ANSWER), 0.0)
    assert pushes([push]) == [(1, 1)]
    (second,) = pipeline.handle(Answered(made.parts[1], 1, ANSWER), 0.0)  # more than the credit is undelivered
    assert pushes(pipeline.handle(TimePassed(), 0.0)) == []
    assert isinstance(second, Compute)
    assert pushes(pipeline.handle(Computed(made.parts[0]), 0.0)) == [(2, 1)]


def test_what_waits_for_other_machines_gives_its_credit_back_on_the_timer() -> None:
    only = slot(0, inputs=2)
    pipeline = started(tensor([only]), 2, 2, credit_bytes=8)
    ready(pipeline, only, now=1.0)
    assert pipeline.handle(TimePassed(), 1.0 + PATIENCE_S / 2) == []
    assert pushes(pipeline.handle(TimePassed(), 1.0 + PATIENCE_S)) == [(1, 1)]


def test_answers_that_nobody_waits_for_change_nothing() -> None:
    only = slot(0, inputs=2)
    made = tensor([only])
    pipeline = started(made, 2, 2)
    first, second = made.parts
    assert not pipeline.awaits(first, 1)
    assert pipeline.handle(Answered(first, 1, ANSWER), 0.0) == []  # not pushed yet
    ready(pipeline, only)
    assert pipeline.awaits(first, 1)
    assert pipeline.handle(Answered(first, 2, ANSWER), 0.0) == []  # of another round
    assert len(pipeline.handle(Answered(first, 1, ANSWER), 0.0)) == 1
    assert pipeline.handle(Answered(first, 1, ANSWER), 0.0) == []  # repeated
    pipeline.handle(Computed(first), 0.0)
    pipeline.handle(Answered(second, 1, ANSWER), 0.0)
    pipeline.handle(Computed(second), 0.0)
    ready(pipeline, only)
    assert pipeline.handle(Answered(first, 1, ANSWER), 0.0) == []  # repeated, and late
    assert pipeline.awaits(first, 2)


# ---- the end of a tensor -----------------------------------------------------------------------------------------


def test_a_void_tensor_gives_back_its_credit_and_its_memory() -> None:
    only, other = slot(0, inputs=2), slot(0, spec(2, "other"), inputs=2)
    made, next_ = tensor([only]), tensor([other])
    pipeline = started(made, 2, 2, credit_bytes=8)
    pipeline.handle(TensorAgreed(next_, [(0, 8, 5)]), 0.0)
    ready(pipeline, only, other)
    release, push = pipeline.handle(TensorVoid(made), 0.0)
    assert release == Release((only,), made)
    assert pushes([push]) == [(0, 1)]
    assert isinstance(push, Push)
    assert push.part is next_.parts[0]  # the void tensor's second partition has left the queue
    assert pipeline.handle(Answered(made.parts[0], 1, ANSWER), 0.0) == []


def test_memory_stays_while_kernels_run_on_it() -> None:
    slots = [slot(0), slot(1)]
    made = tensor(slots, contributions=True)
    pipeline = started(made, 2, 4)
    ready(pipeline, *slots)
    assert pipeline.handle(TensorVoid(made), 0.0) == []
    assert pipeline.handle(Computed(made.parts[1]), 0.0) == []
    assert pipeline.handle(Computed(made.parts[0]), 0.0) == [Release(tuple(slots), made)]


def test_what_may_be_wanted_outlives_its_tensor() -> None:
    only = slot(0, inputs=2)
    made = tensor([only])
    pipeline = started(made, 2, 2)
    ready(pipeline, only)
    for part in made.parts:
        pipeline.handle(Answered(part, 1, ANSWER), 0.0)
        pipeline.handle(Computed(part), 0.0)
    assert pipeline.handle(TensorVoid(made, is_kept=True), 0.0) == []
    assert pipeline.handle(ResultWanted(made.parts[1], 1, 9), 0.0) == [Supply(made.parts[1], 1, 9)]
    assert pipeline.handle(ResultWanted(made.parts[1], 2, 9), 0.0) == []
    assert pipeline.handle(TensorForgotten(made), 0.0) == [Release((only,), made)]
    assert pipeline.handle(ResultWanted(made.parts[1], 1, 9), 0.0) == []


def test_nobody_hastens_what_was_queued_of_a_void_tensor() -> None:
    """Others, who have yet to hear that it is void, wait for it."""
    only, other = slot(0, inputs=2), slot(0, spec(2, "other"), inputs=2)
    made, next_ = tensor([only]), tensor([other])
    pipeline = started(made, 2, 2, credit_bytes=8)
    pipeline.handle(TensorAgreed(next_, [(0, 8, 5)]), 0.0)
    ready(pipeline, only)
    queued = made.parts[1]
    assert queued.stage is Stage.QUEUED
    pipeline.handle(TensorVoid(made, is_kept=True), 0.0)
    assert pushes(ready(pipeline, other)) == [(0, 1)]  # the first after all was answered, or given up
    assert pipeline.handle(RoundsAwaited([(queued, 1)]), 0.0) == []


def test_slots_that_live_on_are_not_released() -> None:
    """In the tensor's next generation, or because their rank does not know yet that they are void."""
    slots = [slot(0), slot(1), slot(2)]
    made = tensor(slots)
    pipeline = started(made, 1, 3)
    slots[1].tensor = tensor([slot(1)], generation=2)
    slots[2].move_to(SlotState.VOID)
    assert pipeline.handle(TensorVoid(made), 0.0) == [Release((slots[0],), made)]


def test_what_is_handed_over_to_a_void_tensor_is_ignored() -> None:
    only = slot(0, inputs=2)
    made = tensor([only])
    pipeline = started(made, 2, 2)
    pipeline.handle(TensorVoid(made), 0.0)
    assert pipeline.handle(BytesReady(only, 1, 16), 0.0) == []
    only.tensor, only.state = None, SlotState.VOID
    assert pipeline.handle(BytesReady(only, 1, 16), 0.0) == []
    assert only.ready_bytes == -1
