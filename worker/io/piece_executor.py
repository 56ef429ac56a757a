"""Does what the cores of gathers, exchanges and scattered reductions ask: copies here, requests and answers between
machines.

Owned by the loop's thread; copies run on the pool's threads unless they are small.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import zmq

from byteps_py.errors import BytePSError, MismatchError, ProtocolError
from byteps_py.kernels.readiness import Readiness
from byteps_py.runtime import Runtime
from byteps_py.tensors import DType, Op
from byteps_py.worker.core.agreement import Agreement
from byteps_py.worker.core.events import (
    Action,
    CopiedHere,
    DirectAction,
    Lend,
    PieceArrived,
    PieceCopied,
    PieceEvent,
    PieceRefused,
    SumTaken,
)
from byteps_py.worker.core.piece_exchange import PieceExchange
from byteps_py.worker.core.pieces import Copy, CopyHere, Delivered, FetchPiece, Outgrown, RefusePiece, Serve, Transfer
from byteps_py.worker.core.round_pipeline import RoundPipeline
from byteps_py.worker.core.scatter import Scatter
from byteps_py.worker.core.tensor import AskSum, ScatterPart
from byteps_py.worker.io.slot_memory import SlotMemory

_COPY = (Op.BROADCAST, DType.UINT8)


class Peers(Protocol):
    """The other machines' communication services."""

    def fetch(
        self, item: Transfer | AskSum, then: Callable[[zmq.Frame], None], refused: Callable[[BytePSError], None]
    ) -> None:
        """Ask for it; ``then`` gets its bytes, or ``refused`` the reason why there are none."""

    def refuse(self, origin: object, error: BytePSError) -> None:
        """Say why a request is not answered."""

    def serve(self, origin: object, view: memoryview, then: Callable[[], None] | None = None) -> None:
        """Answer a request; ``then`` is called once ``view`` may change. Nothing is sent, or called, if the
        machine that asked is gone: it asks again."""


class Cores(NamedTuple):
    """What decides, each purely, about names, reductions, gathers and exchanges, and scattered reductions."""

    agreement: Agreement
    pipeline: RoundPipeline
    direct: PieceExchange
    scatter: Scatter


class PieceExecutor:
    """``run`` carries out what follows; ``deliver(local rank, slot, round)`` tells a rank."""

    def __init__(
        self,
        runtime: Runtime,
        ready: Readiness,
        memory: SlotMemory,
        cores: Cores,
        run: Callable[[Sequence[Action | DirectAction]], None],
        deliver: Callable[[int, int, int], None],
    ) -> None:
        self.peers: Peers | None = None  # None: this machine is the only one
        self.moved_at = 0.0
        self._at_work = 0
        self._loop = runtime.loop
        self._runtime = runtime
        self._ready = ready
        self._memory = memory
        self._pipeline, self._direct, self._scatter = cores.pipeline, cores.direct, cores.scatter
        self._run = run
        self._handlers: Mapping[type, Callable[[Any], None]] = {
            CopyHere: self._copy_here,
            Copy: self._copy,
            Delivered: lambda action: deliver(action.slot.local_rank, action.slot.id, action.round),
            Outgrown: lambda action: memory.free_slot(action.slot),
            FetchPiece: self._fetch,
            Lend: self._lend,
            RefusePiece: self._refuse,
            Serve: self._serve,
        }

    def idle_s(self, now: float) -> float:
        """For how long no copy was made and nothing came."""
        return 0.0 if self._at_work else now - self.moved_at

    def carry_out(self, action: Lend | DirectAction) -> None:
        """Anything but a Fail and a Show."""
        self._handlers[type(action)](action)

    def _copy_here(self, action: CopyHere) -> None:
        for _, _, source, place, nbytes in action.pairs:
            self._runtime.move(place, source, nbytes)
        self.moved_at = self._loop.time()
        self._handle(CopiedHere(action.pairs))

    def _fetch(self, action: FetchPiece) -> None:
        item = action.item
        self._peers.fetch(item, functools.partial(self._arrived, item), functools.partial(self._refused, item))

    @property
    def _peers(self) -> Peers:
        if self.peers is None:
            raise ProtocolError("a job of one machine has no other to fetch from")
        return self.peers

    def _copy(self, copy: Copy, frame: zmq.Frame | None = None) -> None:
        """``frame``: keeps the memory it reads."""
        transfer = copy.transfer
        work = functools.partial(self._runtime.kernels.reduce, *_COPY, (copy.source,), copy.outputs, transfer.length)
        self._at_work += 1
        if transfer.length * len(copy.outputs) <= self._runtime.thresholds.inline_copy:
            work()
            self._copied(transfer, frame, None)
        else:
            self._ready.submit(
                _COPY,
                transfer.channel.spec.priority,
                work,
                lambda error: self._loop.post(lambda: self._copied(transfer, frame, error)),
            )

    def _copied(self, transfer: Transfer, frame: zmq.Frame | None, error: BaseException | None) -> None:
        if error is not None:
            raise error
        self._at_work -= 1
        self.moved_at = self._loop.time()
        self._handle(PieceCopied(transfer))

    def _arrived(self, item: Transfer | AskSum, frame: zmq.Frame) -> None:
        if len(frame) != item.length:
            name = item.part.tensor.name if isinstance(item, AskSum) else item.channel.spec.name
            raise ProtocolError(f"tensor {name!r}: a piece of {len(frame)} bytes came, {item.length} were due")
        self.moved_at = self._loop.time()
        source = ctypes.addressof(ctypes.c_char.from_buffer(frame.buffer)) if len(frame) else 0
        if isinstance(item, AskSum):
            item.part.frames.append(frame)
            self._run(self._scatter.arrived(item, source, self.moved_at))
            return
        actions = self._direct.handle(PieceArrived(item, source), self.moved_at)
        if actions and isinstance(copy := actions[0], Copy):
            self._copy(copy, frame)
            del actions[0]
        self._run(actions)

    def _refused(self, item: Transfer | AskSum, error: BytePSError) -> None:
        """Raises what is no disagreement of ranks: it ends the job."""
        if isinstance(item, AskSum) or not isinstance(error, MismatchError):
            raise error
        self.moved_at = self._loop.time()
        self._handle(PieceRefused(item, error))

    def _refuse(self, action: RefusePiece) -> None:
        self._peers.refuse(action.request.origin, action.error)

    def _serve(self, serve: Serve) -> None:
        rank, length = serve.member.slot.local_rank, serve.request.length
        view = self._memory.view_of(rank, serve.block, serve.offset, length)
        self._peers.serve(serve.request.origin, view)

    def _lend(self, lend: Lend) -> None:
        part = lend.part
        block = part.tensor.given(lend.request.round)
        if block is None:
            raise ProtocolError(f"tensor {part.tensor.name!r}: this machine gave nothing to round {lend.request.round}")
        view = self._memory.view(block, part.offset, part.length)
        self._peers.serve(lend.request.origin, view, lambda: self._lent(part, lend.request.round))

    def _lent(self, part: ScatterPart, round_: int) -> None:
        self._run(self._pipeline.handle(SumTaken(part, round_), self._loop.time()))

    def _handle(self, event: PieceEvent) -> None:
        self._run(self._direct.handle(event, self.moved_at))
