"""Pages of the documentation, to be followed word for word: their programs, their commands, what they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.clusters import clean_environment


class Page:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.text = path.read_text()

    def blocks_after(self, marker: str) -> list[str]:
        """The fenced blocks that follow ``<!-- test: marker -->``, up to the next prose."""
        _, _, rest = self.text.partition(f"<!-- test: {marker} -->\n")
        assert rest, f"{self._path} has no marker {marker!r}"
        found = []
        while match := re.match(r"\s*```\w+\n(.*?)```\n", rest, re.DOTALL):
            found.append(match[1])
            rest = rest[match.end() :]
        assert found
        return found


def commands_of(block: str) -> list[tuple[str, str]]:
    """(command, the output that the page shows for it)"""
    steps: list[tuple[str, str]] = []
    for line in block.splitlines(keepends=True):
        if line.startswith("$ "):
            steps.append((line[2:], ""))
        else:
            steps[-1] = (steps[-1][0], steps[-1][1] + line)
    return steps


def with_the_pages_port(output: str) -> str:
    """What a command has printed, with the port that the pages show for a job of this machine."""
    return re.sub(r"job at 127\.0\.0\.1:\d+$", "job at 127.0.0.1:27003", output, flags=re.MULTILINE)


@contextmanager
def shell(script: str, folder: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A shell with this interpreter's programs in its path. Ended with the block."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = clean_environment(PATH=path, **variables)
    del environment["BYTEPS_TAG_OUTPUT"]  # as it comes
    process = subprocess.Popen(
        ["bash", "-e", "-c", script],
        cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()
