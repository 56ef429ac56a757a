"""What other machines ask of a communication service, and what ranks of one machine say to each other."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, cast

from support.worker_core import block, slot as make_slot

from byteps_py.dataplane.listener import RemotePeer
from byteps_py.errors import ProtocolError
from byteps_py.session.peers import peer_protocol
from byteps_py.tensors import DType, Layout, Op, TensorSpec, key_of
from byteps_py.wire.data_link import HEADER_BYTES, Fetch, Header, Kind
from byteps_py.worker.core.credit import PushQueue
from byteps_py.worker.core.events import (
    Action,
    DirectAction,
    Lend,
    MachineLost,
    PiecesDeclared,
    PiecesReady,
    TensorAgreed,
)
from byteps_py.worker.core.piece_exchange import PieceExchange
from byteps_py.worker.core.pieces import ALL, MAX_EARLY, Receipt, RefusePiece, Serve, Transfer
from byteps_py.worker.core.round_pipeline import RoundPipeline
from byteps_py.worker.core.scatter import Scatter, pieces
from byteps_py.worker.core.tensor import AskSum, ScatterPart, SumRequest, Tensor
from byteps_py.worker.io.peers import events_of

from .base import Target

_MACHINE_OF = [0, 0, 1, 2]  # by rank; the one that is asked is the first
_SENT = 24  # bytes of each piece of the gather and the exchange


class _Origin:
    """Stands for the connection of machine 1 or 2."""

    def __init__(self, machine: int) -> None:
        self.machine = machine


def _fetches() -> list[bytes]:
    gather, exchange = key_of("gather"), key_of("exchange")
    found = [
        Header(Kind.FETCH, machine, 1, key=key, index=4, round=round_, offset=8 * i, length=8).pack()
        + Fetch(source, target, _SENT, is_tentative=i == 2).pack()
        for machine in (1, 2)
        for key, target in ((gather, ALL), (exchange, 2), (exchange, 3))
        for source, round_, i in itertools.product((0, 1), (1, 2), range(3))
    ]
    found += [
        Header(Kind.TAKEN, machine, 1, key=gather, index=4, round=round_).pack() + Fetch(0, ALL, 0, taken=round_).pack()
        for machine, round_ in itertools.product((1, 2), (1, 2))
    ]
    found += [
        Header(Kind.FETCH_SUM, machine, 1, key=key_of("sum"), generation=1, offset=index, round=round_, length=8).pack()
        for machine, index, round_ in itertools.product((1, 2), range(6), (1, 2))
    ]
    return found


class Requests(Target):
    """Members ask for what they like: they get what a rank has given to that round for them, or are refused."""

    seeds = tuple(_fetches())

    def __init__(self) -> None:
        self._turn = 0
        self._begin()

    def _begin(self) -> None:
        queue = PushQueue[Transfer | AskSum](0)
        self._direct = PieceExchange(0, _MACHINE_OF, 8, 8, queue, 1 << 18)
        self._scatter = Scatter(0, _MACHINE_OF, queue)
        size = len(_MACHINE_OF)
        self._slots = []
        for op, local_rank in itertools.product((Op.GATHER, Op.EXCHANGE), (0, 1)):
            slot = make_slot(local_rank, TensorSpec(op.name.lower(), DType.UINT8, (4096, 4096), op))
            self._direct.handle(PiecesDeclared(local_rank, slot), 0.0)
            self._slots.append(slot)
        spec = TensorSpec("sum", DType.FLOAT32, (4, 3), scatters=True)
        slots = tuple(make_slot(local_rank, spec) for local_rank in (0, 1))
        self._tensor = Tensor("sum", 1, spec, slots, (block(100_000), block(200_000)), machines=3)
        for each in slots:
            each.tensor = self._tensor
        self._pipeline = RoundPipeline(size, PushQueue(0), self._scatter)
        self._pipeline.handle(TensorAgreed(self._tensor, pieces(spec, size, limit=8)), 0.0)
        self._round = 0

    def _go_on(self) -> None:
        """The ranks come to a round, if the one before is over."""
        receives = tuple((i * _SENT, _SENT) for i in range(len(_MACHINE_OF)))
        for slot in self._slots:
            if slot.ready_bytes < 0:
                sends = receives if slot.spec.op is Op.EXCHANGE else ((0, _SENT),)
                self._check(self._direct.handle(PiecesReady(slot, slot.round + 1, Layout(sends, receives)), 0.0))

    def feed(self, data: bytes) -> None:
        self._turn += 1
        try:
            header = Header.unpack(data[:HEADER_BYTES])
            if header.kind not in (Kind.FETCH, Kind.FETCH_SUM, Kind.TAKEN):
                return
            peer = cast(RemotePeer, _Origin(header.sender % 2 + 1))
            events = events_of(header, peer, data[HEADER_BYTES:])
        except ProtocolError:
            return
        for event in events:
            with contextlib.suppress(ProtocolError):
                if isinstance(event, SumRequest):
                    self._check_lent(self._scatter.requested(event), event)
                elif isinstance(event, Receipt):
                    self._check(self._direct.handle(event, 0.0))
                else:
                    self._check(self._direct.handle(event, 0.0))
        if self._turn % 64 == 0:
            self._go_on()
        if self._turn % 256 == 0:
            self._direct.handle(MachineLost(1 + self._turn // 256 % 2), 0.0)
        if self._turn % 5000 == 0:
            self._begin()

    def _check(self, actions: list[DirectAction]) -> None:
        for action in actions:
            if isinstance(action, Serve):
                request = action.request
                assert 0 <= request.offset <= request.offset + request.length <= _SENT
                assert request.total == _SENT
                assert action.member.offers[request.round].block is action.block
            elif isinstance(action, RefusePiece):
                str(action.error).encode()

    def _check_lent(self, actions: list[Action], request: SumRequest) -> None:
        for action in actions:
            assert isinstance(action, Lend)
            assert isinstance(action.part, ScatterPart)
            assert _MACHINE_OF[action.part.owner] == request.machine
            assert request.round in (self._tensor.round, self._tensor.round - 1)

    def end(self) -> None:
        kept: Any = [*self._direct._early.values(), *(c.requests for c in self._direct._channels.values())]
        assert sum(map(len, kept)) <= 3 * MAX_EARLY


class Nearby(Target):
    """A message from another rank of the machine."""

    seeds = (
        peer_protocol.pack(peer_protocol.PeerMessageKind.INLINE, 1, 0, 0, 7, 1, 5, 5, 3, 0, -1) + b"bytes",
        peer_protocol.pack(peer_protocol.PeerMessageKind.SHARED, 1, 0, 2, 7, 1, 4096, 64, 3, 128, 9),
        peer_protocol.pack(peer_protocol.PeerMessageKind.SEGMENT, 1, 0, 2, 0, 0, 1 << 20, 0, 0, 0, -1),
    )

    def feed(self, data: bytes) -> None:
        with contextlib.suppress(ProtocolError):
            message = peer_protocol.unpack(memoryview(data), len(data))
            assert message.ready <= message.total
            assert message.kind in set(peer_protocol.PeerMessageKind)
