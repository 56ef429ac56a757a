"""A communication service that says what can't be: the rank gets a ProtocolError, and nothing stays open."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from byteps_py import rank_protocol as protocol
from byteps_py.channel import Channel
from byteps_py.errors import ProtocolError, StallError
from byteps_py.rank_protocol import RankMessageKind
from byteps_py.session.service.remote import RemoteSession
from byteps_py.shm import Segment
from byteps_py.tensors import DType, TensorSpec

_WELCOME = {
    "rank": 0, "size": 2, "local_rank": 0, "local_size": 2, "is_continued": False, "since_epoch": 1,
    "machine_index": 0, "num_machines": 1, "is_homogeneous": True, "has_shadow_servers": True,
}  # fmt: skip
_PLACE = {"id": 1, "inputs": [[0, 0]], "result": [0, 0], "nbytes": 16, "round": 0}


@pytest.fixture(name="service")
def far_end() -> Iterator[Channel]:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    service = Channel(theirs)
    service.rank = Channel(mine)  # type: ignore[attr-defined]
    yield service
    service.close()


def session_of(service: Channel, **welcome: object) -> RemoteSession:
    service.send(protocol.pack(RankMessageKind.WELCOME, **{**_WELCOME, **welcome}))
    return RemoteSession(service.rank, 0, 2, 5.0, 5.0)  # type: ignore[attr-defined]


def test_a_rank_that_waits_tells_how_far_it_is(service: Channel) -> None:
    """Once, and again when it has gone on."""
    session = session_of(service)
    session.tell_after_s = 0.01
    told = []
    for steps in (1, 2):
        session.steps_begun = {"all": (steps, 1)}
        with pytest.raises(StallError):
            session.wait_until(lambda: False, 0.1, lambda: "nothing")
        with pytest.raises(StallError):
            session.wait_until(lambda: False, 0.1, lambda: "nothing")
    while (received := service.receive(0)) is not None:
        message, descriptors = received
        if protocol.kind_of(message) is RankMessageKind.STEPS:
            told.append(protocol.fields_of(message))
        for descriptor in descriptors:
            os.close(descriptor)
    assert told == [{"begun": [["all", 1, 1]]}, {"begun": [["all", 2, 1]]}]
    session.close()


def test_a_welcome_without_a_rank(service: Channel) -> None:
    with pytest.raises(ProtocolError, match="WELCOME message with invalid fields"):
        session_of(service, rank="first")
    service.rank.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (protocol.pack(RankMessageKind.RELEASED), "sent an invalid RELEASED message: KeyError"),
        (protocol.pack(RankMessageKind.RELEASED, sequence="one"), "sent an invalid RELEASED message: ValueError"),
        (
            protocol.pack(RankMessageKind.DECLARED, request=9, slots=[]),
            "sent an invalid DECLARED message: KeyError",
        ),
        (
            protocol.pack(RankMessageKind.DECLARED, request=1, slots=[]),
            "sent an invalid DECLARED message: ValueError",
        ),
        (
            protocol.pack(RankMessageKind.DECLARED, request=1, slots=[{**_PLACE, "result": [0, 4090]}]),
            "16 bytes at 4090 of",
        ),
        (
            protocol.pack(RankMessageKind.DECLARED, request=1, slots=[{**_PLACE, "inputs": [[0, -16]]}]),
            "16 bytes at -16 of",
        ),
        (protocol.pack(RankMessageKind.SEGMENT, id=0, nbytes=4096), "segment 0 comes twice"),
        (protocol.pack(RankMessageKind.SEGMENT, id=1, nbytes=8192), "has 4096 bytes, its sender claims 8192"),
        (protocol.pack(RankMessageKind.SEGMENT, id=1, nbytes=-1), "sent an invalid SEGMENT message"),
        (b"\xff", "unknown kind of local message"),
    ],
)
def test_what_can_not_be(service: Channel, said: bytes, text: str) -> None:
    session, memory = session_of(service), Segment.create(4096)
    before = len(os.listdir("/proc/self/fd"))
    session._asked[1] = [TensorSpec("w", DType.FLOAT32, (4,))]
    service.send(protocol.pack(RankMessageKind.SEGMENT, id=0, nbytes=4096), (memory.fd,))
    service.send(said, (memory.fd,))
    with pytest.raises(ProtocolError, match=text):
        session.barrier()
    session.close()
    memory.close()
    assert len(os.listdir("/proc/self/fd")) < before
