"""Jobs that take their batches from a RunState, die at some place, and go on: real schedulers, servers and ranks."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.breaking import Job, command, environ_of
from support.clusters import ROOT
from support.processes import kill
from support.shadowed_cluster import LAUNCH, ShadowedCluster

PROGRAM = ROOT / "tests" / "programs" / "run_state.py"
EPOCHS, SAMPLES = 3, 36
#: By rank and number of the body.
Bodies = dict[tuple[int, int], str]


def bodies(jobs: list[Job]) -> Bodies:
    text = "\n".join(job.text for job in jobs)
    return {
        (int(rank), int(body)): facts for rank, body, facts in re.findall(r"rank (\d+) of \d+ body (\d+): (.*)", text)
    }


def undisturbed(kind: str) -> Bodies:
    words = ["-np", "1", "--machines", "2", "--servers", "1"]
    with command(*LAUNCH, *words, sys.executable, str(PROGRAM), kind, str(EPOCHS)) as job:
        assert job.end() == 0, job.text
        return bodies([job])


def die(cluster: ShadowedCluster, kind: str, place: str, epoch: int, batch: int, held: int) -> Bodies:
    """All machines do, at this place, once step ``held`` is held. Returns what they have done."""
    scheduler, *machines = cluster.start(kind, str(EPOCHS), place, str(epoch), str(batch))
    for rank, machine in enumerate(machines):
        machine.until(f"rank {rank} waits")
    assert cluster.held_step(held) == held
    for machine in machines:
        machine.close()
    assert scheduler.end() == 1
    return bodies(machines)


def cluster_for(stack: contextlib.ExitStack, **variables: str) -> ShadowedCluster:
    cluster = ShadowedCluster(stack, 2, 1, **variables)
    cluster.program = PROGRAM
    return cluster


def go_on(cluster: ShadowedCluster, kind: str) -> Bodies:
    jobs = cluster.start(kind, str(EPOCHS))
    for job in jobs:
        assert job.end() == 0, job.text
    return bodies(jobs[1:])


@pytest.mark.parametrize(
    ("kind", "place", "epoch", "batch", "held", "begins"),
    [
        pytest.param("shuffled", "body", 1, 3, 10, 12, marks=pytest.mark.slow),
        pytest.param("shuffled", "body", 0, 5, 3, 5, marks=pytest.mark.long),
        pytest.param("in-backward", "body", 1, 3, 11, 12, marks=pytest.mark.long),
        pytest.param("workers", "body", 1, 4, 11, 13, marks=pytest.mark.long),
        pytest.param("distributed", "before", 1, 1, 4, 6, marks=pytest.mark.long),
        pytest.param("accumulated", "end", 1, 0, 4, 11, marks=pytest.mark.long),
        pytest.param("elastic", "body", 1, 3, 7, 9, marks=pytest.mark.long),
        pytest.param("stateful", "end", 0, 0, 3, 5, marks=pytest.mark.slow),
        pytest.param("stateful-shuffled", "before", 1, 1, 8, 10, marks=pytest.mark.long),
    ],
)
def test_a_job_that_dies_goes_on_as_if_it_had_not(
    kind: str, place: str, epoch: int, batch: int, held: int, begins: int
) -> None:
    """``held``: the step, one less than the body where the third one's gradients overflow. ``begins``: the body that
    the restarted job begins with."""
    expected = undisturbed(kind)
    with contextlib.ExitStack() as stack:
        cluster = cluster_for(stack)
        before = die(cluster, kind, place, epoch, batch, held)
        after = go_on(cluster, kind)
    assert before == {place: facts for place, facts in expected.items() if place in before}
    assert after == {place: facts for place, facts in expected.items() if place[1] >= begins}


@pytest.mark.slow
def test_a_job_goes_on_from_a_checkpoint_that_servers_have_written(tmp_path: Path) -> None:
    expected = undisturbed("shuffled")
    with contextlib.ExitStack() as stack:
        cluster = cluster_for(stack)
        _, *machines = cluster.start("shuffled", str(EPOCHS), "body", "1", "3")
        for rank, machine in enumerate(machines):
            machine.until(f"rank {rank} waits")
        assert cluster.held_step(10) == 10
        cluster.bps("checkpoint", str(tmp_path))
    with contextlib.ExitStack() as stack:  # other servers, which hold nothing
        after = go_on(cluster_for(stack, CHECKPOINTS=str(tmp_path)), "shuffled")
    assert after == {place: facts for place, facts in expected.items() if place[1] >= 12}


@pytest.mark.slow
def test_other_numbers_of_ranks_use_each_sample_once() -> None:
    with contextlib.ExitStack() as stack:
        cluster = cluster_for(stack)
        before = die(cluster, "elastic", "body", 1, 3, 7)
        cluster.change(BYTEPS_LOCAL_SIZE="2")
        after = go_on(cluster, "elastic")
    begins = min(body for _, body in after)
    assert begins == 9
    assert {rank for rank, _ in after} == {0, 1, 2, 3}
    found: list[str] = []
    for body in range(1, max(body for _, body in after) + 1):
        for (_, number), facts in (before if body < begins else after).items():
            if number == body:
                found += facts.split()[1].split(",")
    for epoch in range(EPOCHS):
        assert set(Counter(found[epoch * SAMPLES : (epoch + 1) * SAMPLES]).values()) == {1}
    assert len(found) == EPOCHS * SAMPLES


@pytest.mark.slow
def test_an_elastic_job_that_loses_a_machine_uses_each_sample() -> None:
    """In processes that live on. Where ranks do not divide the rest of an epoch evenly, some samples occur twice."""
    epochs = 12
    words = ["--elastic", "-np", "1", "--machines", "3", "--servers", "1"]
    with command(*LAUNCH, *words, sys.executable, str(PROGRAM), "elastic-job", str(epochs)) as job:
        job.until(*(f"rank {rank} of 3 body 10:" for rank in range(3)))
        for pid in job.pids():
            if environ_of(pid).get("BYTEPS_MACHINE_ID") == "m2":
                kill(pid)
        assert job.end() == 0, job.text
    found = re.findall(r"rank (\d) of (\d) body (\d+): samples (\S+) .* (\S+) \S+ \S+$", job.text, re.MULTILINE)
    begins = min(int(body) for _, size, body, *_ in found if size == "2")
    counted = [(int(body), samples.split(",")) for _, size, body, samples, _ in found
               if size == "2" or int(body) < begins]  # fmt: skip
    assert begins > 10
    assert {size for _, size, *_ in found} == {"2", "3"}
    order = [sample for _, samples in sorted(counted, key=lambda each: each[0]) for sample in samples]
    assert len(order) in (epochs * SAMPLES, epochs * SAMPLES + 1)
    assert set(Counter(order).values()) <= {epochs, epochs + 1}
