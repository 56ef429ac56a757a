"""Gathers, exchanges and scattered reductions with real processes, on one machine and on several."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clusters import bpslaunch

PROGRAM = Path(__file__).parents[2] / "programs" / "direct.py"
#: machines, ranks on each, partition bytes
LAYOUTS = [(1, 3, 4 << 20), (2, 2, 64 << 10), pytest.param(3, 1, 16 << 10, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("machines", "ranks", "partition_bytes"), LAYOUTS)
def test_every_piece_comes_where_it_belongs(machines: int, ranks: int, partition_bytes: int) -> None:
    run = bpslaunch(
        ["-np", str(ranks), "--machines", str(machines)],
        [PROGRAM, "150", "1"],
        BYTEPS_PARTITION_BYTES=str(partition_bytes),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(" operations") == machines * ranks


@pytest.mark.parametrize(("machines", "ranks", "partition_bytes"), LAYOUTS)
def test_a_scattered_reduction_is_the_whole_one_in_pieces(machines: int, ranks: int, partition_bytes: int) -> None:
    run = bpslaunch(
        ["-np", str(ranks), "--machines", str(machines)],
        [PROGRAM.with_name("scatter.py"), "3"],
        BYTEPS_PARTITION_BYTES=str(partition_bytes),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(" all equal") == machines * ranks
