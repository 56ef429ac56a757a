"""A network that changes what passes through it: found, said again once, then an error that names the way."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import numpy as np
import pytest
import zmq
from support.damage import Flipper
from support.data_plane import WAIT_S, BareListener, Server, exact_sum, header_for, random_values
from support.proxy import Proxy

from byteps_py.config.settings import Settings
from byteps_py.dataplane.listener import _MOST_DAMAGED
from byteps_py.errors import BytePSError, IntegrityError, ProtocolError
from byteps_py.runtime import Runtime
from byteps_py.system.loop import EventLoop
from byteps_py.system.shm import Block
from byteps_py.tensors import DType
from byteps_py.wire.data_link import RESENT, SUPPLY, Header, Kind
from byteps_py.worker.io.server_links import LinkEvents, LinkOrigin, LinkTarget, TcpLink

OPEN = Settings(
    scheduler_host="127.0.0.1",
    scheduler_port=9999,  # nobody is there: the server's scheduler is the test
    node_host="127.0.0.1",
    job_id="test",
    num_workers=2,
    heartbeat_timeout_s=50.0,
)
SIGNED = dataclasses.replace(OPEN, secret="known to members")
ENCRYPTED = dataclasses.replace(SIGNED, encrypt=True)
COUNT = 50_000


pytestmark = pytest.mark.usefixtures("zeromq_collector")


class Line:
    """Machine 0's link to a server, through a proxy. Machine 1 is the far end's, said by hand, on a good line."""

    def __init__(self, settings: Settings, mine: Settings | None = None) -> None:
        self.server = Server(settings, num_machines=0, tells_awaited=False)
        target = urlsplit(self.server.service.address)
        self.proxy = Proxy((str(target.hostname), int(target.port or 0)))
        self.server.service._network.address = self.proxy.address  # under which it is known
        self.server.set_members(2)
        self.other = self.server.machine(1)
        self.came: queue.Queue[tuple[Header, bytes] | BytePSError] = queue.Queue()
        self.losses: queue.Queue[str] = queue.Queue()
        self.loop = EventLoop()
        self._data = bytearray()
        self._context = zmq.Context()
        self.link: TcpLink
        self._mine = mine or settings
        self._thread = threading.Thread(target=self._run, name="the worker's loop")
        self._thread.start()

    def _run(self) -> None:
        self.link = TcpLink(
            LinkOrigin(
                self._context, Runtime(loop=self.loop), 0, self._mine,
                lambda block, offset, length: memoryview(self._data)[offset : offset + length],
            ),
            LinkTarget(self.proxy.address),
            LinkEvents(
                lambda header, frame: self.came.put((header, frame.bytes if frame is not None else b"")),
                self._again,
                self.losses.put,
            ),
        )  # fmt: skip
        try:
            self.loop.run()
        except BytePSError as error:
            self.came.put(error)

    def push(self, values: np.ndarray, round_: int) -> None:
        self._data, self._round = bytearray(values.tobytes()), round_
        self.loop.post(lambda: self._push(0))

    def _push(self, flags: int) -> None:
        header = header_for(0, self._data, round=self._round, flags=flags)
        self.link.push(header, Block(0, 0, len(self._data), 0), 0, None)

    def _again(self) -> None:
        """As the executor does, if there is no answer."""
        if self.came.empty():
            self._push(RESENT)

    def answer(self) -> tuple[Header, bytes] | BytePSError:
        return self.came.get(timeout=WAIT_S)

    def check_round(self, round_: int) -> None:
        """One round of both machines: its sum is exact."""
        both = [random_values(DType.FLOAT32, COUNT, seed=2 * round_ + machine) for machine in range(2)]
        self.push(both[0], round_)
        self.other.push(both[1].tobytes(), round=round_)
        expected = exact_sum(DType.FLOAT32, both).tobytes()
        came = self.answer()
        assert isinstance(came, tuple), came
        assert (came[0].kind, came[0].round, came[1] == expected) == (Kind.ANSWER, round_, True), came[1][:200]
        assert self.other.result() == expected

    def close(self) -> None:
        self.loop.stop()
        self._thread.join(WAIT_S)
        self.link.close()
        self._context.term()
        self.server.__exit__(None, None, None)
        self.proxy.close()
        self.loop.close()


@pytest.fixture
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    line = Line(*request.param)
    try:
        yield line
    finally:
        line.close()


@pytest.mark.parametrize("line", [(OPEN,), (SIGNED,), (ENCRYPTED,)], ids=["open", "signed", "encrypted"], indirect=True)
def test_a_damaged_contribution_is_not_added_but_sent_again(line: Line) -> None:
    line.check_round(1)
    flipper = line.proxy.alter = Flipper(to_listener=True, times=1)
    line.check_round(2)
    assert flipper.flipped == 1
    line.check_round(3)
    assert line.server.link.statistics().bytes_in_flight == 0


@pytest.mark.parametrize("line", [(OPEN,)], indirect=True)
def test_a_damaged_header_is_found_wherever_it_is_damaged(line: Line) -> None:
    line.check_round(1)
    for round_, place in enumerate((0, 4, 5, 6, 7, 8, 12, 18, 30, 34, 40, 50, 83), 2):
        flipper = line.proxy.alter = Flipper(to_listener=True, times=1, word=b"BPS1", after=place)
        line.check_round(round_)
        assert flipper.flipped == 1


@pytest.mark.parametrize("line", [(OPEN,), (SIGNED,)], ids=["open", "signed"], indirect=True)
def test_contributions_that_are_always_damaged_are_an_error_that_names_the_way(line: Line) -> None:
    line.check_round(1)
    line.proxy.alter = Flipper(to_listener=True, times=1000)
    line.push(random_values(DType.FLOAT32, COUNT, seed=1), 2)
    error = line.answer()
    assert isinstance(error, IntegrityError)
    assert f"a PUSH message to the summation service at {line.proxy.address} came damaged twice" in str(error)


@pytest.mark.parametrize("line", [(OPEN,)], indirect=True)
def test_after_many_that_came_damaged_in_a_row_there_is_a_new_connection(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was said again on the old one may be lost with it; all is said once more on the next."""
    line.check_round(1)
    flipper = line.proxy.alter = Flipper(to_listener=True, times=_MOST_DAMAGED, word=b"BPS1", after=40)
    both = [random_values(DType.FLOAT32, COUNT, seed=seed) for seed in (1, 2)]
    due = set(range(_MOST_DAMAGED))
    line._data = bytearray(both[0].tobytes())

    def push(flags: int) -> None:
        for index in sorted(due):
            header = header_for(0, line._data, round=2, index=index, flags=flags)
            line.link.push(header, Block(0, 0, len(line._data), 0), 0, None)

    monkeypatch.setattr(line.link, "_on_reconnected", lambda: push(RESENT))
    line.loop.post(lambda: push(0))
    for index in range(_MOST_DAMAGED):
        line.other.push(both[1].tobytes(), round=2, index=index)
    expected = exact_sum(DType.FLOAT32, both).tobytes()
    while due:
        came = line.answer()
        assert isinstance(came, tuple), came
        assert (came[0].kind, came[1] == expected) == (Kind.ANSWER, True), came[1][:200]
        due.discard(came[0].index)
    assert flipper.flipped == _MOST_DAMAGED
    assert line.losses.empty()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            (SIGNED, dataclasses.replace(SIGNED, secret="guessed by others")),
            "turned this process away: its proof of membership is wrong: do job and secret agree?",
        ),
        ((SIGNED, OPEN), "turned this process away: its proof of membership is wrong: do job and secret agree?"),
        ((ENCRYPTED, SIGNED), "its messages would be signed, here they are encrypted"),
    ],
    ids=["secret", "open", "encrypt"],
    indirect=["line"],
)
def test_ends_that_do_not_match_say_so(line: Line, text: str) -> None:
    error = line.answer()
    assert isinstance(error, ProtocolError)
    assert text in str(error)
    assert line.proxy.address in str(error)


