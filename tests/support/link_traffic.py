"""A cluster that trains, as its heartbeats show it: the bytes of each connection, and how long they were on their way.

The model is that of shaped links between real processes. Transfers of the machine that takes longest are on their way
all the time. The others take only as long as the machines at their ends need among each other, or less, since not all
of a machine's transfers are at the same time. Rates scatter by some percent. Between two sums, ranks compute.
"""

from __future__ import annotations

import random
from fractions import Fraction

from byteps_py.placement.link_optimum import LinkOptimum
from byteps_py.placement.shares import carried
from byteps_py.proto import control_pb2 as pb
from support.scheduler_core import running

EVERY_S = 0.4
_NOISE = 0.06
#: How much shorter a transfer between two machines takes if one of them has nothing else to do, and many the same.
_IDLE = 0.6
MBIT = 1000.0  # as the members declare it


class Traffic:
    """n GPU machines and k CPU machines behind links of ``rates``, CPU machines first, which may be changed.

    ``compute_s``: from a sum to the next; ``mbytes``: of gradients; ``unread``: machines whose programs read slowly;
    ``bursts``: what a probe shows of a link's rate, at least and at most: others use the links as well; ``answering``:
    the rate in Mbit/s at which the services of the CPU machines answer, if it is below that of the link; ``lingering``:
    machines whose transfers are on their way so many times longer than their links need, since they send a little again
    and again. ``cluster``: as for ``running``.
    """

    def __init__(
        self, rng: random.Random, n: int, k: int, compute_s: float = 0.0, mbytes: float = 160.0, **cluster: object
    ) -> None:
        self._rng, self.n, self.k = rng, n, k
        self.cluster, self._workers, servers = running(n, k, **cluster)
        self._cpu, self._gpu = servers[:k], servers[k:]
        self.rates = [MBIT] * (k + n)
        self.unread = [False] * (k + n)
        self.answering = [float("inf")] * k
        self.lingering: dict[int, float] = {}
        self.bursts = 0.8, 1.03
        self.every_s = EVERY_S  # services report
        self.probes = 0  # so far
        self._told = dict.fromkeys(self.cluster.told, 0)  # messages that were looked at
        self.compute_s, self.mbytes = compute_s, mbytes
        self._left_s = 0.0  # of this sum, or of the computation before the next
        self._is_sum = False
        self.epochs: list[tuple[float, str]] = []
        self._epoch = self.cluster.core.job.roster.epoch

    @property
    def shares(self) -> list[float]:
        """Of the model, of every machine: CPU machines first."""
        roster = self.cluster.core.job.roster
        weights = [m.weight for m in roster.cpu_servers()]
        by_machine = {m.facts.machine_index: m.weight for m in roster.gpu_servers()}
        weights += [by_machine.get(index, 0) for index in range(self.n)]
        return [weight / sum(weights) for weight in weights]

    @property
    def said(self) -> str:
        """What the log of the first machine said last about links."""
        told = [m.slow.message for m in self.cluster.told[self._workers[0]] if m.WhichOneof("body") == "slow"]
        return told[-1] if told else ""

    @property
    def over_optimum(self) -> float:
        """The time of a sum with the present shares, over the least there can be for these rates."""
        rates = self._carried
        best = LinkOptimum(rates[: self.k], rates[self.k :], self.k < self.n)
        return float(best.time_of([Fraction(share) for share in self.shares]) / best.time)

    @property
    def _carried(self) -> list[float]:
        """The rates of links and services together."""
        return [*map(min, self.rates, self.answering), *self.rates[self.k :]]

    @property
    def sum_s(self) -> float:
        """The time of a sum: that of the machine that takes longest."""
        shares = [Fraction(share) for share in self.shares]
        loads = carried(self.n, shares[: self.k], shares[self.k :])
        return max(float(load) * 8 * self.mbytes / rate for load, rate in zip(loads, self._carried, strict=True))

    def run(self, seconds: float) -> None:
        """Train for so long."""
        until = self.cluster.now + seconds
        while self.cluster.now < until:
            self._pass(self.every_s)

    def _pass(self, seconds: float) -> None:
        busy_s, left = 0.0, seconds
        sum_s = self.sum_s
        while left > 0:
            if self._left_s <= 0:
                self._is_sum = not self._is_sum or self.compute_s <= 0
                self._left_s = sum_s if self._is_sum else self.compute_s
            step = min(left, self._left_s)
            self._left_s -= step
            left -= step
            busy_s += step if self._is_sum else 0.0
        self._say(busy_s, busy_s / sum_s)
        self._answer_probes()
        cluster = self.cluster
        cluster.now += seconds
        cluster.take(cluster.core.tick(cluster.now))
        epoch = cluster.core.job.roster.epoch
        if epoch != self._epoch:
            self._epoch = epoch
            self.epochs.append((cluster.now, cluster.core.job.reason))

    def _say(self, busy_s: float, sums: float) -> None:
        """Every service's heartbeat: of ``sums`` sums, which took ``busy_s``."""
        n, k, shares = self.n, self.k, self.shares
        sent: dict[tuple[int, int], float] = {}  # Mbit by machines
        for machine in range(n):
            for holder, share in enumerate(shares):
                if share and holder != k + machine:
                    sent[k + machine, holder] = sent.get((k + machine, holder), 0.0) + share * self.mbytes * 8
                    sent[holder, k + machine] = sent.get((holder, k + machine), 0.0) + share * self.mbytes * 8
        times = self._times(sent)
        roster = self.cluster.core.job.roster
        ids = {m.facts.machine_index: m.id for m in roster.gpu_servers()}
        cpu_ids = [m.id for m in roster.cpu_servers()]
        holder_ids = [*cpu_ids, *(ids.get(index, 0) for index in range(n))]

        def usage(peer: int, source: int, target: int, mbit: float) -> pb.LinkUsage:
            scatter = self._rng.uniform(1 - _NOISE, 1 + _NOISE)
            longer = max(self.lingering.get(source, 1.0), self.lingering.get(target, 1.0))
            took_s = min(longer * busy_s, longer * times[source, target] * sums * scatter)
            unread_s = 0.9 * took_s if self.unread[target] else 0.0
            return pb.LinkUsage(peer=peer, bytes=int(mbit * sums * 125_000), busy_s=took_s, unread_s=unread_s)

        for machine in range(n):
            pushes = [
                usage(holder_ids[holder], k + machine, holder, share * self.mbytes * 8)
                for holder, share in enumerate(shares)
                if share and holder != k + machine
            ]
            heartbeat = pb.Heartbeat(links=pushes, servers=self._paces(machine))
            self.cluster.say(self._workers[machine], heartbeat=heartbeat)
        for holder, connection in enumerate([*self._cpu, *self._gpu]):
            answers = [
                usage(machine, holder, k + machine, shares[holder] * self.mbytes * 8)
                for machine in range(n)
                if shares[holder] and holder != k + machine
            ]
            self.cluster.say(connection, heartbeat=pb.Heartbeat(links=answers))

    def _answer_probes(self) -> None:
        machines = dict(zip([*self._cpu, *self._workers], self.rates, strict=True))
        for connection, rate in machines.items():
            told = self.cluster.told[connection]
            for message in told[self._told[connection] :]:
                if message.WhichOneof("body") == "probe":
                    self.probes += 1
                    probed = pb.Probed(number=message.probe.number, mbit=rate * self._rng.uniform(*self.bursts))
                    self.cluster.say(connection, probed=probed)
            self._told[connection] = len(told)

    def _paces(self, machine: int) -> list[pb.ServerPace]:
        """What a machine sees of the other services' answers: a queue of so many megabits waits for each."""
        roster, queued = self.cluster.core.job.roster, 20.0
        found = []
        gpu = [server for server in roster.gpu_servers() if server.facts.machine_index != machine]
        for server, rate in zip(
            [*roster.cpu_servers(), *gpu], [*self._carried[: self.k], *[MBIT] * len(gpu)], strict=True
        ):
            if server.weight:
                answer_s = (0.005 + queued / rate) * self._rng.uniform(1 - _NOISE, 1 + _NOISE)
                ratio = answer_s / (0.005 + queued / server.link_mbit) if server.link_mbit else 1.0
                found.append(pb.ServerPace(member_id=server.id, answer_s=answer_s, ratio=ratio, awaited=answer_s))
        return found

    def _times(self, sent: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
        """For how long of a sum something is on its way, by machines at both ends."""
        times: dict[tuple[int, int], float] = {}
        left, burst = set(range(self.n + self.k)), 1.0
        while left:
            mine = {
                machine: max(
                    sum(mbit for ends, mbit in sent.items() if ends[way] == machine and ends[1 - way] in left)
                    for way in (0, 1)
                )
                / self.rates[machine]
                for machine in left
            }
            longest = max(mine.values())
            full = [machine for machine in left if mine[machine] >= 0.9 * longest]
            # Many full machines wait for each other: one with less to do has its transfers on their way more briefly.
            idle = _IDLE * (len(full) - 1) / (self.n + self.k - 1)
            for ends in sent:
                if set(ends) <= left and not set(ends).isdisjoint(full):
                    least = min(mine[end] for end in ends) / (longest or 1.0)
                    times[ends] = longest * burst * (1 - idle * (1 - least))
            left.difference_update(full)
            burst = self._rng.uniform(0.7, 1.05)
        return times
