"""Two jobs of one pool, and one lender: each scheduler's page has the figures of the server that serves its job."""

from __future__ import annotations

import contextlib
import sys

import pytest
from support.breaking import command, launch
from support.clusters import ROOT
from support.metrics_pages import free_ports, read, steps, until

from byteps_py.launch.process_plan import free_port

SECRET = {"BYTEPS_SECRET": "a secret of a pool in a test"}
PROGRAM = ROOT / "tests" / "programs" / "watched.py"
LIMITS = ("--cores", "1", "--memory", "2G", "--mbit", "2000", "--owner-cores", "1000", "--slots", "2")


@pytest.mark.slow
def test_two_jobs_in_one_pool() -> None:
    address = f"127.0.0.1:{free_port()}"
    bps = (sys.executable, "-m", "byteps_py.cli")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(free_ports(16))
        ports = (first, first + 8)  # of two machines with a rank each
        stack.enter_context(command(*bps, "pool", "--listen", address, **SECRET))
        options = f"-np 1 --machines 2 --pool {address}"
        jobs = [
            stack.enter_context(launch(options, "plain", program=PROGRAM, **SECRET, BYTEPS_METRICS_PORT=str(port)))
            for port in ports
        ]
        lender = stack.enter_context(command(*bps, "lend", "--pool", address, "--name", "c", *LIMITS, **SECRET))
        lent = set()
        for job, port in zip(jobs, ports, strict=True):
            found = until(port, lambda page: any(machine.startswith("cpu-") for (_, _, machine, _) in page))
            lent |= {machine for (_, _, machine, _) in found if machine.startswith("cpu-")}
            until(port, lambda page: len(steps(page)) == 2)
            assert job.end() == 0, job.text
            assert read(port) == {}
        assert len(lent) == 2
        lender.close()
