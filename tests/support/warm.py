"""Python programs that begin with torch and this package imported: forked from a process that has done it.

Importing torch takes longer than most tests do. A test process has one child, the template, which imports all that is
usually needed when it is first asked for a program, and forks for each. A launcher that began so forks its ranks and
services in turn. What they do from there on is what they do anywhere; programs that are tested for how they start,
what they need or what their processes look like from outside are started as users start them.

``BYTEPS_TEST_WARM=0`` starts every program so. Forked ones also have the same hash seed: all iterate sets alike.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import json
import mmap
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from support import processes

_IMPORTS = (
    "torch",
    "torch.distributed",
    "byteps_py.torch",
    "byteps_py.launch.supervisor",
    "byteps_py.scheduler.service",
    "byteps_py.server.service",
    "byteps_py.worker.service",
)
#: What programs find out when they import something: it must be as it was for the template.
_EARLY = ("PYTHON", "NUMBA_", "OMP_", "MKL_", "OPENBLAS_", "TORCH_", "LD_", "MALLOC_", "GLIBC_")
_LATE = ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONWARNINGS")
_TESTS = str(Path(__file__).parent.parent)
_MAIN = """
import socket, sys
sys.path.insert(0, sys.argv[1])
from support import warm
del sys.path[0]
warm.main(socket.socket(fileno=int(sys.argv[2])))
"""
_LAUNCHER = "byteps_py.launch"
_STATUS = struct.Struct("<q")
_MOST_BYTES = 1 << 18
_PR_SET_PDEATHSIG = 1
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_ulong
_kept: list[mmap.mmap] = []
_exec_popen = subprocess.Popen
_PARAMETERS = tuple(inspect.signature(_exec_popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Program:
    """``python [-P] SCRIPT | -m MODULE | -c CODE ARGUMENTS``. ``kind``: "", "-m" or "-c"."""

    kind: str
    what: str
    arguments: tuple[str, ...]
    is_safe_path: bool

    @property
    def words(self) -> list[str]:
        """Behind ``python``."""
        kind = [self.kind] if self.kind else []
        return [*(["-P"] if self.is_safe_path else []), *kind, self.what, *self.arguments]

    @classmethod
    def of(cls, command: object) -> Program | None:
        """None for what can't be run here."""
        if not isinstance(command, (list, tuple)) or not command or str(command[0]) != sys.executable:
            return None
        words = [str(word) for word in command[1:]]
        is_safe_path = words[:1] == ["-P"]
        words = words[is_safe_path:]
        kind = words.pop(0) if words and words[0] in ("-m", "-c") else ""
        if not words or (words[0].startswith("-") and kind != "-c"):
            return None
        return cls(kind, words[0], tuple(words[1:]), is_safe_path)


def fits(environ: Mapping[str, str]) -> bool:
    """A program with these variables finds what it would have found at its start."""
    early = [
        {name: value for name, value in each.items() if name.startswith(_EARLY) and name not in _LATE}
        for each in (environ, _template_environ())
    ]
    more = environ.get("PYTHONPATH", "").split(os.pathsep)
    return early[0] == early[1] and not any(Path(path, "sitecustomize.py").exists() for path in more)


def _template_environ() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"} if _template is not None else _begun_with


# ---- in the process of the tests ---------------------------------------------------------------------------------


class Template:
    """The process that forks, and the socket on which it is asked to."""

    def __init__(self) -> None:
        self._is_able: bool | None = None
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = _exec_popen(
                [sys.executable, "-P", "-c", _MAIN, _TESTS, str(theirs.fileno())],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )

    @property
    def is_able(self) -> bool:
        """This system lets it do its work."""
        if self._is_able is None:
            self._is_able = self.socket.recv(1) == b"y"
        return self._is_able

    def close(self) -> None:
        self.socket.close()
        self.process.wait(30)


_template: Template | None = None
_begun_with: dict[str, str] = {}  # in the template and what comes of it: its environment


def start() -> None:
    """Once for all tests of a process. Imports nothing yet."""
    global _template
    if os.environ.get("BYTEPS_TEST_WARM", "1") != "0":
        _template = Template()
        processes.more_parents.append(_template.process.pid)


def stop() -> None:
    global _template
    if _template is not None:
        processes.more_parents.remove(_template.process.pid)
        _template.close()
        _template = None


