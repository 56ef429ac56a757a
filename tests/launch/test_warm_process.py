"""A process that has imported torch becomes the program as if Python had started it."""

from __future__ import annotations

import os
import sys
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


def become(program: PythonProgram, **env: str) -> tuple[int, str, str]:
    """The exit status, the output and the errors of the program. Its input is "hello"."""
    warm = WarmProcess(program, {**os.environ, "OLD": "1"}, lambda: None)
    pipes, notices = [os.pipe() for _ in range(3)], NoticePipe()
    os.write(pipes[0][1], b"hello\n")
    assert warm.become({**os.environ, **env}, {0: pipes[0][0], 1: pipes[1][1], 2: pipes[2][1]}, notices.writer)
    for fd in (*pipes[0], pipes[1][1], pipes[2][1], notices.writer):
        os.close(fd)
    texts = []
    for reader, _ in pipes[1:]:
        with open(reader) as file:
            texts.append(file.read())
    notices.close()
    return warm.process.wait(60), *texts


@pytest.mark.slow
def test_a_script_and_a_module_find_what_python_would_give_them(tmp_path: Path) -> None:
    script = tmp_path / "says.py"
    script.write_text(SAYS)
    program = PythonProgram.of([sys.executable, str(script), "--lr", "1"])
    assert program is not None
    status, output, errors = become(program, WHO="me")
    assert (status, errors) == (7, "True hello\n")
    assert output == f"[{str(script)!r}, '--lr', '1'] __main__ {script} me {tmp_path} False True\n"
    module = PythonProgram.of([sys.executable, "-m", "platform"])
    assert module is not None
    status, output, _ = become(module)
    assert (status, output.strip() != "") == (0, True)


@pytest.mark.parametrize(
    "command", [["bash", "run.sh"], ["python"], ["python", "-X", "dev", "a.py"], ["python", "-c", "pass"], ["./a.py"]]
)
def test_other_commands_have_no_warm_process(command: list[str]) -> None:
    assert PythonProgram.of(command) is None
    spec = ProcessSpec("rank 0", ProcessKind.MAIN, "0", tuple(command), {}, is_rank=True, restarts=1)
    assert WarmProcesses([spec]).due_s is None


def test_a_warm_process_that_has_ended_is_not_used() -> None:
    spec = ProcessSpec("rank 0", ProcessKind.MAIN, "0", (sys.executable, "a.py"), {}, is_rank=True, restarts=1)
    warm = WarmProcesses([spec])
    assert warm.due_s is not None
    warm.start(lambda spec: dict(os.environ))
    (one,) = warm._there.values()
    one.process.kill()
    one.process.wait()
    notices = NoticePipe()
    assert warm.take(spec, dict(os.environ), (), notices.writer) is None
    assert warm.due_s is not None
    os.close(notices.writer)
    notices.close()
    warm.close()
