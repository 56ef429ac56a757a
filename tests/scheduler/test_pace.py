"""Who is slow: measured apart from who waits, decided without false alarms. Seeded; no processes, no clock."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping

import pytest

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.health import PaceWatch, Slow, slow_sentences
from byteps_py.worker.core.pace import ROW_S, WARM_UP_STEPS, RankPace, ServerPace
from byteps_py.worker.core.tensor import Part

FACTOR = 5.0
TENSORS = 3


def steps(ranks: int, count: int, own_s: Callable[[int, int], float], delay_s: float = 0.001) -> list[pb.RankPace]:
    """Synchronous training: rank r computes for ``own_s(r, step)``, during which it hands over three tensors; nobody
    begins the next step before all results are there. What there is to report in the end. Steps up to 0 are those that
    do not count."""
    pace, now = RankPace(0), 0.0
    for step in range(1 - WARM_UP_STEPS, count + 1):
        takes = [own_s(rank, step) for rank in range(ranks)]
        events: list[tuple[float, int, int, int]] = []  # when, ready before done, rank, tensor
        for tensor in range(TENSORS):
            at = [now + takes[rank] * (tensor + 1) / TENSORS for rank in range(ranks)]
            events += [(at[rank], 0, rank, tensor) for rank in range(ranks)]
            events += [(max(at) + delay_s, 1, rank, tensor) for rank in range(ranks)]
        for time, is_done, rank, tensor in sorted(events):
            if is_done:
                pace.done(rank, tensor, time)
            else:
                pace.ready(rank, 100 + rank, tensor, step + WARM_UP_STEPS, time)
            now = max(now, time)
    return pace.report(range(ranks))


def slow_ranks(paces: list[pb.RankPace], factor: float = FACTOR) -> list[Slow]:
    watch = PaceWatch(factor, 60.0)
    half = len(paces) // 2
    watch.report(1, paces[:half], [])  # of two machines
    watch.report(2, paces[half:], [])
    return watch.slow([1, 2])


@pytest.mark.parametrize("ranks", [2, 4, 9])
@pytest.mark.parametrize("usual_s", [0.015, 0.1, 3.0])
def test_a_rank_ten_times_slower_is_named(ranks: int, usual_s: float) -> None:
    count = 4 if usual_s >= 0.5 else 200  # two steps that are over, and begun ones before and after them
    paces = steps(ranks, count, lambda rank, step: usual_s * (10 if rank == 1 else 1))
    (slow,) = slow_ranks(paces)
    assert (slow.is_rank, slow.who, slow.pid) == (True, 1, 101)
    assert slow.takes_s == pytest.approx(10 * usual_s, rel=0.05)
    assert slow.others_s == pytest.approx(usual_s, rel=0.05)
    assert slow.times == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize("before", [0, 100])
@pytest.mark.parametrize("usual_s", [0.001, 0.004, 0.05, 0.1, 0.4])
def test_who_is_ten_times_slower_is_named_after_two_steps(usual_s: float, before: int) -> None:
    """Of short ones after so many as take half a second. ``before``: steps in which all are equally fast. (The next one
    must have begun.)"""
    needed = max(2, math.ceil(ROW_S / (10 * usual_s + 0.001)))
    for late, named in ((1, False), (needed - 1, False), (needed, True), (needed + 2, True)):
        count = before + 1 + late
        paces = steps(4, count, lambda rank, step: usual_s * (10 if rank == 3 and step > before else 1))
        assert bool(slow_ranks(paces)) == named, late


def test_a_slow_start_is_no_evidence() -> None:
    """A rank whose first steps load libraries."""
    for steps_after in (1, 2, 20):
        paces = steps(4, steps_after, lambda rank, step: 2.0 if rank == 0 and step <= 0 else 0.07)
        assert not slow_ranks(paces)


def test_who_becomes_slow_is_named_after_two_steps_and_no_sooner() -> None:
    for late, named in ((0, False), (1, False), (2, True)):
        paces = steps(4, 21 + late, lambda rank, step: 1.0 if rank == 3 and step > 20 else 0.6)
        assert not slow_ranks(paces), late
        paces = steps(4, 21 + late, lambda rank, step: 6.0 if rank == 3 and step > 20 else 0.6)
        assert bool(slow_ranks(paces)) == named, late


@pytest.mark.parametrize("before", [0, 200])
def test_seven_times_shows_after_three_seconds(before: int) -> None:
    for count, named in ((12, False), (30, True)):
        paces = steps(4, before + count, lambda rank, step: 0.14 if rank == 2 and step > before else 0.02)
        assert bool(slow_ranks(paces)) == named, count


@pytest.mark.parametrize("seed", range(20))
def test_what_is_slow_now_and_then_is_the_operating_systems_doing(seed: int) -> None:
    """It keeps a rank waiting for up to a tenth of a second in one step of three, and one rank more than the others."""
    dice = random.Random(seed)

    def own(rank: int, step: int) -> float:
        is_kept = dice.random() < (0.5 if rank == 2 else 0.3)
        return 0.004 + (dice.uniform(0.0, 0.1) if is_kept else 0.0)

    for count in (10, 40, 150, 600):
        assert not slow_ranks(steps(4, count, own))


def test_who_is_slow_in_the_short_one_of_two_steps_is_not_waited_for_most_of_the_time() -> None:
    """Two reductions follow each other at once in each step, between which a rank writes a line."""
    for usual_s in (0.05, 0.5):
        own = {0: (usual_s, usual_s, usual_s, usual_s), 1: (0.004, 0.0003, 0.0003, 0.0003)}
        assert not slow_ranks(steps(4, 200, lambda rank, step, own=own: own[step % 2][rank]))


def test_a_checkpoint_now_and_then_is_nobodys_fault() -> None:
    for count in range(3, 60):
        paces = steps(4, count, lambda rank, step: 30.0 if rank == 0 and step % 10 == 5 else 0.2)
        assert not slow_ranks(paces), count


def test_all_are_equally_slow() -> None:
    assert not slow_ranks(steps(4, 100, lambda rank, step: 2.0 if step > 50 else 0.1))


@pytest.mark.parametrize("seed", range(20))
def test_noise_makes_nobody_slow(seed: int) -> None:
    """Heavy tails: a step takes twice as long in the mean, and now and then 20 times."""
    dice = random.Random(seed)
    usual_s = dice.choice([0.003, 0.03, 0.3])

    def own(rank: int, step: int) -> float:
        return usual_s * min(20.0, dice.paretovariate(1.8))

    for count in (5, 50, 400):
        assert not slow_ranks(steps(dice.choice([2, 4, 8]), count, own))


def test_ranks_that_nobody_waits_for_may_take_their_time() -> None:
    """Two groups that train for themselves: the others do not wait."""
    alone, busy = steps(2, 40, lambda rank, step: 0.1), steps(2, 40, lambda rank, step: 2.0)
    for pace in busy:
        pace.rank += 2
    assert not slow_ranks([*alone, *busy])


def test_it_is_seen_at_a_glance_that_no_rank_has_waited_for_long() -> None:
    pace = RankPace(0)
    assert not pace.is_pending_since(1e9)
    pace.ready(0, 1, 7, 1, 10.0)
    pace.ready(0, 1, 8, 1, 11.0)
    pace.ready(1, 2, 7, 1, 12.0)
    assert [pace.is_pending_since(time) for time in (9.0, 10.0)] == [False, True]
    pace.done(0, 7, 13.0)
    assert pace.is_pending_since(11.0)  # for the other slot
    pace.done(0, 8, 13.0)
    assert [pace.is_pending_since(time) for time in (11.0, 12.0)] == [False, True]
    pace.done(1, 7, 13.0)
    assert not pace.is_pending_since(1e9)
    pace.ready(0, 1, 7, 2, 14.0)
    assert [pace.is_pending_since(time) for time in (13.0, 14.0)] == [False, True]


def test_a_rank_that_comes_back_begins_anew() -> None:
    pace = RankPace(0)
    for step in range(1, 10):
        pace.ready(0, 7, 1, step, 10.0 * step)
        pace.done(0, 1, 10.0 * step + 1)
    (before,) = pace.report([0])
    assert (before.pid, before.step_s, before.wait_s) == (7, pytest.approx(9), pytest.approx(1))
    pace.ready(0, 8, 1, 1, 500.0)
    assert pace.report([0]) == []
    assert pace.report([]) == []


# ---- servers ---------------------------------------------------------------------------------------------------------


def part(server: int, length: int = 1 << 20) -> Part:
    return Part(tensor=None, index=0, offset=0, length=length, server=server)  # type: ignore[arg-type]


def answers(
    service_s: Mapping[int, float],
    rounds: int = 60,
    links: Mapping[int, float] | None = None,
    waited_s: Callable[[int], float] = lambda server: 0.0,
    dice: random.Random | None = None,
) -> list[pb.ServerPace]:
    """Each round pushes a part to every server. A server takes ``service_s``; before that others keep it waiting."""
    pace, now = ServerPace(links or dict.fromkeys(service_s, 1000.0), skip=()), 0.0
    for step in range(rounds):
        events = []
        for server, takes in service_s.items():
            pushed = part(server)
            pace.pushed(pushed, now)
            waited = waited_s(server)
            noise = 1.0 if dice is None else min(10.0, dice.paretovariate(2))
            events.append((now + waited + takes * noise, pushed, waited))
        for time, pushed, waited in sorted(events, key=lambda event: event[0]):
            pace.answered(pushed, waited, step, time)
            now = time
        now += 0.02
    return pace.report()


def slow_servers(*reports: list[pb.ServerPace]) -> list[Slow]:
    watch = PaceWatch(FACTOR, 60.0)
    for member, report in enumerate(reports, start=100):
        watch.report(member, [], report)
    return watch.slow([*range(20), *range(100, 100 + len(reports))])


@pytest.mark.parametrize("servers", [2, 3, 6])
def test_a_server_ten_times_slower_is_named(servers: int) -> None:
    usual = dict.fromkeys(range(1, servers + 1), 0.012)
    report = answers({**usual, 2: 0.13})
    (slow,) = slow_servers(report, report)
    assert (slow.is_rank, slow.who) == (False, 2)
    assert not slow_servers(answers(usual))


@pytest.mark.parametrize("usual_s", [0.0025, 0.012, 0.2])
def test_a_server_ten_times_slower_is_named_after_two_steps(usual_s: float) -> None:
    """Of short ones after so many as take half a second."""
    needed = max(3, math.ceil(ROW_S / (11 * usual_s + 0.02)))
    for rounds, named in ((1, False), (needed - 1, False), (needed + 1, True), (50, True)):
        report = answers({1: usual_s, 2: 11 * usual_s, 3: usual_s}, rounds, dict.fromkeys((1, 2, 3), 10_000.0))
        assert [slow.who for slow in slow_servers(report, report)] == [2] * named, rounds


def test_one_long_round_is_no_evidence_however_many_answers_it_has() -> None:
    """A server compiles its kernels while eight partitions wait for it."""
    pace = ServerPace({1: 1000.0, 2: 1000.0}, ())
    for begins, takes in ((0.0, {1: 0.002, 2: 2.8}), (3.0, {1: 0.002, 2: 0.002}), (3.6, {1: 0.002, 2: 0.002})):
        for server in takes:
            parts = [part(server) for _ in range(8)]
            for each in parts:
                pace.pushed(each, begins)
            for number, each in enumerate(parts):
                pace.answered(each, 0.0, int(begins), begins + takes[server] + number * 1e-4)
        assert not slow_servers(pace.report())


def test_a_full_link_is_no_slow_server() -> None:
    """Of one long step, all parts of the last half go to the same server, and their answers take long."""
    for steps, named in ((1, False), (3, True)):
        pace, now = ServerPace({1: 1000.0, 2: 1000.0}, ()), 0.0
        for step in range(steps):
            for server, takes in (*(((1, 0.05), (2, 0.05)) * 4 if steps == 1 else ()), (1, 0.05), (2, 0.7), (2, 0.7)):
                pushed = part(server)
                pace.pushed(pushed, now)
                now += takes
                pace.answered(pushed, 0.0, step, now)
        assert bool(slow_servers(pace.report())) == named


def test_within_one_long_step_a_slow_server_shows_after_three_seconds() -> None:
    for answers_, named in ((10, False), (30, True)):
        pace, now = ServerPace({1: 1000.0, 2: 1000.0}, ()), 0.0
        for _ in range(answers_):
            for server, takes in ((1, 0.012), (2, 0.13)):
                pushed = part(server, 4096)
                pace.pushed(pushed, now)
                now += takes
                pace.answered(pushed, 0.0, 1, now)
        assert [slow.who for slow in slow_servers(pace.report())] == [2] * named


def test_a_server_that_runs_in_bursts_is_named() -> None:
    """Most answers come at once, one in ten after 0.9 s: a processor's quota."""
    pace, now = ServerPace({1: 1000.0, 2: 1000.0}, ()), 0.0
    for number in range(200):
        for server, takes in ((1, 0.002), (2, 0.9 if number % 10 == 0 else 0.002)):
            pushed = part(server, 4096)
            pace.pushed(pushed, now)
            now += takes
            pace.answered(pushed, 0.0, number, now)
    assert [slow.who for slow in slow_servers(pace.report())] == [2]


