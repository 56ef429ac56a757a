"""Makes the connections between this rank and ranks of other machines: it listens, connects, and has both ends prove
that they belong to the job (byteps_py/dataplane/handshake.py).

Of two ranks the one with the greater number connects. A connection serves all groups of both. Any thread may call.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from byteps_py import machine
from byteps_py.dataplane.handshake import CallerHandshake, ListenerHandshake
from byteps_py.dataplane.stream_seal import StreamSeal
from byteps_py.errors import BytePSError, ConfigurationError, PeerLostError, ProtocolError, RendezvousError
from byteps_py.log import logger
from byteps_py.settings import Settings

_HELLO = struct.Struct("<8sIII")  # what this is, the caller's rank, the listener's, the epoch of their group of ranks
_MAGIC = b"bps-rank"
_LENGTH = struct.Struct("<I")
_MOST_BYTES = 4096  # of a message of the handshake
_PATIENCE_S = 5.0  # for each message of a handshake
_RETRY_S = 0.05
#: Connections that have not authenticated. Beyond that the oldest is cut off, unless all are younger than _GRACE_S.
_MOST_UNAUTHENTICATED = 64
_GRACE_S = 0.5
_ACCEPTED, _REFUSED = b"+", b"-"
_SWITCH_OFF = (
    "or set BYTEPS_DIRECT_CONNECTIONS=0 on all ranks, which sends everything through the communication service"
)

#: The seals of a new connection, for sending and for receiving; None: without protection.
Seals = tuple[StreamSeal | None, StreamSeal | None]
#: Called with a new connection: the rank at its other end, its socket and seals.
OnConnected = Callable[[int, socket.socket, Seals], None]


class PeerConnector:
    """``epoch``: that of this group of ranks: ranks of an earlier one are turned away."""

    def __init__(self, settings: Settings, rank: int, epoch: int, on_connected: OnConnected) -> None:
        self._settings = settings
        self._rank = rank
        self._epoch = epoch
        self._on_connected = on_connected
        self._changed = threading.Condition()
        self._calling = threading.Lock()
        self._connected: set[int] = set()
        self._refusals: dict[int, str] = {}  # by rank: why its latest attempt has failed
        self._listener: socket.socket | None = None
        self._handshake: ListenerHandshake | None = None
        self._unauthenticated: dict[socket.socket, float] = {}  # with the times of their beginnings, the oldest first
        self._address = ""
        self._is_closed = False

    def address(self) -> str:
        """Where this rank listens: ``host:port``. It begins to listen with the first call. Raises ConfigurationError if
        it can't."""
        with self._changed:
            if self._listener is None:
                host = machine.bindable_host(self._settings)
                try:
                    family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
                    self._listener = socket.create_server(place[:2], family=family, backlog=1024)
                except OSError as error:
                    raise ConfigurationError(
                        f"rank {self._rank} can't listen for other ranks at {host} ({error}): set DMLC_NODE_HOST or "
                        f"DMLC_INTERFACE to an address of this machine, {_SWITCH_OFF}"
                    ) from error
                port = self._listener.getsockname()[1]
                self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                self._handshake = ListenerHandshake(self._settings)
                threading.Thread(target=self._accept, name="byteps-accept", daemon=True).start()
            return self._address

    def connect(self, addresses: Mapping[int, str], timeout_s: float) -> None:
        """Return when there is a connection to each rank of ``addresses``. Raises RendezvousError that says which one
        can't be made, and why."""
        deadline = time.monotonic() + timeout_s
        if not self._calling.acquire(timeout=timeout_s):  # two connections between two ranks would not agree
            raise RendezvousError(f"rank {self._rank} is still connecting to other ranks after {timeout_s:g} s")
        try:
            missing = self._call_all(addresses, deadline)
        finally:
            self._calling.release()
        with self._changed:
            while absent := [rank for rank in missing if rank not in self._connected]:
                if self._is_closed:
                    raise PeerLostError("the session was closed while ranks connected to each other")
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise RendezvousError(self._no_call(absent))

    def _call_all(self, addresses: Mapping[int, str], deadline: float) -> list[int]:
        """Connect to those that this rank has to call. Returns those to which it was not connected before."""
        with self._changed:
            missing = {rank: address for rank, address in addresses.items() if rank not in self._connected}
        callees = {rank: address for rank, address in missing.items() if rank < self._rank}
        if len(callees) == 1:
            self._call(*next(iter(callees.items())), deadline)
        elif callees:
            with ThreadPoolExecutor(min(8, len(callees)), "byteps-connect") as pool:
                for attempt in [pool.submit(self._call, *callee, deadline) for callee in callees.items()]:
                    attempt.result()
        return list(missing)

    def _no_call(self, absent: list[int]) -> str:
        reasons = {rank: self._refusals[rank] for rank in absent if rank in self._refusals}
        why = f" ({'; '.join(f'rank {rank}: {why}' for rank, why in reasons.items())})" if reasons else ""
        ranks = ", ".join(map(str, absent))
        return (
            f"rank{'s' * (len(absent) > 1)} {ranks} did not connect to rank {self._rank} at {self._address}{why}: let "
            f"them reach that address, {_SWITCH_OFF}"
        )

    # ---- calling ---------------------------------------------------------------------------------------

    def _call(self, rank: int, address: str, deadline: float) -> None:
        while True:
            try:
                sock = socket.create_connection(
                    _place(address), max(0.01, min(_PATIENCE_S, deadline - time.monotonic()))
                )
            except OSError as error:
                why = str(error)
            else:
                try:
                    seals = self._shake_hands(rank, address, sock)
                except (OSError, ProtocolError) as error:
                    sock.close()
                    why = str(error)
                else:
                    self._add(rank, sock, seals)
                    return
            if time.monotonic() > deadline - _RETRY_S or self._is_closed:
                raise RendezvousError(
                    f"rank {self._rank} can't connect to rank {rank} at {address} ({why}): let ranks of different "
                    f"machines reach each other, {_SWITCH_OFF}"
                )
            time.sleep(_RETRY_S)

    def _shake_hands(self, rank: int, address: str, sock: socket.socket) -> Seals:
        sock.settimeout(_PATIENCE_S)
        caller = CallerHandshake(self._settings, self._rank, _bound_to(rank, address), self._epoch)
        _send(sock, _HELLO.pack(_MAGIC, self._rank, rank, self._epoch) + caller.hello)
        proof, sealing, opening = caller.answer_for_stream(_answer(sock, rank))
        _send(sock, proof)
        _answer(sock, rank)
        return sealing, opening

    def _add(self, rank: int, sock: socket.socket, seals: Seals) -> None:
        with self._changed:
            if self._is_closed or rank in self._connected:
                sock.close()
                return
            self._on_connected(rank, sock, seals)
            self._connected.add(rank)
            self._refusals.pop(rank, None)
            self._changed.notify_all()

    # ---- being called ----------------------------------------------------------------------------------

    def _accept(self) -> None:
        listener = self._listener
        while listener is not None:
            try:
                sock, _ = listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_RETRY_S)  # no descriptors left, for example
                continue
            if not self._may_authenticate(sock):
                sock.close()  # a member tries again
                continue
            threading.Thread(target=self._serve, args=(sock,), name="byteps-handshake", daemon=True).start()

    def _may_authenticate(self, sock: socket.socket) -> bool:
        """False: there are too many others."""
        now = time.monotonic()
        with self._changed:
            if len(self._unauthenticated) >= _MOST_UNAUTHENTICATED:
                oldest, since_s = next(iter(self._unauthenticated.items()))
                if now - since_s < _GRACE_S:
                    return False
                del self._unauthenticated[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._unauthenticated[sock] = now
            return True

    def _serve(self, sock: socket.socket) -> None:
        rank = -1
        try:
            sock.settimeout(_PATIENCE_S)
            hello = _receive(sock)
            if len(hello) < _HELLO.size:
                raise ProtocolError("it is no rank of this job")
            magic, rank, callee, epoch = _HELLO.unpack_from(hello)
            if magic != _MAGIC or callee != self._rank or rank <= self._rank:
                raise ProtocolError("it is no rank of this job that connects to this one")
            if epoch != self._epoch:
                raise ProtocolError(f"it belongs to the group of ranks of epoch {epoch}, this one to {self._epoch}")
            self._add(rank, sock, self._check(sock, rank, hello[_HELLO.size :]))
        except (OSError, BytePSError) as error:
            with contextlib.suppress(OSError):
                _send(sock, _REFUSED + str(error).encode()[: _MOST_BYTES - 1])
            sock.close()
            logger.debug("rank %d: a connection to it was refused: %s", self._rank, error)
            with self._changed:
                self._refusals[rank] = str(error)
        finally:
            with self._changed:
                self._unauthenticated.pop(sock, None)

    def _check(self, sock: socket.socket, rank: int, hello: bytes) -> Seals:
        handshake = self._handshake
        if handshake is None:
            raise ProtocolError("this rank does not listen")
        text, challenge = handshake.challenge(hello, rank, _bound_to(self._rank, self._address), self._epoch)
        _send(sock, _ACCEPTED + text)
        opening, sealing = challenge.accept_for_stream(_receive(sock))
        _send(sock, _ACCEPTED)
        return sealing, opening

    def close(self, is_forked: bool = False) -> None:
        """Stop listening. Connections stay."""
        self._is_closed = True
        listener = self._listener
        if listener is not None:
            if not is_forked:
                with contextlib.suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)  # ends ``accept``
            listener.close()
        if not is_forked:
            with self._changed:
                self._changed.notify_all()


def _bound_to(rank: int, address: str) -> str:
    """A text that both proofs cover beside the secret: a proof for one rank is worth nothing at another."""
    return f"rank {rank} at {address}"


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _send(sock: socket.socket, data: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _receive(sock: socket.socket) -> bytes:
    (nbytes,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    if nbytes > _MOST_BYTES:
        raise ProtocolError(f"a message of {nbytes} bytes in a handshake; at most {_MOST_BYTES} are allowed")
    return _exactly(sock, nbytes)


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        if not part:
            raise ProtocolError("the other end closed the connection in the middle of the handshake")
        data += part
    return data


def _answer(sock: socket.socket, rank: int) -> bytes:
    answer = _receive(sock)
    if answer[:1] != _ACCEPTED:
        raise ProtocolError(f"rank {rank} turned it away: {answer[1:].decode(errors='replace')}")
    return answer[1:]
