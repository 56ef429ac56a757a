"""How much a machine has in flight where its bytes are on their way for long, and what it measures such a link at."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.clusters import has_namespaces

from benchmarks.cluster.hosts import cluster
from byteps_py.config import tuning
from byteps_py.config.settings import Settings
from byteps_py.proto import control_pb2 as pb
from byteps_py.runtime import Runtime
from byteps_py.worker.group import Group, GroupServices

FAR_S, NEAR_S = 0.1, 0.001
MBIT, PARTITION = 1000.0, 1 << 20


class DistantNetwork:
    """To servers at a distance that the test chooses."""

    def __init__(self, *_: object) -> None:
        self.round_trip_s = 0.0

    def set_topology(self, topology: object) -> None: ...


class DistantGroup(Group):
    network_class = cast(Any, DistantNetwork)


def group(settings: Settings) -> DistantGroup:
    """One GPU machine and a CPU machine."""
    loop = SimpleNamespace(call_later=lambda *_: None, time=lambda: 0.0, lateness_s=0.0)
    given = (Runtime(loop=cast(Any, loop)), settings, *(None,) * 9)
    services = GroupServices(*cast(Any, given))
    worker = pb.Member(member_id=1, local_size=1, link_mbit=MBIT)
    server = pb.Member(member_id=2, kind=pb.MACHINE_KIND_CPU, link_mbit=MBIT, weight=1)
    membership = pb.Membership(epoch=1, workers=[worker], servers=[server], partition_bytes=PARTITION)
    return DistantGroup(services, membership, 0)


def widened(made: DistantGroup, round_trip_s: float) -> int:
    """The bytes in flight once the connections that there are take so long."""
    cast(Any, made.network).round_trip_s = round_trip_s
    made.widen_for_long_links()
    return made.queue.credit_bytes


def test_more_is_in_flight_over_long_links_however_often_that_is_looked_at() -> None:
    made = group(Settings())
    usual = made.queue.credit_bytes
    assert widened(made, 0.0) == widened(made, NEAR_S) == usual
    wider = usual + tuning.on_their_way_bytes(MBIT, FAR_S)
    assert widened(made, FAR_S) == widened(made, FAR_S) == wider
    assert widened(made, FAR_S / 2) == wider  # what is in flight stays in flight
    made._limit(made.topology)  # another epoch begins
    assert made.queue.credit_bytes == usual
    assert widened(made, FAR_S) == wider
    made.requests.memory.release()


@pytest.mark.parametrize("round_trip_s", [NEAR_S, FAR_S])
def test_the_settings_say_how_much(round_trip_s: float) -> None:
    made = group(Settings(credit_bytes=3 * PARTITION))
    assert widened(made, round_trip_s) == 3 * PARTITION
    made.requests.memory.release()


def test_a_machine_without_servers_has_nothing_to_widen() -> None:
    made = group(Settings())
    made.network = None
    usual = made.queue.credit_bytes
    made.widen_for_long_links()
    assert made.queue.credit_bytes == usual
    made.requests.memory.release()


@pytest.mark.slow
@pytest.mark.skipif(not has_namespaces(), reason="needs root and iproute2 (network namespaces)")
def test_a_long_link_is_measured_once_connections_are_as_fast_as_they_get() -> None:
    """With a round trip of 100 ms, TCP needs a second to fill a link of 50 Mbit/s in both directions."""
    program = [sys.executable, str(Path(__file__).parents[1] / "programs" / "probe_link.py")]
    with cluster([50.0] * 2, delay_ms=50.0) as (here, there):
        environ = {**os.environ, "DMLC_NODE_HOST": there.address}
        with subprocess.Popen(there.command(program), env=environ, stdout=subprocess.PIPE, text=True) as answering:
            assert answering.stdout is not None
            address = answering.stdout.readline().strip()
            said = subprocess.run(
                here.command([*program, address]), capture_output=True, text=True, check=True, timeout=60
            ).stdout
            answering.kill()
    assert 30 <= float(said.split()[0]) <= 60, said
