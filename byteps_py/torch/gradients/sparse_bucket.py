"""A sparse gradient: every rank gathers the rows of all ranks and adds rows with equal indices.

Owns one parameter's gradient in a round. gradient_reducer.py decides which gradients are sparse. The caller holds the
lock of the GradientReducer.

    start ─ GATHER (rows, dimensions) ─► send_values ─ GATHER indices and values ─► receive ─► p.grad
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from byteps_py import rank_bits
from byteps_py.errors import MismatchError, UsageError
from byteps_py.session import Slot
from byteps_py.tensors import DType, Layout, Op, TensorSpec
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import check_count, check_dimensions, check_indices
from byteps_py.torch.collectives.nonfinite import is_finite
from byteps_py.torch.collectives.slot_view import TensorRequest, pieces
from byteps_py.torch.gradients.bucket import Bucket, Delivery, GradientOptions
from byteps_py.torch.gradients.gradient_checksums import PieceChecksums, Scratch, checksum_kernel
from byteps_py.torch.operations.reductions import Average, Sum

_HEADER_BYTES = 16  # rows and sparse dimensions, int64 each
_INDEX_BYTES = 8
_ROOM_BYTES = 4096  # the least size of a slot. Sizes are powers of two, so that slots seldom grow


class SparseBucket(Bucket):
    """The gradient of one parameter, of which each rank has some rows.

    A rank without a gradient sends no rows; a rank with a dense gradient sends all rows that are not zero. The result
    is coalesced and of the parameter's dtype: the sum in rank order, or the average.
    """

    def __init__(
        self,
        context: Context,
        request: TensorRequest,
        name: str,
        param: torch.nn.Parameter,
        options: GradientOptions,
        first: int,
        delivery: Delivery,
    ) -> None:
        super().__init__(request, [name], [param], options, first, Scratch(), delivery)
        if options.op not in (Sum, Average):
            raise UsageError(
                f"the gradient of {name!r} is sparse, which op={options.op.name.title()} can't combine; use Sum or "
                "Average, or sparse_as_dense=True"
            )
        self._context = context
        self._pieces: list[tuple[int, int]] = []  # (offset, rows) of each rank
        #: Sparse dimensions of the gradient, as of the latest round.
        self.dimensions = 1

    def reset(self) -> None:
        """Begin a round."""
        super().reset()
        self._rows: torch.Tensor | None = None
        #: The gradient's stored values, and their checksum.
        self._stored: tuple[torch.Tensor, PieceChecksums] | None = None
        self._headers: Slot | None = None
        self._payload: Slot | None = None
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
        header = np.zeros(2, np.int64)
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
            header[:] = rows.indices().shape[1], dimensions
        members = self._members
        self._headers = self._declare("rows", _HEADER_BYTES, members * _HEADER_BYTES)
        np.frombuffer(self._headers.input, np.int64)[:2] = header
        receives = tuple((i * _HEADER_BYTES, _HEADER_BYTES) for i in range(members))
        self._context.session.hand_over(self._headers, layout=Layout(((0, _HEADER_BYTES),), receives))

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

    def send_values(self) -> None:
        """Wait for the other ranks' numbers of rows, and send this rank's rows."""
        if self._headers is None:
            return
        session = self._context.session
        session.wait(self._headers)
        members = self._members
        found = np.frombuffer(self._headers.result, np.int64)[: 2 * members].reshape(members, 2).tolist()
        dimensions = {dims for _, dims in found if dims}
        if len(dimensions) > 1:
            each = ", ".join(str(dims) for _, dims in found)
            raise MismatchError(
                f"{self._what} has {each} sparse dimensions on its ranks, in order; they must be equal (0: no gradient)"
            )
        self.dimensions = dimensions.pop() if dimensions else 1
        shape = self.params[0].shape
        for rank, (rows, sparse_dims) in zip(self._ranks, found, strict=True):
            check_dimensions(self._what, rank, sparse_dims, shape)
            check_count(self._what, rank, rows, self.dimensions, shape)
        lengths = [self._nbytes(rows) for rows, _ in found]
        offsets = np.cumsum([0, *lengths]).tolist()
        self._pieces = [(offset, rows) for offset, (rows, _) in zip(offsets, found, strict=False)]
        mine = self._nbytes(0 if self._rows is None else self._rows.indices().shape[1])
        payload = self._declare("values", room(mine), room(offsets[-1]))
        if self._rows is not None:
            self._pack(payload.input, self._rows)
        session.hand_over(payload, layout=Layout(((0, mine),), tuple(zip(offsets, lengths, strict=False))))
        self._payload = payload

    def receive(self) -> None:
        """Wait for all rows, and deliver their sum."""
        if self._payload is None:
            return  # after an earlier error
        touched = self.changed
        self._context.session.wait(self._payload)
        self.refuse_change(touched)
        param = self.params[0]
        parts = [self._unpack(self._payload.result, offset, rows) for offset, rows in self._pieces]
        for rank, (indices, _) in zip(self._ranks, parts, strict=True):
            check_indices(self._what, rank, indices, param.shape)
        values = torch.cat([part[1] for part in parts])
        exact = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else values.dtype
        gathered = torch.sparse_coo_tensor(
            torch.cat([part[0] for part in parts], 1),
            values.to(exact),
            param.shape,
            check_invariants=False,
            device=values.device,
        ).coalesce()
        values = gathered.values()
        if self.options.op is Average:
            values = (
                values / self._members
                if self.options.divides
                else values * self.options.after(self._context.session.size)
            )
        values = values.to(param.dtype)
        if self.options.nonfinite and not is_finite(values):
            self._blame = self._blame_of([part[1] for part in parts])
        rows = torch.sparse_coo_tensor(
            gathered.indices(), values, param.shape, is_coalesced=True, check_invariants=False, device=values.device
        )
        self.delivery.receive_rows(self, rows.to(param.device))

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
    def _row_shape(self) -> tuple[int, ...]:
        return tuple(self.params[0].shape[self.dimensions :])

    def _nbytes(self, rows: int) -> int:
        """The size of ``rows`` rows: indices, then values, padded to a multiple of an index."""
        values = rows * math.prod(self._row_shape) * self.request.dtype.itemsize
        return rows * self.dimensions * _INDEX_BYTES + -(-values // _INDEX_BYTES) * _INDEX_BYTES

    def _pack(self, memory: memoryview, rows: torch.Tensor) -> None:
        indices, values = self._views(memory, 0, rows.indices().shape[1])
        indices.copy_(rows.indices())
        values.copy_(rows.values() if self.options.predivide == 1.0 else rows.values() / self.options.predivide)

    def _unpack(self, memory: memoryview, offset: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        indices, values = self._views(memory, offset, rows)
        return indices.clone(), values.clone()

    def _views(self, memory: memoryview, offset: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The data at ``offset``: indices int64[dimensions, rows], values [rows, ...]."""
        (indices,) = pieces(memory[offset:], torch.int64, [(self.dimensions, rows)])
        (values,) = pieces(memory[offset + indices.nbytes :], self.request.dtype, [(rows, *self._row_shape)])
        return indices, values

    def _declare(self, what: str, room_in: int, room_out: int) -> Slot:
        spec = self.request.spec
        name, rooms, group = f"{spec.name}.{what}", (room_in, room_out), self.options.group
        wanted = TensorSpec(name, DType.UINT8, rooms, Op.GATHER, priority=spec.priority, group=group)
        (slot,) = self._context.session.declare([wanted])
        return slot


def room(nbytes: int) -> int:
    """The size of a slot for ``nbytes``."""
    return max(_ROOM_BYTES, 1 << (nbytes - 1).bit_length() if nbytes else 0)


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """The values that a gradient stores, in their memory."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return tensor.detach() if tensor.layout is torch.strided else tensor.values()
