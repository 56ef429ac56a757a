"""How much memory is left, from what the system says."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from byteps_py.system.process_memory import available_memory_bytes

MEMINFO = "MemTotal:  2000 kB\nMemFree: 100 kB\nMemAvailable:   1000 kB\n"


@pytest.mark.parametrize(
    ("limit", "used", "left"),
    [("max", "5", 1000 * 1024), ("600000", "200000", 400_000), ("5", "9", 0), (None, None, 1000 * 1024)],
)
def test_the_smaller_of_the_machine_and_its_container(
    tmp_path: Path, limit: str | None, used: str | None, left: int
) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    if limit is not None and used is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text(used + "\n")
    assert available_memory_bytes(tmp_path / "meminfo", tmp_path) == left


def test_where_nothing_tells(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path / "none", tmp_path) == math.inf
    assert 0 < available_memory_bytes() < math.inf
