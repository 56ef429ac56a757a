"""Connections between ranks of different machines that break, fall silent, or change what passes through them."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from support.connected import SETTINGS, WAIT_S, ConnectedRank, connect, connected
from support.proxy import Proxy
from test_peer_connection import connection, expect, some_bytes, span, streams

from byteps_py.config.settings import Settings
from byteps_py.dataplane.relay import Relay
from byteps_py.errors import IntegrityError, PeerLostError
from byteps_py.system.network_interfaces import NetworkCards
from byteps_py.wire.rank_link import LinksUsed


@contextlib.contextmanager
def behind_proxy(settings: Settings) -> Iterator[tuple[list[ConnectedRank], Proxy]]:
    """Two ranks; the second one reaches the first one by a proxy."""
    ranks = [ConnectedRank(rank, settings) for rank in range(2)]
    connector = ranks[0].transport.connector
    assert connector is not None
    host, _, port = connector.address().rpartition(":")
    proxy = Proxy((host, int(port)))
    assert connector.listener is not None
    connector.listener.address = proxy.address.removeprefix("tcp://")
    try:
        connect(ranks)
        yield ranks, proxy
    finally:
        proxy.alter = None
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda rank: rank.transport.close(), ranks))
        proxy.close()


def exchange(ranks: list[ConnectedRank], nbytes: int = 3 << 20, rounds: int = 3) -> None:
    """Payloads in both directions at once. Raises what either rank raises."""

    def turn(rank: int) -> None:
        stream = both[rank]
        for number in range(rounds):
            source, target = some_bytes(nbytes, 2 * number + rank), np.zeros(nbytes, np.uint8)
            receipt = expect(stream, 1 - rank, target)
            unsent = ranks[rank].transport.send(stream, (1 - rank,), (span(source),), is_led=False, owner=source)
            ranks[rank].transport.collect(receipt, WAIT_S)
            ranks[rank].transport.wait_until_sent(unsent, WAIT_S)
            source[:] = 0  # its memory is free
            assert np.array_equal(target, some_bytes(nbytes, 2 * number + 1 - rank))

    both = streams(ranks, f"exchange {time.monotonic()}")
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(turn, rank) for rank in range(2)]:
            done.result()


class Flip:
    """Flips a bit of the byte at ``at``, counted over what both ends say."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen = self.flipped = 0
        self._lock = threading.Lock()

    def __call__(self, data: bytes, is_caller: bool) -> bytes:
        with self._lock:
            begin, self.seen = self.seen, self.seen + len(data)
            if not begin <= self.at < self.seen:
                return data
            self.flipped += 1
            changed = bytearray(data)
            changed[self.at - begin] ^= 16
            return bytes(changed)


@pytest.mark.parametrize("protection", SETTINGS)
@pytest.mark.parametrize("at", [0, 5, 30, 200, 70_000, 3_000_000])
def test_what_comes_damaged_is_sent_again(protection: str, at: int, caplog: pytest.LogCaptureFixture) -> None:
    """Header, body and tag of small and large frames; ``at``: of what is said after the handshake."""
    with behind_proxy(SETTINGS[protection]) as (ranks, proxy):
        proxy.alter = flip = Flip(at)
        exchange(ranks)
        exchange(ranks, 100, 20)
    assert flip.flipped == 1
    assert "was made again after it had broken (a frame came damaged)" in caplog.text


def test_frames_that_are_damaged_again_and_again_but_not_twice_all_come() -> None:
    """Once in each exchange, while both ranks still have payloads to send: the next exchange damages later frames."""
    with behind_proxy(SETTINGS["open"]) as (ranks, proxy):
        for _ in range(8):
            proxy.alter = flip = Flip(1_000_000)
            exchange(ranks, 3 << 20, 1)
            assert flip.flipped == 1


