"""Who trains: how each is started, which of its processes can be killed, and what is to be said about it."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.goodput.training import ROOT, Task

FOLDER = Path(__file__).parent
#: What may be killed. A machine: all of its processes, but for the launcher.
KINDS = ("rank", "communication service", "summation server", "scheduler", "machine")


@dataclass(frozen=True)
class Place:
    """The job's processes. ``torchft_python``: an interpreter that has torchft."""

    machines: int
    ranks_per_machine: int
    servers: int
    launcher_options: Sequence[str] = ()
    torchft_python: str = ""

    @property
    def ranks(self) -> int:
        return self.machines * self.ranks_per_machine


class Contender:
    name = ""
    remark = ""
    program = FOLDER / "rank_in_place.py"
    kinds: Sequence[str] = ("rank",)

    def why_not(self, place: Place) -> str:
        """Why it can't be measured here; "" if it can."""
        return ""

    def copies(self, place: Place) -> int:
        """Of the model."""
        return place.ranks

    def command(self, place: Place, task: Task) -> list[str]:
        raise NotImplementedError


class InPlace(Contender):
    name = "in place"
    remark = "bpslaunch --max-restarts, shadow=True: kills of everything"
    kinds = KINDS

    def command(self, place: Place, task: Task) -> list[str]:
        return [
            sys.executable, "-m", "byteps_py.launch", "--max-restarts", "1000", *place.launcher_options,
            "-np", str(place.ranks_per_machine), "--machines", str(place.machines), "--servers", str(place.servers),
            sys.executable, str(self.program), task.word(),
        ]  # fmt: skip


class OnMesh(InPlace):
    name = "mesh"
    remark = "PP 2 x TP 2 x DP, hosted, bpslaunch --max-restarts, shadow=True: kills of everything"
    program = FOLDER / "rank_mesh.py"

    def copies(self, place: Place) -> int:
        return place.ranks // 4

    def why_not(self, place: Place) -> str:
        return "its meshes need a multiple of 4 ranks" if place.ranks % 4 else ""


class Checkpoint(Contender):
    """A shell starts torchrun again. With its own ``--max-restarts`` (torch 2.13), ranks that were started again did
    not find each other over gloo, and the job stood still."""

    name = "checkpoint and restart"
    remark = "DDP over gloo; a shell starts torchrun again: kills of ranks only"
    program = FOLDER / "rank_checkpoint.py"

    def command(self, place: Place, task: Task) -> list[str]:
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(place.ranks),
            "--monitor-interval", "0.1", str(self.program), task.word(),
        ]  # fmt: skip
        return ["bash", "-c", f"until {shlex.join(torchrun)}; do :; done"]


class TorchFT(Contender):
    name = "torchft"
    remark = "DDP over its gloo, a group per rank, which a shell starts again: kills of ranks only"
    program = FOLDER / "rank_torchft.py"

    def why_not(self, place: Place) -> str:
        if not place.torchft_python:
            return "no interpreter with torchft was named: --torchft-python"
        command = [place.torchft_python, "-c", "import torchft, xxhash"]
        ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
        return ran.stderr.strip().rpartition("\n")[2] if ran.returncode else ""

    def command(self, place: Place, task: Task) -> list[str]:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        python = Path(place.torchft_python)
        rank = shlex.join([str(python), str(self.program), task.word()])
        lines = [
            f"export TORCHFT_LIGHTHOUSE=http://127.0.0.1:{port} PYTHONPATH={ROOT}",
            f"{python.with_name('torchft_lighthouse')} --bind 127.0.0.1:{port} --min_replicas {place.ranks // 2}"
            " --join_timeout_ms 1000 --quorum_tick_ms 50 --heartbeat_timeout_ms 1000 &",
            "lighthouse=$!",
            *(f"(until GOODPUT_RANK={number} {rank}; do :; done) & ranks+=($!)" for number in range(place.ranks)),
            "wait ${ranks[@]}; kill $lighthouse; wait",
        ]
        return ["bash", "-c", "\n".join(lines)]


CONTENDERS = {"in-place": InPlace(), "mesh": OnMesh(), "checkpoint": Checkpoint(), "torchft": TorchFT()}


def environment() -> dict[str, str]:
    """Of a job: one thread for each rank's arithmetic."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}
