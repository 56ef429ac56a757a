"""A Python process that has imported torch. Ranks that are started again are forked from it, and so are there at once.

    launcher: WarmProcess ── socket ──► main(): imports, says READY, waits
              fork() ── program, environment, descriptors ──► forks; the child runs the program as ``python`` would
                     ◄── the child's process id ──

Importing torch and this package takes seconds of processor time, which all other ranks would wait for; if all ranks are
started again, so many times. The warm process itself never runs anything of the program: it stays as it was after the
imports, with one thread of Python.

A forked rank is to be a child of the launcher, as any other one: the warm process forks a process that forks the rank
and ends, and the system gives an orphan to its nearest ancestor that takes orphans (PR_SET_CHILD_SUBREAPER), which the
launcher is for that moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from byteps_py.launch.process_guard import die_with
from byteps_py.launch.process_plan import ProcessSpec
from byteps_py.wire.launch_protocol import NOTICE_VARIABLE

#: They begin when the ranks have begun: these need the processors.
_WARM_AFTER_S = 5.0
#: For the answer of a process that waits.
_FORK_LIMIT_S = 10.0

#: Programs begin with these. An import that fails here fails again in the program, if that needs it.
_IMPORTS = ("torch", "torch.distributed", "byteps_py.torch", "byteps_py.session.service.starting", "numba")
#: The program's own words follow, for those who look for a rank by its command line.
_MAIN = "import sys; sys.path.pop(0); from byteps_py.launch import warm_process; warm_process.main(int(sys.argv[1]))"
_READY = b"r"
_MOST_DESCRIPTORS = 4
_MOST_FAILURES = 10
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


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


class ForkedProcess:
    """A rank that was forked from a warm process, with what the launcher needs of ``subprocess.Popen``."""

    stdin = None

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, as ``subprocess`` gives it. Raises subprocess.TimeoutExpired."""
        if timeout is not None:
            pidfd = os.pidfd_open(self.pid)
            try:
                if not select.select([pidfd], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout)
            finally:
                os.close(pidfd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def send_signal(self, signum: int) -> None:
        """Until it is waited for, its number is its own."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)


class WarmProcess:
    """The launcher's end. ``start_child`` is called in the new process before Python begins."""

    def __init__(self, program: PythonProgram, env: Mapping[str, str], start_child: Callable[[], None]) -> None:
        self._program = program
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._link.settimeout(_FORK_LIMIT_S)
        self._is_ready = False
        try:
            self.process = subprocess.Popen(
                [program.interpreter, "-c", _MAIN, str(theirs.fileno()), program.what, *program.arguments],
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

    def wait_until_ready(self, timeout_s: float) -> bool:
        """True once it has imported everything; False if it has not within this time, or has ended."""
        if not self._is_ready:
            self._link.settimeout(timeout_s)
            with contextlib.suppress(OSError):  # a TimeoutError is one
                self._is_ready = self._link.recv(len(_READY)) == _READY
            self._link.settimeout(_FORK_LIMIT_S)
        return self._is_ready

    def fork(self, env: Mapping[str, str], standard: Mapping[int, int], notices: int) -> ForkedProcess | None:
        """A child of this process that runs the program with ``env``, the descriptor of its notices and those that take
        the place of its standard input, output and error, by their numbers there. None if there is no answer."""
        name = f"{os.fstat(notices).st_ino}"
        program = self._program
        said = [os.getpid(), program.is_module, program.what, program.arguments]
        said += [{**env, NOTICE_VARIABLE: name}, list(standard)]
        data = json.dumps(said).encode(errors="surrogateescape")
        with _taking_orphans():
            try:
                socket.send_fds(self._link, [len(data).to_bytes(8, "little")], [*standard.values(), notices])
                self._link.sendall(data)
                answer = self._link.recv(8, socket.MSG_WAITALL)
            except OSError:
                return None
        return ForkedProcess(int.from_bytes(answer, "little")) if len(answer) == 8 else None

    def end(self) -> None:
        """It is not needed any more. Its children go on."""
        self._link.close()
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def _taking_orphans() -> Iterator[None]:
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


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
    ) -> ForkedProcess | None:
        """A new process that is the rank of ``spec``; None if there is no warm one that is ready."""
        warm = self._there.get(_machine(spec))
        if not spec.is_rank or warm is None:
            return None
        standard = {**({0: 0} if spec.reads_stdin else {}), **dict(zip((1, 2), outputs, strict=False))}
        has_ended = warm.process.poll() is not None
        if not has_ended and not warm.wait_until_ready(0.0):
            return None  # it still imports
        forked = None if has_ended else warm.fork(env, standard, notices)
        if forked is None:
            self._failures += 1
            self._there.pop(_machine(spec)).end()
            self.due_s = time.monotonic() + _WARM_AFTER_S
        return forked

    def close(self) -> None:
        """End those that are there."""
        for warm in self._there.values():
            warm.end()
        self._there.clear()


def _machine(spec: ProcessSpec) -> str:
    return spec.env.get("BYTEPS_MACHINE_ID", "")


# ---- in the warm process -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RankToFork:
    """What a rank is to be. ``fds``: take the places of ``targets``; the last one is that of its notices."""

    launcher: int
    is_module: bool
    what: str
    arguments: Sequence[str]
    env: Mapping[str, str]
    targets: Sequence[int]
    fds: Sequence[int]


def main(descriptor: int) -> None:
    """The program of the process: import, wait, fork ranks. Returns in none of them before the program is done."""
    for name in _IMPORTS:
        try:
            importlib.import_module(name)
        except ImportError:  # the rank's program may not need it, or raises the same
            continue
    gc.collect()
    gc.freeze()  # the collector of a rank would write to, and so copy, all these pages
    with socket.socket(fileno=descriptor) as link:
        link.sendall(_READY)
        while True:
            request = _receive(link)
            if _fork(link, request):
                break
            for fd in request.fds:
                os.close(fd)
    _become(request)


def _receive(link: socket.socket) -> _RankToFork:
    head, fds, _, _ = socket.recv_fds(link, 8, _MOST_DESCRIPTORS)
    if len(head) < 8:
        os._exit(0)  # the launcher has ended, or has no use for it any more
    data = link.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)
    launcher, is_module, what, arguments, env, targets = json.loads(data.decode(errors="surrogateescape"))
    return _RankToFork(launcher, is_module, what, arguments, env, targets, fds)


def _fork(link: socket.socket, request: _RankToFork) -> bool:
    """Make a child of the launcher. True in the child, once it is one."""
    reader, writer = os.pipe()
    between = os.fork()
    if between:
        os.close(writer)
        os.waitpid(between, 0)
        pid = os.read(reader, 8)
        os.close(reader)
        link.sendall(pid)
        return False
    alive, dead = os.pipe()
    if os.fork():
        os._exit(0)  # the child is the launcher's from now on
    os.close(dead)
    os.close(reader)
    os.read(alive, 1)  # until the process in between has ended
    os.close(alive)
    os.setsid()
    die_with(request.launcher)()
    os.write(writer, os.getpid().to_bytes(8, "little"))
    os.close(writer)
    return True


def _become(request: _RankToFork) -> None:
    for target, fd in zip(request.targets, request.fds, strict=False):
        os.dup2(fd, target)
        os.close(fd)
    notices = request.fds[-1]
    os.environ.clear()
    os.environ.update(request.env)
    os.environ[NOTICE_VARIABLE] = f"{notices}:{request.env[NOTICE_VARIABLE]}"
    os.set_inheritable(notices, True)  # as of a process that was started with it
    # Python's own generator of random numbers does so by itself.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    _run(request.is_module, request.what, request.arguments)


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
