"""The link of a real machine becomes slow and fast again while a job trains: the shares of the servers follow, and the
weights are bit for bit those of a calm run. Machines are network namespaces with shaped links."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.run import ENVIRON, calm
from support.breaking import Job
from support.clusters import has_namespaces
from test_partitions import Cluster
from test_recovery import DIGEST, OPTIONS, train

from benchmarks.cluster.hosts import Host, cluster, reshape, slow_way

RATE_MBIT = 40.0
STEPS = 24
SENDS = Path(__file__).parents[1] / "programs" / "sends.py"

pytestmark = [
    pytest.mark.skipif(not has_namespaces(), reason="needs root and iproute2 (network namespaces)"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with cluster([RATE_MBIT] * 3) as made:
        yield made


@pytest.mark.parametrize(
    ("variables", "machine", "who"),
    [
        pytest.param({}, 2, "the link of server", marks=pytest.mark.slow),
        # Nothing that two machines' services host goes through a CPU machine. Which of the two is slow can't be told.
        pytest.param({"TEST_HOSTED": "1"}, 1, "the link of worker", marks=pytest.mark.long),
    ],
    ids=["sums", "hosted"],
)
def test_a_slow_link_is_named_and_the_weights_are_the_same(
    hosts: list[Host], variables: dict[str, str], machine: int, who: str
) -> None:
    def slow_down(job: Job) -> None:
        reshape(hosts[machine], RATE_MBIT / 5)
        said = job.until(who)
        assert f"Mbit/s instead of {RATE_MBIT:g}" in said, said

    def come_back(_: Job) -> None:
        reshape(hosts[machine], RATE_MBIT)

    with contextlib.ExitStack() as stack:
        environ = {**ENVIRON, "BYTEPS_LINK_MBIT": f"{RATE_MBIT:g}", **variables}
        running = Cluster(stack, hosts, ("2", str(STEPS)), **environ)
        digests = train(running.machines[0], [slow_down, come_back])
        assert running.machines[1].end() == 0, running.machines[1].text
        digests |= set(DIGEST.findall(running.machines[1].text))
        assert running.scheduler.end() == 0, running.scheduler.text
        running.server.end()
        if not variables:
            assert "moved" in running.machines[0].text
    assert digests == calm(2, OPTIONS, STEPS).digests


@pytest.mark.slow
def test_ranks_reach_each_other_through_a_third_machine_which_then_dies(hosts: list[Host], tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    environ = {**ENVIRON, "BYTEPS_LINK_MBIT": f"{RATE_MBIT:g}"}
    with contextlib.ExitStack() as stack:
        running = Cluster(stack, hosts, (str(stop), str(60_000)), SENDS, **environ)
        first = running.machines[0]
        with slow_way(hosts[0], hosts[1], RATE_MBIT / 20):
            said = first.until("as well, with")
            found = re.search(r"carries (\d+) Mbit/s, less than their links", said)
            assert found is not None, said
            assert 1 <= int(found[1]) <= RATE_MBIT / 20, said
            for pid in running.server.pids():
                os.kill(pid, signal.SIGKILL)
            first.until("made again after it had broken")
            stop.touch()
            assert [each.end() for each in running.machines] == [0, 0], first.text
        assert all(f"rank {rank}: all as sent" in each.text for rank, each in enumerate(running.machines))
        assert running.scheduler.end() == 0, running.scheduler.text
        running.server.end()
