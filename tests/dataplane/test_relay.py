"""Connections between two ranks through a third machine: who may ask for one, what it carries, and how it ends."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from support.connected import SECRET, SETTINGS, WAIT_S

from byteps_py.config.addresses import joined, place_of
from byteps_py.config.settings import Settings
from byteps_py.dataplane.relay import Relay, call_through, open_relay
from byteps_py.errors import ProtocolError
from byteps_py.system.network_interfaces import addresses_of

HERE = "127.0.0.1"


@contextlib.contextmanager
def relay(settings: Settings = SETTINGS["signed"], host: str = HERE) -> Iterator[Relay]:
    found = Relay(host, settings)
    found.allow(frozenset((host,)))
    try:
        yield found
    finally:
        found.close()
        wait(lambda: not found.connections)


@contextlib.contextmanager
def target(host: str = HERE) -> Iterator[tuple[str, socket.socket]]:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.settimeout(WAIT_S)
        yield joined(host, listener.getsockname()[1]), listener


def wait(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s
        select.select([], [], [], 0.01)


def through(at: Relay, settings: Settings, to: str) -> socket.socket:
    sock = socket.create_connection(place_of(at.address), WAIT_S)
    try:
        call_through(sock, settings, 3, at.address, to, time.monotonic() + WAIT_S)
    except BaseException:
        sock.close()
        raise
    sock.settimeout(WAIT_S)
    return sock


@pytest.mark.parametrize(
    ("protection", "host"),
    [
        ("open", HERE),
        ("signed", HERE),
        ("encrypted", HERE),
        pytest.param("signed", "::1", marks=pytest.mark.skipif("::1" not in addresses_of("lo"), reason="no IPv6")),
    ],
)
def test_it_carries_bytes_both_ways_and_ends_with_either(protection: str, host: str) -> None:
    data = np.random.default_rng(1).integers(0, 256, 3 << 20, np.uint8).tobytes()

    def all_of(sock: socket.socket) -> bytes:
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))

    def send(sock: socket.socket, what: bytes) -> None:
        sock.sendall(what)
        sock.shutdown(socket.SHUT_WR)

    with relay(SETTINGS[protection], host) as at, target(host) as (address, listener):
        with through(at, SETTINGS[protection], address) as caller:
            callee, _ = listener.accept()
            with callee, ThreadPoolExecutor(4) as pool:
                callee.settimeout(WAIT_S)
                sending = [pool.submit(send, caller, data), pool.submit(send, callee, data[::-1])]
                there, back = pool.submit(all_of, callee), pool.submit(all_of, caller)
                assert there.result() == data
                assert back.result() == data[::-1]
                for each in sending:
                    each.result()
        wait(lambda: not at.connections)
        assert at.bytes_moved == 2 * len(data)


def test_the_end_of_one_end_ends_the_other() -> None:
    with relay() as at, target() as (address, listener):
        caller = through(at, SETTINGS["signed"], address)
        callee, _ = listener.accept()
        with caller, callee:
            callee.settimeout(WAIT_S)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            caller.close()  # as a rank that is killed
            assert callee.recv(1) == b""


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (replace(SETTINGS["signed"], secret="another secret of the same length as"), "do job and secret agree"),
        (replace(SETTINGS["signed"], job_id="another job"), "do job and secret agree"),
        (SETTINGS["open"], "BYTEPS_SECRET and BYTEPS_ENCRYPT"),
    ],
)
def test_a_stranger_is_turned_away(other: Settings, why: str) -> None:
    with relay() as at, target() as (address, _), pytest.raises(ProtocolError, match=why):
        through(at, other, address)


def test_it_calls_nobody_but_the_machines_of_the_job() -> None:
    with relay() as at, target() as (address, _):
        at.allow(frozenset(("10.0.0.1",)))
        with pytest.raises(ProtocolError, match="is no address of this job's machines"):
            through(at, SETTINGS["signed"], address)


def test_a_rank_that_can_not_be_reached_is_named() -> None:
    with target() as (address, _):
        pass
    with relay() as at, pytest.raises(ProtocolError, match=f"it can't reach {address}"):
        through(at, SETTINGS["signed"], address)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 1 << 31),
        struct.pack("<I8sII", 16, b"bps-rly1", 1, 0),
        struct.pack("<I8sII", 16, b"bps-rly1", 1, 1 << 30),
        struct.pack("<I8sII", 22, b"bps-rly1", 1, 6) + b"noport",
        struct.pack("<I8sII", 20, b"bps-rly1", 1, 4) + b"\xff\xfe:9",
    ],
)
def test_noise_is_answered_by_a_refusal_at_most(said: bytes) -> None:
    with relay() as at, socket.create_connection(place_of(at.address), WAIT_S) as sock:
        sock.sendall(said)
        with contextlib.suppress(OSError):  # it has hung up already
            sock.shutdown(socket.SHUT_WR)
        sock.settimeout(WAIT_S)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := sock.recv(4096):
                answer += part
        assert answer[4:5] in (b"", b"-")


def test_a_job_that_needs_none_has_none() -> None:
    for settings in (
        Settings(num_workers=1, secret=SECRET),
        Settings(num_workers=2, secret=SECRET, direct_connections=False),
        Settings(num_workers=2, secret=SECRET, rebalance_links=False),
    ):
        assert open_relay(settings) is None
    found = open_relay(Settings(num_workers=2, secret=SECRET))
    assert found is not None
    found.close()
