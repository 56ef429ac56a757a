"""Connections that are none of ours: silent, half-open, nonsense. What each says, and how long it lasts.

Knows protocols, but nothing of the package under test.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

LIMIT_S = 30.0


def zmtp_frame(body: bytes, more: bool = False) -> bytes:
    """A short frame of a message. ``more``: not its last."""
    return bytes((more, len(body))) + body


def _zmtp_command(body: bytes) -> bytes:
    return bytes((4, len(body))) + body


def zmtp_beginning(nbytes: int) -> bytes:
    """Of a frame of so many bytes: all that says how long it is."""
    return b"\x02" + nbytes.to_bytes(8, "big")


# What libzmq says first: signature, version 3.1, mechanism PLAIN; then a name and a password.
ZMTP_GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01PLAIN" + bytes(15) + bytes(32)
ZMTP_GUESS = _zmtp_command(b"\x05HELLO\x20" + b"0" * 32 + b"\x07guessed")
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # and empty SETTINGS


class Step(NamedTuple):
    """``hears``: goes on once it has heard this."""

    says: bytes
    hears: bytes = b""


#: How far nobody is refused where a protocol is spoken. What is heard last only follows if all that was said was found
#: right: a greeting is answered by one, and SETTINGS by theirs.
ZMTP = (Step(ZMTP_GREETING, b"\x03\x01PLAIN" + bytes(15) + bytes(32)),)
HTTP2 = (Step(HTTP2_PREFACE, bytes(3) + b"\x04\x01" + bytes(4)),)
Greeting = tuple[Step, ...]


class Stranger(NamedTuple):
    """Says this, and falls silent. ``after``: only once it was let in, where that protocol is spoken. ``hears``: the
    answer that it gets there."""

    name: str
    says: bytes
    after: Greeting = ()
    hears: bytes = b""


def _http2_headers(nbytes: int, said: int) -> bytes:
    """The beginning of a frame, and so much of it."""
    return nbytes.to_bytes(3, "big") + b"\x01" + bytes(4) + b"\x01" + bytes(said)


def _http2_call(method: str) -> bytes:
    """All of the HEADERS of a call, nothing of its request."""
    fields = {":method": "POST", ":scheme": "http", ":path": f"/byteps.Scheduler/{method}", ":authority": "x"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    block = b"".join(
        b"\x00" + b"".join(bytes((len(text),)) + text.encode() for text in field) for field in fields.items()
    )
    return len(block).to_bytes(3, "big") + b"\x01\x04" + b"\0\0\0\x01" + block


def _tls_greeting() -> bytes:
    """All of it, as gRPC's clients begin; the scheduler answers with its certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="x").do_handshake()
    return outgoing.read()


