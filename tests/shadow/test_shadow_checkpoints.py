"""`bps checkpoint` beside a real job: what it writes is what the training had at that step."""

from __future__ import annotations

import os
import pickle
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clusters import ROOT
from support.documents import Page, at_own_places, commands_of
from support.launching import Running, launched
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from byteps_py.checkpoint.program import CheckpointOptions, CheckpointProgram
from byteps_py.checkpoint_files import CheckpointFolder
from byteps_py.config.settings import Settings
from byteps_py.system import jobs

PROGRAMS = Path(__file__).parents[1] / "programs"
PAGE = Page(ROOT / "docs" / "howto" / "shadow-checkpoints.md")
_LIMIT_S = 90
PYTHON = [sys.executable, "-W", "error", "-W", "ignore:torch.distributed is disabled"]


class TrainingJob:
    """Two machines of one rank and a server, which train until the end of the block. ``step``: the last one known."""

    def __init__(self, running: Running, folder: Path) -> None:
        self._running = running
        self.references = folder
        _, self.address, _, self.begun = running.line().split()
        self.step = 0

    def wait_for_step(self, step: int) -> None:
        while self.step < step:
            line = self._running.line()
            assert line, self._running.finish()
            self.step = int(line.removeprefix("[0] at "))

    def wait_for_checkpoint(self, folder: Path) -> None:
        """Of any step: the job's server has it written."""
        while not list(folder.glob("step-*")):
            self.wait_for_step(self.step + 1)

    def write(self, folder: Path, said: list[str], keep: int | None = None) -> None:
        """Write a checkpoint from this process."""
        host, _, port = self.address.partition(":")
        settings = jobs.with_local_secret(Settings(scheduler_host=host, scheduler_port=int(port)))
        with CheckpointFolder(folder) as opened:
            CheckpointProgram(settings, opened, CheckpointOptions(keep=keep, piece_bytes=1000), said.append).run()

    def run_command(self, folder: Path) -> subprocess.CompletedProcess[str]:
        (line, _), _ = commands_of(PAGE.blocks_after("write one")[0])
        bps, *words = shlex.split(at_own_places(line, {"/data/run-7": str(folder)}), comments=True)
        assert bps == "bps"
        command = [*PYTHON, "-m", "byteps_py.cli", *words, "--scheduler", self.address]
        return subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)

    def end(self) -> str:
        """Returns what the job has logged."""
        code, out, err = self._running.finish("enough\n")
        assert code == 0, (out, err)
        return err


@contextmanager
def training(optimizer: str, folder: Path, *arguments: object, **environ: str) -> Iterator[TrainingJob]:
    folder.mkdir()
    command = [sys.executable, str(PROGRAMS / "shadow_checkpoints.py"), optimizer, str(folder), *map(str, arguments)]
    with launched(
        "-np", "1", "--machines", "2", "--servers", "1", *command, BYTEPS_PARTITION_BYTES="4096", **environ
    ) as running:
        yield TrainingJob(running, folder)


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


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
        assert found.dtype is expected.dtype, path
        assert torch.equal(found, expected), path
    else:
        assert found == expected, path


