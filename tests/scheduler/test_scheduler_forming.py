"""Measuring links before the job starts: whom the scheduler asks, and what it makes of the answers."""

from __future__ import annotations

import itertools

import pytest
from support.scheduler_core import CPU, GPU, Cluster, server, worker

from byteps_py.config.tuning import LOOPBACK_MBIT
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import job as states
from byteps_py.scheduler.membership import TURN_LIMIT_S, TURNS, Survey, pairs_of


@pytest.mark.parametrize(("n", "k"), list(itertools.product(range(2, 9), range(12))))
def test_no_machine_is_in_two_pairs_and_all_have_partners(n: int, k: int) -> None:
    gpu_machines_sum = k < n
    seen: dict[int, set[int]] = {machine: set() for machine in range(k + n)}
    for turn in range(TURNS * max(1, -(-k // n))):
        pairs = [(k + worker, partner) for worker, partner in pairs_of(turn, n, k, gpu_machines_sum)]
        busy = list(itertools.chain(*pairs))
        assert len(busy) == len(set(busy))
        assert all(k <= here < k + n and 0 <= there < (k + n if gpu_machines_sum else k) for here, there in pairs)
        for here, there in pairs:
            seen[here].add(there)
            seen[there].add(here)
    assert all(seen.values())
    if k <= n:  # and nearly all have two
        assert sum(len(partners) < min(2, n + k - 1) for partners in seen.values()) <= 1, seen


def surveyed(n: int, k: int, rates: list[float]) -> list[float]:
    """What a survey finds where a pair reaches the slower of its rates."""
    survey = Survey(n, k, k < n)
    while not survey.is_over:
        for worker_, partner in survey.next_turn(0.0):
            assert not survey.is_turn_over(0.0)
            survey.measured(worker_, survey.turn, min(rates[k + worker_], rates[partner]))
        assert survey.is_turn_over(0.0)
    return survey.final_rates([0.0] * (n + k))


def test_slow_links_are_found() -> None:
    rates = [400.0, 100.0, 400.0, 400.0, 200.0, 400.0]
    assert surveyed(4, 2, rates) == rates
    *fast, slow = surveyed(4, 2, [395.0, 398.0, 400.0, 390.0, 399.0, 200.0])
    assert len(set(fast)) == 1
    assert 390.0 <= fast[0] <= 400.0
    assert slow == 200.0


def test_configured_rates_are_not_measured_and_silent_machines_count_as_fast() -> None:
    survey = Survey(2, 1, True)
    survey.next_turn(0.0)
    survey.measured(0, survey.turn, 90.0)
    assert survey.final_rates([0.0, 0.0, 0.0]) == [90.0, 90.0, 90.0]
    assert survey.final_rates([50.0, 0.0, 100.0]) == [50.0, 90.0, 100.0]
    assert Survey(2, 0, True).final_rates([0.0, 0.0]) == [LOOPBACK_MBIT] * 2


def measures(cluster: Cluster) -> list[tuple[int, pb.Measure]]:
    """(connection, request) of the newest turn."""
    found = [(c, m.measure) for c, messages in cluster.told.items() for m in messages if m.HasField("measure")]
    newest = max((measure.turn for _, measure in found), default=0)
    return [(connection, measure) for connection, measure in found if measure.turn == newest]


def gather(**changes: object) -> Cluster:
    cluster = Cluster(num_workers=2, num_servers=1)
    for register in (worker(0), worker(1), server(0, CPU), server(0, GPU), server(1, GPU)):
        for name, value in {"link_mbit": 0.0, **changes}.items():
            setattr(register, name, value)
        cluster.join(register)
    return cluster


def test_the_job_starts_when_the_links_are_measured() -> None:
    cluster = gather(partition_bytes=0)
    for turn in range(TURNS):
        assert cluster.core.state == states.FORMING
        assert f"measuring their links, turn {turn + 1} of {TURNS}" in cluster.core.reason
        ((connection, measure),) = measures(cluster)
        assert (measure.turn, measure.address) == (turn, "tcp://gpu1:1" if turn % 2 else "tcp://cpu0:1")
        cluster.say(connection, measured=pb.Measured(turn=turn + 1, mbit=1e9))  # of no turn there was
        cluster.say(connection, measured=pb.Measured(turn=turn, mbit=400.0))
    assert cluster.core.state == states.RUNNING
    membership = next(m.membership for m in cluster.told[1] if m.HasField("membership"))
    assert [member.link_mbit for member in (*membership.workers, *membership.servers)] == [400.0] * 5
    assert membership.partition_bytes == 128 << 10


def test_missing_reports_are_not_waited_for() -> None:
    cluster = gather()
    for _ in range(TURNS):
        assert cluster.core.state == states.FORMING
        cluster.tick(TURN_LIMIT_S, beating=tuple(cluster.told))
    assert cluster.core.state == states.RUNNING


def test_a_member_that_leaves_is_waited_for_again() -> None:
    cluster = gather()
    cluster.say(3, leave=pb.Leave(reason="preempted"))
    assert "waiting for 1 server" in cluster.core.reason
    register = server(0, CPU)
    register.link_mbit = 0.0
    cluster.join(register)
    assert "turn 1 of" in cluster.core.reason


def test_configured_rates_need_no_turns() -> None:
    cluster = gather(link_mbit=100.0, partition_bytes=0)
    assert cluster.core.state == states.RUNNING
    assert cluster.core.status(0.0).partition_bytes == 64 << 10
