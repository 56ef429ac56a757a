"""The calling end of a connection: it sends nothing before it is welcome, and refuses a listener that breaks the
handshake."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
import zmq
from support.data_plane import WAIT_S, BareListener, header_for
from support.summation import SETTINGS

from byteps_py.dataplane.dialer import Dialer, DialTarget, Owner
from byteps_py.dataplane.handshake import Challenge, ListenerHandshake
from byteps_py.dataplane.listener import DataListener, Peer
from byteps_py.dataplane.seal import Data
from byteps_py.dataplane.traffic import Traffic
from byteps_py.errors import ProtocolError
from byteps_py.runtime import Runtime
from byteps_py.security.unauthenticated_connections import MOST_BYTES
from byteps_py.system.loop import EventLoop
from byteps_py.wire.data_link import HEADER_BYTES, Header, Kind
from byteps_py.worker.io.server_links import LinkEvents, LinkOrigin, LinkTarget, TcpLink

PUSHED = bytes(3 * MOST_BYTES)


class CallerHandshake(Owner):
    """A Dialer whose owner pushes at once when its connection is open."""

    def __init__(self, address: str) -> None:
        self.loop, self.context = EventLoop(), zmq.Context()
        self.times_open = 0
        self.refused: list[str] = []
        self.dialer = Dialer(self.context, self.loop, DialTarget(address, "the listener"), 0, SETTINGS, self)

    def on_open(self) -> None:
        self.times_open += 1
        self.dialer.send(header_for(0, PUSHED), PUSHED)

    def on_refused(self, error: ProtocolError) -> None:
        self.refused.append(str(error))
        self.loop.stop()

    def run(self) -> None:
        self.loop.call_later(WAIT_S, self.loop.stop)
        self.loop.run()

    def close(self) -> None:
        self.dialer.close()
        self.loop.close()
        self.context.term()


Call = Callable[[str], CallerHandshake]


@pytest.fixture(name="call")
def calling() -> Iterator[Call]:
    callers: list[CallerHandshake] = []

    def call(address: str) -> CallerHandshake:
        callers.append(CallerHandshake(address))
        return callers[-1]

    yield call
    for caller in callers:
        caller.close()


class Hasty(zmq.Socket[bytes]):
    """One whose connection has ended by the time ``connect`` returns, as it may where a thread waits for its core."""

    ended = 0

    def get_monitor_socket(self, *arguments: int) -> zmq.Socket[bytes]:  # type: ignore[override]
        self.__dict__["kept"] = super().get_monitor_socket(*arguments)
        return self.__dict__["kept"]  # type: ignore[no-any-return]

    def connect(self, address: str) -> None:  # type: ignore[override]
        super().connect(address)
        if "kept" not in self.__dict__:
            return  # it is a monitor's
        assert self.__dict__["kept"].poll(WAIT_S * 1000), "the connection has not ended"
        deadline_s = time.monotonic() + WAIT_S
        while self.getsockopt(zmq.EVENTS) & zmq.POLLOUT:
            assert time.monotonic() < deadline_s, "there is still a way to send"
        Hasty.ended += 1


def test_a_connection_that_ends_before_it_is_used_is_made_again(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    door = socket.create_server(("127.0.0.1", 0))

    def slam() -> None:
        with contextlib.suppress(OSError):  # at the end
            while True:
                door.accept()[0].close()

    slammer = threading.Thread(target=slam)
    slammer.start()
    monkeypatch.setattr(zmq.Context, "_socket_class", Hasty)
    monkeypatch.setattr(Hasty, "ended", 0)
    caller = call(f"tcp://127.0.0.1:{door.getsockname()[1]}")

    def look() -> None:
        if Hasty.ended >= 3:
            caller.loop.stop()
        caller.loop.call_later(0.01, look)

    look()
    caller.run()
    door.shutdown(socket.SHUT_RDWR)
    slammer.join(WAIT_S)
    door.close()
    assert (Hasty.ended, caller.times_open, caller.refused) == (3, 0, [])


class Script:
    """Listens, and authenticates itself to callers. The test decides how it answers a proof."""

    def __init__(self, listener: BareListener, call: Call) -> None:
        self.router = listener.router
        self.address = listener.address
        self.keeper = ListenerHandshake(SETTINGS)
        self.challenge: Challenge
        self.pushed: list[bytes] = []
        self.caller = call(self.address)
        self.caller.loop.add_reader(self.router, self.heard)
        listener.attach(self.caller.loop)

    def heard(self) -> None:
        whom, packed, said = self.router.recv_multipart()
        if len(packed) != HEADER_BYTES:
            self.pushed.append(said)
            self.caller.loop.stop()
        elif Header.unpack(packed).kind is Kind.HELLO:
            text, self.challenge = self.keeper.challenge(said, 0, self.address)
            self.router.send_multipart([whom, Header(Kind.CHALLENGE, 0).pack(), text])
        else:
            self.router.send_multipart([whom, *self.to_proof(said)])

    def to_proof(self, proof: bytes) -> Sequence[Data]:
        raise NotImplementedError


class Welcoming(Script):
    others = b""  # further addresses

    def to_proof(self, proof: bytes) -> Sequence[Data]:
        dialer = self.caller.dialer
        assert not dialer.is_open
        with pytest.raises(ProtocolError, match="a message for the listener before its connection was open"):
            dialer.send(header_for(0, b""), b"")
        _, sealing = self.challenge.accept(proof)
        return sealing.seal(Header(Kind.WELCOME, 0).pack(), self.others)


class Saying(Script):
    says: Sequence[bytes]

    def to_proof(self, proof: bytes) -> Sequence[Data]:
        return self.says


@pytest.fixture(name="listener")
def scripted_listener() -> Iterator[BareListener]:
    with zmq.Context() as context, BareListener(context, SETTINGS) as listener:
        yield listener


def test_it_is_open_when_it_is_welcome_and_not_before(listener: BareListener, call: Call) -> None:
    script = Welcoming(listener, call)
    script.caller.run()
    assert (script.caller.times_open, script.pushed) == (1, [PUSHED])


@pytest.mark.parametrize(
    ("others", "text"),
    [
        (b"tcp://127.0.0.2", "something else than addresses"),
        (b"tcp://127.0.0.2:9\n", "something else than addresses"),
        (b"tcp://fd00::1:9", "something else than addresses"),
        (b"\xff\xfe", "something else than addresses"),
        (b"\n".join(b"tcp://127.0.0.2:%d" % port for port in range(1, 9)), "8 further addresses; 7 are allowed"),
    ],
)
def test_a_listener_that_names_no_addresses_is_refused(
    listener: BareListener, call: Call, others: bytes, text: str
) -> None:
    script = Welcoming(listener, call)
    script.others = others
    script.caller.run()
    assert (script.caller.times_open, script.caller.refused) == (0, [f"the listener sent a WELCOME with {text}"])


class Ended:
    """A connection that ends after so many parts of a message, as ZeroMQ tells of it."""

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def send(self, data: bytes, flags: int, copy: bool = True) -> None:
        if not self.parts:
            raise zmq.Again
        self.parts -= 1


@pytest.mark.parametrize("parts", [0, 1])
def test_a_connection_may_end_in_the_middle_of_a_message(
    listener: BareListener, call: Call, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """It happens once in thousands of kills. The sender hears that the connection broke."""
    script = Welcoming(listener, call)
    script.caller.run()
    dialer = script.caller.dialer
    monkeypatch.setattr(dialer, "_socket", Ended(parts))
    numbers = [dialer.send(header_for(0, PUSHED), PUSHED) for _ in range(2)]
    assert numbers[1] == numbers[0] + 1
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("says", "text"),
    [
        ([Header(Kind.REFUSED, 0).pack(), b"ProtocolError\nnot you"], "the listener turned this process away: not you"),
        ([Header(Kind.ANSWER, 0).pack(), b""], "the listener sent ANSWER instead of a WELCOME"),
        ([Header(Kind.WELCOME, 0).pack(), b""], "the listener sent a WELCOME that is not sealed"),
        ([b"welcome"], "the listener sent 1 frames instead of a WELCOME"),
        (
            [bytes(200), b""],
            "the listener sent a message that is not a WELCOME: message 0 of its connection came damaged",
        ),
    ],
)
def test_a_listener_that_answers_a_proof_otherwise_is_refused(
    listener: BareListener, call: Call, says: list[bytes], text: str
) -> None:
    """A few attempts, then an error: once may be chance."""
    script = Saying(listener, call)
    script.says = says
    script.caller.run()
    assert (script.caller.times_open, script.caller.refused) == (0, [text])


class BusyListener:
    """Looks at its unauthenticated peers whenever a message has arrived, before it reads it."""

    def __init__(self, call: Call) -> None:
        self.listener = DataListener(
            "127.0.0.1", SETTINGS, Traffic(), frozenset((Kind.PUSH,)), self.heard, lambda peer: None
        )
        self.bytes_heard: list[int] = []
        self.at_each_look: list[int] = []
        self.caller = call(self.listener.address)
        self.listener.attach(self.caller.loop)
        self.caller.loop.change_reader(self.listener.socket, self.read)

    def read(self) -> None:
        self.listener.on_monitor()
        strangers = self.listener._strangers
        self.at_each_look.append(len(strangers))
        strangers.sweep()
        self.listener.on_readable()

    def heard(self, header: Header, peer: Peer, payload: zmq.Frame) -> None:
        self.bytes_heard.append(len(payload))
        self.caller.loop.stop()


def test_a_busy_listener_cuts_off_no_authenticated_peer(call: Call) -> None:
    """A caller with large messages does not send them before its proof has been read."""
    busy = BusyListener(call)
    busy.caller.run()
    cut_off = busy.listener._strangers.cut_off
    busy.listener.close()
    assert (busy.bytes_heard, busy.caller.times_open, cut_off) == ([len(PUSHED)], 1, 0)
    assert busy.at_each_look == [1, 1, 0]  # at its HELLO and its proof it is a stranger


@pytest.mark.parametrize(("mbit", "keeps_warm"), [(0.0, True), (1000.0, True), (2.0, False)])
def test_connections_over_slow_links_are_not_kept_warm(mbit: float, keeps_warm: bool) -> None:
    found: list[Dialer] = []

    def dialer(*arguments: Any) -> Dialer:
        found.append(Dialer(*arguments))
        return found[-1]

    with zmq.Context() as context, socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        loop, nothing = EventLoop(), cast(Any, None)
        target, runtime = LinkTarget(address, link_mbit=mbit), Runtime(loop=loop, dialer=cast(Any, dialer))
        link = TcpLink(
            LinkOrigin(context, runtime, 0, SETTINGS, nothing), target, LinkEvents(nothing, nothing, nothing)
        )
        assert found[0]._socket is not None
        assert (found[0]._socket.getsockopt(zmq.HEARTBEAT_IVL) > 0) == keeps_warm
        link.close()
        loop.close()
