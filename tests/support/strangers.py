"""Connections that are none: silent, half-open, nonsense. Each is a function of an address that gives what to keep."""

from __future__ import annotations

import os
import socket
from pathlib import Path

# What libzmq says first: signature, version 3.1, mechanism NULL; then READY as a DEALER.
ZMTP_GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01NULL" + bytes(16) + bytes(32)
ZMTP_READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # and empty SETTINGS

#: What each says before it falls silent.
SILENT = b""
NOISE = [os.urandom(n) for n in (1, 9, 100, 4096)]
HALF_OPEN = [
    SILENT,
    *NOISE,
    ZMTP_GREETING[:10],
    ZMTP_GREETING,
    ZMTP_GREETING + ZMTP_READY,
    ZMTP_GREETING + ZMTP_READY + b"\x02" + (1 << 40).to_bytes(8, "big"),  # a frame of a terabyte
    ZMTP_GREETING + ZMTP_READY + b"\x02" + (250_000).to_bytes(8, "big") + b"x",  # one within bounds, and a byte of it
    ZMTP_GREETING + ZMTP_READY + b"\x01\x03abc\x00\x03def",
    HTTP2_PREFACE,
    HTTP2_PREFACE + (1 << 24).to_bytes(4, "big")[1:] + bytes(6),
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
]


def tcp(address: str, says: bytes) -> socket.socket:
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    sock = socket.create_connection((host, int(port)), timeout=30)
    sock.sendall(says)
    return sock


def local(name: str, says: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(30)
    sock.connect("\0" + name)
    if says:
        sock.send(says)
    return sock


def read_to_end(sock: socket.socket) -> bytes:
    """What the other end says until it closes. Raises TimeoutError if it does not."""
    said = b""
    with sock:
        try:
            while more := sock.recv(1 << 16):
                said += more
        except ConnectionResetError:
            pass
    return said


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
