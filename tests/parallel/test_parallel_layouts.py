"""All dimensions of parallelism at once: examples/llama.py in many layouts beside one process
(programs/parallel_layouts.py)."""

from __future__ import annotations

import sys

import pytest
from support.breaking import command
from support.clusters import ROOT

PROGRAM = str(ROOT / "tests" / "programs" / "parallel_layouts.py")
EXAMPLE = str(ROOT / "examples" / "llama.py")


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        ("-np 4", "2x2x1x1 1x1x2x2:zero2"),
        pytest.param("-np 4", "2x1x2x1:tied=1 1x2x1x2:zero3", marks=pytest.mark.slow),
        pytest.param("-np 4", "1x2x1x2:hsdp 2x1x1x2:zero1 1x2x2x1", marks=pytest.mark.long),
        pytest.param("-np 2 --machines 2 --servers 1", "2x1x2x1 1x2x2x1 2x1x1x2 1x2x1x2:zero2", marks=pytest.mark.slow),
        pytest.param(
            "-np 8",
            "2x2x2x1 2x1x2x2 1x2x2x2:zero1 4x1x2x1:no_sequence_parallel=1",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "-np 8",
            "2x2x1x2:zero2 1x2x2x2:zero2 2x1x2x2:schedule=interleaved 1x1x8x1 1x4x1x2:hsdp",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "-np 4 --machines 2 --servers 1", "2x2x2x1 2x1x2x2 1x2x2x2 4x1x2x1:tied=1", marks=pytest.mark.long
        ),
        pytest.param("-np 4", "1x1x4x1:schedule=chimera:micro_batches=4 4x1x1x1 1x4x1x1", marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(400)
def test_beside_one_process(layout: str, cases: str) -> None:
    words = layout.split()
    ranks = int(words[1]) * (int(words[3]) if len(words) > 2 else 1)
    arguments = [sys.executable, "-m", "byteps_py.launch", *words, sys.executable, PROGRAM, *cases.split()]
    with command(*arguments, OMP_NUM_THREADS="1") as job:
        assert job.end() == 0, job.text
    for number, case in enumerate(cases.split()):
        # Once from fresh weights, and once from the checkpoint of the layout before.
        assert job.text.count(f"{case}: right") == ranks * (1 + (number > 0)), job.text


_MACHINE, _SHARDED = ":hosted=machine", ":hosted=sharded"


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        ("-np 4", f"2x1x1x2{_SHARDED}"),
        pytest.param(
            "-np 2 --machines 2 --servers 1",
            f"2x1x1x2{_MACHINE} 1x1x2x2{_SHARDED} 2x1x2x1:tied=1{_MACHINE} 1x2x1x2{_SHARDED} 1x2x2x1{_MACHINE}",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "-np 4",
            f"2x1x1x2:zero1 2x1x1x2{_SHARDED} 1x1x2x2:schedule=interleaved:tied=1{_SHARDED} 2x2x1x1{_MACHINE} 1x1x2x2",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "-np 4",
            f"1x1x4x1:schedule=chimera:micro_batches=4{_SHARDED} 4x1x1x1{_SHARDED} 1x4x1x1{_MACHINE}",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "-np 4 --machines 2 --servers 1",
            f"2x1x2x2{_MACHINE} 1x2x2x2:tied=1{_SHARDED} 2x2x1x2{_MACHINE} 4x1x2x1{_SHARDED}",
            marks=pytest.mark.long,
        ),
    ],
)
@pytest.mark.timeout(400)
def test_hosted(layout: str, cases: str) -> None:
    """States move between layouts that are hosted and those that are not."""
    test_beside_one_process(layout, cases)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("more", [{}, {"TEST_POWERSGD": "1"}], ids=["codec", "powersgd"])
