"""A real SLURM, each node of it a network namespace: srun, sbatch and bpslaunch, without anything exported. Every rank
runs tests/programs/rank.py, which checks its sums."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.breaking import RANK, command, environ_of
from support.clusters import ROOT
from support.documents import Page, at_own_places, commands_of
from support.pods import wait_for
from support.shadowed_cluster import LAUNCH
from support.slurm_cluster import SlurmCluster, require_slurm, slurm_cluster

BPSLAUNCH = str(Path(sys.executable).with_name("bpslaunch"))
RUNS = {"BYTEPS_LINK_MBIT": "1000"}
SHORT = (sys.executable, RANK, "short")
CPU = ("-p", "cpu", "-N2", "--ntasks-per-node=1", BPSLAUNCH)

SCRIPTS = ROOT / "deploy" / "slurm"
PAGE = Page(ROOT / "docs" / "howto" / "slurm.md")
OURS = {" --gpus-per-node=8": "", "python train.py": shlex.join(SHORT)}
WITH_BPSLAUNCH = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
STATUS = (str(Path(sys.executable).with_name("bps")), "status", "--json")

pytestmark = pytest.mark.slow  # test_launchers.py has the rules


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    require_slurm()
    with slurm_cluster(["c1", "c2", "g1", "g2"], tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.mark.parametrize(
    ("block", "places"),
    [
        pytest.param(
            "tasks are ranks",
            {"-N 4": "-p gpu -N 2", "--ntasks-per-node=8": "--ntasks-per-node=2", **OURS},
            marks=pytest.mark.long,
        ),
        pytest.param("a launcher on each node", {"-N 4": "-p gpu -N 2", **OURS}, marks=pytest.mark.long),
        ("two kinds of nodes", {"-N 4": "-N 2", "--ntasks-per-node=8": "--ntasks-per-node=2", **OURS}),
    ],
)
def test_srun(slurm: SlurmCluster, block: str, places: dict[str, str]) -> None:
    """The commands of the page, on fewer and smaller nodes, which have no GPUs."""
    [(line, _)] = commands_of(PAGE.blocks_after(block)[0])
    words = shlex.split(at_own_places(line, places))
    size = {"BYTEPS_LOCAL_SIZE": "2"} if "launcher" in block else {}
    done = slurm.run(*words, **RUNS, **WITH_BPSLAUNCH, **size)
    check_srun(slurm, done)


@pytest.mark.slow
def test_srun_of_a_launcher_on_each_node_of_both_kinds(slurm: SlurmCluster) -> None:
    train = (":", "-p", "gpu", "-N2", "--ntasks-per-node=1", BPSLAUNCH, *SHORT)
    check_srun(slurm, slurm.run("srun", *CPU, *train, **RUNS, BYTEPS_LOCAL_SIZE="2"))


def check_srun(slurm: SlurmCluster, done: subprocess.CompletedProcess[str]) -> None:
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
    [(line, _)] = commands_of(PAGE.blocks_after("batch script")[0])
    places = {"deploy/slurm/train.sbatch": f"--wait -o {output} {script}", "python train.py": shlex.join(SHORT)}
    words = shlex.split(at_own_places(line, places))
    done = slurm.run(*words, **RUNS, **WITH_BPSLAUNCH, BYTEPS_LOCAL_SIZE="2")
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


RUN_STATE = f"{sys.executable} {ROOT / 'tests' / 'programs' / 'run_state.py'} shuffled 2"
#: The first time, it waits in body 12.
WAITS_ONCE = f'[ "$SLURM_RESTART_COUNT" ] || set -- body 1 3; exec {RUN_STATE} "$@"'


@pytest.mark.long
def test_a_job_that_is_queued_again_goes_on_from_its_checkpoint(slurm: SlurmCluster) -> None:
    """It ends as one that was not."""
    output, checkpoints = slurm.folder / "requeued.out", slurm.folder / "checkpoints"
    given = {"CHECKPOINTS": str(checkpoints), "BYTEPS_SHADOW_DIR": str(checkpoints), "BYTEPS_SHADOW_EVERY_S": "1"}
    words = ("-o", str(output), "--open-mode=append", str(SCRIPTS / "train.sbatch"), "sh", "-c", WAITS_ONCE, "-")
    number = slurm.run("sbatch", *words, **RUNS, **WITH_BPSLAUNCH, **given, BYTEPS_LOCAL_SIZE="1").stdout.split()[-1]
    with slurm.launch("tail", "-F", "-n", "+1", str(output)) as first:
        first.until("rank 0 waits", "rank 1 waits")
    wait_for(lambda: list(checkpoints.glob("step-*/manifest-*")))
    begun = output.read_text()
    slurm.run("scontrol", "requeue", number)
    wait_for(lambda: set(slurm.run("squeue", "-h", "-o", "%T").stdout.split()) == {"PENDING"})
    slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now")  # it would wait for a minute
    with command(*LAUNCH, "-np", "1", "--machines", "2", "--servers", "1", *RUN_STATE.split()) as undisturbed:
        assert undisturbed.end() == 0, undisturbed.text
    with slurm.launch("tail", "-F", "-n", "+1", str(output)) as second:
        second.until("rank 0 of 2 body 18", "rank 1 of 2 body 18")
    assert not slurm.left()
    went_on = bodies(output.read_text().removeprefix(begun))
    assert min(went_on.values()) > 1
    assert bodies(begun) | went_on == bodies(undisturbed.text)


def bodies(text: str) -> dict[str, int]:
    """The number of the body by the line that a rank of run_state.py prints after it."""
    return {found[0]: int(found[1]) for found in re.finditer(r"rank \d of 2 body (\d+): .*", text)}


SUBMITS = """
def train():
    import torch
    import byteps_py as bps

    bps.init()
    total = bps.allreduce(torch.full((1 << 18,), bps.rank() + 1.0), op=bps.Sum, name="total")
    found = bps.rank(), bps.size(), bps.local_size(), total.unique().tolist()
    bps.shutdown()
    return found

"""


def test_submitit_starts_ranks(slurm: SlurmCluster) -> None:
    if importlib.util.find_spec("submitit") is None:
        pytest.skip("no submitit here: pip install submitit")
    program = slurm.folder / "submits.py"
    (block,) = PAGE.blocks_after("submitit")
    places = {
        '"logs"': repr(str(slurm.folder / "logs")),
        "nodes=4": "nodes=2",
        "tasks_per_node=8": "tasks_per_node=1",
        " gpus_per_node=8,": "",
    }
    program.write_text(f"{SUBMITS}\n{at_own_places(block, places)}\nprint(job.results())\n")
    done = slurm.run(sys.executable, str(program), **RUNS)
    assert done.returncode == 0, done.stdout
    assert "[(0, 2, 1, [3.0]), (1, 2, 1, [3.0])]" in done.stdout
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