@pytest.mark.parametrize(
    "protection",
    [pytest.param(each, marks=() if each == "open" else pytest.mark.slow) for each in SETTINGS],
)
def test_what_comes_damaged_twice_is_an_error_that_names_the_link(protection: str) -> None:
    def spoil(data: bytes, is_caller: bool) -> bytes:
        return data if is_caller or len(data) < 10_000 else data[:-1] + bytes([data[-1] ^ 1])

    with behind_proxy(SETTINGS[protection]) as (ranks, proxy):
        proxy.alter = spoil
        sending, receiving = streams(ranks)
        source = some_bytes(1 << 20)
        unsent = ranks[0].transport.send(sending, (1,), (span(source),), is_led=False, owner=source)
        with ThreadPoolExecutor(1) as pool:
            going_on = pool.submit(lambda: ranks[0].transport.wait_until_sent(unsent, WAIT_S))
            with pytest.raises(
                IntegrityError,
                match=r"'stream': what rank 0 sent came damaged twice over the connection from rank 1 "
                r"\(127.0.0.1:\d+\) to rank 0 \(127.0.0.1:\d+\)",
            ):
                ranks[1].transport.collect(expect(receiving, 0, np.zeros(1 << 20, np.uint8)), WAIT_S)
            going_on.result(WAIT_S)


@pytest.mark.parametrize("protection", SETTINGS)
def test_a_connection_that_is_cut_is_made_again(protection: str) -> None:
    with behind_proxy(SETTINGS[protection]) as (ranks, proxy):
        counts = iter(range(1 << 30))

        def cut(data: bytes, is_caller: bool) -> bytes:
            if next(counts) in (20, 60, 61, 120):
                proxy.cut()
            return data

        proxy.alter = cut
        exchange(ranks, 3 << 20, 4)
        exchange(ranks, 100, 20)
        assert ranks[1].transport._links[0]._connections > 1


def wait_for_connections(ranks: list[ConnectedRank], count: int) -> None:
    for rank in ranks:
        link = connection(rank, 1 - rank.rank)
        rank.wait_until(lambda link=link: len(link._sockets) == count, WAIT_S, lambda: "")


@pytest.mark.parametrize("index", [0, 2])
def test_one_of_several_connections_that_breaks_breaks_the_link_and_all_goes_on(
    index: int, caplog: pytest.LogCaptureFixture
) -> None:
    with behind_proxy(SETTINGS["several"]) as (ranks, proxy):
        link = connection(ranks[1], 0)
        wait_for_connections(ranks, 4)
        victim, counts = link._sockets[index].sock, iter(range(1 << 30))

        def cut(data: bytes, is_caller: bool) -> bytes:
            if next(counts) == 100:
                victim.shutdown(socket.SHUT_RDWR)
            return data

        proxy.alter = cut
        exchange(ranks, 3 << 20, 4)
        exchange(ranks, 100, 20)
        assert link._connections == 2
        wait_for_connections(ranks, 4)
    assert "was made again after it had broken" in caplog.text


def test_large_payloads_use_all_connections_of_a_link() -> None:
    with behind_proxy(SETTINGS["several"]) as (ranks, proxy):
        wait_for_connections(ranks, 4)
        said: dict[int, int] = {}

        def count(data: bytes, is_caller: bool, source: socket.socket) -> bytes:
            said[id(source)] = said.get(id(source), 0) + len(data)
            return data

        proxy.alter_of = count
        for _ in range(20):  # on a busy machine, a connection may come late
            exchange(ranks, 16 << 20, 2)
            used = sum(nbytes > 256 << 10 for nbytes in said.values())
            if used == 8:  # four each way
                break
    assert used == 8


def test_a_link_has_those_connections_that_can_be_made(caplog: pytest.LogCaptureFixture) -> None:
    """Without the others it is slower, and that is all."""
    ranks = [ConnectedRank(rank, SETTINGS["several"]) for rank in range(2)]
    listening = ranks[0].transport.connector
    assert listening is not None
    address = listening.address()
    assert listening.listener is not None
    host, _, port = address.rpartition(":")
    proxy = Proxy((host, int(port)), lambda count: proxy.refuse_more() if count == 2 else None)
    listening.listener.address = proxy.address.removeprefix("tcp://")
    try:
        connect(ranks)
        wait_for_connections(ranks, 2)
        exchange(ranks)
    finally:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda rank: rank.transport.close(), ranks))
        proxy.close()
    assert "the link may be slower" in caplog.text


def test_bytes_that_dribble_are_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """Each byte by itself, as far as the system keeps them apart."""
    with behind_proxy(SETTINGS["signed"]) as (ranks, proxy):
        proxy.most_bytes = 1
        exchange(ranks, 20_000, 1)
    assert "broken" not in caplog.text


def quick(protection: str) -> Settings:
    """Silence is noticed after a second."""
    return replace(SETTINGS[protection], heartbeat_timeout_s=1.0, heartbeat_timeout_max_s=1.0)


