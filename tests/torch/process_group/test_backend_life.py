"""The backend "byteps" from init_process_group to destroy_process_group, however the ranks were started."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.breaking import command
from support.clusters import ROOT

import byteps_py.torch as bps
from byteps_py import torch_backend
from byteps_py.torch.process_group import ProcessGroupOptions

PROGRAMS = ROOT / "tests" / "programs"
ENTRY_POINTS = """\
[torch.backends]
byteps = byteps_py.torch_backend:register

[torch.distributed.backends]
byteps = byteps_py.torch_backend:register
"""


@pytest.mark.slow
def test_under_torchrun_with_nothing_but_torch_imported(tmp_path: Path) -> None:
    installed = tmp_path / "byteps_again-0.dist-info"  # as pip would: this environment may have been made before
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: byteps-again\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(ENTRY_POINTS)
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(PROGRAMS / "backend_life.py")]
    with command(*program, PYTHONPATH=str(tmp_path)) as job:
        assert job.end() == 0, job.text
    assert {"0: done", "1: done"} <= set(job.said)


def test_the_entry_points_are_the_project_s() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for line in ENTRY_POINTS.splitlines():
        if line.startswith("["):
            assert f'[project.entry-points."{line[1:-1]}"]\nbyteps = "byteps_py.torch_backend:register"\n' in project


@pytest.mark.slow
def test_ranks_by_torch_multiprocessing(tmp_path: Path) -> None:
    with command(sys.executable, str(PROGRAMS / "backend_spawn.py"), str(tmp_path / "store")) as job:
        assert job.end() == 0, job.text
    assert {"0: done", "1: done"} <= set(job.said)


@pytest.mark.parametrize("turn", range(3))
def test_who_adds_up_a_large_tensor_is_told_of_a_killed_rank(turn: int) -> None:
    """Wherever that one was in it."""
    program = str(PROGRAMS / "backend_ends.py")
    with command(sys.executable, "-m", "byteps_py.launch", "-np", "2", sys.executable, program) as job:
        job.until("0: going", "1: going")
        os.kill(job.pid(program, RANK=str(turn % 2)), signal.SIGKILL)
        said = job.until(f"{1 - turn % 2}: ")
        assert job.end() != 0
    assert f"rank {turn % 2} " in said, said
    assert "PeerLostError" in said, said


@pytest.mark.slow
def test_who_waits_for_too_long_says_for_whom() -> None:
    """It does not look at that again and again until the group's own, longer timeout."""
    program = str(PROGRAMS / "backend_ends.py")
    limits = {"BYTEPS_STALL_WARN_S": "1", "BYTEPS_STALL_LIMIT_S": "3"}
    with command(sys.executable, "-m", "byteps_py.launch", "-np", "2", sys.executable, program, **limits) as job:
        job.until("0: going", "1: going")
        frozen = job.pid(program, RANK="1")
        os.kill(frozen, signal.SIGSTOP)
        said = job.until("StallError: tensor ")  # or that of a future, which is a RuntimeError with the same words
        os.kill(frozen, signal.SIGKILL)
        assert job.end() != 0
    assert "longer than BYTEPS_STALL_LIMIT_S=3 allows" in said, said
    assert "for rank 1, which has not handed it over" in said, said


def test_a_world_of_one() -> None:
    torch_backend.register()
    options = ProcessGroupOptions(timedelta(seconds=7))
    dist.init_process_group("byteps", store=dist.HashStore(), rank=0, world_size=1, pg_options=options)
    try:
        tensor = torch.tensor([1.0, 2.0])
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        outputs = [torch.empty(2)]
        dist.all_gather(outputs, tensor)
        exchanged, piece = torch.empty(2), torch.empty(2)
        dist.all_to_all_single(exchanged, tensor)
        dist.scatter(piece, [tensor], 0)
        dist.barrier()
        assert [t.tolist() for t in (tensor, outputs[0], exchanged, piece)] == [[1.0, 2.0]] * 4
        assert dist.distributed_c10d._get_default_timeout("byteps") == timedelta(minutes=30)
        assert not bps.is_initialized() or bps.size() == 1
        with pytest.raises(bps.UsageError, match="a group of 1 has no rank 1 to send to"):
            dist.group.WORLD.send([tensor], 1, 0)
    finally:
        dist.destroy_process_group()
    assert not bps.is_initialized()


def test_a_world_that_is_not_the_job() -> None:
    bps.init()
    try:
        with pytest.raises(bps.UsageError, match="rank 0 of 2, byteps_py rank 0 of 1"):
            dist.init_process_group("byteps", store=dist.HashStore(), rank=0, world_size=2)
        assert bps.is_initialized()
    finally:
        bps.shutdown()
    assert not dist.is_initialized()
