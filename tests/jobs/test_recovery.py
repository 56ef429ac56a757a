"""Summation servers die, freeze, go and come while a model trains, with real processes: the weights are bit for bit
those of a run without faults, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos.run import ENVIRON, PROGRAM, STEPS, calm
from support.breaking import Job, launch
from support.clusters import clean_environment

from byteps_py.launch.process_plan import free_port

OPTIONS = "-np 1 --machines 2 --servers 1"
STRETCHES = 6
DIGEST = re.compile(r"digest (\w{64})")
Fault = Callable[[Job], None]


def servers(job: Job, *words: str) -> list[int]:
    """Of a job's summation services, those that were started with ``words``."""
    found = []
    for pid in job.pids():
        with contextlib.suppress(OSError):
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
            if "byteps_py.server" in arguments and ("--gpu-machine" in arguments) == ("--gpu-machine" in words):
                found.append(pid)
    return sorted(found)


def train(job: Job, faults: list[Fault]) -> set[str]:
    """Let each fault happen in a stretch of its own, in the middle of its steps. The digests of all ranks."""
    assert job.process.stdin is not None
    for number, fault in enumerate(faults):
        if f"stretch {number}" not in job.said:
            job.until(f"stretch {number}")
        job.process.stdin.write("go on\n")
        job.process.stdin.flush()
        fault(job)
    status = job.end()
    assert status == 0, job.text
    return set(DIGEST.findall(job.text))


def run(options: str, faults: list[Fault], **environ: str) -> set[str]:
    words = (str(len(faults)), str(STEPS))
    with launch(options, *words, program=PROGRAM, **ENVIRON, **environ) as job:
        digests = train(job, faults)
    assert len(digests) == 1, job.text
    return digests


def nothing(job: Job) -> None: ...


def signal_to(signum: signal.Signals, *words: str) -> Fault:
    """Send it to the first such service."""

    def fault(job: Job) -> None:
        os.kill(servers(job, *words)[0], signum)

    return fault


def freeze_and_wake(job: Job) -> None:
    """It is given up, and finds that out when it wakes: then its launcher starts it again."""
    victim = servers(job, "--gpu-machine")[-1]
    os.kill(victim, signal.SIGSTOP)
    job.until("nothing was heard of it for")
    os.kill(victim, signal.SIGCONT)
    job.until("exited with status 75; starting it again")
    job.until("has joined")


def kill_and_return(*words: str) -> Fault:
    def fault(job: Job) -> None:
        signal_to(signal.SIGKILL, *words)(job)
        job.until("was killed by SIGKILL (signal 9); starting it again")
        job.until("has joined")

    return fault


def kill_all(job: Job) -> None:
    """Whichever is started again first takes over from all of them."""
    for victim in [*servers(job), *servers(job, "--gpu-machine")]:
        os.kill(victim, signal.SIGKILL)
    job.until("has joined")


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "faults",
    [
        # With a stretch after it, for which the ranks wait until the server is back.
        pytest.param([nothing, kill_and_return("--gpu-machine"), freeze_and_wake, nothing], id="die and freeze"),
        pytest.param(
            [
                nothing,
                kill_and_return(),
                kill_all,
                signal_to(signal.SIGTERM, "--gpu-machine"),  # drained: its keys move first, as soon as there is another
            ],
            id="die, all at once, and leave",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_servers_die_freeze_and_leave_and_the_weights_are_the_same(faults: list[Fault]) -> None:
    assert run(OPTIONS, faults) == calm(len(faults), OPTIONS).digests


@pytest.mark.timeout(200)
@pytest.mark.slow
def test_servers_die_while_a_hosted_optimizer_trains() -> None:
    """The weights are those of the optimizer on the ranks, without faults."""
    faults = [nothing, kill_and_return(), kill_and_return("--gpu-machine")]
    assert run(OPTIONS, faults, TEST_HOSTED="1") == calm(len(faults), OPTIONS).digests


@pytest.mark.timeout(200)
def test_a_service_that_hosts_dies() -> None:
    """All ranks end, and say which one it was."""
    with launch(OPTIONS, "2", str(STEPS), program=PROGRAM, **ENVIRON, TEST_HOSTED="1") as job:
        assert job.process.stdin is not None
        job.until("stretch 0")
        job.process.stdin.write("go on\n")
        job.process.stdin.flush()
        job.until("stretch 1")
        job.process.stdin.write("go on\n")
        job.process.stdin.flush()
        victims = [pid for pid in job.pids() if b"byteps_py.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(victims[-1], signal.SIGKILL)
        assert job.end() != 0
    assert "digest" not in job.text, job.text
    assert "communication service" in job.text, job.text


@contextlib.contextmanager
def late_server(**environ: str) -> Iterator[Job]:
    """What a user starts on a spare machine while the job runs."""
    with launch("", DMLC_ROLE="server", BYTEPS_MACHINE_ID="spare", **environ) as job:
        yield job


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_cpu_machines_come_and_go_by_bps_scale() -> None:
    """From the job's own start without any: the scheduler is found at its address."""
    port = str(free_port())
    address = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": port, "DMLC_NUM_SERVER": "0"}
    address |= {"DMLC_NUM_WORKER": "2", "BYTEPS_JOB_ID": f"recovery-{port}"}

    def scale(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "byteps_py.cli", "scale", *words]
        return subprocess.run(command, env=clean_environment(**address), capture_output=True, text=True, timeout=60)

    with contextlib.ExitStack() as stack:
        spare: list[Job] = []

        def come(job: Job) -> None:
            spare.append(stack.enter_context(late_server(**ENVIRON, **address)))
            job.until("has joined")

        def go(job: Job) -> None:
            more = scale("3")
            assert (more.returncode, "To have 2 more" in more.stdout) == (1, True), more.stderr
            fewer = scale("0")
            assert (fewer.returncode, fewer.stdout) == (0, "0 CPU machines lend a summation service\n"), fewer.stderr
            assert spare[0].end() == 0

        scheduler = stack.enter_context(launch("", DMLC_ROLE="scheduler", **address))
        machines = []
        words = (str(STRETCHES), str(STEPS))
        for index in (1, 0):
            own = {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(index), "BYTEPS_MACHINE_ID": f"m{index}"}
            machines.append(stack.enter_context(launch("", *words, program=PROGRAM, **ENVIRON, **address, **own)))
        other, first = machines
        digests = train(first, [nothing, come, go, nothing, nothing, nothing])
        assert other.end() == 0, other.text
        digests |= set(DIGEST.findall(other.text))
        assert scheduler.end() == 0
    assert digests == calm(STRETCHES, OPTIONS).digests
