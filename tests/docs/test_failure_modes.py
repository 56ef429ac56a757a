"""docs/reference/failure-modes.md: the messages that it quotes are those of the code."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "failure-modes.md").read_text()
#: Messages of Python and torch; and one that has no two fixed words in a row, which test_tutorial.py reads.
FOREIGN = re.compile("AttributeError: module|ValueError: Error initializing torch|environment variable RANK|epoch 3: m")
#: Messages that consist of short pieces, such as two numbers and the words between them: any two words in a row count.
PIECES = re.compile(
    r"gave (sum|average) of|^rank 0 gave|Mismatched data types|a barrier has waited|frame 3, at byte"
    r"|answers after|has no IPv4 address|sends 12 bytes"
)


def headings(page: str) -> list[str]:
    return re.findall(r"^### .*?`(.+)`$", page, re.MULTILINE)


def also(page: str) -> list[str]:
    """Messages in the text below a heading: with more blanks than names and commands have."""
    text = re.sub(r"^```.*?^```|^#.*?$", "", page, flags=re.MULTILINE | re.DOTALL)
    told = re.findall(r"(?:Also|and|ends with|goes on with|names|In full:)\s[^`]{0,40}`([^`]+)`", text)
    return [each.replace("\n", " ") for each in told if each.count(" ") > 3]


@pytest.fixture(name="code", scope="module")
def _code() -> str:
    """All of the product's text on one line; a string that goes on in the next line is joined."""
    paths = [path for top in ("byteps_py", "server", "worker") for path in sorted((ROOT / top).rglob("*.py"))]
    text = "\n".join(path.read_text() for path in [*paths, ROOT / "Makefile"])
    return re.sub(r"\s+", " ", re.sub(r"\"\s*\n\s*f?\"", "", text))


def share_in(code: str, message: str, run: int) -> float:
    """Of the message's words those that are in the code with their neighbours, ``run`` in a row. Numbers and names
    don't count: they differ from case to case."""
    words = re.sub(r"^\w+Error: ", "", message).split()
    starts = [at for at in range(len(words) - run + 1) if " ".join(words[at : at + run]) in code]
    found = {at + step for at in starts for step in range(run)}
    fixed = {at for at, word in enumerate(words) if not re.search(r"[\d=…]|^['(]", word)}
    return len(found & fixed) / len(fixed)


@pytest.mark.parametrize("message", [*headings(PAGE), *also(PAGE)])
def test_the_code_has_the_message(code: str, message: str) -> None:
    if not FOREIGN.match(message):
        assert share_in(code, message, 2 if PIECES.search(message) else 3) >= 0.5, message


@pytest.mark.parametrize(
    "message",
    [
        "MismatchError: the ranks do quarrel about 'w': …",
        "epoch 3: 104 partitions have moved, 2 summation services: lost …",
        "…; 1 rank left, and at least 4 are wanted (BYTEPS_MIN_NP): waiting for others",
    ],
)
def test_other_messages_are_noticed(code: str, message: str) -> None:
    assert share_in(code, message, 3) < 0.5


def test_headings_are_different() -> None:
    found = sorted(headings(PAGE))
    assert len(found) > 110
    assert [a for a, b in itertools.pairwise(found) if a == b] == []
