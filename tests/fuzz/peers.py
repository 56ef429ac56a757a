"""What the other ranks of a machine say to a rank, whole: behind the record, payloads, memory and descriptors."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from byteps_py.errors import JoinedError, MismatchError, ProtocolError, StallError
from byteps_py.session.peers import peer_protocol
from byteps_py.session.peers.message_matcher import Stream, StreamReceipt
from byteps_py.session.peers.peer_protocol import RECORD_BYTES, PeerMessage, PeerMessageKind
from byteps_py.session.peers.peer_transport import PeerTransport
from byteps_py.system.shm import Segment
from byteps_py.tensors import key_of
from byteps_py.torch.collectives.negotiation import OfferVotes

from .base import Target

_RANKS, _ME = 3, 1
_OTHERS = (0, 2)
_NAMES = ("sum", "gather")
_TALK = "talk"
_OFFER = 7
_PARCEL = 4096  # bytes of each that the rank expects
_GUARD = 512
_SEGMENT_BYTES = 1 << 16
_NOTHING, _MEMORY, _SMALL, _TWO = range(4)


def _all_said() -> list[bytes]:
    keys = [key_of(name) for name in (*_NAMES, "unknown")]
    found = [
        peer_protocol.pack(kind, source, 0, segment, key, number, _PARCEL, ready, number, offset, -1) + data
        for source in _OTHERS
        for key in keys
        for number in (1, 2)
        for kind, segment, ready, offset, data in (
            (PeerMessageKind.INLINE, 0, _PARCEL, 0, b"x" * _PARCEL),
            (PeerMessageKind.SHARED, 0, _PARCEL, 64, b""),
            (PeerMessageKind.SHARED, 0, 100, _SEGMENT_BYTES - _PARCEL, b""),
            (PeerMessageKind.MORE, 0, 3000, 0, b""),
            (PeerMessageKind.MORE, 0, _PARCEL, 0, b""),
        )
    ]
    found += [
        peer_protocol.pack(PeerMessageKind.INLINE, source, 0, 0, key_of(_TALK), 1, _PARCEL, _PARCEL, 0, 0, word)
        + b"x" * _PARCEL
        for word in (*[_OFFER] * 8, -1, -2)
        for source in _OTHERS
    ]
    return found + [
        peer_protocol.pack(kind, source, era, 0, 0, 0, 0, 0, payload, 0, -1)
        for source in _OTHERS
        for kind, era, payload in (
            (PeerMessageKind.TAKEN, 0, 1),
            (PeerMessageKind.TAKEN, 0, 2),
            (PeerMessageKind.JOINED, 0, 0),
            (PeerMessageKind.JOINED, 1, 0),
        )
    ]


class _Host:
    """A session that receives messages of its peers only."""

    is_being_read = False

    def __init__(self) -> None:
        self.state = threading.Condition(threading.RLock())
        self.peers: PeerTransport

    def check_open(self) -> None: ...

    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None, what: Callable[[], str]) -> None:
        with self.state:
            while not condition():
                if not self.peers.take_message():
                    raise StallError(what())

    def send(self, message: object, fds: tuple[int, ...] = ()) -> None: ...


class PeersHear(Target):
    """What comes is taken, or ends the session by a ProtocolError; nothing is written but what a payload is for;
    what is kept for later is limited; descriptors that nobody wants are closed."""

    cost = 5
    seeds = (
        *[bytes((_NOTHING,)) + said for said in _all_said()],
        *[bytes((gift,)) + said for gift in (_MEMORY, _TWO) for said in _all_said()[::7]],
        *[
            bytes((gift,)) + peer_protocol.pack(PeerMessageKind.SEGMENT, source, 0, number, 0, 0, nbytes, 0, 0, 0, -1)
            for gift in range(4)
            for source in _OTHERS
            for number, nbytes in ((0, _SEGMENT_BYTES), (1, _SEGMENT_BYTES), (0, 0), (1, 1 << 61))
        ],
        *[bytes((gift,)) for gift in range(4)],
    )

    def __init__(self) -> None:
        self._turn = self._ended = self._taken = self._heard = 0
        self._memory = Segment.create(_SEGMENT_BYTES)
        self._memory.view[:] = b"x" * _SEGMENT_BYTES
        self._empty = os.memfd_create("empty", os.MFD_ALLOW_SEALING)
        self._gifts: dict[int, tuple[int, ...]] = {
            _MEMORY: (self._memory.fd,),
            _SMALL: (self._empty,),
            _TWO: (self._memory.fd, self._empty),
        }
        self._result = ctypes.create_string_buffer(_PARCEL + 2 * _GUARD)
        self._descriptors = len(os.listdir("/proc/self/fd"))
        self._begin()

    def _begin(self) -> None:
        self._begun = self._turn
        self._anew = 0
        self._host = _Host()
        peers = self._local_peers = self._host.peers = PeerTransport(self._host, _ME, range(_RANKS))
        self._door = socket.socket(fileno=os.dup(peers._inbox.write_fd))
        self._theirs = []
        for other in _OTHERS:
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peers.introduce(other, mine.detach())
            theirs.setblocking(False)
            self._theirs.append(theirs)
        self._streams = [peers.stream(name, _OTHERS) for name in _NAMES]
        self._receipts: dict[tuple[int, int], StreamReceipt] = {}
        self._votes = peers.votes(_TALK, _OTHERS)
        self._offer_anew()
        self._send_some()

    def _offer_anew(self) -> None:
        self._rounds = OfferVotes(_OTHERS)
        self._rounds.begin(_OFFER, is_waiting=True, is_able=True, votes={})

    def _send_some(self) -> None:
        """Payloads that have to be acknowledged."""
        span = (ctypes.addressof(self._result), 64)
        for stream in self._streams:
            self._local_peers.send(stream, _OTHERS, [span], True)

    def feed(self, data: bytes) -> None:
        self._turn += 1
        if not data:
            return
        said = data[1:] if self._turn % 4 == 0 else self._in_time(data[1:])
        gift = self._gifts.get(data[0] % 4, ())
        socket.send_fds(self._door, [said], list(gift))
        try:
            self._local_peers.take_messages()
            self._receive()
            self._listen()
            if self._turn % 128 == 0:
                self._local_peers.begin_era()
                self._receipts.clear()
                self._offer_anew()
                self._send_some()
        except ProtocolError as error:
            str(error).encode()
            self._ended += 1
            self._again()
        self._check()
        if self._turn - self._begun > 500:
            self._again()

    def _in_time(self, said: bytes) -> bytes:
        """What is about right is, mostly, what is due."""
        if len(said) < RECORD_BYTES or said[0] not in (
            PeerMessageKind.INLINE,
            PeerMessageKind.SHARED,
            PeerMessageKind.MORE,
        ):
            return said
        message = PeerMessage._make(peer_protocol._RECORD.unpack_from(said))
        if message.kind not in set(PeerMessageKind) or message.source not in _OTHERS:
            return said
        stream = self._streams[self._turn % len(self._streams)]
        era = self._local_peers._matcher.era
        if message.stream == key_of(_TALK):
            return peer_protocol.pack(*message._replace(era=era, number=self._rounds.number)) + said[RECORD_BYTES:]
        if message.kind == PeerMessageKind.MORE:
            coming = [id_ for source, id_ in self._local_peers._matcher._coming if source == message.source]
            return peer_protocol.pack(*message._replace(era=era, id=coming[0] if coming else message.id))
        receipt = self._receipts.get((self._turn % len(self._streams), message.source))
        number = receipt.left[0][1] if receipt is not None else 1
        parts: dict[str, Any] = {"era": era, "stream": stream.key, "number": number, "id": self._turn}
        return peer_protocol.pack(*message._replace(**parts)) + said[RECORD_BYTES:]

    def _receive(self) -> None:
        for at, stream in enumerate(self._streams):
            for source in _OTHERS:
                receipt = self._receipts.get((at, source))
                if receipt is None:
                    receipt = self._receipts[at, source] = self._expect(stream, source)
                try:
                    self._local_peers.collect(receipt, 0.0)
                except StallError:
                    continue
                except (MismatchError, JoinedError) as error:
                    str(error).encode()
                    if receipt.left:  # it has joined
                        continue
                self._taken += 1
                del self._receipts[at, source]

    def _listen(self) -> None:
        number, rounds, votes = self._rounds.number, self._rounds, self._votes
        verdict = rounds.verdict(votes.joined, votes.received(number))
        if verdict is None:
            return
        if verdict:
            for source in _OTHERS:
                votes.fetch(number, source, ctypes.addressof(self._result) + _GUARD, _PARCEL)
            self._heard += 1
        said = votes.received(number)
        votes.forget(number)
        if rounds.begin(_OFFER, is_waiting=True, is_able=True, votes=said) != _OFFER:
            self._offer_anew()

    def _expect(self, stream: Stream, source: int) -> StreamReceipt:
        receipt = StreamReceipt(stream)
        place = ctypes.addressof(self._result) + _GUARD
        receipt.expect(source, [(place, 1000), (place + 1000, _PARCEL - 1000)], _PARCEL)
        return receipt

    def _check(self) -> None:
        raw = self._result.raw
        assert not any(raw[:_GUARD])
        assert not any(raw[-_GUARD:])
        matcher = self._local_peers._matcher
        assert max(len(matcher._early), len(matcher._unclaimed)) <= matcher.most_early
        for theirs in self._theirs:  # what the rank says stays well formed
            while (said := self._said(theirs)) is not None:
                message = peer_protocol.unpack(memoryview(said), len(said))
                assert message.source == _ME

    @staticmethod
    def _said(door: socket.socket) -> bytes | None:
        try:
            return door.recv(1 << 16)
        except BlockingIOError:
            return None

    def _again(self) -> None:
        self._finish()
        self._begin()

    def _finish(self) -> None:
        self._local_peers.close()
        self._door.close()
        for theirs in self._theirs:
            theirs.close()

    def end(self) -> None:
        assert self._ended
        assert self._taken
        assert self._heard
        self._finish()
        del self._local_peers, self._host
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= self._descriptors
        self._begin()

    def close(self) -> None:
        self._finish()
        self._memory.close()
        os.close(self._empty)
