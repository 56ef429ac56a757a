"""What a communication service takes from the servers of an epoch."""

from __future__ import annotations

import pytest

from byteps_py.proto import control_pb2 as pb
from byteps_py.worker.core.topology import Topology

MBIT = 400.0
USUAL = 2 << 20  # in flight, with 4 machines and such links


def topology(cpu: int, gpu: int) -> Topology:
    """CPU machines' servers have the ids 1, 2, …, GPU machines' 11, 12, …"""
    servers = [pb.Member(member_id=1 + i, weight=6, kind=pb.MACHINE_KIND_CPU, link_mbit=MBIT) for i in range(cpu)]
    servers += [pb.Member(member_id=11 + i, weight=2, kind=pb.MACHINE_KIND_GPU, link_mbit=MBIT) for i in range(gpu)]
    workers = tuple(pb.Member(link_mbit=MBIT) for _ in range(4))
    return Topology(1, 0, workers, tuple(servers), 4096, 1)


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
