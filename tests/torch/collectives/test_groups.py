"""Reductions and broadcasts among groups of ranks, with real processes: 2 machines of 2 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clusters import bpslaunch

PROGRAM = Path(__file__).parents[2] / "programs" / "groups.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("servers", "credit"), [pytest.param(0, 64 << 20, marks=pytest.mark.slow), (1, 128 << 10)])
def test_groups_are_reduced_by_themselves_and_all_at_once(servers: int, credit: int) -> None:
    run = bpslaunch(
        ["-np", "2", "--machines", "2", "--servers", str(servers)],
        [PROGRAM],
        BYTEPS_PARTITION_BYTES=str(64 << 10),
        BYTEPS_SCHEDULING_CREDIT=str(credit),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert sorted(line for line in run.stdout.splitlines() if line.endswith("is done")) == [
        f"rank {rank} is done" for rank in range(4)
    ], run.stdout + run.stderr
