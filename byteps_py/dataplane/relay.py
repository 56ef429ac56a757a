"""Carries connections between ranks of two machines through a third one, where the way between the two is slow.

rank ──who it is, the other rank's address, HELLO──► relay        stream_listener.py
     ◄══════════════ handshake ════════════════════►
     ◄─"+", or "-" and why not ───────────────────── relay ──connects──► the other rank
     ◄══════════════ handshake, and all that follows, between the two ranks ═══════════►

A relay moves bytes and reads none: the two ranks authenticate each other through it, and what they send is sealed for
each other (seal.py). Linux moves them from socket to socket without a copy (splice). Only members of the job may
call, and only hosts of the job's machines are called. If either end closes, or fails, so does the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable

from byteps_py.config.addresses import place_of
from byteps_py.config.settings import Settings
from byteps_py.dataplane.handshake import CallerHandshake, Challenge, ListenerHandshake
from byteps_py.dataplane.long_links import share_evenly
from byteps_py.dataplane.stream_listener import (
    ACCEPTED,
    Seals,
    StreamListener,
    accepted,
    end_when_silent,
    framed,
    receive,
    refusal,
    shake_hands,
)
from byteps_py.errors import ProtocolError
from byteps_py.system import machine
from byteps_py.system.log import logger

#: kind, the caller's rank, bytes of the address that follows
_CALL = struct.Struct("<8sII")
_MAGIC = b"bps-rly1"
_MOST_ADDRESS_BYTES = 300
#: For the connection to the other rank.
_CONNECT_S = 3.0
_PIPE_BYTES = 256 << 10


def _bound_to(relay: str, target: str) -> str:
    """A text that both proofs cover beside the secret: a proof for one relay and address is of no use at another."""
    return f"relay at {relay} to {target}"


def call_through(sock: socket.socket, settings: Settings, rank: int, relay: str, target: str, deadline: float) -> None:
    """Have the relay at the other end of ``sock``, whose address is ``relay``, connect it with ``target``: afterwards
    it is a connection to that. ``deadline``: by the steady clock. Raises OSError and ProtocolError."""
    whose = f"the relay at {relay}"
    handshake = CallerHandshake(settings, rank, _bound_to(relay, target))
    address = target.encode()
    shake_hands(sock, handshake, _CALL.pack(_MAGIC, rank, len(address)) + address + handshake.hello, whose)
    accepted(receive(sock, deadline), whose)


class _RelayHandshake:
    """The relay's end. ``may_call``: whether a host is one of the job's."""

    def __init__(self, listener: ListenerHandshake, address: str, may_call: Callable[[str], bool]) -> None:
        self._listener, self._address, self._may_call = listener, address, may_call
        self._challenge: Challenge | None = None
        self.rank = -1
        self.target = ""
        self.seals: Seals | None = None

    def process(self, message: bytes) -> bytes:
        """See CalledHandshake."""
        if self._challenge is not None:
            opening, sealing = self._challenge.accept_for_stream(message)
            if not self._may_call(self.target):
                raise ProtocolError(f"{self.target} is no address of this job's machines")
            self.seals = sealing, opening
            return ACCEPTED
        if len(message) < _CALL.size:
            raise ProtocolError("it is no rank of this job")
        magic, rank, nbytes = _CALL.unpack_from(message)
        if magic != _MAGIC or nbytes > min(_MOST_ADDRESS_BYTES, len(message) - _CALL.size):
            raise ProtocolError("it is no rank of this job that wants a relay")
        self.rank = rank
        hello = message[_CALL.size + nbytes :]
        try:
            self.target = message[_CALL.size : _CALL.size + nbytes].decode()
            place_of(self.target)
        except ValueError:
            raise ProtocolError("it names no address") from None
        text, self._challenge = self._listener.challenge(hello, rank, _bound_to(self._address, self.target))
        return ACCEPTED + text


class Relay:
    """Listens at ``host``. Raises OSError if it can't. ``allow`` names the hosts that it may call; none before. Any
    thread may call."""

    def __init__(self, host: str, settings: Settings) -> None:
        self._settings = settings
        self._hosts: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()  # both ends of each connection
        self._closed = False
        self._moved = 0
        handshake = ListenerHandshake(settings)
        self._listener = StreamListener(
            host,
            lambda address: _RelayHandshake(handshake, address, self._may_call),
            self._called,
            lambda rank, why: logger.debug("a relay of rank %d was refused: %s", rank, why),
        )

    @property
    def address(self) -> str:
        """``host:port``."""
        return self._listener.address

    @property
    def bytes_moved(self) -> int:
        """The bytes that it has carried so far, both ways."""
        return self._moved

    @property
    def connections(self) -> int:
        """The number of connections that it carries now."""
        return len(self._open) // 2

    def allow(self, hosts: frozenset[str]) -> None:
        """Only these may be called from now on."""
        self._hosts = hosts

    def _may_call(self, target: str) -> bool:
        return place_of(target)[0] in self._hosts

    def _called(self, handshake: _RelayHandshake, sock: socket.socket) -> None:
        threading.Thread(target=self._carry, args=(handshake, sock), name="byteps-relay", daemon=True).start()

    def _carry(self, handshake: _RelayHandshake, caller: socket.socket) -> None:
        """Connect with the target, and move bytes until both ends are done."""
        with caller:
            try:
                callee = socket.create_connection(place_of(handshake.target), _CONNECT_S)
            except OSError as error:
                with contextlib.suppress(OSError):
                    caller.send(framed(refusal(f"it can't reach {handshake.target}: {error}")))
                return
            with callee:
                ends = {caller, callee}
                with self._lock:
                    if self._closed:
                        return
                    self._open |= ends
                back = threading.Thread(target=self._move, args=(callee, caller), name="byteps-relay", daemon=True)
                try:
                    for each in ends:
                        each.setblocking(True)
                        end_when_silent(each, self._settings.patience_s)
                        share_evenly(each)  # bytes that wait here would have arrived sooner by the direct way
                    caller.sendall(framed(ACCEPTED))
                    logger.info("rank %d reaches %s through this machine", handshake.rank, handshake.target)
                    back.start()
                    self._move(caller, callee)
                    back.join()
                except OSError as error:
                    logger.debug("the relayed connection of rank %d ended: %s", handshake.rank, error)
                finally:
                    with self._lock:
                        self._open -= ends

    def _move(self, source: socket.socket, target: socket.socket) -> None:
        """Move bytes one way until there are no more. If that fails, the other way ends as well."""
        there, here = os.pipe()
        try:
            with contextlib.suppress(OSError):  # more than an unprivileged process may have: the usual size does
                fcntl.fcntl(here, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            while nbytes := os.splice(source.fileno(), here, _PIPE_BYTES):
                while nbytes:
                    moved = os.splice(there, target.fileno(), nbytes)
                    nbytes -= moved
                    with self._lock:
                        self._moved += moved
            target.shutdown(socket.SHUT_WR)
        except OSError:
            for each in (source, target):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        finally:
            os.close(there)
            os.close(here)

    def close(self) -> None:
        """End all connections, and stop listening. Returns at once."""
        with self._lock:
            self._closed = True
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def open_relay(settings: Settings) -> Relay | None:
    """The relay of a summation server; None where no two ranks of other machines connect, or if it can't listen."""
    if settings.num_workers < 2 or not (settings.direct_connections and settings.rebalance_links):
        return None
    host = machine.bindable_host(settings)
    try:
        return Relay(host, settings)
    except OSError as error:
        logger.warning("this machine relays nothing between two others: it can't listen at %s (%s)", host, error)
        return None
