"""A rank leaves once others have taken what it gave them, which its communication service knows; played by the test."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from byteps_py.config.settings import Settings
from byteps_py.errors import MismatchError, NonFiniteError
from byteps_py.session.service.remote import RemoteSession
from byteps_py.system.channel import Channel, Listener, connect
from byteps_py.torch.collectives.context import Context
from byteps_py.wire import rank_link as protocol

WAIT_S = 60.0
WELCOME = protocol.Welcome(
    rank=0, size=2, local_rank=0, local_size=1, is_continued=False, is_under_way=False, since_epoch=1,
    machine_index=0, num_machines=2,
    is_homogeneous=True, has_shadow_servers=True, slowest_mbit=0.0, replicated_gain=0.0,
    shadowed_gain=0.0, memory_bytes=0,
)  # fmt: skip


class Beside:
    """The rank's session, and the service's end of its channel."""

    def __init__(self, session: RemoteSession, channel: Channel) -> None:
        self.session, self.channel = session, channel
        session._has_given = True

    def hear(self) -> type:
        """The class of the next message but those that say nothing here."""
        return type(self._receive())

    def hear_leave(self) -> protocol.Leave:
        """What the rank says as it leaves."""
        message = self._receive()
        assert isinstance(message, protocol.Leave)
        return message

    def _receive(self) -> object:
        while True:
            received = self.channel.receive(WAIT_S)
            assert received is not None, "the rank says nothing"
            for descriptor in received[1]:
                os.close(descriptor)
            message = protocol.decode(received[0])
            if not isinstance(message, protocol.GiveStackFile | protocol.GiveFlightRecorder | protocol.Ping):
                return message

    def say(self, message: object) -> None:
        self.channel.send(protocol.encode(message))


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
    assert protocol.decode_hello(channel.receive(WAIT_S)[0]) is not None  # type: ignore[index]
    channel.send(protocol.encode(WELCOME))
    beside = Beside(made.result(WAIT_S), channel)
    yield beside
    channel.close()
    beside.session.close()
    listener.close()


def test_it_waits_for_others_to_take_what_it_gave(beside: Beside, pool: ThreadPoolExecutor) -> None:
    leaving = pool.submit(beside.session.close)
    assert beside.hear() is protocol.Drain
    assert beside.channel.receive(0) is None
    assert not leaving.done()
    beside.say(protocol.Drained())
    assert beside.hear() is protocol.Leave
    leaving.result(WAIT_S)


def test_who_waits_for_long_says_so(beside: Beside, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture) -> None:
    said = Said()
    logging.getLogger("byteps_py").addHandler(said)
    try:
        beside.session.drain_notice_s = 0.01
        leaving = pool.submit(beside.session.close)
        assert said.happened.wait(WAIT_S)
        beside.say(protocol.Drained())
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
    assert beside.hear() is protocol.Drain
    beside.say(protocol.Fatal("PeerLostError", "lost worker 1"))
    assert beside.hear() is protocol.Leave
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
    assert beside.hear() is protocol.Leave


def test_who_gave_nothing_waits_for_nobody(beside: Beside) -> None:
    beside.session._has_given = False
    beside.session.close()
    assert beside.hear() is protocol.Leave


def leave_with(beside: Beside, error: BaseException | None) -> protocol.Leave:
    """What the service hears of a rank whose program calls shutdown() while it raises ``error``."""
    beside.session._has_given = False
    context = Context(lambda settings: beside.session)
    context.open(Settings())

    def train() -> None:
        try:
            if error is not None:
                raise error
        finally:
            context.close()

    if error is None:
        train()
    else:
        with pytest.raises(type(error)):
            train()
    return beside.hear_leave()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, protocol.Leave()),
        (ValueError("the data is bad"), protocol.Leave(error="ValueError: the data is bad")),
        (KeyboardInterrupt(), protocol.Leave(error="KeyboardInterrupt")),
        (SystemExit(3), protocol.Leave(error="SystemExit: 3")),
        (SystemExit("no data"), protocol.Leave(error="SystemExit: no data")),
        (SystemExit(0), protocol.Leave(unfinished=True)),
        (SystemExit(), protocol.Leave(unfinished=True)),
        (NonFiniteError("all ranks say so"), protocol.Leave(unfinished=True)),
        (MismatchError("all ranks have it"), protocol.Leave(unfinished=True)),
    ],
    ids=repr,
)
def test_shutdown_under_an_exception_is_a_failure_and_no_end_of_training(
    beside: Beside, error: BaseException | None, said: protocol.Leave
) -> None:
    leave = leave_with(beside, error)
    assert dataclasses.replace(leave, traceback="") == said
    assert ("in train" in leave.traceback) is bool(said.error)


def test_an_exception_that_was_handled_when_the_job_began_is_not_the_job_s(beside: Beside) -> None:
    try:
        raise ImportError("an optional module")
    except ImportError:
        assert leave_with(beside, None) == protocol.Leave()


def test_who_suspends_has_not_finished(beside: Beside) -> None:
    beside.session._has_given = False
    context = Context(lambda settings: beside.session)
    context.open(Settings())
    context.suspend()
    assert beside.hear_leave() == protocol.Leave(unfinished=True)
