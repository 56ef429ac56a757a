"""What a communication service says to a summation server of the same machine, descriptors of memory included."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable
from typing import Any, cast

from byteps_py.config.settings import Settings
from byteps_py.dataplane.listener import Peer
from byteps_py.dataplane.traffic import Limiter, Traffic
from byteps_py.errors import PeerLostError
from byteps_py.runtime import Runtime
from byteps_py.security import auth
from byteps_py.server.contribution_listeners import LocalListener, LocalPeer
from byteps_py.server.reducer import Arrival, SharedMemory
from byteps_py.system import channel
from byteps_py.system.channel import Channel
from byteps_py.system.shm import Segment
from byteps_py.tensors import DType, Op
from byteps_py.wire.data_link import HEADER_BYTES, Header, Kind

from .base import Target

_SETTINGS = Settings(secret="known to members", job_id="fuzz")
_MACHINE = 2
_SEGMENT_BYTES = 1 << 16
_TOKEN = auth.token(_SETTINGS, "local", str(_MACHINE)).encode()
_HELLO = Header(Kind.HELLO, _MACHINE).pack() + _TOKEN
_MEMBER, _STRANGER = range(2)
_NOTHING, _MEMORY, _LOOSE, _VAST, _SEALED, _PIPE, _TWO = range(7)


def _placed(kind: Kind, op: Op, dtype: DType, at: tuple[int, int, int, int]) -> bytes:
    """At (segment, offset) of the payload, then of the answer."""
    return Header(
        kind, _MACHINE, 1, dtype, op, key=7, generation=1, round=1, length=4096, segment=at[0], segment_offset=at[1],
        answer_segment=at[2], answer_offset=at[3],
    ).pack()  # fmt: skip


def _segment(number: int, nbytes: int) -> bytes:
    return Header(Kind.SEGMENT, _MACHINE, segment=number, length=nbytes).pack()


class _Loop:
    """Nothing comes by itself."""

    def __init__(self) -> None:
        self.readers: dict[int, Callable[[], None]] = {}

    def add_reader(self, source: int, callback: Callable[[], None]) -> None:
        assert source not in self.readers
        self.readers[source] = callback

    def remove(self, source: int) -> None:
        self.readers.pop(source, None)

    def add_writer(self, fd: int, callback: Callable[[], None]) -> None: ...
    def remove_writer(self, fd: int) -> None: ...
    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None: ...


class ServerBeside(Target):
    """What it counts as a contribution lies in memory that this machine gave, all of it; all else is refused, or costs
    the connection. Descriptors that come are closed."""

    cost = 8
    seeds = (
        *[bytes((_MEMBER, _MEMORY)) + _segment(number, _SEGMENT_BYTES) for number in range(4)],
        *[bytes((_MEMBER, what)) + _segment(9, size) for what in range(7) for size in (4096, _SEGMENT_BYTES, 1 << 61)],
        *[
            bytes((_MEMBER, _NOTHING)) + _placed(kind, op, dtype, at)
            for kind, op in ((Kind.PUSH, Op.SUM), (Kind.PASS, Op.SUM), (Kind.PULL, Op.BROADCAST), (Kind.PUSH, Op.MAX))
            for dtype in (DType.FLOAT32, DType.UINT8)
            for at in ((0, 0, 1, 0), (0, 4096, 0, 4096), (1, _SEGMENT_BYTES - 4096, 0, 0), (0, 0, 0, 2048))
        ],
        bytes((_MEMBER, _NOTHING)) + Header(Kind.WITHDRAW, _MACHINE, 1, key=7).pack(),
        bytes((_STRANGER, _NOTHING)) + _HELLO[:-1] + b"!",
        bytes((_STRANGER, _NOTHING)) + Header(Kind.HELLO, 0).pack() + _TOKEN,
        bytes((_STRANGER, _MEMORY)) + _segment(0, _SEGMENT_BYTES),
    )

    def __init__(self) -> None:
        self._turn = self._arrivals = 0
        self._memory = Segment.create(_SEGMENT_BYTES)
        loose = os.memfd_create("loose")
        os.ftruncate(loose, _SEGMENT_BYTES)
        vast = os.memfd_create("vast", os.MFD_ALLOW_SEALING)
        os.ftruncate(vast, 1 << 62)  # none of it is there
        fcntl.fcntl(vast, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(sealed, _SEGMENT_BYTES)
        fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
        self._held = [loose, vast, sealed, *os.pipe()]
        self._gifts: dict[int, tuple[int, ...]] = {
            _MEMORY: (self._memory.fd,),
            _LOOSE: (loose,),
            _VAST: (vast,),
            _SEALED: (sealed,),
            _PIPE: (self._held[-1],),
            _TWO: (self._memory.fd, loose),
        }
        self._loop = _Loop()
        traffic = Traffic(_log_limiter=Limiter(0))
        name = f"byteps-fuzz-{os.getpid()}"
        self._local = LocalListener(
            name, _SETTINGS, Runtime(loop=cast(Any, self._loop)), traffic, self._arrived, self._gone, self._withdrawn
        )
        self._callers: dict[int, tuple[Channel, LocalPeer]] = {}
        for who in (_MEMBER, _STRANGER):
            self._connect(who)
        self._descriptors = len(os.listdir("/proc/self/fd"))

    def _connect(self, who: int) -> None:
        known = set(self._local._peers)
        caller = channel.connect(self._local.name, 1.0)
        self._local._accept()
        (peer,) = self._local._peers - known
        self._callers[who] = caller, peer
        if who == _MEMBER:
            caller.send(_HELLO)
            self._loop.readers[peer.channel.fileno()]()
            assert peer.machine == _MACHINE

    # ---- what the server hears -------------------------------------------------------------------------

    def _arrived(self, arrival: Arrival) -> None:
        self._arrivals += 1
        header, peer = arrival.header, arrival.origin
        assert isinstance(peer, LocalPeer)
        assert peer.machine == header.sender == _MACHINE
        nbytes = header.payload_nbytes if header.kind is Kind.PUSH else 0
        assert arrival.nbytes == nbytes
        for place, number, offset, size in (
            (arrival.payload, header.segment, header.segment_offset, nbytes),
            (arrival.answer, header.answer_segment, header.answer_offset, header.length),
        ):
            if place is None:
                continue
            assert isinstance(place, SharedMemory)
            segment = peer._segments[number]
            assert place.address == segment.address + offset
            assert place.address % header.dtype.itemsize == 0
            assert place.nbytes == size
            assert offset + size <= segment.nbytes
            place.message().bytes[: 1 << 16]  # it is there
        if arrival.answer is not None and self._turn % 2:
            peer.answer(header, None)
        else:
            peer.tell(header)

    def _withdrawn(self, header: Header) -> None:
        assert header.sender == _MACHINE

    def _gone(self, peer: Peer) -> None:
        assert peer not in self._local._peers

    # ---- what is said to it ----------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        self._turn += 1
        if len(data) < 3:
            return
        who = data[0] % 2
        caller, peer = self._callers[who]
        caller.send(data[2:], self._gifts.get(data[1] % 7, ()))
        self._loop.readers[peer.channel.fileno()]()
        assert who == _MEMBER or peer.machine < 0, "a stranger was believed"
        self._hear(caller)
        if peer not in self._local._peers:
            caller.close()
            self._connect(who)
        elif self._turn % 500 == 0:  # its segments are forgotten with it
            caller.close()
            self._loop.readers[peer.channel.fileno()]()
            assert not peer._segments
            self._connect(who)
        if self._turn % 64 == 0:
            mapped = sum(len(peer._segments) for peer in self._local._peers)  # a mapping has one of its own
            assert len(os.listdir("/proc/self/fd")) == self._descriptors + mapped

    def _hear(self, caller: Channel) -> None:
        for _ in itertools.count():
            try:
                message = caller.receive(0)
            except PeerLostError:
                return
            if message is None:
                return
            answer = Header.unpack(message[0][:HEADER_BYTES])
            assert answer.kind in (Kind.ANSWER, Kind.REFUSED, Kind.PUSH, Kind.PULL, Kind.PASS)
            assert len(message[0]) < 1 << 10

    def end(self) -> None:
        assert self._arrivals

    def close(self) -> None:
        for caller, _ in self._callers.values():
            caller.close()
        self._local.close()
        self._memory.close()
        for fd in self._held:
            os.close(fd)
