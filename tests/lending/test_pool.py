"""Which lender serves which job, and when a lender starts and drains servers: decided without a process."""

from __future__ import annotations

import random

import pytest

from byteps_py.errors import UsageError
from byteps_py.lending.lender import (
    BUSY_AFTER_S,
    FREE_AFTER_S,
    RETRY_S,
    DrainServer,
    Ended,
    Exit,
    LenderPolicy,
    Limits,
    Log,
    OwnerLoad,
    StartServer,
    StopLending,
    Told,
)
from byteps_py.lending.pool import LEASE_S, JobRequest, LendingOffer, LendingPool

GB = 10**9


def job(name: str, servers: int = 1, workers: int = 2, nbytes: int = 0) -> JobRequest:
    return JobRequest(name, workers, servers, nbytes)


def serving(pool: LendingPool, now_s: float = 0.0) -> dict[str, list[str]]:
    return {each["name"]: each["serves"] for each in pool.status(now_s)["lenders"]}  # type: ignore[attr-defined]


def test_what_is_free_goes_to_the_job_that_has_the_fewest() -> None:
    pool = LendingPool()
    pool.lend(LendingOffer("a", 2), 0.0)
    assert pool.borrow(job("one", 2), 0.0).lenders == ("a",)
    pool.lend(LendingOffer("b", 1), 0.0)
    assert serving(pool) == {"a": ["one"], "b": ["one"]}
    assert pool.borrow(job("two", 2), 0.0).lenders == ("a",)
    answer = pool.borrow(job("three"), 0.0)
    assert answer.lenders == ()
    assert answer.reason == "of 2 lenders, 0 lend nothing now, and no other has a slot for it"


def test_no_more_servers_than_are_of_use() -> None:
    pool = LendingPool()
    for name in "abcd":
        pool.lend(LendingOffer(name, 1), 0.0)
    answer = pool.borrow(job("one", servers=4, workers=2), 0.0)
    assert len(answer.lenders) == 2
    assert answer.reason == "it has 2 servers: more would hold nothing, with as many GPU machines"
    assert pool.borrow(job("alone", servers=1, workers=1), 0.0).reason.startswith("a job of one GPU machine")


def test_a_busy_lender_serves_nobody_and_another_takes_over() -> None:
    pool = LendingPool()
    pool.lend(LendingOffer("a", 1), 0.0)
    pool.borrow(job("one"), 0.0)
    pool.lend(LendingOffer("b", 1), 0.0)
    assert serving(pool) == {"a": ["one"], "b": []}
    assert pool.lend(LendingOffer("a", 0), 1.0) == ()
    assert serving(pool, 1.0) == {"a": [], "b": ["one"]}
    pool.lend(LendingOffer("a", 1), 2.0)
    assert serving(pool, 2.0) == {"a": [], "b": ["one"]}  # what stands is kept


def test_who_is_silent_is_forgotten() -> None:
    pool = LendingPool()
    pool.lend(LendingOffer("a", 1), 0.0)
    pool.borrow(job("one"), 0.0)
    pool.borrow(job("two"), LEASE_S - 1)
    pool.lend(LendingOffer("a", 1), LEASE_S - 1)
    assert serving(pool, LEASE_S + 1) == {"a": ["two"]}
    assert serving(pool, 2 * LEASE_S) == {}
    assert pool.status(2 * LEASE_S) == {"lenders": [], "jobs": []}


def test_a_job_that_is_refused_says_why() -> None:
    pool = LendingPool()
    pool.lend(LendingOffer("a", 1, {"one": "too large"}), 0.0)
    assert pool.borrow(job("one"), 0.0).reason.endswith("; a refuses it: too large")


def test_scale() -> None:
    pool = LendingPool()
    for name in "ab":
        pool.lend(LendingOffer(name, 1), 0.0)
    with pytest.raises(UsageError, match="no job at one asks this pool for servers"):
        pool.scale("one", 1, 0.0)
    assert pool.borrow(job("one", 2), 0.0).lenders == ("a", "b")
    assert len(pool.scale("one", 1, 0.0).lenders) == 1
    assert len(pool.borrow(job("one", 2), 1.0).lenders) == 1  # the job itself goes on asking for two
    assert pool.scale("one", 2, 2.0).lenders == ("a", "b")
    pool.end("one", 3.0)
    assert serving(pool, 3.0) == {"a": [], "b": []}


