"""A job of real processes, as users start it: one ``bpslaunch`` for the scheduler and for each machine.

What its ranks wrote down, and what its launchers printed and when, is read here; every wait has a deadline. Each
process inherits a mark that says to which job and machine it belongs, whoever starts it: so a whole machine can be hit,
and at the end nothing is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.recovery.launcher import POLL_S, Launcher, Line, UnforeseenError
from byteps_py.launch.process_plan import free_port

T = TypeVar("T")

RANK = str(Path(__file__).with_name("rank.py"))
CALM_STEPS = 20
START_ATTEMPTS = 3
COMPUTE_S = 0.05  # of each step, see rank.py
START_S = 60.0  # on a machine that has not read torch from its disk yet
WAIT_S = 30.0
_OURS = ("DMLC_", "BYTEPS_", "PS_", "MASTER_", "GROUP_", "LOCAL_", "TORCHELASTIC_", "OMPI_", "PMIX_", "SLURM_", "OMP_")

Where = Callable[[Sequence[str]], list[str]]


@dataclass(frozen=True)
class Step:
    number: int
    began: float
    at: float  # when it was complete
    size: int
    weights: str


class Job:
    """``machines`` GPU machines ("m0", …) with ``ranks`` each, CPU machines ("s0", …) and the scheduler, each with its
    own launcher in ``launchers``. ``where``: how a machine's commands are run on its host."""

    def __init__(
        self,
        folder: Path,
        machines: int = 2,
        ranks: int = 1,
        servers: int = 1,
        is_elastic: bool = False,
        where: dict[str, tuple[str, Where]] | None = None,
    ) -> None:
        self.folder, self.launchers = folder, dict[str, Launcher]()
        self.ranks = [f"m{machine}.{local}" for machine in range(machines) for local in range(ranks)]
        self._mark, self._is_elastic, self._local_size = uuid.uuid4().hex, is_elastic, str(ranks)
        self._where = where or {}
        self._offset, self._notes, self._steps = (
            defaultdict[str, int](int),
            defaultdict[str, list[Any]](list),
            (defaultdict[str, list[Step]](list)),
        )
        port = str(free_port())
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        self.environ = {
            **kept,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "BYTEPS_LOG_LEVEL": "INFO",  # a scheduler that is back at once is no news
            "RECOVERY_COMPUTE_S": str(COMPUTE_S),
            "DMLC_PS_ROOT_URI": self._where["scheduler"][0] if where else "127.0.0.1",
            "DMLC_PS_ROOT_PORT": port,
            "DMLC_NUM_WORKER": str(machines),
            "DMLC_NUM_SERVER": str(servers),
            "BYTEPS_JOB_ID": f"recovery-{port}",
            "BYTEPS_JOURNAL_DIR": str(folder),
            **({"BYTEPS_SECRET": self._mark} if where else {}),
        }
        self._machines, self._servers = machines, servers

    def start(self) -> None:
        self._start("scheduler", DMLC_ROLE="scheduler")
        for index in range(self._servers):
            self.add_server(f"s{index}")
        for index in range(self._machines):
            self.add_machine(index)
        (self.folder / "go").touch()  # for the ranks, which load torch

    def _start(self, name: str, words: Sequence[str] = (), **variables: str) -> Launcher:
        elastic = ["--elastic"] if self._is_elastic else []
        command = [sys.executable, "-m", "byteps_py.launch", "--no-tag-output", *elastic, *words]
        environ = {**self.environ, "BYTEPS_MACHINE_ID": name, **variables}
        if name in self._where:
            environ["DMLC_NODE_HOST"], wrap = self._where[name]
            command = wrap(command)
        self.launchers[name] = Launcher(command, environ, f"{self._mark}:{name}:")
        return self.launchers[name]

    def add_server(self, name: str) -> Launcher:
        return self._start(name, DMLC_ROLE="server")

    def add_machine(self, index: int) -> Launcher:
        own = {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(index), "BYTEPS_LOCAL_SIZE": self._local_size}
        words = [sys.executable, RANK, str(self.folder), *(["elastic"] if self._is_elastic else [])]
        return self._start(f"m{index}", words, **own)

    # ---- what the ranks wrote --------------------------------------------------------------------------

    def notes(self, rank: str, what: str) -> list[dict[str, Any]]:
        """``rank``: machine and local rank, as in "m1.0"."""
        self._read(rank)
        return [note for note in self._notes[rank] if note["what"] == what]

    def steps(self, rank: str = "m0.0") -> list[Step]:
        self._read(rank)
        return self._steps[rank]

    def _read(self, rank: str) -> None:
        """What is new in its file."""
        with contextlib.suppress(FileNotFoundError), open(self.folder / f"{rank}.jsonl") as file:
            file.seek(self._offset[rank])
            while (line := file.readline()).endswith("\n"):
                self._offset[rank] = file.tell()
                note = json.loads(line)
                if note["what"] == "step":
                    del note["what"]
                    self._steps[rank].append(Step(**note))
                else:
                    self._notes[rank].append(note)

    # ---- waiting ---------------------------------------------------------------------------------------

    def until(self, what: str, get: Callable[[], T | None], timeout_s: float = WAIT_S) -> T:
        """What ``get`` returns, once it does."""
        deadline_s = time.monotonic() + timeout_s
        while (got := get()) is None:
            if time.monotonic() > deadline_s:
                raise UnforeseenError(f"not within {timeout_s:g} s: {what}")
            time.sleep(POLL_S)
        return got

    def until_said(self, name: str, pattern: str, since: float, timeout_s: float = WAIT_S) -> Line:
        launcher = self.launchers[name]
        return self.until(f"{name} says {pattern!r}", lambda: launcher.said(pattern, since), timeout_s)

    def until_step(self, since: float, ranks: Sequence[str], count: int = 1, size: int = 0, **how: float) -> float:
        """When each of ``ranks`` has completed so many steps that it began after ``since``, in a group of ``size``."""

        def get() -> float | None:
            ended = []
            for rank in ranks:
                if errors := self.notes(rank, "error"):
                    raise UnforeseenError(f"{rank}: {errors[-1]['text']}")
                if self.launchers[rank.partition(".")[0]].process.poll() is not None:
                    raise UnforeseenError(f"{rank} has ended")
                steps = [step for step in self.steps(rank) if step.began > since and size in (0, step.size)]
                if len(steps) < count:
                    return None
                ended.append(steps[count - 1].at)
            return max(ended)

        return self.until(f"{count} steps of {' '.join(ranks)}", get, **how)

    def until_note(self, rank: str, what: str, **how: float) -> dict[str, Any]:
        return self.until(f"{rank} notes {what!r}", lambda: next(iter(self.notes(rank, what)), None), **how)

    def end(self) -> None:
        """Let it take its last step, and all of it end."""
        (self.folder / "end").touch()
        for name, launcher in self.launchers.items():
            status = self.until(f"the end of {name}", launcher.process.poll)
            if status:
                raise UnforeseenError(f"{name} ended with status {status}")

    def close(self) -> None:
        for launcher in self.launchers.values():
            launcher.close()

    @property
    def text(self) -> str:
        return "\n".join(f"[{name}] {line.text}" for name, one in self.launchers.items() for line in one.lines)


@contextlib.contextmanager
def running(steps: int = CALM_STEPS, **how: Any) -> Iterator[Job]:
    """A job that has taken so many steps, killed with all its processes at the end of the block.

    On a machine with too much other work a second without a word is no sign of death, and a job may not come so far:
    then another one is started, at most START_ATTEMPTS. If anything else is raised, what the job said is printed.
    """
    for attempt in range(1, START_ATTEMPTS + 1):
        with tempfile.TemporaryDirectory() as folder:
            job = Job(Path(folder), **how)
            has_started = False
            try:
                job.start()
                job.until_step(0.0, job.ranks, steps, timeout_s=START_S)
                has_started = True
                yield job
            except BaseException as error:
                print(f"{error}; the job said:\n{job.text}", file=sys.stderr, flush=True)
                if has_started or attempt == START_ATTEMPTS or not isinstance(error, UnforeseenError):
                    raise
            finally:
                job.close()
        if has_started:
            return