def test_waiting_for_a_slow_machine_is_not_the_servers_fault() -> None:
    dice = random.Random(3)
    late = answers({1: 0.012, 2: 0.012, 3: 0.012}, waited_s=lambda server: dice.choice([0.0, 2.0 * (server == 2)]))
    assert not slow_servers(late)


def test_who_comes_first_and_waits_for_others_knows_little_of_the_server() -> None:
    """It stood still while it waited for others, which it can't tell. Who comes last knows better."""
    early = answers({1: 0.012, 2: 0.012}, waited_s=lambda server: 0.5)
    assert early == []
    waits = itertools.cycle([0.5, 0.5, 0.5, 0.5, 0.0, 0.0])
    now_and_then = answers({1: 0.012, 2: 0.012}, waited_s=lambda server: next(waits))
    last = answers({1: 0.012, 2: 0.13})
    assert [slow.who for slow in slow_servers(now_and_then, last)] == [2]


def test_a_slow_machine_makes_no_server_slow() -> None:
    """All that it is told, it hears late; of one server nobody else says anything."""
    assert not slow_servers(answers({1: 0.012}), answers({1: 0.2, 2: 0.2}))


def test_links_of_different_rates_are_expected_to_take_as_long() -> None:
    links = {1: 10_000.0, 2: 10_000.0, 3: 400.0}
    assert not slow_servers(answers({1: 0.006, 2: 0.006, 3: 0.027}, links=links))
    assert [slow.who for slow in slow_servers(answers({1: 0.006, 2: 0.006, 3: 0.27}, links=links))] == [3]


