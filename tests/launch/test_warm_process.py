"""A rank that is forked from a process that has imported torch is as if Python had started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from byteps_py.launch.process_plan import ProcessKind, ProcessSpec
from byteps_py.launch.warm_process import PythonProgram, WarmProcess, WarmProcesses
from byteps_py.wire.launch_protocol import NoticePipe

SAYS = """
import os, sys
print(sys.argv, __name__, __file__, os.environ["WHO"], sys.path[0], "OLD" in os.environ, "torch" in sys.modules)
print(sys.modules["__main__"].__dict__ is globals(), input(), file=sys.stderr)
sys.exit(7)
"""


@contextlib.contextmanager
def warm_process(program: PythonProgram | None) -> Iterator[WarmProcess]:
    assert program is not None
    warm = WarmProcess(program, {**os.environ, "OLD": "1"}, lambda: None)
    try:
        assert warm.wait_until_ready(60)
        yield warm
    finally:
        warm.end()


def fork(warm: WarmProcess, **env: str) -> tuple[int, str, str]:
    """The exit status, the output and the errors of a program. Its input is "hello"."""
    pipes, notices = [os.pipe() for _ in range(3)], NoticePipe()
    os.write(pipes[0][1], b"hello\n")
    forked = warm.fork({**os.environ, **env}, {0: pipes[0][0], 1: pipes[1][1], 2: pipes[2][1]}, notices.writer)
    for fd in (*pipes[0], pipes[1][1], pipes[2][1], notices.writer):
        os.close(fd)
    texts = []
    for reader, _ in pipes[1:]:
        with open(reader) as file:
            texts.append(file.read())
    notices.close()
    assert forked is not None
    return forked.wait(60), *texts


@pytest.mark.slow
def test_a_script_and_a_module_find_what_python_would_give_them(tmp_path: Path) -> None:
    script = tmp_path / "says.py"
    script.write_text(SAYS)
    with warm_process(PythonProgram.of([sys.executable, str(script), "--lr", "1"])) as warm:
        for who in ("me", "you"):  # as often as wanted
            status, output, errors = fork(warm, WHO=who)
            assert (status, errors) == (7, "True hello\n")
            assert output == f"[{str(script)!r}, '--lr', '1'] __main__ {script} {who} {tmp_path} False True\n"
    with warm_process(PythonProgram.of([sys.executable, "-m", "platform"])) as warm:
        status, output, _ = fork(warm)
        assert (status, output.strip() != "") == (0, True)


TELLS = """
import ctypes, os, random, sys
import numpy
signal = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(signal))
print(os.getppid(), os.getsid(0) == os.getpid(), signal.value, len(os.listdir("/proc/self/task")))
import torch
print(random.random(), numpy.random.random(), torch.rand(1).item())
torch.manual_seed(1)
print(torch.randn(2000, 2000).square().sum().item(), torch.get_num_threads())
"""


@pytest.mark.slow
def test_a_rank_is_a_child_of_the_launcher_and_computes_as_others_do(tmp_path: Path) -> None:
    script = tmp_path / "tells.py"
    script.write_text(TELLS)
    command = [sys.executable, str(script)]
    alone = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    with warm_process(PythonProgram.of(command)) as warm:
        first, second = (fork(warm)[1].splitlines() for _ in range(2))
        assert set(command[1:]) <= set(Path(f"/proc/{warm.process.pid}/cmdline").read_text().split("\0"))
    assert first[0].split()[:3] == [str(os.getpid()), "True", "9"]
    assert len({line for found in (alone, first, second) for line in found[1].split()}) == 9, "no two draw the same"
    assert first[2] == second[2] == alone[2]


@pytest.mark.parametrize(
    "command", [["bash", "run.sh"], ["python"], ["python", "-X", "dev", "a.py"], ["python", "-c", "pass"], ["./a.py"]]
)
def test_other_commands_have_no_warm_process(command: list[str]) -> None:
    assert PythonProgram.of(command) is None
    spec = ProcessSpec("rank 0", ProcessKind.MAIN, "0", tuple(command), {}, is_rank=True, restarts=1)
    assert WarmProcesses([spec]).due_s is None


def test_a_warm_process_that_imports_or_has_ended_is_not_used() -> None:
    spec = ProcessSpec("rank 0", ProcessKind.MAIN, "0", (sys.executable, "a.py"), {}, is_rank=True, restarts=1)
    warm, notices = WarmProcesses([spec]), NoticePipe()
    assert warm.due_s is not None
    warm.start(lambda spec: dict(os.environ))
    (one,) = warm._there.values()
    os.kill(one.process.pid, signal.SIGSTOP)
    assert warm.take(spec, dict(os.environ), (), notices.writer) is None
    assert warm._there
    one.process.kill()
    one.process.wait()
    assert warm.take(spec, dict(os.environ), (), notices.writer) is None
    assert not warm._there
    assert warm.due_s is not None, "another one is started"
    os.close(notices.writer)
    notices.close()
    warm.close()
