"""Programs of random operations, of which each rank decides what it waits for at once, with real processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.clusters import bpslaunch

PROGRAM = Path(__file__).parents[1] / "programs" / "any_order.py"
FEW, MANY = 60, 150
_WELL = re.compile(r"^\d: \d+ calls: all is well; (\d+) sums in messages, (\d+) in shares$", re.MULTILINE)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("seed", "calls"), [(3, FEW), *(pytest.param(seed, MANY, marks=pytest.mark.long) for seed in (1, 2))]
)
@pytest.mark.parametrize(
    "options",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in ("-np 2", "-np 4")), "-np 2 --machines 2 --servers 1"],
)
def test_nobody_waits_for_ever_and_all_comes_out_right(options: str, seed: int, calls: int) -> None:
    run = bpslaunch(
        options.split(),
        [PROGRAM, str(seed), str(calls)],
        timeout_s=100,
        TEST_CORES="4",  # a core for every rank
        PYTHONWARNINGS="ignore",
        BYTEPS_STALL_WARN_S="10",
        BYTEPS_STALL_LIMIT_S="30",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = [(int(small), int(large)) for small, large in _WELL.findall(run.stdout)]
    assert len(found) == (2 if options == "-np 2" else 4), run.stdout + run.stderr
    if "--machines" in options:
        assert all(small and not large for small, large in found), found
    else:  # else this test would say nothing of them
        assert all(small and large for small, large in found), found
