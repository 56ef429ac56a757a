"""Ranks, services and machines that are killed are started again, and the others wait for them in their step. Real
processes: every bit is that of a run without a loss, and a rank that was not killed keeps its process.
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
from support.documents import Page, commands_of
from support.shadowed_cluster import ShadowedCluster

PROGRAM = ROOT / "tests" / "programs" / "in_place.py"
STEPS = 12
LAYOUT = "-np 2 --machines 2 --servers 1"
pytestmark = pytest.mark.timeout(300)  # seconds


@contextlib.contextmanager
def training(folder: Path, options: str = "--max-restarts 5", layout: str = LAYOUT, **variables: str) -> Iterator[Job]:
    with launch(f"{options} {layout}", str(folder), str(STEPS), program=PROGRAM, limit_s=250, **variables) as job:
        yield job


def ends(job: Job) -> list[str]:
    """What each rank says at the end, in order."""
    assert job.end() == 0, job.text
    found = sorted(line.partition("rank ")[2] for line in job.said if " ends: " in line)
    assert len(found) == 4, job.text
    return found


def begun(job: Job) -> dict[int, list[tuple[int, int]]]:
    """Of each rank, the steps at which it has begun, and the process."""
    found: dict[int, list[tuple[int, int]]] = {}
    for rank, step, pid in re.findall(r"rank (\d+) begins at step (\d+) \(process (\d+)\)", job.text):
        found.setdefault(int(rank), []).append((int(step), int(pid)))
    return found


@functools.cache
def undisturbed(**variables: str) -> tuple[str, ...]:
    """What the ranks of a run without a loss say at the end."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(contextlib.nullcontext(Path("nowhere")))
        job = stack.enter_context(training(folder, options="", **variables))
        return tuple(ends(job))


VARIANTS = {
    "plain": {},
    "scaler": {"TEST_SCALER": "1"},
    "scaler and clip": {"TEST_SCALER": "1", "TEST_CLIP": "1"},
    "run": {"TEST_RUN": "1"},
    "run, scaler and clip": {"TEST_RUN": "1", "TEST_SCALER": "1", "TEST_CLIP": "1"},
    "in backward": {"TEST_IN_BACKWARD": "1"},
    "int8": {"TEST_INT8": "1", "BYTEPS_MIN_COMPRESS_BYTES": "0"},
}
KILLS = {
    "forward": "1:5:forward",
    "backward": "2:6:backward",
    "step": "3:7:step",
    "after": "0:5:after",
    "two at once": "0:6:step 3:6:step",
    "a machine's ranks": "2:5:forward 3:5:step",
    "one after the other": "1:4:step 2:5:step 1:6:backward",
    "all": "0:6:step 1:6:forward 2:6:after 3:6:backward",
    "again and again": "1:4:forward 1:5:forward 1:6:forward",
}
SLOW, LONG = pytest.mark.slow, pytest.mark.long
IN_SLOW: dict[str, tuple[str, ...]] = {"plain": ("all",), "run": ()}


@pytest.mark.parametrize(
    ("variant", "kills"),
    [
        ("plain", "one after the other"),
        *(
            pytest.param(variant, kills, marks=SLOW if kills in slow else LONG)
            for variant, slow in IN_SLOW.items()
            for kills in KILLS
            if (variant, kills) != ("plain", "one after the other")
        ),
        pytest.param("in backward", "backward", marks=SLOW),
        pytest.param("int8", "backward", marks=SLOW),
        *(pytest.param("int8", kills, marks=LONG) for kills in ("step", "a machine's ranks")),
        *(pytest.param("in backward", kills, marks=LONG) for kills in ("step", "after")),
    ],
)
def test_ranks_are_killed(variant: str, kills: str, tmp_path: Path) -> None:
    with training(tmp_path, TEST_KILLS=KILLS[kills], **VARIANTS[variant]) as job:
        assert tuple(ends(job)) == undisturbed(**VARIANTS[variant]), job.text
    if kills != "all":
        deaths = [int(each.partition(":")[0]) for each in KILLS[kills].split()]
        assert {rank: len(times) - 1 for rank, times in begun(job).items() if len(times) > 1} == Counter(deaths), (
            job.text
        )


