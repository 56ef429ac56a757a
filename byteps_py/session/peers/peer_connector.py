"""Makes the connections between this rank and ranks of other machines: it listens, connects, and has both ends prove
that they belong to the job (byteps_py/dataplane/stream_listener.py).

Of two ranks the one with the greater number connects, as many times as the link needs (dataplane/long_links.py): all
of these are a set. With several network cards there are as many over each (system/network_interfaces.py). Where the
way between the two machines is slow, one more goes through a third machine (dataplane/relay.py). A connection serves
all groups of both ranks. Must not know the messages on connections. Any thread may call.
"""

from __future__ import annotations

import collections
import contextlib
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from byteps_py.config.addresses import is_numeric, place_of
from byteps_py.config.settings import Settings
from byteps_py.config.variables import MOST_CONNECTIONS, MOST_RAILS
from byteps_py.dataplane import long_links
from byteps_py.dataplane.handshake import CallerHandshake, Challenge, ListenerHandshake
from byteps_py.dataplane.relay import call_through
from byteps_py.dataplane.stream_listener import ACCEPTED, Seals, StreamListener, shake_hands
from byteps_py.errors import ConfigurationError, NotInitializedError, ProtocolError, RendezvousError
from byteps_py.security.unauthenticated_connections import PATIENCE_S
from byteps_py.system import machine
from byteps_py.system.log import logger
from byteps_py.system.network_interfaces import NetworkCards, Rail

#: kind, the caller's rank, the listener's rank, epoch of their group, number of the set, index in it
_CALL = struct.Struct("<8sIIIII")
_MAGIC = b"bps-rnk3"


class NewConnection(NamedTuple):
    """A connection to another rank, with which both have authenticated each other. ``set_number``: of
    the connections that the caller makes at one time, from 1. ``position``: of this one in its set; 0 is made first.
    """

    sock: socket.socket
    seals: Seals
    set_number: int = 1
    position: int = 0

    @property
    def is_relayed(self) -> bool:
        """True if it goes through a third machine."""
        return self.position == RELAYED


#: The position of the connection of a set that goes through a third machine.
RELAYED = MOST_CONNECTIONS

#: Called with the rank at the other end of a new connection, and the connection.
OnConnected = Callable[[int, NewConnection], None]


def call(caller: int, callee: int, epoch: int, hello: bytes, place: tuple[int, int] = (1, 0)) -> bytes:
    """The first message of rank ``caller`` to rank ``callee``, both in the group of ranks of ``epoch``. ``place``: the
    number of the set, and the index in it."""
    return _CALL.pack(_MAGIC, caller, callee, epoch, *place) + hello


def bound_to(rank: int, address: str, place: tuple[int, int] = (1, 0)) -> str:
    """A text that both proofs cover beside the secret: a proof for one rank, or one place in a link, is worth nothing
    at another."""
    return f"rank {rank} at {address}, connection {place[1]} of set {place[0]}"


class PeerHandshake:
    """The end of rank ``me``, which listens at ``address``, in the group of ranks of ``epoch``: see CalledHandshake.
    ``place``: see ``call``. ``more_hosts``: other addresses at which it listens, as the caller learns at the end."""

    def __init__(
        self, listener: ListenerHandshake, me: int, address: str, epoch: int, more_hosts: Sequence[str] = ()
    ) -> None:
        self._listener, self._me, self._address, self._epoch = listener, me, address, epoch
        self._more_hosts = more_hosts
        self._challenge: Challenge | None = None
        self.rank = -1
        self.place = (1, 0)
        self.seals: Seals | None = None

    def process(self, message: bytes) -> bytes:
        """The answer to the next message of the caller. Raises ProtocolError if the connection is to end."""
        if self._challenge is not None:
            opening, sealing = self._challenge.accept_for_stream(message)
            self.seals = sealing, opening
            return ACCEPTED + "\n".join(self._more_hosts).encode()
        if len(message) < _CALL.size:
            raise ProtocolError("it is no rank of this job")
        magic, rank, callee, epoch, *place = _CALL.unpack_from(message)
        if magic != _MAGIC or callee != self._me or rank <= self._me:
            raise ProtocolError("it is no rank of this job that connects to this one")
        self.rank, self.place = rank, (place[0], place[1])
        if self.place[1] > RELAYED:
            raise ProtocolError(f"it calls itself connection {self.place[1]} of a link; {MOST_CONNECTIONS} are allowed")
        if epoch != self._epoch:
            raise ProtocolError(f"it belongs to the group of ranks of epoch {epoch}, this one to {self._epoch}")
        bound = bound_to(self._me, self._address, self.place)
        text, self._challenge = self._listener.challenge(message[_CALL.size :], rank, bound, epoch)
        return ACCEPTED + text


