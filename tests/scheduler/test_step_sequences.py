"""What the scheduler concludes from how many steps ranks have begun, and how many optimizers have stepped in them."""

from __future__ import annotations

import random

import pytest
from support.scheduler_core import running

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import job as states
from byteps_py.scheduler.stalls import SURE_S, StepSequences


def told(rank: int, steps: int, optimizers: int, sequence: str = "all") -> pb.RankSteps:
    return pb.RankSteps(rank=rank, sequence=sequence, steps=steps, optimizers=optimizers)


def contradiction(*reports: pb.RankSteps) -> str:
    """Of ranks that have all reported the same for long enough."""
    sequences = StepSequences()
    for now_s in (0.0, SURE_S):
        for report in reports:
            sequences.report(report.rank, [report], now_s)
    return sequences.contradiction()


@pytest.mark.parametrize("behind", [2, 3, 100])
def test_an_optimizer_that_steps_on_one_rank_only(behind: int) -> None:
    text = (
        "Mismatched optimizers: rank 0 waits in step 2 with 2 optimizers (DistributedOptimizer or "
        f"DistributedDataParallel), rank 1 in step {behind} with 1; let the same optimizers step in the same order on "
        "every rank, and give one that steps on some ranks only their process_set"
    )
    assert contradiction(told(0, 2, 2), told(1, behind, 1)) == text
    assert contradiction(told(1, behind, 1), told(0, 2, 2)) == text


@pytest.mark.parametrize(
    "reports",
    [
        (told(0, 2, 2), told(1, 1, 1)),  # rank 1 is late
        (told(0, 2, 2), told(1, 2, 2)),
        (told(0, 2, 2), told(1, 9, 2)),  # a report of long ago
        (told(0, 2, 2), told(1, 2, 1, "ranks 1, 2")),  # of another group
    ],
)
def test_ranks_that_may_do_the_same(reports: tuple[pb.RankSteps, ...]) -> None:
    assert contradiction(*reports) == ""


def test_ranks_that_may_go_on_are_not_compared() -> None:
    sequences = StepSequences()
    sequences.report(0, [told(0, 2, 2)], 0.0)
    sequences.report(1, [told(1, 2, 1)], 0.0)
    sequences.report(0, [told(0, 2, 2)], SURE_S)
    sequences.report(1, [told(1, 3, 1)], SURE_S)  # it has gone on
    assert sequences.contradiction() == ""
    sequences.report(1, [], 2 * SURE_S)  # it waits no more
    sequences.report(1, [told(1, 3, 1)], 3 * SURE_S)
    assert sequences.contradiction() == ""
    sequences.report(1, [told(1, 3, 1)], 4 * SURE_S)
    assert sequences.contradiction() != ""


@pytest.mark.parametrize("seed", range(20))
def test_reports_of_any_times_about_one_program_agree_and_those_about_two_do_not(seed: int) -> None:
    chance = random.Random(seed)
    steps = chance.randrange(2, 30)
    firsts = [1, *(chance.randrange(2) for _ in range(steps - 1))]  # 1: an optimizer that has not stepped before
    at = [(step + 1, sum(firsts[: step + 1])) for step in range(steps)]
    reports = [told(rank, *chance.choice(at)) for rank in range(6)]
    assert contradiction(*reports) == ""
    step, optimizers = chance.choice(at)
    assert contradiction(*reports, told(6, step, optimizers), told(7, step, optimizers + 1)) != ""


def test_all_ranks_get_an_error_that_says_what_differs() -> None:
    cluster, (a, b), servers = running()
    for now_s in (0.0, SURE_S):
        assert list(cluster.core.suspicions(cluster.now)) == []
        cluster.now = now_s
        cluster.say(a, heartbeat=pb.Heartbeat(steps=[told(0, 2, 2), told(1, 2, 2)]))
        cluster.say(b, heartbeat=pb.Heartbeat(steps=[told(2, 2, 1), told(3, 2, 1)]))
        for server in servers:
            cluster.say(server, heartbeat=pb.Heartbeat())
    out = cluster.take(cluster.core.tick(cluster.now))
    (text,) = {m.failure.message for _, m in out}
    assert {m.failure.error for _, m in out} == {"MismatchError"}
    assert text.startswith("Mismatched optimizers: rank 1 waits in step 2 with 2 optimizers ")


def test_no_machine_speaks_for_the_ranks_of_others() -> None:
    cluster, (a, _), _ = running()
    cluster.say(a, heartbeat=pb.Heartbeat(steps=[told(2, 1, 1)]))
    assert cluster.core.state == states.FAILED
    assert "its heartbeat has the steps of ranks that are not its own" in cluster.core.reason
