"""Ranks of one machine, all in this process, that add up in shares. The test says who goes on, and which message comes;
or each has a thread."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from byteps_py.errors import StallError
from byteps_py.session.peers import peer_protocol
from byteps_py.session.peers.message_matcher import MessageMatcher
from byteps_py.session.peers.peer_protocol import PeerMessage, PeerMessageKind
from byteps_py.session.peers.shared_slots import MemoryHost, OutgoingMemory, SharedSlots
from byteps_py.session.peers.waiting import Wait
from byteps_py.system.shm import Segment
from byteps_py.system.spin_policy import LOOK_S
from byteps_py.torch.collectives.all_reduce.shared_memory import SharedMemoryAllReduce, SharedMemorySum

SLOT_BYTES = 1024


class Turns:
    """Who would wait gets a StallError: the ranks take turns."""

    def spin_s(self) -> float:
        return 0.0

    def until(self, condition: Callable[[], bool], wait: Wait, timeout_s: float, has_spun: bool = False) -> None:
        if not condition():
            wait.missing()
            raise StallError("not yet")

    def ended(self, wait: Wait) -> None: ...


class Threads(Turns):
    """Who waits looks, and then sleeps until a message comes."""

    def __init__(self, came: threading.Condition) -> None:
        self._came = came
        self.sleeps = 0

    def spin_s(self) -> float:
        return random.choice([0.0, LOOK_S])

    def spun(self, in_vain: bool) -> None: ...

    def until(self, condition: Callable[[], bool], wait: Wait, timeout_s: float, has_spun: bool = False) -> None:
        with self._came:
            self.sleeps += 1
            if not self._came.wait_for(condition, timeout_s):
                raise StallError("nothing came")


class Outbox:
    announced = 1

    def __init__(self, deliver: Callable[[PeerMessage], None] | None) -> None:
        self.messages: deque[PeerMessage] = deque()
        self._deliver = deliver or self.messages.append

    def send(self, data: bytes, fd: int = -1) -> None:
        self._deliver(peer_protocol.unpack(memoryview(data), len(data)))


class Rank:
    """One of ``size``, with slots for the others. What it sends waits in ``outboxes`` until somebody delivers it; in
    threads it is there at once."""

    def __init__(self, me: int, size: int, world: list[Rank], in_threads: bool = False) -> None:
        self.me, self._world = me, world
        self.others = [other for other in range(size) if other != me]
        self.matcher, self.outgoing = MessageMatcher(me), OutgoingMemory()
        self.came = threading.Condition()
        self.waiter = Threads(self.came) if in_threads else Turns()
        self.outboxes = {other: Outbox(self._to(other) if in_threads else None) for other in self.others}
        incoming = type("", (), {"find": self.find})()
        host = MemoryHost(
            me, threading.Lock(), self.matcher, self.outgoing, cast(Any, incoming), cast(Any, self.outboxes),
            cast(Any, self.waiter), lambda outbox: None,
        )  # fmt: skip
        self.slots = SharedSlots(host, self.matcher.stream("slots", self.others), SLOT_BYTES)
        self.sums = SharedMemoryAllReduce(self.slots, me, {rank: rank for rank in range(size)})
        self.sums.step_spin_s = 0.0  # ranks take turns

    def find(self, source: int, number: int, end: int) -> Segment:
        return self._world[source].outgoing.segments[number]

    def _to(self, other: int) -> Callable[[PeerMessage], None]:
        def deliver(message: PeerMessage) -> None:
            target = self._world[other]
            with target.came:
                target.take(message)
                target.came.notify_all()

        return deliver

    def take(self, message: PeerMessage) -> None:
        if message.kind != PeerMessageKind.WAKE:
            assert self.matcher.on_message(message, None) is None

    def add_up(
        self, tensor: torch.Tensor, target: torch.Tensor | None = None, name: str = "x", scatters: bool = False
    ) -> SharedMemorySum:
        return SharedMemorySum(self.sums, tensor, tensor if target is None else target, False, name, scatters)


@contextmanager
def some(size: int, in_threads: bool = False) -> Iterator[list[Rank]]:
    ranks: list[Rank] = []
    ranks += [Rank(me, size, ranks, in_threads) for me in range(size)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.outgoing.close()


def deliver(ranks: list[Rank], source: int, target: int) -> bool:
    waiting = ranks[source].outboxes[target].messages
    if waiting:
        ranks[target].take(waiting.popleft())
        return True
    return False


def deliver_all(ranks: list[Rank]) -> None:
    for rank in ranks:
        for target in rank.others:
            while deliver(ranks, rank.me, target):
                pass


def go_on(work: SharedMemorySum) -> bool:
    """As far as it can. True if it is over."""
    try:
        work.run(0.0)
    except StallError:
        return False
    return True


def go_to_the_end(ranks: list[Rank], works: list[SharedMemorySum]) -> None:
    """Each rank's work, in turn, as far as it can; whatever is said comes at once."""
    while works := [work for work in works if not go_on(work)]:
        deliver_all(ranks)
