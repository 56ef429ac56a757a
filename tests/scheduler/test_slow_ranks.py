"""Ranks and links that make a running job slow: injected causes and quiet jobs, by reports as services send them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support.scheduler_core import running
from support.simulated_reports import CAUSES as SIMULATED, ReportedTraining

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import job as states
from byteps_py.scheduler.rate_watch import Usage
from byteps_py.scheduler.slow_ranks import (
    COMPUTES,
    DATA,
    LINK,
    LINK_IN,
    LINK_OUT,
    NETWORK,
    PAUSES,
    SlowRankWatch,
    Straggler,
    straggler_sentence,
)

RANKS = 16
HEARTBEAT_S = 0.2
BEGINS_S = 6.0
FIRST, PASS, SUM = 0, 101, 102
OWN_S = {FIRST: 0.03, PASS: 0.05, SUM: 0.04}


@dataclass(frozen=True, slots=True)
class Job:
    """``uneven``: how much steps differ between ranks. ``cause``: of ``rank``, from BEGINS_S on to ``until_s``."""

    seed: int
    cause: str = ""
    rank: int = 5
    until_s: float = 1e9
    uneven: float = 0.05


def reports(job: Job, seconds: float) -> Iterator[tuple[float, list[pb.RankSpans]]]:
    """(now, those of all ranks) for each heartbeat. Ranks wait for each other after each part of a step."""
    source = random.Random(job.seed)
    now = 0.0
    waiting = [pb.RankSpans(rank=rank) for rank in range(RANKS)]
    next_s = HEARTBEAT_S
    parts: list[dict[int, pb.SpanPart]] = [{} for _ in range(RANKS)]
    while now < seconds:
        for kind, usual_s in OWN_S.items():
            own = [usual_s * source.lognormvariate(0, job.uneven) for _ in range(RANKS)]
            if job.cause and BEGINS_S <= now < job.until_s:
                if job.cause == COMPUTES:
                    own[job.rank] *= 1.8
                elif job.cause == DATA and kind == FIRST:
                    own[job.rank] += 0.1
                elif job.cause == PAUSES and source.random() < 0.15:
                    own[job.rank] += 0.3
            took = max(own) + 0.005
            now += took
            for rank in range(RANKS):
                waiting[rank].elapsed_s += took
                waiting[rank].own_s += own[rank]
                part = parts[rank].setdefault(kind, pb.SpanPart(kind=kind))
                part.count += 1
                part.own_s += own[rank]
                part.squares_s2 += own[rank] ** 2
        if now >= next_s:
            for rank, each in enumerate(waiting):
                each.parts.extend(parts[rank].values())
            yield now, waiting
            waiting = [pb.RankSpans(rank=rank) for rank in range(RANKS)]
            parts = [{} for _ in range(RANKS)]
            next_s = now + HEARTBEAT_S


def named(job: Job, seconds: float = 14.0) -> list[tuple[float, Straggler]]:
    """(seconds since the cause began, who was named)"""
    watch, found = SlowRankWatch(), []
    for now, spans in reports(job, seconds):
        watch.report(spans, (), now)
        found += [(now - BEGINS_S, each) for each in watch.new(now)]
    return found


@pytest.mark.parametrize("cause", [COMPUTES, DATA, PAUSES])
@pytest.mark.parametrize("seed", range(4))
def test_a_slow_rank_is_named_once_with_reason_and_price(cause: str, seed: int) -> None:
    ((after_s, straggler),) = named(Job(seed, cause, rank=seed))
    assert (straggler.who, straggler.is_rank, straggler.reason) == (seed, True, cause)
    assert 0 < after_s <= 5.0
    usual, slow = sum(OWN_S.values()), {COMPUTES: 0.096, DATA: 0.1, PAUSES: 0.135}[cause]
    assert straggler.price == pytest.approx(slow / (usual + slow), abs=0.15 if cause == PAUSES else 0.08)


@pytest.mark.parametrize("uneven", [0.05, 0.3, 0.6])
def test_quiet_jobs_name_nobody(uneven: float) -> None:
    """Also those whose sequences differ in length from step to step."""
    assert [named(Job(seed, uneven=uneven)) for seed in range(10)] == [[]] * 10


def test_a_rank_that_recovers_is_free_and_may_be_named_again() -> None:
    watch = SlowRankWatch()
    job = Job(1, COMPUTES, until_s=12.0)
    slow = {}
    for now, spans in reports(job, 22.0):
        watch.report(spans, (), now)
        watch.new(now)
        slow[now] = [each.who for each in watch.named()]
    assert all(who == [5] for now, who in slow.items() if 11.0 <= now <= 12.0)
    assert all(who == [] for now, who in slow.items() if now < BEGINS_S or now >= 21.0)


def test_stages_of_a_pipeline_are_compared_with_themselves() -> None:
    """Those of the second stage work twice as long."""
    watch = SlowRankWatch()
    for turn in range(40):
        now = turn * HEARTBEAT_S
        spans = [
            pb.RankSpans(rank=rank, elapsed_s=0.2, own_s=0.08 * (1 + rank // 8), stage=rank // 8)
            for rank in range(RANKS)
        ]
        watch.report(spans, (), now)
        assert watch.new(now) == []


@pytest.mark.parametrize(
    ("reason", "out", "into"), [(LINK, True, True), (LINK_OUT, True, False), (LINK_IN, False, True)]
)
@pytest.mark.parametrize("usual_s", [0.03, 0.001])
def test_slow_links_and_their_direction(reason: str, out: bool, into: bool, usual_s: float) -> None:
    """Machines 0 to 7 send to 8 and 9, which answer; that of machine 2 is slow. The others' transfers take a third of
    the time, or none: all wait for that machine then."""
    watch, found = SlowRankWatch(), []
    for turn in range(30):
        now = turn * HEARTBEAT_S
        usages = []
        for machine in range(8):
            sent_s, received_s = (0.09 if machine == 2 and is_slow else usual_s for is_slow in (out, into))
            for server in (8, 9):
                usages.append(Usage(machine, machine, server, 100_000, sent_s, 0.0))
                usages.append(Usage(server, server, machine, 100_000, received_s, 0.0))
        watch.report((), usages, now)
        found += watch.new(now)
    (straggler,) = found
    assert (straggler.who, straggler.is_rank, straggler.reason) == (2, False, reason)
    if usual_s == 0.03:
        assert straggler.price == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize(
    ("reason", "slower", "mbit", "detail"),
    [(LINK, (4.4, 5.3), (4.5, 4.7), "4.5 Mbit/s out and 4.7 in"),
     (LINK_OUT, (4.7, 5.3), (4.4, 24.0), "4.4 Mbit/s out and 24 in"),
     (LINK_IN, (2.9, 6.0), (45.0, 4.7), "45 Mbit/s out and 4.7 in")],
)  # fmt: skip
def test_late_acknowledgements_do_not_hide_the_direction(
    reason: str, slower: tuple[float, float], mbit: tuple[float, float], detail: str
) -> None:
    """As measured with links of 40 Mbit/s: what a machine receives takes long, too, if it sends slowly."""
    watch, found = SlowRankWatch(), []
    for turn in range(30):
        now = turn * HEARTBEAT_S
        for machine in range(8):
            (out, into), (sent, received) = (slower, mbit) if machine == 2 else ((1.0, 1.0), (55.0, 26.0))
            usages = [Usage(machine, machine, server, 100_000, 0.03 * out, 0.0) for server in (8, 9)]
            usages += [Usage(server, server, machine, 100_000, 0.03 * into, 0.0) for server in (8, 9)]
            usages.append(Usage(machine, machine, NETWORK, 100_000, 0.8 / sent, 0.0))
            usages.append(Usage(machine, NETWORK, machine, 100_000, 0.8 / received, 0.0))
            watch.report((), usages, now)
        found += watch.new(now)
    (straggler,) = found
    assert (straggler.who, straggler.is_rank, straggler.reason) == (2, False, reason)
    assert f"its link carries {detail}" in straggler_sentence(straggler, "worker 2")
    assert watch.suspected_links() == {2}


def test_the_link_of_a_rank_that_comes_late_is_no_reason() -> None:
    watch, found = SlowRankWatch(), []
    for turn in range(30):
        now = turn * HEARTBEAT_S
        for machine in range(8):
            sent = [Usage(machine, machine, server, 100_000, 0.03, 0.0) for server in (8, 9)]
            own_s = 0.18 if machine == 2 else 0.1
            watch.report([pb.RankSpans(rank=machine, elapsed_s=0.2, own_s=own_s)], sent, now, machine)
        for server in (8, 9):
            busy_s = [0.09 if machine == 2 else 0.03 for machine in range(8)]
            watch.report((), [Usage(server, server, m, 100_000, s, 0.0) for m, s in enumerate(busy_s)], now)
        found += watch.new(now)
    assert [(each.who, each.is_rank, each.reason) for each in found] == [(2, True, COMPUTES)]


def test_a_broadcast_over_slow_links_makes_no_link_slow() -> None:
    """Machine 0 sends to all others, and gets requests: acknowledgements of these wait behind what it sends."""
    watch = SlowRankWatch()
    for turn in range(30):
        now = turn * HEARTBEAT_S
        usages = [Usage(0, 0, other, 17_000, HEARTBEAT_S, 0.0) for other in (1, 2, 3)]
        usages += [Usage(other, other, 0, 360, HEARTBEAT_S, 0.0) for other in (1, 2, 3)]
        for one, other in ((1, 2), (2, 3), (3, 1)):
            usages += [
                Usage(one, one, other, 17_000, HEARTBEAT_S, 0.0),
                Usage(other, other, one, 17_000, HEARTBEAT_S, 0.0),
            ]
        watch.report((), usages, now)
        assert watch.new(now) == []


def spans(*own_s: float, first: int = 0) -> pb.Heartbeat:
    return pb.Heartbeat(spans=[pb.RankSpans(rank=first + i, elapsed_s=0.5, own_s=s) for i, s in enumerate(own_s)])


def test_the_first_worker_hears_once_and_the_status_says_it_as_long_as_it_lasts() -> None:
    cluster, (a, b), _ = running()
    said = []
    for _ in range(12):
        cluster.now += 0.5
        said += cluster.say(a, heartbeat=spans(0.2, 0.2))
        said += cluster.say(b, heartbeat=spans(0.2, 0.45, first=2))
    sentence = (
        "rank 3 (worker 1 (ranks 2-3, host gpu1, pid 101)) computes slowly: 50% of the time; its own work takes 90% of "
        "the time, that of the others 40%"
    )
    assert [(to, message.slow.message) for to, message in said] == [(a, sentence)]
    assert list(cluster.core.status(cluster.now).slow) == [sentence]


def test_no_machine_reports_the_spans_of_others() -> None:
    cluster, (a, _), _ = running()
    cluster.say(a, heartbeat=spans(0.2, first=3))
    assert cluster.core.state == states.FAILED
    assert "spans of ranks that are not its own" in cluster.core.reason


# ---- meshes of many ranks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "windows"),
    [(1_024, 2), pytest.param(4_096, 2, marks=pytest.mark.slow), pytest.param(16_384, 60, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("uneven", [0.0, 0.6, 1.2])
def test_quiet_windows_of_many_ranks_name_nobody(ranks: int, windows: int, uneven: float) -> None:
    """Also with packs of documents whose lengths differ much. 1,000 windows: `benchmarks.slow_rank --simulated`."""
    training = ReportedTraining(ranks, uneven, seed=windows)
    assert [training.window(5.0) for _ in range(windows)] == [[]] * windows


@pytest.mark.parametrize("ranks", [1_024, pytest.param(16_384, marks=pytest.mark.long)])
def test_one_of_many_ranks_is_named(ranks: int) -> None:
    training = ReportedTraining(ranks, 0.2, seed=ranks)
    for number, cause in enumerate(SIMULATED):
        ((after_s, straggler),) = training.window(6.0, cause, rank=ranks // 2 + 37 * number)
        assert (straggler.who, straggler.is_rank, straggler.reason) == (ranks // 2 + 37 * number, True, cause)
        assert 0 < after_s <= 5.0
        assert straggler.price >= 0.25
