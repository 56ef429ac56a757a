"""A communication service that says what can't be: the rank gets a ProtocolError, and nothing stays open."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from byteps_py.errors import ProtocolError, StallError
from byteps_py.session.service.remote import RemoteSession
from byteps_py.system.channel import Channel
from byteps_py.system.shm import Segment
from byteps_py.tensors import DType, TensorSpec
from byteps_py.wire import rank_link as protocol

_WELCOME = protocol.Welcome(
    rank=0, size=2, local_rank=0, local_size=2, is_continued=False, is_under_way=False, since_epoch=1,
    machine_index=0, num_machines=1,
    is_homogeneous=True, has_shadow_servers=True, slowest_mbit=0.0, replicated_gain=0.0,
    shadowed_gain=0.0, memory_bytes=0,
)  # fmt: skip


@pytest.fixture(name="service")
def far_end() -> Iterator[Channel]:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    service = Channel(theirs)
    service.rank = Channel(mine)  # type: ignore[attr-defined]
    yield service
    service.close()


def session_of(service: Channel) -> RemoteSession:
    service.send(protocol.encode(_WELCOME))
    return RemoteSession(service.rank, 0, 2, 5.0, 5.0)  # type: ignore[attr-defined]


def test_a_rank_that_waits_tells_how_far_it_is(service: Channel) -> None:
    """Once, and again when it has gone on."""
    session = session_of(service)
    session.report_after_s = 0.01
    told = []
    for steps in (1, 2):
        session.steps_begun = {"all": (steps, 1)}
        with pytest.raises(StallError):
            session.wait_until(lambda: False, 0.1, lambda: "nothing")
        with pytest.raises(StallError):
            session.wait_until(lambda: False, 0.1, lambda: "nothing")
    while (received := service.receive(0)) is not None:
        data, descriptors = received
        message = protocol.decode(data)
        if isinstance(message, protocol.StepsBegun):
            told.append(message.counts)
        for descriptor in descriptors:
            os.close(descriptor)
    assert told == [(protocol.StepCount(1, 1, "all"),), (protocol.StepCount(2, 1, "all"),)]
    session.close()


def test_a_welcome_without_a_rank(service: Channel) -> None:
    service.send(protocol.encode(_WELCOME)[:-1])
    with pytest.raises(ProtocolError, match="malformed local message Welcome"):
        RemoteSession(service.rank, 0, 2, 5.0, 5.0)  # type: ignore[attr-defined]
    service.rank.close()  # type: ignore[attr-defined]


def slot_at(offset: int = 0, result: int = 0) -> protocol.SlotFields:
    return protocol.SlotFields(1, 16, 0, 0, result, ((0, offset),))


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (protocol.encode(protocol.BarrierReleased(1))[:-1], "malformed local message BarrierReleased"),
        (protocol.encode(protocol.BarrierReleased(1)) + b"1", "malformed local message BarrierReleased: 9 of 10 bytes"),
        (protocol.encode(protocol.Declared(9, ())), "sent an invalid Declared message: KeyError"),
        (protocol.encode(protocol.Declared(1, ())), "sent an invalid Declared message: ValueError"),
        (protocol.encode(protocol.Declared(1, (slot_at(result=4090),))), "16 bytes at 4090 of"),
        (protocol.encode(protocol.Declared(1, (slot_at((1 << 64) - 16),))), "16 bytes at 18446744073709551600 of"),
        (protocol.encode(protocol.GiveSegment(0, 4096)), "segment 0 comes twice"),
        (protocol.encode(protocol.GiveSegment(1, 8192)), "has 4096 bytes, its sender claims 8192"),
        (protocol.encode(protocol.GiveSegment(1, (1 << 64) - 1)), "its sender claims 18446744073709551615"),
        (protocol.encode(_WELCOME), "welcomes this rank twice"),
        (protocol.encode(protocol.Ping()), "sent a Ping message, which only ranks send"),
        (b"\xff", "unknown kind of local message"),
    ],
)
def test_what_can_not_be(service: Channel, said: bytes, text: str) -> None:
    session, memory = session_of(service), Segment.create(4096)
    before = len(os.listdir("/proc/self/fd"))
    session._asked[1] = [TensorSpec("w", DType.FLOAT32, (4,))]
    service.send(protocol.encode(protocol.GiveSegment(0, 4096)), (memory.fd,))
    service.send(said, (memory.fd,))
    with pytest.raises(ProtocolError, match=text):
        session.barrier()
    session.close()
    memory.close()
    assert len(os.listdir("/proc/self/fd")) < before
