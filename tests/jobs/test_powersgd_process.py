"""Gradients as factors of low rank, in real processes: tests/programs/powersgd.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clusters import bpslaunch

PROGRAM = Path(__file__).parents[1] / "programs" / "powersgd.py"


@pytest.mark.parametrize("mode", ["skip", *(pytest.param(m, marks=pytest.mark.slow) for m in ("raise", "allow"))])
def test_like_one_process_and_a_step_that_is_not_finite_leaves_all_as_it_was(mode: str) -> None:
    layout = ["--machines", "2", "-np", "2", "--servers", "1"]
    run = bpslaunch(layout, [str(PROGRAM)], timeout_s=60, BYTEPS_NONFINITE=mode)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("equal") == 4