def _hosts_in(text: bytes) -> list[str]:
    """The addresses of further network cards in what a listener says at the end. Raises ProtocolError."""
    hosts = text.decode(errors="replace").split("\n") if text else []
    if len(hosts) >= MOST_RAILS or not all(map(is_numeric, hosts)):
        raise ProtocolError(f"{text[:60]!r} are no addresses of network cards")
    return hosts


_RETRY_S = 0.05
_RETRY_AGAIN_S = 0.2
_LEAST_S = 1.0  # for an attempt
_SWITCH_OFF = (
    "or set BYTEPS_DIRECT_CONNECTIONS=0 on all ranks, which sends everything through the communication service"
)


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
        self._cards = NetworkCards()
        self._more_hosts: dict[int, list[str]] = {}  # by rank: those of its further network cards
        self._awaited: set[int] = set()  # ranks that are to connect to this one
        self._sets: collections.Counter[int] = collections.Counter()  # by rank: of connections, made by this one
        self._dialed: set[socket.socket] = set()  # whose handshakes are under way
        self._refusals: dict[int, str] = {}  # by awaited rank: why its latest attempt has failed
        #: The rate of the job's slowest link; 0: not known.
        self.slowest_mbit = 0.0
        #: None until this rank listens.
        self.listener: StreamListener[PeerHandshake] | None = None
        self._relays: dict[int, str] = {}  # by rank that this one has to call: the address of its relay
        self._latest_relay: dict[int, str] = {}  # of these, that of the latest connection
        self._is_closed = False

    def address(self) -> str:
        """The address at which this rank listens, ``host:port``. The rank begins to listen with the first call. Raises
        ConfigurationError if it can't."""
        with self._changed:
            if self.listener is None:
                host, self._cards = machine.bindable_host(self._settings), machine.network_cards(self._settings)
                handshake, more_hosts = ListenerHandshake(self._settings), self._cards.hosts[1:]
                try:
                    self.listener = StreamListener(
                        host,
                        lambda address: PeerHandshake(handshake, self._rank, address, self._epoch, more_hosts),
                        self._called,
                        self._refused,
                        more_hosts,
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
        with self._changed:
            self._sets[rank] += 1
            set_number = self._sets[rank]
        while True:
            try:
                first = self._connect(rank, address, (set_number, 0), deadline)
            except (OSError, ProtocolError) as error:
                why = str(error)
            else:
                break
            if time.monotonic() > deadline - _RETRY_S or self._is_closed:
                raise RendezvousError(
                    f"rank {self._rank} can't connect to rank {rank} at {address} ({why}): let ranks of different "
                    f"machines reach each other, {_SWITCH_OFF}"
                )
            time.sleep(_RETRY_S)
        cards = len(self._rails_to(rank, address))
        count = long_links.connections_for(self._settings, long_links.round_trip_s(first.sock), self.slowest_mbit)
        count = min(MOST_CONNECTIONS, math.ceil(count / cards) * cards)  # equally many over each pair of network cards
        self._add(rank, first)
        positions = [*range(1, count), *([RELAYED] if rank in self._relays else [])]
        if positions:
            with ThreadPoolExecutor(len(positions), "byteps-connect") as pool:
                for index in positions:
                    pool.submit(self._call_also, rank, address, (set_number, index))

    def _call_also(self, rank: int, address: str, place: tuple[int, int]) -> None:
        """Make a further connection of a link. Without it the link is slower, and that is all."""
        try:
            self._add(rank, self._connect(rank, address, place, 0.0))
        except (OSError, ProtocolError) as error:
            if self._is_closed:
                return
            relay = self._relays.get(rank)
            way = f" through {relay}" if place[1] == RELAYED and relay else ""
            logger.warning(
                "rank %d could not make connection %d to rank %d at %s%s (%s): the link may be slower",
                self._rank, place[1], rank, address, way, error,
            )  # fmt: skip

    def _connect(self, rank: int, address: str, place: tuple[int, int], deadline: float) -> NewConnection:
        """Raises OSError and ProtocolError."""
        limit_s = max(_LEAST_S, min(PATIENCE_S, deadline - time.monotonic()))
        relay = self._relays.get(rank, "") if place[1] == RELAYED else ""
        if place[1] == RELAYED and not relay:
            raise ProtocolError("no machine relays it any more")
        host, port = place_of(relay or address)
        source = None
        if not relay:
            rails = self._rails_to(rank, address)
            _, own, host = rails[place[1] % len(rails)]
            source = (own, 0) if own else None
        sock = socket.create_connection((host, port), limit_s, source)
        try:
            with self._changed:
                self._dialed.add(sock)
            if self._is_closed:
                raise ProtocolError("the session has been closed")
            if relay:
                self._latest_relay[rank] = relay
                call_through(sock, self._settings, self._rank, relay, address, time.monotonic() + PATIENCE_S)
            handshake = CallerHandshake(self._settings, self._rank, bound_to(rank, address, place), self._epoch)
            first = call(self._rank, rank, self._epoch, handshake.hello, place)
            seals, hosts = shake_hands(sock, handshake, first, f"rank {rank}")
            if not relay:
                self._more_hosts[rank] = _hosts_in(hosts)
            return NewConnection(sock, seals, *place)
        except (OSError, ProtocolError):
            sock.close()
            raise
        finally:
            with self._changed:
                self._dialed.discard(sock)

    def _rails_to(self, rank: int, address: str) -> list[Rail]:
        """One for each network card, as far as they are known: ``rank`` names its further ones with the first
        connection."""
        return self._cards.rails_to([place_of(address)[0], *self._more_hosts.get(rank, ())])

    def _add(self, rank: int, connection: NewConnection) -> None:
        """Add a connection. One of a later set replaces those of the same rank before."""
        if self._is_closed:
            connection.sock.close()
            return
        long_links.tune(connection.sock, self._settings)
        self._on_connected(rank, connection)
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

    # ---- relays ------------------------------------------------------------------------------------------

    def set_relays(self, relays: Mapping[int, str]) -> tuple[set[int], set[int]]:
        """These ranks are called through these addresses as well from now on. Returns those of them whom this rank
        calls, and those of these that are called through another address now. Does not connect."""
        with self._changed:
            self._relays = {rank: at for rank, at in relays.items() if rank < self._rank}
            mine = self._relays.keys() & self._connected
            return mine, {rank for rank in mine if self._latest_relay.get(rank, "") not in ("", self._relays[rank])}

    def call_through_relay(self, rank: int) -> None:
        """Add a connection through the relay to the present connections to ``rank``. Returns at once."""
        address = self._addresses.get(rank)
        if address is not None and not self._is_closed:
            arguments = (rank, address, (self._sets[rank], RELAYED))
            threading.Thread(target=self._call_also, args=arguments, name="byteps-connect", daemon=True).start()

    # ---- being called ----------------------------------------------------------------------------------

    def _called(self, handshake: PeerHandshake, sock: socket.socket) -> None:
        if handshake.seals is not None:
            self._add(handshake.rank, NewConnection(sock, handshake.seals, *handshake.place))

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
                for sock in self._dialed:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
                self._changed.notify_all()
        if self.listener is not None:
            self.listener.close(is_forked)
