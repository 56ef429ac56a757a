"""What the pages refer to is there: other pages and their headings. test_structure.py has files and classes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "docs", ROOT / "benchmarks" / "results")
PAGES = [path for folder in FOLDERS for path in sorted(folder.rglob("*.md"))]
PAGES += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        if ":" in target:  # elsewhere: no test asks the network
            assert re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(:\d+)?(/[\w./~%+,:@-]*)?", target), f"{page.name}: {target}"
            continue
        there = page.parent / target if target else page
        assert there.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(there), f"{page.name}: {target}#{anchor}"


def test_the_reading_order_is_as_short_as_it_says() -> None:
    page = ROOT / "docs" / "internals" / "reading-order.md"
    stops = [line for line in page.read_text().splitlines() if re.match(r"\| \d+ \|", line)]
    named = [page.parent / target for line in stops for target, _ in LINK.findall(line)]
    named += [ROOT / file for line in stops for file in re.findall(r"`([\w/]+\.py)`", line)]
    assert len(stops) == 10
    assert len(named) == 11
    assert sum(len(path.read_text().splitlines()) for path in named) < 3400
