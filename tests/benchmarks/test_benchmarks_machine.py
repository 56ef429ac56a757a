"""The benchmarks of one machine, in their smallest form: they run, and measure everybody."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(*command: str) -> str:
    ran = subprocess.run([sys.executable, *command], timeout=100, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.long
def test_the_start_is_measured_cold_and_warm(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    run(str(BENCHMARKS / "startup.py"), "--rounds", "1", "--json", str(result))
    samples = json.loads(result.read_text())
    assert samples.keys() == {"cold", "warm"}
    for found in samples.values():
        assert found.keys() == {"init, 1 process", "server ready", "init, 2 ranks", "first round", "init, no torch"}
        assert all(len(times) == 1 and times[0] > 0 for times in found.values())


@pytest.mark.parametrize(
    "contender", ["arena", *(pytest.param(each, marks=pytest.mark.long) for each in ("tensor", "backend", "gloo"))]
)
def test_a_sum_is_measured(contender: str) -> None:
    program = [str(BENCHMARKS / "reduction_rank.py"), contender, "--seconds", "0.01", "--sizes", "4", "1048576"]
    lines = run("-m", "byteps_py.launch", "--no-tag-output", "-np", "2", sys.executable, *program).splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert [row["bytes"] for row in rows] == [4, 1048576]
    assert all(row["median_s"] > 0 and row["rank_cpu_s"] > 0 for row in rows)


@pytest.mark.slow
def test_both_ways_to_another_process_are_measured(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    run(str(BENCHMARKS / "caches.py"), "--kilobytes", "64", "--rounds", "1", "--json", str(result))
    (row,) = json.loads(result.read_text())
    assert row["bytes"] == 64 << 10
    assert all(len(rates) == 2 and min(rates) > 0 for rates in row["gigabytes_per_s"].values())


@pytest.mark.long
def test_a_server_is_measured_under_more_workers_than_cores(tmp_path: Path) -> None:
    """So some of them are late, and are told that others wait for them."""
    result = tmp_path / "result.json"
    sizes = ["--gigabytes", "0.05", "--partition-bytes", str(1 << 20)]
    run(str(BENCHMARKS / "server.py"), "--workers", "3", "--runs", "1", *sizes, "--json", str(result))
    found = json.loads(result.read_text())
    for kind in ("sums", "echo"):
        assert all(rate > 0 for rate, *_ in found[kind])
    for way in ("gloo", "gloo, one at a time"):
        assert all(rate > 0 and cpu_s > 0 for rate, cpu_s in found[way])