@pytest.mark.parametrize("seed", range(20))
def test_noise_makes_no_server_slow(seed: int) -> None:
    dice = random.Random(seed)
    usual = {server: dice.choice([0.002, 0.02, 0.2]) for server in (1,)}
    usual = dict.fromkeys(range(1, dice.choice([3, 5])), usual[1])
    assert not slow_servers(*(answers(usual, dice=dice, rounds=dice.choice([10, 100, 400])) for _ in range(2)))


def test_the_server_of_its_own_machine_is_no_measure_and_what_is_forgotten_does_not_count() -> None:
    pace = ServerPace({1: 1000.0, 2: 1000.0}, skip=[1])
    ours, void = part(1), part(2)
    for pushed in (ours, void):
        pace.pushed(pushed, 0.0)
    pace.forget(void)
    pace.answered(ours, 0.0, 1, 9.0)
    pace.answered(void, 0.0, 1, 9.0)
    assert pace.report() == []


def test_it_is_told_at_once_and_then_from_time_to_time() -> None:
    watch = PaceWatch(FACTOR, 60.0)
    paces = steps(2, 20, lambda rank, step: 0.1 if rank else 2.0)
    watch.report(1, paces, [])
    slow = watch.slow([1])
    assert [len(watch.take_due(slow, now)) for now in (5.0, 6.0, 64.0, 66.0)] == [1, 0, 0, 1]
    assert watch.slow([2]) == []  # who has left is not slow


def test_the_sentences() -> None:
    slow = [Slow(True, 3, 4711, 2.13, 0.212, 10.05), Slow(False, 9, 0, 0.35, 0.031, 11.2)]
    assert slow_sentences(slow, lambda ranks: f"worker of {list(ranks)}", {9: "server tcp://h:1"}, 8) == [
        "rank 3 (process 4711; worker of [3]) takes 2.1 s from step to step, 10 times the 212 ms of the others: "
        "7 ranks wait for it",
        "server tcp://h:1 answers after 350 ms, the others after 31 ms: relative to the bytes in flight, it "
        "takes 11 times as long; the service, its machine or the network to it is slow",
    ]
