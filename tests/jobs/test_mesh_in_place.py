"""Ranks with parts of a model that are killed are started again, and the others make the step under way again with them
(programs/mesh_in_place.py). Real processes: every bit is that of a run without a loss, and a rank that was not killed
keeps its process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.breaking import Job, launch
from support.clusters import ROOT

PROGRAM = ROOT / "tests" / "programs" / "mesh_in_place.py"
STEPS = 8
MACHINES = "-np 2 --machines 2 --servers 1"
SLOW, LONG = pytest.mark.slow, pytest.mark.long
pytestmark = pytest.mark.timeout(300)  # seconds


@contextlib.contextmanager
def training(
    folder: Path, layout: str, options: str = "--max-restarts 6", machines: str = MACHINES, **variables: str
) -> Iterator[Job]:
    words = f"{options} --no-tag-output {machines}"
    with launch(words, str(folder), layout, str(STEPS), program=PROGRAM, limit_s=250, **variables) as job:
        yield job


def ends(job: Job) -> dict[int, str]:
    """What each rank says at the end, without its process."""
    assert job.end() == 0, job.text
    found = {int(rank): said for rank, said in re.findall(r"rank (\d+) ends: (.*) \(process", job.text)}
    assert len(found) >= 4, job.text
    return found


def processes(job: Job) -> dict[int, list[int]]:
    """Of each rank, those that have begun to train."""
    found: dict[int, list[int]] = {}
    for rank, pid in re.findall(r"rank (\d+) begins at step \d+ \(process (\d+)\)", job.text):
        found.setdefault(int(rank), []).append(int(pid))
    return found


def lost(kills: str) -> Counter[int]:
    return Counter(int(each.partition(":")[0]) for each in kills.split() if ":again:" not in each)


@functools.cache
def undisturbed(layout: str, machines: str = MACHINES, **variables: str) -> dict[int, str]:
    with training(Path("nowhere"), layout, "", machines, **variables) as job:
        return ends(job)


VARIANTS = {
    "run": {},
    "by hand": {"TEST_BY_HAND": "1"},
    "float16": {"TEST_FLOAT16": "1"},
    "overflow": {"TEST_FLOAT16": "1", "TEST_OVERFLOW": "5"},
    "overflow, by hand": {"TEST_FLOAT16": "1", "TEST_OVERFLOW": "5", "TEST_BY_HAND": "1"},
    "retry": {"TEST_RETRY": "1", "TEST_EVALUATE": "1"},
    "evaluation": {"TEST_EVALUATE": "1"},
    "int8": {"TEST_INT8": "1", "BYTEPS_MIN_COMPRESS_BYTES": "0"},
}


@pytest.mark.parametrize(
    ("layout", "variant", "kills"),
    [
        ("1x1x2x2", "run", "1:5:backward"),
        pytest.param("2x1x1x2", "run", "2:5:forward 1:6:after", marks=SLOW),
        pytest.param("2x1x2x1", "by hand", "0:5:step", marks=SLOW),
        pytest.param("1x1x2x2", "overflow", "3:6:step", marks=SLOW),
        pytest.param("2x1x2x1", "evaluation", "1:5:evaluation", marks=SLOW),
        pytest.param("2x1x2x1", "retry", "1:5:step 2:6:evaluation", marks=SLOW),
        pytest.param("2x1x1x2", "retry", "3:5:backward 0:6:after", marks=LONG),
        pytest.param("1x1x2x2", "float16", "3:6:step 0:7:after", marks=LONG),
        pytest.param("2x1x1x2", "overflow", "1:5:after 2:6:backward", marks=LONG),
        pytest.param("1x1x2x2", "overflow, by hand", "1:5:step 2:6:forward", marks=LONG),
        pytest.param("1x1x1x4", "evaluation", "1:5:step 2:6:evaluation", marks=LONG),
        pytest.param("1x2x2x1::llama", "run", "2:4:backward", marks=LONG),
        pytest.param("1x1x2x2", "run", "0:4:after 0:6:forward", marks=LONG),
        pytest.param("1x1x2x2", "run", "2:5:forward 3:5:step", marks=LONG),
        pytest.param("1x1x2x2", "run", "1:5:step 1:again:mesh", marks=LONG),
        pytest.param("1x1x2x2", "run", "0:5:backward 0:again:mesh", marks=LONG),
        pytest.param("2x1x2x1", "run", "1:5:after 1:again:restore 2:6:forward", marks=LONG),
        pytest.param("2x1x1x2", "by hand", "3:5:after", marks=LONG),
        pytest.param("2x1x1x2:::sharded", "run", "3:5:backward", marks=LONG),
        pytest.param("1x1x2x2:::machine", "run", "0:5:step", marks=LONG),
        pytest.param("1x1x1x4", "run", "1:5:forward", marks=LONG),
        pytest.param("1x1x2x2", "int8", "2:5:backward 1:6:after", marks=LONG),
        pytest.param("2x2x1x1::llama", "run", "3:5:after", marks=LONG),
        pytest.param("1x2x1x2::llama", "by hand", "1:5:step", marks=LONG),
        pytest.param("2x1x2x1:gpipe:llama", "run", "2:5:backward", marks=LONG),
        *(
            pytest.param(f"1x1x2x2:{schedule}", "run", "1:5:backward 2:6:after", marks=LONG)
            for schedule in ("gpipe", "interleaved", "chimera", "gems", "zero-bubble", "zb-v", "dualpipev")
        ),
    ],
)
def test_ranks_are_killed(layout: str, variant: str, kills: str, tmp_path: Path) -> None:
    with training(tmp_path, layout, TEST_KILLS=kills, **VARIANTS[variant]) as job:
        assert ends(job) == undisturbed(layout, **VARIANTS[variant]), job.text
    assert not re.search(r"step \d+: nan", job.text), job.text
    assert {rank: len(all_) - 1 for rank, all_ in processes(job).items() if len(all_) > 1} == lost(kills), job.text
    last = {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d+) ends: .* \(process (\d+)\)", job.text)}
    assert last == {rank: all_[-1] for rank, all_ in processes(job).items()}


@pytest.mark.parametrize("words", [("byteps_py.worker",), ("byteps_py.worker", "byteps_py.server", str(PROGRAM))])
@pytest.mark.long
def test_services_and_machines_are_killed(words: tuple[str, ...], tmp_path: Path) -> None:
    with training(tmp_path, "2x1x2x1", TEST_PAUSE_S="0.5") as job:
        job.until("rank 0: step 4")
        for pid in [pid for word in words for pid in job.pids_of(word, BYTEPS_MACHINE_ID="m1")]:
            os.kill(pid, signal.SIGKILL)
        assert ends(job) == undisturbed("2x1x2x1"), job.text
    begun = processes(job)
    assert {rank for rank, all_ in begun.items() if len(all_) > 1} == ({2, 3} if len(words) > 1 else set()), job.text


@pytest.mark.long
def test_eight_ranks_of_three_dimensions(tmp_path: Path) -> None:
    machines, layout = "-np 4 --machines 2 --servers 1", "2x1x2x2::llama"
    with training(tmp_path, layout, machines=machines, TEST_KILLS="5:5:backward 2:6:after") as job:
        assert ends(job) == undisturbed(layout, machines), job.text
    assert {rank: len(all_) - 1 for rank, all_ in processes(job).items() if len(all_) > 1} == {5: 1, 2: 1}, job.text


@pytest.mark.slow
def test_all_ranks_are_started_again_where_a_step_cannot_be_made_in_place(tmp_path: Path) -> None:
    with training(tmp_path, "1x1x2x2", TEST_KILLS="1:6:step", TEST_LATE_GROUP="1") as job:
        assert ends(job) == undisturbed("1x1x2x2", TEST_LATE_GROUP="1"), job.text
    assert "a step can't be made again in place: a group was made after the first step" in job.text
    assert all(len(all_) == 2 for all_ in processes(job).values()), job.text