class Hole:
    """Loses, without a word, all that is said over connections that were there when it was opened, or over all."""

    def __init__(self, proxy: Proxy, for_ever: bool) -> None:
        self._proxy, self._for_ever = proxy, for_ever
        self._old = set(map(id, proxy.sockets))

    def __call__(self, data: bytes, is_caller: bool, source: object) -> bytes:
        return b"" if self._for_ever or id(source) in self._old else data


def test_a_connection_that_loses_everything_is_noticed_and_made_again(caplog: pytest.LogCaptureFixture) -> None:
    with behind_proxy(quick("signed")) as (ranks, proxy):
        exchange(ranks, 100, 2)
        proxy.alter_of = Hole(proxy, for_ever=False)
        began = time.monotonic()
        exchange(ranks, 100, 2)
        assert time.monotonic() - began < 5
    assert "nothing has come over it for 1 s, not even an answer to a heartbeat" in caplog.text


def test_a_link_that_carries_nothing_any_more_is_named_and_not_its_ranks() -> None:
    with behind_proxy(quick("open")) as (ranks, proxy):
        exchange(ranks, 100, 2)
        proxy.alter_of = Hole(proxy, for_ever=True)
        began = time.monotonic()
        errors = list[BaseException]()

        def waits(rank: int) -> None:
            try:
                ranks[rank].transport.collect(expect(both[rank], 1 - rank, np.zeros(8, np.uint8)), WAIT_S)
            except PeerLostError as error:
                errors.append(error)

        both = streams(ranks, "lost")
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(waits, range(2)))
        assert time.monotonic() - began < 10
    assert len(errors) == 2
    for error in errors:
        assert "'lost': the connection from rank" in str(error)
        assert "could not be made again within 2 s: the network between the two machines does not carry it" in str(
            error
        )


@pytest.mark.slow
def test_a_rank_that_computes_for_long_is_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    """It calls nothing, but answers heartbeats."""
    with behind_proxy(quick("open")) as (ranks, _):
        exchange(ranks, 100, 2)
        ranks[1].wait_until(never_before(time.monotonic() + 4), WAIT_S, lambda: "")
        exchange(ranks, 100, 2)
        assert connection(ranks[1], 0)._connections == 1
    assert "broken" not in caplog.text


def never_before(time_s: float) -> Callable[[], bool]:
    return lambda: time.monotonic() >= time_s


# ---- through a third machine ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def with_relay(settings: Settings = SETTINGS["signed"]) -> Iterator[tuple[list[ConnectedRank], Relay]]:
    """Two ranks that are connected, and a third machine's relay."""
    relay = Relay("127.0.0.1", settings)
    relay.allow(frozenset(("127.0.0.1",)))
    try:
        with connected(2, settings) as ranks:
            yield ranks, relay
    finally:
        relay.close()


def use(ranks: list[ConnectedRank], address: str = "") -> None:
    """As the services of both machines say: through this relay, or directly."""
    for rank in ranks:
        with rank.state:
            rank.transport.set_relays({1 - rank.rank: address} if address else {})


