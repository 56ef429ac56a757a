"""Which rounds of a name ranks add up among themselves: the rule alone, with words that come late."""

from __future__ import annotations

import random
from collections import deque

import pytest

from byteps_py.torch.collectives.negotiation import IS_ABSENT, WAITS, OfferVotes

OFFER = 7


def test_what_is_said() -> None:
    rounds = OfferVotes((1, 2))
    both = {1: OFFER, 2: WAITS}
    steps = [
        # (of the round before, is waiting, is able) → what is said
        ({}, True, True, OFFER),  # all are taken to have waited
        (both, True, True, OFFER),
        (both, True, False, WAITS),
        (both, False, True, IS_ABSENT),
        (both, False, True, None),
        (both, True, True, WAITS),  # the others have not been told that it would say something
        ({1: OFFER}, True, True, WAITS),
        ({1: OFFER, 2: IS_ABSENT}, True, True, WAITS),
        (both, True, True, OFFER),
    ]
    for number, (said, is_waiting, is_able, word) in enumerate(steps, 1):
        assert rounds.begin(OFFER, is_waiting, is_able, said) == word, number
        assert rounds.number == number


@pytest.mark.parametrize(
    ("joined", "said", "verdict"),
    [
        ((), {}, None),
        ((), {1: OFFER}, None),
        ((), {1: OFFER, 2: OFFER}, True),
        ((), {1: WAITS}, False),
        ((), {2: IS_ABSENT}, False),
        ((), {1: OFFER, 2: OFFER + 1}, False),  # another thing
        ((2,), {1: OFFER}, False),
        ((2,), {2: OFFER}, None),  # it had offered before it joined
        ((2,), {1: OFFER, 2: OFFER}, True),
    ],
)
def test_verdicts(joined: tuple[int, ...], said: dict[int, int], verdict: bool | None) -> None:
    rounds = OfferVotes((1, 2))
    assert rounds.begin(OFFER, True, True, {}) == OFFER
    assert rounds.verdict(joined, said) is verdict


class Rank:
    """``plan``: for each round whether it waits, is able, and what it would offer. It joins when there is no more."""

    def __init__(self, me: int, size: int, plan: list[tuple[bool, bool, int]]) -> None:
        self.me, self.plan = me, plan
        self.others = [rank for rank in range(size) if rank != me]
        self.rounds = OfferVotes(self.others)
        self.said: dict[int, dict[int, int]] = {}  # by round and source
        self.joined: set[int] = set()
        self.begun = 0
        self.offered: int | None = None  # the round for whose verdict it waits
        self.course: dict[int, bool] = {}  # by round: whether it was added up among the ranks


def play(seed: int) -> tuple[int, int]:
    """(rounds added up among ranks, rounds that went through the service) of a random course of events."""
    draw = random.Random(seed)
    size = draw.randint(2, 4)
    count = draw.randint(1, 12)
    eager = draw.random()
    lengths = [count if draw.random() < 0.7 else draw.randint(0, count) for _ in range(size)]
    ranks = [
        Rank(
            me, size, [(draw.random() < eager, draw.random() < 0.95, int(draw.random() < 0.05)) for _ in range(length)]
        )
        for me, length in enumerate(lengths)
    ]
    ways: dict[tuple[int, int], deque[tuple[int, int] | None]] = {
        (a, b): deque() for a in range(size) for b in range(size)
    }
    handed_over: dict[int, set[int]] = {}

    def is_served(number: int) -> bool:
        """The service has the contributions of all that have not joined."""
        return all(r.me in handed_over.get(number, ()) or has_joined(r) for r in ranks)

    def has_joined(rank: Rank) -> bool:
        return rank.begun == len(rank.plan) and is_free(rank)

    def is_free(rank: Rank) -> bool:
        number = rank.begun
        return not number or rank.course.get(number) is True or (number in served)

    served: set[int] = set()
    told: set[int] = set()
    while True:
        for number in handed_over:
            if number not in served and is_served(number):
                served.add(number)
        can = [("hear", a, b) for (a, b), way in ways.items() if way]
        for rank in ranks:
            if rank.offered is not None:
                verdict = rank.rounds.verdict(rank.joined, rank.said.get(rank.offered, {}))
                if verdict is not None:
                    can.append(("go on", rank.me, int(verdict)))
            elif is_free(rank):
                can.append(("begin" if rank.begun < len(rank.plan) else "join", rank.me, 0))
        can = [what for what in can if what[0] != "join" or what[1] not in told]
        if not can:
            break
        what, a, b = draw.choice(can)
        rank = ranks[a]
        if what == "hear":
            word = ways[a, b].popleft()
            if word is None:
                ranks[b].joined.add(a)
            else:
                assert a not in ranks[b].said.setdefault(word[0], {})
                ranks[b].said[word[0]][a] = word[1]
        elif what == "join":
            told.add(a)
            for other in rank.others:
                ways[a, other].append(None)
        elif what == "go on":
            number, rank.offered = rank.begun, None
            rank.course[number] = bool(b)
            if not b:
                handed_over.setdefault(number, set()).add(a)
        else:
            is_waiting, is_able, offer = rank.plan[rank.begun]
            said = rank.said.get(rank.begun, {})
            rank.begun += 1
            word = rank.rounds.begin(offer, is_waiting, is_able, said)
            if word is not None:
                for other in rank.others:
                    ways[a, other].append((rank.begun, word))
            if word == offer:
                rank.offered = rank.begun
            else:
                rank.course[rank.begun] = False
                handed_over.setdefault(rank.begun, set()).add(a)
    for rank in ranks:  # nobody waits for ever
        assert rank.offered is None, f"seed {seed}: rank {rank.me} waits for a verdict on round {rank.offered}"
        assert rank.begun == len(rank.plan), f"seed {seed}: rank {rank.me} waits for round {rank.begun}"
    among = 0
    for number in range(1, count + 1):
        courses = {rank.course[number] for rank in ranks if number in rank.course}
        assert len(courses) <= 1, f"seed {seed}: some add round {number} up, others don't"
        if True in courses:
            assert all(number in rank.course for rank in ranks), f"seed {seed}: round {number} lacks ranks"
            assert len({rank.plan[number - 1][2] for rank in ranks}) == 1, f"seed {seed}: round {number} differs"
            among += 1
    return among, count - among


def test_all_take_the_same_course_and_nobody_waits_for_ever() -> None:
    courses = [play(seed) for seed in range(3000)]
    assert sum(among for among, _ in courses) > 1000
    assert sum(served for _, served in courses) > 1000
