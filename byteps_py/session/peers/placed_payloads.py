"""Large payloads between ranks of different machines, by RDMA: the receiver reads them from the sender's memory.

    sender                                             receiver
    MEMORY       what may be read   ◄───────────────►  MEMORY
    copies the payload to registered memory
    PLACED       place, digest ─────────────────────►  reads there (rdma_lane.py), and checks the digest
    uses the memory again    ◄───────── PLACED_READ ──  the payload has arrived

These messages travel over the link of the two ranks, which loses none. A tensor's own memory is not registered: it
would be pinned, and tensors come and go. At most BUDGET_BYTES are placed at a time, or one larger payload; the rest
waits in the tensor's memory, as it does for a connection.

To those above nothing differs from a payload that follows its message. Any thread may send; one at a time receives.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from byteps_py.config.settings import Settings
from byteps_py.dataplane.handshake import payload_digests
from byteps_py.dataplane.rdma_lane import MemoryRead, RdmaLane
from byteps_py.errors import CommunicationError, IntegrityError, PeerLostError, ProtocolError
from byteps_py.session.peers import peer_protocol
from byteps_py.session.peers.message_matcher import Memory, Span
from byteps_py.session.peers.peer_connection import PeerConnection, PendingSend
from byteps_py.session.peers.peer_protocol import PeerMessage, PeerMessageKind
from byteps_py.session.peers.shared_slots import size_class
from byteps_py.system.log import logger
from byteps_py.system.shm import Arena, Block

BUDGET_BYTES = 128 << 20
_SALT_BYTES = 16
#: Reads of one payload, until it is as its sender says.
_MOST_READS = 3
_MEMORY, _PLACED, _PLACED_READ = (
    int(PeerMessageKind.MEMORY), int(PeerMessageKind.PLACED), int(PeerMessageKind.PLACED_READ),
)  # fmt: skip
KINDS = frozenset((_MEMORY, _PLACED, _PLACED_READ))
#: Makes the lane of this process; the argument runs functions on the thread that receives.
NewLane = Callable[["Inline"], RdmaLane]


class Inline:
    """What the lane's thread has for the thread that receives. ``wake`` has it look."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._work: collections.deque[Callable[[], None]] = collections.deque()

    def post(self, work: Callable[[], None]) -> None:
        """Any thread."""
        self._work.append(work)
        self._wake()

    def run(self) -> None:
        while self._work:
            self._work.popleft()()


class PlacedSend(PendingSend):
    """A payload that is placed, or waits for its turn in the memory of ``spans``, which ``owner`` keeps."""

    def __new__(cls, link: PeerConnection, message: PeerMessage, spans: Sequence[Span], owner: object) -> PlacedSend:
        self = super().__new__(cls, link, 0)
        self.message, self.spans, self.owner = message, spans, owner
        self.is_placed = False
        return self

    message: PeerMessage
    spans: Sequence[Span]
    owner: object
    is_placed: bool

    @property
    def has_left(self) -> bool:
        """True once its memory is not needed any more."""
        return self.is_placed or self.connection.failure is not None

    is_done = is_little = has_arrived = has_left


@dataclass(slots=True, eq=False)
class _Arriving:
    """A payload that is being read. ``landed``: called with its bytes."""

    link: PeerConnection
    message: PeerMessage
    digest: bytes
    landed: Callable[[Memory], None]
    began_s: float
    attempts: int = 0
    read: MemoryRead | None = None


