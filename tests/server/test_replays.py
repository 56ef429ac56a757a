"""What is said twice counts once: at the rules, a million times, and over real connections."""

from __future__ import annotations

import pytest
import zmq
from support.data_plane import WAIT_S, Server, header_for
from support.summation import SETTINGS
from zmq.utils.monitor import recv_monitor_message

from byteps_py.dataplane.authenticator import show_password
from byteps_py.server.round_state import Answer, Contribution, Reduce, RefuseContributions
from byteps_py.server.rounds import Rounds
from byteps_py.wire.data_link import Kind

MACHINES = 3
REPLAYS = 1_000_000
ONE, TWO, THREE = b"\0\0\x80?", b"\0\0\0@", b"\0\0@@"  # as float32


pytestmark = pytest.mark.usefixtures("zeromq_collector")


def given(sender: int, round_: int, origin: object, flags: int = 0) -> Contribution:
    return Contribution(header_for(sender, bytes(64), round=round_, flags=flags), origin, 64)


@pytest.mark.parametrize("replays", [20_000, pytest.param(REPLAYS, marks=pytest.mark.long)])
def test_replayed_pushes_change_no_sum(replays: int) -> None:
    """While the round collects, while it is reduced and after it: from the same connection and from another."""
    rounds: Rounds[Contribution] = Rounds(4096)
    rounds.membership(1, MACHINES, 0.0, 1)
    here, there = object(), object()
    first = [given(machine, 1, here) for machine in range(MACHINES)]
    assert rounds.contribution(first[0], 0.0) == []
    replay = given(0, 1, here)
    for _ in range(replays // 2):
        rounds.contribution(replay, 0.0)
    again = given(0, 1, there)  # a new connection: the same bits, but the answer goes there
    for _ in range(1000):
        assert rounds.contribution(again, 0.0) == []
    assert rounds.counters.bytes_in_flight == 64
    assert rounds.contribution(first[1], 0.0) == []
    (reduce,) = rounds.contribution(first[2], 0.0)
    assert isinstance(reduce, Reduce)
    assert [c.header.sender for c in reduce.round.in_order()] == [0, 1, 2]
    for _ in range(replays // 4):
        rounds.contribution(replay, 0.0)
    (answer,) = rounds.reduced(reduce.round)
    assert isinstance(answer, Answer)
    assert len(answer.contributions) == MACHINES
    for _ in range(replays // 4):
        (refused,) = rounds.contribution(replay, 0.0)
    assert isinstance(refused, RefuseContributions)
    assert "stale: round 1" in refused.text
    assert rounds.counters.bytes_in_flight == 0
    assert rounds.counters.rounds == 1


@pytest.mark.parametrize("replays", [500, pytest.param(REPLAYS, marks=pytest.mark.long)])
def test_replayed_pushes_over_a_connection_change_no_sum(replays: int) -> None:
    with Server(SETTINGS) as server:
        zero, one = server.machine(0), server.machine(1)
        one.prove()  # who hesitates for long is cut off
        for _ in range(replays):
            zero.push(ONE)
        zero.push(b"", length=0)  # refused: what was sent before it has arrived
        assert "its length is 0 bytes, but a partition has" in zero.refusal()
        one.push(TWO)
        assert one.result() == THREE
        assert zero.result() == THREE
        zero.push(ONE)  # the round is over
        assert "stale: round 1" in zero.refusal()
        zero.push(ONE, round=2)
        one.push(TWO, round=2)
        assert zero.result() == one.result() == THREE


def test_replayed_bytes_can_not_be_opened() -> None:
    """What somebody in between has recorded: the same bytes again, or later, or those of another connection."""
    with Server(SETTINGS) as server:
        zero, one = server.machine(0), server.machine(1)
        zero.prove()
        one.prove()
        assert zero.seals is not None
        assert one.seals is not None
        recorded = zero.seals[0].seal(header_for(0, ONE, round=1).pack(), ONE)
        zero.socket.send_multipart(recorded)
        for _ in range(10):
            zero.socket.send_multipart(recorded)
            zero.seals[0].number += 1
        one.socket.send_multipart(recorded)
        one.seals[0].number += 1
        for _ in range(10):
            assert zero.receive()[0].kind is Kind.DAMAGED
        assert one.receive()[0].kind is Kind.DAMAGED
        one.push(TWO)  # what it says itself is heard
        assert zero.result() == one.result() == THREE


def test_a_connection_that_says_nothing_that_can_be_opened_is_none_of_ours() -> None:
    with Server(SETTINGS) as server:
        zero = server.machine(0)
        zero.prove()
        monitor = zero.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        for _ in range(16):
            zero.socket.send_multipart([b"x" * 93, ONE])
        for _ in range(16):
            assert zero.receive()[0].kind is Kind.DAMAGED
        events = []
        while zmq.EVENT_HANDSHAKE_FAILED_AUTH not in events:
            assert monitor.poll(WAIT_S * 1000)
            events.append(recv_monitor_message(monitor)["event"])
        zero.socket.disable_monitor()
        monitor.close(0)
        # It is cut; the next one, which ZeroMQ makes by itself, shows a password that has been used.
        assert events[0] == zmq.EVENT_DISCONNECTED


def test_what_nobody_has_greeted_with_is_refused() -> None:
    with Server(SETTINGS) as server:
        zero = server.machine(0)
        zero.challenge()
        zero.socket.send_multipart([header_for(0, ONE).pack(), ONE])
        assert "no HELLO was accepted" in zero.refusal()


def test_an_identity_of_ones_own_choice_is_refused() -> None:
    with Server(SETTINGS) as server, zmq.Context() as context:
        spoofing = context.socket(zmq.DEALER)
        spoofing.linger = 0
        spoofing.setsockopt(zmq.IDENTITY, b"another's")
        show_password(spoofing, SETTINGS, server.service.address)
        spoofing.connect(server.service.address)
        spoofing.send_multipart([header_for(0, b"", Kind.HELLO).pack(), bytes((1,)) + bytes(32)])
        assert spoofing.poll(30_000)
        assert b"it has chosen its own ZeroMQ identity" in spoofing.recv_multipart()[1]
        spoofing.close()
