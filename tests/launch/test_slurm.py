"""A real SLURM, each node of it a network namespace: srun, sbatch and bpslaunch, without anything exported. Every rank
runs tests/programs/rank.py, which checks its sums."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.breaking import RANK, environ_of
from support.clusters import ROOT
from support.slurm_cluster import SlurmCluster, require_slurm, slurm_cluster

BPSLAUNCH = str(Path(sys.executable).with_name("bpslaunch"))
RUNS = {"BYTEPS_LINK_MBIT": "1000"}
SHORT = (sys.executable, RANK, "short")
CPU = ("-p", "cpu", "-N2", "--ntasks-per-node=1", BPSLAUNCH)

SCRIPTS = ROOT / "deploy" / "slurm"
WITH_BPSLAUNCH = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
STATUS = (str(Path(sys.executable).with_name("bps")), "status", "--json")

pytestmark = pytest.mark.slow  # test_launchers.py has the rules


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    require_slurm()
    with slurm_cluster(["c1", "c2", "g1", "g2"], tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("-p", "gpu", "-N2", "--ntasks-per-node=2", *SHORT), marks=pytest.mark.long),
        (*CPU, ":", "-p", "gpu", "-N2", "--ntasks-per-node=2", *SHORT),
        (*CPU, ":", "-p", "gpu", "-N2", "--ntasks-per-node=1", BPSLAUNCH, *SHORT),
    ],
    ids=["ranks", "servers and ranks", "servers and bpslaunch"],
)
def test_srun(slurm: SlurmCluster, arguments: tuple[str, ...]) -> None:
    done = slurm.run("srun", *arguments, **RUNS, BYTEPS_LOCAL_SIZE="2" if arguments.count(BPSLAUNCH) > 1 else "")
    assert done.returncode == 0, done.stdout
    for rank in range(4):
        assert f"{rank}: reduced" in done.stdout
    assert not slurm.left()


def test_the_users_secret_is_private_and_in_no_environment(slurm: SlurmCluster) -> None:
    train = (":", "-p", "gpu", "-N2", sys.executable, RANK, "train")
    with slurm.launch("srun", *CPU, *train, **RUNS) as step:
        step.until("0: training", "1: training")
        path = slurm.home / ".config" / "byteps" / "secret"
        assert path.stat().st_mode & 0o777 == 0o600
        pids = [pid for node in slurm.nodes for pid in slurm.pids(node)]
        assert {name for pid in pids for name in environ_of(pid)} >= {"SLURM_JOB_ID"}
        assert not {name for pid in pids for name, text in environ_of(pid).items() if "SECRET" in name and text}
        slurm.run("scancel", "--user=root")
        step.end()
    assert not slurm.left()


@pytest.mark.parametrize("kinds", [2, pytest.param(1, marks=pytest.mark.long)])
def test_the_script_for_both_kinds_of_nodes_and_for_one(slurm: SlurmCluster, kinds: int) -> None:
    text, output = (SCRIPTS / "train.sbatch").read_text(), slurm.folder / f"train{kinds}.out"
    if kinds == 1:  # as its first lines say
        first, _, _ = text.partition("#SBATCH --partition=cpu")
        text = first + text.partition("#SBATCH hetjob\n")[2]
    script = slurm.folder / "train.sbatch"
    script.write_text(text)
    options = ("--wait", "-o", str(output), str(script))
    done = slurm.run("sbatch", *options, *SHORT, **RUNS, **WITH_BPSLAUNCH, BYTEPS_LOCAL_SIZE="2")
    assert done.returncode == 0, output.read_text()
    for line in ("[0.0] 0: reduced", "[1.1] 3: reduced"):
        assert line in output.read_text()
    assert not slurm.left()


def test_nodes_are_lent_and_preempted_and_training_goes_on(slurm: SlurmCluster) -> None:
    train = ("-p", "gpu", "-N2", "--ntasks-per-node=1", BPSLAUNCH, sys.executable, RANK, "train")
    with slurm.launch("srun", *train, **RUNS, BYTEPS_LOG_LEVEL="INFO", BYTEPS_LOCAL_SIZE="1") as job:
        job.until("0: training", "1: training")
        number = slurm.run("squeue", "-h", "-o", "%i").stdout.strip()
        output = slurm.folder / "lend.out"
        slurm.run("sbatch", "-o", str(output), str(SCRIPTS / "lend.sbatch"), number, **WITH_BPSLAUNCH)
        job.until("has joined")
        slurm.run("sbatch", "-p", "first", "-N2", "-o", "none", "--exclusive", "--wrap", "true")
        job.until("leaves: the server got SIGTERM")
        status = json.loads(slurm.run("srun", f"--jobid={number}", "--overlap", "-N1", "-n1", *STATUS).stdout)
        assert status["state"] == "running"
        slurm.run("scancel", "--user=root")
        assert job.end() != 0
    assert f"lends to job {number}" in output.read_text()
    assert not slurm.left()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-p", "gpu", "-N1", "-n2", BPSLAUNCH, "true"), r"srun starts bpslaunch 2 times on g[12]"),
        (("-p", "gpu", "-N1", BPSLAUNCH), r"which program\? g[12] trains"),
        (("-p", "cpu", "-N1", *SHORT, ":", "-p", "gpu", "-N1", "true"), r"this process is on c[12], which lends"),
        (("-p", "cpu", "-N1", BPSLAUNCH, "--lend-to", "999"), "there is no job 999 to lend to"),
    ],
)
def test_what_can_not_be_meant_is_refused(slurm: SlurmCluster, arguments: tuple[str, ...], words: str) -> None:
    done = slurm.run("srun", *arguments)
    assert done.returncode != 0
    assert re.search(words, done.stdout), done.stdout
    assert not slurm.left()
