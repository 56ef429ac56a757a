"""How many connections a link takes, and what the system is told about each: connections of this machine are short."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from byteps_py.config.settings import Settings
from byteps_py.dataplane import long_links


@pytest.fixture
def ends() -> Iterator[list[socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        called, _ = listener.accept()
    with caller, called:
        yield [caller, called]


def algorithm(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.mark.parametrize(
    ("settings", "rtt_s", "mbit", "count"),
    [
        (Settings(), 0.0, 1000.0, 1),
        (Settings(), 0.004, 1000.0, 1),
        (Settings(), 0.006, 0.0, long_links.LONG_LINK_CONNECTIONS),
        (Settings(), 0.1, 1000.0, long_links.LONG_LINK_CONNECTIONS),
        (Settings(), 0.1, 10.0, 3),
        (Settings(), 0.1, 0.5, 1),
        (Settings(connections_per_link=3), 0.0, 0.0, 3),
        (Settings(connections_per_link=3), 0.1, 2.0, 3),
        (Settings(connections_per_link=1), 0.1, 1000.0, 1),
    ],
)
def test_a_long_link_takes_as_many_connections_as_fill_it(
    settings: Settings, rtt_s: float, mbit: float, count: int
) -> None:
    assert long_links.connections_for(settings, rtt_s, mbit) == count


def test_connections_inside_one_machine_are_left_as_they_are(ends: list[socket.socket]) -> None:
    before = [algorithm(end) for end in ends]
    for end in ends:
        assert long_links.round_trip_s(end) == long_links.round_trip_of(end.fileno()) == 0.0
        long_links.tune(end, Settings())
        long_links.tune_descriptor(end.fileno(), Settings())
    assert [algorithm(end) for end in ends] == before


def test_a_descriptor_that_is_gone_is_no_error(ends: list[socket.socket]) -> None:
    descriptor = ends[0].fileno()
    ends[0].close()
    for gone in (descriptor, -1):
        long_links.tune_descriptor(gone, Settings())
        assert long_links.round_trip_of(gone) == 0.0


def test_what_a_machine_lacks_is_said_with_the_remedy() -> None:
    assert not long_links.hindrance(Settings(congestion_control=long_links.SYSTEM))
    lacks = long_links.hindrance(Settings())
    assert not lacks or "modprobe tcp_bbr" in lacks or "net.ipv4.tcp_allowed_congestion_control" in lacks
