"""Rings: what is laid in a slot stays there until everybody has read it, in whatever order ranks and messages come."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import given, strategies

from byteps_py.errors import JoinedError, MismatchError, ProtocolError, StallError
from byteps_py.session.nearby import messages
from byteps_py.session.nearby import ring as rings
from byteps_py.session.nearby.ledger import Ledger
from byteps_py.session.nearby.messages import Kind, Message
from byteps_py.session.nearby.ring import Ring
from byteps_py.session.nearby.waiting import Wait
from byteps_py.shm import Block
from byteps_py.torch.shares.chunks import Chunks

SLOT_BYTES = 16
WAIT_S = 30.0

# ---- shares and chunks ---------------------------------------------------------------------------------------------


@given(
    count=strategies.integers(1, 5000),
    itemsize=strategies.sampled_from([1, 2, 4, 8]),
    members=strategies.integers(2, 9),
    lines=strategies.integers(1, 4),
)
def test_chunks_of_all_shares_are_the_whole_tensor(count: int, itemsize: int, members: int, lines: int) -> None:
    chunks = Chunks(count, itemsize, members, lines * 64 * members + 7)
    pieces = [chunks.of(position, chunk) for position in range(members) for chunk in range(chunks.count)]
    assert [e for first, length in pieces for e in range(first, first + length)] == list(range(count))
    assert max(length for _, length in pieces) <= chunks.room
    assert chunks.room * itemsize == lines * 64
    assert all(first * itemsize % 64 == 0 for first, length in pieces if length)
    assert chunks.steps == chunks.count + 1


# ---- the ring, without sockets -------------------------------------------------------------------------------------


class Segment:
    def __init__(self) -> None:
        self.view = memoryview(bytearray(8 * SLOT_BYTES))
        self.address, self.nbytes = 0, 8 * SLOT_BYTES


class Impatience:
    """Whoever would wait gets a StallError."""

    def until(self, condition: Any, wait: Wait, timeout_s: float) -> None:
        if not condition():
            raise StallError("not yet")

    def ended(self, wait: Wait) -> None: ...


class Outbox:
    announced = 1

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()

    def send(self, data: bytes, fd: int = -1) -> None:
        self.messages.append(messages.unpack(memoryview(data), len(data)))


class Rank:
    """One of ``size``, with a ring to the others; what it sends waits in ``outboxes`` until somebody delivers it."""

    def __init__(self, me: int, size: int, segments: list[Segment]) -> None:
        self.me = me
        self.others = [other for other in range(size) if other != me]
        self.ledger = Ledger(me)
        self.outboxes = {other: Outbox() for other in self.others}
        outgoing = type("", (), {"allocate": lambda _, nbytes: (Block(0, 32, nbytes, 0), segments[me])})()
        incoming = type("", (), {"find": lambda _, source, number, end: segments[source]})()
        self.ring = Ring(
            me, 0, self.others, SLOT_BYTES, threading.Lock(), self.ledger, outgoing, incoming,
            cast(Any, self.outboxes), cast(Any, Impatience()), lambda outbox: None,
        )  # fmt: skip

    def begin(self, name: str, steps: int) -> None:
        self.ring.begin(self.ledger.stream(name, self.others), steps)

    def work(self, operations: list[int], words: list[set[int]] | None = None) -> Iterator[None]:
        """Operations of so many steps, with pauses wherever another rank may go on. ``words``: of each operation, who
        has said that its first step is written; in these, nobody begins before all have."""
        for number, steps in enumerate(operations):
            is_spoken_of = words is not None and steps > 1
            if words is not None and is_spoken_of:
                self.ring.prepare()
                for text in (b"of no use", tag(self.me, number, 0)):  # an offer in vain, and one that all make
                    self.ring.mine(0).memory[: len(text)] = text
                    yield
                words[number].add(self.me)
                while len(words[number]) <= len(self.others):
                    yield
            is_told = is_spoken_of and self.ring.knows_all
            self.begin(f"stream {number % 2}", steps)
            for step in range(1 if is_told else 0, steps + 1):
                while step > is_told:
                    try:
                        self.ring.await_step(step - 1, 0.0)
                        break
                    except StallError:
                        yield
                for other in self.others if step else ():
                    yield
                    assert bytes(self.ring.theirs(other, step - 1).memory) == tag(other, number, step - 1)
                if step < steps:
                    yield
                    self.ring.mine(step).memory[:] = tag(self.me, number, step)
                    yield
                    self.ring.lay(2 if is_told and step == 1 else 1)
            self.ring.end()


def tag(rank: int, operation: int, step: int) -> bytes:
    return f"{rank} {operation} {step}".encode().ljust(SLOT_BYTES)


def some(size: int) -> list[Rank]:
    segments = [Segment() for _ in range(size)]
    return [Rank(me, size, segments) for me in range(size)]


def deliver(ranks: list[Rank], source: int, target: int) -> bool:
    waiting = ranks[source].outboxes[target].messages
    if not waiting:
        return False
    assert ranks[target].ledger.came(waiting.popleft(), None) is None
    return True


def deliver_all(ranks: list[Rank]) -> None:
    for rank in ranks:
        for target in rank.others:
            while deliver(ranks, rank.me, target):
                pass


def play(seed: int) -> None:
    """Ranks and messages in random order, to the end of all operations."""
    order = random.Random(seed)
    ranks = some(order.randint(2, 4))
    operations = [order.randint(1, 5) for _ in range(order.randint(1, 5))]
    words: list[set[int]] = [set() for _ in operations]
    running = {rank.me: rank.work(operations, words if seed % 2 else None) for rank in ranks}
    ways = [(rank.me, other) for rank in ranks for other in rank.others]
    favourite = order.randrange(len(ranks))  # goes on as far as it can: the most dangerous order
    while running:
        me = favourite if order.random() < 0.5 else order.randrange(len(ranks))
        if me in running and order.random() < 0.7:
            if next(running[me], "over") == "over":
                del running[me]
        else:
            deliver(ranks, *order.choice(ways))
    deliver_all(ranks)
    assert all(not flow.parcels for rank in ranks for flow in rank.ledger._flows.values())  # nothing is kept


def test_what_is_laid_stays_until_all_have_read_it() -> None:
    for seed in range(2000):
        play(seed)


def test_with_one_slot_it_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "SLOTS", 1)
    with pytest.raises(AssertionError, match="=="):
        test_what_is_laid_stays_until_all_have_read_it()


def test_a_member_that_does_something_else_is_told_of() -> None:
    ranks = some(2)
    for rank, steps in zip(ranks, (2, 3), strict=True):
        rank.begin("s", steps)
        rank.ring.lay()
    deliver_all(ranks)
    for rank, text in zip(ranks, ("rank 1 lays 48 bytes after 0 steps, rank 0 32", "rank 0 lays 32"), strict=True):
        with pytest.raises(MismatchError, match=text):
            rank.ring.await_step(0, 0.0)


def test_a_member_that_is_elsewhere_in_the_order_is_told_of() -> None:
    ranks = some(2)
    for name in ("one", "two"):
        ranks[0].begin(name, 1)
        ranks[0].ring.lay()
        deliver_all(ranks)
        if name == "one":
            ranks[1].begin(name, 1)
            ranks[1].ring.lay()
            deliver_all(ranks)
            ranks[0].ring.await_step(0, 0.0)
            ranks[0].ring.end()
    ranks[1].begin("two", 1)  # without having ended "one"
    with pytest.raises(MismatchError, match="rank 0 lays 16 bytes after 1 steps, rank 1 16 after 0"):
        ranks[1].ring.await_step(0, 0.0)


def test_nothing_begins_without_a_member_that_has_joined() -> None:
    ranks = some(3)
    ranks[0].begin("s", 2)
    ranks[0].ring.lay()
    deliver_all(ranks)
    for target in (0, 1):
        ranks[target].ledger.came(Message(Kind.JOINED, 2, 0), None)
    with pytest.raises(JoinedError, match="while rank 2 has joined"):
        ranks[0].ring.await_step(0, 0.0)
    for rank in ranks[:2]:
        with pytest.raises(JoinedError, match="while rank 2 has joined"):
            rank.begin("s", 2)
    for rank in ranks:
        rank.ledger.start_anew()
    running = [rank.work([3, 1]) for rank in ranks]
    while running:
        running = [work for work in running if next(work, "over") != "over"]
        deliver_all(ranks)


def test_memory_that_is_not_there_is_refused() -> None:
    ranks = some(2)

    def find(source: int, number: int, end: int) -> Segment:
        raise ProtocolError(f"no memory up to {end}")

    ranks[1].ring._incoming = cast(Any, type("", (), {"find": staticmethod(find)})())
    ranks[0].begin("s", 1)
    ranks[0].ring.lay()
    ranks[1].begin("s", 1)
    deliver_all(ranks)
    with pytest.raises(ProtocolError, match="no memory up to 64"):  # 32, and two slots
        ranks[1].ring.await_step(0, 0.0)
