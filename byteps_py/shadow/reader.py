"""Reads the states that summation servers keep, over their data plane: for a restarted trainer, and `bps checkpoint`.

One thread at a time: it runs the loop of the connections while a call lasts. No call starts a thread, a process or,
where the servers are given, gRPC, which does not survive a fork of the trainer. A request that has no answer when its
connection breaks is sent again on the next one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import zmq

from byteps_py.config.settings import Settings
from byteps_py.dataplane.dialer import Dialer, DialTarget, Owner
from byteps_py.errors import (
    BytePSError,
    CommunicationError,
    PeerLostError,
    ProtocolError,
    RendezvousError,
    StallError,
    UsageError,
    from_name,
)
from byteps_py.security import auth
from byteps_py.shadow.restorable import RestorablePartition, RestorableRecord, ServerDescription
from byteps_py.system import jobs
from byteps_py.system.loop import EventLoop
from byteps_py.system.machine import belongs_to_this_user
from byteps_py.wire.data_link import (
    MAX_READ_BYTES,
    READER,
    AttachedRead,
    Header,
    Kind,
    PayloadRecord,
    ShadowDescription,
    StatesQuery,
    StatesRead,
)

#: After so many failed attempts in a row a server can't be reached: it has ended.
_MOST_FAILURES = 4
#: The longest answer: a description of all partitions of a server.
_MOST_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class StatesAsked:
    """A request to a server. ``data``: what has come of its answer; ``error``: why there is none."""

    kind: Kind
    wanted: PayloadRecord
    data: bytearray = field(default_factory=bytearray)
    error: BytePSError | None = None


class ServerConnection(Owner):
    """Connects to the server at ``address``, ``tcp://host:port``, at once.

    What a server says may be unpickled, so it comes only from one that has authenticated: by the job's secret; or, in a
    job without any, by running as the same user on this machine.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], loop: EventLoop, address: str, settings: Settings
    ) -> None:
        self._address = address
        self._is_proven = bool(auth.membership_key(settings))
        self._numbers = itertools.count(1)
        self._asked: dict[int, StatesAsked] = {}
        #: Why this connection is of no use any more.
        self.error: BytePSError | None = None
        self._check_owner()
        self._dialer = Dialer(context, loop, DialTarget(address, f"the server at {address}"), READER, settings, self)

    @property
    def is_waiting(self) -> bool:
        """A request has neither an answer nor an error."""
        return bool(self._asked)

    def ask(self, request: StatesAsked) -> None:
        """Send a request, once the connection is open."""
        number = next(self._numbers)
        self._asked[number] = request
        if self._dialer.is_open:
            self._send(number, request)

    def check(self) -> None:
        """Let all requests fail if the server can't be reached."""
        if self._dialer.failures >= _MOST_FAILURES:
            self.fail(PeerLostError(f"the server at {self._address} can't be reached: it, or its machine, has ended"))

    def fail(self, error: BytePSError) -> None:
        """End the connection: no request gets an answer any more."""
        self.error = self.error or error
        for request in self._asked.values():
            request.error = self.error
        self._asked.clear()

    def close(self) -> None:
        """End the connection."""
        self._dialer.close()

    def _send(self, number: int, request: StatesAsked) -> None:
        self._dialer.send(Header(request.kind, READER, round=number), request.wanted.pack())

    def _check_owner(self) -> None:
        """Raises RendezvousError if nothing proves the server and another user has its port. Called also once an answer
        is there: the server may have ended, and its port may have been taken, just before the connection was made."""
        if not self._is_proven and not belongs_to_this_user(self._address.removeprefix("tcp://")):
            raise RendezvousError(
                f"what listens at {self._address} is not a server of this job: it does not run as this user. Set "
                "BYTEPS_SECRET, or start the job with bpslaunch -np, so that servers can prove who they are"
            )

    # ---- what the dialer says ----------------------------------------------------------------------------------

    def on_open(self) -> None:
        """See Owner."""
        for number, request in self._asked.items():
            request.data.clear()
            self._send(number, request)

    def on_message(self, header: Header, payload: zmq.Frame) -> None:
        """See Owner."""
        request = self._asked.get(header.round)
        if request is None:
            return
        try:
            self._check_owner()
        except RendezvousError as error:
            self.fail(error)
            return
        if header.kind is Kind.REFUSED:
            name, _, text = payload.bytes.decode(errors="replace").partition("\n")
            request.error = from_name(name, f"the server at {self._address}: {text}")
        elif header.kind is not Kind.ANSWER or len(request.data) + len(payload) > _MOST_BYTES:
            self.fail(ProtocolError(f"the server at {self._address} sent {header.kind.name}, {len(payload)} bytes"))
            return
        else:
            request.data += payload.buffer
            if len(request.data) < header.segment_offset:
                return  # more comes
        del self._asked[header.round]

    def on_damaged(self, number: int | None) -> None:
        """See Owner: all is asked again on a new connection."""
        self._dialer.reconnect()

    def on_refused(self, error: ProtocolError) -> None:
        """See Owner."""
        self.fail(RendezvousError(str(error)))


