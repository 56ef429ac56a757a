"""Scripts as Horovod's users write them, run to their end on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.clusters import ROOT, bpslaunch

EXAMPLES = ROOT / "examples"


def run(*program: str | Path, options: tuple[str, ...] = ()) -> str:
    done = bpslaunch(["-np", "2", *options], [EXAMPLES / program[0], *program[1:]], timeout_s=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_mnist() -> None:
    out = run("horovod_mnist.py", "--epochs", "3", "--fp16-allreduce", "--gradient-predivide-factor", "2")
    accuracies = [float(percent) for percent in re.findall(r"accuracy ([\d.]+)%", out)]
    assert len(accuracies) == 3
    assert accuracies[-1] > 85


@pytest.mark.slow
def test_imagenet_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    options = ["--model", "tiny", "--image-size", "16", "--images", "40", "--batch-size", "8", "--warmup-epochs", "1"]
    options += ["--checkpoints", tmp_path, "--batches-per-allreduce", "2", "--sync-bn", "--num-groups", "3"]
    out = run("horovod_imagenet.py", *options, "--epochs", "1")
    assert re.findall(r"(\w+) epoch 1: loss", out) == ["train", "validate"]
    out = run("horovod_imagenet.py", *options, "--epochs", "2")
    assert "goes on after epoch 1" in out
    assert re.findall(r"(\w+) epoch 2: loss", out) == ["train", "validate"]


@pytest.mark.slow
def test_elastic() -> None:
    out = run("horovod_elastic.py", "--epochs", "2", "--fail-at", "7")
    assert "joined again: 2 ranks, epoch 1, batch 5" in out
    assert float(re.search(r"accuracy ([\d.]+)%", out)[1]) > 80


@pytest.mark.slow
def test_elastic_without_a_rank() -> None:
    out = run("horovod_elastic.py", "--epochs", "2", "--fail-at", "2", "--kill-at", "7", options=("--elastic",))
    assert re.findall("joined again: .*", out) == [
        "joined again: 2 ranks, epoch 1, batch 0",
        "joined again: 1 ranks, epoch 1, batch 5",
    ]
    assert float(re.search(r"accuracy ([\d.]+)%", out)[1]) > 80
