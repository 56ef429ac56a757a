"""Machines for which other machines wait are told so: of which rounds, when, and once."""

from __future__ import annotations

import pytest
from support.data_plane import Server
from support.summation import SETTINGS
from test_server_rounds import given, started

from byteps_py.errors import ProtocolError
from byteps_py.server.round_state import AwaitedRounds
from byteps_py.tensors import Op
from byteps_py.wire.data_link import MAX_NAMES, Header, Kind, RoundName, pack_names, unpack_names

SOON, LATER = AwaitedRounds().after_s / 2, AwaitedRounds().after_s


def name(key: int = 7, index: int = 0, round_: int = 1) -> RoundName:
    return key, 1, index, round_


def test_machines_that_have_not_contributed_are_told_once() -> None:
    rounds = started(3)
    rounds.contribution(given(1), 0.0)
    rounds.contribution(given(2, key=8), SOON)
    assert rounds.awaited.due(SOON, 3) == {}
    assert rounds.awaited
    rounds.contribution(given(0), SOON)
    assert rounds.awaited.due(LATER, 3) == {2: [name()]}
    assert rounds.awaited.due(SOON + LATER, 3) == {0: [name(8)], 1: [name(8)]}
    assert not rounds.awaited
    assert rounds.awaited.due(9.0, 3) == {}


def test_complete_withdrawn_and_void_rounds_wait_for_no_machine() -> None:
    rounds = started(2)
    rounds.contribution(given(0), 0.0)
    rounds.contribution(given(1), 0.0)
    rounds.contribution(given(0, key=8), 0.0)
    rounds.withdraw(given(0, key=8, epoch=2).header)
    rounds.contribution(given(0, key=9), 0.0)
    rounds.contribution(given(0, key=9, generation=2), 0.0)
    assert rounds.awaited.due(LATER, 2) == {1: [(9, 2, 0, 1)]}
    rounds.contribution(given(0, key=10), 0.0)
    rounds.membership(2, 2, 0.0, since_epoch=2)  # other machines
    assert not rounds.awaited


def test_of_many_rounds_the_oldest_are_told_first_a_limited_number_at_a_time() -> None:
    rounds = started(2)
    for index in range(MAX_NAMES + 3):
        rounds.contribution(given(0, index=index), 0.0)
    assert rounds.awaited.due(LATER, 2) == {1: [name(index=index) for index in range(MAX_NAMES)]}
    assert rounds.awaited
    assert rounds.awaited.due(LATER, 2) == {1: [name(index=index) for index in range(MAX_NAMES, MAX_NAMES + 3)]}


def test_a_pull_of_a_broadcast_waits_for_its_root() -> None:
    rounds = started(3)
    rounds.contribution(given(2, kind=Kind.PULL, op=Op.BROADCAST, root=0), 0.0)
    assert rounds.awaited.due(LATER, 3) == {0: [name()], 1: [name()]}


@pytest.mark.usefixtures("zeromq_collector")
def test_a_running_server_tells_those_beyond_a_socket_and_those_beside_it() -> None:
    with Server(SETTINGS, num_machines=3) as server:
        beyond, beside, giver = server.machine(0), server.local_machine(1), server.machine(2)
        beyond.push(bytes(64), machines=1)
        beside.send(bytes(64), machines=1)
        for machine in (beyond, beside):
            assert machine.receive()[0].kind is Kind.REFUSED  # so it is known there
        for index in range(2):
            giver.push(bytes(64), index=index, round=4)
        for machine in (beyond, beside):
            names: list[RoundName] = []
            while len(names) < 2:
                header, payload = machine.receive_any()
                assert (header.kind, header.sender, header.epoch) == (Kind.AWAITED, machine.index, 1)
                names += unpack_names(payload)
            assert names == [name(index=0, round_=4), name(index=1, round_=4)]


@pytest.mark.parametrize("data", [b"", bytes(23), bytes(25), bytes(24 * (MAX_NAMES + 1))])
def test_bytes_that_are_not_a_list_of_names_are_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"{len(data)} bytes are not the names of 1 to 64 rounds"):
        unpack_names(data)


def test_names_are_unpacked_as_they_were_packed() -> None:
    names = [(2**64 - 1, 2**32 - 1, 2**32 - 1, 2**64 - 1), (0, 1, 2, 3)]
    assert unpack_names(pack_names(names)) == names
    assert Header.unpack(Header(Kind.AWAITED, 3).pack()).kind is Kind.AWAITED