def by_name(reference: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's state_dict, with the names of parameters instead of their numbers."""
    names, saved = reference["names"], reference["optimizer"]
    groups = [{**group, "params": [names[each] for each in group["params"]]} for group in saved["param_groups"]]
    return {"state": {names[place]: state for place, state in saved["state"].items()}, "param_groups": groups}


def assert_is_of(checkpoint: Path, references: Path) -> None:
    """A checkpoint is bit for bit what the training had."""
    step = int(checkpoint.name.removeprefix("step-"))
    single = references / "found.pt"
    dcp_to_torch_save(checkpoint, single)
    found = torch.load(single, weights_only=False)
    reference = torch.load(references / f"{step}.pt", weights_only=False)
    assert found["step"] == step
    assert_same(dict(found["model"]), dict(reference["model"]))
    assert_same(found["optimizer"], by_name(reference))
    extras = {rank: pickle.loads(extra) for rank, extra in found["extra"].items()}
    assert extras == {str(rank): {"rank": rank, "step": step} for rank in range(2)}
    assert found["buffers"].keys() == {"1"}  # its BatchNorm has seen other data
    assert found["buffers"]["1"].keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


#: What a user's program does, without byteps_py.
LOAD = """
import sys, torch
torch.manual_seed(1)
model = torch.nn.Sequential(
    torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), torch.nn.Tanh(), torch.nn.Linear(64, 64),
    torch.nn.Tanh(), torch.nn.Linear(64, 20),
)
model[3].to(torch.bfloat16)
model.shared = model[5].bias
optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
BLOCK
names = {param: name for name, param in model.named_parameters()}
torch.save({
    "step": state_dict["step"], "model": model.state_dict(), "lr": optimizer.param_groups[0]["lr"],
    "states": {names[param]: state for param, state in optimizer.state.items()},
}, sys.argv[2])
assert not any(name.startswith("byteps_py.") for name in sys.modules)
"""


#: The same with FSDP2, on two ranks; rank 0 saves whole tensors. Now and then a thread of gloo outlives its group, and
#: then torch aborts the interpreter's end.
LOAD_FSDP = """
import os, sys, torch
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (2,))
model = torch.nn.Sequential(
    torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), torch.nn.Tanh(), torch.nn.Linear(64, 64),
    torch.nn.Tanh(), torch.nn.Linear(64, 20),
)
model[3].to(torch.bfloat16)
model.shared = model[5].bias
for layer in (model[3], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
BLOCK
whole = StateDictOptions(full_state_dict=True)
weights, states = get_state_dict(model, optimizer, options=whole)
if dist.get_rank() == 0:
    saved = {"step": state_dict["step"], "model": weights, "lr": states["param_groups"][0]["lr"]}
    torch.save({**saved, "states": states["state"]}, sys.argv[2])
dist.destroy_process_group()
os._exit(0)
"""


def run_ranks(program: str, size: int, *arguments: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    plain = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    plain |= {"WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, *arguments], env={**plain, "RANK": str(rank)})
        for rank in range(size)
    ]
    try:
        assert [rank.wait(_LIMIT_S) for rank in ranks] == [0] * size
    finally:
        for each in ranks:
            each.kill()
            each.wait()


@pytest.mark.slow
def test_what_is_written_is_what_the_training_had(tmp_path: Path) -> None:
    """Twice, while it trains, in pieces of a few rows, and one is kept."""
    folder, said = tmp_path / "checkpoints", list[str]()
    with training("adamw", tmp_path / "references") as job:
        job.wait_for_step(3)
        for _ in range(2):
            job.write(folder, said, keep=1)
            job.wait_for_step(steps_in(folder)[-1] + 1)
        job.end()
    assert len(said) == 2
    (step,) = steps_in(folder)
    assert said[-1].startswith(f"{folder}/step-{step}: ")
    assert_is_of(folder / f"step-{step}", job.references)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [".lock"]


@pytest.mark.long
def test_torch_loads_it(tmp_path: Path) -> None:
    """On one process and with FSDP2, without this package."""
    folder = tmp_path / "checkpoints"
    with training("adamw", tmp_path / "references") as job:
        job.wait_for_step(3)
        done = job.run_command(folder)
        assert done.returncode == 0, done.stderr
        (step,) = steps_in(folder)
        assert done.stdout.startswith(f"{folder}/step-{step}: ")
        assert done.stderr == ""
        job.end()
    reference = torch.load(job.references / f"{step}.pt", weights_only=False)
    expected = by_name(reference)["state"]
    (block,) = PAGE.blocks_after("load one")
    block = at_own_places(block, {'"/data/run-7/step-1200"': "sys.argv[1]"})
    for program, size in ((LOAD, 1), (LOAD_FSDP, 2)):
        run_ranks(program.replace("BLOCK", block), size, str(folder / f"step-{step}"), str(tmp_path / "loaded.pt"))
        loaded = torch.load(tmp_path / "loaded.pt", weights_only=False)
        assert (loaded["step"], loaded["lr"]) == (step, 0.01)
        assert_same(dict(loaded["model"]), dict(reference["model"]))
        assert loaded["states"].keys() == expected.keys()
        for name, state in loaded["states"].items():
            assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
            for kind, value in state.items():
                assert torch.equal(value, expected[name][kind].to(value.dtype)), (name, kind)


@pytest.mark.slow
def test_a_restarted_job_goes_on_from_it(tmp_path: Path) -> None:
    """No server has anything any more."""
    folder = tmp_path / "checkpoints"
    with training("adamw", tmp_path / "references") as job:
        job.wait_for_step(3)
        job.write(folder, [])
        (step,) = steps_in(folder)
        job.wait_for_step(step + 2)
        job.end()
    with training("adamw", tmp_path / "restarted", folder) as again:
        assert again.begun == str(step)
        again.wait_for_step(step + 2)
        again.end()
    for following in (step + 1, step + 2):
        before = torch.load(job.references / f"{following}.pt", weights_only=False)
        assert_same(torch.load(again.references / f"{following}.pt", weights_only=False), before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", ["sgd", *(pytest.param(each, marks=pytest.mark.long) for each in ("adagrad", "lamb"))]
)
def test_other_optimizers_states(optimizer: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with training(optimizer, tmp_path / "references") as job:
        job.wait_for_step(3)
        job.write(folder, [])
        job.end()
    (step,) = steps_in(folder)
    assert_is_of(folder / f"step-{step}", job.references)


@pytest.mark.slow
def test_a_server_writes_checkpoints_by_itself(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    [(line, _)] = commands_of(PAGE.blocks_after("servers write")[0])
    export, *words = shlex.split(at_own_places(line, {"/data/run-7": str(folder), "=600": "=1"}))
    assert export == "export"
    environ = dict(each.split("=") for each in words)
    with training("adamw", tmp_path / "references", **environ) as job:
        job.wait_for_checkpoint(folder)
        said = job.end()
    assert "no checkpoint" not in said
    for step in steps_in(folder):
        assert_is_of(folder / f"step-{step}", job.references)
