"""Pipelines on real processes: the same losses, gradients and weights as in one process (programs/pipelines.py)."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from support.breaking import command
from support.clusters import ROOT

PROGRAM = str(ROOT / "tests" / "programs" / "pipelines.py")
DIES = str(ROOT / "tests" / "programs" / "pipeline_dies.py")


def launch(layout: str, program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "byteps_py.launch", *layout.split(), sys.executable, program, *arguments]


def check(arguments: list[str], ranks: int, cases: str, **variables: str) -> None:
    with command(*arguments, PYTHONWARNINGS="default", OMP_NUM_THREADS="1", **variables) as job:
        assert job.end() == 0, job.text
    for case in cases.split():
        assert job.text.count(f"{case}: right") == ranks, job.text


@pytest.mark.parametrize(
    ("layout", "copies", "cases"),
    [
        ("-np 2", 1, "equal of_torch stale structures skips raises refused tokens_count clipping"),
        ("-np 2", 1, "mixed_precision float32_gradients evaluation overlaps tied_in_a_list in_place lists"),
        pytest.param("-np 2", 1, "in_front batch_norm refused_modules scalers large_values", marks=pytest.mark.long),
        ("-np 1 --machines 2 --servers 1", 1, "equal stale raises"),
        pytest.param("-np 1 --machines 2 --servers 1", 1, "structures checkpoints overlaps", marks=pytest.mark.slow),
        pytest.param("-np 4", 1, "peaks skips same_bits large_values", marks=pytest.mark.slow),
        pytest.param("-np 1 --machines 2", 1, "large_values", marks=pytest.mark.slow),
        pytest.param(
            "-np 4",
            2,
            "tokens_count clipping stale other_meshes float32_gradients side_by_side",
            marks=pytest.mark.slow,
        ),
        pytest.param("-np 4", 2, "in_front batch_norm scalers", marks=pytest.mark.long),
        pytest.param("-np 4", 1, "equal stale structures raises checkpoints evaluation", marks=pytest.mark.long),
        pytest.param("-np 4", 2, "equal of_torch mixed_precision structures", marks=pytest.mark.long),
        pytest.param("-np 2 --machines 2 --servers 1", 1, "equal stale raises", marks=pytest.mark.long),
        pytest.param("-np 2 --machines 2", 2, "equal checkpoints", marks=pytest.mark.long),
        pytest.param("-np 3 --machines 2", 1, "chimera peaks", marks=pytest.mark.long),
        pytest.param("-np 4 --machines 2 --servers 1", 1, "chimera", marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(300)
def test_beside_one_process(layout: str, copies: int, cases: str) -> None:
    words = layout.split()
    ranks = int(words[1]) * (int(words[3]) if "--machines" in words else 1)
    check(launch(layout, PROGRAM, str(copies), *cases.split()), ranks, cases)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_on_gloo() -> None:
    cases = "equal structures raises checkpoints overlaps large_values"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", PROGRAM, "1", *cases.split()]
    check(torchrun, 2, cases, TEST_BACKEND="gloo")


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_pipelines_side_by_side_on_gloo() -> None:
    """Where groups of ranks that only some ranks make would hang."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", PROGRAM, "2", "side_by_side"]
    check(torchrun, 4, "side_by_side", TEST_BACKEND="gloo")


@pytest.mark.parametrize("killed", [0, 1])
def test_a_worker_that_dies_is_an_error_on_the_others(killed: int) -> None:
    with command(*launch("-np 3", DIES)) as job:
        job.until("0: going", "1: going", "2: going")
        os.kill(job.pid(DIES, RANK=str(killed)), signal.SIGKILL)
        said = job.until("PeerLostError")
        assert job.end() != 0
    assert f"rank {killed} " in said, said


@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_blocks_of_the_page_run(ranks: int, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "howto" / "pipelines.md").read_text(), re.DOTALL)
    assert len(blocks) == 9
    program = tmp_path / "page.py"
    folder = f"import os\nos.chdir({str(tmp_path)!r})"
    program.write_text("\n".join([folder, *blocks, "print('all right')", "dist.destroy_process_group()"]))
    with command(*launch(f"-np {ranks}", str(program)), PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1") as job:
        assert job.end() == 0, job.text
    assert job.text.count("all right") == ranks, job.text
    assert (tmp_path / "checkpoint" / ".metadata").exists()
