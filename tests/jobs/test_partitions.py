"""The network between real processes loses everything for a while, one way or both: the weights are bit for bit those
of a calm run; and a machine that is cut off for good ends with an error, as do the others.

Each machine is a network namespace. What one is to lose goes to a hardware address that nobody has: as silent as a
switch that fails, unlike a route that does not exist, of which the kernel would tell.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.run import ENVIRON, PROGRAM, STEPS, calm
from support.breaking import Job, command
from support.clusters import has_namespaces
from test_recovery import DIGEST, OPTIONS, train

from benchmarks.cluster.hosts import Host, cluster, lost
from byteps_py.launch.process_plan import free_port

RATE_MBIT = 1000.0

pytestmark = [
    pytest.mark.skipif(not has_namespaces(), reason="needs root and iproute2 (network namespaces)"),
    pytest.mark.timeout(400),
]


class Cluster:
    """The scheduler and machine 0 on the first host, machine 1 on the second, a CPU machine on the third."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        hosts: list[Host],
        words: tuple[str, ...],
        program: Path = PROGRAM,
        **environ: str,
    ) -> None:
        self._hosts, self._environ, self._program = hosts, environ, program
        port = str(free_port())
        self._common = {
            "DMLC_PS_ROOT_URI": hosts[0].address, "DMLC_PS_ROOT_PORT": port, "DMLC_NUM_WORKER": "2",
            "DMLC_NUM_SERVER": "1", "BYTEPS_JOB_ID": f"partitions-{port}", "BYTEPS_SECRET": "the secret of a test",
            "BYTEPS_LINK_MBIT": str(RATE_MBIT),
        }  # fmt: skip
        self.scheduler = stack.enter_context(self._job(0, (), DMLC_ROLE="scheduler"))
        self.server = stack.enter_context(self._job(2, (), DMLC_ROLE="server", BYTEPS_MACHINE_ID="m2"))
        self.machines = [
            stack.enter_context(
                self._job(index, words, DMLC_ROLE="worker", DMLC_WORKER_ID=str(index), BYTEPS_MACHINE_ID=f"m{index}")
            )
            for index in range(2)
        ]

    def _job(self, host: int, words: tuple[str, ...], **own: str) -> contextlib.AbstractContextManager[Job]:
        program = [sys.executable, str(self._program), *words] if words else []
        line = self._hosts[host].command([sys.executable, "-m", "byteps_py.launch", *program])
        environ = {**self._common, **self._environ, **own, "DMLC_NODE_HOST": self._hosts[host].address}
        return command(*line, limit_s=200, **environ)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with cluster([RATE_MBIT] * 3) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("is_all", [pytest.param(False, marks=pytest.mark.long), True], ids=["few", "all"])
def test_machines_lose_each_other_for_a_while_and_the_weights_are_the_same(hosts: list[Host], is_all: bool) -> None:
    first, other, spare = hosts

    def short(_: Job) -> None:
        """Shorter than PS_HEARTBEAT_TIMEOUT: nobody is lost."""
        with lost((other, first), (first, other), (other, spare), (spare, other)):
            threading.Event().wait(0.5)

    def one_way(job: Job) -> None:
        """Machine 1 hears the CPU machine, which does not hear it; the scheduler hears both."""
        with lost((other, spare)):
            job.until("can't reach it")

    def both_ways(job: Job) -> None:
        """The scheduler loses the CPU machine: others take over. Once it is heard again, it is started anew."""
        with lost((spare, first), (first, spare)):
            job.until("lost server")

    def come_back(job: Job) -> None:
        job.until("has joined")

    faults = [short, one_way, come_back, *([both_ways, come_back] if is_all else []), short]
    with contextlib.ExitStack() as stack:
        environ = {**ENVIRON, "BYTEPS_HEARTBEAT_TIMEOUT_MAX_S": "5"}  # the patience with a connection that loses all
        running = Cluster(stack, hosts, (str(len(faults)), str(STEPS)), **environ)
        digests = train(running.machines[0], faults)
        assert running.machines[1].end() == 0, running.machines[1].text
        digests |= set(DIGEST.findall(running.machines[1].text))
        assert running.scheduler.end() == 0, running.scheduler.text
        running.server.end()
    assert digests == calm(len(faults), OPTIONS).digests


@pytest.mark.slow
def test_a_machine_that_is_cut_off_ends_with_an_error_and_so_do_the_others(hosts: list[Host]) -> None:
    first, other, spare = hosts
    with contextlib.ExitStack() as stack:
        running = Cluster(stack, hosts, ("2", str(STEPS)), **{**ENVIRON, "PS_HEARTBEAT_TIMEOUT": "1"})
        running.machines[0].until("stretch 0")
        with lost((other, first), (first, other), (other, spare), (spare, other)):
            assert running.machines[0].process.stdin is not None
            running.machines[0].process.stdin.write("go on\n")
            running.machines[0].process.stdin.flush()
            assert all(machine.end() != 0 for machine in running.machines)
        assert re.search(r"lost worker 1 \(rank 1, .*nothing was heard of it for", running.machines[0].text)
        assert "digest" not in running.machines[0].text + running.machines[1].text
        running.scheduler.end()
        running.server.end()
