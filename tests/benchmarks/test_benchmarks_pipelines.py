"""The benchmark of pipelines, in its smallest form: it runs, measures everybody, and lays out its table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.clusters import ROOT, clean_environment

sys.path.insert(0, str(ROOT))

from benchmarks.pipelines import BACKENDS, CONTENDERS


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_schedule_is_measured_beside_the_simulator(tmp_path: Path) -> None:
    options = [
        "--workers",
        "2",
        "--forward-ms",
        "1",
        "--backward-ms",
        "2",
        "--kb",
        "1",
        "--rounds",
        "2",
        "--steps",
        "1",
    ]
    result = tmp_path / "result.json"
    words = [sys.executable, "-m", "benchmarks.pipelines", *options, "--micro-batches", "2", "4", "--json", str(result)]
    ran = subprocess.run(
        words, cwd=ROOT, env=clean_environment(), timeout=280, check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(result.read_text())
    cases = [(4, name) for name in CONTENDERS] + [(2, name) for name in CONTENDERS if name != "chimera-doubling"]
    assert {(row["m"], row["contender"], row["backend"]) for row in rows} == {
        (micro_batches, name, backend) for micro_batches, name in cases for backend in BACKENDS
    }
    of_dapple = {(row["m"], row["backend"]): row for row in rows if row["contender"] == "dapple"}
    for row in rows:
        assert len(row["rounds_s"]) == len(row["ratios"]) == 2
        assert row["ratio"] == pytest.approx(sum(row["ratios"]) / 2)
        # Waits are at least as long as asked for, and the simulator has measured ones.
        pieces = 2 if "interleaved" in row["contender"] else 1
        assert row["forward_s"] >= 0.001 / pieces
        assert row["backward_s"] >= 0.002 / pieces
        assert row["simulated_s"] >= row["m"] * 0.003
        assert min(row["rounds_s"]) >= row["m"] * 0.003
        assert row["p2p_s"] > 0
        assert row["cpu_s"] > 0
        beside = of_dapple[row["m"], row["backend"]]
        assert row["to_1f1b"] == row["step_s"] / beside["step_s"]
        assert row["simulated_to_1f1b"] == row["simulated_s"] / beside["simulated_s"]
        (line,) = [
            line
            for line in ran.stdout.splitlines()
            if line.split()[:3] == [str(row["m"]), row["contender"], row["backend"]]
        ]
        assert f"{row['ratio']:.3f}" in line
