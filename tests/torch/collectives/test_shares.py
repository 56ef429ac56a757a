"""Sums by name, with real processes: among themselves, or through the service."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clusters import bpslaunch

PROGRAM = Path(__file__).parents[2] / "programs" / "in_shares.py"
ENDS = PROGRAM.with_name("ends_in_shares.py")
SCENARIOS = [
    "dtypes", "added_in_python", "sizes", "who_is_not_at_hand", "nobody_is_kept_waiting", "forked", "in_any_order",
    "in_sets", "backwards", "mistakes", "who_joins", "recorded",
]  # fmt: skip


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("layout", "size"),
    [
        ("-np 2", "small"),
        pytest.param("-np 2", "large", marks=pytest.mark.long),
        pytest.param("-np 3", "small", marks=pytest.mark.long),
        pytest.param("-np 3", "large", marks=pytest.mark.long),
        pytest.param("-np 1 --machines 3", "small", marks=pytest.mark.long),
        pytest.param("-np 1 --machines 3", "large", marks=pytest.mark.long),
        pytest.param("-np 2 --machines 2", "small", marks=pytest.mark.long),
        pytest.param("-np 2 --machines 2", "large", marks=pytest.mark.slow),
        pytest.param("-np 1 --machines 2 --servers 1", "small", marks=pytest.mark.slow),
    ],
)
def test_the_same_bits_whoever_is_at_hand(layout: str, size: str, tmp_path: Path) -> None:
    ranks = 4 if layout == "-np 2 --machines 2" else 3 if "3" in layout else 2
    run = bpslaunch(layout.split(), [PROGRAM, *SCENARIOS], TEST_FILE=str(tmp_path / "timeline"), TEST_SIZE=size)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    assert sorted(line for line in lines if line.endswith("is well")) == sorted(
        f"{rank}: {scenario}: all is well" for rank in range(ranks) for scenario in SCENARIOS
    )
    others = {2: "rank 0", 3: "ranks 0, 2", 4: "ranks 0, 2-3"}[ranks]
    shape = "[5, 503]" if size == "small" else "[5, 40003]"
    for rank in range(ranks):
        for odd in ("[5, 504]" if "servers" in layout else "[5, 40004]", "[3]"):
            text = (
                f"{rank}: tensor 'x': {others} gave sum of float32{shape}, rank 1 gave sum of float32{odd}; use "
                "the same shape, dtype and operation on every rank"
            )
            assert lines.count(text) == 2


def test_a_rank_that_leaves_a_sum_is_named() -> None:
    limits = {"BYTEPS_STALL_WARN_S": "0.5", "BYTEPS_STALL_LIMIT_S": "1.5"}
    run = bpslaunch(["-np", "3"], [ENDS, "left"], TEST_SIZE="large", **limits)
    said = [line for line in run.stdout.splitlines() if line.startswith(("1: StallError", "2: StallError"))]
    assert {line[0] for line in said} == {"1", "2"}, run.stdout + run.stderr
    for line in said:
        assert "StallError: tensor 'x': rank " in line
        assert "longer than BYTEPS_STALL_LIMIT_S=1.5 allows" in line
        assert "for rank 0, which has not handed it over" in line


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_right_after_a_rank_was_interrupted_in_one(ranks: int) -> None:
    run = bpslaunch(["-np", str(ranks)], [ENDS, "interrupted"], TEST_SIZE="large")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("interrupted: all is well") == ranks


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("layout", ["-np 3", "-np 1 --machines 3"])
def test_a_rank_that_dies_in_a_sum_is_named(layout: str, size: str) -> None:
    run = bpslaunch(layout.split(), [ENDS, "killed"], TEST_SIZE=size)
    said = [line for line in run.stdout.splitlines() if "PeerLostError: rank 2 " in line]
    assert {line[0] for line in said} == {"0", "1"}, run.stdout + run.stderr


@pytest.mark.parametrize("size", ["small", "large"])
def test_an_elastic_job_goes_on_without_a_rank_that_died_in_a_sum(size: str) -> None:
    run = bpslaunch(["--elastic", "-np", "3"], [ENDS, "elastic"], TEST_SIZE=size)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("elastic: all is well") == 2, run.stdout + run.stderr