@pytest.mark.parametrize("line", [(OPEN,), (SIGNED,), (ENCRYPTED,)], ids=["open", "signed", "encrypted"], indirect=True)
def test_a_damaged_answer_is_not_delivered_but_asked_for_again(line: Line) -> None:
    line.check_round(1)
    flipper = line.proxy.alter = Flipper(to_listener=False, times=1)
    both = [random_values(DType.FLOAT32, COUNT, seed=seed) for seed in (1, 2)]
    line.push(both[0], 2)
    line.other.push(both[1].tobytes(), round=2)
    expected = exact_sum(DType.FLOAT32, both).tobytes()
    assert line.other.result() == expected
    assert line.other.receive()[0].kind is Kind.WANT  # the server keeps no result: it takes the sum again
    line.other.push(both[1].tobytes(), round=2, flags=RESENT | SUPPLY)
    came = line.answer()
    assert isinstance(came, tuple), came
    assert (came[0].kind, came[0].round, came[1] == expected) == (Kind.ANSWER, 2, True)
    assert flipper.flipped == 1
    line.check_round(3)


@pytest.mark.parametrize("line", [(OPEN,), (SIGNED,)], ids=["open", "signed"], indirect=True)
def test_answers_that_are_always_damaged_are_an_error_that_names_the_way(line: Line) -> None:
    line.check_round(1)
    line.proxy.alter = Flipper(to_listener=False, times=1000)
    both = [random_values(DType.FLOAT32, COUNT, seed=seed) for seed in (1, 2)]
    line.push(both[0], 2)
    line.other.push(both[1].tobytes(), round=2)
    line.other.result()
    assert line.other.receive()[0].kind is Kind.WANT
    line.other.push(both[1].tobytes(), round=2, flags=RESENT | SUPPLY)
    error = line.answer()
    assert isinstance(error, IntegrityError), error
    assert f"an answer from the summation service at {line.proxy.address} came damaged twice" in str(error)


@pytest.mark.parametrize(
    ("says", "text"),
    [
        ([b"hello"], "sent 1 frames instead of a CHALLENGE"),
        ([b"hello", b"x"], "sent a message that is not a CHALLENGE: a header has"),
        ([Header(Kind.ANSWER, 0).pack(), b""], "sent ANSWER instead of a CHALLENGE"),
        ([Header(Kind.CHALLENGE, 0).pack(), bytes(96)], "could not prove that it belongs to this cluster: its proof"),
        ([Header(Kind.CHALLENGE, 0).pack(), b"short"], "a CHALLENGE has 96 bytes, got 5"),
    ],
)
def test_something_else_listens_there(says: list[bytes], text: str) -> None:
    """A few attempts, then an error: once may be chance."""
    loop, losses = EventLoop(), []
    with zmq.Context() as context, BareListener(context, SIGNED) as listener:
        listener.attach(loop)
        stranger, address = listener.router, listener.address
        loop.add_reader(stranger, lambda: stranger.send_multipart([stranger.recv_multipart()[0], *says]))
        link = TcpLink(
            LinkOrigin(context, Runtime(loop=loop), 0, SIGNED, lambda *block: memoryview(b"")), LinkTarget(address),
            LinkEvents(lambda *answer: None, lambda: None, losses.append),
        )  # fmt: skip
        with pytest.raises(ProtocolError, match="the summation service at") as caught:
            loop.run()
        link.close()
    loop.close()
    assert text in str(caught.value)
    assert losses == []
