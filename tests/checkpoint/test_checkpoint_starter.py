"""Which server has checkpoints written, when, and what ends the program that writes them."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from byteps_py.cli.__main__ import main
from byteps_py.config.settings import Settings
from byteps_py.proto import control_pb2 as pb
from byteps_py.server.checkpoint_starter import CheckpointStarter, chosen_server
from byteps_py.system.loop import EventLoop

CPU, GPU = pb.MACHINE_KIND_CPU, pb.MACHINE_KIND_GPU
SERVERS = [
    pb.Member(member_id=7, kind=CPU, address="tcp://cpu:1"),
    pb.Member(member_id=4, kind=CPU, address="tcp://cpu:2"),
    pb.Member(member_id=1, kind=GPU, address="tcp://gpu:1"),
]
OWN = "tcp://cpu:2"
WAITS = "import time; time.sleep(100)"


class Programs:
    """Starts ``code`` in place of `bps checkpoint`. After ``count`` of them it stops the loop."""

    def __init__(self, loop: EventLoop, code: str, count: int = 1) -> None:
        self._loop, self._code, self._count = loop, code, count
        self.commands: list[Sequence[str]] = []
        self.children: list[subprocess.Popen[Any]] = []

    def start(self, command: Sequence[str]) -> subprocess.Popen[Any]:
        self.commands.append(command)
        self.children.append(subprocess.Popen([sys.executable, "-c", self._code]))
        if len(self.commands) == self._count:
            self._loop.stop()
        return self.children[-1]


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop()
    yield made
    made.close()


def settings(**changes: Any) -> Settings:
    facts = {"scheduler_host": "127.0.0.1", "scheduler_port": 7, "shadow_dir": "/data", "shadow_every_s": 0.01}
    return Settings(**{**facts, **changes})


def test_the_first_cpu_machine_writes() -> None:
    found = chosen_server(SERVERS)
    assert found is not None
    assert found.address == OWN
    assert chosen_server(SERVERS[:1]) == SERVERS[0]
    assert chosen_server(SERVERS[2:]) is None
    assert chosen_server([]) is None


def test_the_program_is_started_again_and_again(loop: EventLoop) -> None:
    programs = Programs(loop, "", count=3)
    starter = CheckpointStarter(settings(), loop, programs.start)
    starter.begin(lambda: True)
    starter.membership(OWN, SERVERS)
    loop.run()
    starter.close()
    command = programs.commands[0]
    assert command[:6] == [sys.executable, "-P", "-m", "byteps_py.cli", "checkpoint", "/data"]
    assert "127.0.0.1:7" in command
    assert [child.returncode for child in programs.children[:2]] == [0, 0]
    assert programs.children[2].returncode in (0, -15)


@pytest.mark.parametrize("why", ["other", "no states", "running"])
def test_when_none_is_started(loop: EventLoop, why: str) -> None:
    programs = Programs(loop, WAITS, count=2)
    starter = CheckpointStarter(settings(), loop, programs.start)
    starter.begin(lambda: why != "no states")
    starter.membership("tcp://cpu:1" if why == "other" else OWN, SERVERS)
    loop.call_later(0.3, loop.stop)
    loop.run()
    assert len(programs.commands) == starter.is_running == (why == "running")
    starter.close()
    assert not starter.is_running
    assert [child.returncode for child in programs.children] == [-15] * len(programs.children)


def test_a_program_that_fails_is_reported(loop: EventLoop, caplog: pytest.LogCaptureFixture) -> None:
    programs = Programs(loop, "raise SystemExit(3)", count=2)
    starter = CheckpointStarter(settings(), loop, programs.start)
    starter.begin(lambda: True)
    starter.membership(OWN, SERVERS)
    loop.run()
    starter.close()
    assert "no checkpoint was written to /data: bps checkpoint ended with exit status 3" in caplog.text


def test_a_program_that_hangs_is_ended(loop: EventLoop, caplog: pytest.LogCaptureFixture) -> None:
    programs = Programs(loop, WAITS, count=2)
    starter = CheckpointStarter(settings(), loop, programs.start, longest_s=0.1)
    starter.begin(lambda: True)
    starter.membership(OWN, SERVERS)
    loop.run()
    starter.close()
    assert programs.children[0].returncode == -9
    assert "a checkpoint was not written to /data within 0.1 s" in caplog.text
    assert "ended with SIGKILL" in caplog.text
    # At the lowest priority it may get no processor at all on a busy machine.
    assert ["--normal-priority" in command for command in programs.commands[:2]] == [False, True]
    assert "the next one is written with the normal priority" in caplog.text


def test_a_job_without_cpu_machines_is_told(loop: EventLoop, caplog: pytest.LogCaptureFixture) -> None:
    starter = CheckpointStarter(settings(), loop)
    for _ in range(2):
        starter.membership("tcp://gpu:1", SERVERS[2:])
    assert caplog.text.count("has no CPU machine") == 1


#: Stands for a server that has started the program, and says its child's process id.
PARENT = """
import os, subprocess, sys, time
command = [sys.executable, "-m", "byteps_py.cli", "checkpoint", *sys.argv[1:], "--with-parent", str(os.getpid())]
print(subprocess.Popen(command, stdout=subprocess.DEVNULL).pid, flush=True)
time.sleep(100)
"""


@pytest.mark.slow
def test_the_program_ends_with_its_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the scheduler's port: nobody answers there
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-c", PARENT, str(tmp_path), "--scheduler", address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            child = os.pidfd_open(pid)
            connection, _ = silent.accept()  # it is at work
            os.kill(pid, signal.SIGSTOP)  # it will not end by itself
            parent.kill()
        with connection:
            has_ended = bool(select.select([child], [], [], 10.0)[0])
        signal.pidfd_send_signal(child, signal.SIGKILL)
        os.close(child)
        assert has_ended


NO_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, NoTorch())
"""
STARTER = """
from test_checkpoint_starter import *
def start(command):
    raise SystemExit("started")
import logging
loop = EventLoop()
logging.basicConfig()
starter = CheckpointStarter(settings(), loop, start)
starter.begin(lambda: True)
starter.membership(OWN, SERVERS)
loop.call_later(0.1, loop.stop)
loop.run()
"""


def test_without_torch_the_server_says_so_and_goes_on() -> None:
    here = f"import sys; sys.path[:0] = {[str(Path(__file__).parents[0]), str(Path(__file__).parents[1])]!r}"
    done = subprocess.run([sys.executable, "-c", here + NO_TORCH + STARTER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pip install '.[torch]'" in done.stderr
    assert done.stderr.count("BYTEPS_SHADOW_DIR") == 1


def test_without_torch_the_command_says_what_to_install() -> None:
    code = "from byteps_py.cli.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", NO_TORCH + code, "checkpoint", "/nowhere", "--scheduler", "127.0.0.1:7"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("bps: bps checkpoint needs PyTorch")
    assert "pip install '.[torch]'" in done.stderr


@pytest.mark.parametrize(("arguments", "said"), [(["--keep", "0"], "--keep=0"), (["--every", "0"], "--every=0")])
def test_numbers_that_mean_nothing(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "/nowhere", *arguments]) == 2
    assert said in capsys.readouterr().err
