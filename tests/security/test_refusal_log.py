"""Processes that are refused again and again: one line for a host and minute, and the service goes on with its work."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

import pytest
from support.strangers import local

from byteps_py.dataplane.traffic import Traffic
from byteps_py.runtime import Runtime
from byteps_py.scheduler.call_authenticator import GrpcConnections
from byteps_py.security.unauthenticated_connections import PERIOD_S, RefusalLog
from byteps_py.system.channel import Listener
from byteps_py.system.loop import EventLoop
from byteps_py.worker.ranks.rank_server import RankServer

OTHER_USER = 12345
WRONG = "the secrets differ"


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_host_gets_a_line_a_minute_with_a_count(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    log = RefusalLog(clock)
    for second in range(150):
        clock.now_s = second
        log.note(f"10.0.0.1:{50000 + second}", "10.0.0.1", WRONG)
    log.note("10.0.0.2:7", "10.0.0.2", WRONG)
    log.note("10.0.0.2:8", "10.0.0.2", "it shows no secret")
    assert lines(caplog) == [
        f"turned away 10.0.0.1:50000: {WRONG}",
        f"turned away 10.0.0.1 59 more times in the last 60 s: {WRONG}",
        f"turned away 10.0.0.1 60 more times in the last 60 s: {WRONG}",
        f"turned away 10.0.0.2:7: {WRONG}",
        "turned away 10.0.0.2:8: it shows no secret",
    ]


def test_the_last_ones_are_counted_too(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    log = RefusalLog(clock)
    for _ in range(3):
        log.note("a", "a", WRONG)
    clock.now_s = PERIOD_S
    log.tick()
    log.tick()
    clock.now_s = 3 * PERIOD_S
    log.tick()
    assert lines(caplog)[1:] == [f"turned away a 2 more times in the last 60 s: {WRONG}"]


def test_a_timer_runs_while_there_are_minutes_to_count(caplog: pytest.LogCaptureFixture) -> None:
    clock, timers = Clock(), list[tuple[float, Callable[[], None]]]()
    log = RefusalLog(clock, lambda delay_s, then: timers.append((delay_s, then)))
    assert not timers
    log.note("a", "a", WRONG)
    log.note("a", "a", WRONG)
    clock.now_s = 10
    log.note("b", "b", WRONG)
    ((delay_s, then),) = timers
    assert delay_s == PERIOD_S
    for now_s, following_s in ((60.0, 10.0), (70.0, 50.0), (120.0, None)):
        clock.now_s = now_s
        timers.clear()
        then()
        assert [each for each, _ in timers] == ([] if following_s is None else [following_s])
        then = timers[0][1] if timers else then
    assert lines(caplog)[2:] == [f"turned away a 1 more times in the last 60 s: {WRONG}"]


def test_many_hosts_and_many_process_ids_are_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    log = RefusalLog(Clock())
    for number in range(1000):
        log.note("a local process", "local processes", f"process {number} of user 7 is at the other end")
    assert len(lines(caplog)) == 1
    for number in range(1000):
        log.note("x", f"10.0.{number // 250}.{number % 250}", WRONG)
    assert len(lines(caplog)) < 40


def test_what_a_data_listener_refuses_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    traffic = Traffic()
    for _ in range(100):
        traffic.refused("an unknown process at 10.0.0.1", "10.0.0.1", WRONG)
    assert traffic.malformed == 100
    assert len(lines(caplog)) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_at_the_local_socket_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    loop = EventLoop()
    listener = Listener(f"byteps-refused-{os.getpid()}")
    ranks = RankServer(Runtime(loop=loop), listener, 1, on_death=lambda _: None, on_change=lambda: None)
    os.seteuid(OTHER_USER)
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(local(listener.name, b""))
            os.seteuid(0)
            loop.call_later(0.2, loop.stop)
            loop.run()
    finally:
        os.seteuid(0)
        ranks.close()
        loop.close()
    (line,) = lines(caplog)
    assert f"of user {OTHER_USER} is at the other end" in line


def test_a_flood_of_handshakes_does_not_keep_the_process_from_its_work() -> None:
    """Each look reads all descriptors, in gRPC's threads, which the server's thread has to wait for."""
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            stack.callback(os.close, os.dup(0))
        connections = GrpcConnections(1)
        began_s = time.monotonic()
        for _ in range(2000):
            connections.handshake_begins()
        took_s = time.monotonic() - began_s
        began_s = time.monotonic()
        for _ in range(20):
            connections.scan()
        assert took_s < 20 * (time.monotonic() - began_s)
