"""The link of a real machine becomes slow and fast again while a job trains: the shares of the servers follow, and the
weights are bit for bit those of a calm run. Machines are network namespaces with shaped links."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.run import ENVIRON, calm
from support.breaking import Job, command
from support.clusters import has_namespaces
from test_partitions import Cluster
from test_recovery import DIGEST, OPTIONS, train

from benchmarks.cluster.hosts import Host, cluster, reshape, slow_way
from byteps_py.launch.process_plan import free_port

RATE_MBIT = 40.0
STEPS = 24
PROGRAMS = Path(__file__).parents[1] / "programs"
SENDS = PROGRAMS / "sends.py"

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


@pytest.mark.long
def test_a_probe_shows_that_a_machine_without_a_share_has_a_fast_link_again(hosts: list[Host]) -> None:
    """Three GPU machines. Without a share, the third one sends as much in a sum as its slow link carried."""
    port = str(free_port())
    common = {
        **ENVIRON, "DMLC_PS_ROOT_URI": hosts[0].address, "DMLC_PS_ROOT_PORT": port, "DMLC_NUM_WORKER": "3",
        "DMLC_NUM_SERVER": "0", "BYTEPS_JOB_ID": f"probes-{port}", "BYTEPS_SECRET": "the secret of a test",
        "BYTEPS_LINK_MBIT": f"{RATE_MBIT:g}", "BYTEPS_LOG_LEVEL": "INFO", "BYTEPS_DIRECT_CONNECTIONS": "0",
    }  # fmt: skip

    def job(host: int, *program: str, **own: str) -> contextlib.AbstractContextManager[Job]:
        line = hosts[host].command([sys.executable, "-m", "byteps_py.launch", *program])
        return command(*line, limit_s=100, **{**common, **own, "DMLC_NODE_HOST": hosts[host].address})

    with contextlib.ExitStack() as stack:
        scheduler = stack.enter_context(job(0, DMLC_ROLE="scheduler"))
        machines = [
            stack.enter_context(
                job(
                    index,
                    *(sys.executable, str(PROGRAMS / "until_told.py"), "500000"),
                    DMLC_ROLE="worker",
                    DMLC_WORKER_ID=str(index),
                    BYTEPS_MACHINE_ID=f"m{index}",
                )
            )
            for index in range(3)
        ]
        machines[0].until("rank 0 is ready")
        reshape(hosts[2], RATE_MBIT / 2)
        assert f"instead of {RATE_MBIT:g}" in machines[2].until("epoch 2: moved")
        reshape(hosts[2], RATE_MBIT)
        said = machines[2].until("epoch 3: moved")
        assert re.search(rf"carries {RATE_MBIT:g} Mbit/s instead of (1|2)", said), said
        shown = re.findall(r"a probe shows that the link of this machine carries (\S+) Mbit/s", machines[2].text)
        assert float(shown[-1]) > 0.65 * RATE_MBIT, shown
        assert machines[0].process.stdin is not None
        machines[0].process.stdin.close()
        assert [each.end() for each in machines] == [0, 0, 0], machines[2].text
        assert scheduler.end() == 0, scheduler.text


@pytest.mark.long
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


@pytest.mark.slow
def test_a_slow_link_is_no_lost_one() -> None:
    # A partition is on its way for 5 s, and what rank 0 sends last is as well when rank 0 ends.
    environ = {**ENVIRON, "BYTEPS_LINK_MBIT": "4", "BYTEPS_PARTITION_BYTES": "4096000", "BYTEPS_LOG_LEVEL": "INFO"}
    with cluster([4.0] * 3) as slow, contextlib.ExitStack() as stack:
        running = Cluster(stack, slow, ("600000",), PROGRAMS / "slow_link.py", **environ)
        assert [each.end() for each in running.machines] == [0, 0], running.machines[1].text
        for rank, each in enumerate(running.machines):
            assert f"rank {rank}: summed and sent" in each.text
            assert not re.search("moved|lost|made again", each.text), each.text
        assert running.scheduler.end() == 0, running.scheduler.text
        running.server.end()
