"""benchmarks/goodput: what it makes of the ranks' notes, and its smallest run."""

from __future__ import annotations

import itertools
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
from benchmarks.goodput.killer import Kill, kinds, times
from benchmarks.goodput.outcome import Outcome, row_of
from benchmarks.goodput.training import Task

TASK = Task("nowhere", ranks=2, copies=2, steps=3, compute_s=0.0, batch_size=1)


def body(step: int, sample: int, at: float, is_made: bool = True) -> list[dict[str, Any]]:
    begin = {"what": "begin", "at": at, "step": step, "samples": [sample]}
    return [begin, {"what": "step", "at": at + 0.9, "step": step}] if is_made else [begin]


def outcome(*of_rank_1: list[dict[str, Any]], kills: tuple[Kill, ...] = ()) -> Outcome:
    """Of a rank 0 that makes steps at 1, 2 and 3, of samples 0, 1 and 2."""
    ready = [{"what": "ready", "at": 0.0, "import_s": 2.0}]
    end = [{"what": "end", "at": 9.0, "weights": "w"}]
    of_rank_0 = [*ready, *itertools.chain(*(body(step, step, step + 0.1) for step in range(3))), *end]
    notes = {0: of_rank_0, 1: [*ready, *itertools.chain(*of_rank_1), *end]}
    last = [note["at"] for note in notes[1] if note["what"] == "step" and note["step"] == 2]
    return Outcome(TASK, notes, {0: 1.0, 1: 2.0, 2: max(3.0, *last)}, kills, cpu_s=1.0)


def row(seen: Outcome) -> dict[str, Any]:
    calm = outcome(body(0, 3, 0.1), body(1, 4, 1.1), body(2, 5, 2.1))
    return row_of("somebody", 30, seen, calm)


def test_a_step_that_was_made_again_costs_its_time_and_no_sample() -> None:
    again = (body(0, 3, 0.1), body(1, 4, 1.1), body(2, 5, 2.1, is_made=False), body(2, 5, 4.1))
    found = row(outcome(*again, kills=(Kill(2.5, "rank", ["it"]),)))
    assert (found["bodies_repeated"], found["bodies_repeated_beyond"]) == (1, 0)
    assert (found["samples_lost"], found["samples_doubled"], found["same_bits"]) == (0, 0, True)
    assert found["to_next_step_s"] == [2.5]
    assert found["goodput"] == pytest.approx(0.5)
    json.dumps(found)


def test_what_is_lost_or_used_twice_is_counted() -> None:
    back = (body(0, 3, 0.1), body(1, 4, 1.1), body(2, 5, 2.1), body(1, 4, 3.1), body(2, 4, 4.1))
    found = row(outcome(*back))
    assert (found["bodies_repeated"], found["bodies_repeated_beyond"]) == (2, 1)
    assert (found["samples_lost"], found["samples_doubled"]) == (1, 1)


def test_kills_are_of_all_kinds_and_spread_over_the_time() -> None:
    found = Counter(itertools.islice(kinds(random.Random(0), KINDS), 10))
    assert found == dict.fromkeys(KINDS, 2)
    at = list(itertools.islice(times(random.Random(0), 120), 4))
    assert all(30 * number <= each < 30 * (number + 1) for number, each in enumerate(at))


@pytest.mark.long
@pytest.mark.timeout(300)  # seconds
def test_a_run_with_a_kill(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    options = (
        "--kills-per-hour 360 --minutes 0.25 --contenders in-place --machines 2 --ranks 1 --servers 1 --kinds rank"
    )
    command = [sys.executable, "-m", "benchmarks.goodput", *options.split(), "--json", str(result)]
    ran = subprocess.run(
        command, cwd=ROOT, env=clean_environment(), timeout=280, check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    calm, killed = json.loads(result.read_text())
    assert (calm["goodput"], calm["kills"]) == (1.0, {})
    assert killed["kills"]["rank"] >= 1
    assert killed["same_bits"]
    assert (killed["samples_lost"], killed["samples_doubled"], killed["bodies_repeated_beyond"]) == (0, 0, 0)
