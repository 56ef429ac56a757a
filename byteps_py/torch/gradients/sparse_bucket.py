"""A sparse gradient: rows of each rank, of which every rank gets the sums.

Owns one parameter's gradient in a round. gradient_reducer.py decides which gradients are sparse. The caller holds the
lock of the GradientReducer, and calls ``advance`` until it returns False.

    start ─ GATHER (counts) ─┬ few rows: GATHER indices and values ────────────────────────────────► receive ─► p.grad
                             └ GATHER numbers of rows ─┬ few in common: GATHER values ─────────────► receive
                                                       └ EXCHANGE: to owners ─ add ─ GATHER sums ──► receive

row_owners.py says what is few. Every rank has the same counts and numbers, so all choose alike. A sum has the same bits
either way: rows are added in rank order, in float32 for 16 bits, divided, and rounded once to the parameter's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from byteps_py import rank_bits
from byteps_py.errors import MismatchError, UsageError
from byteps_py.session import Slot
from byteps_py.tensors import DType, Layout, Op, TensorSpec
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import check_count, check_dimensions, check_indices
from byteps_py.torch.collectives.nonfinite import is_finite
from byteps_py.torch.collectives.row_owners import (
    Positions,
    RowBytes,
    RowOwners,
    add_in_order,
    can_pay,
    check_numbers,
    indices_of,
    merge,
    number_dtype,
    numbered,
    table_of,
)
from byteps_py.torch.collectives.slot_view import pieces
from byteps_py.torch.gradients.bucket import Bucket, BucketParts
from byteps_py.torch.gradients.gradient_checksums import PieceChecksums, checksum_kernel
from byteps_py.torch.operations.reductions import Average, Sum

_HEADER_WORDS = 4  # rows, sparse dimensions, machine, what the table is: int64 each
_HEADER_BYTES = 8 * _HEADER_WORDS
_INDEX_BYTES = 8
_BLAME_BYTES = 8  # before the sums of an owner
_ROOM_BYTES = 4096  # the least size of a slot. Sizes are powers of two, so that slots seldom grow


@dataclass(frozen=True, slots=True)
class _Owned:
    """A round whose ranks know which rows all have touched. given: the values of this rank, as they travel."""

    owners: RowOwners
    given: torch.Tensor


class SparseBucket(Bucket):
    """The gradient of one parameter, of which each rank has some rows.

    A rank without a gradient sends no rows; a rank with a dense gradient sends all rows that are not zero. The result
    is coalesced and of the parameter's dtype: the sum in rank order, or the average.
    """

    def __init__(self, context: Context, parts: BucketParts) -> None:
        super().__init__(parts)
        (name,), options = parts.names, parts.options
        if options.op not in (Sum, Average):
            raise UsageError(
                f"the gradient of {name!r} is sparse, which op={options.op.name.title()} can't combine; use Sum or "
                "Average, or sparse_as_dense=True"
            )
        self._context = context
        #: Sparse dimensions of the gradient, as of the latest round.
        self.dimensions = 1

    def reset(self) -> None:
        """Begin a round."""
        super().reset()
        self._rows: torch.Tensor | None = None
        #: The gradient's stored values, and their checksum.
        self._stored: tuple[torch.Tensor, PieceChecksums] | None = None
        self._headers: Slot | None = None
        #: The messages under way.
        self._payload: Slot | None = None
        self._counts: list[int] = []  # of rows, of each rank
        self._machines: list[int] = []  # of each rank
        self._owned: _Owned | None = None
        #: The function that sends the next messages, and the one that makes the result of the last ones.
        self._next: Callable[[], None] | None = None
        self._result: Callable[[memoryview], torch.Tensor] | None = None
        self._blame = 0

    @property
    def round(self) -> int:
        return self._headers.round if self._headers is not None else 0

    @property
    def blame(self) -> int:
        return self._blame

    def start(self) -> None:
        """Send the number of rows."""
        (gradient,) = self.collect(sparse=True)
        shape, session = self.params[0].shape, self._context.session
        table = table_of(shape, self.request.dtype, self.params[0].dtype)
        header = np.array([0, 0, session.machine_index, table], np.int64)
        if gradient is not None:
            stored = _stored(gradient)
            if stored.is_cpu and stored.is_contiguous():
                checksum_kernel().prepare()
                self._stored = stored, PieceChecksums([stored.nbytes])
                self._stored[1].note(stored.data_ptr())
            dimensions = gradient.sparse_dim() if gradient.layout is torch.sparse_coo else 1
            rows = gradient.detach()
            rows = rows.coalesce() if rows.layout is torch.sparse_coo else rows.to_sparse(dimensions)
            self._rows = rows
            header[:2] = rows.indices().shape[1], dimensions
        self._headers = self._declare("rows", _HEADER_BYTES, self._members * _HEADER_BYTES)
        np.frombuffer(self._headers.input, np.int64)[:_HEADER_WORDS] = header
        _, layout = _gathering([_HEADER_BYTES] * self._members, _HEADER_BYTES)
        session.hand_over(self._headers, layout=layout)
        self._next = self._send_rows

    @property
    def changed(self) -> str | None:
        touched = super().changed
        if touched is None and self._stored is not None:
            before, checksum = self._stored
            grad = self.params[0].grad
            now = None if grad is None else _stored(grad)
            if now is None or now.data_ptr() != before.data_ptr() or checksum.changed(now.data_ptr()) is not None:
                return self.names[0]
        return touched

    def advance(self) -> bool:
        """See Bucket.advance."""
        step, self._next = self._next, None
        if step is None:
            return False
        step()
        return self._next is not None

    def receive(self) -> None:
        """Wait for the last messages, and deliver the sum."""
        if self._payload is None or self._result is None:
            return  # after an earlier error
        touched = self.changed
        self._context.session.wait(self._payload)
        self.refuse_change(touched)
        self.delivery.receive_rows(self, self._result(self._payload.result).to(self.params[0].device))

    # ---- messages, in their order ----------------------------------------------------------------------

    def _send_rows(self) -> None:
        """Wait for the other ranks' numbers of rows, and send this rank's rows, or which they are."""
        if self._headers is None:
            return
        self._context.session.wait(self._headers)
        members, shape = self._members, self.params[0].shape
        words = np.frombuffer(self._headers.result, np.int64)[: _HEADER_WORDS * members]
        found = words.reshape(members, _HEADER_WORDS).tolist()
        dimensions = {dims for _, dims, _, _ in found if dims}
        if len(dimensions) > 1:
            each = ", ".join(str(dims) for _, dims, _, _ in found)
            raise MismatchError(
                f"{self._what} has {each} sparse dimensions on its ranks, in order; they must be equal (0: no gradient)"
            )
        self.dimensions = dimensions.pop() if dimensions else 1
        for rank, (rows, sparse_dims, _, _) in zip(self._ranks, found, strict=True):
            check_dimensions(self._what, rank, sparse_dims, shape)
            check_count(self._what, rank, rows, self.dimensions, shape)
        self._counts = [rows for rows, _, _, _ in found]
        self._machines = [machine for _, _, machine, _ in found]
        are_equal = len({table for _, _, _, table in found}) == 1
        if are_equal and can_pay(self._counts, self._machines, self._row_bytes):
            self._send_numbers()
        else:
            self._gather_rows()

    def _gather_rows(self) -> None:
        offsets, layout = _gathering([self._nbytes(rows) for rows in self._counts], self._nbytes(self._count))
        payload = self._declare("values", room(layout.sends[0][1]), room(offsets[-1]))
        if self._rows is not None:
            indices, values = self._views(payload.input, 0, self._count)
            indices.copy_(self._rows.indices())
            values.copy_(self._predivided(self._rows.values()))
        self._hand_over(payload, layout)
        self._result = self._sum_of_rows

    def _send_numbers(self) -> None:
        dtype = number_dtype(self._table)
        lengths = [rows * dtype.itemsize for rows in self._counts]
        offsets, layout = _gathering(lengths, self._count * dtype.itemsize)
        payload = self._declare("numbers", room(self._count * dtype.itemsize), room(offsets[-1]))
        if self._rows is not None:
            (numbers,) = pieces(payload.input, dtype, [(self._count,)])
            numbers.copy_(numbered(self._rows.indices(), self._table))
        self._hand_over(payload, layout)
        self._next = self._send_values

    def _send_values(self) -> None:
        """Wait for the numbers of all rows. Send each owner what it adds, or all values to all."""
        memory = self._arrived()
        if memory is None:
            return
        found = pieces(memory, number_dtype(self._table), [(rows,) for rows in self._counts])
        touched = [numbers.numpy() for numbers in found]
        for rank, numbers in zip(self._ranks, touched, strict=True):
            check_numbers(self._what, rank, numbers, self._table)
        owners = RowOwners(touched, self._machines, self._position)
        given = torch.empty((0, *self._row_shape), dtype=self.request.dtype, device="cpu")
        if self._rows is not None:
            given = self._predivided(self._rows.values()).to("cpu", self.request.dtype)
        self._owned = _Owned(owners, given)
        if owners.pays(self._row_bytes):
            self._give_to_owners(self._owned)
        else:
            self._gather_values(self._owned)

    def _gather_values(self, owned: _Owned) -> None:
        lengths = [_padded(rows * self._row_bytes.given) for rows in self._counts]
        offsets, layout = _gathering(lengths, lengths[self._position])
        payload = self._declare("values", room(lengths[self._position]), room(offsets[-1]))
        self._piece(payload.input, 0, len(owned.given), self.request.dtype).copy_(owned.given)
        self._hand_over(payload, layout)
        self._result = self._sum_of_values

    def _give_to_owners(self, owned: _Owned) -> None:
        me, members = self._position, range(self._members)
        given = [owned.owners.given_to(p) if p != me else np.empty(0, np.int64) for p in members]
        due = [len(owned.owners.taken_from(p)) if p != me else 0 for p in members]
        sends = _places([_padded(len(positions) * self._row_bytes.given) for positions in given])
        receives = _places([_padded(rows * self._row_bytes.given) for rows in due])
        payload = self._declare("pushed", room(_end(sends)), room(_end(receives)), Op.EXCHANGE)
        for (offset, _), positions in zip(sends, given, strict=True):
            piece = self._piece(payload.input, offset, len(positions), self.request.dtype)
            torch.index_select(owned.given, 0, torch.from_numpy(positions), out=piece)
        self._hand_over(payload, Layout(sends, receives))
        self._next = self._send_sums

    def _send_sums(self) -> None:
        """Wait for the rows that this rank owns, and send their sums to all."""
        owned, memory = self._owned, self._arrived()
        if owned is None or memory is None:
            return
        owners, me, count = owned.owners, self._position, owned.owners.counts
        taken = [owners.taken_from(p) for p in range(self._members)]
        places = _places([_padded(len(rows) * self._row_bytes.given) * (p != me) for p, rows in enumerate(taken)])
        parts = [
            owned.given[torch.from_numpy(owners.given_to(me))]
            if p == me
            else self._piece(memory, offset, len(taken[p]), self.request.dtype)
            for p, (offset, _) in enumerate(places)
        ]
        sums, blame = self._finished(add_in_order(taken, [self._exact(part) for part in parts], count[me]), parts)
        lengths = [_BLAME_BYTES + _padded(rows * self._row_bytes.sum) for rows in count]
        offsets, layout = _gathering(lengths, lengths[me])
        payload = self._declare("sums", room(lengths[me]), room(offsets[-1]))
        np.frombuffer(payload.input, np.uint64, 1)[0] = blame
        self._piece(payload.input, _BLAME_BYTES, count[me], self.params[0].dtype).copy_(sums)
        self._hand_over(payload, layout)
        self._result = self._sums_of_owners

    # ---- results ---------------------------------------------------------------------------------------

    def _sum_of_rows(self, memory: memoryview) -> torch.Tensor:
        """Of all ranks' indices and values."""
        param = self.params[0]
        offsets, _ = _gathering([self._nbytes(rows) for rows in self._counts], 0)
        parts = [self._unpack(memory, at, rows) for at, rows in zip(offsets, self._counts, strict=False)]
        for rank, (indices, _) in zip(self._ranks, parts, strict=True):
            check_indices(self._what, rank, indices, param.shape)
        given = [part[1] for part in parts]
        touched = [numbered(part[0], self._table).numpy() for part in parts]
        rows, places = merge(touched)
        sums, self._blame = self._finished(
            add_in_order(places, [self._exact(part) for part in given], len(rows)), given
        )
        return self._as_rows(rows, sums)

    def _sum_of_values(self, memory: memoryview) -> torch.Tensor:
        """Of all ranks' values, of rows that are known."""
        if self._owned is None:
            raise RuntimeError(f"{self._what}: values without rows")
        owners = self._owned.owners
        offsets, _ = _gathering([_padded(rows * self._row_bytes.given) for rows in self._counts], 0)
        dtype = self.request.dtype
        given = [self._piece(memory, at, rows, dtype) for at, rows in zip(offsets, self._counts, strict=False)]
        added = add_in_order(owners.places, [self._exact(part) for part in given], len(owners.rows))
        sums, self._blame = self._finished(added, given)
        return self._as_rows(owners.rows, sums)

    def _sums_of_owners(self, memory: memoryview) -> torch.Tensor:
        if self._owned is None:
            raise RuntimeError(f"{self._what}: sums without rows")
        owners, dtype = self._owned.owners, self.params[0].dtype
        offsets, _ = _gathering([_BLAME_BYTES + _padded(rows * self._row_bytes.sum) for rows in owners.counts], 0)
        sums = []
        for offset, rows in zip(offsets, owners.counts, strict=False):
            self._blame |= int(np.frombuffer(memory, np.uint64, 1, offset)[0])
            sums.append(self._piece(memory, offset + _BLAME_BYTES, rows, dtype))
        if self._blame & ~rank_bits.OVERFLOW:  # as if one rank had added all rows
            self._blame &= ~rank_bits.OVERFLOW
        values = torch.cat(sums)[torch.from_numpy(owners.places_of_sums)]
        return self._as_rows(owners.rows, values)

    def _exact(self, values: torch.Tensor) -> torch.Tensor:
        """In the dtype in which they are added."""
        return values.to(torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else values.dtype)

    def _finished(self, sums: torch.Tensor, given: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        """(what the parameter gets, the blame). given: the rows of each rank that were added."""
        if self.options.op is Average:
            sums = (
                sums / self._members if self.options.divides else sums * self.options.after(self._context.session.size)
            )
        sums = sums.to(self.params[0].dtype)
        is_bad = bool(self.options.nonfinite) and not is_finite(sums)
        return sums, self._blame_of(given) if is_bad else 0

    def _as_rows(self, numbers: Positions, values: torch.Tensor) -> torch.Tensor:
        return torch.sparse_coo_tensor(
            indices_of(torch.from_numpy(numbers), self._table),
            values,
            self.params[0].shape,
            is_coalesced=True,
            check_invariants=False,
            device=values.device,
        )

    def _blame_of(self, given: list[torch.Tensor]) -> int:
        """The ranks whose values, in rank order, are not finite. OVERFLOW if only the sum is not finite."""
        size = self._context.session.size
        culprits = [rank for rank, values in zip(self._ranks, given, strict=True) if not is_finite(values)]
        return sum(rank_bits.of_rank(rank, size) for rank in culprits) or rank_bits.OVERFLOW

    # ---- memory ----------------------------------------------------------------------------------------

    @property
    def _what(self) -> str:
        return f"the sparse gradient of {self.names[0]!r}"

    @property
    def _ranks(self) -> Sequence[int]:
        return self.options.group or range(self._context.session.size)

    @property
    def _members(self) -> int:
        return self.options.members(self._context.session.size)

    @property
    def _position(self) -> int:
        return self._ranks.index(self._context.session.rank)

    @property
    def _count(self) -> int:
        """The number of this rank's rows."""
        return 0 if self._rows is None else self._rows.indices().shape[1]

    @property
    def _table(self) -> tuple[int, ...]:
        """The sparse dimensions."""
        return tuple(self.params[0].shape[: self.dimensions])

    @property
    def _row_bytes(self) -> RowBytes:
        elements = math.prod(self._row_shape)
        return RowBytes(elements * self.request.dtype.itemsize, elements * self.params[0].dtype.itemsize)

    @property
    def _row_shape(self) -> tuple[int, ...]:
        return tuple(self.params[0].shape[self.dimensions :])

    def _nbytes(self, rows: int) -> int:
        """The size of ``rows`` rows: indices, then values, padded to a multiple of an index."""
        return rows * self.dimensions * _INDEX_BYTES + _padded(rows * self._row_bytes.given)

    def _predivided(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.options.predivide == 1.0 else values / self.options.predivide

    def _unpack(self, memory: memoryview, offset: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        indices, values = self._views(memory, offset, rows)
        return indices.clone(), values.clone()

    def _views(self, memory: memoryview, offset: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The data at ``offset``: indices int64[dimensions, rows], values [rows, ...]."""
        (indices,) = pieces(memory[offset:], torch.int64, [(self.dimensions, rows)])
        (values,) = pieces(memory[offset + indices.nbytes :], self.request.dtype, [(rows, *self._row_shape)])
        return indices, values

    def _piece(self, memory: memoryview, offset: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """The values at ``offset``: [rows, ...]."""
        (values,) = pieces(memory[offset:], dtype, [(rows, *self._row_shape)])
        return values

    def _declare(self, what: str, room_in: int, room_out: int, op: Op = Op.GATHER) -> Slot:
        spec = self.request.spec
        name, rooms, group = f"{spec.name}.{what}", (room_in, room_out), self.options.group
        wanted = TensorSpec(name, DType.UINT8, rooms, op, priority=spec.priority, group=group)
        (slot,) = self._context.session.declare([wanted])
        return slot

    def _hand_over(self, payload: Slot, layout: Layout) -> None:
        self._context.session.hand_over(payload, layout=layout)
        self._payload = payload

    def _arrived(self) -> memoryview | None:
        """Wait for the messages under way. What ``receive`` would wait for is then what comes next."""
        payload, self._payload = self._payload, None
        if payload is None:
            return None
        self._context.session.wait(payload)
        return payload.result


def room(nbytes: int) -> int:
    """The size of a slot for ``nbytes``."""
    return max(_ROOM_BYTES, 1 << (nbytes - 1).bit_length() if nbytes else 0)


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """The values that a gradient stores, in their memory."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return tensor.detach() if tensor.layout is torch.strided else tensor.values()


def _padded(nbytes: int) -> int:
    """A multiple of an index."""
    return -(-nbytes // _INDEX_BYTES) * _INDEX_BYTES


def _places(lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(offset, length) of pieces that lie one after the other."""
    return tuple(zip(np.cumsum([0, *lengths]).tolist(), lengths, strict=False))


def _end(places: Sequence[tuple[int, int]]) -> int:
    offset, length = places[-1]
    return offset + length


def _gathering(lengths: Sequence[int], mine: int) -> tuple[list[int], Layout]:
    """(the offset of each rank's piece, and the end; the layout of a GATHER)."""
    places = _places(lengths)
    return [*(offset for offset, _ in places), _end(places)], Layout(((0, mine),), places)
