"""Uneven data with real processes: ranks that have no more of it join, and the others go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clusters import bpslaunch

PROGRAM = Path(__file__).parents[2] / "programs" / "join.py"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("machines", "ranks", "servers"), [(1, 2, 0), (2, 1, 1), (2, 2, 0)])
def test_two_epochs_of_uneven_data(machines: int, ranks: int, servers: int) -> None:
    run = bpslaunch(
        ["-np", str(ranks), "--machines", str(machines), "--servers", str(servers)],
        [PROGRAM],
        BYTEPS_PARTITION_BYTES=str(64 << 10),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert sorted(line for line in run.stdout.splitlines() if line.endswith("is done")) == [
        f"rank {rank} is done" for rank in range(machines * ranks)
    ], run.stdout + run.stderr


@pytest.mark.timeout(200)
def test_the_optimizer_goes_on_after_a_join() -> None:
    run = bpslaunch(["-np", "1", "--machines", "2"], [PROGRAM.with_name("join_training.py")])
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("is done") == 2, run.stdout + run.stderr


@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(each, marks=pytest.mark.slow) for each in ("delayed", "in_backward"))]
)
def test_a_hosted_optimizer_says_that_it_does_not_go_together_with_join(kind: str) -> None:
    run = bpslaunch(["-np", "2"], [Path(__file__).parents[2] / "programs" / "hosted_join.py", kind])
    text = (
        "0: JoinedError: a hosted optimizer does not go together with join(): a step needs the gradients of all ranks"
    )
    assert text in run.stdout, run.stdout + run.stderr
