"""Which server hands which part of a broadcast on to the other machines. Pure.

The servers of the root's machine take no part: it sends everything once, and not what they would hand on as well. The
others share in proportion to their links' rates. So the root's link carries M, every other machine's M inwards and,
with n machines, at most (n-2)/(n-1) · M outwards: the least time there can be, M/B.
"""

from __future__ import annotations

from collections.abc import Sequence

from byteps_py.tensors import TensorSpec, split
from byteps_py.worker.topology import Topology


def broadcast_pieces(spec: TensorSpec, topology: Topology) -> list[tuple[int, int, int]]:
    """(offset, length, server's member id) of a broadcast's partitions, by offset."""
    root = topology.workers[topology.machine_of(spec.root)].machine_id
    able = [server for server in topology.servers if server.machine_id != root] or list(topology.servers)
    rates = [server.link_mbit for server in able]
    rates = rates if all(rates) else [1.0] * len(able)
    cuts = split(spec.nbytes, topology.partition_bytes, spec.dtype.itemsize)
    return [(*cut, able[turn].member_id) for cut, turn in zip(cuts, _turns(rates, len(cuts)), strict=True)]


def _turns(rates: Sequence[float], count: int) -> list[int]:
    """``count`` indices, each as often as its rate says, and as evenly spread as can be."""
    given = [0] * len(rates)
    turns = []
    for _ in range(count):
        turn = min(range(len(rates)), key=lambda i: ((given[i] + 1) / rates[i], i))
        given[turn] += 1
        turns.append(turn)
    return turns
