"""The examples of torch.distributed, under torchrun; the first one also under bpslaunch, both on two machines, too."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from pathlib import Path

import pytest
from support.breaking import Job, command, launch
from support.clusters import ROOT, bpslaunch
from support.documents import Page, at_own_places, commands_of

from byteps_py.launch.process_plan import free_port

QUIET = {"PYTHONWARNINGS": "ignore"}


def torchrun(*arguments: str, **environ: str) -> contextlib.AbstractContextManager[Job]:
    return command(sys.executable, "-m", "torch.distributed.run", *arguments, **QUIET, **environ)


def assert_learned(text: str, ranks: int) -> None:
    found = re.findall(rf"^step \d+: mean loss ([\d.]+) on {ranks} ranks", text, re.MULTILINE)
    assert len(found) == 2, text
    first, last = map(float, found)
    assert last < first / 2, text


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.slow) for each in ("torch_fsdp2", "torch_ddp", "torch_tp", "torch_pp")],
)
def test_on_one_machine(name: str, tmp_path: Path) -> None:
    arguments = ["--checkpoint", str(tmp_path / "saved")] if name == "torch_fsdp2" else []
    with torchrun("--nproc-per-node=2", str(ROOT / "examples" / f"{name}.py"), *arguments) as job:
        assert job.end() == 0, job.text
    assert_learned(job.text, 2)
    assert not arguments or (tmp_path / "saved" / ".metadata").exists()


@pytest.mark.parametrize("options", [pytest.param("-np 2", marks=pytest.mark.slow), "-np 1 --machines 2"])
def test_under_bpslaunch(options: str) -> None:
    run = bpslaunch(options.split(), [ROOT / "examples" / "torch_ddp.py"], **QUIET)
    assert run.returncode == 0, run.stderr
    assert_learned(run.stdout, 2)


def test_under_bpslaunch_by_role() -> None:
    """Machines can't ask each other where the first rank listens: beside the scheduler."""
    where = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port()), "DMLC_NUM_WORKER": "2"}
    where |= {"DMLC_NUM_SERVER": "0", "BYTEPS_LOCAL_SIZE": "1", "OMP_NUM_THREADS": "1", **QUIET}
    program = [sys.executable, str(ROOT / "examples" / "torch_ddp.py")]
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(launch("", DMLC_ROLE="scheduler", **where))]
        for index in "01":
            machine = {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": index, "BYTEPS_MACHINE_ID": f"m{index}"}
            argv = [sys.executable, "-m", "byteps_py.launch", *program]
            jobs.append(stack.enter_context(command(*argv, **machine, **where)))
        assert [job.end() for job in jobs] == [0, 0, 0], "\n".join(job.text for job in jobs)
    assert_learned(jobs[1].text, 2)


@pytest.mark.slow  # in `make test` with a smaller program: test_launchers_process.py
def test_on_two_machines_with_a_cpu_machine() -> None:
    port = free_port()
    number = {"DMLC_NUM_SERVER": "1"}
    page = Page(ROOT / "docs" / "howto" / "torch-distributed.md")
    [(line, _)] = commands_of(page.blocks_after("a server beside torchrun")[0])
    places = {"<MASTER_ADDR>": "127.0.0.1", "<MASTER_PORT + 1>": str(port + 1)}
    *variables, launcher = shlex.split(at_own_places(line, places))
    assert launcher == "bpslaunch"
    by_hand = dict(each.split("=") for each in variables)
    where = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    program = str(ROOT / "examples" / "torch_ddp.py")
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(launch("", **by_hand))]
        agents = (torchrun(*where, f"--node-rank={index}", program, **number) for index in ("0", "1"))
        jobs += map(stack.enter_context, agents)
        assert [job.end() for job in jobs] == [0, 0, 0], "\n".join(job.text for job in jobs)
    assert_learned(jobs[1].text, 2)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, "--schedule chimera --micro-batches 2 --check"),
        pytest.param(2, "--schedule interleaved --chunks 2 --micro-batches 4 --check", marks=pytest.mark.long),
        pytest.param(2, "--schedule pipedream --micro-batches 4", marks=pytest.mark.slow),
        pytest.param(1, "--schedule gpipe --micro-batches 4 --check", marks=pytest.mark.long),
    ],
)
def test_a_pipeline_has_the_losses_of_one_process(ranks: int, options: str) -> None:
    small = ["--steps", "3", "--batch-size", "4", "--context", "16", "--width", "16", "--layers", "3"]
    program = [ROOT / "examples" / "gpt_pipeline.py", *options.split(), *small]
    run = bpslaunch(["-np", str(ranks)], program, OMP_NUM_THREADS="1", **QUIET)
    assert run.returncode == 0, run.stderr
    steps = re.findall(r"step +(\d+)  loss [\d.]+  ", run.stdout)
    assert steps == ["1", "2", "3"], run.stdout
    assert run.stdout.count("held-out loss") == 1
    assert run.stdout.count("the losses of 3 steps and those of one process: equal to 0.0001") == ("--check" in options)
