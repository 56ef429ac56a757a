"""A rank leaves once others have taken what it gave them, which its communication service knows; played by the test."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from byteps_py import rank_protocol as protocol
from byteps_py.channel import Channel, Listener, connect
from byteps_py.rank_protocol import RankMessageKind
from byteps_py.session.service.remote import RemoteSession

WAIT_S = 60.0
WELCOME = {
    "rank": 0, "size": 2, "local_rank": 0, "local_size": 1, "is_continued": False, "since_epoch": 1, "machine_index": 0,
    "num_machines": 2, "is_homogeneous": True, "has_shadow_servers": True,
}  # fmt: skip


class Beside:
    """The rank's session, and the service's end of its channel."""

    def __init__(self, session: RemoteSession, channel: Channel) -> None:
        self.session, self.channel = session, channel
        session._has_given = True

    def hear(self) -> RankMessageKind:
        """The next message but those that say nothing here."""
        while True:
            message = self.channel.receive(WAIT_S)
            assert message is not None, "the rank says nothing"
            for descriptor in message[1]:
                os.close(descriptor)
            if (kind := protocol.kind_of(message[0])) not in (RankMessageKind.STACK, RankMessageKind.PING):
                return kind

    def say(self, kind: RankMessageKind, **fields: object) -> None:
        self.channel.send(protocol.pack(kind, **fields))


@pytest.fixture(name="pool")
def thread_pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture(name="beside")
def service_beside(pool: ThreadPoolExecutor) -> Iterator[Beside]:
    name = f"test-{uuid.uuid4()}"
    listener = Listener(name)
    made: Future[RemoteSession] = pool.submit(lambda: RemoteSession(connect(name, WAIT_S), 0, 1, WAIT_S, WAIT_S))
    channel = listener.accept()
    assert protocol.kind_of(channel.receive(WAIT_S)[0]) is RankMessageKind.HELLO  # type: ignore[index]
    channel.send(protocol.pack(RankMessageKind.WELCOME, **WELCOME))
    beside = Beside(made.result(WAIT_S), channel)
    yield beside
    channel.close()
    beside.session.close()
    listener.close()


def test_it_waits_for_others_to_take_what_it_gave(beside: Beside, pool: ThreadPoolExecutor) -> None:
    leaving = pool.submit(beside.session.close)
    assert beside.hear() is RankMessageKind.SETTLE
    assert beside.channel.receive(0) is None
    assert not leaving.done()
    beside.say(RankMessageKind.SETTLED)
    assert beside.hear() is RankMessageKind.LEAVE
    leaving.result(WAIT_S)


def test_who_waits_for_long_says_so(beside: Beside, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture) -> None:
    said = Said()
    logging.getLogger("byteps_py").addHandler(said)
    try:
        beside.session.unsettled_s = 0.01
        leaving = pool.submit(beside.session.close)
        assert said.happened.wait(WAIT_S)
        beside.say(RankMessageKind.SETTLED)
        leaving.result(WAIT_S)
    finally:
        logging.getLogger("byteps_py").removeHandler(said)
    assert "rank 0 stays until others have taken what it has given them" in caplog.text


class Said(logging.Handler):
    """``happened``: a warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.happened = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.happened.set()


def test_it_waits_for_nobody_when_the_job_fails(beside: Beside, pool: ThreadPoolExecutor) -> None:
    leaving = pool.submit(beside.session.close)
    assert beside.hear() is RankMessageKind.SETTLE
    beside.say(RankMessageKind.FATAL, error="PeerLostError", message="lost worker 1")
    assert beside.hear() is RankMessageKind.LEAVE
    leaving.result(WAIT_S)


def test_it_waits_for_nobody_while_an_error_ends_it(beside: Beside) -> None:
    """Others may wait for what it will not do any more."""

    def train() -> None:
        try:
            raise ValueError("the program's")
        finally:
            beside.session.close()

    with pytest.raises(ValueError, match="the program's"):
        train()
    assert beside.hear() is RankMessageKind.LEAVE


def test_who_gave_nothing_waits_for_nobody(beside: Beside) -> None:
    beside.session._has_given = False
    beside.session.close()
    assert beside.hear() is RankMessageKind.LEAVE
