"""A Python process that has imported torch, and waits to become a rank: one that is started again is there at once.

    launcher: WarmProcess ── socket ──► main(): imports, waits
              become() ── program, environment, descriptors ──► runs the program as ``python`` would

Importing torch and this package takes seconds, which all other ranks would wait for.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from byteps_py.launch.process_guard import die_with
from byteps_py.launch.process_plan import ProcessSpec
from byteps_py.wire.launch_protocol import NOTICE_VARIABLE

#: They begin when the ranks have begun, or have begun again: these need the processors.
_WARM_AFTER_S = 5.0

#: Programs begin with these. An import that fails here fails again in the program, if that needs it.
_IMPORTS = ("torch", "torch.distributed", "byteps_py.torch", "byteps_py.session.service.starting", "numba")
_MAIN = "import sys; sys.path.pop(0); from byteps_py.launch import warm_process; warm_process.main(int(sys.argv.pop()))"
_MOST_BYTES = 1 << 20
_MOST_DESCRIPTORS = 4
_MOST_FAILURES = 10


@dataclass(frozen=True, slots=True)
class PythonProgram:
    """A command line of a Python script, or of a module (``-m``), perhaps with ``-u``."""

    interpreter: str
    is_module: bool
    what: str
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, command: Sequence[str]) -> PythonProgram | None:
        """None for another command, or for one with flags that change how Python begins.

        >>> PythonProgram.of(["python", "-u", "train.py", "--lr", "1"]).arguments
        ('--lr', '1')
        >>> PythonProgram.of(["python", "-X", "dev", "train.py"]) is PythonProgram.of(["bash", "run.sh"]) is None
        True
        """
        interpreter, *rest = command
        if not os.path.basename(interpreter).startswith("python"):
            return None
        if rest[:1] == ["-u"]:
            rest = rest[1:]
        if rest[:1] == ["-m"] and len(rest) > 1:
            return cls(interpreter, True, rest[1], tuple(rest[2:]))
        if rest and rest[0].endswith(".py"):
            return cls(interpreter, False, rest[0], tuple(rest[1:]))
        return None


class WarmProcess:
    """The launcher's end. ``start_child`` is called in the new process before Python begins."""

    def __init__(self, program: PythonProgram, env: Mapping[str, str], start_child: Callable[[], None]) -> None:
        self._program = program
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.process = subprocess.Popen(
                [program.interpreter, "-c", _MAIN, str(theirs.fileno())],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
                preexec_fn=start_child,
            )
        except OSError:
            self._link.close()
            raise
        finally:
            theirs.close()

    def become(self, env: Mapping[str, str], standard: Mapping[int, int], notices: int) -> bool:
        """Let it run the program with ``env``, the descriptor of its notices and those that take the place of its
        standard input, output and error, by their numbers there. False if it has ended."""
        name = f"{os.fstat(notices).st_ino}"
        program = self._program
        said = [program.is_module, program.what, program.arguments, {**env, NOTICE_VARIABLE: name}, list(standard)]
        data = json.dumps(said).encode(errors="surrogateescape")
        try:
            socket.send_fds(self._link, [len(data).to_bytes(8, "little")], [*standard.values(), notices])
            self._link.sendall(data)
        except OSError:
            return False
        finally:
            self._link.close()
        return True

    def end(self) -> None:
        """It is not needed any more."""
        self._link.close()
        self.process.kill()
        self.process.wait()


class WarmProcesses:
    """One of each machine of a launcher: of ranks whose program is one of Python, and that are started again.

    ``due_s``: when to call ``start``; None: nothing is to be started.
    """

    def __init__(self, specs: Sequence[ProcessSpec]) -> None:
        self._of_machine = {_machine(spec): spec for spec in reversed(specs) if spec.is_rank and spec.restarts}
        self._program = next((PythonProgram.of(spec.argv) for spec in self._of_machine.values()), None)
        self._there: dict[str, WarmProcess] = {}
        self._failures = 0
        self.due_s = None if self._program is None else time.monotonic() + _WARM_AFTER_S

    def start(self, environment_of: Callable[[ProcessSpec], Mapping[str, str]]) -> None:
        """Start those that are missing. A machine on which they end by themselves gets no more after a while."""
        self.due_s = None
        for machine, spec in self._of_machine.items():
            if machine not in self._there and self._program is not None and self._failures < _MOST_FAILURES:
                try:
                    self._there[machine] = WarmProcess(self._program, environment_of(spec), die_with(os.getpid()))
                except OSError:
                    self._failures += 1

    def take(
        self, spec: ProcessSpec, env: Mapping[str, str], outputs: Sequence[int], notices: int
    ) -> subprocess.Popen[bytes] | None:
        """The process, which has become the rank of ``spec``; None if there is none."""
        if not spec.is_rank:
            return None
        self.due_s = None if self._program is None else time.monotonic() + _WARM_AFTER_S
        warm = self._there.pop(_machine(spec), None)
        if warm is None:
            return None
        standard = {**({0: 0} if spec.reads_stdin else {}), **dict(zip((1, 2), outputs, strict=False))}
        if warm.process.poll() is None and warm.become(env, standard, notices):
            return warm.process
        self._failures += 1
        warm.end()
        return None

    def close(self) -> None:
        """End those that are there."""
        for warm in self._there.values():
            warm.end()
        self._there.clear()


def _machine(spec: ProcessSpec) -> str:
    return spec.env.get("BYTEPS_MACHINE_ID", "")


def main(descriptor: int) -> None:
    """The program of the process: import, wait, become the rank."""
    for name in _IMPORTS:
        try:
            importlib.import_module(name)
        except ImportError:  # the rank's program may not need it, or raises the same
            continue
    with socket.socket(fileno=descriptor) as link:
        head, fds, _, _ = socket.recv_fds(link, 8, _MOST_DESCRIPTORS)
        if len(head) < 8:
            os._exit(0)  # the launcher has no use for it any more
        data = link.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)
    is_module, what, arguments, env, targets = json.loads(data.decode(errors="surrogateescape"))
    for target, fd in zip(targets, fds, strict=False):
        os.dup2(fd, target)
        os.close(fd)
    notices = fds[-1]
    os.environ.clear()
    os.environ.update(env)
    os.environ[NOTICE_VARIABLE] = f"{notices}:{env[NOTICE_VARIABLE]}"
    os.set_inheritable(notices, True)  # as of a process that was started with it
    _run(is_module, what, arguments)


def _run(is_module: bool, what: str, arguments: Sequence[str]) -> None:
    """Run the program in the ``__main__`` of this process."""
    sys.argv = [what, *arguments]
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, os.path.dirname(os.path.abspath(what)))
    with open(what, "rb") as file:
        code = compile(file.read(), what, "exec")
    program = types.ModuleType("__main__")
    program.__dict__.update(__file__=what, __builtins__=__builtins__)
    sys.modules["__main__"] = program
    exec(code, program.__dict__)
