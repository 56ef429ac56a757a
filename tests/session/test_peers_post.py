"""The sockets between the ranks of one machine."""

from __future__ import annotations

import contextlib
import os
import select
import socket

import pytest

from byteps_py.errors import CommunicationError
from byteps_py.session.peers.peer_sockets import Inbox, PeerOutbox
from byteps_py.system.shm import Segment


def test_an_inbox_that_is_not_read_holds_up_nobody() -> None:
    inbox = Inbox()
    outbox = PeerOutbox(os.dup(inbox.write_fd))
    words = [f"{i:05}".encode() * 2000 for i in range(300)]  # far more than a socket takes
    segment = Segment.create(4096)
    for word in words:
        outbox.send(word)
    outbox.send(b"last", segment.fd)
    segment.close()
    got = []
    readable = select.poll()
    readable.register(inbox.fileno(), select.POLLIN)
    while not got or got[-1] != b"last":
        assert readable.poll(30_000)
        nbytes, fd = inbox.receive()
        got.append(bytes(inbox.buffer[:nbytes]))
    assert got == [*words, b"last"]
    Segment(fd, 4096).close()
    assert inbox.receive() == (0, -1)
    outbox.close()
    inbox.close()


def test_what_a_socket_does_not_take_is_an_error_that_says_what_to_do() -> None:
    inbox = Inbox()
    inbox._write_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    outbox = PeerOutbox(os.dup(inbox.write_fd))
    with contextlib.closing(inbox), contextlib.closing(outbox):
        with pytest.raises(CommunicationError, match=r"takes \d+ bytes: let net.core.wmem_max be"):
            outbox.send(bytes(100_000))
        outbox.send(b"small")
        assert inbox.receive() == (5, -1)


def test_nobody_minds_an_inbox_that_is_gone() -> None:
    inbox = Inbox()
    outbox = PeerOutbox(os.dup(inbox.write_fd))
    inbox.close()
    outbox.send(b"too late")
    outbox.close()