@pytest.mark.long
def test_a_rank_is_killed_in_the_job_of_the_page(tmp_path: Path) -> None:
    [(line, _)] = commands_of(Page(ROOT / "docs" / "howto" / "never-lose-a-step.md").blocks_after("in place")[0])
    words = line.split()
    assert (words[0], *words[-2:]) == ("bpslaunch", "python", "train.py")
    found = []
    for kills in ("", "5:5:step"):
        with launch(" ".join(words[1:-2]), str(tmp_path), str(STEPS), program=PROGRAM, TEST_KILLS=kills) as job:
            assert job.end() == 0, job.text
        found.append(sorted(line.partition("rank ")[2] for line in job.said if " ends: " in line))
    assert len(found[0]) == 8
    assert found[0] == found[1], job.text


@pytest.mark.parametrize(
    ("variant", "kills"),
    [
        # In calls 3 and 4, no rank makes a step.
        pytest.param("scaler", "1:4:step", marks=LONG),
        pytest.param("scaler", "0:3:after", marks=LONG),
        pytest.param("scaler", "2:5:step", marks=LONG),
        pytest.param("scaler", "3:5:backward 1:6:step", marks=LONG),
        pytest.param("scaler and clip", "2:5:clip", marks=LONG),
        pytest.param("scaler and clip", "1:4:clip", marks=LONG),
        pytest.param("scaler and clip", "0:8:step", marks=LONG),
        pytest.param("run, scaler and clip", "1:4:after", marks=LONG),
        pytest.param("run, scaler and clip", "2:5:after", marks=LONG),
        pytest.param("run, scaler and clip", "0:6:clip 1:7:after", marks=SLOW),
    ],
)
def test_calls_that_make_no_step_are_not_made_again(variant: str, kills: str, tmp_path: Path) -> None:
    with training(tmp_path, TEST_KILLS=kills, **VARIANTS[variant]) as job:
        assert tuple(ends(job)) == undisturbed(**VARIANTS[variant]), job.text


@pytest.mark.parametrize(
    ("victims", "machine"),
    [
        pytest.param(("byteps_py.worker",), "m1", marks=SLOW),
        pytest.param(("byteps_py.worker",), "m0", marks=LONG),
        pytest.param(("byteps_py.server",), "m0", marks=LONG),
        pytest.param(("byteps_py.scheduler",), "m0", marks=LONG),
        pytest.param(("byteps_py.worker", "byteps_py.server", str(PROGRAM)), "m1", marks=SLOW),
        pytest.param(("byteps_py.worker", "byteps_py.server", str(PROGRAM)), "m0", marks=LONG),
    ],
)
def test_services_and_machines_are_killed(victims: tuple[str, ...], machine: str, tmp_path: Path) -> None:
    with training(tmp_path, TEST_PAUSE_S="0.5") as job:
        job.until("rank 0: step 4")
        of_machine = [pid for word in victims for pid in job.pids_of(word, BYTEPS_MACHINE_ID=machine)]
        assert len(of_machine) >= len(victims)
        for pid in of_machine:
            os.kill(pid, signal.SIGKILL)
        assert tuple(ends(job)) == undisturbed(), job.text
    if str(PROGRAM) not in victims:
        assert all(len(times) == 1 for times in begun(job).values()), job.text


@pytest.mark.long
def test_a_rank_that_was_started_again_is_told_what_nobody_answers(tmp_path: Path) -> None:
    with training(tmp_path, options="--max-restarts 1", TEST_KILLS="1:4:step", TEST_PRELUDE="1") as job:
        assert job.end() == 1
    assert "no rank answers an operation before bps.restore()" in job.text


@pytest.mark.long
def test_ranks_with_something_that_was_not_sent_begin_again_together(tmp_path: Path) -> None:
    owed = {"TEST_OWED": "1", "BYTEPS_MIN_COMPRESS_BYTES": "0"}
    with training(tmp_path, TEST_KILLS="1:6:step", **owed) as job:
        assert tuple(ends(job)) == undisturbed(), job.text
        assert "because what tensor 'owed' with compression topk of" in job.text


@pytest.mark.slow
def test_ranks_that_have_summed_more_begin_again_together(tmp_path: Path) -> None:
    """A sum after the step, which the rank that was killed took part in, or not: nobody can say it twice, so all ranks
    are started again."""
    with training(tmp_path, TEST_KILLS="1:6:after", TEST_METRIC="1") as job:
        assert tuple(ends(job)) == undisturbed(), job.text


