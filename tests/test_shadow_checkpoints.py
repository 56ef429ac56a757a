"""`bps checkpoint` beside a real job: what it writes is what the training had at that step."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launching import Running, launched
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

PROGRAMS = Path(__file__).parent / "programs"
_LIMIT_S = 60


class TrainingJob:
    """Two machines of one rank and a server, which train until the end of the block."""

    def __init__(self, running: Running, folder: Path) -> None:
        self._running = running
        self.references = folder
        self.address = running.line().split()[1]

    def wait_for_step(self, step: int) -> None:
        while self._running.line() != f"[0] at {step}":
            assert self._running.process.poll() is None, self._running.finish()

    def checkpoint(self, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "byteps_py.cli", "checkpoint", str(folder), "--scheduler", self.address]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=_LIMIT_S)

    def end(self) -> None:
        code, out, err = self._running.finish("enough\n")
        assert code == 0, (out, err)


@pytest.fixture(params=["adamw"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TrainingJob]:
    references = tmp_path / "references"
    references.mkdir()
    command = [sys.executable, str(PROGRAMS / "shadow_checkpoints.py"), request.param, str(references)]
    with launched("-np", "1", "--machines", "2", "--servers", "1", *command) as running:
        yield TrainingJob(running, references)


def only_step(folder: Path) -> int:
    (found,) = [int(path.name.removeprefix("step-")) for path in folder.glob("step-*")]
    return found


def assert_same(found: Any, expected: Any, path: str = "") -> None:
    assert type(found) is type(expected), path
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key in expected:
            assert_same(found[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), path
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{path}[{number}]")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype is expected.dtype and torch.equal(found, expected), path
    else:
        assert found == expected, path


def by_name(reference: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's state_dict, with the names of parameters instead of their numbers."""
    names, saved = reference["names"], reference["optimizer"]
    groups = [{**group, "params": [names[each] for each in group["params"]]} for group in saved["param_groups"]]
    return {"state": {names[place]: state for place, state in saved["state"].items()}, "param_groups": groups}


def test_what_is_written_is_what_the_training_had(job: TrainingJob, tmp_path: Path) -> None:
    job.wait_for_step(6)
    done = job.checkpoint(tmp_path / "checkpoints")
    assert done.returncode == 0, done.stderr
    job.end()
    step = only_step(tmp_path / "checkpoints")
    dcp_to_torch_save(tmp_path / "checkpoints" / f"step-{step}", tmp_path / "found.pt")
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    reference = torch.load(job.references / f"{step}.pt", weights_only=False)
    assert found["step"] == step >= 5
    assert_same(dict(found["model"]), dict(reference["model"]))
    assert_same(found["optimizer"], by_name(reference))
    assert {rank: pickle.loads(extra) for rank, extra in found["extra"].items()} == {
        str(rank): {"rank": rank, "step": step} for rank in range(2)
    }
