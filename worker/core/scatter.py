"""Scattered reductions among machines: each piece is summed where it is needed. Pure; time is an argument.

    this machine's sum of a part is ready
      ├─ its owner is a rank of another machine:  lent to that machine, when it asks
      └─ its owner is here:  Ask every other machine for its sum ─► Compute, in machine order, to the owner's result

So a machine sends and receives (n-1)/n of the tensor, the least there can be, and no server is on the way. A round is
over for a machine once its own pieces are delivered and the others have taken theirs: they may change then.

With a codec a machine codes its sum of each piece by itself, also of its own ranks' pieces, and lends the code. The
owner's machine adds what the codes decode to. That goes to no other machine, so it is not coded again: there is no
answer of which a machine would have to know what it lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from byteps_py.errors import ProtocolError
from byteps_py.tensor_codec import Codec
from byteps_py.tensors import TensorSpec, split
from byteps_py.wire.chunks import CHUNK_BYTES, TensorChunks
from byteps_py.worker.core.credit import PushQueue
from byteps_py.worker.core.events import Action, Lend
from byteps_py.worker.core.pieces import Transfer, due
from byteps_py.worker.core.tensor import (
    DELIVERING,
    DONE,
    IN_FLIGHT,
    AskSum,
    Compute,
    ScatterPart,
    SumRequest,
    Tensor,
    TensorState,
)

#: Requests for tensors that are not agreed here yet; more can't come from correct machines.
MAX_EARLY = 1 << 16


def pieces(
    spec: TensorSpec, size: int, limit: int, chunk_bytes: int = CHUNK_BYTES, codec: Codec | None = None
) -> list[tuple[int, int, int]]:
    """(offset, length, owner's global rank) of the parts of a tensor, none longer than ``limit`` bytes, in the order in
    which ranks write them. With a codec, of what machines send; a part has one block at least.

    >>> from byteps_py.tensors import DType
    >>> pieces(TensorSpec("g", DType.FLOAT32, (5, 2), scatters=True), size=2, limit=16)
    [(0, 12, 0), (12, 12, 0), (24, 16, 1)]
    """
    members = spec.members(size)
    unit = spec.dtype.itemsize if codec is None else codec.item_bytes
    chunks = TensorChunks(spec, size, chunk_bytes)
    found = []
    for position, rank in enumerate(members):
        first, nbytes = spec.sent_piece(position, len(members), codec)
        for offset, length in split(nbytes, max(limit, unit), unit):
            end = dense_end(spec, position, len(members), codec, offset + length)
            found.append((chunks.written(position, end), (first + offset, length, rank)))
    return [piece for _, piece in sorted(found)]


def dense_end(spec: TensorSpec, position: int, members: int, codec: Codec | None, nbytes: int) -> int:
    """How many bytes of a rank's piece the first ``nbytes`` that machines send of it stand for."""
    if codec is None:
        return nbytes
    _, count = spec.piece(position, members)
    return min(nbytes // codec.item_bytes * codec.block, count) * spec.dtype.itemsize


@dataclass(slots=True)
class _ScatteredKey:
    """One key, by generation: its tensors, live or lent, and requests that came before their generation was agreed."""

    latest: int = 0  # generation that is agreed
    tensors: dict[int, Tensor] = field(default_factory=dict)
    early: dict[int, list[SumRequest]] = field(default_factory=dict)


class Scatter:
    """``machine``: the index of this one; ``machine_of``: of each rank."""

    def __init__(
        self,
        machine: int,
        machine_of: Sequence[int],
        queue: PushQueue[Transfer | AskSum],
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._machine = machine
        self._machine_of = machine_of
        self._queue = queue
        self._keys: dict[int, _ScatteredKey] = {}
        self._early_count = 0  # requests for what is not agreed yet

    def divisor(self, spec: TensorSpec) -> int:
        """By what its sums are divided."""
        return spec.divisor(len(self._machine_of))

    def start(self, tensor: Tensor) -> None:
        """A tensor is agreed, and has its parts."""
        key = self._keys.setdefault(tensor.key, _ScatteredKey())
        key.tensors[tensor.generation] = tensor
        key.latest = tensor.generation
        spec, codec = tensor.spec, tensor.codec
        ranks = spec.members(len(self._machine_of))
        chunks = TensorChunks(spec, len(self._machine_of), self._chunk_bytes)
        for part in tensor.parts:
            if isinstance(part, ScatterPart):
                position = ranks.index(part.owner)
                first = part.offset - spec.sent_piece(position, len(ranks), codec)[0]
                begin, end = (
                    dense_end(spec, position, len(ranks), codec, nbytes) for nbytes in (first, first + part.length)
                )
                part.piece_offset, _ = spec.sent_piece(position, len(ranks), None)
                part.dense_offset, part.dense_length = part.piece_offset + begin, end - begin
                part.written_bytes = chunks.written(position, end)
        early = key.early.pop(tensor.generation, [])
        self._early_count -= len(early)
        for request in early:
            self._keep(self._part(tensor, request), request)

    def retire(self, tensor: Tensor) -> None:
        """It is void. What was given to its last round is lent until ``forget``, if it is kept."""
        asks = {ask for part in tensor.parts if isinstance(part, ScatterPart) for ask in part.asks}
        self._queue.drop(set(asks))
        for ask in asks:
            self._queue.give_back(ask)
        if tensor.state is not TensorState.KEPT:
            self.forget(tensor)

    def forget(self, tensor: Tensor) -> None:
        """No other machine can lack what was given here."""
        if key := self._keys.get(tensor.key):
            key.tensors.pop(tensor.generation, None)

    def offer(self, part: ScatterPart, now: float) -> list[Action]:
        """This machine's sum of a part is there."""
        tensor = part.tensor
        if self._machine_of[part.owner] != self._machine:
            part.move_to(IN_FLIGHT)
            request = part.request
            if request is None or request.round != tensor.round:
                return []
            part.request = None
            return [Lend(part, request)]
        part.move_to(IN_FLIGHT)
        part.sums = {self._machine: tensor.contribution.address + part.offset}
        ranks = tensor.spec.members(len(self._machine_of))
        others = {self._machine_of[rank] for rank in ranks} - {self._machine}
        part.missing = set(others)
        count = max(self._machine_of) + 1
        part.asks = [
            AskSum(part, tensor.round, machine, part.length)
            for machine in sorted(others, key=lambda m: (m - self._machine) % count)  # all begin with another one
        ]
        for ask in part.asks:
            self._queue.add(ask, tensor.spec.priority)
        return [*due(self._queue, now)]

    def requested(self, request: SumRequest) -> list[Action]:
        """Another machine wants this one's sum of a part. Raises ProtocolError for what no correct machine asks."""
        key = self._keys.get(request.key)
        tensor = key.tensors.get(request.generation) if key is not None else None
        if tensor is None:
            if request.generation <= (key.latest if key is not None else 0):
                return []  # void meanwhile
            if self._early_count >= MAX_EARLY:
                raise ProtocolError(f"machine {request.machine} asks for too much that is not agreed here")
            early = self._keys.setdefault(request.key, _ScatteredKey()).early
            early.setdefault(request.generation, []).append(request)
            self._early_count += 1
            return []
        part = self._part(tensor, request)
        # What was lent may have been lost with a connection, and lies there until the next round is over.
        if request.round == tensor.round - 1:
            return [Lend(part, request)]
        if tensor.state.is_void:
            return []  # no rank gets a result of this round
        if request.round == tensor.round and (part.stage is IN_FLIGHT or part.stage is DONE):
            return [Lend(part, request)]
        self._keep(part, request)
        return []

    def _part(self, tensor: Tensor, request: SumRequest) -> ScatterPart:
        part = tensor.parts[request.index] if request.index < len(tensor.parts) else None
        if not isinstance(part, ScatterPart) or self._machine_of[part.owner] != request.machine:
            raise ProtocolError(f"tensor {tensor.name!r}: machine {request.machine} asks for part {request.index}")
        return part

    @staticmethod
    def _keep(part: ScatterPart, request: SumRequest) -> None:
        """Until the sum is there. On a connection that is gone may have been an older request."""
        if part.request is None or request.round >= part.request.round:
            part.request = request

    def arrived(self, ask: AskSum, address: int, now: float) -> list[Action]:
        """Another machine's sum lies at ``address``, until ``RoundPipeline.computed``."""
        part = ask.part
        tensor = part.tensor
        if tensor.state.is_void or ask.round != tensor.round or ask.server not in part.missing:
            return []
        self._queue.give_back(ask)
        part.missing.discard(ask.server)
        part.sums[ask.server] = address
        actions: list[Action] = [*due(self._queue, now)]
        if part.missing:
            return actions
        part.move_to(DELIVERING)
        part.asks = []
        tensor.running += 1
        inputs = tuple(part.sums[machine] for machine in sorted(part.sums))
        divisor = self.divisor(tensor.spec)
        return [*actions, Compute(part, tensor.spec.op, inputs, part.outputs, divisor)]
