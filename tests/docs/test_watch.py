"""docs/howto/watch.md: its programs run, and what it says of ports and alerts is so."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from support.clusters import ROOT, clean_environment
from support.documents import Page
from support.threaded import ThreadedCluster

import byteps_py.torch as bps
from byteps_py.config.settings import Settings
from byteps_py.prometheus.page import port_of

PAGE = Page(ROOT / "docs" / "howto" / "watch.md")


AROUND = """
import torch, byteps_py as bps

bps.init()
model = torch.nn.Linear(4, 2)
optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
batches = [(torch.randn(3, 4), torch.tensor([0, 1, 1])) for _ in range(4)]


def train_step(batch):
    model(batch[0]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


"""


def run_block(marker: str, folder: Path, **variables: str) -> None:
    """In a process of its own, a job of one rank, with the names that the page leaves to the reader."""
    (block,) = PAGE.blocks_after(marker)
    command = [sys.executable, "-c", f"{AROUND}{block}\nassert bps.metrics()['steps'] == 4\nbps.shutdown()"]
    done = subprocess.run(
        command, cwd=folder, env=clean_environment(**variables), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_tokens_are_counted() -> None:
    def main(rank: int) -> None:
        (block,) = PAGE.blocks_after("tokens")
        model = torch.nn.Linear(4, 2)
        optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        batches = [(torch.randn(3, 4), torch.tensor([0, 1, 1])) for _ in range(4)]
        exec(block, {"bps": bps, "torch": torch, "batches": batches, "model": model, "optimizer": optimizer})
        found = bps.metrics()
        assert (found["steps"], found["tokens"], found["samples"]) == (4, 48, 12)

    for size in (1, 2):
        ThreadedCluster((size,)).run(main)


@pytest.mark.slow
def test_csv(tmp_path: Path) -> None:
    run_block("csv", tmp_path)
    with open(tmp_path / "metrics-0.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [float(row["steps"]) for row in rows]
    assert steps == [1, 2, 3, 4]


def test_tensorboard(tmp_path: Path) -> None:
    if find_spec("tensorboard") is None:
        pytest.skip("20 MB with what it needs: pip install tensorboard")
    run_block("tensorboard", tmp_path)
    (events,) = (tmp_path / "runs" / "rank0").glob("events.out.tfevents.*")
    written = events.read_bytes()
    assert written.count(b"byteps/exposed_communication_ratio") == 4


def test_wandb(tmp_path: Path) -> None:
    if find_spec("wandb") is None:
        pytest.skip("60 MB with what it needs: pip install wandb")
    run_block("wandb", tmp_path, WANDB_MODE="offline", HOME=str(tmp_path))
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))


def test_the_configuration_of_prometheus_is_one() -> None:
    """The block "prometheus" of the page: its first command."""
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed: apt-get install --no-install-recommends prometheus")
    (block,) = PAGE.blocks_after("prometheus")
    command = block.splitlines()[0].removeprefix("$ ")
    assert subprocess.run(command.split(), cwd=ROOT, capture_output=True, timeout=60).returncode == 0


def test_the_table_of_ports_is_right() -> None:
    """The block "pages" is run by tests/jobs/test_watched_job.py."""
    settings = [Settings(metrics_port=9400, local_size=2, local_rank=rank) for rank in (0, 1)]
    offsets = [port_of(settings[0], role) - 9400 for role in ("scheduler", "worker", "server", "rank")]
    rows = re.findall(r"^\| (?:`BYTEPS_METRICS_PORT`|\+ (\d)).*?\|", PAGE.text, re.MULTILINE)
    assert [int(offset or 0) for offset in rows] == offsets
    assert port_of(settings[1], "rank") == 9404


def test_the_table_of_alerts_is_complete() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "monitoring" / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert re.findall(r"^\| `(BytePS\w+)` \|", PAGE.text, re.MULTILINE) == [rule["alert"] for rule in rules]
