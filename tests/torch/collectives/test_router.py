"""Which way an operation goes: a table, and the reason that stands beside each choice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from byteps_py.tensors import Op
from byteps_py.torch.collectives import router as routes
from byteps_py.torch.collectives.router import (
    CONNECTION_BYTES,
    GROUP_MESSAGE_BYTES,
    LEAST_LOCAL_BYTES,
    MOST_CONNECTION_BYTES,
    NAMED_MESSAGE_BYTES,
    Reach,
    Route,
    Router,
    SumFacts,
    may_share,
)

KB, MB = 1 << 10, 1 << 20
MANY = routes.CORES + 1  # ranks that have to share cores


def router(members: int = 2, reach: Reach = Reach.MEMORY, can_share: bool = True) -> Router:
    return Router(members, reach, members, GROUP_MESSAGE_BYTES, lambda: can_share)


def facts(nbytes: int, members: int = 2, **changes: Any) -> SumFacts:
    values = {
        "op": Op.SUM,
        "nbytes": nbytes,
        "from_others": nbytes * (members - 1),
        "is_exact": True,
        "is_on_host": True,
    }
    return SumFacts(**{**values, **changes})


@pytest.mark.skipif(routes.CORES < 2, reason="two ranks share the only core")
@pytest.mark.parametrize(
    ("nbytes", "changes", "route"),
    [
        (4, {}, Route.ONE_SHOT),
        (GROUP_MESSAGE_BYTES, {}, Route.ONE_SHOT),
        (GROUP_MESSAGE_BYTES + 4, {}, Route.SHARED_MEMORY),
        (64 * MB, {}, Route.SHARED_MEMORY),
        (4, {"op": Op.MAX}, Route.SERVICE),
        (4, {"op": Op.PRODUCT}, Route.SERVICE),
        (4, {"is_exact": False}, Route.SERVICE),
        (4, {"is_on_host": False}, Route.SERVICE),
        (64 * MB, {"is_on_host": False}, Route.SERVICE),
        (0, {}, Route.SERVICE),
    ],
)
def test_sums_of_one_machine(nbytes: int, changes: dict[str, Any], route: Route) -> None:
    choice = router().sum(facts(nbytes, **changes))
    assert choice.route is route
    assert choice.reason
    assert choice.reason in str(choice)


def test_ranks_that_share_cores_add_only_what_is_large() -> None:
    assert router(MANY).sum(facts(4, MANY)).route is Route.SERVICE
    assert router(MANY).sum(facts(MB - 4, MANY)).route is Route.SERVICE
    if may_share(MANY, MB):
        assert router(MANY).sum(facts(MB, MANY)).route is Route.SHARED_MEMORY
    assert router(1000).sum(facts(MB, 1000)).route is Route.SERVICE


def test_without_the_instructions_large_sums_go_through_the_service() -> None:
    assert router(can_share=False).sum(facts(MB)).route is Route.SERVICE


def test_shared_memory_is_asked_for_only_where_it_would_be_used() -> None:
    def fails() -> bool:
        raise AssertionError

    asked = Router(2, Reach.MEMORY, 1, GROUP_MESSAGE_BYTES, fails)
    asked.sum(facts(4))
    asked.sum(facts(MB, is_on_host=False))


@pytest.mark.parametrize("reach", list(Reach))
@pytest.mark.parametrize(
    ("nbytes", "changes", "route"),
    [
        (MB, {}, Route.LOCAL_GROUPS),
        (LEAST_LOCAL_BYTES - 4, {}, Route.SERVICE),
        (MB, {"scatters": True}, Route.SERVICE),
        (MB, {"op": Op.MAX}, Route.SERVICE),
        (MB, {"is_exact": False}, Route.SERVICE),
    ],
)
def test_gpus_sum_large_tensors_among_themselves(
    nbytes: int, changes: dict[str, Any], route: Route, reach: Reach
) -> None:
    grouped = Router(4, reach, 4, GROUP_MESSAGE_BYTES, lambda: True, has_local_groups=True)
    assert grouped.sum(facts(nbytes, 4, is_on_host=False, **changes)).route is route
    assert grouped.sum(facts(nbytes, 4, **changes)).route is not Route.LOCAL_GROUPS


def test_members_on_several_machines_use_the_service() -> None:
    across = router(reach=Reach.SERVICE)
    for choice in (across.sum(facts(4)), across.sum(facts(MB)), across.move(Op.EXCHANGE, 4, True)):
        assert choice.route is Route.SERVICE
        assert "several machines" in choice.reason


@pytest.mark.parametrize(
    ("nbytes", "changes", "route"),
    [
        (4, {}, Route.ONE_SHOT),
        (CONNECTION_BYTES, {}, Route.ONE_SHOT),
        (CONNECTION_BYTES + 4, {}, Route.DIRECT),
        (4, {"op": Op.MAX}, Route.SERVICE),
        (4, {"is_on_host": False}, Route.SERVICE),
    ],
)
def test_sums_of_connected_machines(nbytes: int, changes: dict[str, Any], route: Route) -> None:
    across = Router(2, Reach.CONNECTIONS, 2, MOST_CONNECTION_BYTES, lambda: True)
    assert across.sum(facts(nbytes, **changes)).route is route


def test_large_sums_of_several_ranks_on_each_machine_are_added_there_first() -> None:
    across = Router(4, Reach.CONNECTIONS, 2, MOST_CONNECTION_BYTES, lambda: True, 2)
    assert across.sum(facts(MB, 4)).route is Route.HIERARCHICAL


@pytest.mark.parametrize(
    ("op", "members", "most_on_machine", "nbytes", "route"),
    [
        (Op.EXCHANGE, 4, 2, 64 * MB, Route.PEERS),
        (Op.GATHER, 4, 1, 64 * MB, Route.PEERS),
        (Op.GATHER, 4, 2, 64 * KB, Route.PEERS),
        (Op.GATHER, 4, 2, 64 * MB, Route.SERVICE),  # each byte would go twice to each machine
        (Op.BROADCAST, 2, 1, 64 * MB, Route.PEERS),
        (Op.BROADCAST, 4, 1, 64 * KB, Route.PEERS),
        (Op.BROADCAST, 4, 1, 64 * MB, Route.SERVICE),  # the root's machine would send each byte three times
    ],
)
def test_connected_machines_get_no_byte_twice_if_there_are_many(
    op: Op, members: int, most_on_machine: int, nbytes: int, route: Route
) -> None:
    across = Router(members, Reach.CONNECTIONS, members, GROUP_MESSAGE_BYTES, lambda: True, most_on_machine)
    assert across.move(op, nbytes, True).route is route
    assert across.move(op, nbytes, False).route is Route.SERVICE


def test_bytes_move_between_ranks_of_one_machine_unless_they_are_on_a_device() -> None:
    for op in (Op.EXCHANGE, Op.GATHER, Op.BROADCAST):
        assert router(4).move(op, 64 * MB, True).route is Route.PEERS
        assert router(4).move(op, 64 * MB, False).route is Route.SERVICE


@pytest.mark.parametrize(
    ("ranks", "has_peers", "are_local"),
    [
        ((2, 3), True, True),
        ((2, 3), False, False),  # no way to the others
        ((1, 2), True, False),  # rank 1 is on another machine
        ((3,), True, False),
    ],
)
def test_named_operations(ranks: tuple[int, ...], has_peers: bool, are_local: bool) -> None:
    session = cast(Any, SimpleNamespace(rank=3, local_rank=1, local_size=2, peers=object() if has_peers else None))
    found = Router.for_names(session, ranks, lambda: True)
    assert found.reach is (Reach.MEMORY if are_local and may_share(2) else Reach.SERVICE)
    assert found.message_bytes == NAMED_MESSAGE_BYTES
    assert found.ranks_on_cores == 2
