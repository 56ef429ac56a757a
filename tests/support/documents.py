"""Pages of the documentation, to be followed word for word: their programs, their commands, what they print.

Comments of a page, which no reader sees, say how its blocks of code are run:

    <!-- blocks: bpslaunch -np 2 -->       the Python blocks below are one program, started in this way
    <!-- blocks: tests/… -->               this test runs them
    <!-- before: … -->                     code of that program that the page leaves to the reader
    <!-- run -->                           the commands below are run, and print what is shown, if anything is
    <!-- test: name -->                    a test, which has this name in it, runs the blocks below
    <!-- not run: the reason -->           nobody runs the blocks below

The first two hold up to the next one of them, the last three up to the next prose. Blocks of the language ``text`` are
no code: output, and pictures.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.clusters import clean_environment

_PART = re.compile(
    r"<!-- (?P<comment>.*?)\s*-->|^ *```(?P<language>\w*)\n(?P<code>.*?)^ *```$|(?P<prose>\S[^\n]*)",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """Fenced code. ``marker``: the comment that says how it is run, or empty. ``how``: what the page says of all its
    blocks, or empty."""

    line: int
    language: str
    code: str
    marker: str
    how: str


class Page:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.text = path.read_text()
        self.blocks: list[Block] = []
        #: How each program of the page is started, and its code.
        self.programs: list[tuple[str, str]] = []
        marker = how = ""
        for part in _PART.finditer(self.text):
            kind, _, rest = (part["comment"] or "").partition(":")
            if part["prose"]:
                marker = ""
            elif kind == "blocks":
                marker, how = "", rest.strip()
                self.programs.append((how, ""))
            elif kind == "before":
                self._add(rest)
            elif part["comment"] is not None:
                marker = part["comment"]
            else:
                line = self.text.count("\n", 0, part.start()) + 1
                self.blocks.append(Block(line, part["language"], part["code"], marker, how))
                if part["language"] == "python" and not marker and how:
                    self._add(part["code"])

    def _add(self, code: str) -> None:
        how, before = self.programs[-1]
        self.programs[-1] = how, f"{before}\n{code}"

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
        elif steps[-1][0].endswith("\\\n"):
            steps[-1] = (steps[-1][0][:-2] + line.lstrip(), "")
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


def at_own_places(text: str, places: Mapping[str, str]) -> str:
    """``text``, with a test's places, sizes and programs instead of those of the page. Each of them must be there."""
    for old, new in places.items():
        assert old in text, f"{old!r} is not in {text!r}"
        text = text.replace(old, new)
    return text