class Popen(_exec_popen):  # type: ignore[type-arg]
    """``subprocess.Popen``, by the template where that can be. Such a process is no child of this one."""

    _status: socket.socket | None = None

    def _execute_child(self, *values: Any) -> None:
        how = dict(zip(_PARAMETERS, values, strict=True))
        environ = os.environ if how["env"] is None else how["env"]
        is_plain = not (how["pass_fds"] or how["preexec_fn"] or how["shell"] or how["start_new_session"])
        is_known = is_plain and Program.of(how["args"]) is not None and fits(environ)
        if _template is None or not is_known or not _template.is_able:
            super()._execute_child(*values)  # type: ignore[misc]
            return
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            wanted = {
                "command": [str(word) for word in how["args"]],
                "environ": {**environ},
                "folder": os.fspath(how["cwd"] or os.getcwd()),
            }
            streams = [how["p2cread"], how["c2pwrite"], how["errwrite"]]
            fds = [i if fd == -1 else fd for i, fd in enumerate(streams)]
            socket.send_fds(_template.socket, [json.dumps(wanted).encode()], [*fds, theirs.fileno()])
        self.pid = _STATUS.unpack(self._status.recv(_STATUS.size))[0]
        self._child_created = True
        self._close_pipe_fds(*(how[name] for name in _PARAMETERS if name[:3] in ("p2c", "c2p", "err")))  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._status is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        try:
            told = self._status.recv(_STATUS.size, socket.MSG_DONTWAIT if wait_flags == os.WNOHANG else 0)
        except BlockingIOError:
            return 0, 0
        self._status.close()
        return self.pid, _STATUS.unpack(told)[0] if told else signal.SIGKILL

    def _internal_poll(self, *values: Any, **named: Any) -> int | None:
        if self._status is None:
            return super()._internal_poll(*values, **named)  # type: ignore[misc,no-any-return]
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode  # type: ignore[no-any-return]


def run(command: Sequence[str], timeout_s: float, **how: Any) -> subprocess.CompletedProcess[str]:
    """``subprocess.run(command, capture_output=True, text=True, …)``."""
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


# ---- in a launcher that began so ---------------------------------------------------------------------------------


class ForkingPopen(_exec_popen):  # type: ignore[type-arg]
    """``subprocess.Popen`` by ``fork``, for a process with one thread."""

    def _execute_child(self, *values: Any) -> None:
        how = dict(zip(_PARAMETERS, values, strict=True))
        program = Program.of(how["args"])
        environ = os.environ if how["env"] is None else how["env"]
        if program is None or how["shell"] or how["cwd"] or not fits(environ):
            super()._execute_child(*values)  # type: ignore[misc]
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            streams = [how["p2cread"], how["c2pwrite"], how["errwrite"]]
            fds = [i if fd == -1 else fd for i, fd in enumerate(streams)]
            become(program, dict(environ), fds, how["pass_fds"], how["start_new_session"], how["preexec_fn"])
        self._child_created = True
        self._close_pipe_fds(*(how[name] for name in _PARAMETERS if name[:3] in ("p2c", "c2p", "err")))  # type: ignore[attr-defined]


# ---- in a process that is to run a program -----------------------------------------------------------------------


def become(
    program: Program,
    environ: Mapping[str, str],
    streams: Sequence[int],
    keep: Sequence[int] = (),
    new_session: bool = True,
    before: Callable[[], object] | None = None,
) -> NoReturn:
    """In a process that was just forked: run ``program``, and end as it ends. ``streams``: its 0, 1 and 2."""
    status = 1
    try:
        if new_session:
            os.setsid()
        if before is not None:
            before()
        _reset_signals()
        _take(streams, keep)
        os.environ.clear()
        os.environ.update(environ)
        _rename([sys.executable, *program.words], environ)
        sys.dont_write_bytecode = bool(environ.get("PYTHONDONTWRITEBYTECODE"))
        _open_streams(bool(environ.get("PYTHONUNBUFFERED")))
        is_launcher = (program.kind, program.what) == ("-m", _LAUNCHER)
        subprocess.Popen = ForkingPopen if is_launcher else _exec_popen  # type: ignore[misc]
        status = _status_of(program)
    except BaseException:
        with contextlib.suppress(BaseException):
            sys.excepthook(*sys.exc_info())
    finally:
        _end(status)


