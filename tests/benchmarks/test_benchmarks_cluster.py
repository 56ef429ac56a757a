"""The benchmarks of several machines, in their smallest form: they run, measure everybody, and lay out their tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.clusters import ROOT, clean_environment, has_namespaces

sys.path.insert(0, str(ROOT))

from benchmarks.turns import KINDS, charged, new_cost, process_cpu_s

needs_namespaces = pytest.mark.skipif(not has_namespaces(), reason="needs root and iproute2 (network namespaces)")


def run(tmp_path: Path, module: str, *arguments: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of its JSON, and the lines that it printed."""
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json", str(result)]
    ran = subprocess.run(
        command, cwd=ROOT, env=clean_environment(), timeout=400, check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(result.read_text()), ran.stdout.splitlines()


def line_of(lines: list[str], *words: str) -> list[str]:
    """The words of the only line that begins with these."""
    (found,) = [line.split() for line in lines if tuple(line.split()[: len(words)]) == words]
    return found


def test_processor_time_is_exact_and_of_the_whole_process() -> None:
    before = time.process_time()
    seen = process_cpu_s(os.getpid())
    assert before <= seen <= time.process_time()


def test_a_turn_is_charged_by_kind() -> None:
    class Fake:
        used = dict.fromkeys(KINDS, 1.0)

        def cpu_s(self) -> dict[str, float]:
            return dict(self.used)

    job, costs = Fake(), new_cost()
    with charged(job, costs, gigabytes=2.0):  # type: ignore[arg-type]
        job.used["rank"] += 1.0
        job.used["cs"] += 3.0
    assert costs == {"rank": [0.5], "cs": [1.5], "ss": [0.0], "scheduler": [0.0], "launcher": [0.0], "all": [2.0]}


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "calls",
    [
        ["push_pull", "optimizer"],
        pytest.param(["push_pull_inplace", "allreduce_", "all_reduce", "session", "optimizer"], marks=pytest.mark.long),
    ],
    ids=["few", "most"],
)
def test_public_calls_are_measured_beside_gloo_and_an_echo(tmp_path: Path, calls: list[str]) -> None:
    options = ["--workers", "2", "--servers", "0", "--mbit", "0", "--mb", "0.25", "--rounds", "1"]
    (row,), lines = run(tmp_path, "cluster", *options, "--contenders", *calls)
    assert (row["n"], row["k"], row["bytes"], row["unit_s"]) == (2, 0, 1 << 18, None)
    assert set(row["calls"]) == {*calls, "gloo", "ddp", "tcp_echo"}
    assert row["ours_s"] == row["calls"][calls[0]]["times_s"]
    for name, found in row["calls"].items():
        assert len(found["times_s"]) == 100
        assert min(found["times_s"]) > 0
        costs = found["cpu_s_per_gb"]
        services = [costs[kind][0] for kind in ("cs", "ss")]
        assert min(services) > 0 if name in calls else max(services) == 0
        assert costs["rank"][0] > 0
        assert costs["all"][0] == pytest.approx(sum(costs[kind][0] for kind in KINDS))
        place = "0" if name in calls else "-"
        assert (
            line_of(lines, place, name)[-1]
            == f"{costs['all'][0] / row['calls']['tcp_echo']['cpu_s_per_gb']['all'][0]:.2f}"
        )


@needs_namespaces
@pytest.mark.long
@pytest.mark.timeout(420)
def test_each_size_has_a_table_beside_theory(tmp_path: Path) -> None:
    options = ["--workers", "2", "--servers", "1", "--mbit", "400", "--mb", "0.5", "9", "--rounds", "1"]
    rows, lines = run(tmp_path, "cluster", *options, "--contenders", "session", "push_pull", "--repeats", "1")
    assert [(row["k"], row["bytes"]) for row in rows] == [(1, 1 << 19), (1, 9 << 20)]
    for row in rows:
        assert set(row["calls"]) == {"session", "push_pull", "servers only", "gloo", "tcp_echo"}
        assert row["unit_s"] == row["bytes"] * 8 / 400e6
        assert row["servers_only_s"] == row["calls"]["servers only"]["times_s"]
    assert len(rows[1]["ours_s"]) == 1
    assert sum("servers only s" in line for line in lines) == 2


@pytest.mark.long
@pytest.mark.timeout(420)
def test_operations_of_a_group_are_measured_with_a_secret_and_without(tmp_path: Path) -> None:
    options = ["--layouts", "2x2", "--sizes", "4", "1048576", "--rounds", "1", "--seconds", "0.01", "--secret"]
    rows, lines = run(tmp_path, "point_to_point", *options)
    operations = ["send_recv", "all_reduce", "all_gather", "push_pull", "tensor_layers"]
    assert [(row["operation"], row["bytes"]) for row in rows] == [(o, n) for o in operations for n in (4, 1 << 20)]
    for row in rows:
        assert row["delay_ms"] is None
        assert row["ratio"] == row["byteps"] / row["gloo"]
        assert row["sealed_ratio"] == row["sealed"] / row["gloo"]
        assert all(row[f"{name}_cpu_s_per_gb"] > 0 for name in ("byteps", "sealed", "gloo"))
        line_of(lines, row["operation"], str(row["bytes"]))
    assert sum("loopback" in line for line in lines) == 1


@needs_namespaces
@pytest.mark.long
@pytest.mark.timeout(420)
def test_links_delay_what_they_carry(tmp_path: Path) -> None:
    options = ["--layouts", "2x1", "--sizes", "4", "--rounds", "1", "--seconds", "0.01", "--operations", "send_recv"]
    rows, lines = run(tmp_path, "point_to_point", *options, "--delay-ms", "0", "20", "--mbit", "500")
    assert [row["delay_ms"] for row in rows] == [0, 20]
    assert all("byteps" not in row for row in rows)  # between namespaces, no process listens without a secret
    assert all(rows[1][name] >= 0.020 for name in ("sealed", "gloo"))  # one way
    assert [line.split(";")[0] for line in lines if line.startswith("2x1")] == [
        f"2x1 (machines x ranks), {delay} ms of delay, 500 Mbit/s each way" for delay in (0, 20)
    ]
