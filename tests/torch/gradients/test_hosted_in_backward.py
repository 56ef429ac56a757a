"""Hosted optimizers that step under the backward pass, on real processes: the same weights as on the ranks, bit for bit
(programs/hosted_in_backward.py)."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from support.breaking import command
from support.clusters import ROOT

PROGRAM = ROOT / "tests" / "programs" / "hosted_in_backward.py"
CASES = re.findall(r"^@case\ndef (\w+)\(", PROGRAM.read_text(), re.MULTILINE)


def run(layout: str, *cases: str, **settings: str) -> None:
    words = layout.split()
    ranks = int(words[1]) * (int(words[3]) if len(words) > 2 else 1)
    arguments = [sys.executable, "-m", "byteps_py.launch", *words, sys.executable, str(PROGRAM), *cases]
    with command(*arguments, **settings) as job:
        assert job.end() == 0, job.text
    for case in cases or CASES:
        assert job.text.count(f"{case}: right") == ranks, job.text


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "layout",
    [
        "-np 1",
        "-np 2",
        pytest.param("-np 1 --machines 2 --servers 1", marks=pytest.mark.long),
        pytest.param("-np 1 --machines 2", marks=pytest.mark.long),
        pytest.param("-np 2 --machines 2 --servers 1", marks=pytest.mark.slow),
        pytest.param("-np 1 --machines 3 --servers 2", marks=pytest.mark.long),
    ],
)
def test_beside_the_optimizer_on_the_ranks(layout: str) -> None:
    run(layout)


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_states_on_each_machine() -> None:
    run("-np 1 --machines 2 --servers 1", BYTEPS_HOSTED_STATES="machine")


@pytest.mark.timeout(180)
@pytest.mark.slow
@pytest.mark.parametrize("groups", ["0,2;1,3", pytest.param("0,1,2", marks=pytest.mark.long)])
def test_process_sets(groups: str) -> None:
    cases = ["equal_under_backward", "steps_while_backward_runs", "ranks_with_other_numbers", "parts_of_the_model"]
    run("-np 2 --machines 2 --servers 1", *cases, TEST_GROUPS=groups)


@pytest.mark.timeout(180)
@pytest.mark.slow
@pytest.mark.parametrize("partition", ["4096", pytest.param("65536", marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", [pytest.param("-np 2", marks=pytest.mark.long), "-np 2 --machines 2 --servers 1"])
def test_partitions_do_not_matter(layout: str, partition: str) -> None:
    cases = ["equal_under_backward", "steps_while_backward_runs", "ranks_with_other_numbers", "parts_of_the_model"]
    run(layout, *cases, BYTEPS_PARTITION_BYTES=partition, BYTEPS_FUSION_BYTES="10000")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("nonfinite", ["raise", pytest.param("skip", marks=pytest.mark.slow)])
def test_gradients_that_may_not_be_finite(nonfinite: str) -> None:
    run("-np 1", "refused_if_not_finite", BYTEPS_NONFINITE=nonfinite)


@pytest.mark.timeout(180)
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_parameters_on_cuda() -> None:
    run("-np 2", "on_cuda_under_backward")
