"""What jobs of many machines cost the scheduler (`bps simulate`), and that costs grow no faster than their number."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from byteps_py.cli.__main__ import main
from byteps_py.errors import UsageError
from byteps_py.scheduler.simulation import ControlPlane, SimulatedJob


def test_each_phase_has_the_messages_that_the_members_send() -> None:
    report = ControlPlane(SimulatedJob(machines=6, cpu_machines=2, ranks_per_machine=4, tensors=3)).run()
    assert report.members == 6 + 2 + 6
    assert [(each.name, each.received) for each in report.costs] == [
        ("register", 14), ("start", 14), ("declare", 6), ("beats", 14 * 5), ("reports", int(14 / 0.4)),
        ("waits", 5 * 5), ("epoch", 0),
    ]  # fmt: skip
    assert report.cost("register").sent == 14 + 14  # a welcome each, and the first membership
    assert report.cost("declare").sent == 6  # the verdicts, once, to each machine
    assert report.cost("epoch").sent == 13  # all but the lost one learn of the new shares


def test_members_of_a_large_job_send_as_many_messages_as_those_of_a_small_one() -> None:
    small, large = (ControlPlane(SimulatedJob(n, 0, 1, 1)).run() for n in (250, 1000))
    assert [each.cost("beats").received for each in (small, large)] == pytest.approx([5 * 500] * 2, abs=1)
    assert small.cost("reports").received == 2.5 * 500
    assert large.cost("reports").received == pytest.approx(2.5 * 1000, abs=1)


def test_where_cpu_machines_are_enough_gpu_machines_have_no_services() -> None:
    assert ControlPlane(SimulatedJob(machines=3, cpu_machines=3, tensors=1)).run().members == 6


def calls(work: Callable[[], object]) -> int:
    """The number of calls of Python functions, which is the same in each run."""
    count = 0

    def on_event(_: FrameType, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def test_a_job_of_four_times_as_many_machines_costs_the_scheduler_four_times_as_much() -> None:
    # Beyond 64 machines, where a report has as many peers as it can have.
    small, large = (calls(ControlPlane(SimulatedJob(machines, machines // 2, tensors=5)).run) for machines in (66, 264))
    assert large < 1.1 * 4 * small


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--machines", "1"], "machines: 1, but at least 2 are needed"),
        (["--machines", "4", "--tensors", "0"], "tensors: 0, but at least 1 are needed"),
        (["--machines", "ten"], "--machines=ten: numbers with commas between them are needed, such as 10,100"),
        (["--machines", "4,8", "--cpu-machines", "1"], "--machines has 2 numbers, --cpu-machines 1"),
    ],
)
def test_numbers_that_make_no_job_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) != 0
    assert message in capsys.readouterr().err


def test_a_machine_without_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="ranks per machine: 0"):
        SimulatedJob(2, ranks_per_machine=0)


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--machines", "2,4", "--tensors", "2"]) == 0
    text = capsys.readouterr().out
    assert "4 GPU machines, 0 CPU machines: 8 members, 32 ranks, 2 tensors" in text
    assert text.count("all machines declare the tensors") == 2
    assert main(["simulate", "--machines", "2", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["members"], report["costs"][0]["name"]) == (4, "register")
