"""Who may connect to a rank, and what a rank says if it does not get its connections."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from support.connected import SECRET, SETTINGS, WAIT_S, ConnectedRank, connect, connected

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError, ConfigurationError, ProtocolError, RendezvousError
from byteps_py.security.unauthenticated_connections import PATIENCE_S
from byteps_py.session.peers.peer_connector import PeerConnector, _hosts_in


@pytest.fixture
def rank() -> Iterator[ConnectedRank]:
    found = ConnectedRank(0, SETTINGS["signed"])
    yield found
    found.transport.close()


def connector(rank: ConnectedRank) -> PeerConnector:
    found = rank.transport.connector
    assert found is not None
    return found


def place(rank: ConnectedRank) -> tuple[str, int]:
    host, _, port = connector(rank).address().rpartition(":")
    return host, int(port)


def test_four_ranks_connect_to_each_other() -> None:
    with connected(4, SETTINGS["signed"]) as ranks:
        for rank in ranks:
            assert sorted(rank.transport._outboxes) == [r for r in range(4) if r != rank.rank]
        connect(ranks)  # for another group: nothing is left to do


@pytest.mark.parametrize(
    ("other", "epoch", "why"),
    [
        (replace(SETTINGS["signed"], secret="another secret of the same length as"), 0, "do job and secret agree"),
        (replace(SETTINGS["signed"], job_id="another job"), 0, "do job and secret agree"),
        (SETTINGS["open"], 0, "BYTEPS_SECRET and BYTEPS_ENCRYPT"),
        (SETTINGS["encrypted"], 0, "BYTEPS_SECRET and BYTEPS_ENCRYPT"),
        (SETTINGS["signed"], 1, "epoch 1"),
    ],
)
def test_who_does_not_belong_here_is_turned_away(rank: ConnectedRank, other: Settings, epoch: int, why: str) -> None:
    stranger = ConnectedRank(1, other, epoch)
    try:
        address = connector(rank).address()
        with pytest.raises(RendezvousError, match=why):
            connector(stranger).connect({0: address}, 0.3)
        with pytest.raises(RendezvousError, match="rank 1 did not connect to rank 0"):
            connector(rank).connect({1: connector(stranger).address()}, 0.1)
        assert not rank.transport._outboxes
    finally:
        stranger.transport.close()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
        struct.pack("<I", 5) + b"hello",
        struct.pack("<I", 1 << 31),
        struct.pack("<I8s5I", 28, b"bps-rnk3", 1, 7, 0, 1, 0),
        struct.pack("<I8s5I", 28, b"bps-rnk3", 0, 0, 0, 1, 0),
        struct.pack("<I8s5I", 28, b"bps-rnk3", 1, 0, 0, 1, 0),
    ],
)
def test_noise_is_answered_by_a_refusal_at_most(rank: ConnectedRank, said: bytes) -> None:
    with socket.create_connection(place(rank), WAIT_S) as sock:
        sock.sendall(said)
        with contextlib.suppress(OSError):  # it has hung up already
            sock.shutdown(socket.SHUT_WR)
        sock.settimeout(WAIT_S)
        answer = b""
        try:
            while part := sock.recv(4096):
                answer += part
        except ConnectionResetError:
            pass
        assert answer[4:5] in (b"", b"-")
    assert not rank.transport._outboxes


def test_silent_connections_do_not_keep_members_out(rank: ConnectedRank) -> None:
    silent = [socket.create_connection(place(rank), WAIT_S) for _ in range(200)]
    other = ConnectedRank(1, SETTINGS["signed"])
    try:
        with ThreadPoolExecutor(2) as pool:
            connecting = [
                pool.submit(connector(rank).connect, {1: connector(other).address()}, WAIT_S),
                pool.submit(connector(other).connect, {0: connector(rank).address()}, WAIT_S),
            ]
            for attempt in connecting:
                attempt.result()
    finally:
        for sock in silent:
            sock.close()
        other.transport.close()


def call_of(rank: int, epoch: int = 0) -> bytes:
    return struct.pack("<I8s5I", 28, b"bps-rnk3", rank, 0, epoch, 1, 0)


def test_strangers_may_make_up_ranks_as_they_like(rank: ConnectedRank) -> None:
    """Nothing of them is kept, and no thread serves each of them."""
    threads = threading.active_count()
    with pytest.raises(RendezvousError):
        connector(rank).connect({1: "127.0.0.1:1"}, 0.01)  # rank 1 alone is awaited
    for claimed in range(1, 200):
        with socket.create_connection(place(rank), WAIT_S) as sock:
            sock.sendall(call_of(claimed, epoch=9))
            while sock.recv(4096):
                pass
    assert set(connector(rank)._refusals) == {1}
    assert connector(rank).listener.callers == 0  # type: ignore[union-attr]
    assert threading.active_count() <= threads + 1


def test_all_of_a_handshake_has_to_be_over_in_time(rank: ConnectedRank) -> None:
    """However the caller spreads its bytes. Connections that come meanwhile are served."""
    with socket.create_connection(place(rank), WAIT_S) as sock, ThreadPoolExecutor(1) as pool:
        began = time.monotonic()

        def dribble() -> None:
            with contextlib.suppress(OSError):
                for byte in struct.pack("<I", 4000) + bytes(4000):
                    sock.sendall(bytes([byte]))
                    if ended.wait(0.02):
                        return

        ended = threading.Event()
        dribbling = pool.submit(dribble)
        sock.settimeout(WAIT_S)
        with contextlib.suppress(OSError):  # it may be a reset
            while sock.recv(4096):
                pass
        took_s = time.monotonic() - began
        ended.set()
        dribbling.result(WAIT_S)
    assert PATIENCE_S - 0.5 < took_s < PATIENCE_S + 2
    assert connector(rank).listener.cut_off == 1  # type: ignore[union-attr]


def test_what_says_much_before_it_has_proven_anything_is_cut_off(rank: ConnectedRank) -> None:
    with socket.create_connection(place(rank), WAIT_S) as sock:
        sock.settimeout(WAIT_S)
        began = time.monotonic()
        sock.sendall(struct.pack("<I", 4000))
        with contextlib.suppress(OSError):
            while time.monotonic() < began + WAIT_S:
                sock.sendall(bytes(1 << 16))
    assert time.monotonic() < began + PATIENCE_S


@pytest.mark.slow
def test_a_listener_that_dribbles_does_not_keep_its_caller() -> None:
    rank = ConnectedRank(1, SETTINGS["signed"])
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        host, port = listener.getsockname()
        calling = pool.submit(connector(rank).connect, {0: f"{host}:{port}"}, 0.2)
        sock, _ = listener.accept()
        with sock, contextlib.suppress(OSError):
            for byte in struct.pack("<I", 4000) + bytes(4000):
                sock.sendall(bytes([byte]))
                if calling.done():
                    break
                with contextlib.suppress(TimeoutError):
                    calling.exception(0.02)
        with pytest.raises(RendezvousError, match=f"rank 0 at {host}:{port} .*handshake was not over"):
            calling.result(0)
    rank.transport.close()


def test_a_rank_that_can_not_be_reached_is_named_with_its_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        host, port = taken.getsockname()
        rank = ConnectedRank(1, SETTINGS["open"])
        try:
            with pytest.raises(
                RendezvousError, match=f"connect to rank 0 at {host}:{port} .*BYTEPS_DIRECT_CONNECTIONS"
            ):
                connector(rank).connect({0: f"{host}:{port}"}, 0.2)
        finally:
            rank.transport.close()


def test_an_address_that_is_not_this_machines_is_an_error_that_names_the_variable() -> None:
    rank = ConnectedRank(0, Settings(num_workers=2, secret=SECRET, node_host="192.0.2.1"))
    try:
        with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1.*DMLC_NODE_HOST"):
            connector(rank).address()
    finally:
        rank.transport.close()


def test_a_rank_that_is_closed_does_not_go_on_waiting(rank: ConnectedRank) -> None:
    with ThreadPoolExecutor(1) as pool:
        address = connector(rank).address()
        waiting = pool.submit(connector(rank).connect, {1: address}, WAIT_S)
        connector(rank).close()
        with pytest.raises(BytePSError):
            waiting.result(WAIT_S)


@pytest.mark.parametrize("said", [b"gpu1", b"127.0.0.2\n", b"\xff", b"\n".join([b"127.0.0.2"] * 8)])
def test_a_rank_that_names_no_network_cards_is_refused(said: bytes) -> None:
    assert _hosts_in(b"") == []
    assert _hosts_in(b"127.0.0.2\nfd00::1") == ["127.0.0.2", "fd00::1"]
    with pytest.raises(ProtocolError, match="are no addresses of network cards"):
        _hosts_in(said)
