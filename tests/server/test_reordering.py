"""A summation server hears everything in another order, twice, late and once more: each sum is exact, in machine order,
and each contribution counts once. Over real connections, which also end and begin again."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from support.data_plane import WAIT_S, Machine, Server, exact_sum, random_values
from support.summation import SETTINGS

from byteps_py.tensors import DType
from byteps_py.wire.data_link import RESENT, SUPPLY, Kind

MACHINES, KEYS, ROUNDS = 3, 5, 15
COUNT = 300


pytestmark = pytest.mark.usefixtures("zeromq_collector")


def contribution(machine: int, key: int, round_: int) -> np.ndarray:
    return random_values(DType.FLOAT32, COUNT, seed=(machine * KEYS + key) * ROUNDS + round_)


def sum_of(key: int, round_: int) -> bytes:
    return exact_sum(DType.FLOAT32, [contribution(machine, key, round_) for machine in range(MACHINES)]).tobytes()


class Peer:
    """A machine that keeps to the protocol, but for its order and its repetitions."""

    def __init__(self, server: Server, index: int, chance: random.Random) -> None:
        self._server, self._index, self._chance = server, index, chance
        self._connect()
        self._done = [0] * KEYS  # the last round whose result is there
        self._asked = [0] * KEYS  # the round whose result is due; 0: none
        self.first = self.again = self.stale = self.supplied = self.connected = 0  # what has happened, how often

    @property
    def is_done(self) -> bool:
        return self._done == [ROUNDS] * KEYS and not any(self._asked)

    def _give(self, key: int, round_: int, flags: int = 0) -> None:
        data = contribution(self._index, key, round_).tobytes()
        self.machine.push(data, key=key, round=round_, flags=flags)

    def act(self) -> bool:
        """Say something about any key. False if that is nothing."""
        key, dice = self._chance.randrange(KEYS), self._chance.random()
        asked, done = self._asked[key], self._done[key]
        if dice < 0.02 and self.connected < 3:
            self._connect_again()
        elif asked and dice < 0.4:
            self._give(key, asked)
        elif done > 1 and dice < 0.2:
            self._give(key, self._chance.randrange(1, done))
        elif not asked and 0 < done < ROUNDS and dice < 0.25:  # as if its answer had been lost
            self._asked[key] = done
            self._give(key, done, RESENT)
        elif not asked and done < ROUNDS:
            self._asked[key] = done + 1
            self._give(key, done + 1)
        else:
            return False
        return True

    def _connect(self) -> None:
        self.machine: Machine = self._server.machine(self._index)
        self.machine.prove()
        self.machine.enter()

    def _connect_again(self) -> None:
        self.connected += 1
        self.machine.close()
        self._connect()
        keys = [key for key in range(KEYS) if self._asked[key]]
        self._chance.shuffle(keys)
        for key in keys:
            self._give(key, self._asked[key], RESENT)

    def hear(self) -> None:
        header, payload = self.machine.receive_any()
        key, round_ = header.key, header.round
        if header.kind is Kind.ANSWER:
            assert round_ in (self._asked[key], self._done[key]), "the answer to something else"
            assert payload == sum_of(key, round_)
            if round_ == self._asked[key]:
                self.again += round_ == self._done[key]
                self.first += round_ > self._done[key]
                self._asked[key], self._done[key] = 0, round_
        elif header.kind is Kind.WANT:
            if round_ <= self._done[key]:
                self.supplied += 1
                self._give(key, round_, RESENT | SUPPLY)
        elif header.kind is not Kind.AWAITED:
            assert header.kind is Kind.REFUSED
            assert payload.partition(b"\n")[2].startswith(b"stale: "), payload
            assert round_ <= max(self._asked[key], self._done[key])
            self.stale += 1


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))])
def test_sums_are_exact_whatever_comes_twice_or_late_or_in_another_order(seed: int) -> None:
    chance = random.Random(seed)
    with Server(SETTINGS, MACHINES) as server:
        peers = [Peer(server, index, chance) for index in range(MACHINES)]
        deadline_s = time.monotonic() + 2 * WAIT_S
        while not all(peer.is_done for peer in peers):
            assert time.monotonic() < deadline_s
            has_acted = sum(peer.act() for peer in chance.sample(peers, MACHINES)) > 0
            for peer in peers:
                while peer.machine.socket.poll(0 if has_acted else 5):
                    peer.hear()
        while server.link.statistics().bytes_in_flight:  # what came late is summed once more, of what others supply
            assert time.monotonic() < deadline_s
            for peer in peers:
                while peer.machine.socket.poll(5):
                    peer.hear()
        assert [peer.first for peer in peers] == [KEYS * ROUNDS] * MACHINES
        for happened in ("again", "stale", "supplied", "connected"):
            assert any(getattr(peer, happened) for peer in peers), happened
        statistics = server.link.statistics()
        assert statistics.bytes_in_flight == 0
        assert statistics.rounds >= KEYS * ROUNDS
