"""What the pages refer to is there: other pages, their headings, and files of the source."""

from __future__ import annotations

import re
from itertools import filterfalse
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
FILE = re.compile(r"`([\w./-]*/[\w-]+\.(?:py|proto)|[\w-]+\.py)`")
#: Files that pages tell users about, and that are theirs.
OF_USERS = re.compile(r"train\.py|\w*byteps(_ddp)?\.py")
FOLDERS = ("byteps_py", "server", "worker", "proto", "tests", "benchmarks", "examples", "deploy")


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        there = page.parent / target if target else page
        assert there.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(there), f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_pages_name_are_there(page: Path) -> None:
    """By their path, or the end of it: `scheduler/core.py`."""
    known = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    for name in filterfalse(OF_USERS.fullmatch, FILE.findall(page.read_text())):
        assert any(path == name or path.endswith(f"/{name}") for path in known), f"{page.name}: {name}"
