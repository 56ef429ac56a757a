"""The programs of the suite with tensors on a GPU: all features of torch on the backend "byteps", and the parallel
layers. All ranks share one device."""

from __future__ import annotations

import re

import pytest
import torch
from support.clusters import ROOT, bpslaunch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(300),
]

PROGRAMS = ROOT / "tests" / "programs"
MODULES = ["reductions", "collectives", "joins", "as_gloo", "training", "parallel", "pipelines"]


@pytest.mark.parametrize("layout", ["-np 4", "-np 2 --machines 2 --servers 1"])
@pytest.mark.parametrize("module", MODULES)
def test_features_of_torch(module: str, layout: str) -> None:
    source = (PROGRAMS / "backend" / f"{module}.py").read_text()
    names = [f"{module}.{name}" for name in re.findall(r"^@feature\ndef (\w+)\(", source, re.MULTILINE)]
    run = bpslaunch(
        layout.split(),
        ["-m", "backend", f"{module}."],
        timeout_s=250,
        PYTHONPATH=str(PROGRAMS),
        PYTHONWARNINGS="ignore",
        TEST_DEVICE="cuda",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    done = re.findall(r"^\d: ([\w.]+): done in ", run.stdout, re.MULTILINE)
    assert sorted(done) == sorted(names * 4), run.stdout + run.stderr


@pytest.mark.parametrize(
    ("program", "layout"),
    [
        ("tensor_parallel", "-np 2"),
        ("tensor_parallel", "-np 1 --machines 2 --servers 1"),
        ("context_parallel equal groups_of_two sequences half_precision trains losses images bad_input", "-np 4"),
        ("pipelines 1", "-np 2"),
        ("pipelines 2", "-np 4"),
        ("multimodal_training 1", "-np 2"),
        ("mesh groups pipeline sharded sharded_and_tensor_parallel refused", "-np 4"),
        ("horovod", "-np 2 --machines 2 --servers 1"),
        ("horovod_training", "-np 2 --machines 2 --servers 1"),
        ("parallel_layouts 2x2x1x1:ddp 1x1x2x2:zero1 2x1x2x1:ddp 1x2x1x2:zero2 1x2x1x2:hsdp", "-np 4"),
    ],
)
def test_parallel_layers(program: str, layout: str) -> None:
    name, *arguments = program.split()
    run = bpslaunch(
        layout.split(),
        [PROGRAMS / f"{name}.py", *arguments],
        timeout_s=250,
        PYTHONWARNINGS="ignore",
        TEST_DEVICE="cuda",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("right") + run.stdout.count("all is well") >= 2, run.stdout