SILENT = Stranger("silent", b"")
HALF_OPEN = (
    SILENT,
    *(Stranger(f"{n} bytes of noise", os.urandom(n)) for n in (1, 9, 100, 4096)),
    Stranger("ZeroMQ: a part of the greeting", ZMTP_GREETING[:10]),
    Stranger("ZeroMQ: the greeting", ZMTP_GREETING),
    Stranger("ZeroMQ: let in", b"", ZMTP),
    Stranger("ZeroMQ: a terabyte begins", zmtp_beginning(1 << 40), ZMTP),
    Stranger("ZeroMQ: a byte of a long frame", zmtp_beginning(250_000) + b"x", ZMTP),
    Stranger("ZeroMQ: a message of nonsense", zmtp_frame(b"abc", more=True) + zmtp_frame(b"def"), ZMTP),
    Stranger("HTTP/2: let in", b"", HTTP2),
    Stranger("HTTP/2: a byte of HEADERS", _http2_headers(1 << 14, 1), HTTP2),
    Stranger("HTTP/2: all but a byte of HEADERS", _http2_headers(1 << 14, (1 << 14) - 1), HTTP2),
    Stranger("HTTP/2: 16 MB of HEADERS begin", _http2_headers((1 << 24) - 1, 0), HTTP2),
    *(Stranger(f"gRPC: {method} without a request", _http2_call(method), HTTP2) for method in ("Status", "Attend")),
    Stranger(
        "gRPC: a byte of a request", _http2_call("Status") + b"\0\0\x01" + bytes(2) + b"\0\0\0\x01" + b"\0", HTTP2
    ),
    Stranger("HTTP/1", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    Stranger("the beginning of TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    Stranger("TLS: the greeting", _tls_greeting()),
)


class Visit:
    """A stranger's connection, until the other end has closed it. Times are monotonic; ``ended_s``: None before."""

    def __init__(self, stranger: Stranger, where: str, steps: Sequence[Step], began_s: float, sock: socket.socket):
        self.stranger, self.where, self.sock = stranger, where, sock
        self.heard = b""
        self.ended_s: float | None = None
        self._began_s = began_s
        self._steps = deque(steps)
        self._awaited = b""
        self._go_on()

    def __repr__(self) -> str:
        return f"<{self.stranger.name}, at {self.where} for {self.lasted_s:.1f} s; it heard {self.heard[-100:]!r}>"

    @property
    def is_through(self) -> bool:
        """It has said all it wants to, and was answered."""
        return not self._steps and self._awaited in self.heard

    @property
    def lasted_s(self) -> float:
        return float("inf") if self.ended_s is None else self.ended_s - self._began_s

    def read(self) -> None:
        """What is there, and answer."""
        try:
            more = self.sock.recv(1 << 16)
        except ConnectionError:
            more = b""
        self.heard += more
        if more:
            self._go_on()
        else:
            self.ended_s = time.monotonic()

    def _go_on(self) -> None:
        while self._steps and self._awaited in self.heard:
            says, self._awaited = self._steps.popleft()
            if says:
                with contextlib.suppress(ConnectionError):  # it has been sent away: that is read, too
                    self.sock.sendall(says)

    def close(self) -> None:
        self.sock.close()


def begin_visit(address: str, stranger: Stranger, spoken: Greeting = ()) -> Visit:
    """Have ``stranger`` call at ``address``, where ``spoken`` is understood. Then it has to ``read``."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    began_s = time.monotonic()
    if stranger.after == spoken:
        steps = (*spoken, Step(stranger.says, stranger.hears))
    else:
        steps = (Step(b"".join(step.says for step in stranger.after) + stranger.says),)
    return Visit(stranger, address, steps, began_s, socket.create_connection((host, int(port)), timeout=LIMIT_S))


def visit(address: str, stranger: Stranger, spoken: Greeting = ()) -> Visit:
    """The same, to where it falls silent. Fails if it is sent away although all it said until then was right."""
    it = begin_visit(address, stranger, spoken)
    try:
        while not it.is_through:
            it.read()
            assert it.ended_s is None, f"{stranger.name}: {address} hung up on it after {it.heard!r}"
    except BaseException:
        it.close()
        raise
    return it


def visit_locally(name: str, stranger: Stranger) -> Visit:
    began_s = time.monotonic()
    return Visit(stranger, name, (), began_s, local(name, stranger.says))


def local(name: str, says: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(LIMIT_S)
    sock.connect("\0" + name)
    if says:
        sock.send(says)
    return sock


def see_off(visits: Iterable[Visit]) -> None:
    """Hear all to their end, or for ``LIMIT_S``."""
    deadline_s = time.monotonic() + LIMIT_S
    with selectors.DefaultSelector() as selector:
        for it in visits:
            selector.register(it.sock, selectors.EVENT_READ, it)
        while selector.get_map() and (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                key.data.read()
                if key.data.ended_s is not None:
                    selector.unregister(key.fileobj)


def unread_bytes(address: str) -> int:
    """What lies before the process that listens at this port of the machine: said, and not taken yet."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    texts = [Path("/proc/net", name).read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for text in texts for line in text.splitlines()]
    # Number, own address, the other's, state, unsent:unread, …
    return sum(int(row[4].partition(":")[2], 16) for row in rows if row[1].endswith(port))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
