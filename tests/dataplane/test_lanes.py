"""What every way between a communication service and a summation service does, whatever carries the bytes: the
simulator's memory, shared memory, TCP. A new lane is right if these pass (support/lanes.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.data_plane import header_for
from support.lanes import LANES, Lane

from byteps_py.system import rdma_devices
from byteps_py.system.network_interfaces import addresses_of
from byteps_py.tensors import DType, Op
from byteps_py.wire.data_link import Header, Kind

pytestmark = pytest.mark.usefixtures("zeromq_collector")


@pytest.fixture(name="lane", params=LANES)
def opening(request: pytest.FixtureRequest) -> Iterator[Lane]:
    if "IPv6" in request.param and "::1" not in addresses_of("lo"):
        pytest.skip("this machine has no IPv6")
    if "NIXL" in request.param and not rdma_devices.library():
        pytest.skip("NIXL is not installed")
    lane = LANES[request.param]()
    yield lane
    lane.close()


def some(nbytes: int, seed: int = 0) -> bytes:
    return bytes((seed * 31 + at) & 0xFF for at in range(min(nbytes, 997))) * (nbytes // 997 + 1)


def pushed(lane: Lane, nbytes: int, index: int = 0, **facts: object) -> bytes:
    data = some(nbytes, index)[:nbytes]
    lane.push(header_for(0, data, index=index, dtype=DType.UINT8, **facts), data)
    return data


def test_what_is_pushed_arrives_and_its_answer_comes_back(lane: Lane) -> None:
    sizes = [size for size in (1, 63, 64, 4096, 16 << 10, 300_001, lane.most_bytes) if size <= lane.most_bytes]
    for index, nbytes in enumerate(sizes):
        data = pushed(lane, nbytes, index)
        lane.until(lambda index=index: len(lane.arrivals) == index + 1)  # type: ignore[misc]
        arrival = lane.arrivals[-1]
        assert (arrival.header.kind, arrival.header.index, arrival.nbytes) == (Kind.PUSH, index, nbytes)
        assert arrival.origin.machine == 0
        assert lane.payload_of(arrival) == data
        result = some(nbytes, 7 + index)[:nbytes]
        lane.answer(arrival, result)
        lane.until(lambda index=index: len(lane.came) == index + 1)  # type: ignore[misc]
        header, came = lane.came[-1]
        assert (header.kind, header.index, came == result) == (Kind.ANSWER, index, True)
    assert sum(rail.bytes_sent for rail in lane.link.rails) == sum(sizes)


def test_many_are_in_flight_and_each_has_its_own_answer(lane: Lane) -> None:
    """Whatever the order in which they are answered."""
    count = 24
    data = {index: pushed(lane, 512 + 64 * index, index) for index in range(count)}
    lane.until(lambda: len(lane.arrivals) == count)
    for arrival in sorted(lane.arrivals, key=lambda each: (each.header.index * 7) % count):
        assert lane.payload_of(arrival) == data[arrival.header.index]
        lane.answer(arrival, data[arrival.header.index][::-1])
    lane.until(lambda: len(lane.came) == count)
    assert {header.index: came for header, came in lane.came} == {index: each[::-1] for index, each in data.items()}


def test_what_is_said_about_one_partition_comes_in_order(lane: Lane) -> None:
    """Two network cards make no difference."""
    count = 20
    for index in range(count):
        pushed(lane, 256, index)
        lane.link.tell(header_for(0, b"", Kind.WITHDRAW, index=index), b"")
    lane.until(lambda: len(lane.order) == 2 * count)
    for index in range(count):
        assert [kind for kind, each in lane.order if each == index] == ["PUSH", "WITHDRAW"]


def test_what_is_summed_in_no_rounds_comes_in_order_with_what_is_said_about_it(lane: Lane) -> None:
    facts = {"op": Op.ACCUMULATE, "dtype": DType.UINT8}
    for index in range(8):
        text = f"the clock of {index}".encode()
        lane.link.tell(header_for(0, text, Kind.CLOCK, index=index, **facts), text)
        data = some(128, index)[:128]
        lane.push(header_for(0, data, index=index, **facts), data)
    lane.until(lambda: len(lane.arrivals) == 16)
    for index in range(8):
        clock, push = (each for each in lane.arrivals if each.header.index == index)
        assert (clock.header.kind, clock.text, clock.payload) == (Kind.CLOCK, f"the clock of {index}".encode(), None)
        assert (push.header.kind, lane.payload_of(push)) == (Kind.PUSH, some(128, index)[:128])


def test_a_result_comes_without_a_contribution_and_a_contribution_may_want_none(lane: Lane) -> None:
    data = some(900)[:900]
    lane.push(header_for(0, data, Kind.PULL, op=Op.BROADCAST, root=1, index=1, dtype=DType.UINT8))
    lane.push(header_for(0, b"", Kind.PASS, index=2))
    lane.until(lambda: len(lane.arrivals) == 2)
    pull, passed = sorted(lane.arrivals, key=lambda each: each.header.index)
    assert (pull.header.kind, pull.nbytes, pull.payload) == (Kind.PULL, 0, None)
    lane.answer(pull, data)
    lane.answer(passed, b"")
    lane.until(lambda: len(lane.came) == 2)
    assert {header.index: came for header, came in lane.came} == {1: data, 2: b""}


def test_a_server_refuses_with_the_reason(lane: Lane) -> None:
    pushed(lane, 100)
    lane.until(lambda: len(lane.arrivals) == 1)
    (arrival,) = lane.arrivals
    arrival.origin.refuse(arrival.header, "MismatchError\nthe sizes differ: ä")
    lane.until(lambda: len(lane.came) == 1)
    ((header, text),) = lane.came
    assert (header.kind, text.decode()) == (Kind.REFUSED, "MismatchError\nthe sizes differ: ä")


def test_a_server_says_what_is_no_answer(lane: Lane) -> None:
    pushed(lane, 100)
    lane.until(lambda: len(lane.arrivals) == 1)
    (arrival,) = lane.arrivals
    arrival.origin.tell(Header(Kind.WANT, 0, epoch=1, key=7, round=1))
    arrival.origin.tell(Header(Kind.AWAITED, 0, epoch=1), b"names of rounds")
    lane.until(lambda: len(lane.came) == 2)
    assert [(header.kind, text) for header, text in lane.came] == [
        (Kind.WANT, b""), (Kind.AWAITED, b"names of rounds"),
    ]  # fmt: skip


def test_a_machine_that_has_left_gets_no_answer_and_nothing_breaks(lane: Lane) -> None:
    pushed(lane, 100)
    lane.until(lambda: len(lane.arrivals) == 1)
    lane.link.close()
    lane.until(lambda: not lane.connections)
    (arrival,) = lane.arrivals

    def is_noticed() -> bool:
        if not lane.gone:  # it is found out when it is to be answered
            lane.answer(arrival, bytes(100))
        return bool(lane.gone)

    lane.until(is_noticed)
    assert lane.gone == [arrival.origin]
    assert not lane.came
    lane.link.close()  # a second time does no harm


def test_a_server_that_has_ended_is_noticed_and_what_it_is_sent_breaks_nothing(lane: Lane) -> None:
    pushed(lane, 100)
    lane.until(lambda: len(lane.arrivals) == 1)
    lane.arrivals.clear()
    lane.end_server()
    lane.until(lambda: not any(rail.is_open for rail in lane.link.rails))
    pushed(lane, 100, 1)
    assert not lane.came
