"""A running summation server, and what must not stop it: malformed, wrong and strange messages."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator

import pytest
from support.data_plane import WAIT_S, Server, header_for
from support.strangers import resident_bytes
from support.summation import SETTINGS, assert_works

from byteps_py.errors import PeerLostError
from byteps_py.server.admission import AdmissionLimit
from byteps_py.server.contribution_listeners import ContributionListener
from byteps_py.server.service import SummationService
from byteps_py.wire.data_link import HEADER_BYTES, Header, Kind

pytestmark = pytest.mark.usefixtures("zeromq_collector")


@pytest.fixture(name="server")
def two_machines() -> Iterator[Server]:
    with Server(SETTINGS) as server:
        yield server


MALFORMED = [
    [b""],
    [b"", b""],
    [b"no header", b"payload"],
    [b"\xff" * HEADER_BYTES, b"payload"],
    [bytes(HEADER_BYTES), bytes(100)],
    [b"XPS1" + header_for(0, b"").pack()[4:], b"wrong magic"],
    [header_for(0, b"").pack()[:4] + b"\x09" + header_for(0, b"").pack()[5:], b"another version"],
    [header_for(0, bytes(4)).pack()],
    [header_for(0, bytes(4)).pack(), bytes(4), bytes(4)],
    [header_for(0, bytes(4)).pack(), *[b"part"] * 50],
]
REFUSED = [
    (header_for(0, b"", length=1 << 40), bytes(4), "a partition has 1 to"),
    (header_for(0, b"", length=8), bytes(4), "its header announces 8 bytes of payload, but 4 arrived"),
    (header_for(0, b"", length=4), bytes(8), "its header announces 4 bytes of payload, but 8 arrived"),
    (header_for(1, bytes(4)), bytes(4), "machine 0 must not send PUSH as machine 1"),
    (Header(Kind.SEGMENT, 0, length=4), bytes(4), "machine 0 must not send SEGMENT as machine 0"),
    (Header(Kind.ANSWER, 0, length=4), bytes(4), "machine 0 must not send ANSWER as machine 0"),
    (header_for(0, bytes(4), epoch=0), bytes(4), "without this one: its contribution is of epoch 0"),
]


def test_malformed_messages_are_dropped_and_nothing_else_happens(server: Server) -> None:
    machine, stranger = server.machine(0), server.machine(1)
    machine.prove()
    for frames in MALFORMED:
        stranger.socket.send_multipart(frames)
        machine.socket.send_multipart(frames)
        if len(frames) == 2:  # a peer that garbles is asked to say it again
            assert machine.seals is not None
            machine.seals[0].number += 1
            assert machine.receive()[0].kind is Kind.DAMAGED
    assert_works(server, machine)


@pytest.mark.parametrize(("header", "payload", "reason"), REFUSED)
def test_wrong_headers_are_refused(server: Server, header: Header, payload: bytes, reason: str) -> None:
    machine = server.machine(0)
    machine.send(header, payload)
    assert reason in machine.refusal()
    assert_works(server, machine)


def test_a_broadcast_without_a_push_is_refused_and_nothing_else_happens() -> None:
    with Server(SETTINGS, num_machines=3) as server:
        machines = [server.machine(1), server.machine(2)]
        for machine in machines:
            machine.pull(4, root=0, machines=2)
        for machine in machines:
            assert "machine 0, the root of the broadcast in round 1" in machine.refusal()
        machines += [server.machine(0)]
        for machine in machines:
            machine.push(bytes(4), key=99)
        assert [machine.result() for machine in machines] == [bytes(4)] * 3


def test_the_last_words_of_a_dead_connection_do_not_take_the_place_of_the_next(server: Server) -> None:
    """A proof that lay unread while its machine connected again and proved itself there."""
    first = server.machine(0)
    challenge = first.challenge()
    second, other = server.machine(0), server.machine(1)
    second.push(bytes(4))
    other.push(bytes(4))
    assert second.result() == bytes(4)
    first.answer(challenge)
    first.send(Header(Kind.PROBE, 0), b"there and back")
    assert first.receive()[1] == b"there and back"  # the proof has been read
    assert_works(server, second)


def test_codes_that_there_are_none_of_are_dropped_and_nothing_else_happens(server: Server) -> None:
    """From a machine that has proven itself: sealed, so that they reach the parser."""
    machine = server.machine(0)
    good = bytearray(header_for(0, bytes(4)).pack())
    codes = {"magic": 0, "version": 4, "kind": 5, "dtype": 6, "op": 7}
    for at, code in itertools.product(codes.values(), (0, 99, 255)):
        header = good.copy()
        header[at] = code
        machine.send(bytes(header), bytes(4))
    assert_works(server, machine)
    assert server.service._traffic.malformed == 3 * len(codes)
    assert server.link.statistics().bytes_in_flight == 0


@pytest.mark.parametrize("future", [2, 1 << 40, (1 << 64) - 1])
def test_a_future_round_of_an_unused_key_is_not_added(server: Server, future: int) -> None:
    machine, other = server.machine(0), server.machine(1)
    machine.push(bytes(4), key=99, round=future)
    machine.send(Header(Kind.PROBE, 0), b"it has arrived")
    assert machine.receive()[1] == b"it has arrived"
    other.push(bytes(4), key=99)
    if future == 2:
        assert "disagree about round" in machine.refusal()
        assert "disagree about round" in other.refusal()
    else:
        assert f"round {future} is in flight, and the rounds before it are complete" in other.refusal()
    assert server.link.statistics().rounds == 0
    assert_works(server, machine)


@pytest.mark.parametrize(
    ("keys", "most"), [(3000, 1000), pytest.param(1_000_000, AdmissionLimit.most_keys, marks=pytest.mark.long)]
)
@pytest.mark.timeout(1200)
def test_keys_that_a_machine_makes_up_take_a_bounded_memory(server: Server, keys: int, most: int) -> None:
    """It does not read the refusals, either."""
    server.service._rounds.admission_limit.most_keys = most
    machine = server.machine(0)
    before = most_resident = resident_bytes(os.getpid())
    for key in range(keys):
        machine.push(bytes(4), key=1_000_000 + key)
        if key % 1000 == 999:
            most_resident = max(most_resident, resident_bytes(os.getpid()))
            assert server.link.statistics().bytes_in_flight <= 4 * most
    print(f"{keys} keys: {(most_resident - before) >> 20} MB")
    assert most_resident - before < (384 << 20)
    assert_works(server, server.machine(0))
    assert server.link.statistics().bytes_in_flight == 0


class _Service(SummationService):
    class network_class(ContributionListener):  # noqa: N801
        most_unread = 100


def test_a_machine_that_goes_on_asking_and_reads_nothing_is_disconnected() -> None:
    with Server(SETTINGS, service_class=_Service) as server:
        machine, network = server.machine(0), server.service._network
        machine.prove()
        machine.enter()
        for _ in range(1_000_000):  # more than lies between them unread
            machine.push(b"")  # refused
            if network.peer_of(0) is None:
                break
        assert network.peer_of(0) is None
        assert_works(server, server.machine(0))


def test_a_machine_number_that_does_not_exist_is_refused(server: Server) -> None:
    machine = server.machine(65_000)
    machine.push(bytes(4))
    assert "machines of this job are numbered 0 to 1" in machine.refusal()


def test_strangers_are_refused(server: Server) -> None:
    stranger = server.machine(0, shown=b"guessed")
    stranger.prove()
    assert "its proof of membership is wrong" in stranger.refusal()
    stranger.push(bytes(4))
    assert "no HELLO was accepted" in stranger.refusal()
    assert_works(server, server.machine(0))


def test_local_strangers_are_refused(server: Server) -> None:
    stranger = server.local_machine(0, shown="guessed")
    assert "its proof of membership is wrong" in stranger.receive()[1]
    with pytest.raises(PeerLostError):
        stranger.channel.receive(WAIT_S)


def test_bytes_that_are_no_zeromq_and_messages_beyond_all_bounds(server: Server) -> None:
    machine = server.machine(0)
    host, port = server.service.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(os.urandom(4096))
    giant = server.machine(1)
    giant.push(bytes(SETTINGS.partition_bytes + 8192))  # libzmq ends the connection before it allocates
    assert_works(server, machine)


def test_a_local_machine_that_goes_takes_its_contribution_along(server: Server) -> None:
    local = server.local_machine(0)
    local.give_segment()
    local.send(bytes(64), answer_offset=4096)
    local.send(bytes(64), answer_offset=0, segment=5)  # refused: what was sent before it has arrived
    local.receive()
    assert server.link.statistics().bytes_in_flight == 64
    server.disconnect()
    again = server.local_machine(0)
    again.give_segment()
    assert_works(server, again)
    assert server.link.statistics().bytes_in_flight == 0
