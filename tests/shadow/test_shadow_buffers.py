"""Large buffers that change, and large attachments, of a job whose machines all die: nothing of them is lost."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clusters import ROOT
from support.shadowed_cluster import ShadowedCluster

from byteps_py.checkpoint.program import CheckpointOptions, CheckpointProgram
from byteps_py.checkpoint_files import CheckpointFolder, checkpoint_steps

PROGRAM = ROOT / "tests" / "programs" / "shadowed_buffers.py"
RANKS, STEPS, MORE = 2, 8, 3


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        for mine, theirs in zip(one, other, strict=True):
            assert_equal(mine, theirs)
    else:
        assert one == other


def saved(folder: Path, name: str) -> list[dict[str, Any]]:
    """What each rank has written."""
    return [torch.load(folder / f"{name}.{rank}.pt", weights_only=False) for rank in range(RANKS)]


def assert_restored(folder: Path, step: int, before: dict[str, list[dict[str, Any]]]) -> None:
    """The second job went on from ``step`` with what the first one had, and made the same steps again."""
    found = saved(folder, f"restored-{step}")
    assert_equal(found, before[f"{step}"])
    first, second = (rank["model"]["seen"] for rank in found)
    assert first.nbytes == 3 << 20
    assert not torch.equal(first, second)  # each rank has its own
    assert [rank["extra"]["memory"].nbytes for rank in found] == [5 << 20] * RANKS
    for again in range(step + 1, STEPS + 1):
        assert_equal(saved(folder, f"{again}"), before[f"{again}"])
    assert [rank["extra"]["step"] for rank in saved(folder, f"{STEPS + MORE}")] == [STEPS + MORE] * RANKS


@pytest.mark.slow
@pytest.mark.parametrize("way", ["servers", "checkpoint"])
def test_buffers_and_attachments_come_back_bit_for_bit(tmp_path: Path, way: str) -> None:
    """After SIGKILL of all ranks and services, from the servers' memory; or from a checkpoint that they have written,
    after all servers were killed, too."""
    checkpoints = tmp_path / "checkpoints"
    with contextlib.ExitStack() as stack:
        cluster = ShadowedCluster(stack, RANKS, 1)
        cluster.program = PROGRAM
        scheduler, *machines = cluster.start(str(tmp_path), str(STEPS), "wait")
        for job in machines:
            job.until("made")
        held = cluster.held_step(STEPS - 1)
        if way == "checkpoint":
            with CheckpointFolder(checkpoints) as opened:
                options = CheckpointOptions(piece_bytes=1 << 20)
                CheckpointProgram(cluster.settings, opened, options, lambda said: None).run()
            (held,) = checkpoint_steps(checkpoints)
        for job in machines:
            job.close()  # SIGKILL
        assert scheduler.end() == 1
        if way == "checkpoint":
            cluster.servers[0].close()
            cluster = ShadowedCluster(stack, RANKS, 1)
            cluster.program = PROGRAM
        before = {f"{step}": saved(tmp_path, f"{step}") for step in range(1, STEPS + 1)}
        folder = [str(checkpoints)] if way == "checkpoint" else []
        again = cluster.start(str(tmp_path), str(STEPS + MORE), "done", *folder)
        begun = int(again[1].until("restored at").split()[-1])
        for job in again:
            assert job.end() == 0, job.text
        assert cluster.servers[0].end() == 0, cluster.servers[0].text
    assert held <= begun <= STEPS
    assert_restored(tmp_path, begun, before)
