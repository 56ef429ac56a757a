"""Jobs to be broken on purpose: what they say, which processes they have, and that nothing of them is left.

Every process of a job inherits a mark in its environment, whoever starts it and whatever session it makes for
itself; so all of them can be found, also after the launcher has ended.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from byteps_py.launch.process_plan import free_port
from byteps_py.system import jobs
from support import warm
from support.clusters import ROOT, clean_environment
from support.processes import kill, processes, wait_gone
from support.remains import Remains

RANK = str(ROOT / "tests" / "programs" / "rank.py")
ERROR_STATUS = 3  # of rank.py, for an error of ours
_LIMIT_S = 100  # less than pytest allows a test
_MARK = "TEST_MARK_OF_BYTEPS"


def environ_of(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
    return {}


def arguments_of(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    return []


class Job:
    """One process and what it starts. stdout and stderr are one stream, in the order in which they were written."""

    def __init__(
        self, command: Sequence[str], mark: str, environ: dict[str, str], folder: Path, limit_s: float = _LIMIT_S
    ) -> None:
        self.said: list[str] = []
        self._mark = mark
        self.process = warm.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environ, **dict.fromkeys(("TMPDIR", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"), str(folder)), _MARK: mark},
        )
        self._folder = folder
        self._remains = Remains(self.process.pid, folder)
        self._limit = threading.Timer(limit_s, self._kill_all)
        self._limit.start()

    # ---- what it says ----------------------------------------------------------------------------------

    def until(self, *texts: str) -> str:
        """Read on until each of ``texts`` stands in some line; that of the last to come."""
        waiting = set(texts)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._hear(line)
            waiting = {text for text in waiting if text not in line}
            if not waiting:
                self._remains.note(self.pids())
                return self.said[-1]
        raise AssertionError(f"never said {sorted(waiting)}; it said:\n" + self.text)

    def end(self) -> int:
        """Its exit status, once it has ended. All it said is in ``text`` then, and nothing of it is left: no process,
        socket, shared memory or file."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        for line in self.process.stdout:
            self._hear(line)
        status = self.process.wait()
        if status == -signal.SIGKILL:  # its note is left for whoever looks next
            jobs.clear(self._folder / "byteps")
        # What ranks write at an error is for whoever looks into it.
        shutil.rmtree(self._folder / "byteps" / "flight-recorder", ignore_errors=True)
        with contextlib.suppress(OSError):  # a journal is there
            (self._folder / "byteps").rmdir()
        left = [f"{pid}: {' '.join(arguments_of(pid))}" for pid in self.pids() if not wait_gone(pid, 0)]
        others = [pid for pid, _, _ in processes() if environ_of(pid).get(_MARK, self._mark) != self._mark]
        left += self._remains.left(others)
        assert not left, f"left behind: {left}; it said:\n{self.text}"
        return status

    def _hear(self, line: str) -> None:
        self.said.append(line.rstrip("\n"))
        if not len(self.said) & len(self.said) - 1:  # the first lines, and ever fewer of the later ones
            self._remains.note(self.pids())

    @property
    def of_ranks(self) -> list[str]:
        """Without the launcher's line that names the job."""
        return [line for line in self.said if not line.startswith("bpslaunch: job at 127.0.0.1:")]

    @property
    def text(self) -> str:
        return "\n".join(self.said)

    # ---- its processes ---------------------------------------------------------------------------------

    def pids(self) -> list[int]:
        return [pid for pid, _, state in processes() if state != "Z" and environ_of(pid).get(_MARK) == self._mark]

    def pid(self, word: str, **environ: str) -> int:
        """The process with ``word`` on its command line and these variables, which must be one."""
        found = self.pids_of(word, **environ)
        assert len(found) == 1, f"{len(found)} processes are {word} with {environ}"
        return found[0]

    def pids_of(self, word: str, **environ: str) -> list[int]:
        """The processes with ``word`` on their command line and these variables."""
        return [pid for pid in self.pids() if word in arguments_of(pid) and environ.items() <= environ_of(pid).items()]

    def signal(self, signum: signal.Signals) -> None:
        """To the process that was started, alone."""
        self.process.send_signal(signum)

    def _kill_all(self) -> None:
        self.said.append(f"[killed by the test after {self._limit.interval:g} s]")
        for pid in self.pids():
            kill(pid)

    def close(self) -> None:
        self._limit.cancel()
        self._limit.join()
        for pid in self.pids():
            kill(pid)
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.said += [line.rstrip("\n") for line in self.process.stdout]
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self.process.wait()


@contextlib.contextmanager
def _job(command: Sequence[str], environ: dict[str, str], limit_s: float = _LIMIT_S) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="byteps-test-", ignore_cleanup_errors=True) as folder:
        job = Job(command, uuid.uuid4().hex, environ, Path(folder), limit_s)
        try:
            yield job
        except BaseException:
            job.close()
            print(f"---- {' '.join(command)}\n{job.text}")  # pytest shows it with the failure
            raise
        finally:
            job.close()


def launch(
    options: str, *words: str, program: str | Path = RANK, limit_s: float = _LIMIT_S, **environ: str
) -> contextlib.AbstractContextManager[Job]:
    """``bpslaunch OPTIONS python PROGRAM WORDS``; without words, and with the usual program, no command is given."""
    command = [sys.executable, "-m", "byteps_py.launch", *options.split()]
    if words or program != RANK:
        command += [sys.executable, str(program), *words]
    return _job(command, clean_environment(**environ), limit_s)


@contextlib.contextmanager
def elastic_machines(*words: str, program: str) -> Iterator[Callable[..., Job]]:
    """An elastic job, of three machines at first, without servers. Yields a function that starts a machine by number,
    with variables of its own."""
    variables = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port())}
    variables |= {"DMLC_NUM_WORKER": "3", "DMLC_NUM_SERVER": "0"}
    with contextlib.ExitStack() as stack:

        def start(index: int, **own: str) -> Job:
            place = {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(index), "BYTEPS_MACHINE_ID": f"m{index}"}
            return stack.enter_context(launch("--elastic", *words, program=program, **variables, **place, **own))

        stack.enter_context(launch("--elastic", DMLC_ROLE="scheduler", **variables))
        yield start


def alone(*words: str, **environ: str) -> contextlib.AbstractContextManager[Job]:
    """One rank without any launcher: ``python rank.py WORDS``."""
    return _job([sys.executable, RANK, *words], clean_environment(**environ))


def command(*words: str, limit_s: float = _LIMIT_S, **environ: str) -> contextlib.AbstractContextManager[Job]:
    """Any command: another launcher's, say."""
    return _job(words, clean_environment(**environ), limit_s)


def service(module: str, *arguments: str, **environ: str) -> contextlib.AbstractContextManager[Job]:
    """One service process: ``python -m`` a module of byteps_py."""
    return _job([sys.executable, "-m", f"byteps_py.{module}", *arguments], clean_environment(**environ))
