"""SlowRankWatch in simulated time: random causes and quiet windows, decided by a seed, and watches that are broken on
purpose. A window that finds nothing wrong with a broken watch is of no use."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import pytest

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.rate_watch import MBIT, Usage
from byteps_py.scheduler.slow_ranks import (
    COMPUTES,
    DATA,
    LEAST_PRICE,
    LINK,
    LINK_IN,
    LINK_OUT,
    NETWORK,
    PAUSES,
    SlowRankWatch,
    Straggler,
)

HEARTBEAT_S = 0.2
NAMED_WITHIN_S, FREE_WITHIN_S = 5.0, 12.0
FIRST, PASS, SUM = 0, 101, 102
OWN_S = {FIRST: 0.03, PASS: 0.05, SUM: 0.04}
SERVERS = (100, 101)
LINKS = {LINK: (True, True), LINK_OUT: (True, False), LINK_IN: (False, True)}  # sends, receives


@dataclass(frozen=True, slots=True)
class Window:
    """A training with a rank on each machine. ``cause``: of rank ``who``, from ``since_s`` to ``until_s``; empty: it is
    quiet. ``uneven``: how much steps differ between ranks. ``stages``: those of a later one work longer."""

    seed: int
    ranks: int
    stages: int
    uneven: float
    cause: str
    who: int
    since_s: float
    until_s: float

    @classmethod
    def of(cls, seed: int) -> Window:
        source = random.Random(seed)
        cause = source.choice(("", COMPUTES, DATA, PAUSES, *LINKS))
        ranks, stages = source.choice((8, 16)), source.choice((1, 2))
        uneven = source.choice((0.03, 0.15, 0.5) if not cause else (0.02, 0.05))
        since_s = source.uniform(4.0, 7.0)
        return cls(seed, ranks, stages, uneven, cause, source.randrange(ranks), since_s, since_s + 7.0)

    @property
    def seconds(self) -> float:
        return self.until_s + FREE_WITHIN_S


def heartbeats(window: Window) -> Iterator[tuple[float, list[pb.RankSpans], list[Usage]]]:
    """(now, what ranks did, what machines sent). Ranks wait for each other after each part of a step."""
    source = random.Random(window.seed)
    now, next_s, pause_s = 0.0, HEARTBEAT_S, 0.0
    per_stage = window.ranks // window.stages
    longer = [1 + rank // per_stage for rank in range(window.ranks)]
    empty = [pb.RankSpans(rank=rank, stage=rank // per_stage) for rank in range(window.ranks)]
    while now < window.seconds:
        spans = [pb.RankSpans.FromString(each.SerializeToString()) for each in empty]
        parts: list[dict[int, pb.SpanPart]] = [{} for _ in range(window.ranks)]
        began = now
        while now < next_s:
            for kind, usual_s in OWN_S.items():
                own = [usual_s * each * source.lognormvariate(0, window.uneven) for each in longer]
                if window.since_s <= now < window.until_s:
                    if window.cause == COMPUTES:
                        own[window.who] *= 2
                    elif window.cause == DATA and kind == FIRST:
                        own[window.who] += 0.15
                    elif window.cause == PAUSES and now >= pause_s:
                        own[window.who] += 0.3
                        pause_s = now + 0.3 + source.uniform(0.4, 0.9)
                took = max(own) + 0.005
                now += took
                for rank, own_s in enumerate(own):
                    spans[rank].elapsed_s += took
                    spans[rank].own_s += own_s
                    part = parts[rank].setdefault(kind, pb.SpanPart(kind=kind))
                    part.count, part.own_s = part.count + 1, part.own_s + own_s
                    part.squares_s2 += own_s**2
        for rank, each in enumerate(spans):
            each.parts.extend(parts[rank].values())
        yield now, spans, list(_usages(window, now, now - began, source))
        next_s = now + HEARTBEAT_S


def _usages(window: Window, now: float, seconds: float, source: random.Random) -> Iterator[Usage]:
    is_wrong = window.since_s <= now < window.until_s
    for machine in range(window.ranks):
        sends = receives = 1.0
        rates: Iterable[float] = (50.0, 25.0)
        if is_wrong and machine == window.who:
            if window.cause in LINKS:
                # Acknowledgements wait behind what goes the slow way.
                sends, receives = (5.0 if is_slow else 3.5 for is_slow in LINKS[window.cause])
                rates = (4.5 if is_slow else 25.0 for is_slow in LINKS[window.cause])
            elif window.cause:
                receives = 3.0  # it comes late, and reads late
        for mbit, sender, target in zip(rates, (machine, NETWORK), (NETWORK, machine), strict=True):
            busy_s = 100_000 * MBIT / mbit * source.uniform(0.8, 1.25)
            yield Usage(machine, sender, target, 100_000, busy_s, 0.0)
        for server in SERVERS:
            usual_s = 0.1 * seconds * source.uniform(0.9, 1.1)
            yield Usage(machine, machine, server, 100_000, usual_s * sends, 0.0)
            yield Usage(server, server, machine, 100_000, usual_s * receives, 0.0)


def fault(watch: SlowRankWatch, window: Window) -> str:
    """What the watch does wrong in this window; empty if nothing."""
    named: list[tuple[float, Straggler]] = []
    for now, spans, usages in heartbeats(window):
        for rank, each in enumerate(spans):
            watch.report([each], [usage for usage in usages if usage.sender == rank], now, rank)
        watch.report((), [usage for usage in usages if usage.sender in SERVERS], now)
        named += [(now, each) for each in watch.new(now)]
    if not window.cause:
        return f"named {named} in a quiet window" if named else ""
    if [each.who for _, each in named] != [window.who]:
        return f"named {named}"
    ((at_s, straggler),) = named
    if straggler.is_rank == (window.cause in LINKS) or straggler.reason != window.cause:
        return f"named the right one as {straggler}"
    if not window.since_s < at_s <= window.since_s + NAMED_WITHIN_S:
        return f"named after {at_s - window.since_s:.1f} s"
    if straggler.price < LEAST_PRICE or straggler.price > 0.8:
        return f"a price of {straggler.price}"
    return f"{watch.named()} are not free again" if watch.named() else ""


def faults(kind: type[SlowRankWatch], seeds: Iterable[int]) -> Iterator[str]:
    for seed in seeds:
        window = Window.of(seed)
        if text := fault(kind(), window):
            yield f"{window}: {text}"


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 60), marks=pytest.mark.slow)], ids=str)
def test_causes_are_named_and_quiet_windows_are_not(seeds: range) -> None:
    assert list(faults(SlowRankWatch, seeds)) == []


@pytest.mark.slow
def test_data_that_differ_name_nobody() -> None:
    """As packed sequences do, from step to step."""
    for seed in range(50):
        window = replace(Window.of(seed), cause="", uneven=random.Random(-seed - 1).choice((0.3, 0.5)), until_s=5.0)
        assert fault(SlowRankWatch(), window) == "", window


# ---- watches that are broken on purpose ------------------------------------------------------------------------


class TakesStagesTogether(SlowRankWatch):
    def report(
        self, spans: Iterable[pb.RankSpans], usages: Iterable[Usage], now_s: float, machine: int | None = None
    ) -> None:
        spans = list(spans)
        for each in spans:
            each.stage = 0
        super().report(spans, usages, now_s, machine)


class BlamesLinksOfLateRanks(SlowRankWatch):
    def report(
        self, spans: Iterable[pb.RankSpans], usages: Iterable[Usage], now_s: float, machine: int | None = None
    ) -> None:
        super().report(spans, usages, now_s, None)


class NamesTheLongest(SlowRankWatch):
    """However much the others differ."""

    def _slow_of_stage(self, ranks: Mapping[int, object]) -> list[Straggler]:
        shares = {rank: window.own_s / window.elapsed_s for rank, window in ranks.items()}  # type: ignore[attr-defined]
        longest = max(shares, key=lambda rank: shares[rank])
        price = shares[longest] - sorted(shares.values())[len(shares) // 2]
        return [Straggler(longest, True, COMPUTES, price, "")] if price >= LEAST_PRICE else []


class NamesAtTheFirstLook(SlowRankWatch):
    def new(self, now_s: float) -> list[Straggler]:
        found = []
        for _ in range(8):
            self._judged_s = -float("inf")
            found += super().new(now_s)
        return found


class NeverForgets(SlowRankWatch):
    def _forget(self, now_s: float) -> None:
        pass


class NeverFrees(SlowRankWatch):
    def new(self, now_s: float) -> list[Straggler]:
        for suspicion in self._suspicions.values():
            suspicion.quick = 0
        return super().new(now_s)


class NamesAgainAndAgain(SlowRankWatch):
    def new(self, now_s: float) -> list[Straggler]:
        for suspicion in self._suspicions.values():
            suspicion.is_named = False
        return super().new(now_s)


class KnowsNoDirections(SlowRankWatch):
    def _slow_links(self, now_s: float) -> list[Straggler]:
        found = super()._slow_links(now_s)
        return [Straggler(each.who, False, LINK, each.price, each.detail) for each in found]


class KnowsNoReasons(SlowRankWatch):
    def _slow_ranks(self) -> list[Straggler]:
        found = super()._slow_ranks()
        return [Straggler(each.who, True, COMPUTES, each.price, each.detail) for each in found]


BROKEN = (
    TakesStagesTogether, BlamesLinksOfLateRanks, NeverFrees, NamesAgainAndAgain, KnowsNoDirections,
    *(pytest.param(broken, marks=pytest.mark.slow)
      for broken in (NamesTheLongest, NamesAtTheFirstLook, NeverForgets, KnowsNoReasons)),
)  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_watch_is_found(broken: type[SlowRankWatch]) -> None:
    assert next(faults(broken, range(60)), "") != ""