@pytest.mark.parametrize("cases", ["2x1x1x2 1x1x2x2", pytest.param("1x1x1x4 1x2x1x2", marks=pytest.mark.long)])
def test_compressed(cases: str, more: dict[str, str]) -> None:
    """The sums of each part of the model, with what machines, or ranks, have not sent; checkpoints."""
    program = str(ROOT / "tests" / "programs" / "compressed_mesh.py")
    words = ["-np", "2", "--machines", "2", "--servers", "1", sys.executable, program, *cases.split()]
    variables = {"OMP_NUM_THREADS": "1", "BYTEPS_MIN_COMPRESS_BYTES": "0", "BYTEPS_FUSION_BYTES": "0"}
    with command(sys.executable, "-m", "byteps_py.launch", *words, **variables, **more) as job:
        assert job.end() == 0, job.text
    for case in cases.split():
        assert job.text.count(f"{case}: right") == 4, job.text


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        pytest.param("-np 2", "1x1x1x2:sharded 2x1x1x1:sharded", marks=pytest.mark.long),
        pytest.param("-np 2", "1x1x2x1:machine 1x2x1x1:sharded", marks=pytest.mark.long),
        pytest.param(
            "-np 2 --machines 2 --servers 1",
            "2x1x1x2:machine 1x1x2x2:sharded 2x1x2x1:machine 1x2x1x2:sharded",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.timeout(300)
def test_hosted_and_clipped(layout: str, cases: str) -> None:
    """SGD, which sees the factor of clipping; mixed precision; refusals."""
    words = layout.split()
    ranks = int(words[1]) * (int(words[3]) if len(words) > 2 else 1)
    program = str(ROOT / "tests" / "programs" / "parallelized.py")
    launch = [sys.executable, "-m", "byteps_py.launch", *words, sys.executable, program, *cases.split()]
    with command(*launch, OMP_NUM_THREADS="1") as job:
        assert job.end() == 0, job.text
    for case in cases.split():
        assert job.text.count(f"{case}: right") == ranks, job.text


@pytest.mark.parametrize(
    "cases",
    [
        "1x1x1x2 2x1x1x1",
        pytest.param("1x1x2x1 1x1x1x2:zero1 1x1x1x2:zero2 1x2x1x1:hsdp 1x1x1x2:zero3", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(200)
def test_mixed_precision(cases: str) -> None:
    """Of ``parallelize_model``: autocast, a step that is skipped on all ranks, and refusals."""
    program = str(ROOT / "tests" / "programs" / "parallelized.py")
    launch = [sys.executable, "-m", "byteps_py.launch", "-np", "2", sys.executable, program, *cases.split()]
    with command(*launch, OMP_NUM_THREADS="1") as job:
        assert job.end() == 0, job.text
    for case in cases.split():
        assert job.text.count(f"{case}: right") == 2, job.text


@pytest.mark.long
@pytest.mark.timeout(300)
def test_on_gloo() -> None:
    cases = "2x2x1x1 1x1x2x2:zero2"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", PROGRAM, *cases.split()]
    with command(*torchrun, OMP_NUM_THREADS="1", TEST_BACKEND="gloo") as job:
        assert job.end() == 0, job.text
    assert job.text.count("right") == 4 * 3, job.text


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_the_example() -> None:
    arguments = ["--tp", "2", "--cp", "2", "--steps", "4", "--check", "--documents", "--width", "32", "--context", "64"]
    launch = [sys.executable, "-m", "byteps_py.launch", "-np", "4", sys.executable, EXAMPLE, *arguments]
    with command(*launch, OMP_NUM_THREADS="1") as job:
        assert job.end() == 0, job.text
    assert "the losses of 4 steps and those of one process: equal to 0.0001" in job.text, job.text


@pytest.mark.timeout(120)
def test_sizes_that_do_not_fit_are_explained() -> None:
    with command(sys.executable, EXAMPLE, "--tp", "3", OMP_NUM_THREADS="1") as job:
        assert job.end() == 1, job.text
    assert "UsageError: tp=3" in job.text, job.text
