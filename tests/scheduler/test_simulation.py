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
from byteps_py.scheduler.simulation import DAY_S, ControlPlane, MonthOptions, SimulatedJob, month_goodput


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


def quiet(**changes: float) -> MonthOptions:
    """Nothing happens but what is asked for."""
    never = {"lost_days": 1e9, "slow_link_days": 1e9, "slow_processor_days": 1e9}
    return MonthOptions(100, **{**never, **changes})  # type: ignore[arg-type]


def test_each_trouble_costs_what_it_takes() -> None:
    calm, other = month_goodput(quiet())
    assert (calm.share, calm.losses) == (1.0, 0)
    assert other.share == pytest.approx(1.0, abs=1e-3)  # a checkpoint now and then
    lost, other = month_goodput(quiet(lost_days=10.0))
    assert lost.losses == pytest.approx(300, rel=0.2)
    assert lost.lost["stopped"] == pytest.approx(lost.losses * (1 + 7) / (30 * DAY_S), rel=0.02)
    assert lost.lost["repeated"] == pytest.approx(lost.losses * 5 / (30 * DAY_S), rel=0.2)  # half a step
    assert other.lost["stopped"] == pytest.approx(other.losses * (1 + 600) / (30 * DAY_S), rel=0.1)
    assert other.lost["checkpoints"] == pytest.approx(other.lost["repeated"], rel=0.2)  # as Young's interval makes it


def test_shares_follow_slow_links_and_no_slow_processors() -> None:
    ours, other = month_goodput(quiet(slow_link_days=100.0, exposed=0.5))
    assert ours.lost["slowed down"] < 0.25 * other.lost["slowed down"]
    ours, other = month_goodput(quiet(slow_processor_days=100.0))
    assert ours.lost["slowed down"] == pytest.approx(other.lost["slowed down"], rel=1e-2)


@pytest.mark.parametrize("seed", range(3))
def test_the_parts_of_a_month_add_up(seed: int) -> None:
    for one in month_goodput(MonthOptions(500, 250, seed=seed)):
        assert one.share + sum(one.lost.values()) == pytest.approx(1.0)
    assert month_goodput(MonthOptions(500, seed=seed)) == month_goodput(MonthOptions(500, seed=seed))


def test_the_command_shows_goodput(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--machines", "10,100", "--days", "30"]) == 0
    text = capsys.readouterr().out
    assert "100 GPU machines, 0 CPU machines: " in text
    assert text.count("back to checkpoints") == 2
    assert main(["simulate", "--machines", "10", "--days", "2", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["byteps"]["share"] >= found["checkpoints"]["share"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--machines", "4", "--days", "0"], "days: 0.0: a number above 0 is needed"),
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
