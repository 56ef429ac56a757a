"""The determinism contract with real processes: 2 machines of 2 ranks, every k, several partition sizes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.clusters import bpslaunch

PROGRAM = Path(__file__).parents[1] / "programs" / "determinism.py"
#: (k, partition bytes, credit): what must not matter
LAYOUTS = [(0, 4 << 20, 64 << 20), (1, 64 << 10, 64 << 10), (2, 4 << 20, 0), (4, 256 << 10, 1 << 20)]
DIGEST = re.compile(r"digest (\w{64})")


def digest_of(machines: int, ranks: int, servers: int, partition_bytes: int, credit: int) -> str:
    """Run the program; it compares with its own references and fails if anything differs."""
    run = bpslaunch(
        ["-np", str(ranks), "--machines", str(machines), "--servers", str(servers)],
        [PROGRAM],
        BYTEPS_PARTITION_BYTES=str(partition_bytes),
        BYTEPS_SCHEDULING_CREDIT=str(credit),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = DIGEST.search(run.stdout)
    assert found, run.stdout + run.stderr
    return found[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layouts", [LAYOUTS[:2], pytest.param(LAYOUTS, marks=pytest.mark.long)], ids=["two", "all"])
def test_results_depend_on_values_and_grouping_alone(layouts: list[tuple[int, int, int]]) -> None:
    digests = {layout: digest_of(2, 2, *layout) for layout in layouts}
    assert len(set(digests.values())) == 1, digests


@pytest.mark.parametrize(
    ("machines", "ranks"),
    [pytest.param(1, 2, marks=pytest.mark.slow), *(pytest.param(each, 1, marks=pytest.mark.slow) for each in (2, 3))],
)
def test_other_groupings_meet_their_own_reference(machines: int, ranks: int) -> None:
    assert digest_of(machines, ranks, servers=1 if machines == 3 else 0, partition_bytes=4 << 20, credit=64 << 20)