class PlacedPayloads:
    """Of rank ``me``. ``era``: of all ranks. The thread that receives calls ``take``, ``check`` and ``inline.run``."""

    def __init__(self, settings: Settings, me: int, era: Callable[[], int], new_lane: NewLane, inline: Inline) -> None:
        self._settings, self._me, self._era = settings, me, era
        self.inline = inline
        self._lane = new_lane(inline)
        self._lock = threading.RLock()
        self._arena = Arena()
        self._lane.watch(self._arena)
        self._salt = os.urandom(_SALT_BYTES)
        self._digest, _ = payload_digests(settings, self._salt)
        self._checks: dict[int, Callable[[bytes, memoryview], bool]] = {}  # by rank
        self._names: dict[int, str] = {}  # of agents, by rank; empty: it has none
        self._told: dict[int, int] = {}  # how many segments a rank knows
        self._waiting: collections.deque[PlacedSend] = collections.deque()
        self._held: dict[int, tuple[PeerConnection, Block, int]] = {}  # by number: what others are to read
        self._held_bytes = 0
        self._last = 0  # number of what was placed last
        self._arriving: list[_Arriving] = []
        self._moved_s = 0.0  # when a read ended

    # ---- out -----------------------------------------------------------------------------------------------------

    def introduce(self, link: PeerConnection) -> None:
        """Tell what may be read here."""
        with self._lock:
            self._introduce(link)

    def _introduce(self, link: PeerConnection) -> None:
        self._told[link.rank] = self._lane.segments
        description = self._salt + self._lane.describe()
        nbytes = len(description)
        link.send(peer_protocol.pack(_MEMORY, self._me, self._era(), 0, 0, 0, nbytes, nbytes, 0, 0, -1) + description)

    def knows(self, rank: int) -> bool:
        """True once that rank has told what may be read there, or that it is without RDMA."""
        return rank in self._names

    def takes(self, rank: int, nbytes: int) -> bool:
        """True if a payload goes to that rank by RDMA."""
        return nbytes >= self._lane.least_bytes and bool(self._names.get(rank))

    def place(self, link: PeerConnection, message: PeerMessage, spans: Sequence[Span], owner: object) -> PlacedSend:
        """Send the bytes of ``spans`` as the payload of ``message``, now or when there is room for it."""
        send = PlacedSend(link, message, spans, owner)
        with self._lock:
            self._waiting.append(send)
            self._place_waiting()
        return send

    def _place_waiting(self) -> None:
        for number in [number for number, (link, *_) in self._held.items() if link.failure is not None]:
            self._free(number)
        while self._waiting:
            send = self._waiting[0]
            if send.connection.failure is None:
                if self._held and self._held_bytes + send.message.total > BUDGET_BYTES:
                    return
                self._place(send)
            self._waiting.popleft()
            send.is_placed, send.owner, send.spans = True, None, ()

    def _place(self, send: PlacedSend) -> None:
        block = self._arena.allocate(size_class(send.message.total))
        at = block.address
        for address, length in send.spans:
            ctypes.memmove(at, address, length)
            at += length
        view = memoryview((ctypes.c_char * send.message.total).from_address(block.address)).cast("B")
        self._lane.address_of(view)  # registers what is new
        link = send.connection
        if self._told.get(link.rank, -1) < self._lane.segments:
            self._introduce(link)
        self._last = number = self._last + 1 & 0xFFFFFFFF
        self._held[number] = link, block, send.message.total
        self._held_bytes += send.message.total
        self._lane.hold(1)
        digest = self._digest(view)
        fields = send.message._replace(kind=_PLACED, segment=number, ready=len(digest), offset=block.address)
        link.send(peer_protocol.pack(*fields) + digest)

    def _free(self, number: int) -> None:
        found = self._held.pop(number, None)
        if found is not None:
            _, block, nbytes = found
            self._held_bytes -= nbytes
            self._arena.free(block)
            self._lane.hold(-1)

    @property
    def is_awaited(self) -> bool:
        """True while a rank that is connected is to read something here."""
        with self._lock:
            links = [link for link, _, _ in self._held.values()] + [send.connection for send in self._waiting]
        return any(link.failure is None and not link.needs_connection for link in links)

    # ---- in ------------------------------------------------------------------------------------------------------

    def take(
        self, link: PeerConnection, message: PeerMessage, body: bytes, landed: Callable[[Memory], None] | None
    ) -> None:
        """A message of KINDS has arrived. ``landed``: called when the payload of a PLACED has, by ``inline``. Raises
        ProtocolError."""
        if message.kind == _MEMORY:
            self._hear_of_memory(link.rank, body)
        elif message.kind == _PLACED_READ:
            with self._lock:
                held = self._held.get(message.segment)
                if held is None or held[0].rank != link.rank:
                    raise ProtocolError(f"rank {link.rank} has read a payload that was not for it")
                self._free(message.segment)
                self._place_waiting()
        elif landed is None or link.rank not in self._checks:
            raise ProtocolError(f"rank {link.rank} sent a PLACED, and has not described its memory")
        else:
            self._begin(_Arriving(link, message, body, landed, time.monotonic()))

    def _hear_of_memory(self, rank: int, body: bytes) -> None:
        if not body:
            logger.warning("rank %d is without RDMA: tensors travel over TCP. Set DMLC_ENABLE_RDMA=1 there", rank)
            self._names[rank] = ""
            return
        salt, description = body[:_SALT_BYTES], body[_SALT_BYTES:]
        is_first = rank not in self._names
        try:
            with self._lock:
                self._names[rank] = self._lane.meet(description, is_first)
        except CommunicationError as error:
            raise ProtocolError(
                f"the memory of rank {rank} can't be read by RDMA: {error}: unset DMLC_ENABLE_RDMA, and tensors travel "
                "over TCP"
            ) from error
        if is_first:
            self._checks[rank] = payload_digests(self._settings, salt)[1]

    def _begin(self, one: _Arriving) -> None:
        message = one.message
        one.attempts += 1
        with self._lock:
            one.read = self._lane.read(
                self._names[one.link.rank], message.offset, message.total, functools.partial(self._ended, one)
            )
        if one.attempts == 1:
            self._arriving.append(one)

    def _ended(self, one: _Arriving, why: str) -> None:
        read, message, link = one.read, one.message, one.link
        self._moved_s = time.monotonic()
        if read is None or link.failure is not None:
            self._forget(one)
            return
        if not why and self._checks[link.rank](one.digest, read.memory.data):
            self._forget(one)
            link.send(peer_protocol.pack(_PLACED_READ, self._me, self._era(), message.segment, 0, 0, 0, 0, 0, 0, -1))
            one.landed((ctypes.c_char * message.total).from_buffer(read.memory.data))
            return
        logger.warning("a payload of rank %d is read by RDMA once more: %s", link.rank, why or "it came damaged")
        if one.attempts < _MOST_READS:
            self._begin(one)
            return
        self._forget(one)
        kind: type[CommunicationError] = PeerLostError if why else IntegrityError
        link.fail(kind(_DOES_NOT_WORK.format(link.rank, why or f"a payload came damaged {_MOST_READS} times")))

    def _forget(self, one: _Arriving) -> None:
        one.read = None
        self._arriving.remove(one)

    def check(self, now_s: float) -> None:
        """Every read has a deadline. A rank that is lost reads nothing more."""
        with self._lock:
            self._place_waiting()
        since_s = now_s - self._lane.patience_s
        for one in [each for each in self._arriving if max(each.began_s, self._moved_s) < since_s]:
            if one.read is not None:
                self._lane.take_back(one.read)
            self._forget(one)
            why = f"no read has ended for {self._lane.patience_s:.3g} s"
            one.link.fail(PeerLostError(_DOES_NOT_WORK.format(one.link.rank, why)))

    def close(self, receive: Callable[[], None], silence_s: float) -> None:
        """Let others read what is for them, as long as they read anything, and end."""
        left, since_s = -1, time.monotonic()
        while self.is_awaited and time.monotonic() - since_s < silence_s:
            if (now := len(self._held) + len(self._waiting)) != left:
                left, since_s = now, time.monotonic()
            receive()
            time.sleep(_LOOK_S)
        self._lane.close()
        self._held.clear()
        self._waiting.clear()
        self._arriving.clear()
        self._arena.close_descriptors()
        self._arena.segments.clear()  # a lane that hangs keeps them mapped


_LOOK_S = 0.001
_DOES_NOT_WORK = (
    "RDMA from rank {} does not work: {}. See the log of both ends; check that their network cards reach each other "
    "(ibv_devinfo, UCX_NET_DEVICES), or unset DMLC_ENABLE_RDMA"
)


def without_memory(me: int, era: int) -> bytes:
    """The MEMORY of a rank that is without RDMA."""
    return peer_protocol.pack(_MEMORY, me, era, 0, 0, 0, 0, 0, 0, 0, -1)
