"""Where the processes of a job listen, and what outsiders do there. Knows nothing of the package under test."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from support.processes import family

_LISTENS = "0A"
_LIMIT_S = 30.0
_PATIENCE_S = 1.0  # with what does not speak ZeroMQ


def listening_ports(pid: int) -> dict[int, set[int]]:
    """TCP ports of 127.0.0.1 at which the process ``pid`` and its descendants listen, and whose each is."""
    inodes: dict[str, int] = {}
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS:
                inodes[f"socket:[{fields[9]}]"] = int(fields[1].rpartition(":")[2], 16)
    found: dict[int, set[int]] = {}
    for member in (pid, *family(pid)):
        for entry in Path(f"/proc/{member}/fd").iterdir():
            try:
                file = os.readlink(entry)
            except FileNotFoundError:
                continue  # closed meanwhile
            if file in inodes:
                found.setdefault(inodes[file], set()).add(member)
    return found


def first_routing_id() -> int:
    """Where libzmq's counter of routing ids starts in a process that has drawn no number before: it is not seeded."""
    libc = ctypes.CDLL(None)
    libc.srand(1)
    low, high = libc.rand(), libc.rand()
    return (high << 31 | low) & 0xFFFFFFFF


def claim(port: int, ids: Iterable[int], mechanism: bytes = b"NULL") -> list[socket.socket]:
    """Connect with these routing ids, of the kind that a ROUTER gives out itself, and then as often with none. As a
    DEALER of ZMTP 3.1; for PLAIN with a password that is guessed. Whoever is refused stays as long as it may."""
    names = [b"\0" + struct.pack(">I", number & 0xFFFFFFFF) for number in ids]
    facts = [
        _property(b"Socket-Type", b"DEALER") + _property(b"Identity", name) for name in (*names, *[b""] * len(names))
    ]
    visitors = [socket.create_connection(("127.0.0.1", port), timeout=_LIMIT_S) for _ in facts]
    until_s = time.monotonic() + _PATIENCE_S
    for visitor in visitors:
        _say(visitor, b"\xff" + bytes(7) + b"\1\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32))
    for visitor, fact in zip(visitors, facts, strict=True):
        if _hears(visitor, 64, until_s):
            hello = _command(b"\x05HELLO\x20" + b"0" * 32 + b"\x07guessed")
            _say(visitor, hello if mechanism == b"PLAIN" else _command(b"\x05READY" + fact))
    for visitor, fact in zip(visitors, facts, strict=True):
        if _hears(visitor, 8, until_s):
            _say(visitor, (_command(b"\x08INITIATE" + fact) if mechanism == b"PLAIN" else b"") + b"\0\4here")
    return visitors


def _say(visitor: socket.socket, said: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # the other end has hung up
        visitor.sendall(said)


def _hears(visitor: socket.socket, nbytes: int, until_s: float) -> bool:
    """So many bytes, unless the other end hangs up, or says nothing."""
    visitor.settimeout(max(0.001, until_s - time.monotonic()))
    with contextlib.suppress(ConnectionError, TimeoutError):
        return len(visitor.recv(nbytes, socket.MSG_WAITALL)) == nbytes
    return False


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


def _command(body: bytes) -> bytes:
    return bytes((4, len(body))) + body


@contextlib.contextmanager
def answering(port: int, says: bytes) -> Iterator[None]:
    """Whoever connects hears this, and is hung up on."""
    with socket.create_server(("127.0.0.1", port)) as door:

        def serve() -> None:
            with contextlib.suppress(OSError):  # at the end
                while True:
                    with contextlib.suppress(ConnectionError), door.accept()[0] as visitor:
                        visitor.recv(1)
                        visitor.sendall(says)

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            yield
        finally:
            door.shutdown(socket.SHUT_RDWR)
            serving.join(_LIMIT_S)
