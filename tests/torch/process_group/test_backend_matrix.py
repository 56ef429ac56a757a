"""Everything that torch builds on torch.distributed, on the backend "byteps": each feature on 1 and 2 machines, with 0
and 2 summation servers. One job of 4 ranks runs all features of tests/programs/backend one after the other; `make test`
takes one combination, `make test-slow` the others."""

from __future__ import annotations

import re

import pytest
from support.clusters import ROOT, bpslaunch

PROGRAMS = ROOT / "tests" / "programs"
FEATURES = [
    f"{path.stem}.{name}"
    for path in sorted((PROGRAMS / "backend").glob("*.py"))
    for name in re.findall(r"^@feature\ndef (\w+)\(", path.read_text(), re.MULTILINE)
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("machines", "ranks", "servers"),
    [
        pytest.param(1, 4, 0, marks=pytest.mark.long),
        pytest.param(1, 4, 2, marks=pytest.mark.long),
        pytest.param(2, 2, 0, marks=pytest.mark.long),
        pytest.param(2, 2, 2, marks=pytest.mark.long),
        pytest.param(4, 1, 0, marks=pytest.mark.long),
    ],
)
def test_all_features(machines: int, ranks: int, servers: int) -> None:
    options = ["-np", str(ranks), "--machines", str(machines), "--servers", str(servers)]
    run = bpslaunch(
        options,
        ["-m", "backend"],
        timeout_s=250,
        PYTHONPATH=str(PROGRAMS),
        PYTHONWARNINGS="ignore",
        TEST_CORES=str(ranks),  # large sums of one machine in shares, where ranks have a core each
    )
    assert run.returncode == 0, run.stdout + run.stderr
    done = re.findall(r"^\d: ([\w.]+): done in ", run.stdout, re.MULTILINE)
    assert sorted(done) == sorted(FEATURES * 4), run.stdout + run.stderr