def wait_for(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s
        select.select([], [], [], 0.01)


def sockets(ranks: list[ConnectedRank]) -> list[int]:
    return [len(connection(rank, 1 - rank.rank)._sockets) for rank in ranks]


@pytest.mark.parametrize("protection", ["open", "encrypted", "several"])
def test_a_link_goes_through_a_third_machine_as_well_and_no_longer(protection: str) -> None:
    with with_relay(SETTINGS[protection]) as (ranks, relay):
        exchange(ranks)
        before = sockets(ranks)
        use(ranks, relay.address)
        wait_for(lambda: sockets(ranks) == [count + 1 for count in before])
        exchange(ranks, 8 << 20)
        if protection == "several":  # over loopback, these have room for all of it
            return
        assert relay.bytes_moved > 1 << 20
        use(ranks)
        exchange(ranks)  # what waits leaves
        moved = relay.bytes_moved
        exchange(ranks, 8 << 20)
        assert relay.bytes_moved - moved < 256 << 10  # handshakes and reports at most
        use(ranks, relay.address)  # over the same connection
        exchange(ranks, 8 << 20)
        assert relay.bytes_moved > moved + (1 << 20)
        assert sockets(ranks) == [count + 1 for count in before]


def test_a_third_machine_that_dies_costs_nothing_but_time() -> None:
    with with_relay() as (ranks, relay):
        use(ranks, relay.address)
        wait_for(lambda: sockets(ranks) == [2, 2])
        with ThreadPoolExecutor(1) as pool:
            exchanging = pool.submit(exchange, ranks, 8 << 20, 6)
            wait_for(lambda: relay.bytes_moved > 4 << 20)
            relay.close()
            exchanging.result()
        exchange(ranks)
        wait_for(lambda: sockets(ranks) == [1, 1])


def test_another_relay_takes_the_place_of_one() -> None:
    with with_relay() as (ranks, first), with_relay() as (_, second):
        use(ranks, first.address)
        wait_for(lambda: sockets(ranks) == [2, 2])
        use(ranks, second.address)
        wait_for(lambda: second.connections == 1 and not first.connections)
        exchange(ranks, 8 << 20)
        assert second.bytes_moved > 1 << 20


def test_a_relay_that_can_not_be_reached_leaves_the_link_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with with_relay() as (ranks, relay):
        relay.allow(frozenset())
        use(ranks, relay.address)
        wait_for(lambda: "is no address of this job's machines" in caplog.text)
        exchange(ranks)
        assert sockets(ranks) == [1, 1]


def test_ranks_tell_what_they_sent() -> None:
    with connected(2, SETTINGS["several"]) as ranks:
        exchange(ranks, 8 << 20)
        for rank in ranks:
            with rank.state:
                rank.transport._report_links()
        # Loopback is no link: the system tells no times that would mean anything.
        assert not [word for rank in ranks for word in rank.told if isinstance(word, LinksUsed)]


def cards(*hosts: str) -> Settings:
    """``hosts``: of loopback; they stand for network cards."""
    return Settings(num_workers=4, secret="a secret of at least sixteen characters", interfaces=",".join(hosts))


@pytest.mark.parametrize(
    ("settings", "pairs"),
    [
        ((cards("127.0.0.1", "127.0.0.2"),) * 2, {("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.2")}),
        (
            (cards("127.0.0.1", "127.0.0.2", "127.0.0.3"), SETTINGS["signed"]),
            {("127.0.0.1", f"127.0.0.{n}") for n in (1, 2, 3)},
        ),
        ((SETTINGS["signed"], cards("127.0.0.5", "127.0.0.6")), {(f"127.0.0.{n}", "127.0.0.1") for n in (5, 6)}),
    ],
    ids=["both", "the one that is called", "the one that calls"],
)
def test_a_link_uses_all_network_cards(settings: tuple[Settings, Settings], pairs: set[tuple[str, str]]) -> None:
    """``pairs``: of rank 1's address, which calls, and rank 0's. What comes is the same, whatever way it took."""
    ranks = [ConnectedRank(rank, own) for rank, own in enumerate(settings)]
    try:
        connect(ranks)
        wait_for_connections(ranks, len(pairs))
        ends = [(each.sock.getsockname()[0], each.sock.getpeername()[0]) for each in connection(ranks[1], 0)._sockets]
        assert set(ends) == pairs
        assert len(ends) == len(pairs)
        exchange(ranks, 16 << 20, 2)
    finally:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda rank: rank.transport.close(), ranks))


def test_several_connections_over_each_network_card() -> None:
    both = replace(cards("127.0.0.1", "127.0.0.2"), connections_per_link=3)
    with connected(2, both) as ranks:
        wait_for_connections(ranks, 4)
        own = [each.sock.getsockname()[0] for each in connection(ranks[1], 0)._sockets]
        assert sorted(own) == ["127.0.0.1"] * 2 + ["127.0.0.2"] * 2
        exchange(ranks)


def test_a_network_card_that_can_not_be_reached_leaves_the_link_to_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    both = cards("127.0.0.1", "127.0.0.2")
    ranks = [ConnectedRank(rank, both) for rank in range(2)]
    try:
        calling = ranks[1].transport.connector
        assert calling is not None
        calling.address()
        calling._cards = NetworkCards(("127.0.0.1", "192.0.2.7"), ("", ""))  # no connection can come from the second
        connect(ranks)
        exchange(ranks)
        wait_for_connections(ranks, 1)
    finally:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda rank: rank.transport.close(), ranks))
    assert "the link may be slower" in caplog.text
