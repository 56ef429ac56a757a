"""bpslaunch with the real services: a cluster by -np, the same one role by role, a port that is taken."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import launched

from byteps_py.launch import supervisor
from byteps_py.launch.process_plan import free_port

TRAIN = """
import torch, byteps_py as bps
bps.init()
total = bps.push_pull(torch.arange(5.0) + bps.rank(), average=False, name='x')
print(f'{bps.rank()}/{bps.size()} {total.tolist()}')
bps.shutdown()
"""


@pytest.fixture
def train(tmp_path: Path) -> Path:
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    return program


@pytest.mark.slow  # in `make test` by the README's commands: test_readme.py
def test_cluster(train: Path) -> None:
    with launched("-np", "2", "--machines", "2", "--servers", "1", "--tag-output", sys.executable, str(train)) as job:
        status, out, err = job.finish()
    assert status == 0
    assert re.fullmatch(r"bpslaunch: job at 127\.0\.0\.1:\d+\n", err), err  # the services have left without a word
    assert sorted(out.splitlines()) == [f"[{r}] {r}/4 [6.0, 10.0, 14.0, 18.0, 22.0]" for r in range(4)]


@pytest.mark.slow
def test_role_by_role(train: Path) -> None:
    common = {
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "1",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
    }
    with contextlib.ExitStack() as stack:
        parts = [
            stack.enter_context(launched(**common, DMLC_ROLE="scheduler")),
            stack.enter_context(launched(**common, DMLC_ROLE="server", BYTEPS_MACHINE_ID="c0")),
        ]
        parts += [
            stack.enter_context(
                launched(
                    sys.executable,
                    str(train),
                    **common,
                    DMLC_ROLE="worker",
                    DMLC_WORKER_ID=m,
                    BYTEPS_MACHINE_ID=f"m{m}",
                )
            )
            for m in ("0", "1")
        ]
        results = [part.finish() for part in parts]
    assert [(status, err) for status, _, err in results] == [(0, "")] * 4
    assert [out for _, out, _ in results[2:]] == [f"{r}/2 [1.0, 3.0, 5.0, 7.0, 9.0]\n" for r in range(2)]


def test_taken_port_asks_to_start_over() -> None:
    program = """
import os, sys
from byteps_py.launch.process_plan import ClusterSize, cluster_plan
from byteps_py.launch.supervisor import Supervision, Supervisor
command = (sys.executable, '-S', '-c', 'import signal; signal.pause()')
port = int(sys.argv[1])
specs = cluster_plan(
    os.environ, command, ClusterSize(ranks=2, machines=1, servers=0), port=port, torch_port=1, cores=1, token='t'
)
policy = Supervisor(specs, os.environ, Supervision(), 'test-taken-port').run()
print(policy.retry, policy.code)
"""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = subprocess.run([sys.executable, "-c", program, port], capture_output=True, text=True, check=True)
    assert result.stdout == "True 2\n"
    assert "byteps_py scheduler:" in result.stderr


def test_a_signal_to_processes_that_have_just_ended_is_no_error() -> None:
    process = subprocess.Popen(["true"], start_new_session=True)
    process.wait()
    supervisor._signal_group(process.pid, signal.SIGTERM)
