"""Who hands a broadcast on."""

from __future__ import annotations

from collections import Counter

import pytest

from byteps_py.proto import control_pb2 as pb
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.worker.core.placement_view import broadcast_pieces
from byteps_py.worker.core.topology import Topology

PARTITION = 4096


def topology(n: int, k: int, rates: dict[str, float] | None = None, gpu_servers: bool = True) -> Topology:
    """Two ranks on each machine."""
    workers = [pb.Member(machine_index=i, machine_id=f"g{i}", local_size=2, first_rank=2 * i) for i in range(n)]
    ids = [f"c{i}" for i in range(k)] + [f"g{i}" for i in range(n) if gpu_servers]
    servers = [
        pb.Member(member_id=9 + i, machine_id=m, link_mbit=(rates or {}).get(m, 100.0)) for i, m in enumerate(ids)
    ]
    return Topology(1, 0, tuple(workers), tuple(servers), PARTITION, 1)


def shares(here: Topology, root: int, partitions: int = 60) -> dict[str, int]:
    spec = TensorSpec("b", DType.UINT8, (partitions * PARTITION,), Op.BROADCAST, root=root)
    pieces = broadcast_pieces(spec, here)
    assert [offset for offset, _, _ in pieces] == [i * PARTITION for i in range(partitions)]
    machines = {server.member_id: server.machine_id for server in here.servers}
    return dict(Counter(machines[server] for _, _, server in pieces))


@pytest.mark.parametrize(
    ("n", "k", "root", "expected"),
    [
        (2, 0, 0, {"g1": 60}),
        (3, 0, 2, {"g0": 30, "g2": 30}),
        (4, 1, 7, {"c0": 15, "g0": 15, "g1": 15, "g2": 15}),
    ],
)
def test_all_but_the_roots_machine_take_equal_parts(n: int, k: int, root: int, expected: dict[str, int]) -> None:
    assert shares(topology(n, k), root) == expected


def test_a_slow_link_takes_less() -> None:
    assert shares(topology(3, 1, {"c0": 50.0}), 0) == {"c0": 12, "g1": 24, "g2": 24}


def test_where_only_cpu_machines_sum_they_take_all() -> None:
    assert shares(topology(2, 2, gpu_servers=False), 0) == {"c0": 30, "c1": 30}
