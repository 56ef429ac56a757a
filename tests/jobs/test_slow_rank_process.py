"""A rank of a running job that computes slowly is named, with what that costs, by what its flight recorder has: by the
scheduler, and by `bps trace slow-rank HOST:PORT`."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from support.breaking import environ_of, launch
from support.clusters import ROOT, clean_environment

from byteps_py.tools.slow_rank import COMPUTES

PROGRAM = ROOT / "tests" / "programs" / "slow_rank.py"


@pytest.mark.timeout(150)
@pytest.mark.slow
def test_the_slow_rank_of_a_running_job_is_named() -> None:
    with launch("-np 4", program=PROGRAM, BYTEPS_LOG_LEVEL="WARNING") as job:
        said = job.until("of the time; its own work takes")
        assert re.search(r"\brank 2\b", said), said
        (address,) = [line.split()[-1] for line in job.said if line.startswith("bpslaunch: job at")]
        environ = {**clean_environment(), "XDG_RUNTIME_DIR": environ_of(job.process.pid)["XDG_RUNTIME_DIR"]}
        line = [sys.executable, "-m", "byteps_py.cli", "trace", "slow-rank", address, "--json"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, env=environ)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert [(each["rank"], each["reason"]) for each in found["slow"]][:1] == [(2, COMPUTES)], found
        assert 0.2 < found["slow"][0]["price"] < 0.9
        assert found["named_by_scheduler"][0].startswith("rank 2 ")
        assert found["ranks"] == 4
        assert job.process.stdin is not None
        job.process.stdin.write("end\n")
        job.process.stdin.flush()
        assert job.end() == 0, job.text
