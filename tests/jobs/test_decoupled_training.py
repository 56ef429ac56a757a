"""bps.local.DecoupledDiLoCo in real processes: with machines in step it is DiLoCo, a slow one holds up nobody, a lost
one costs the others no step, and a run is repeated bit for bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.breaking import elastic_machines, launch
from support.clusters import ROOT

PROGRAM = str(ROOT / "tests" / "programs" / "decoupled.py")
OPTIONS = "-np 1 --machines 2 --servers 1"
ALL_CODED = {"BYTEPS_MIN_COMPRESS_BYTES": "0"}


def said(*words: str, options: str = OPTIONS, **environ: str) -> list[str]:
    """All lines of the ranks, sorted."""
    with launch(options, *words, program=PROGRAM, **environ) as job:
        assert job.end() == 0, job.text
    return sorted(job.of_ranks)


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        pytest.param("-np 2 --machines 2 --servers 1", marks=pytest.mark.slow),
        pytest.param("-np 2", marks=pytest.mark.long),
    ],
    ids=["two machines", "two ranks on each", "one machine"],
)
def test_with_all_machines_in_step_it_is_diloco(options: str) -> None:
    lines = said("in_step", options=options)
    assert len(lines) >= 6
    assert all(line.endswith(": True, equal: True") for line in lines), lines


def test_a_slow_machine_holds_up_nobody_and_its_change_counts() -> None:
    lines = said("slow")
    assert lines == ["and then: 16.000, equal: True"] * 2 + ["changed: 13.000, equal: True"] * 2


@pytest.mark.slow
def test_each_rank_loads_its_own_state() -> None:
    assert said("states") == ["resumed: True, 13"] * 2


@pytest.mark.parametrize("kind", ["topk", pytest.param("int8", marks=pytest.mark.slow)])
def test_changes_travel_compressed(kind: str) -> None:
    assert said("coded", kind, **ALL_CODED) == [f"{kind}: equal: True, near: True"] * 2


@pytest.mark.slow
def test_what_was_not_sent_is_in_the_state_of_a_rank() -> None:
    assert said("coded_states", **ALL_CODED) == ["errors: True, resumed: True, equal: True"] * 2


@pytest.mark.slow
def test_what_is_wrong_is_named_on_its_rank_and_goes_to_nobody() -> None:
    lines = said("wrong", BYTEPS_NONFINITE="raise")
    (nan,) = [line for line in lines if "NaN" in line]
    assert "NonFiniteError: NaN or infinity from rank 1, step 6: in the changes that DecoupledDiLoCo combines of" in nan
    assert {line for line in lines if line.startswith("finite")} == {"finite: True", "finite: False"}
    assert sum("UsageError: DiLoCo: the state_dict has fragments" in line for line in lines) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "topk"])
def test_a_run_is_repeated_bit_for_bit(kind: str, tmp_path: Path) -> None:
    found = []
    for variable in ("BYTEPS_RECORD_ARRIVALS", "BYTEPS_REPLAY_ARRIVALS"):
        environ = {variable: str(tmp_path), **ALL_CODED}
        with launch(OPTIONS, "noisy", "40", *[kind] * bool(kind), program=PROGRAM, **environ) as job:
            assert job.end() == 0, job.text
        found.append(re.findall(r"rank (\d): (\w{64})", job.text))
    assert len(found[0]) == 2
    assert sorted(found[0]) == sorted(found[1])


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["diloco", "decoupled"])
def test_a_lost_machine_costs_the_others_no_step_and_comes_back(kind: str) -> None:
    with elastic_machines("elastic", kind, program=PROGRAM) as machine:
        jobs = [machine(index) for index in range(3)]
        jobs[0].until("of 3 goes on from step 0")
        jobs[2].close()
        survivor = step_of(jobs[0].until("of 2 goes on from step"))
        new = machine(7, IS_NEW="1")
        last = [step_of(job.until("of 3 goes on from step")) for job in (jobs[0], new)]
        assert last[1] >= last[0] >= survivor  # the new rank counts on from the rank that has made most
        for job in (jobs[0], jobs[1], new):
            job.until(f"3 ranks ended, trained alone: {job is not new}, equal: True")
            assert job.end() == 0, job.text


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["decoupled", "diloco"])
def test_what_was_not_sent_goes_on_when_ranks_form_anew(kind: str) -> None:
    with elastic_machines("elastic_errors", kind, program=PROGRAM) as machine:
        jobs = [*(machine(index, **ALL_CODED) for index in range(2)), machine(2, IS_NEW="1", **ALL_CODED)]
        for job in jobs:
            job.until("has learned")
        jobs[2].close()
        for job in jobs[:2]:
            job.until("owes: True")
            line = job.until("equal: True")
            assert kind == "diloco" or line.endswith("nothing is missing: True"), line
            assert job.end() == 0, job.text


def step_of(line: str) -> int:
    return int(line.rpartition(" ")[2])
