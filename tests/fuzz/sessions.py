"""What a communication service says to a rank of its machine."""

from __future__ import annotations

import gc
import os
import socket
from typing import Any

from byteps_py import rank_protocol as protocol
from byteps_py.channel import Channel
from byteps_py.errors import ProtocolError
from byteps_py.rank_protocol import RankMessageKind
from byteps_py.session.base import Slot
from byteps_py.session.service.remote import RemoteSession
from byteps_py.shm import Segment
from byteps_py.tensors import DType, TensorSpec

from .base import Target

_SPECS = (TensorSpec("sum", DType.FLOAT32, (3, 4)), TensorSpec("other", DType.FLOAT64, (9,)))
_SEGMENT_BYTES = 1 << 16
_WELCOME = protocol.pack(
    RankMessageKind.WELCOME, rank=1, size=4, local_rank=1, local_size=2, is_continued=False, since_epoch=1,
    machine_index=0, num_machines=2, is_homogeneous=True, has_shadow_servers=True,
)  # fmt: skip
_NOTHING, _MEMORY, _SMALL, _DOOR, _TWO = range(5)
#: Of any field: what JSON can say, and nobody means.
_WILD = (None, True, -1, 0, 1, 1 << 40, 1 << 63, 1 << 80, 0.5, float("nan"), "", "0", [], [0], [[0]], {}, {"0": 1})


def _place(number: int, offset: int, nbytes: int = 48, at: int = 0) -> dict[str, object]:
    return {"id": number, "inputs": [[at, 0], [at, 4096]], "result": [at, offset], "nbytes": nbytes, "round": 2}


def _declared(*places: dict[str, object]) -> bytes:
    return protocol.pack(RankMessageKind.DECLARED, request=1, slots=places)


_SAID = (
    _declared(_place(1, 128), _place(2, 8192, 72)),
    _declared(_place(3, _SEGMENT_BYTES - 8), _place(4, 0)),
    _declared(_place(3, -8), _place(4, 0)),
    _declared(_place(3, 0, at=7), _place(4, 0)),
    _declared(_place(5, 0)),
    protocol.pack_record(RankMessageKind.DONE, 1, 3, 0),
    protocol.pack_records(RankMessageKind.DONE, [(1, 3, 0), (2, 3, 7)]),
    protocol.pack_records(RankMessageKind.CHUNK, [(1, 3, 0), (1, 3, 1)]),
    _WELCOME,
    protocol.pack(RankMessageKind.RELEASED, sequence=1),
    protocol.pack(RankMessageKind.JOINED, last=1),
    protocol.pack(RankMessageKind.HOSTS, added=True, removed=False),
    protocol.pack(RankMessageKind.FAILED, slots=[1], error="MismatchError", message="they differ"),
    protocol.pack(RankMessageKind.FATAL, error="PeerLostError", message="a rank died"),
    protocol.pack(RankMessageKind.PONG),
    protocol.pack(RankMessageKind.SETTLED),
    protocol.pack(RankMessageKind.INTRODUCED, key=77),
    protocol.pack(RankMessageKind.PING),
)
_SEGMENTS = [
    protocol.pack(RankMessageKind.SEGMENT, id=1, nbytes=nbytes) for nbytes in (4096, _SEGMENT_BYTES, 1 << 61, -1)
]


class Sessions(Target):
    """What comes is taken, or ends the session by an error of ours; a slot's memory is all there; descriptors that
    nobody wants are closed."""

    cost = 10
    seeds = (
        *[bytes((_NOTHING,)) + said for said in _SAID * 2],
        *[bytes((gift,)) + said for gift in range(5) for said in _SEGMENTS],
        *[bytes((gift,)) + protocol.pack(RankMessageKind.PEER, local_rank=0) for gift in range(5)],
        *[bytes((_NOTHING,)) + _SAID[0]] * 8,  # a few of these come whole
        bytes((_MEMORY,)) + _SAID[0],
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
        self._service.send(_WELCOME)
        self._session = RemoteSession(Channel(mine), 1, 2, 5.0, 5.0)
        assert self._session.peers is not None
        self._service.send(protocol.pack(RankMessageKind.SEGMENT, id=0, nbytes=_SEGMENT_BYTES), (self._memory.fd,))
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
            said = self._twisted(said)
        self._service.send(said, self._gifts.get(data[0] % 5, ()))
        self._read()
        session = self._session
        assert isinstance(session.hosts_changed(), tuple)
        assert type(session._released) is int
        if session._fatal is not None or self._turn - self._asked > 200:
            self._ended += session._fatal is not None
            self._finish()
            self._begin()

    def _twisted(self, said: bytes) -> bytes:
        """The same with something else in one field, or in one of the first slot."""
        try:
            kind, fields = protocol.kind_of(said), protocol.fields_of(said)
            inside: Any = fields["slots"][0] if kind is RankMessageKind.DECLARED and self._twists % 4 else fields
            keys = sorted(inside)
            inside[keys[self._twists % len(keys)]] = _WILD[self._twists // len(keys) % len(_WILD)]
            return protocol.pack(kind, **fields)
        except (ProtocolError, TypeError, LookupError, ZeroDivisionError):  # it has none
            return said

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
