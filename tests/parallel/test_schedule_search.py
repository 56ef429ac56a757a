"""The search for the shortest order: beside all orders, in small cases; within the memory of workers; trained with."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator

import pytest
from support.breaking import command
from support.clusters import ROOT

from byteps_py.cli.__main__ import main
from byteps_py.errors import ScheduleError, UsageError
from byteps_py.parallel.pipe.checker import check
from byteps_py.parallel.pipe.program import Program, backward, forward, one_pipe
from byteps_py.parallel.pipe.schedule_search import StageTimes, search
from byteps_py.parallel.pipe.schedules import dapple, gpipe
from byteps_py.parallel.pipe.simulator import simulate

PROGRAM = str(ROOT / "tests" / "programs" / "searched_schedule.py")


def orders(micro_batches: int, held: int) -> Iterator[tuple[int, ...]]:
    """All of one worker: forward passes and backward passes, of which none comes before its forward pass."""
    for order in set(itertools.permutations([0] * micro_batches + [1] * micro_batches)):
        in_flight = [order[:end].count(0) - order[:end].count(1) for end in range(1, len(order) + 1)]
        if min(in_flight) >= 0 and max(in_flight) <= held:
            yield order


def shortest(times: StageTimes, micro_batches: int) -> float:
    """Over all orders that can be carried out."""
    stages = len(times.forward)
    best = float("inf")
    for each in itertools.product(*(list(orders(micro_batches, held)) for held in times.held)):
        workers = []
        for stage, order in enumerate(each):
            numbers = [itertools.count(), itertools.count()]
            workers.append(tuple((backward if kind else forward)(stage, next(numbers[kind])) for kind in order))
        program = Program("each", tuple(workers), one_pipe(stages), micro_batches)
        try:
            best = min(best, simulate(program, times.durations).makespan)
        except ScheduleError:
            continue
    return best


def some_times(seed: int) -> tuple[StageTimes, int]:
    draw = random.Random(seed)
    stages, micro_batches = draw.choice([(2, 3), (3, 3), (2, 4), (4, 2)])
    return StageTimes(
        tuple(draw.randint(1, 5) for _ in range(stages)),
        tuple(draw.randint(1, 7) for _ in range(stages)),
        tuple(draw.randint(0, 4) for _ in range(stages - 1)),
        tuple(draw.randint(1, stages) for _ in range(stages)),
    ), micro_batches


@pytest.mark.parametrize("seed", range(25))
def test_no_order_is_shorter(seed: int) -> None:
    times, micro_batches = some_times(seed)
    found = search(times, micro_batches)
    assert found.is_optimal
    assert found.makespan == found.bound == shortest(times, micro_batches)


@pytest.mark.parametrize("seed", range(100, 130))
def test_what_is_found_can_be_carried_out_and_is_no_worse_than_known_schedules(seed: int) -> None:
    draw = random.Random(seed)
    stages, micro_batches = draw.randint(2, 6), draw.randint(2, 10)
    times = StageTimes(
        tuple(draw.uniform(0.5, 3) for _ in range(stages)),
        tuple(draw.uniform(0.5, 6) for _ in range(stages)),
        tuple(draw.uniform(0, 2) for _ in range(stages - 1)),
        tuple(draw.randint(1, micro_batches) for _ in range(stages)),
    )
    found = search(times, micro_batches, most_states=300)
    check(found.program)
    assert simulate(found.program, times.durations).makespan == found.makespan
    assert found.bound <= found.makespan
    peaks = found.program.peak_in_flight()
    assert all(peak <= held for peak, held in zip(peaks, times.held, strict=True))
    for known in (dapple(stages, micro_batches), gpipe(stages, micro_batches)):
        if all(peak <= held for peak, held in zip(known.peak_in_flight(), times.held, strict=True)):
            assert found.makespan <= simulate(known, times.durations).makespan


def test_equal_stages_get_what_1f1b_gets() -> None:
    found = search(StageTimes((1,) * 4, (2,) * 4), 8)
    assert (found.makespan, found.is_optimal) == (3 * (8 + 3), True)


def test_a_slow_stage_wants_more_under_way_than_1f1b_has() -> None:
    times = StageTimes((1, 3, 1, 1), (2, 6, 2, 3), (1, 1, 1), (4, 4, 4, 4))
    found = search(times, 6)
    assert found.is_optimal
    assert found.makespan == 61 < simulate(dapple(4, 6), times.durations).makespan == 64


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (((), ()), "at least one stage"),
        (((1, 1), (2,)), "backward has 1 numbers, and 2 stages need 2"),
        (((1, 1), (2, 2), (1, 1)), "hops has 2 numbers, and 2 stages need 1"),
        (((1, 1), (2, -2)), "backward has -2"),
        (((1, 1), (2, 2), (1,), (1, 0)), "held has 0"),
        (((0, 0), (0, 0)), "take no time"),
    ],
)
def test_stages_that_cannot_be(values: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        StageTimes(*values)


def test_no_micro_batches() -> None:
    with pytest.raises(UsageError, match="at least one micro-batch"):
        search(StageTimes((1,), (1,)), 0)


# ---- the command ---------------------------------------------------------------------------------------------------

SLOW_STAGE = ["-p", "4", "-m", "6", "--forward", "1,3,1,1", "--backward", "2,6,2,3", "--p2p", "1"]


def test_the_command_says_that_it_is_optimal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "search", *SLOW_STAGE, "--memory", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["makespan"], found["bound"], found["optimal"]) == (61, 61, True)
    assert max(found["peak_in_flight"]) <= 4
    assert main(["schedule", "search", *SLOW_STAGE, "--memory", "4,3,2,1"]) == 0
    assert "this one is optimal" in capsys.readouterr().out
    assert main(["schedule", "dapple", *SLOW_STAGE, "--json"]) == 0  # the same stages
    assert json.loads(capsys.readouterr().out)["makespan"] == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["search", "-p", "4", "-m", "2", "--forward", "1,2"], "--forward has 2 numbers: give one, or 4"),
        (["search", "-p", "2", "-m", "2", "--memory", "0"], "held has 0"),
        (["search", "-p", "2", "-m", "2", "--chunks", "2"], "--chunks is for other schedules"),
        (["search", "-p", "2", "-m", "2", "--states", "0"], "at least one micro-batch and one state"),
        (["search", "-p", "2", "-m", "2", "--forward", "0,1"], "--forward=0: a time above 0"),
        (["dapple", "-p", "2", "-m", "2", "--memory", "2"], "--memory and --states are for search"),
    ],
)
def test_wrong_input(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["schedule", *arguments]) == 2
    assert message in capsys.readouterr().err


# ---- trained with --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pipeline_trains_with_the_order() -> None:
    with command(sys.executable, "-m", "byteps_py.launch", "-np", "3", sys.executable, PROGRAM) as job:
        assert job.end() == 0, job.text
    assert job.text.count("right") == 3, job.text
