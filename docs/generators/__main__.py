"""Writes what the documentation has from the code: pages, and pictures. `python docs/generators`; with --check it only
says which files differ, and ends with 1 if some do. The site is `make docs`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parents[1]
sys.path.insert(0, str(DOCS.parent))

import architecture_picture  # noqa: E402
import commands_page  # noqa: E402
import errors_page  # noqa: E402
import healing_picture  # noqa: E402
import metrics_page  # noqa: E402
import placement_picture  # noqa: E402
import slow_rank_picture  # noqa: E402
import step_times_picture  # noqa: E402
import trace_picture  # noqa: E402
import wire_page  # noqa: E402

OUTPUTS: dict[str, Callable[[], str]] = {
    "reference/commands.md": commands_page.text,
    "reference/errors.md": errors_page.text,
    "reference/metrics.md": metrics_page.text,
    "reference/wire-protocol.md": wire_page.text,
    "pictures/architecture.svg": architecture_picture.svg,
    "pictures/healing.svg": healing_picture.svg,
    "pictures/placement.svg": placement_picture.svg,
    "pictures/slow-rank.svg": slow_rank_picture.svg,
    "pictures/step-times.svg": step_times_picture.svg,
    "pictures/trace.svg": trace_picture.svg,
}


def main() -> int:
    stale = []
    for name, text in OUTPUTS.items():
        path = DOCS / name
        if path.exists() and path.read_text() == text():
            continue
        stale.append(name)
        if "--check" not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text())
    said = "differs from its source; run: python docs/generators" if "--check" in sys.argv else "written"
    for name in stale:
        print(f"docs/{name} {said}")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
