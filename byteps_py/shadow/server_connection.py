"""A reader's connection to one summation server: requests, and their answers.

Owned by the thread that runs its loop. A request that has no answer when the connection breaks is sent again on the
next one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import zmq

from byteps_py.config.settings import Settings
from byteps_py.dataplane.dialer import Dialer, DialTarget, Owner
from byteps_py.errors import BytePSError, PeerLostError, ProtocolError, RendezvousError, from_name
from byteps_py.security import auth
from byteps_py.system.loop import EventLoop
from byteps_py.system.machine import belongs_to_this_user
from byteps_py.wire.data_link import READER, Header, Kind, PayloadRecord

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
    is_answered: bool = False
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
            request.is_answered = True
        del self._asked[header.round]

    def on_damaged(self, number: int | None) -> None:
        """See Owner: all is asked again on a new connection."""
        self._dialer.reconnect()

    def on_refused(self, error: ProtocolError) -> None:
        """See Owner."""
        self.fail(RendezvousError(str(error)))
