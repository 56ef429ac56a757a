"""Gathers and exchanges of Horovod's functions, with real processes: among themselves, or through the service."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clusters import bpslaunch

PROGRAM = Path(__file__).parents[2] / "programs" / "gathers_by_name.py"


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "layout",
    [
        "-np 2",
        pytest.param("-np 3", marks=pytest.mark.slow),
        pytest.param("-np 1 --machines 2", marks=pytest.mark.slow),
        pytest.param("-np 2 --machines 2", marks=pytest.mark.slow),
    ],
)
def test_the_same_results_whoever_waits(layout: str) -> None:
    ranks = {"-np 2": 2, "-np 3": 3, "-np 1 --machines 2": 2, "-np 2 --machines 2": 4}[layout]
    run = bpslaunch(layout.split(), [PROGRAM])
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(": all is well") == 7 * ranks
