"""Third machines between two others whose way is slow, on simulated networks: who gets one, and for how long."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from support.scheduler_core import running

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.health import relay_sentences
from byteps_py.scheduler.pair_watch import (
    EVERY_S,
    HOLD_S,
    RETRY_S,
    PairUsage,
    PairWatch,
    RelayChange,
    RelayState,
)
from byteps_py.scheduler.rate_watch import MBIT, Usage

REPORT_S = 0.5
LINK = 400.0
#: Until a third machine is used, at most: it must be slow for long enough, and reports are of both times at first.
SOON_S = HOLD_S + 5.0
#: Until it is known whether that helps.
TRIED_S = SOON_S + 17.0


@dataclass
class Network:
    """Machines 0 to ``workers`` - 1 have ranks, the others none. ``ways``: the Mbit/s of a pair's direct way, where
    that is less than their links. ``flows``: the pairs that send each other as much as they can. ``noise``: of reports.
    ``looks``: the part of their rates that reports show.
    """

    workers: int
    others: int
    ways: dict[tuple[int, int], float] = field(default_factory=dict)
    flows: list[tuple[int, int]] = field(default_factory=list)
    links: dict[int, float] = field(default_factory=dict)
    noise: random.Random | None = None
    watch: PairWatch = field(default_factory=PairWatch)
    now_s: float = 0.0
    changes: list[tuple[float, RelayChange]] = field(default_factory=list)
    busy: float = 1.0
    unread: float = 0.0
    looks: float = 1.0

    def __post_init__(self) -> None:
        self.links = dict.fromkeys(range(self.workers + self.others), LINK) | self.links

    def rates(self) -> dict[tuple[int, int, int], float]:
        """By (source, target, relay), -1 for the direct way: fair shares of all that a flow passes."""
        passes: dict[tuple[int, int, int], list[object]] = {}
        for a, b in self.flows:
            for source, target in ((a, b), (b, a)):
                way = ("way", source, target)
                passes[source, target, -1] = [("out", source), ("in", target), way]
                relay = self.watch.relays.get((min(a, b), max(a, b)))
                if relay is not None:
                    legs = [("way", source, relay), ("way", relay, target)]
                    ends = [("out", source), ("in", relay), ("out", relay), ("in", target)]
                    passes[source, target, relay] = [*ends, *legs]
        left: dict[object, float] = {}
        for each in (resource for resources in passes.values() for resource in resources):
            kind, *who = each  # type: ignore[misc]
            limit = self.ways.get((min(who), max(who)), 1e9) if kind == "way" else self.links[who[0]]
            left[each] = limit
        found: dict[tuple[int, int, int], float] = {}
        while len(found) < len(passes):
            open_ = {flow: resources for flow, resources in passes.items() if flow not in found}
            users = {r: [f for f, of in open_.items() if r in of] for r in left}
            tightest = min((r for r in left if users[r]), key=lambda r: left[r] / len(users[r]))
            share = left[tightest] / len(users[tightest])
            for flow in users[tightest]:
                found[flow] = share
                for resource in passes[flow]:
                    left[resource] -= share
        return found

    def run(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            rates = self.rates()
            for source in range(self.workers):
                usages = []
                for a, b in self.flows:
                    if source not in (a, b):
                        continue
                    target = b if source == a else a
                    scatter = self.looks * (self.noise.uniform(0.85, 1.15) if self.noise else 1.0)
                    direct = rates[source, target, -1] * scatter
                    relayed = sum(mbit for (s, t, r), mbit in rates.items() if (s, t) == (source, target) and r != -1)
                    busy_s = REPORT_S * self.busy
                    usages.append(
                        PairUsage(
                            source, target, int(direct * busy_s / MBIT), busy_s, busy_s * self.unread,
                            int(relayed * scatter * busy_s / MBIT), busy_s if relayed else 0.0,
                        )
                    )  # fmt: skip
                self.watch.report(usages, (), self.now_s)
            self.watch.set_machines(self.links, range(self.workers + self.others))
            self.changes += [(self.now_s, each) for each in self.watch.changes(self.now_s)]
            self.now_s += REPORT_S

    def total(self, a: int, b: int) -> float:
        return sum(mbit for (s, t, _), mbit in self.rates().items() if (s, t) == (a, b))


def test_a_slow_way_gets_a_third_machine_until_it_is_fast_again() -> None:
    net = Network(2, 1, ways={(0, 1): 20.0}, flows=[(0, 1)])
    net.run(SOON_S)
    assert net.watch.relays == {(0, 1): 2}
    assert net.total(0, 1) == pytest.approx(220)  # the third machine's link carries both directions
    net.run(TRIED_S)
    assert [change.state for _, change in net.changes] == [RelayState.TRYING, RelayState.CONFIRMING, RelayState.RELAYED]
    net.run(200)
    assert len(net.changes) == 3
    net.ways.clear()
    net.run(TRIED_S)
    assert net.watch.relays == {}
    net.run(200)
    assert [change.state for _, change in net.changes[3:]] == [RelayState.CHECKING, RelayState.DIRECT]
    who = {0: "worker 0", 1: "worker 1", 2: "server 2"}
    assert relay_sentences([change for _, change in net.changes], who) == [
        "the way between worker 0 and worker 1 carries 20 Mbit/s, less than their links: their ranks reach each other "
        "through server 2 as well, with 220 Mbit/s in all",
        "the way between worker 0 and worker 1 carries 400 Mbit/s again: their ranks reach each other directly",
    ]


def test_a_way_that_looks_slower_and_faster_by_itself_needs_no_third_machine() -> None:
    net = Network(2, 1, flows=[(0, 1)])
    net.looks = 0.3
    net.run(HOLD_S + 1.0)
    assert [change.state for _, change in net.changes] == [RelayState.TRYING]
    net.looks = 0.6
    net.run(TRIED_S)
    states = [RelayState.TRYING, RelayState.CONFIRMING, RelayState.DIRECT]
    assert [change.state for _, change in net.changes[:3]] == states
    assert not any(change.is_news for _, change in net.changes)
    assert net.watch.kept() == []


def test_a_way_that_only_looks_fast_beside_the_other_keeps_it() -> None:
    net = Network(2, 1, ways={(0, 1): 0.45 * LINK}, flows=[(0, 1)])
    net.run(120)
    assert net.watch.relays == {(0, 1): 2}
    checks = [at_s for at_s, change in net.changes if change.state is RelayState.CHECKING]
    net.run(RETRY_S * 10)
    later = [at_s for at_s, change in net.changes if change.state is RelayState.CHECKING][len(checks) :]
    assert len(checks) >= 1
    assert len(later) <= 4  # each comes twice as late as the one before
    assert net.watch.relays == {(0, 1): 2}


def test_a_third_machine_whose_own_way_is_slow_is_tried_and_left() -> None:
    net = Network(2, 1, ways={(0, 1): 20.0, (0, 2): 2.0}, flows=[(0, 1)])
    net.run(TRIED_S)
    assert [change.state for _, change in net.changes] == [RelayState.TRYING, RelayState.DIRECT]
    assert net.watch.relays == {}
    net.run(10 * RETRY_S)
    assert len(net.changes) <= 2 * 5
    assert relay_sentences([change for _, change in net.changes], {}) == []


def test_the_machine_with_the_most_room_relays() -> None:
    busy = [Usage(9, 2, 3, int(300 * REPORT_S / MBIT), REPORT_S, 0.0)]
    net = Network(2, 3, ways={(0, 1): 20.0}, flows=[(0, 1)])
    while not net.watch.relays and net.now_s < SOON_S:
        net.watch.report((), busy, net.now_s)
        net.run(REPORT_S)
    assert net.watch.relays == {(0, 1): 4}


@pytest.mark.parametrize(
    "net",
    [
        Network(2, 1, flows=[(0, 1)]),
        Network(4, 1, flows=[(a, b) for a in range(4) for b in range(a)]),
        Network(4, 2, flows=[(0, 3), (1, 3), (2, 3)]),  # all send to one
        Network(3, 1, flows=[(0, 1), (0, 2), (1, 2)], links={1: 60.0}),  # a slow link, as is known
        Network(2, 1, ways={(0, 1): 20.0}, flows=[(0, 1)], busy=0.1),  # nobody waits for it
        Network(2, 1, ways={(0, 1): 20.0}, flows=[(0, 1)], unread=0.9),  # the receiver does not read
        Network(2, 0, ways={(0, 1): 20.0}, flows=[(0, 1)]),  # no third machine
        Network(2, 1, ways={(0, 1): 20.0}, flows=[(0, 1)], links={0: 0.0}),  # of an unknown rate
    ],
)  # fmt: skip
def test_nobody_gets_one_in_vain(net: Network) -> None:
    if net.links.get(0) == 0.0:
        net.links[0] = LINK
        net.watch.set_machines({0: 0.0, 1: LINK, 2: LINK}, (2,))
        usage = PairUsage(0, 1, 1_000_000, REPORT_S, 0.0)
        for step in range(60):
            net.watch.report([usage], (), step * REPORT_S)
            assert net.watch.changes(step * REPORT_S) == []
        return
    net.run(120)
    assert net.changes == []


def test_a_relay_that_leaves_is_given_up() -> None:
    net = Network(2, 2, ways={(0, 1): 20.0}, flows=[(0, 1)])
    net.run(SOON_S + TRIED_S)
    assert net.watch.relays == {(0, 1): 2}
    lost = net.watch.set_machines({0: LINK, 1: LINK, 3: LINK}, (0, 1, 3))
    assert [(change.pair, change.state, change.relay) for change in lost] == [((0, 1), RelayState.DIRECT, 2)]
    assert relay_sentences(lost, {}) == []  # its loss is told
    assert net.watch.relays == {}


def test_judgements_come_every_half_second() -> None:
    net = Network(2, 1, ways={(0, 1): 20.0}, flows=[(0, 1)])
    net.run(1.0)
    assert net.watch.changes(net.now_s - EVERY_S / 2 - REPORT_S) == []


@pytest.mark.parametrize("seed", range(60))
def test_random_ways_do_not_flap(seed: int) -> None:
    """After each change of one way, a pair changes a few times at most, is left alone then, and uses a third machine
    only where that makes it faster."""
    dice = random.Random(seed)
    workers, others = dice.randint(2, 4), dice.randint(1, 2)
    pairs = [(a, b) for b in range(workers) for a in range(b)]
    net = Network(workers, others, flows=dice.sample(pairs, dice.randint(1, len(pairs))), noise=random.Random(seed))
    for _ in range(3):
        pair = dice.choice(net.flows)
        net.ways = {} if dice.random() < 0.4 else {pair: LINK * dice.uniform(0.02, 0.9)}
        before = len(net.changes)
        net.run(200)
        mine = [change for _, change in net.changes[before:]]
        kept = [change for change in mine if change.state in (RelayState.RELAYED, RelayState.DIRECT)]
        assert len(kept) <= 6 * len(net.flows), mine
        for used in net.watch.relays:
            limit = net.ways.get(used, LINK)
            assert limit < LINK, (used, net.ways, mine)
            # After a change of rates at the same time it is still on trial.
            assert net.total(*used) >= 1.1 * net.rates()[(*used, -1)]


def test_the_scheduler_tells_all_workers_of_a_relay_and_of_its_end() -> None:
    cluster, workers, servers = running(2, 1)
    roster = cluster.core.job.roster
    (spare,) = roster.cpu_servers()
    spare.facts.relay_address = "10.0.0.9:7000"
    for member in roster.link_owners():
        member.link_mbit = LINK

    def train(seconds: float, mbit: float, relayed_mbit: float = 0.0) -> list[pb.Relays]:
        for inbox in cluster.told.values():
            inbox.clear()
        until_s = cluster.now + seconds
        while cluster.now < until_s:
            for index, worker in enumerate(workers):
                sent = pb.PairUsage(machine_index=1 - index, bytes=int(mbit * REPORT_S / MBIT), busy_s=REPORT_S)
                if relayed_mbit:
                    sent.relayed_bytes, sent.relayed_busy_s = int(relayed_mbit * REPORT_S / MBIT), REPORT_S
                cluster.say(worker, heartbeat=pb.Heartbeat(pairs=[sent]))
            for server in servers:
                cluster.say(server, heartbeat=pb.Heartbeat())
            cluster.now += REPORT_S
            cluster.take(cluster.core.tick(cluster.now))
        told = [[m.relays for m in cluster.told[worker] if m.WhichOneof("body") == "relays"] for worker in workers]
        assert told[0] == told[1]
        return told[0]

    relay = pb.Relay(first_machine=0, second_machine=1, address="10.0.0.9:7000")
    assert train(SOON_S, 20.0) == [pb.Relays(relays=[relay])]
    told = train(TRIED_S, 20.0, 150.0)  # the direct way alone once more, and then as in the trial
    assert (told[0], told[-1]) == (pb.Relays(), pb.Relays(relays=[relay]))
    said = [m.slow.message for m in cluster.told[workers[0]] if m.WhichOneof("body") == "slow"]
    through = "reach each other through server"
    assert any(through in sentence for sentence in said), said
    assert any(through in sentence for sentence in cluster.core.status(cluster.now).slow)
    told = train(TRIED_S, 0.95 * LINK, 10.0)
    assert told[0] == pb.Relays()
    assert all(not each.relays for each in told)


def test_ranks_leave_a_third_machine_that_an_earlier_scheduler_gave_them() -> None:
    cluster, workers, _ = running(2, 1)
    for _ in range(12):
        sent = pb.PairUsage(machine_index=1, bytes=1000, busy_s=0.01, relayed_bytes=5000, relayed_busy_s=0.1)
        cluster.say(workers[0], heartbeat=pb.Heartbeat(pairs=[sent]))
        cluster.now += REPORT_S
    told = [m.relays for m in cluster.told[workers[1]] if m.WhichOneof("body") == "relays"]
    assert 1 <= len(told) <= 2
    assert told[0] == pb.Relays()


def test_a_machine_that_reports_a_pair_that_there_is_not_changes_nothing() -> None:
    cluster, workers, _ = running(2, 1)
    cluster.say(workers[0], heartbeat=pb.Heartbeat(pairs=[pb.PairUsage(machine_index=7, bytes=1 << 40, busy_s=1.0)]))
    cluster.say(workers[0], heartbeat=pb.Heartbeat(pairs=[pb.PairUsage(machine_index=0, bytes=1 << 40, busy_s=1.0)]))
    assert not [m for m in cluster.told[workers[0]] if m.WhichOneof("body") == "relays"]