@pytest.mark.parametrize(
    ("kills", "variables"),
    [
        pytest.param("1:6:after 0:8:backward", {"TEST_RUN": "1"}, marks=SLOW),
        pytest.param("3:6:step", {}, marks=LONG),
    ],
)
def test_groups_of_torch_begin_anew_in_place(kills: str, variables: dict[str, str], tmp_path: Path) -> None:
    with training(tmp_path, TEST_KILLS=kills, TEST_GROUPS="1", **variables) as job:
        assert tuple(ends(job)) == undisturbed(**variables), job.text
    deaths = Counter(int(each.partition(":")[0]) for each in kills.split())
    assert {rank: len(times) - 1 for rank, times in begun(job).items() if len(times) > 1} == deaths, job.text


@pytest.mark.parametrize(
    ("kills", "variables"),
    [
        pytest.param("1:6:metric 0:8:backward", {"TEST_GROUPS": "1", "TEST_GROUP_METRIC": "1"}, marks=SLOW),
        pytest.param("1:6:evaluation 0:12:evaluation", {"TEST_EPOCHS": "1"}, marks=LONG),
        pytest.param("1:6:backward 1:8:after", {"TEST_METRIC": "1", "TEST_CLIP": "1"}, marks=LONG),
        pytest.param("0:3:after 1:4:clip", {"TEST_SCALER": "1", "TEST_CLIP": "1", "TEST_METRIC": "1"}, marks=LONG),
    ],
)
def test_functions_that_are_retried_compute_by_operations_of_their_own(
    kills: str, variables: dict[str, str], tmp_path: Path
) -> None:
    own = {each: "1" for each in variables if each in ("TEST_CLIP", "TEST_SCALER")}
    with training(tmp_path, TEST_KILLS=kills, TEST_RUN="1", TEST_RETRY="1", **variables) as job:
        assert tuple(ends(job)) == undisturbed(TEST_RUN="1", **own), job.text
    deaths = Counter(int(each.partition(":")[0]) for each in kills.split())
    assert {rank: len(times) - 1 for rank, times in begun(job).items() if len(times) > 1} == deaths, job.text


@pytest.mark.long
def test_ranks_that_compute_by_groups_of_torch_begin_again_together(tmp_path: Path) -> None:
    variables = {"TEST_GROUPS": "1", "TEST_GROUP_METRIC": "1", "TEST_RUN": "1"}
    with training(tmp_path, TEST_KILLS="1:6:metric", **variables) as job:
        assert tuple(ends(job)) == undisturbed(TEST_RUN="1"), job.text
    assert "the script has called operations of torch.distributed since the step before" in job.text
    assert all(len(times) == 2 for times in begun(job).values()), job.text


@pytest.mark.parametrize("lost", [pytest.param(0, marks=LONG), pytest.param(1, marks=SLOW)])
def test_a_spare_machine_takes_the_place_of_one_that_is_lost(lost: int, tmp_path: Path) -> None:
    """Its launcher is killed, and with it all that it has started."""
    with contextlib.ExitStack() as stack:
        variables = {"BYTEPS_MAX_RESTARTS": "5", "BYTEPS_LOCAL_SIZE": "2", "TEST_PAUSE_S": "0.5"}
        cluster = ShadowedCluster(stack, 2, 1, limit_s=250, **variables)
        cluster.program = PROGRAM
        arguments = (str(tmp_path), str(STEPS))
        scheduler, *machines = cluster.start(*arguments)
        spare = cluster.start_spare("spare", *arguments)
        spare.until("a spare machine of the job")
        machines[lost].until(f"rank {2 * lost}: step 4")
        machines[lost].process.kill()
        machines[lost].close()
        spare.until(f"machine {lost} is lost: this one takes its place")
        jobs = [scheduler, machines[1 - lost], spare]
        assert [job.end() for job in jobs] == [0, 0, 0], "\n".join(job.text for job in jobs)
        found = sorted(line for job in jobs for line in job.said if " ends: " in line)
        assert tuple(line.partition("rank ")[2] for line in found) == undisturbed()


@pytest.mark.long
def test_ranks_that_fail_each_time_end_the_job(tmp_path: Path) -> None:
    kills = " ".join(f"2:{call}:step" for call in range(3, 9))
    with training(tmp_path, options="--max-restarts 2", TEST_KILLS=kills) as job:
        assert job.end() == 137
    assert "starting it again (2 of at most 2 times)" in job.text
