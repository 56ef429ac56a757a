"""Payloads that are read from the sender's memory. What every lane does, test_lanes.py tests of this one, too."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import zmq
from support.data_plane import header_for
from support.lanes import TcpLane
from support.rdma import StandInAgent
from support.summation import SETTINGS

from byteps_py.dataplane.link_usage import TcpCounters, UsageMeter
from byteps_py.dataplane.nixl_agent import NixlAgent
from byteps_py.dataplane.rdma_lane import RdmaLane
from byteps_py.errors import CommunicationError, IntegrityError, ProtocolError
from byteps_py.system import rdma_devices
from byteps_py.tensors import DType
from byteps_py.wire.data_link import Header, Kind
from byteps_py.worker.io.server_links import TcpLink

pytestmark = pytest.mark.usefixtures("zeromq_collector")

NBYTES = SETTINGS.max_partition_bytes


class Both:
    """A lane by RDMA, with the agents of both ends."""

    def __init__(self, secret: str = SETTINGS.secret) -> None:
        self.agents: list[StandInAgent] = []

        def new_agent() -> StandInAgent:
            self.agents.append(StandInAgent())
            return self.agents[-1]

        self.lane = TcpLane(replace(SETTINGS, secret=secret), agent=new_agent)
        self.machine, self.server = self.agents

    def push(self, index: int, nbytes: int = NBYTES) -> bytes:
        data = bytes([index + 1]) * nbytes
        self.lane.push(header_for(0, data, index=index, dtype=DType.UINT8), data)
        return data

    def wait(self, arrivals: int) -> None:
        self.lane.until(lambda: len(self.lane.arrivals) == arrivals)

    def settle(self) -> None:
        """Nothing is under way."""
        self.lane.until(lambda: not any(each._held or each._reads or each._new for each in self.lane.rdma))


@pytest.fixture(name="both", params=["", SETTINGS.secret], ids=["open", "signed"])
def opening(request: pytest.FixtureRequest) -> Iterator[Both]:
    both = Both(request.param)
    yield both
    both.lane.close()


def test_large_payloads_are_read_in_both_directions_and_small_ones_are_sent(both: Both) -> None:
    machine, server = both.lane.rdma
    small = both.push(0, machine.least_bytes - 1)
    both.wait(1)
    both.lane.answer(both.lane.arrivals[0], small)
    both.lane.until(lambda: len(both.lane.came) == 1)
    assert machine.bytes_read == server.bytes_read == 0
    data = both.push(1)
    both.wait(2)
    arrival = both.lane.arrivals[1]
    assert both.lane.payload_of(arrival) == data
    assert server.bytes_read == NBYTES
    assert arrival.payload is not None
    arrival.origin.answer(arrival.header, arrival.payload.message())  # as a server does that has summed there
    both.lane.until(lambda: len(both.lane.came) == 2)
    assert both.lane.came[1][1] == data
    assert machine.bytes_read == NBYTES


def test_what_was_read_is_counted_with_the_time_that_it_took(both: Both) -> None:
    """For the rates of links: see UsageMeter."""
    link = both.lane.link
    assert link.read_counters == (0, 0.0, 0.0)
    began_s = both.lane.loop.time()
    for index in range(3):
        both.push(index)
    both.wait(3)
    both.settle()
    took_s = both.lane.loop.time() - began_s
    assert link.read_counters is not None
    assert link.read_counters.acked == 3 * NBYTES
    assert 0 < link.read_counters.busy_s < took_s  # reads at the same time count once
    clock = [0.0]
    meter = UsageMeter(lambda: clock[0])
    reports = []
    for bytes_read in (10, 40, 90):
        clock[0] += 1
        counters = TcpCounters(bytes_read, bytes_read / 10, 0.0)
        reports.append(
            [(each.peer, each.bytes, each.busy_s) for each in meter.report([(7, 3), (8, 4)], {3: counters}.get)]
        )
    assert reports == [[], [(7, 30, 3.0)], [(7, 50, 5.0)]]
    assert both.lane._server.link_usage() == []  # a connection of one machine with itself shows no link


def test_an_answer_from_other_memory_is_sent(both: Both) -> None:
    data = both.push(0)
    both.wait(1)
    both.lane.answer(both.lane.arrivals[0], data)
    both.lane.until(lambda: len(both.lane.came) == 1)
    assert both.lane.came[0][1] == data
    assert both.lane.rdma[0].bytes_read == 0


def test_what_follows_waits_until_the_payload_is_read_and_only_then_the_sender_hears_it(both: Both) -> None:
    both.server.is_stuck = True
    both.push(0)
    both.push(1, 100)
    both.lane.link.tell(header_for(0, b"", Kind.WITHDRAW, index=0), b"")
    both.lane.until(lambda: bool(both.server.reads))
    for _ in range(20):
        both.lane.loop.run_once(both.lane.loop.time() + 0.002)
    assert not both.lane.order
    assert both.lane.rdma[0]._held == 1
    both.server.is_stuck = False
    both.lane.until(lambda: len(both.lane.order) == 3)
    assert both.lane.order == [("PUSH", 0), ("PUSH", 1), ("WITHDRAW", 0)]
    both.settle()


def test_reads_are_under_way_at_the_same_time(both: Both) -> None:
    both.server.is_stuck = True
    data = [both.push(index) for index in range(5)]
    both.lane.until(lambda: len(both.server.reads) == 5)
    both.server.is_stuck = False
    both.wait(5)
    assert [both.lane.payload_of(each) for each in both.lane.arrivals] == data


def test_bytes_that_had_not_come_are_noticed_and_read_again(both: Both) -> None:
    both.server.lies = 1
    data = both.push(0)
    both.wait(1)
    assert both.lane.payload_of(both.lane.arrivals[0]) == data


def test_bytes_that_never_come_are_an_error(both: Both) -> None:
    both.server.lies = 2
    both.push(0)
    with pytest.raises(IntegrityError, match=r"a PUSH message to .* came damaged twice"):
        both.wait(1)


def test_an_answer_whose_bytes_had_not_come_is_asked_for_again(both: Both) -> None:
    both.machine.lies = 1
    both.push(0)
    both.wait(1)
    arrival = both.lane.arrivals.pop()
    assert arrival.payload is not None
    arrival.origin.answer(arrival.header, arrival.payload.message())
    both.lane.until(lambda: both.lane.reconnections == 1 and both.lane.link.is_open)
    assert not both.lane.came


def test_memory_that_its_sender_has_used_again_is_a_damaged_message(
    both: Both, caplog: pytest.LogCaptureFixture
) -> None:
    """Its sender has taken the contribution back by then, and awaits no answer."""
    both.server.is_stuck = True
    data = both.lane.arena.allocate(NBYTES)
    both.lane.link.push(header_for(0, bytes(NBYTES), index=0, dtype=DType.UINT8), data, 0, None)
    both.lane.link.push(header_for(0, b"", Kind.WITHDRAW, index=0), None, 0, None)
    both.lane.until(lambda: bool(both.server.reads))
    ctypes.memset(data.address, 7, NBYTES)
    both.server.is_stuck = False
    with caplog.at_level(logging.WARNING, "byteps_py"):
        both.lane.until(lambda: both.lane.order == [("WITHDRAW", 0)])
    assert "came damaged" in caplog.text


def test_a_read_that_fails_breaks_the_connection_and_the_next_one_works(both: Both) -> None:
    both.server.fails = True
    both.push(0)
    both.lane.until(lambda: both.lane.reconnections == 1)
    both.server.fails = False
    both.lane.until(lambda: both.lane.link.is_open)
    data = both.push(0)
    both.wait(1)
    assert both.lane.payload_of(both.lane.arrivals[0]) == data


def test_reads_that_never_work_are_an_error_with_the_remedy() -> None:
    both = Both()
    try:
        both.server.fails = True
        for number in range(5):
            both.lane.until(lambda: both.lane.link.is_open)
            both.push(0)
            is_last = number == 4
            if not is_last:
                both.lane.until(lambda number=number: both.lane.reconnections == number + 1)  # type: ignore[misc]
        with pytest.raises(CommunicationError, match=r"RDMA to .* does not work: 5 .*or unset DMLC_ENABLE_RDMA"):
            both.lane.until(lambda: False)
    finally:
        both.lane.close()


def test_ends_that_do_not_reach_each_other_are_an_error_when_the_job_starts() -> None:
    def new_agent() -> StandInAgent:
        agent = StandInAgent()
        agent.is_alone = True
        return agent

    with pytest.raises(ProtocolError, match=r"does not take part in RDMA: .*can't be read by RDMA: there is no way"):
        TcpLane(SETTINGS, agent=new_agent)


@pytest.mark.parametrize("library", ["a stand-in", "NIXL"])
def test_a_connection_that_is_made_again_reads_again(library: str) -> None:
    if library == "NIXL" and not rdma_devices.library():
        pytest.skip("NIXL is not installed")
    lane = TcpLane(SETTINGS, agent=StandInAgent if library != "NIXL" else lambda: NixlAgent("tcp"))
    try:
        for number in range(3):
            data = bytes([number + 1]) * NBYTES
            lane.push(header_for(0, data, index=number, dtype=DType.UINT8), data)
            lane.until(lambda number=number: len(lane.arrivals) == number + 1)  # type: ignore[misc]
            arrival = lane.arrivals[-1]
            assert arrival.payload is not None
            assert lane.payload_of(arrival) == data
            arrival.origin.answer(arrival.header, arrival.payload.message())
            lane.until(lambda number=number: len(lane.came) == number + 1)  # type: ignore[misc]
            assert lane.came[-1][1] == data
            del arrival
            cast(TcpLink, lane.link)._dialer.reconnect()
            lane.until(lambda: lane.link.is_open)
        assert [each.bytes_read for each in lane.rdma] == [3 * NBYTES, 3 * NBYTES]
    finally:
        lane.close()


def test_an_error_of_the_library_ends_the_service(both: Both) -> None:
    both.server.breaks = RuntimeError("a wrong argument")
    both.push(0)
    with pytest.raises(RuntimeError, match=r"^a wrong argument$"):
        both.wait(1)
    both.server.breaks = None


def test_a_read_has_a_deadline(both: Both) -> None:
    both.lane.rdma[1].patience_s = 0.05
    both.server.is_stuck = True
    both.push(0)
    both.lane.until(lambda: both.lane.reconnections == 1)
    both.server.is_stuck = False
    both.lane.until(lambda: both.lane.link.is_open)
    both.push(0)
    both.wait(1)
    both.settle()


def test_a_machine_that_leaves_ends_its_reads(both: Both) -> None:
    both.server.is_stuck = True
    both.push(0)
    both.lane.until(lambda: bool(both.server.reads))
    both.lane.link.close()
    both.lane.until(lambda: not both.lane.connections)
    both.server.is_stuck = False
    both.settle()
    assert not both.lane.arrivals


def test_memory_of_a_read_that_never_ends_is_not_used_again(both: Both) -> None:
    """Its bytes may yet come."""
    server = both.lane.rdma[1]
    server.patience_s = 0.05
    both.server.is_stuck = True
    both.push(0)
    both.lane.until(lambda: both.lane.reconnections == 1)
    both.lane.until(lambda: len(server._lost) == 1)
    assert not both.server.reads
    both.server.is_stuck = False
    both.lane.until(lambda: both.lane.link.is_open)
    for index in range(3):
        both.push(index)
        both.wait(index + 1)
    lost = server._lost[0]
    assert isinstance(lost, np.ndarray)
    addresses = {each.payload.address for each in both.lane.arrivals if each.payload is not None}
    assert len(addresses) == 3
    assert lost.__array_interface__["data"][0] not in addresses


def test_a_server_that_ends_while_its_answer_is_read(both: Both) -> None:
    both.push(0)
    both.wait(1)
    both.machine.is_stuck = True
    arrival = both.lane.arrivals.pop()
    assert arrival.payload is not None
    arrival.origin.answer(arrival.header, arrival.payload.message())
    both.lane.until(lambda: bool(both.machine.reads))
    both.lane.end_server()
    both.lane.until(lambda: both.lane.reconnections == 1)
    both.machine.is_stuck = False
    both.lane.until(lambda: not both.machine.reads)
    assert not both.lane.came


def test_nothing_is_polled_when_nothing_is_under_way(both: Both) -> None:
    both.push(0)
    both.wait(1)
    both.settle()
    for _ in range(3):
        both.lane.loop.run_once(both.lane.loop.time() + 0.01)
    before = [each.advanced for each in both.agents]
    for _ in range(5):
        both.lane.loop.run_once(both.lane.loop.time() + 0.01)
    assert [each.advanced for each in both.agents] == before


def blocks_in_use(lane: RdmaLane) -> int:
    """Those of its pool that somebody still has."""
    return lane._pool._used // NBYTES - sum(map(len, lane._pool._free.values())) - len(lane._freed)


def test_memory_is_registered_once_and_used_again(both: Both) -> None:
    for index in range(40):
        both.push(index % 3)
        both.lane.until(lambda: len(both.lane.arrivals) == 1)
        both.lane.arrivals.clear()
        both.lane.until(lambda: blocks_in_use(both.lane.rdma[1]) <= 2)  # threads give them back
    assert [len(each.regions) for each in both.agents] == [2, 1]  # the arena, which has grown; the server's pool
    assert both.lane.rdma[1]._pool._used <= 4 * NBYTES  # of 40


def test_memory_that_is_new_is_described_before_it_is_read(both: Both) -> None:
    both.push(0)
    both.wait(1)
    block = both.lane.arena.allocate_alone(NBYTES)
    ctypes.memset(block.address, 9, NBYTES)
    both.lane.link.push(header_for(0, bytes([9]) * NBYTES, index=1, dtype=DType.UINT8), block, 0, None)
    both.wait(2)
    assert both.lane.payload_of(both.lane.arrivals[1]) == bytes([9]) * NBYTES
    assert len(both.machine.regions) == 2


@pytest.mark.parametrize("has_rdma", [(True, False), (False, True)], ids=["the machine", "the server"])
def test_an_end_without_rdma_keeps_the_connection_for_all_and_the_log_says_so(
    has_rdma: tuple[bool, bool], caplog: pytest.LogCaptureFixture
) -> None:
    made: list[StandInAgent] = []

    def new_agent() -> StandInAgent:
        made.append(StandInAgent())
        return made[-1]

    lane = TcpLane(SETTINGS, agent=new_agent, has_rdma=has_rdma)
    try:
        data = bytes([3]) * NBYTES
        for index in range(2):
            lane.push(header_for(0, data, index=index, dtype=DType.UINT8), data)
        lane.until(lambda: len(lane.arrivals) == 2)
        assert lane.payload_of(lane.arrivals[0]) == data
        assert not any(each.reads or each.known for each in made)
        assert caplog.text.count("is without RDMA: tensors travel over TCP. Set DMLC_ENABLE_RDMA=1 there") == 1
    finally:
        lane.close()


@pytest.mark.parametrize(
    ("header", "payload"),
    [
        (Header(Kind.PLACED, 0, length=0, segment_offset=1), b""),
        (Header(Kind.PLACED, 0, length=1 << 40, segment_offset=1), b""),
        (Header(Kind.PLACED_READ, 0), b"odd"),
        (Header(Kind.MEMORY, 0), b"no description"),
        (Header(Kind.MEMORY, 0), b'another\0["name", []]'),
    ],
    ids=["empty", "too long", "odd numbers", "no description", "two names"],
)
def test_what_no_correct_peer_sends_is_dropped(both: Both, header: Header, payload: bytes) -> None:
    send(both, header, payload)
    data = both.push(0)
    both.wait(1)
    assert both.lane.payload_of(both.lane.arrivals[0]) == data
    assert both.lane._server._traffic.malformed == 1


def test_a_place_that_may_not_be_read_breaks_the_connection(both: Both) -> None:
    send(both, Header(Kind.PLACED, 0, length=NBYTES, segment_offset=4096), b"sealed")
    both.lane.until(lambda: both.lane.reconnections == 1)


def send(both: Both, header: Header, payload: bytes) -> None:
    """What only PlacedMessages makes."""
    dialer = cast(TcpLink, both.lane.link)._dialer
    assert dialer._sealing is not None
    assert dialer._socket is not None
    dialer._socket.send_multipart(dialer._sealing.seal(header.pack(), payload), zmq.NOBLOCK)
