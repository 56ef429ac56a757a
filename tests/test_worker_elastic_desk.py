"""The desk of an elastic job, by itself: ranks of the first group that never come."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from byteps_py.worker.elastic_desk import ElasticDesk


class Desk:
    """For two ranks, none of which has come."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.deaths, self.returns = list[str](), list[tuple[str, bool]]()
        loop = SimpleNamespace(add_reader=lambda *given: None, call_later=lambda *given: self.timers.append(given))
        listener = SimpleNamespace(fileno=lambda: -1)
        self.desk = ElasticDesk(
            cast(Any, loop), cast(Any, listener), 2, self.deaths.append, lambda: None, self._wants_group, 60.0
        )

    def _wants_group(self, reason: str, planned: bool) -> None:
        self.returns.append((reason, planned))

    def open(self) -> None:
        """A group of which these are ranks 4 and 5."""
        me = SimpleNamespace(host="node7")
        topology = SimpleNamespace(local_size=2, first_rank=4, me=me, is_continued=False)
        self.desk.open(cast(Any, SimpleNamespace(topology=topology, executor=SimpleNamespace(ranks={}))))


def test_ranks_that_never_come_are_given_up() -> None:
    """They may have died before anybody knew of them."""
    one = Desk()
    one.open()
    ((patience_s, give_up),) = one.timers
    assert patience_s == 60.0
    assert not one.desk.is_whole
    give_up()
    assert one.deaths == ["ranks 4-5 of node7 did not come within 60 s (BYTEPS_START_TIMEOUT_S)"]
    assert one.desk.is_whole
    give_up()
    assert len(one.deaths) == 1


def test_nobody_waits_for_ranks_of_a_machine_that_was_told_to_leave() -> None:
    one = Desk()
    one.open()
    one.desk.dismiss()
    assert one.returns == [("a machine was told to leave before all of its ranks had come", False)]
    one.timers[0][1]()
    assert one.deaths == []
