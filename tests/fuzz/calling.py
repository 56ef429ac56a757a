"""What a listener says to who calls it: the handshake, and what follows once both know each other."""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable
from typing import Any, cast

import zmq

from byteps_py.config.settings import Settings
from byteps_py.dataplane.dialer import Dialer, DialTarget, Owner
from byteps_py.dataplane.handshake import Challenge, ListenerHandshake
from byteps_py.dataplane.seal import Seal
from byteps_py.errors import ProtocolError
from byteps_py.wire.data_link import HEADER_BYTES, Header, Kind

from .base import Target
from .targets import HEADERS

_ADDRESS = "tcp://a:1"
_SECRET = "known to members"
_SETTINGS = (
    Settings(job_id="fuzz"),
    Settings(job_id="fuzz", secret=_SECRET),
    Settings(job_id="fuzz", secret=_SECRET, encrypt=True),
)
_RAW, _CHALLENGED, _PROVEN, _SEALED, _SEALED_WRONGLY, _BROKEN = range(6)
_ANSWER = Header(Kind.ANSWER, 0, 1, key=7, index=1, round=1, length=64).pack()
_SAID = (
    _ANSWER,
    Header(Kind.DAMAGED, 0, round=3).pack(),
    Header(Kind.CHALLENGE, 0).pack(),
    Header(Kind.WELCOME, 0).pack(),
    Header(Kind.REFUSED, 0).pack() + b"ProtocolError\nit is not one of ours",
)


class _Socket:
    """Both a DEALER and its monitor: what the other end says is put into ``coming``, a list of frames each."""

    def __init__(self) -> None:
        self.coming: collections.deque[list[bytes]] = collections.deque()
        self.sent: list[list[bytes]] = []
        self.is_closed = False
        self._frames: list[zmq.Frame] = []

    def recv(self, flags: int = 0, copy: bool = True) -> zmq.Frame:
        assert not self.is_closed
        if not self._frames:
            if not self.coming:
                raise zmq.Again
            self._frames = [zmq.Frame(data) for data in self.coming.popleft()]
            for frame in self._frames[:-1]:
                cast(Any, frame).more = True
        return self._frames.pop(0)

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        return self.coming.popleft()

    def poll(self, timeout: int) -> bool:
        return bool(self.coming) and not self.is_closed

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        assert flags & zmq.NOBLOCK, "it might wait for ever"
        assert not self.is_closed
        self.sent.append(frames)

    def get_monitor_socket(self, events: int) -> _Socket:
        return _Socket()

    def setsockopt(self, option: int, value: int | bytes) -> None: ...
    def connect(self, address: str) -> None: ...
    def disable_monitor(self) -> None: ...

    def close(self, linger: int = 0) -> None:
        self.is_closed = True


class _Surroundings:
    """The loop and the context of one Dialer."""

    def __init__(self) -> None:
        self.sockets: list[_Socket] = []
        self.readers: dict[_Socket, Callable[[], None]] = {}
        self.later: list[Callable[[], None]] = []

    def socket(self, kind: int) -> _Socket:
        self.sockets.append(_Socket())
        return self.sockets[-1]

    def add_reader(self, source: _Socket, callback: Callable[[], None]) -> None:
        self.readers[source] = callback

    def remove(self, source: _Socket) -> None:
        del self.readers[source]

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.later.append(callback)


class _Listener:
    """The far end of one connection, which knows the secret."""

    def __init__(self, settings: Settings) -> None:
        self._keeper = ListenerHandshake(settings)
        self.challenge: Challenge | None = None
        self.seal: Seal | None = None
        self.is_spoilt = False  # something else has been said, so that who calls will hear no more of it

    def say_challenge(self, socket: _Socket, flaw: bytes) -> None:
        text, self.challenge = self._keeper.challenge(socket.sent[0][1], 0, _ADDRESS)
        self.is_spoilt = bool(flaw)
        socket.coming.append([Header(Kind.CHALLENGE, 0).pack(), text + flaw])

    def say_welcome(self, socket: _Socket, flaw: bytes) -> None:
        assert self.challenge is not None
        _, self.seal = self.challenge.accept(socket.sent[1][1])
        self.is_spoilt = bool(flaw)
        sealed, payload = self.seal.seal(Header(Kind.WELCOME, 0).pack(), b"")
        socket.coming.append([sealed + flaw, bytes(payload)])


