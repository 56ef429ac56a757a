"""Asynchronous training in real processes: the changes of all machines are there, each once, whatever happens to the
servers; and in a known order, the bits are those of one process."""

from __future__ import annotations

import os
import signal

import pytest
from jobs.test_recovery import Fault, kill_all, kill_and_return, nothing, servers, signal_to, train
from support.breaking import elastic_machines, launch
from support.clusters import ROOT

PROGRAM = str(ROOT / "tests" / "programs" / "async_training.py")
OPTIONS = "-np 1 --machines 2 --servers 1"


def said(*words: str, options: str = OPTIONS, **environ: str) -> list[str]:
    """All lines of the ranks, sorted."""
    with launch(options, *words, program=PROGRAM, **environ) as job:
        assert job.end() == 0, job.text
    return sorted(job.of_ranks)


def test_machines_that_step_in_turn_have_the_bits_of_one_process() -> None:
    lines = said("in_turn")
    assert len(lines) == 10
    assert all(line.endswith(": True") for line in lines), lines


def test_a_fast_machine_does_not_wait_for_a_slow_one() -> None:
    lines = said("fast_and_slow", BYTEPS_ENABLE_ASYNC="1")
    assert [line.removeprefix("[0] ").removeprefix("[1] ") for line in lines] == ["SGD: {203.0}"] * 2


def test_what_is_wrong_is_named_and_goes_to_nobody() -> None:
    lines = said("broken", BYTEPS_NONFINITE="raise")
    for text in ("unchanged: True", "loaded: [[3.0, 3.0]]", "changed: [[4.0, 4.0]]"):
        assert sum(line.endswith(text) for line in lines) == 2, lines
    (nan,) = [line for line in lines if "NaN" in line]
    assert "NonFiniteError: NaN or infinity from rank 1, step 2: in the gradients of 'weight' (1 of 2 values" in nan
    assert sum("staleness 2, rank 1 gave accumulate of float64[3], staleness 3" in line for line in lines) == 2
    assert sum("AsyncOptimizer: parameters were changed between two steps" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("options", "changed"),
    [("-np 2", "[9.0, 9.0, 9.0]"), ("-np 1", "[3.0, 3.0, 3.0]")],
    ids=["one machine", "one rank"],
)
def test_the_ranks_of_one_machine_step_together(options: str, changed: str) -> None:
    assert {line.partition("changed: ")[2] for line in said("alone", options=options)} == {changed}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("options", "faults"),
    [
        (OPTIONS, [nothing, kill_and_return("--gpu-machine"), nothing]),
        pytest.param(
            "-np 2 --machines 2 --servers 1", [nothing, kill_and_return(), nothing], marks=pytest.mark.slow
        ),
        pytest.param(
            OPTIONS, [nothing, kill_all, signal_to(signal.SIGTERM, "--gpu-machine"), nothing], marks=pytest.mark.slow
        ),
    ],
    ids=["a machine's own", "several ranks on a machine", "all at once, and one leaves"],
)  # fmt: skip
def test_servers_die_and_each_change_counts_once(options: str, faults: list[Fault]) -> None:
    """The program compares: each rank with its own changes after each step, and all with all at the end."""
    environ = {"BYTEPS_PARTITION_BYTES": "16384"}
    with launch(options, "stretches", str(len(faults)), "20", program=PROGRAM, **environ) as job:
        digests = train(job, faults)
    assert len(digests) == 1, job.text
    assert job.text.count("digest") == (4 if "-np 2" in options else 2)


@pytest.mark.slow
def test_an_elastic_job_goes_on_from_its_last_commit() -> None:
    options = "-np 1 --machines 3 --servers 1 --elastic --min-np 2"
    lines = said("in_an_elastic_job", "30", options=options)
    assert sum(line.endswith("2 ranks, whole changes: True") for line in lines) == 2, lines


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_newcomer_of_an_elastic_job_begins_with_the_others_parameters() -> None:
    with elastic_machines("with_a_newcomer", "20", program=PROGRAM) as machine:
        jobs = [machine(index) for index in range(3)]
        jobs[0].until("of 3 goes on from step 0")
        jobs[2].close()
        jobs[0].until("of 2 goes on from step")
        new = machine(7, IS_NEW="1")
        for job in (jobs[0], jobs[1], new):
            job.until("3 ranks, whole changes: True")
            assert job.end() == 0, job.text


@pytest.mark.slow
def test_a_server_that_was_frozen_and_given_up_changes_nothing() -> None:
    def freeze_and_wake(job: object) -> None:
        victim = servers(job)[0]  # type: ignore[arg-type]
        os.kill(victim, signal.SIGSTOP)
        job.until("nothing was heard of it for")  # type: ignore[attr-defined]
        os.kill(victim, signal.SIGCONT)
        job.until("has joined")  # type: ignore[attr-defined]

    with launch(OPTIONS, "stretches", "3", "20", program=PROGRAM, BYTEPS_PARTITION_BYTES="16384") as job:
        digests = train(job, [nothing, freeze_and_wake, nothing])
    assert len(digests) == 1, job.text