def _end(status: int) -> NoReturn:
    """As an interpreter ends, but for clearing away its modules, which takes long."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        with contextlib.suppress(BaseException):
            sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _take(streams: Sequence[int], keep: Sequence[int]) -> None:
    """These descriptors, and no others."""
    for i, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in streams]):
        os.dup2(fd, i)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)
    for fd in keep:
        os.set_inheritable(fd, True)


def _rename(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Let others see (``/proc``) this command line and these variables.

    Needs no privilege (PR_SET_MM_MAP), but a kernel with CONFIG_CHECKPOINT_RESTORE, as distributions have it.
    Raises OSError.
    """
    command = b"".join(os.fsencode(word) + b"\0" for word in words)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())
    memory = mmap.mmap(-1, len(command) + len(variables) + 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(command + variables)
    _kept.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    middle, end = start + len(command), start + len(command) + len(variables)
    # By the numbers of proc_pid_stat(5), less 3. The kernel wants to be told all of it.
    stat = [int(word) for word in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1:]]
    start_code, end_code, start_stack = stat[22:25]
    start_data, end_data, start_brk = stat[41:44]
    brk = _libc.sbrk(ctypes.c_long(0))
    places = (start_code, end_code, start_data, end_data, start_brk, brk, start_stack, start, middle, middle, end)
    described = struct.pack("11QQII", *places, 0, 0, 0xFFFFFFFF)
    if _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, described, ctypes.c_ulong(len(described)), ctypes.c_ulong(0)):
        raise OSError(ctypes.get_errno(), "this process can't be given another command line")


def _open_streams(is_unbuffered: bool) -> None:
    def written(fd: int, errors: str, by_line: bool) -> io.TextIOWrapper:
        raw: Any = open(fd, "wb", buffering=0 if is_unbuffered else -1, closefd=False)  # noqa: SIM115
        return io.TextIOWrapper(raw, "utf-8", errors, line_buffering=by_line, write_through=is_unbuffered)

    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = written(1, "strict", os.isatty(1))  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = written(2, "backslashreplace", True)  # type: ignore[misc]


def _status_of(program: Program) -> int:
    """Run it as ``__main__``. What an interpreter says and returns at the end of one."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    first = {"-m": os.getcwd(), "-c": ""}.get(program.kind, os.path.dirname(os.path.realpath(program.what)))
    more = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*([] if program.is_safe_path else [first]), *more, *_paths]
    warnings._processoptions([each for each in os.environ.get("PYTHONWARNINGS", "").split(",") if each])  # type: ignore[attr-defined]
    sys.argv = [program.kind or program.what, *program.arguments]
    sys.orig_argv = [sys.executable, *program.words]
    try:
        if program.kind == "-m":
            runpy._run_module_as_main(program.what)  # type: ignore[attr-defined]
        elif program.kind == "-c":
            exec(compile(program.what, "<string>", "exec"), main.__dict__)
        else:
            main.__file__ = program.what
            with open(program.what, "rb") as file:
                exec(compile(file.read(), program.what, "exec"), main.__dict__)
    except SystemExit as ending:
        if ending.code is None or isinstance(ending.code, int):
            return (ending.code or 0) & 0xFF
        print(ending.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.last_value = error
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


# ---- the template ------------------------------------------------------------------------------------------------

_paths: list[str] = []


def _serve(requests: socket.socket) -> None:
    """Fork for each request until there will be none. One thread."""
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    told: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
    while True:
        for key, _ in selector.select():
            if key.fileobj is not requests:
                pid, status = told.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                with contextlib.suppress(OSError):  # nobody wants to know
                    status.send(_STATUS.pack(os.waitpid(pid, 0)[1]))
                status.close()
                continue
            try:
                data, fds, _, _ = socket.recv_fds(requests, _MOST_BYTES, 4)
            except ConnectionResetError:  # it has ended without asking for anything
                return
            if not data:
                return
            _load()
            wanted = json.loads(data)
            status = socket.socket(fileno=fds.pop())
            pid = os.fork()
            if not pid:
                _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
                os.chdir(wanted["folder"])
                program = Program.of(wanted["command"])
                if program is not None:
                    become(program, wanted["environ"], fds)
                os._exit(1)
            for fd in fds:
                os.close(fd)
            status.send(_STATUS.pack(pid))
            pidfd = os.pidfd_open(pid)
            told[pidfd] = pid, status
            selector.register(pidfd, selectors.EVENT_READ)


def _load() -> None:
    if "torch" not in sys.modules:
        for name in _IMPORTS:
            importlib.import_module(name)
        from byteps_py.kernels import prepare
        from byteps_py.worker.service import _LIKELY

        prepare(_LIKELY)
        gc.collect()
        gc.freeze()  # else the first collection of every process would touch, and so copy, all of it


def main(requests: socket.socket) -> None:
    global _begun_with
    _paths[:] = sys.path
    _begun_with = {**os.environ}
    try:
        _rename([sys.executable, *sys.argv], os.environ)
    except OSError:
        requests.send(b"n")
    else:
        requests.send(b"y")
        _serve(requests)
