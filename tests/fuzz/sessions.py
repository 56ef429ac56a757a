"""What a communication service says to a rank of its machine."""

from __future__ import annotations

import gc
import os
import socket

from byteps_py.session.base import Slot
from byteps_py.session.service.remote import RemoteSession
from byteps_py.system.channel import Channel
from byteps_py.system.shm import Segment
from byteps_py.tensors import DType, TensorSpec
from byteps_py.wire import rank_link as protocol

from .base import Target
from .ranks import twisted

_SPECS = (TensorSpec("sum", DType.FLOAT32, (3, 4)), TensorSpec("other", DType.FLOAT64, (9,)))
_SEGMENT_BYTES = 1 << 16
_WELCOME = protocol.Welcome(
    rank=1, size=4, local_rank=1, local_size=2, is_continued=False, is_under_way=False, since_epoch=1,
    machine_index=0, num_machines=2,
    is_homogeneous=True, has_shadow_servers=True, slowest_mbit=0.0, replicated_gain=0.0,
    shadowed_gain=0.0, memory_bytes=0,
)  # fmt: skip
_NOTHING, _MEMORY, _SMALL, _DOOR, _TWO = range(5)
#: Of any field: what its type allows, and nobody means.
_WILD = (False, 0, 1, 1 << 31, 1 << 40, 1 << 63, 0.5, float("nan"), "", "0", (), (0,), ((0, 0),), ((7, 1 << 63),))


def _place(number: int, offset: int, nbytes: int = 48, at: int = 0) -> protocol.SlotFields:
    return protocol.SlotFields(number, nbytes, 2, at, offset, ((at, 0), (at, 4096)))


_SAID = (
    protocol.Declared(1, (_place(1, 128), _place(2, 8192, 72))),
    protocol.Declared(1, (_place(3, _SEGMENT_BYTES - 8), _place(4, 0))),
    protocol.Declared(1, (_place(3, 1 << 63), _place(4, 0))),
    protocol.Declared(1, (_place(3, 0, at=7), _place(4, 0))),
    protocol.Declared(1, (_place(5, 0),)),
    protocol.RoundsDone(((1, 3, 0),)),
    protocol.RoundsDone(((1, 3, 0), (2, 3, 7))),
    protocol.ChunksArrived(((1, 3, 0), (1, 3, 1))),
    _WELCOME,
    protocol.BarrierReleased(1),
    protocol.AllJoined(1),
    protocol.HostsChanged(True, False),
    protocol.RelaysChanged((protocol.RelayedRank(1, "127.0.0.1:9"),)),
    protocol.DeclarationsFailed((1,), "MismatchError", "they differ"),
    protocol.Fatal("PeerLostError", "a rank died"),
    protocol.Pong(),
    protocol.Drained(),
    protocol.Introduced(77),
    protocol.Ping(),
    protocol.NormMeasured(1, 2.5),
    protocol.StepsHeld(3, True, 1),
    protocol.RecordTaken(1, 3),
    protocol.StatesKept(1, 1, 12, ((0, 0), (0, 4096)), ((0, 12, 1),)),
)
_SEGMENTS = [protocol.GiveSegment(1, nbytes) for nbytes in (4096, _SEGMENT_BYTES, 1 << 61, (1 << 64) - 1)]


class Sessions(Target):
    """What comes is taken, or ends the session by an error of ours; a slot's memory is all there; descriptors that
    nobody wants are closed."""

    cost = 10
    seeds = (
        *[bytes((_NOTHING,)) + protocol.encode(said) for said in _SAID * 2],
        *[bytes((gift,)) + protocol.encode(said) for gift in range(5) for said in _SEGMENTS],
        *[bytes((gift,)) + protocol.encode(protocol.PeerInbox(0)) for gift in range(5)],
        *[bytes((_NOTHING,)) + protocol.encode(_SAID[0])] * 8,  # a few of these come whole
        bytes((_MEMORY,)) + protocol.encode(_SAID[0]),
    )

    def __init__(self) -> None:
        self._turn = self._twists = self._ended = self._declared = 0
        self._memory = Segment.create(_SEGMENT_BYTES)
        self._small = os.memfd_create("small")
        self._doors = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._gifts: dict[int, tuple[int, ...]] = {
            _MEMORY: (self._memory.fd,),
            _SMALL: (self._small,),
            _DOOR: (self._doors[0].fileno(),),
            _TWO: (self._memory.fd, self._small),
        }
        self._descriptors = len(os.listdir("/proc/self/fd"))
        self._begin()

    def _begin(self) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._service = Channel(theirs)
        self._service.send(protocol.encode(_WELCOME))
        self._session = RemoteSession(Channel(mine), 1, 2, 5.0, 5.0)
        assert self._session.peers is not None
        self._service.send(protocol.encode(protocol.GiveSegment(0, _SEGMENT_BYTES)), (self._memory.fd,))
        self._asked = self._turn
        self._read()

    def _read(self) -> None:
        session = self._session
        with session.state:
            session._asked = {1: _SPECS}
            while session._fatal is None and session._read(0):
                pass
            declared = session._declared.pop(1, [])
        self._declared += len(declared)
        for slot in (*declared, *session._slots._by_id.values()):
            self._check(slot)

    @staticmethod
    def _check(slot: Slot) -> None:
        assert [len(view) for view in slot.inputs] == [slot.spec.nbytes] * len(slot.inputs)
        assert (type(slot.id), type(slot.round)) == (int, int)
        for view in (*slot.inputs, slot.result):
            bytes(view)  # it is there

    def feed(self, data: bytes) -> None:
        self._turn += 1
        if len(data) < 2:
            return
        said = data[1:]
        if self._turn % 2:
            self._twists += 1
            said = twisted(said, self._twists, _WILD)
        self._service.send(said, self._gifts.get(data[0] % 5, ()))
        self._read()
        session = self._session
        assert isinstance(session.hosts_changed(), tuple)
        assert type(session._released) is int
        if session._fatal is not None or self._turn - self._asked > 200:
            self._ended += session._fatal is not None
            self._finish()
            self._begin()

    def _finish(self) -> None:
        self._service.close()
        self._session.close()

    def end(self) -> None:
        assert self._ended
        assert self._declared
        self._finish()
        del self._session
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= self._descriptors
        self._begin()

    def close(self) -> None:
        self._finish()
        self._memory.close()
        os.close(self._small)
        for door in self._doors:
            door.close()
