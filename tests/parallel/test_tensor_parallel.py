"""Tensor and sequence parallelism on real processes: the same values and gradients as the plain layers
(programs/tensor_parallel.py)."""

from __future__ import annotations

import sys

import pytest
from support.breaking import command
from support.clusters import ROOT

from byteps_py.parallel.tensor import padded_vocabulary

PROGRAM = str(ROOT / "tests" / "programs" / "tensor_parallel.py")
CASES = ("equal", "exact", "conjugates", "communicates", "cross_entropies", "gathered_output", "refused")


@pytest.mark.parametrize(
    "layout",
    [
        "-np 2",
        pytest.param("-np 1 --machines 2 --servers 1", marks=pytest.mark.slow),
        pytest.param("-np 4", marks=pytest.mark.slow),
        pytest.param("-np 2 --machines 2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(180)
def test_beside_the_plain_layers(layout: str) -> None:
    words = layout.split()
    ranks = int(words[1]) * (int(words[3]) if len(words) > 2 else 1)
    check([sys.executable, "-m", "byteps_py.launch", *words, sys.executable, PROGRAM], ranks)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_on_gloo() -> None:
    check([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", PROGRAM], 2, TEST_BACKEND="gloo")


def check(arguments: list[str], ranks: int, **variables: str) -> None:
    with command(*arguments, PYTHONWARNINGS="error::FutureWarning", OMP_NUM_THREADS="1", **variables) as job:
        assert job.end() == 0, job.text
    for case in CASES:
        assert job.text.count(f"{case}: right") == ranks, job.text


@pytest.mark.parametrize(("vocabulary", "ranks", "padded"), [(50257, 8, 51200), (50257, 1, 50304), (1024, 8, 1024)])
def test_the_vocabulary_is_padded(vocabulary: int, ranks: int, padded: int) -> None:
    assert padded_vocabulary(vocabulary, ranks) == padded
