"""Parts of the backend that need no job: which place an operation gets, what a reduce operation means, the threads."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from byteps_py.errors import MismatchError, UsageError
from byteps_py.tensors import DType, Op
from byteps_py.torch.collectives.all_reduce.service import KindPlace, KindPlaces, slots_for
from byteps_py.torch.collectives.completion import Pool
from byteps_py.torch.collectives.group_work import CallLog
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.slot_view import capacity_for
from byteps_py.torch.collectives.tensor_bytes import ResultBuffer, octets
from byteps_py.torch.collectives.work import OperationKind
from byteps_py.torch.process_group.group_base import connecting, kind_of, reduction_of, timeout_of

WAIT_S = 30.0


def kind(count: int, op: Op = Op.SUM) -> OperationKind:
    return OperationKind(op, DType.FLOAT32, (count,))


def numbers(places: KindPlaces, kinds: list[OperationKind]) -> list[int]:
    return [places.find(each).number for each in kinds]


def test_kinds_get_places_in_the_order_of_their_first_call() -> None:
    assert numbers(KindPlaces(), [kind(3), kind(4), kind(3), kind(3, Op.MAX), kind(4)]) == [0, 1, 0, 2, 1]


def test_the_kind_used_longest_ago_gives_up_its_place() -> None:
    places = KindPlaces(limit=2)
    assert numbers(places, [kind(1), kind(2), kind(1), kind(3), kind(1), kind(2)]) == [0, 1, 0, 1, 0, 1]


def test_a_place_that_changes_hands_begins_with_its_first_lane() -> None:
    places = KindPlaces(limit=1)
    first = places.find(kind(1))
    assert [first.next_slot(2) for _ in range(3)] == [0, 1, 0]
    second = places.find(kind(2))
    assert second is first
    assert second.next_slot(2) == 0


def test_members_that_disagreed_go_on_alike() -> None:
    one, other = KindPlaces(), KindPlaces()
    numbers(one, [kind(1), kind(2)])
    numbers(other, [kind(1), kind(3)])
    one.forget(kind(2), one.find(kind(2)))
    other.forget(kind(3), other.find(kind(3)))
    calls = [kind(2), kind(3), kind(1)]
    assert numbers(one, calls) == numbers(other, calls) == [1, 2, 0]


def test_a_place_is_forgotten_by_its_holder_only() -> None:
    places = KindPlaces()
    places.find(kind(1))
    places.forget(kind(1), KindPlace(0))
    assert numbers(places, [kind(1), kind(2)]) == [0, 1]


def test_large_operations_have_few_lanes() -> None:
    assert [slots_for(nbytes) for nbytes in (0, 1 << 23, 1 << 25)] == [4, 4, 2]


def test_room_grows_in_steps() -> None:
    assert capacity_for(1) == 4096
    for nbytes in (4096, 5000, 100_000, 123_456_789):
        assert nbytes <= capacity_for(nbytes) <= nbytes * 1.25 + 4096


def test_reduce_operations() -> None:
    assert reduction_of(dist.ReduceOp.AVG, torch.float32).average
    assert reduction_of(dist.ReduceOp(dist.ReduceOp.MAX), torch.int8).op is Op.MAX
    assert reduction_of(dist._make_nccl_premul_sum(0.25), torch.float32).factor == 0.25
    assert reduction_of(dist.ReduceOp.SUM, torch.complex128).view is torch.float64
    assert reduction_of(dist.ReduceOp.SUM, torch.uint16).view is torch.int16
    assert reduction_of(dist.ReduceOp.BXOR, torch.int32).fold is torch.bitwise_xor
    assert kind_of(dist.ReduceOp.RedOpType.MIN)[0] == dist.ReduceOp.RedOpType.MIN


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (dist.ReduceOp.BAND, torch.float32),
        (dist.ReduceOp.MAX, torch.complex64),
        (dist.ReduceOp.MIN, torch.uint16),
        (dist.ReduceOp.AVG, torch.bool),
        (dist.ReduceOp.SUM, torch.float8_e4m3fn),
    ],
)
def test_impossible_reductions(op: dist.ReduceOp, dtype: torch.dtype) -> None:
    with pytest.raises(UsageError, match=f"{dtype} can't be reduced with"):
        reduction_of(op, dtype)


def test_options_without_a_timeout_take_the_group_s() -> None:
    assert timeout_of(dist.AllreduceOptions(), 5.0) == 5.0
    assert timeout_of(None, 5.0) == 5.0


def test_bytes_of_any_tensor() -> None:
    source = torch.arange(6).view(2, 3) * (1 + 2j)
    target = torch.empty(3, 2, dtype=torch.complex64).t()
    result_buffer = ResultBuffer(target)
    result_buffer.memory.copy_(octets(source.conj()))
    result_buffer.deliver()
    assert torch.equal(target, source.conj())


def test_tasks_that_wait_for_each_other_run_at_once() -> None:
    pool, met = Pool("test"), threading.Barrier(3)
    modes: list[bool] = []

    def task() -> None:
        met.wait(WAIT_S)
        modes.append(torch.is_grad_enabled())

    for _ in range(2):
        pool.run(task)
    met.wait(WAIT_S)
    pool.close()
    assert modes == [False, False]


def test_a_thread_without_a_task_ends_after_a_moment() -> None:
    pool, found = Pool("test", idle_s=0.01), queue.SimpleQueue[threading.Thread]()
    for _ in range(2):
        pool.run(lambda: found.put(threading.current_thread()))
        thread = found.get(timeout=WAIT_S)
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_closing_waits_for_a_task_and_no_longer() -> None:
    """Its thread does not become idle afterwards."""
    pool, begun, goes_on = Pool("test"), queue.SimpleQueue[threading.Thread](), threading.Event()

    def task() -> None:
        begun.put(threading.current_thread())
        goes_on.wait(WAIT_S)

    pool.run(task)
    thread = begun.get(timeout=WAIT_S)
    closing = threading.Thread(target=pool.close)
    closing.start()
    while thread not in pool._ending:
        time.sleep(0)
    goes_on.set()
    closing.join(WAIT_S)
    assert not thread.is_alive()


def test_a_failing_task_is_logged_and_its_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    pool, done = Pool("test"), threading.Event()

    def fail() -> None:
        raise ValueError("a callback of yours")

    pool.run(fail)
    pool.run(done.set)
    assert done.wait(WAIT_S)
    pool.close()
    assert "a callback of yours" in caplog.text


def _logs_of_two(which: Any) -> tuple[CallLog, CallLog]:
    """Of the members of one group that has one store. ``which`` changes the Members of the second one."""
    store = dist.HashStore()  # type: ignore[no-untyped-call, unused-ignore]
    session = cast(Any, SimpleNamespace(size=2))
    one, other = (Members(cast(Any, None), session, (0, 1), position, "group") for position in range(2))
    return CallLog(one, store), CallLog(which(other), store)


def test_a_member_that_still_connects_has_called_no_other_operation() -> None:
    early, late = _logs_of_two(connecting)
    late.record(("exchange of addresses",), "group.addresses")
    assert not late.compare(1)
    early.record(("all_reduce",), "group.sum")
    assert not early.compare(1)


def test_members_that_call_different_operations_are_told() -> None:
    early, late = _logs_of_two(lambda members: members)
    late.record(("broadcast",), "group.broadcast")
    late.compare(1)
    early.record(("all_reduce",), "group.sum")
    with pytest.raises(MismatchError, match=r"rank 0 called all_reduce, rank 1 broadcast"):
        early.compare(1)
