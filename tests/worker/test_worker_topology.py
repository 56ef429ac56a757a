"""What a communication service takes from the servers of an epoch."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from byteps_py.proto import control_pb2 as pb
from byteps_py.worker.core.credit import PushQueue
from byteps_py.worker.core.topology import Topology, turn_starts

MBIT = 400.0
USUAL = 2 << 20  # in flight, with 4 machines and such links


class Part(NamedTuple):
    server: int
    length: int
    index: int


def topology(cpu: int, gpu: int, machine: int = 0, machines: int = 4) -> Topology:
    """CPU machines' servers have the ids 1, 2, …, GPU machines' 11, 12, …"""
    servers = [pb.Member(member_id=1 + i, weight=6, kind=pb.MACHINE_KIND_CPU, link_mbit=MBIT) for i in range(cpu)]
    servers += [pb.Member(member_id=11 + i, weight=2, kind=pb.MACHINE_KIND_GPU, link_mbit=MBIT) for i in range(gpu)]
    workers = tuple(pb.Member(link_mbit=MBIT) for _ in range(machines))
    return Topology(1, machine, workers, tuple(servers), 4096, 1)


@pytest.mark.parametrize(
    ("cpu", "gpu", "expected"),
    [
        (1, 4, {1: 512}),  # a quarter of the credit
        (2, 4, {1: 512, 2: 512}),
        (3, 4, {1: 341, 2: 341, 3: 341}),  # half of it for all together
        (0, 4, {}),
        (2, 0, {1: 0, 2: 0}),  # where only CPU machines sum, there is nobody to be ahead of
    ],
)
def test_servers_of_cpu_machines_have_a_head_start_before_those_of_gpu_machines(
    cpu: int, gpu: int, expected: dict[int, int]
) -> None:
    head_starts = topology(cpu, gpu).head_starts(USUAL)
    assert {server: nbytes >> 10 for server, nbytes in head_starts.items()} == expected


@pytest.mark.parametrize(("credit_bytes", "expected_kb"), [(1 << 20, 256), (64 << 20, 512), (0, 512)])
def test_more_in_flight_than_the_links_need_gives_no_larger_head_start(credit_bytes: int, expected_kb: int) -> None:
    assert topology(1, 4).head_starts(credit_bytes) == {1: expected_kb << 10}


def test_weights_are_those_of_all_servers() -> None:
    assert topology(1, 2).weights == {1: 6, 11: 2, 12: 2}


def test_at_every_moment_many_machines_push_to_different_servers() -> None:
    """Each of six GPU machines has two partitions for each of their servers."""
    orders = []
    for machine in range(6):
        found = topology(0, 6, machine, machines=6)
        queue: PushQueue[Part] = PushQueue()
        queue.set_weights(found.weights, turn_starts(found, USUAL))
        for index in range(12):
            queue.add(Part(11 + index % 6, 4096, index), priority=-index)
        orders.append([part.server for _ in range(12) if (part := queue.take(0.0)) is not None])
    assert orders[0] == [12, 13, 14, 15, 16, 11] * 2
    assert [set(at_a_time) for at_a_time in zip(*orders, strict=True)] == [{11, 12, 13, 14, 15, 16}] * 12


@pytest.mark.parametrize(("cpu", "gpu"), [(1, 6), (2, 6), (3, 6), (0, 6), (6, 0)])
def test_turns_of_servers_begin_less_than_a_partition_apart_from_their_head_starts(cpu: int, gpu: int) -> None:
    for machine in range(6):
        found = topology(cpu, gpu, machine, machines=6)
        head_starts, starts = found.head_starts(USUAL), turn_starts(found, USUAL)
        ahead = [starts[server.member_id] - head_starts.get(server.member_id, 0) for server in found.servers]
        assert len(set(ahead)) == len(ahead) == len(starts)
        assert all(0 < each < found.partition_bytes for each in ahead)


def test_few_machines_need_no_order_of_servers() -> None:
    found = topology(2, 4, 1)
    assert turn_starts(found, USUAL) == found.head_starts(USUAL)
