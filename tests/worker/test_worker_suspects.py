"""What came damaged on a link, and whether it was the second time; the connection is played by the test."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from byteps_py.config.settings import Settings
from byteps_py.dataplane.dialer import Owner
from byteps_py.errors import IntegrityError
from byteps_py.runtime import Runtime
from byteps_py.wire.data_link import Header, Kind
from byteps_py.worker.io.server_links import _GOOD_AGAIN, LinkEvents, LinkOrigin, LinkTarget, TcpLink


class Dialer:
    """Stands for the real one."""

    def __init__(
        self, context: object, loop: object, target: object, sender: int, settings: object, owner: Owner
    ) -> None:
        self._owner = owner
        self.is_open = False
        self.connections = 0
        self.sent: list[Header] = []  # on this connection

    def send(self, header: Header, payload: bytes) -> int:
        self.sent.append(dataclasses.replace(header))
        return len(self.sent) - 1

    def open(self) -> None:
        self.is_open = True
        self.connections += 1
        self.sent.clear()
        self._owner.on_open()

    def reconnect(self) -> None:
        self.is_open = False
        self._owner.on_broken()

    def close(self) -> None: ...


class Line:
    """A link. ``due``: what it asks for anew when its connection was broken."""

    def __init__(self) -> None:
        self.due: dict[int, Header] = {}  # by number
        loop: Any = SimpleNamespace(call_later=lambda delay_s, callback: None, lateness_s=0.0)
        nothing: Any = None
        runtime = Runtime(loop=loop, dialer=cast(Any, Dialer))
        events = LinkEvents(self._answered, self._again, nothing)
        self.link = TcpLink(LinkOrigin(nothing, runtime, 0, Settings(), nothing), LinkTarget("tcp://there"), events)
        self.dialer = cast(Dialer, self.link._dialer)
        self.dialer.open()

    def _answered(self, header: Header, frame: object) -> None:
        self.due.pop(header.index, None)

    def _again(self) -> None:
        for header in self.due.values():
            self.link.ask(header, b"")

    def ask(self, number: int, kind: Kind = Kind.FETCH, is_due: bool = True) -> Header:
        header = Header(kind, 0, index=number, round=1)
        if is_due:
            self.due[number] = header
        self.link.ask(header, b"")
        return header

    def answer(self, header: Header) -> None:
        self.link.on_message(dataclasses.replace(header, kind=Kind.ANSWER), zmq.Frame(b""))

    def damage(self) -> None:
        """An answer. The next connection, if there is one, is open at once."""
        before = self.dialer.connections
        self.link.on_damaged(None)
        if not self.dialer.is_open:
            self.dialer.open()
        assert self.dialer.connections == before + 1


@pytest.fixture(name="line")
def played_line() -> Line:
    return Line()


def test_what_is_asked_for_again_and_comes_damaged_is_an_error(line: Line) -> None:
    for number in range(3):
        line.ask(number)
    line.damage()
    for number in range(2):
        line.answer(line.due[number])
    with pytest.raises(IntegrityError, match="an answer from the summation service at tcp://there came damaged twice"):
        line.damage()


def test_each_of_several_may_come_damaged_once(line: Line) -> None:
    for number in range(3):
        header = line.ask(number)
        line.damage()
        line.answer(header)
    assert line.dialer.connections == 4


def test_a_request_that_comes_damaged_again_on_the_next_connection_is_an_error(line: Line) -> None:
    """The other end has cut the first one, on which nothing came whole any more."""
    for number in range(2):
        line.ask(number)
    line.link.on_damaged(0)
    assert [header.index for header in line.dialer.sent] == [0, 1, 0]
    line.dialer.reconnect()
    line.dialer.open()
    line.link.on_damaged(1)
    with pytest.raises(IntegrityError, match="a FETCH message to the summation service at tcp://there came damaged"):
        line.link.on_damaged(0)


@pytest.mark.parametrize(
    ("kind", "is_due"),
    [
        (Kind.TAKEN, True),  # of which the owner says once more which pieces have come
        (Kind.PUSH, False),  # not asked for again: it was of a tensor that is void
    ],
)
def test_what_gets_no_answer_has_none_that_came_damaged(line: Line, kind: Kind, is_due: bool) -> None:
    for number in range(3):
        line.ask(10 + number, kind, is_due)
        header = line.ask(number)
        line.damage()
        line.answer(header)
    assert line.dialer.connections == 4


def test_what_waits_for_ever_is_not_taken_for_an_answer_that_came_damaged_long_ago(line: Line) -> None:
    """A round in which all pass never ends, and is said again on every connection."""
    line.ask(1, Kind.PASS)
    line.damage()
    for number in range(_GOOD_AGAIN):
        line.answer(line.ask(100 + number))
    line.damage()
    assert line.due.keys() == {1}
    with pytest.raises(IntegrityError, match="came damaged twice"):
        line.damage()
