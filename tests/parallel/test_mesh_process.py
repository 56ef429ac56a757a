"""Meshes on real processes (programs/mesh.py): groups, pipelines, FSDP and HSDP on them, warnings and errors."""

from __future__ import annotations

import sys

import pytest
from support.breaking import command
from support.clusters import ROOT

PROGRAM = str(ROOT / "tests" / "programs" / "mesh.py")


@pytest.mark.parametrize(
    ("layout", "backend", "ranks", "cases"),
    [
        ("-np 4", "byteps", 4, "groups pipeline sharded sharded_and_tensor_parallel refused spans_machines_by_hand"),
        ("-np 2 --machines 2", "byteps", 4, "spans_machines"),
        pytest.param("-np 8", "gloo", 8, "groups sharded_and_tensor_parallel refused", marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value),
)
def test_on_real_processes(layout: str, backend: str, ranks: int, cases: str) -> None:
    arguments = [sys.executable, "-m", "byteps_py.launch", *layout.split(), sys.executable, PROGRAM, *cases.split()]
    with command(*arguments, PYTHONWARNINGS="default", OMP_NUM_THREADS="1", TEST_BACKEND=backend) as job:
        assert job.end() == 0, job.text
    for case in cases.split():
        assert job.text.count(f"{case}: right") == ranks, job.text


@pytest.mark.slow
def test_under_torchrun() -> None:
    arguments = ["-m", "torch.distributed.run", "--nproc-per-node", "4", PROGRAM, "groups"]
    with command(sys.executable, *arguments, PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1", TEST_BACKEND="gloo") as job:
        assert job.end() == 0, job.text
    assert job.text.count("groups: right") == 4, job.text
