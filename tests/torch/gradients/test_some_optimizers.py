"""Ranks with different numbers of optimizers, as real processes: an error that says so, or a stall that names them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.clusters import bpslaunch

PROGRAM = Path(__file__).parents[2] / "programs" / "some_optimizers.py"
REMEDY = "every rank needs the same optimizers, unless those of some ranks have a process_set"

pytestmark = pytest.mark.slow


def said(case: str, options: str = "-np 2", **variables: str) -> list[str]:
    """What each rank said at its end."""
    run = bpslaunch(options.split(), [PROGRAM, case], **variables)
    lines = sorted(line for line in run.stdout.splitlines() if re.match(r"rank \d (is done|has begun|after)", line))
    assert lines, run.stdout + run.stderr
    return lines


@pytest.mark.parametrize(
    ("case", "step", "most", "ahead", "options"),
    [("first", 2, 2, 0, "-np 2"), ("last", 3, 3, 1, "-np 1 --machines 2"), ("hosted", 2, 2, 0, "-np 2")],
)
def test_an_optimizer_that_steps_on_some_ranks_only(case: str, step: int, most: int, ahead: int, options: str) -> None:
    """All ranks are told so long before the stall limit, which is not reached within this test's time."""
    here = f"rank {ahead} waits in step {step} with {most} optimizers (DistributedOptimizer or DistributedDataParallel)"
    text = (
        f"MismatchError: Mismatched optimizers: {here}, rank {1 - ahead} in step {step} with {most - 1}; let the same"
    )
    for line in (lines := said(case, options)):
        assert text in line
    assert len(lines) == 2


@pytest.mark.parametrize("case", ["own process set", "late"])
def test_what_may_be_different(case: str) -> None:
    assert said(case) == ["rank 0 is done", "rank 1 is done"]


def test_ranks_that_do_the_same_count_alike_whatever_their_optimizers_are() -> None:
    lines = said("all")
    assert lines[::2] == ["rank 0 has begun [(16, 4)]", "rank 1 has begun [(16, 4)]"]


def test_a_rank_that_waits_in_another_call_may_only_be_slow() -> None:
    """The stall says what may be the cause."""
    lines = said("another call", BYTEPS_STALL_WARN_S="1", BYTEPS_STALL_LIMIT_S="8")
    assert len(lines) == 2
    for line in lines:
        assert "StallError" in line
        assert line.endswith(REMEDY)


def test_a_rank_that_ends_meanwhile() -> None:
    lines = said("end")
    assert "PeerLostError: tensor 'gradients to combine, first step of optimizer 2.plan': rank 0 waits" in lines[0]
    assert "but rank 1 shut down: use the same optimizers on every rank, unless those of some" in lines[0]
    assert lines[1] == "rank 1 is done"
