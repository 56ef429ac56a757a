"""What a tensor-parallel plan makes of a model, on real processes: the same values and gradients as the plain model
(programs/tensor_plans.py)."""

from __future__ import annotations

import sys

import pytest
from support.breaking import command
from support.clusters import ROOT

PROGRAM = str(ROOT / "tests" / "programs" / "tensor_plans.py")
CASES = (
    "fused_layers",
    "few_key_heads",
    "plans_refused",
    "decorated_refused",
    "deep_copies",
    "padding",
    "losses",
    "whole_parameters",
    "uncovered_refused",
    "shared_inputs_used_elsewhere",
    "checkpoints",
    "whole_beside_cut",
)


@pytest.mark.parametrize(
    "launcher",
    [
        "-m byteps_py.launch -np 2",
        pytest.param("-m byteps_py.launch -np 4", marks=pytest.mark.slow),
        pytest.param("-m torch.distributed.run --nproc-per-node 4", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(180)
def test_beside_the_plain_model(launcher: str) -> None:
    words = launcher.split()
    python = [sys.executable] if "byteps_py.launch" in words else []
    backend = {} if python else {"TEST_BACKEND": "gloo"}
    arguments = [sys.executable, *words, *python, PROGRAM, *CASES]
    with command(*arguments, PYTHONWARNINGS="error::FutureWarning", OMP_NUM_THREADS="1", **backend) as job:
        assert job.end() == 0, job.text
    for case in CASES:
        assert job.text.count(f"{case}: right") == int(words[-1]), job.text
