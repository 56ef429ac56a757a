"""What a communication service takes from the servers of an epoch."""

from __future__ import annotations

import pytest

from byteps_py.proto import control_pb2 as pb
from byteps_py.worker.topology import Topology

CREDIT = 1200


def topology(cpu: int, gpu: int) -> Topology:
    """CPU machines' servers have the ids 1, 2, …, GPU machines' 11, 12, …"""
    servers = [pb.Member(member_id=1 + i, weight=6, kind=pb.MACHINE_KIND_CPU) for i in range(cpu)]
    servers += [pb.Member(member_id=11 + i, weight=2, kind=pb.MACHINE_KIND_GPU) for i in range(gpu)]
    return Topology(1, 0, (pb.Member(),), tuple(servers), 4096, 1)


@pytest.mark.parametrize(
    ("cpu", "gpu", "expected"),
    [
        (1, 4, {1: 300}),  # a quarter of the credit
        (2, 4, {1: 300, 2: 300}),
        (3, 4, {1: 200, 2: 200, 3: 200}),  # half of it for all together
        (0, 4, {}),
        (2, 0, {1: 0, 2: 0}),  # where only CPU machines sum, there is nobody to be ahead of
    ],
)
def test_servers_of_cpu_machines_have_a_head_start_before_those_of_gpu_machines(
    cpu: int, gpu: int, expected: dict[int, int]
) -> None:
    assert topology(cpu, gpu).head_starts(CREDIT) == expected


def test_weights_are_those_of_all_servers() -> None:
    assert topology(1, 2).weights == {1: 6, 11: 2, 12: 2}
