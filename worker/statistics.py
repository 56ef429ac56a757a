"""What a communication service reports of itself: what it has cost, and what it has done in all of its groups."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path

from byteps_py.proto import control_pb2 as pb
from byteps_py.worker.group import Group
from byteps_py.worker.peers import PeerMachines


def statistics(past: pb.Statistics, group: Group | None, peers: PeerMachines | None) -> pb.Statistics:
    """``past``: of groups that are over."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    counted = pb.Statistics(
        cpu_s=usage.ru_utime + usage.ru_stime,
        resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
        bytes_in_flight=group.queue.in_flight_bytes if group is not None else 0,
    )
    counted.MergeFrom(past)
    if group is not None:
        group.count(counted)
    if peers is not None:
        counted.bytes_sent += peers.bytes_sent
        counted.bytes_received += peers.bytes_received
    return counted


def heartbeat(
    past: pb.Statistics, group: Group | None, peers: PeerMachines | None, waiting: Sequence[pb.Waiting]
) -> pb.Heartbeat:
    """``waiting``: what local ranks have waited for long enough to be told."""
    network = group.network if group is not None else None
    return pb.Heartbeat(
        statistics=statistics(past, group, peers),
        waiting=waiting,
        ranks=group.executor.pace.report(group.executor.ranks) if group is not None else (),
        servers=network.pace.report() if network is not None else (),
    )
