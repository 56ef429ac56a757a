"""Context parallelism on real processes: the same outputs, gradients and losses as in one process
(programs/context_parallel.py)."""

from __future__ import annotations

import sys

import pytest
from support.breaking import command
from support.clusters import ROOT

PROGRAM = str(ROOT / "tests" / "programs" / "context_parallel.py")


def check(arguments: list[str], ranks: int, cases: str, **variables: str) -> None:
    given = [*arguments, PROGRAM, *cases.split()]
    with command(sys.executable, "-m", *given, PYTHONWARNINGS="default", OMP_NUM_THREADS="1", **variables) as job:
        assert job.end() == 0, job.text
    for case in cases.split():
        assert job.text.count(f"{case}: right") == ranks, job.text


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        ("-np 2", "equal groups_of_two sequences half_precision trains losses images bad_input"),
        pytest.param("-np 4", "equal groups_of_two sequences trains losses", marks=pytest.mark.slow),
        ("-np 1 --machines 2 --servers 1", "equal sequences trains losses"),
        pytest.param("-np 3", "equal sequences half_precision trains losses bad_input", marks=pytest.mark.slow),
        pytest.param("-np 2 --machines 2 --servers 1", "equal groups_of_two trains losses", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(180)
def test_beside_one_process(layout: str, cases: str) -> None:
    words = layout.split()
    ranks = int(words[1]) * (int(words[3]) if "--machines" in words else 1)
    check(["byteps_py.launch", *words, sys.executable], ranks, cases)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.timeout(180)
def test_on_gloo(ranks: int) -> None:
    """And what travels: this backend's operations can be seen there."""
    cases = "equal groups_of_two half_precision trains losses bad_input traffic"
    check(["torch.distributed.run", "--nproc-per-node", str(ranks)], ranks, cases, TEST_BACKEND="gloo")
