"""Whole jobs on machines that have addresses of IPv6 only: network namespaces. Each process finds its own address."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.run import ENVIRON
from support.breaking import RANK, Job, command
from support.clusters import ROOT, clean_environment, has_namespaces
from support.ssh_hosts import require_ssh_hosts, ssh_hosts

from benchmarks.cluster.hosts import Host, cluster
from byteps_py.launch.process_plan import free_port

WATCHED = ROOT / "tests" / "programs" / "watched.py"
METRICS_PORT = 9400
LAST_RANK = 'machine="gpu-1",rank="1"'
READ = """
import sys, urllib.request
text = ""
while sys.argv[2] not in text:
    try:
        text = urllib.request.urlopen(sys.argv[1], timeout=5).read().decode()
    except OSError:
        pass  # the page is not there yet
print(text)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_namespaces(), reason="needs root and iproute2 (network namespaces)"),
]


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with cluster([0.0] * 3, is_v6=True) as made:
        yield made


class Processes:
    """The scheduler and machine 0 on the first host, machine 1 on the second, a CPU machine on the third. The first one
    offers the address from which it reaches the scheduler, the second DMLC_INTERFACE's, the third DMLC_NODE_HOST."""

    def __init__(self, stack: contextlib.ExitStack, hosts: list[Host], *words: str) -> None:
        self._hosts, port = hosts, str(free_port())
        self.common = {
            **ENVIRON, "DMLC_PS_ROOT_URI": hosts[0].address, "DMLC_PS_ROOT_PORT": port, "DMLC_NUM_WORKER": "2",
            "DMLC_NUM_SERVER": "1", "BYTEPS_SECRET": "the secret of a test", "BYTEPS_LINK_MBIT": "1000",
            "BYTEPS_METRICS_PORT": str(METRICS_PORT),
        }  # fmt: skip
        program = (sys.executable, str(WATCHED), *words)
        self.scheduler = stack.enter_context(self._job(0, DMLC_ROLE="scheduler"))
        third = {"DMLC_NODE_HOST": f"[{hosts[2].address.upper()}]"}
        self.server = stack.enter_context(self._job(2, DMLC_ROLE="server", **third))
        worker = {"DMLC_ROLE": "worker"}
        self.machines = [
            stack.enter_context(self._job(0, *program, **worker, DMLC_WORKER_ID="0")),
            stack.enter_context(
                self._job(1, *program, **worker, DMLC_WORKER_ID="1", DMLC_INTERFACE=hosts[1].interface)
            ),
        ]

    def _job(self, host: int, *program: str, **own: str) -> contextlib.AbstractContextManager[Job]:
        line = self._hosts[host].command([sys.executable, "-m", "byteps_py.launch", *program])
        return command(*line, limit_s=90, **{**self.common, **own})

    def said(self, *arguments: str) -> str:
        """What a program of Python says on the first host."""
        line = self._hosts[0].command([sys.executable, *arguments])
        environ = clean_environment(**self.common)
        return subprocess.run(line, env=environ, capture_output=True, text=True, check=True, timeout=60).stdout

    def end(self) -> None:
        """The job ends in order."""
        assert [each.end() for each in self.machines] == [0, 0], self.machines[0].text
        assert self.scheduler.end() == 0, self.scheduler.text
        self.server.end()


def page(job: Processes, host: str, port: int, until: str) -> str:
    """A metrics page, once it has ``until``."""
    return job.said("-c", READ, f"http://[{host}]:{port}/metrics", until)


def test_a_job_trains_and_is_watched(hosts: list[Host], tmp_path: Path) -> None:
    """Its summation servers keep the states in step."""
    stop = tmp_path / "stop"
    with contextlib.ExitStack() as stack:
        job = Processes(stack, hosts, "shadow", str(stop))
        own = [host.address for host in hosts]
        found = page(job, own[0], METRICS_PORT, LAST_RANK)
        page(job, own[1], METRICS_PORT + 1, "byteps_rounds_total{")
        page(job, own[2], METRICS_PORT + 2, "byteps_in_flight_bytes{")
        members = json.loads(job.said("-m", "byteps_py.cli", "status", "--json"))["members"]
        addresses = {member["address"].rpartition(":")[0] for member in members if member["address"]}
        assert addresses == {f"tcp://[{host}]" for host in own}
        assert f"[{own[2]}]:" in job.said("-m", "byteps_py.cli", "top", "--once", "--interval", "0.5")
        assert f"[{own[2]}]:" in job.said("-m", "byteps_py.cli", "doctor")
        made = max(int(float(steps)) for steps in re.findall(r"byteps_steps_total{.* (\S+)", found))
        (tmp_path / "new").write_text(str(made + 200))
        (tmp_path / "new").rename(stop)
        job.end()


@pytest.mark.long  # test_relay.py has a connection over ::1
def test_ranks_send_to_each_other(hosts: list[Host]) -> None:
    with contextlib.ExitStack() as stack:
        job = Processes(stack, hosts, "ddp")
        page(job, hosts[0].address, METRICS_PORT, LAST_RANK)
        job.end()


def test_bpslaunch_logs_in_on_hosts(tmp_path: Path) -> None:
    require_ssh_hosts()
    with ssh_hosts(3, tmp_path, is_v6=True) as made:
        gpu1, gpu2, cpu = (host.address for host in made.hosts)
        lists = ["-H", f"[{gpu1}]:1,[{gpu2}]:1", "--server-hosts", f"[{cpu}]"]
        with made.launch(*lists, sys.executable, RANK, "short", BYTEPS_LINK_MBIT="1000") as job:
            assert job.end() == 0, job.said
        assert not made.left()
