"""Sums of rows between machines, in real processes: tests/programs/sparse_rows.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clusters import bpslaunch

PROGRAM = Path(__file__).parents[1] / "programs" / "sparse_rows.py"


@pytest.mark.parametrize(
    ("machines", "ranks"), [(3, 1), pytest.param(2, 2, marks=pytest.mark.slow)], ids=["3 machines", "2 of 2 ranks"]
)
def test_rows_are_added_in_rank_order(machines: int, ranks: int) -> None:
    run = bpslaunch(["--machines", str(machines), "-np", str(ranks), "--servers", "1"], [str(PROGRAM)], timeout_s=60)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("equal") == machines * ranks
