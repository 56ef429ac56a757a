"""Large sums between machines, while a rank joins instead: whoever of the others has begun, and whomever it waits for,
all of them give up. Every rank is in this process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
import torch
from support.connected import SETTINGS, WAIT_S, ConnectedRank, connected

from byteps_py.errors import JoinedError, StallError
from byteps_py.torch.collectives.all_reduce import shared_memory
from byteps_py.torch.collectives.all_reduce.direct import DirectAllReduce
from byteps_py.torch.collectives.all_reduce.hierarchical import HierarchicalAllReduce
from byteps_py.torch.collectives.all_reduce.large import LargeAllReduce, LargeSum

SLOT_BYTES = 4096
#: (elements of a tensor, whether each member needs its own share only). Of 1000 and 1200 elements every member adds a
#: share, of 16 only the first one does.
SUMS = [(1000, False), (16, False), (1200, True)]
#: A rank that waits for another one gives up its turn after this time.
TURN_S = 0.002
#: In so many turns, the members that have begun come as far as they can.
TURNS = 3


class Group:
    """All of ``ranks``, with a LargeAllReduce each."""

    def __init__(self, ranks: list[ConnectedRank]) -> None:
        self.ranks = ranks
        self.sums = [self._sums_of(rank) for rank in ranks]

    def _sums_of(self, rank: ConnectedRank) -> LargeAllReduce:
        transport, size, on_machine = rank.transport, len(self.ranks), len(rank.near)
        near = [other for other in rank.near if other != rank.rank]
        if not near:
            return DirectAllReduce(transport, rank.rank, {other: other for other in range(size) if other != rank.rank})
        slots = transport.shared_slots(transport.stream("slots", near), SLOT_BYTES)
        machines = [range(first, first + on_machine) for first in range(0, size, on_machine)]
        return HierarchicalAllReduce(transport, range(size), machines, rank.rank, slots)

    def start(self, elements: int, scatters: bool) -> list[LargeSum]:
        """Each rank's sum."""
        size, name = len(self.ranks), f"x{elements}"
        self.sources = [torch.full((elements,), rank + 1.0, device="cpu") for rank in range(size)]
        self.targets = [source.chunk(size)[rank] if scatters else source for rank, source in enumerate(self.sources)]
        return [
            sums.start(source, target, False, name, scatters)
            for sums, source, target in zip(self.sums, self.sources, self.targets, strict=True)
        ]

    def check_sums(self) -> None:
        """All sums are complete, and right."""
        total = sum(rank + 1.0 for rank in range(len(self.ranks)))
        assert all(torch.equal(target, torch.full_like(target, total)) for target in self.targets)

    def join(self, joined: int) -> None:
        """Rank ``joined`` joins, and all others know."""
        self.ranks[joined].transport.join(lambda: None)
        for rank in self.ranks:
            if rank.rank != joined:
                rank.wait_until(lambda rank=rank: bool(rank.transport.joined_among([joined])), WAIT_S, lambda: "joined")

    def begin_era(self) -> None:
        for rank in self.ranks:
            rank.transport.begin_era()


def go_on(work: LargeSum) -> bool:
    """As far as it can. True if it is over."""
    try:
        work.run(time.monotonic() + TURN_S)
    except StallError:
        return False
    return True


def go_to_the_end(works: list[LargeSum]) -> None:
    deadline = time.monotonic() + WAIT_S
    while works := [work for work in works if not go_on(work)]:
        assert time.monotonic() < deadline


@pytest.fixture(
    params=[(4, 2), (3, 1), pytest.param((6, 3), marks=pytest.mark.slow), pytest.param((6, 2), marks=pytest.mark.long)],
    ids=lambda layout: f"{layout[0]} ranks, {layout[1]} on each machine",
)
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    assert shared_memory.is_able()
    count, on_machine = request.param
    with connected(count, SETTINGS["open"], on_machine) as ranks:
        group = Group(ranks)
        yield group
        group.sums.clear()  # they hold the shared memory


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("elements", "scatters"), SUMS)
def test_nobody_goes_on_without_a_rank_that_has_joined(
    group: Group, elements: int, scatters: bool, is_first: bool
) -> None:
    ranks = range(len(group.ranks))
    for joined, count in itertools.product(ranks if len(ranks) <= 4 else (1, len(ranks) - 1), ranks):
        others = [rank for rank in ranks if rank != joined]
        for begun in itertools.combinations(others, count):
            if not is_first:
                go_to_the_end(group.start(elements, scatters))
            works = group.start(elements, scatters)
            for rank in begun * TURNS:
                assert not go_on(works[rank])
            group.join(joined)
            for rank in sorted(others, key=lambda rank: rank in begun):
                with pytest.raises(JoinedError, match=rf"rank {joined} has called join\(\)"):
                    works[rank].run(time.monotonic() + WAIT_S)
                source = group.sources[rank]
                assert torch.equal(source, torch.full_like(source, rank + 1.0))
            group.begin_era()
    go_to_the_end(group.start(elements, scatters))
    group.check_sums()


@pytest.mark.parametrize(("elements", "scatters"), SUMS)
def test_a_rank_that_joins_after_its_sum_lets_the_others_complete_it(
    group: Group, elements: int, scatters: bool
) -> None:
    for joined in range(len(group.ranks)):
        works = group.start(elements, scatters)
        left = list(works)
        while works[joined] in left:
            left = [work for work in left if not go_on(work)]
        group.join(joined)
        go_to_the_end(left)
        group.check_sums()
        group.begin_era()
