"""A job whose machines all die, and that goes on from its last step: real schedulers, servers, services and ranks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest
from support.breaking import Job, command
from support.clusters import ROOT

from byteps_py.launch.cluster_plan import free_port

PROGRAM = ROOT / "tests" / "programs" / "shadowed.py"
LAUNCH = (sys.executable, "-m", "byteps_py.launch", "--no-tag-output")
STEPS = 24


class Cluster:
    """``machines`` GPU machines, and CPU machines whose servers live on from job to job."""

    def __init__(self, stack: contextlib.ExitStack, machines: int, servers: int, **variables: str) -> None:
        self._stack = stack
        self._machines = machines
        self._variables = {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(free_port()),
            "DMLC_NUM_WORKER": str(machines),
            "DMLC_NUM_SERVER": str(servers),
            **variables,
        }
        self.servers = [self._launch(DMLC_ROLE="server", BYTEPS_MACHINE_ID=f"c{i}") for i in range(servers)]

    def _launch(self, *words: str, **variables: str) -> Job:
        return self._stack.enter_context(command(*LAUNCH, *words, **{**self._variables, **variables}))

    def start(self, *arguments: str) -> list[Job]:
        """A scheduler, and each machine's launcher."""
        scheduler = self._launch(DMLC_ROLE="scheduler")
        machines = [
            self._launch(
                sys.executable, str(PROGRAM), *arguments,
                DMLC_ROLE="worker", DMLC_WORKER_ID=str(i), BYTEPS_MACHINE_ID=f"m{i}",
            )
            for i in range(self._machines)
        ]  # fmt: skip
        return [scheduler, *machines]


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as found:
        yield found


def digests(text: str) -> dict[int, str]:
    lines = [line.split() for line in text.splitlines() if line.startswith("step ")]
    return {int(words[1].rstrip(":")): words[2] for words in lines}


def undisturbed(optimizer: str, machines: int, servers: int) -> dict[int, str]:
    """What a job has that nothing happens to."""
    words = ["-np", "1", "--machines", str(machines), "--servers", str(servers)]
    with command(*LAUNCH, *words, sys.executable, str(PROGRAM), optimizer, str(STEPS)) as job:
        assert job.end() == 0, job.text
        return digests(job.text)


@pytest.mark.parametrize(
    ("optimizer", "machines", "servers"),
    [
        ("adamw", 2, 1),
        pytest.param("sgd", 2, 2, marks=pytest.mark.slow),
        pytest.param("lamb", 2, 1, marks=pytest.mark.slow),
        pytest.param("adagrad", 3, 2, marks=pytest.mark.slow),
    ],
)
def test_a_job_that_is_killed_goes_on_from_its_last_step(
    stack: contextlib.ExitStack, optimizer: str, machines: int, servers: int
) -> None:
    expected = undisturbed(optimizer, machines, servers)
    cluster = Cluster(stack, machines, servers)
    scheduler, *killed = cluster.start(optimizer, "100000")
    killed[0].until("step 9:")
    for job in killed:
        job.close()
    assert scheduler.end() == 1
    for server in cluster.servers:
        server.until("are kept for 600 s for a restarted job")
    before = digests(killed[0].text)
    again = cluster.start(optimizer, str(STEPS))
    for job in again:
        assert job.end() == 0, job.text
    for server in cluster.servers:
        assert server.end() == 0, server.text
    begun = int(next(line for line in again[1].text.splitlines() if line.startswith("restored at")).split()[-1])
    assert 9 <= begun <= max(before) + 1
    assert digests(again[1].text) == {step: expected[step] for step in range(begun + 1, STEPS + 1)}
