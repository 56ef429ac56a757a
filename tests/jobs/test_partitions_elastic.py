"""The network of an elastic job falls apart: the side with the scheduler goes on, the other one takes no step more."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.breaking import Job, command
from support.clusters import has_namespaces
from test_elastic_process import PROGRAM, Training
from test_partitions import RATE_MBIT

from benchmarks.cluster.hosts import Host, cluster, lost
from byteps_py.launch.process_plan import free_port

pytestmark = [
    pytest.mark.skipif(not has_namespaces(), reason="needs root and iproute2 (network namespaces)"),
    pytest.mark.timeout(300),
]
MACHINES = 3


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with cluster([RATE_MBIT] * MACHINES) as made:
        yield made


def start(host: Host, scheduler: Host, port: int, *words: str, **own: str) -> contextlib.AbstractContextManager[Job]:
    program = [sys.executable, *words] if words else []
    line = host.command([sys.executable, "-m", "byteps_py.launch", "--elastic", *program])
    environ = {
        "DMLC_PS_ROOT_URI": scheduler.address,
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": str(MACHINES),
        "DMLC_NUM_SERVER": "0",
        "DMLC_NODE_HOST": host.address,
        "BYTEPS_JOB_ID": f"partitions-{port}",
        "BYTEPS_SECRET": "the secret of a test",
        "BYTEPS_LINK_MBIT": str(RATE_MBIT),
        "PS_HEARTBEAT_TIMEOUT": "2",
    }
    return command(*line, **{**environ, **own})


@pytest.mark.parametrize(
    ("to_it", "from_it"),
    [
        pytest.param(True, True, id="both ways", marks=pytest.mark.long),
        pytest.param(True, False, id="it hears nobody", marks=pytest.mark.long),
        pytest.param(False, True, id="nobody hears it", marks=pytest.mark.long),
    ],
)
def test_a_machine_that_is_cut_off_commits_nothing_more(
    hosts: list[Host], tmp_path: Path, to_it: bool, from_it: bool
) -> None:
    torch.set_num_threads(1)
    port, training = free_port(), Training(tmp_path / "told")
    training.tell(0)
    with contextlib.ExitStack() as stack:
        scheduler = stack.enter_context(start(hosts[0], hosts[0], port, DMLC_ROLE="scheduler"))
        jobs = [
            stack.enter_context(
                start(
                    host, hosts[0], port, str(PROGRAM), str(training.file), DMLC_ROLE="worker",
                    DMLC_WORKER_ID=str(index), BYTEPS_MACHINE_ID=f"m{index}",
                )
            )
            for index, host in enumerate(hosts)
        ]  # fmt: skip
        assert training.group(jobs[0], "start", time.monotonic()) == [1, 1, 1]
        training.train(jobs[0], 10)
        away = hosts[2]
        ways = [*[(host, away) for host in hosts[:2] if to_it], *[(away, host) for host in hosts[:2] if from_it]]
        with lost(*ways):
            training.tell(training.reference.step + 40)
            assert training.group(jobs[0], "a machine was cut off", time.monotonic()) == [1, 1]
            training.train(jobs[0], 50)
        # Once it is heard again, a server or the scheduler tells it that the others have gone on.
        assert jobs[2].end() == 1
        told = r"can't come back: nothing was heard of it for|the other machines have gone on without this one"
        assert re.search(rf"RendezvousError: elastic: the job can't be joined again after .*({told})", jobs[2].text)
        assert not re.search(r"(after \d+ steps|group from)", jobs[2].text)
        training.train(jobs[0], 10)
        training.tell(training.reference.step, is_last=True)
        assert [job.end() for job in (jobs[0], jobs[1], scheduler)] == [0, 0, 0]
