"""benchmarks/kill_soak: when it kills, what it calls a failure, and its smallest run."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.clusters import ROOT, clean_environment

sys.path.insert(0, str(ROOT))

from benchmarks.goodput.contenders import KINDS
from benchmarks.goodput.outcome import Outcome
from benchmarks.goodput.training import Task
from benchmarks.kill_soak import faults_of, plan, steps_for, summary


def outcome(steps: list[tuple[int, int]], weights: str = "w") -> Outcome:
    """Of one rank: (step, sample) in the order in which it began and made them."""
    notes: list[dict[str, Any]] = []
    for at, (step, sample) in enumerate(steps):
        notes += [
            {"what": "begin", "at": float(at), "step": step, "samples": [sample]},
            {"what": "step", "at": at + 0.5, "step": step},
        ]
    notes.append({"what": "end", "at": 99.0, "weights": weights})
    task = Task("nowhere", ranks=1, copies=1, steps=3, compute_s=0.0, batch_size=1)
    return Outcome(task, {0: notes}, {0: 0.5, 1: 1.5, 2: 2.5}, [], cpu_s=0.0)


CALM = outcome([(0, 0), (1, 1), (2, 2)])


@pytest.mark.parametrize(
    ("steps", "weights", "faults"),
    [
        ([(0, 0), (1, 1), (2, 2)], "w", []),
        ([(0, 0), (1, 1), (1, 1), (2, 2)], "w", []),
        ([(0, 0), (1, 1), (2, 2)], "x", ["other weights"]),
        ([(0, 0), (1, 1), (2, 2), (1, 1), (2, 2)], "w", ["1 bodies of steps before the one under way were made again"]),
        ([(0, 0), (1, 1), (2, 1)], "w", ["1 samples were left out", "1 samples were used twice"]),
    ],
    ids=["nothing", "step made again", "weights", "went back", "sample"],
)
def test_what_a_failure_is(steps: list[tuple[int, int]], weights: str, faults: list[str]) -> None:
    assert faults_of(outcome(steps, weights), CALM) == faults


def test_a_plan_has_each_kind_as_often_and_some_kills_while_the_job_recovers() -> None:
    planned = list(plan(random.Random(1), 500, KINDS, overlapping=0.2, copies=2))
    assert Counter(each.kind for each in planned) == dict.fromkeys(KINDS, 100)
    assert planned[0].steps > 0
    assert 60 < sum(not each.steps for each in planned) < 140
    assert sum(each.steps for each in planned) < steps_for(500)
    assert planned == list(plan(random.Random(1), 500, KINDS, overlapping=0.2, copies=2))


@pytest.mark.parametrize("copies", [1, 2])
def test_servers_with_all_copies_are_not_killed_together(copies: int) -> None:
    at_once: list[list[str]] = []
    for each in plan(random.Random(1), 500, KINDS, 0.5, copies):
        if each.steps:
            at_once.append([])
        at_once[-1].append(each.kind)
    most = max(kinds.count("summation server") for kinds in at_once if len(kinds) > 1)
    assert most == copies - 1


def test_the_last_line_counts_kills_and_names_jobs_that_failed() -> None:
    rows = [
        {"job": "mesh 1", "kills": {"rank": 2}, "faults": []},
        {"job": "mesh 2", "kills": {"rank": 1}, "faults": ["x"]},
    ]
    assert summary(rows) == "3 kills (rank: 3) in 2 jobs; failed: mesh 2"


@pytest.mark.long
@pytest.mark.timeout(300)  # seconds
def test_a_job_with_kills(tmp_path: Path) -> None:
    result = tmp_path / "rows.json"
    options = "--kills 2 --kills-per-job 2 --layouts in-place --machines 2 --ranks 1 --servers 1"
    command = [sys.executable, "-m", "benchmarks.kill_soak", *options.split(), "--json", str(result)]
    ran = subprocess.run(
        command, cwd=ROOT, env=clean_environment(), timeout=280, check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (row,) = map(json.loads, result.read_text().splitlines())
    assert sum(row["kills"].values()) == 2
    assert row["faults"] == []
