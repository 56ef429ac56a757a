"""Jobs under bpslaunch that do nothing until they are told to, so that several can be alive and take turns.

``Job`` is for the benchmark, ``orders`` for its ranks: these wait in a read, and use no processor, until the next word.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from byteps_py.launch.process_guard import TOKEN_VARIABLE, carriers

LIMIT_S = 120.0
_MOST_BYTES = 4096


class Job:
    """``ranks`` on each of ``machines``, which run ``program`` and get ``--door DOOR``. ``meet`` it first."""

    def __init__(self, name: str, ranks: int, machines: int, program: Sequence[str], **environ: str) -> None:
        self._door_name = f"turns-{os.getpid()}-{name}"
        self._size = ranks * machines
        self._ranks: list[socket.socket] = []
        self.pids: list[int] = []  # of all its processes, services too
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.bind(f"\0{self._door_name}")
        self._door.listen()
        self._door.settimeout(LIMIT_S)
        launch = ["-m", "byteps_py.launch", "--no-tag-output", "-np", str(ranks), "--machines", str(machines)]
        command = [sys.executable, *launch, sys.executable, *program, "--door", self._door_name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", TOKEN_VARIABLE: self._door_name, **environ}
        self._launcher = subprocess.Popen(command, env=environment)

    def meet(self) -> list[Any]:
        """Once all ranks are there: what each says first, in order of coming."""
        while len(self._ranks) < self._size:
            self._ranks.append(self._door.accept()[0])
            self._ranks[-1].settimeout(LIMIT_S)
        self.pids = carriers(self._door_name)
        return self._answers()

    def tell(self, word: str) -> list[Any]:
        """All ranks do it; what each answers."""
        for rank in self._ranks:
            rank.send(word.encode())
        return self._answers()

    def _answers(self) -> list[Any]:
        said = [rank.recv(_MOST_BYTES) for rank in self._ranks]
        if not all(said):
            raise SystemExit(f"{self._door_name}: a rank has ended, see above")
        return [json.loads(text) for text in said]

    def close(self) -> None:
        for sock in (*self._ranks, self._door):
            sock.close()
        if not self.pids:
            self._launcher.terminate()
        if self._launcher.wait(LIMIT_S) and self.pids:
            raise SystemExit(f"{self._door_name}: its job failed, see above")


@contextlib.contextmanager
def orders(door: str, first: Any = None) -> Iterator[Iterator[tuple[str, Callable[[Any], None]]]]:
    """In a rank: says ``first``; then the words that it is told, each with how to answer it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(f"\0{door}")

        def answer(value: Any) -> None:
            sock.send(json.dumps(value).encode())

        def words() -> Iterator[tuple[str, Callable[[Any], None]]]:
            answer(first)
            while word := sock.recv(_MOST_BYTES):
                yield word.decode(), answer

        yield words()
