"""A launcher as a test sees it: a process with lines of output and an exit code, gone at the end of the block."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

from support import supervise
from support.clusters import LAUNCHERS, OURS, UNBUFFERED

_LIMIT_S = 100  # less than pytest allows a test
_OWN = ("OMP_", *OURS, *LAUNCHERS, *UNBUFFERED)


class Running:
    """A launcher at work. Killed, and its output read, at the end of the ``with`` block."""

    def __init__(self, arguments: list[str], **environ: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env={**inherited, **environ}
        )
        self._limit = threading.Timer(_LIMIT_S, self.process.kill)
        self._limit.start()

    def line(self) -> str:
        """The next line of output, without its end; empty when there will be none."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def finish(self, text: str = "") -> tuple[int, str, str]:
        """(exit code, further output, stderr)"""
        out, err = self.process.communicate(text)
        return self.process.returncode, out, err

    def close(self) -> None:
        self._limit.cancel()
        self._limit.join()
        self.process.kill()
        with contextlib.suppress(ValueError):  # finish() has read it all
            self.process.communicate()


@contextlib.contextmanager
def supervised(*codes: str, services: tuple[str, ...] = (), **how: object) -> Iterator[Running]:
    """One rank per snippet of ``codes``, one service per snippet of ``services``."""
    specs = [[f"service {i}", "service", f"s{i}", code] for i, code in enumerate(services)]
    specs += [[f"rank {i}", "main", str(i), code] for i, code in enumerate(codes)]
    running = Running([supervise.__file__, json.dumps({"specs": specs, "how": how})])
    try:
        yield running
    finally:
        running.close()


@contextlib.contextmanager
def launched(*arguments: str, **environ: str) -> Iterator[Running]:
    running = Running(["-m", "byteps_py.launch", *arguments], **environ)
    try:
        yield running
    finally:
        running.close()


class Launch:
    """A command at work, often on another host: its output, line by line, stdout and stderr as one stream."""

    def __init__(self, command: Sequence[str], environ: dict[str, str]) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environ
        )
        self.said: list[str] = []
        self._limit = threading.Timer(_LIMIT_S, self.process.kill)
        self._limit.start()

    def until(self, *texts: str) -> None:
        """Read on until each of ``texts`` stands in some line."""
        waiting = set(texts)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.rstrip("\n"))
            waiting = {text for text in waiting if text not in line}
            if not waiting:
                return
        raise AssertionError(f"never said {sorted(waiting)}; it said:\n{self.text}")

    def end(self) -> int:
        """The exit status, once it has ended. ``text`` has all that it said."""
        assert self.process.stdout is not None
        self.said += [line.rstrip("\n") for line in self.process.stdout]
        return self.process.wait()

    @property
    def text(self) -> str:
        return "\n".join(self.said)

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        self._limit.cancel()
        self._limit.join()
        self.process.kill()
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):
            self.said += [line.rstrip("\n") for line in self.process.stdout]
        self.process.stdout.close()
        self.process.wait()
