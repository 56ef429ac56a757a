"""A rank of a running job that computes slowly is named, with what that costs, by what its flight recorder has."""

from __future__ import annotations

import re

import pytest
from support.breaking import launch
from support.clusters import ROOT

PROGRAM = ROOT / "tests" / "programs" / "slow_rank.py"


@pytest.mark.timeout(150)
def test_the_slow_rank_of_a_running_job_is_named() -> None:
    with launch("-np 4", program=PROGRAM, BYTEPS_LOG_LEVEL="WARNING") as job:
        said = job.until("of the time; its own work takes")
        assert re.search(r"\brank 2\b", said), said
        assert job.process.stdin is not None
        job.process.stdin.write("end\n")
        job.process.stdin.flush()
        assert job.end() == 0, job.text
