"""Jobs that do nothing until they are told to, so that several can be alive and take turns.

``Job`` is for the benchmark, ``orders`` for its ranks: these wait in a read, and use no processor, until the next word.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from byteps_py.launch.process_guard import TOKEN_VARIABLE, carriers

LIMIT_S = 120.0
#: Where a rank finds the benchmark: a path, because an abstract name is only for its own network namespace.
DOOR_VARIABLE = "BENCHMARK_DOOR"
_MOST_BYTES = 1 << 16
#: What a process's command line has in it, and what the process is; any other is a rank.
_KINDS = {
    "byteps_py.worker": "cs",
    "byteps_py.server": "ss",
    "byteps_py.scheduler": "scheduler",
    "byteps_py.launch": "launcher",
}
KINDS = ("rank", *_KINDS.values())


class Command(NamedTuple):
    """A process to start: its words, and its variables beside this process's."""

    words: Sequence[str]
    variables: Mapping[str, str]


class Job:
    """``size`` ranks, which ``commands`` start, whether directly or as launchers. ``meet`` it first."""

    def __init__(self, name: str, size: int, commands: Sequence[Command]) -> None:
        self._token = f"turns-{os.getpid()}-{name}"
        self._size = size
        self._ranks: list[socket.socket] = []
        self.pids: list[int] = []  # of all its processes, services too
        self._folder = tempfile.mkdtemp(prefix="turns-")
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        door = os.path.join(self._folder, "door")
        self._door.bind(door)
        self._door.listen()
        self._door.settimeout(LIMIT_S)
        common = {**os.environ, "OMP_NUM_THREADS": "1", TOKEN_VARIABLE: self._token, DOOR_VARIABLE: door}
        self._started = [subprocess.Popen(words, env={**common, **variables}) for words, variables in commands]

    def meet(self) -> list[Any]:
        """Once all ranks are there: what each says first, in order of coming."""
        while len(self._ranks) < self._size:
            self._ranks.append(self._door.accept()[0])
            self._ranks[-1].settimeout(LIMIT_S)
        self.pids = carriers(self._token)
        return self._answers()

    def tell(self, word: str) -> list[Any]:
        """All ranks do it; what each answers."""
        for rank in self._ranks:
            rank.send(word.encode())
        return self._answers()

    def _answers(self) -> list[Any]:
        said = [rank.recv(_MOST_BYTES) for rank in self._ranks]
        if not all(said):
            raise SystemExit(f"{self._token}: a rank has ended, see above")
        return [json.loads(text) for text in said]

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds so far of all its processes, by kind (see KINDS)."""
        found = dict.fromkeys(KINDS, 0.0)
        for pid in self.pids:
            with contextlib.suppress(OSError):  # it has ended
                found[_kind_of(pid)] += process_cpu_s(pid)
        return found

    def close(self) -> None:
        """End it. Raises SystemExit if one of its processes has failed."""
        for sock in (*self._ranks, self._door):
            sock.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if not self.pids:
            for process in self._started:
                process.terminate()
        deadline_s = time.monotonic() + LIMIT_S
        try:
            codes = [process.wait(max(0.0, deadline_s - time.monotonic())) for process in self._started]
        finally:
            for process in self._started:
                process.kill()
        if self.pids and any(codes):
            raise SystemExit(f"{self._token}: its job failed, exit codes {codes}, see above")


def launch(name: str, ranks: int, machines: int, program: Sequence[str], **environ: str) -> Job:
    """Under bpslaunch, ``ranks`` on each of ``machines``, which are emulated on this one."""
    words = [
        sys.executable,
        "-m",
        "byteps_py.launch",
        "--no-tag-output",
        "-np",
        str(ranks),
        "--machines",
        str(machines),
    ]
    return Job(name, ranks * machines, [Command([*words, sys.executable, *program], environ)])


def process_cpu_s(pid: int) -> float:
    """Processor seconds of a process so far, all its threads, also those that have ended. Raises OSError if it has."""
    return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3): /proc counts in hundredths of a second


def _kind_of(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    return _KINDS.get(module, "rank")


Cost = dict[str, list[float]]  # of each turn, by kind


@contextlib.contextmanager
def charged(job: Job, costs: Cost, gigabytes: float) -> Iterator[None]:
    """Adds what the block costs the job: processor seconds per GB, of each kind of process and "all"."""
    before = job.cpu_s()
    yield
    used = {kind: (now - before[kind]) / gigabytes for kind, now in job.cpu_s().items()}
    for kind, cost in {**used, "all": sum(used.values())}.items():
        costs[kind].append(cost)


def new_cost() -> Cost:
    return defaultdict(list)


def measured(step: Callable[[], None], steps: int) -> dict[str, float]:
    """Make ``steps`` steps. Returns the median time of one in ms, and the peak of this process's memory in GB."""
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return {"ms": statistics.median(times) * 1e3, "peak_gb": peak_gb}


@contextlib.contextmanager
def orders(first: Any = None) -> Iterator[Iterator[tuple[str, Callable[[Any], None]]]]:
    """In a rank: says ``first``; then the words that it is told, each with how to answer it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(os.environ[DOOR_VARIABLE])

        def answer(value: Any) -> None:
            sock.send(json.dumps(value).encode())

        def words() -> Iterator[tuple[str, Callable[[Any], None]]]:
            answer(first)
            while word := sock.recv(_MOST_BYTES):
                yield word.decode(), answer

        yield words()
