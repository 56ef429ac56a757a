"""The listening end of connections, without a loop: what is read of connections that have ended."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import zmq
from support.data_plane import WAIT_S, Machine
from support.summation import SETTINGS

from byteps_py.dataplane.listener import _MOST_DAMAGED, DataListener, Peer
from byteps_py.dataplane.traffic import Traffic
from byteps_py.security.unauthenticated_connections import WATCH_S
from byteps_py.wire.data_link import READER, READER_KINDS, Header, Kind


class Listener:
    def __init__(self) -> None:
        self.traffic, self.heard, self.gone = Traffic(), list[Peer](), list[Peer]()
        self.listener = DataListener(
            "127.0.0.1", SETTINGS, self.traffic, frozenset((Kind.PUSH, *READER_KINDS)), self._hear, self.gone.append
        )

    def _hear(self, header: Header, peer: Peer, payload: zmq.Frame) -> None:
        self.heard.append(peer)

    def read(self) -> None:
        poller = zmq.Poller()
        poller.register(self.listener.socket, zmq.POLLIN)
        poller.register(self.listener._authenticator.socket, zmq.POLLIN)
        while self.listener.socket not in (ready := dict(poller.poll(WAIT_S * 1000))):
            assert ready, "nothing came"
            self.listener._authenticator.on_readable()
        self.listener.on_readable()

    def welcome(self, machine: Machine) -> None:
        self.read()
        machine.prove()
        self.read()


@pytest.fixture(name="listener")
def listening() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.listener.close()


@pytest.fixture(name="context")
def zeromq() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


def heard(listener: Listener, context: zmq.Context[zmq.Socket[bytes]]) -> Machine:
    """One that is known, and has pushed."""
    machine = Machine(context, listener.listener.address, 0, SETTINGS)
    listener.welcome(machine)
    machine.push(bytes(4))
    listener.read()
    return machine


def test_late_messages_of_a_disconnected_peer_are_dropped_without_a_warning(
    listener: Listener, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    machine = heard(listener, context)
    (peer,) = listener.heard
    machine.push(bytes(4), round=2)
    assert listener.listener.socket.poll(WAIT_S * 1000)  # it has come, and is not read yet
    machine.close()
    while listener.listener.send_result(peer, Header(Kind.ANSWER, 0).pack(), None):  # type: ignore[arg-type]
        pass
    listener.read()
    assert (listener.heard, listener.gone, listener.traffic.malformed) == ([peer], [peer], 0)


def test_a_connection_on_which_every_message_is_damaged_is_cut(
    listener: Listener, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """And what is left of it is dropped without a warning; on its next one the machine is known again."""
    machine = heard(listener, context)
    monitor = machine.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    for _ in range(_MOST_DAMAGED):
        machine.socket.send_multipart([b"damaged", b""])
    while not listener.gone:
        listener.read()
    machine.push(bytes(4), round=2)
    listener.read()
    assert [machine.receive()[0].kind for _ in range(_MOST_DAMAGED)] == [Kind.DAMAGED] * _MOST_DAMAGED
    assert (listener.gone, listener.traffic.malformed) == (listener.heard, _MOST_DAMAGED)
    listener.listener._strangers._clock = lambda: time.monotonic() + WATCH_S
    listener.listener._strangers.sweep()
    assert monitor.poll(WAIT_S * 1000)
    machine.socket.disable_monitor()
    monitor.close(0)
    machine.close()
    again = heard(listener, context)
    assert (len(listener.heard), listener.listener.peer_of(0)) == (2, listener.heard[-1])
    again.close()


def test_readers_are_no_machines_and_are_forgotten_when_they_go(
    listener: Listener, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """A server that has lost its scheduler ends once no machine is connected, whoever reads there."""
    machine = heard(listener, context)
    readers = []
    for _ in range(2):
        readers.append(Machine(context, listener.listener.address, READER, SETTINGS))
        listener.welcome(readers[-1])
        readers[-1].send(Header(Kind.DESCRIBE_STATES, READER), b"")
        listener.read()
    assert len({id(peer) for peer in listener.heard}) == 3
    assert (listener.listener.connections, listener.listener.peer_of(READER)) == (1, None)
    for reader in readers:
        reader.close()
    while len(listener.listener._peers) > 1:
        assert listener.listener.monitor.poll(WAIT_S * 1000), "nobody is gone"
        listener.listener.on_monitor()
    assert (listener.listener.connections, listener.gone) == (1, [])
    machine.close()


def test_a_connection_ends_when_its_machine_has_a_newer_one(
    listener: Listener, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """Requests on the older one can't be answered, and are sent again; the operating system is not waited for."""
    first = heard(listener, context)
    second = Machine(context, listener.listener.address, 0, SETTINGS)
    listener.welcome(second)
    assert listener.gone == listener.heard
    first.push(bytes(4))
    listener.read()
    assert len(listener.heard) == 1
    for machine in (first, second):
        machine.close()


def test_a_machine_of_a_group_that_is_over_does_not_replace_another(
    listener: Listener, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """Both are machine 1, each of its own group."""
    now = Machine(context, listener.listener.address, 1, SETTINGS, group=5)
    listener.welcome(now)
    before = Machine(context, listener.listener.address, 1, SETTINGS, group=3)
    listener.welcome(before)
    before.push(bytes(4))
    listener.read()
    assert (listener.heard, listener.gone) == ([], [])
    now.push(bytes(4))
    listener.read()
    assert listener.heard == [listener.listener.peer_of(1)]
    for machine in (now, before):
        machine.close()
