"""Connections that have not proven who they are: late ones, and those that say more than a proof takes."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from typing import BinaryIO

import pytest

from byteps_py.security.unauthenticated_connections import (
    MOST,
    MOST_BYTES,
    PATIENCE_S,
    WATCH_S,
    LocalStrangers,
    UnauthenticatedConnections,
)

Timer = tuple[float, Callable[[], None]]


class Door:
    """A listener, who has come to it, and a clock that is moved by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.strangers = UnauthenticatedConnections(lambda: self.now_s)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.strangers.port = self._listener.getsockname()[1]
        self.here: socket.socket | None = None  # our end of the last that came
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self._listener)

    def come(self, nbytes: int = 0) -> socket.socket:
        """The other end of a connection that has brought so many bytes."""
        end = self._stack.enter_context(socket.create_connection(self._listener.getsockname()))
        self.here = here = self._stack.enter_context(self._listener.accept()[0])
        end.sendall(bytes(nbytes))
        assert len(here.recv(nbytes, socket.MSG_WAITALL)) == nbytes
        self.strangers.add(here.fileno())
        return end

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(name="door")
def a_door() -> Iterator[Door]:
    door = Door()
    yield door
    door.close()


def is_cut_off(end: socket.socket) -> bool:
    end.settimeout(0)
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_who_is_late_is_cut_off(door: Door) -> None:
    first = door.come()
    door.now_s = 0.5 * PATIENCE_S
    second = door.come()
    door.now_s = PATIENCE_S
    door.strangers.sweep()
    assert [is_cut_off(first), is_cut_off(second)] == [True, False]
    assert (len(door.strangers), door.strangers.cut_off) == (1, 1)


def test_who_says_more_than_a_proof_takes_is_cut_off_at_once(door: Door) -> None:
    modest, chatty = door.come(MOST_BYTES), door.come(MOST_BYTES + 1)
    door.strangers.sweep()
    assert [is_cut_off(modest), is_cut_off(chatty)] == [False, True]


def test_who_is_expelled_is_cut_off_a_moment_later(door: Door) -> None:
    timers: list[Timer] = []
    door.strangers.watch(lambda delay_s, callback: timers.append((delay_s, callback)))
    known = door.come()
    assert door.here is not None
    door.strangers.discard(door.here.fileno())
    timers.pop()[1]()
    assert timers == []
    door.now_s = 9 * PATIENCE_S
    door.strangers.expel(door.here.fileno())
    timers.pop()[1]()  # a look that was due at this very moment
    assert not is_cut_off(known)
    door.now_s += WATCH_S
    timers.pop()[1]()
    assert is_cut_off(known)
    assert (len(door.strangers), door.strangers.cut_off, timers) == (0, 1, [])


def test_a_connection_may_authenticate_before_its_arrival_is_reported(door: Door) -> None:
    """libzmq's thread may be interrupted between the two."""
    known = door.come(MOST_BYTES + 1)
    assert door.here is not None
    door.strangers.discard(door.here.fileno())  # as if ``add`` had not been called
    door.strangers.admit(door.here.fileno())
    assert door.strangers.add(door.here.fileno())
    assert not door.strangers.add(10_000)  # a connection that is gone
    door.now_s = 2 * PATIENCE_S
    door.strangers.sweep()
    assert not is_cut_off(known)
    assert (len(door.strangers), door.strangers.cut_off) == (0, 0)


def test_a_connection_with_the_descriptor_of_an_admitted_one_is_new(door: Door) -> None:
    door.come()
    assert door.here is not None
    fd = door.here.fileno()
    door.strangers.admit(fd)
    stranger = door.come()
    door.strangers.discard(door.here.fileno())
    os.dup2(door.here.fileno(), fd)  # ends the first connection, whose end is not reported yet
    assert door.strangers.add(fd)
    door.now_s = PATIENCE_S
    door.strangers.sweep()
    assert is_cut_off(stranger)


def test_they_are_looked_at_while_there_are_any(door: Door) -> None:
    timers: list[Timer] = []
    door.strangers.watch(lambda delay_s, callback: timers.append((delay_s, callback)))
    assert timers == []
    door.come()
    door.come()
    ((delay_s, look),) = timers
    assert delay_s == WATCH_S
    look()
    assert len(timers) == 2
    door.now_s = PATIENCE_S
    timers[1][1]()
    assert len(door.strangers) == 0
    assert len(timers) == 2  # nobody is left to look at


def another_connection(stack: contextlib.ExitStack) -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stack.enter_context(socket.create_connection(listener.getsockname()))
        return stack.enter_context(listener.accept()[0])


def a_local_socket(stack: contextlib.ExitStack) -> socket.socket:
    here, there = socket.socketpair()
    stack.enter_context(there)
    return stack.enter_context(here)


def a_datagram_socket(stack: contextlib.ExitStack) -> socket.socket:
    return stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))


def no_socket(stack: contextlib.ExitStack) -> BinaryIO:
    return stack.enter_context(tempfile.TemporaryFile())


@pytest.mark.parametrize("other", [another_connection, a_local_socket, a_datagram_socket, no_socket])
@pytest.mark.parametrize("comes_late", [False, True])
def test_a_number_that_is_now_of_something_else(
    door: Door, other: Callable[[contextlib.ExitStack], socket.socket | BinaryIO], comes_late: bool
) -> None:
    """ZeroMQ closed a connection whose end, or beginning, has not been told yet, and the process opened something else:
    that stays."""
    end = door.come()
    assert door.here is not None
    with contextlib.ExitStack() as stack:
        thing = other(stack)
        number = door.here.fileno()
        os.dup2(thing.fileno(), number)
        if comes_late:
            door.strangers.add(number)
        door.now_s = PATIENCE_S
        door.strangers.sweep()
        assert len(door.strangers) == 0
        assert is_cut_off(end)
        assert door.strangers.cut_off == 0
        if isinstance(thing, socket.socket) and thing.type == socket.SOCK_STREAM:
            thing.sendall(b"it is not cut off")


class Timers:
    """Call back when they are told to."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        assert delay_s == PATIENCE_S
        self.due.append(callback)


def test_a_local_connection_that_says_nothing_is_cut_off_once() -> None:
    timers = Timers()
    ended: list[str] = []
    strangers = LocalStrangers[str](timers.call_later, ended.append)
    strangers.add("silent")
    strangers.add("member")
    strangers.discard("member")
    for callback in timers.due * 2:
        callback()
    assert ended == ["silent"]
    assert list(strangers) == []


def test_of_too_many_local_connections_the_oldest_is_cut_off() -> None:
    ended: list[int] = []
    strangers = LocalStrangers[int](Timers().call_later, ended.append)
    for number in range(MOST + 2):
        strangers.add(number)
    assert ended == [0, 1]
    assert len(list(strangers)) == MOST