@pytest.mark.parametrize("seed", range(50))
def test_limits_hold_whatever_happens(seed: int) -> None:
    """No lender has more jobs than slots, no job more or other servers than it wants; a free slot is used."""
    chosen = random.Random(seed)
    pool, now_s = LendingPool(), 0.0
    offers: dict[str, LendingOffer] = {}
    for _ in range(200):
        now_s += chosen.choice((0.1, 1.0, 4.0))
        name = chosen.choice("abcd")
        match chosen.randrange(6):
            case 0 | 1 | 2:
                refused = {chosen.choice("xyz"): "no"} if chosen.random() < 0.2 else {}
                offers[name] = LendingOffer(name, chosen.randrange(3), refused)
                pool.lend(offers[name], now_s)
            case 3 | 4:
                pool.borrow(job(chosen.choice("xyz"), chosen.randrange(4), chosen.randrange(1, 4)), now_s)
            case 5:
                pool.end(chosen.choice("xyz"), now_s)
        status = pool.status(now_s)
        lenders: list[dict[str, object]] = status["lenders"]  # type: ignore[assignment]
        jobs: list[dict[str, object]] = status["jobs"]  # type: ignore[assignment]
        for lender in lenders:
            serves: list[str] = lender["serves"]  # type: ignore[assignment]
            offer = offers[str(lender["name"])]
            assert len(serves) == len(set(serves)) <= offer.slots
            assert not set(serves) & offer.refused.keys()
        for each in jobs:
            has: list[str] = each["lenders"]  # type: ignore[assignment]
            assert len(has) <= int(str(each["wants"]))
            if len(has) < int(str(each["wants"])):
                free = [
                    lender for lender in lenders
                    if len(lender["serves"]) < offers[str(lender["name"])].slots  # type: ignore[arg-type]
                    and lender["name"] not in has and each["scheduler"] not in offers[str(lender["name"])].refused
                ]  # fmt: skip
                assert free == []


# ---- a lender --------------------------------------------------------------------------------------------------


def lender(slots: int = 2, memory: int = 8 * GB) -> LenderPolicy:
    return LenderPolicy(Limits("host", slots, 4, memory, 2000.0))


def deeds(actions: list[object]) -> list[object]:
    return [action for action in actions if not isinstance(action, Log)]


HIGH, LOW = OwnerLoad(True, "busy"), OwnerLoad(False, "idle")


def test_a_rise_of_the_owners_load_drains_and_a_short_one_does_not() -> None:
    policy = lender()
    assert deeds(policy.handle(Told([job("one")]), 0.0)) == [StartServer(job("one"))]
    assert policy.handle(HIGH, 1.0) == []
    assert policy.handle(LOW, 1.0 + BUSY_AFTER_S) == []
    assert policy.handle(HIGH, 10.0) == []
    assert deeds(policy.handle(HIGH, 10.0 + BUSY_AFTER_S)) == [DrainServer("one")]
    assert policy.offer(14.0).slots == 0
    assert policy.handle(Told([job("one")]), 15.0) == []  # the pool did not know yet
    assert deeds(policy.handle(Ended("one", 0), 16.0)) == []
    assert policy.handle(LOW, 20.0) == []
    assert policy.handle(HIGH, 20.0 + FREE_AFTER_S) == []
    assert policy.handle(LOW, 40.0) == []
    assert policy.offer(41.0).slots == 0
    assert deeds(policy.handle(LOW, 40.0 + FREE_AFTER_S)) == []
    assert policy.offer(60.0).slots == 2
    assert deeds(policy.handle(Told([job("one")]), 60.0)) == [StartServer(job("one"))]


def test_a_server_that_drains_still_has_its_slot() -> None:
    policy = lender(slots=1)
    policy.handle(Told([job("one")]), 0.0)
    assert deeds(policy.handle(Told([job("two")]), 1.0)) == [DrainServer("one")]
    assert policy.handle(Told([job("two")]), 2.0) == []
    policy.handle(Ended("one", 0), 3.0)
    assert deeds(policy.handle(Told([job("two")]), 4.0)) == [StartServer(job("two"))]


def test_a_server_that_ends_by_itself_is_not_started_again_at_once() -> None:
    policy = lender()
    policy.handle(Told([job("one")]), 0.0)
    policy.handle(Ended("one", 1), 1.0)
    assert policy.offer(2.0).refused == {"one": "its server here has ended with status 1"}
    assert deeds(policy.handle(Told([job("one")]), 2.0)) == []
    assert policy.offer(1.0 + RETRY_S).refused == {}


def test_a_job_that_needs_more_memory_than_is_lent_is_refused() -> None:
    policy = lender(slots=2, memory=2 * GB)
    assert deeds(policy.handle(Told([job("large", nbytes=2 * GB)]), 0.0)) == []
    assert policy.offer(0.0).refused == {"large": "a server needs up to 2.3 GB for it, and host lends 1.0 GB to a job"}
    assert deeds(policy.handle(Told([job("small", nbytes=GB // 2)]), 0.0)) == [
        StartServer(job("small", nbytes=GB // 2))
    ]


def test_it_ends_once_all_servers_have() -> None:
    policy = lender()
    policy.handle(Told([job("one"), job("two")]), 0.0)
    assert deeds(policy.handle(StopLending(), 1.0)) == [DrainServer("one"), DrainServer("two")]
    assert policy.offer(1.0).slots == 0
    assert deeds(policy.handle(Ended("one", 0), 2.0)) == []
    assert deeds(policy.handle(Ended("two", 0), 3.0)) == [Exit()]
    assert deeds(lender().handle(StopLending(), 0.0)) == [Exit()]
