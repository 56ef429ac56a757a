"""Makes the connections between this rank and ranks of other machines: it listens, connects, and has both ends prove
that they belong to the job (byteps_py/dataplane/handshake.py).

Of two ranks the one with the greater number connects. A connection serves all groups of both. Any thread may call.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from byteps_py.config.settings import Settings
from byteps_py.dataplane.handshake import CallerHandshake
from byteps_py.errors import ConfigurationError, NotInitializedError, ProtocolError, RendezvousError
from byteps_py.security.unauthenticated_connections import PATIENCE_S
from byteps_py.session.peers import peer_handshake
from byteps_py.session.peers.peer_handshake import LENGTH_BYTES, Seals
from byteps_py.session.peers.peer_listener import PeerListener
from byteps_py.system import machine

_RETRY_S = 0.05
_RETRY_AGAIN_S = 0.2
_LEAST_S = 1.0  # for an attempt
_SWITCH_OFF = (
    "or set BYTEPS_DIRECT_CONNECTIONS=0 on all ranks, which sends everything through the communication service"
)

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
        self._addresses: dict[int, str] = {}  # of ranks that this one has to call
        self._awaited: set[int] = set()  # ranks that are to connect to this one
        self._refusals: dict[int, str] = {}  # by awaited rank: why its latest attempt has failed
        #: None until this rank listens.
        self.listener: PeerListener | None = None
        self._is_closed = False

    def address(self) -> str:
        """The address at which this rank listens, ``host:port``. The rank begins to listen with the first call. Raises
        ConfigurationError if it can't."""
        with self._changed:
            if self.listener is None:
                host = machine.bindable_host(self._settings)
                try:
                    self.listener = PeerListener(
                        host, self._settings, self._rank, self._epoch, self._called, self._refused
                    )
                except OSError as error:
                    raise ConfigurationError(
                        f"rank {self._rank} can't listen for other ranks at {host} ({error}): set DMLC_NODE_HOST or "
                        f"DMLC_INTERFACE to an address of this machine, {_SWITCH_OFF}"
                    ) from error
            return self.listener.address

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
                    raise NotInitializedError("the session was closed while ranks connected to each other")
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise RendezvousError(self._no_call(absent))

    def _call_all(self, addresses: Mapping[int, str], deadline: float) -> list[int]:
        """Connect to those that this rank has to call. Returns those to which it was not connected before."""
        with self._changed:
            missing = {rank: address for rank, address in addresses.items() if rank not in self._connected}
            self._awaited.update(rank for rank in missing if rank > self._rank)
        callees = {rank: address for rank, address in missing.items() if rank < self._rank}
        self._addresses.update(callees)
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
        ranks, address = ", ".join(map(str, absent)), self.listener.address if self.listener is not None else "?"
        return (
            f"rank{'s' * (len(absent) > 1)} {ranks} did not connect to rank {self._rank} at {address}{why}: let "
            f"them reach that address, {_SWITCH_OFF}"
        )

    # ---- calling ---------------------------------------------------------------------------------------

    def _call(self, rank: int, address: str, deadline: float) -> None:
        while True:
            try:
                sock = socket.create_connection(
                    _place(address), max(_LEAST_S, min(PATIENCE_S, deadline - time.monotonic()))
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
        """Complete the handshake within PATIENCE_S. Raises OSError and ProtocolError."""
        deadline = time.monotonic() + PATIENCE_S
        caller = CallerHandshake(self._settings, self._rank, peer_handshake.bound_to(rank, address), self._epoch)
        sock.sendall(peer_handshake.framed(peer_handshake.call(self._rank, rank, self._epoch, caller.hello)))
        challenge = peer_handshake.accepted(_receive(sock, deadline), rank)
        proof, sealing, opening = caller.answer_for_stream(challenge)
        sock.sendall(peer_handshake.framed(proof))
        peer_handshake.accepted(_receive(sock, deadline), rank)
        return sealing, opening

    def _add(self, rank: int, sock: socket.socket, seals: Seals) -> None:
        """Add a connection. It replaces an earlier one of the same rank, which calls again once that one has broken."""
        if self._is_closed:
            sock.close()
            return
        self._on_connected(rank, sock, seals)
        with self._changed:
            self._connected.add(rank)
            self._awaited.discard(rank)
            self._refusals.pop(rank, None)
            self._changed.notify_all()

    def redial(self, rank: int, is_needed: Callable[[], bool]) -> None:
        """The connection to ``rank`` has broken: make another one while ``is_needed``, if this rank is the one that
        calls. Returns at once."""
        address = self._addresses.get(rank)
        if address is not None and rank < self._rank and not self._is_closed:
            arguments = (rank, address, is_needed)
            threading.Thread(target=self._call_until, args=arguments, name="byteps-connect", daemon=True).start()

    def _call_until(self, rank: int, address: str, is_needed: Callable[[], bool]) -> None:
        while not self._is_closed and is_needed():
            with contextlib.suppress(RendezvousError):
                self._call(rank, address, 0.0)
                return
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, _RETRY_AGAIN_S)

    # ---- being called ----------------------------------------------------------------------------------

    def _called(self, rank: int, sock: socket.socket, seals: Seals) -> None:
        self._add(rank, sock, seals)

    def _refused(self, rank: int, why: str) -> None:
        with self._changed:
            if rank in self._awaited:  # a stranger may claim any other number, and as many as it likes
                self._refusals[rank] = why

    def close(self, is_forked: bool = False) -> None:
        """Stop listening. Connections stay."""
        if is_forked:
            self._is_closed = True
        else:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
        if self.listener is not None:
            self.listener.close(is_forked)


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _receive(sock: socket.socket, deadline: float) -> bytes:
    return _exactly(sock, peer_handshake.length_of(_exactly(sock, LENGTH_BYTES, deadline)), deadline)


def _exactly(sock: socket.socket, nbytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < nbytes:
        left_s = deadline - time.monotonic()
        sock.settimeout(max(left_s, 0.001))
        try:
            part = sock.recv(nbytes - len(data)) if left_s > 0 else None
        except TimeoutError:
            part = None
        if part is None:
            raise ProtocolError(f"its handshake was not over after {PATIENCE_S:g} s")
        if not part:
            raise ProtocolError("the other end closed the connection in the middle of the handshake")
        data += part
    return data
