"""benchmarks/recovery: what its table and its JSON say. A run of it takes minutes, and is made by hand."""

from __future__ import annotations

import json
import subprocess
import sys

from support.clusters import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks.recovery.rows import Row


def test_a_row_says_whether_its_bound_was_kept() -> None:
    row = Row("a fault", 1.5)
    for took_s in (0.4, 1.2, 0.6):
        row.add(took_s, calm_step=0.1, partitions=3)
    said = "a fault 3 0.60 1.20 1.5 calm step 0.10 (at most 0.10); partitions 3 (at most 3)"
    assert " ".join(str(row).split()) == said
    assert row.to_json()["within"]
    row.add(1.6)
    row.check(False, "nobody noticed")
    found = json.loads(json.dumps(row.to_json()))
    assert (found["within"], found["times_s"][-1], found["failures"]) == (False, 1.6, ["nobody noticed"])
    assert "MISSED" in str(row)


def test_every_row_can_be_asked_for_by_name() -> None:
    command = [sys.executable, "-m", "benchmarks.recovery", "--only", "nonsense"]
    ran = subprocess.run(command, cwd=ROOT, timeout=60, check=False, capture_output=True, text=True)
    assert ran.returncode == 2
    for name in ("server-killed", "rank-killed", "scheduler-killed", "elastic-machine-joins", "connection-cut"):
        assert name in ran.stderr
