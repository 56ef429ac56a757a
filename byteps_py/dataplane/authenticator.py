"""Authentication during ZeroMQ's own handshake: a caller that does not know the cluster secret is refused there.

libzmq lets a peer choose its routing id, and aborts the process when a chosen id equals the next one of its own
counter. It reads ids only after its handshake, so unknown callers must be stopped in the handshake: with the PLAIN
mechanism, whose name and password the listener's Authenticator checks over ZAP (ZeroMQ RFC 27).

    caller ──HELLO  name: a fresh nonce; password: HMAC of the nonce, the job and the listener's address──► listener
           ◄─WELCOME, or ERROR 400, and the connection ends ──────────────────────────────────────────────

A password is accepted once, so an overheard one is useless. The handshake that follows (handshake.py) proves both ends
to each other, and gives the keys that seal all messages. Without a secret this keeps out other jobs, but no attacker.

Owned by the loop's thread.
"""

from __future__ import annotations

import ctypes
import functools
import hmac
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence

import zmq

from byteps_py.config.settings import Settings
from byteps_py.security import auth
from byteps_py.system.loop import EventLoop

_ENDPOINT = "inproc://zeromq.zap.01"  # where libzmq asks, by its specification
_NONCE_BYTES = 16
#: How many nonces are remembered. Only members can make valid ones, a few for each connection that breaks.
_MOST_USED = 1 << 16
_BATCH = 64
_OK, _REFUSED = (b"200", b"OK"), (b"400", b"not a member of this job")


def _password(settings: Settings, address: str, nonce: bytes) -> bytes:
    return auth.token(settings, "data plane admission", address, nonce.decode()).encode()


def show_password(socket: zmq.Socket[bytes], settings: Settings, address: str) -> None:
    """Set the password that ``socket`` shows when it connects to the listener at ``address``. Call it before that."""
    nonce = os.urandom(_NONCE_BYTES).hex().encode()
    socket.setsockopt(zmq.PLAIN_USERNAME, nonce)
    socket.setsockopt(zmq.PLAIN_PASSWORD, _password(settings, address, nonce) or b"-")


@functools.cache
def seed_routing_ids() -> None:
    """Let libzmq's counters of routing ids start at random numbers, for sockets that are made later. They start at a
    value of C's ``rand()``, which is the same in every process otherwise."""
    ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4)))


class Authenticator:
    """Decides which callers may connect to the sockets of ``context`` that ``guard`` prepared. ``addresses()``: the
    listener's; ``on_refused(ip)``: a caller was refused."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: Settings,
        addresses: Callable[[], Sequence[str]],
        on_refused: Callable[[str], None],
    ) -> None:
        self._addresses = addresses
        self._settings = settings
        self._on_refused = on_refused
        self._used: OrderedDict[bytes, None] = OrderedDict()  # nonces, the oldest first
        self.socket = context.socket(zmq.ROUTER)  # libzmq's own threads are its only peers
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Let this authenticator check the callers of ``socket``. Call it before the socket binds."""
        socket.setsockopt(zmq.PLAIN_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, b"byteps")

    def attach(self, loop: EventLoop) -> None:
        """Let ``loop`` answer questions about callers."""
        loop.add_reader(self.socket, self.on_readable)

    def on_readable(self) -> None:
        """Answer libzmq's questions about callers."""
        for _ in range(_BATCH):
            try:
                *envelope, empty, version, number, _, ip, _, mechanism, name, password = self.socket.recv_multipart(
                    zmq.NOBLOCK
                )
            except zmq.Again:
                return
            is_member = mechanism == b"PLAIN" and self._is_valid(name, password)
            code, text = _OK if is_member else _REFUSED
            self.socket.send_multipart([*envelope, empty, version, number, code, text, b"", b""], zmq.NOBLOCK)
            if not is_member:
                self._on_refused(ip.decode(errors="replace"))

    def _is_valid(self, nonce: bytes, password: bytes) -> bool:
        """True for a password that ``show_password`` made, the first time."""
        if len(nonce) != 2 * _NONCE_BYTES or not nonce.isalnum() or nonce in self._used:
            return False
        dues = [_password(self._settings, address, nonce) or b"-" for address in self._addresses()]
        if not any(hmac.compare_digest(password, due) for due in dues):
            return False
        self._used[nonce] = None
        if len(self._used) > _MOST_USED:
            self._used.popitem(last=False)
        return True

    def close(self) -> None:
        self.socket.close()