class DialerHears(Target, Owner):
    """Only who knows the secret is believed, and only what it has said is heard. Whatever else comes, the connection
    ends and is made anew, and one that is open ends by ProtocolError alone."""

    cost = 4
    seeds = (
        *[bytes((_RAW,)) + said + payload for said in _SAID for payload in (b"", bytes(96))],
        *[bytes((_RAW,)) + header for header in HEADERS[:3]],
        *[bytes((step,)) for step in (_CHALLENGED, _PROVEN)] * 12,
        *[bytes((step,)) + b"!" for step in (_CHALLENGED, _PROVEN)],
        *[bytes((step,)) + said + bytes(64) for step in (_SEALED, _SEALED_WRONGLY) for said in _SAID],
        *[bytes((_SEALED,)) + _ANSWER + bytes(size) for size in (1, 64, 17 << 10)],
        bytes((_BROKEN,)),
    )

    def __init__(self) -> None:
        self._turn = self._refused = self._opened = self._heard_of_damage = 0
        self._due: tuple[bytes, bytes] | None = None  # what was said, and is to be heard
        self._begin()

    def _begin(self) -> None:
        self._settings = _SETTINGS[self._turn % len(_SETTINGS)]
        self._around = _Surroundings()
        around: Any = self._around
        self._is_open = False
        self._dialer = Dialer(around, around, DialTarget(_ADDRESS, "the listener"), 0, self._settings, self)
        self._far = _Listener(self._settings)

    # ---- the owner -------------------------------------------------------------------------------------

    def on_open(self) -> None:
        assert not self._far.is_spoilt
        assert self._far.seal is not None
        assert self._dialer.is_open
        self._is_open = True
        self._opened += 1

    def on_message(self, header: Header, payload: zmq.Frame) -> None:
        assert self._is_open
        assert self._due == (header.pack(), payload.bytes), "something was heard that nobody has said"
        self._due = None

    def on_broken(self) -> None:
        assert self._is_open
        self._is_open = False

    def on_damaged(self, number: int | None) -> None:
        self._heard_of_damage += 1
        if number is not None:
            assert self._due is not None
            assert Header.unpack(self._due[0]).round == number

    def on_refused(self, error: ProtocolError) -> None:
        assert not self._is_open
        assert len(str(error).encode()) < 64 << 10
        self._refused += 1

    # ---- the listener ----------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        self._turn += 1
        if self._turn % 5 == 0:
            self._shake_hands()
        socket = self._around.sockets[-1]
        was_open, self._due = self._is_open, None
        step, said = data[0] % 6 if data else _RAW, data[1:]
        heard = self._opened, self._heard_of_damage
        self._say(socket, step, said)
        try:
            for reader in list(self._around.readers.values()):
                reader()
        except ProtocolError:  # ends the job, so only who has proven itself may cause it
            assert was_open
            self._begin()
            return
        assert not (was_open and step == _SEALED_WRONGLY) or self._heard_of_damage > heard[1] or not self._is_open
        self._check(socket)
        if self._turn % 997 == 0:
            self._dialer.close()
            assert not self._around.readers
            self._begin()

    def _shake_hands(self) -> None:
        socket, far = self._around.sockets[-1], self._far
        for step in (_CHALLENGED, _PROVEN):
            if not (far.seal if step == _PROVEN else far.challenge):
                self._say(socket, step, b"")
                self._around.readers[socket]()
        assert self._is_open

    def _say(self, socket: _Socket, step: int, said: bytes) -> None:
        far = self._far
        if step == _CHALLENGED and far.challenge is None:
            far.say_challenge(socket, said)
        elif step == _PROVEN and far.challenge is not None and far.seal is None:
            far.say_welcome(socket, said)
        elif step in (_SEALED, _SEALED_WRONGLY) and far.seal is not None:
            header, payload = said[:HEADER_BYTES], said[HEADER_BYTES:]
            sealed, shown = far.seal.seal(header, payload)
            if step == _SEALED:
                self._due = header, payload
                socket.coming.append([sealed, bytes(shown)])
            else:
                at = len(said) % len(sealed)
                socket.coming.append([sealed[:at] + bytes((sealed[at] ^ 1,)) + sealed[at + 1 :], bytes(shown)])
        elif step == _BROKEN:
            monitor = next(each for each in self._around.readers if each is not socket)
            monitor.coming.append([struct.pack("=HI", zmq.EVENT_DISCONNECTED, 0), _ADDRESS.encode()])
        else:
            far.is_spoilt = far.is_spoilt or not self._is_open
            frames = [said[:HEADER_BYTES], said[HEADER_BYTES:], b"one too many"]
            socket.coming.append(frames[: 2 + (len(said) % 7 == 6) - (len(said) % 11 == 10)])

    def _check(self, socket: _Socket) -> None:
        """There is one connection, or one to come."""
        around = self._around
        assert self._is_open == self._dialer.is_open
        assert not socket.coming or socket.is_closed
        assert len(socket.sent) <= 2, "something was said besides the handshake"
        if socket.is_closed:
            assert not around.readers
            (connect,) = around.later
            around.later.clear()
            around.sockets.clear()
            connect()
            self._far = _Listener(self._settings)
        assert len(around.readers) == 2
        assert not around.later

    def end(self) -> None:
        assert self._refused
        assert self._opened
        assert self._heard_of_damage