#: A server that takes longer is described as silent.
_SERVER_S = 10.0
#: Requests under way at the same time, of MAX_READ_BYTES each.
_MOST_ASKED = 16


class ShadowReader:
    """Reads the states that the servers of the job of ``settings`` hold.

    Args:
        settings: say where the job's scheduler is, and have its secret.
        timeout_s: the deadline of each call.
        servers: returns the addresses of the servers, ``tcp://host:port``; None: the scheduler is asked.

    ``close``, or the end of a ``with`` block, ends its connections.
    """

    def __init__(
        self, settings: Settings, timeout_s: float = 60.0, servers: Callable[[], Sequence[str]] | None = None
    ) -> None:
        self._settings = settings
        self._timeout_s = timeout_s
        self._servers = servers
        self._connections: dict[str, ServerConnection] = {}
        self._loop: EventLoop | None = None
        self._context: zmq.Context[zmq.Socket[bytes]]

    def __enter__(self) -> ShadowReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def describe(self, hold_s: float = 0.0) -> list[ServerDescription]:
        """The states that each server holds; servers that give no answer are listed with their error. For ``hold_s``
        seconds (at most 60) servers apply no steps, so that the described states can be read while training goes on.

        Empty without a scheduler: then there are no servers on other machines. Raises RendezvousError, StallError or
        CommunicationError if the scheduler can't be asked.
        """
        until_s = time.monotonic() + self._timeout_s
        servers = sorted((self._servers or self._known_to_scheduler)())
        asked = {server: [StatesAsked(Kind.DESCRIBE_STATES, StatesQuery(hold_s))] for server in servers}
        self._exchange(asked, max(0.1, min(_SERVER_S, until_s - time.monotonic())))
        return [_described(server, request) for server, [request] in asked.items()]

    def _known_to_scheduler(self) -> list[str]:
        if not self._settings.scheduler_host:
            return []
        from byteps_py.proto import control_pb2 as pb
        from byteps_py.scheduler import query  # imports gRPC: not where a session knows the servers

        members = query.status(self._settings, self._timeout_s).members
        return [each.member.address for each in members if each.alive and each.member.role == pb.ROLE_SUMMATION]

    def read_into(self, partition: RestorablePartition, state: int, elements: range, view: memoryview) -> None:
        """Read a state's elements into ``view``.

        partition: of a Restorable. state: 0 is the master, the others are moments. elements: of the tensor, among
        ``partition.elements``. view: writable bytes, ``partition.kind.state_itemsize`` for each element.

        Raises UsageError for other elements or sizes, CommunicationError if the server can't deliver them any more.
        """
        size = partition.kind.state_itemsize
        is_inside = partition.elements.start <= elements.start <= elements.stop <= partition.elements.stop
        if not is_inside or elements.step != 1 or not 0 <= state < partition.kind.states:
            raise UsageError(
                f"{elements} of state {state} are not among {partition.elements} of {partition.kind.states} states"
            )
        target = view.cast("B")
        if len(target) != len(elements) * size or target.readonly:
            raise UsageError(f"{len(elements)} elements take {len(elements) * size} writable bytes, not {len(target)}")
        first, step = elements.start - partition.first, MAX_READ_BYTES // size
        wanted = [
            StatesRead(partition.run, partition.key, partition.index, partition.step, state, start, stop)
            for start, stop in _cut(first, first + len(elements), step)
        ]
        self._read(partition.server, [StatesAsked(Kind.READ_STATES, each) for each in wanted], target)

    def read_attached(self, record: RestorableRecord) -> bytearray:
        """The bytes that a rank has attached to its record. Raises CommunicationError if the server can't deliver it
        any more."""
        found = bytearray(record.attached_bytes)
        wanted = [
            AttachedRead(record.run, record.step, record.rank, start, stop)
            for start, stop in _cut(0, len(found), MAX_READ_BYTES)
        ]
        self._read(record.server, [StatesAsked(Kind.READ_ATTACHED, each) for each in wanted], memoryview(found))
        return found

    def close(self) -> None:
        """End the connections. A later call makes new ones."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        if self._loop is not None:
            self._loop.close()
            self._loop = None
            self._context.term()

    # ---- requests ----------------------------------------------------------------------------------------------

    def _read(self, server: str, requests: Sequence[StatesAsked], target: memoryview) -> None:
        """Fill ``target`` with the answers, one after another. Each few have their own deadline."""
        at = 0
        for first in range(0, len(requests), _MOST_ASKED):
            some = requests[first : first + _MOST_ASKED]
            self._exchange({server: some}, self._timeout_s)
            for request in some:
                if request.error is not None:
                    raise request.error
                data, request.data = request.data, bytearray()
                if at + len(data) <= len(target):
                    target[at : at + len(data)] = data
                at += len(data)
        if at != len(target):
            raise CommunicationError(f"the server at {server} gave {at} bytes of {len(target)}")

    def _exchange(self, asked: Mapping[str, Sequence[StatesAsked]], timeout_s: float) -> None:
        """Wait until all requests, by server, have an answer or an error."""
        until_s = time.monotonic() + timeout_s
        if self._loop is None:
            self._loop, self._context = EventLoop(), zmq.Context()
        here: dict[str, ServerConnection] = {}
        for server, requests in asked.items():
            try:
                here[server] = self._connection(self._loop, server)
            except BytePSError as error:
                for request in requests:
                    request.error = error
                continue
            for request in requests:
                here[server].ask(request)
        while any(each.is_waiting for each in here.values()) and time.monotonic() < until_s:
            self._loop.run_once(until_s)
            for connection in here.values():
                connection.check()
        for server, connection in here.items():
            if connection.is_waiting:
                connection.fail(StallError(f"the server at {server} gave no answer within {timeout_s:.3g} s"))
            if connection.error is not None:
                self._connections.pop(server).close()

    def _connection(self, loop: EventLoop, server: str) -> ServerConnection:
        """The connection to a server. Raises RendezvousError if another user has its port, ProtocolError if its address
        is none."""
        if server not in self._connections:
            settings = jobs.with_local_secret(self._settings)
            self._connections[server] = ServerConnection(self._context, loop, server, settings)
        return self._connections[server]


def _described(server: str, request: StatesAsked) -> ServerDescription:
    if request.error is not None:
        return ServerDescription(server, ShadowDescription(), str(request.error))
    try:
        return ServerDescription(server, ShadowDescription.unpack(bytes(request.data)))
    except ProtocolError as error:
        return ServerDescription(server, ShadowDescription(), str(error))


def _cut(start: int, stop: int, step: int) -> list[tuple[int, int]]:
    """Pieces of at most ``step``, in order.

    >>> _cut(3, 10, 4)
    [(3, 7), (7, 10)]
    """
    return [(at, min(at + step, stop)) for at in range(start, stop, step)]
