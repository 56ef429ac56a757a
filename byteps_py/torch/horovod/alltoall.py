"""alltoall: each rank splits its tensor along the first dimension and sends one piece to each rank.

Names and arguments as in Horovod. Any thread. Tensors are dense, on cpu or cuda, of any dtype but quantized ones, of 1
to 13 dimensions. Ranks may differ in the first dimension. A tensor must not change before the operation is
synchronized.

Bytes per machine: the headers (see the package's docstring). Then each piece travels once, from its rank's machine to
the machine of the rank that it is for.

All functions raise NotInitializedError outside init() … shutdown() and UsageError (a ValueError) for misuse. Waiting
for the result raises MismatchError, StallError or PeerLostError (each a HorovodInternalError).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from byteps_py.errors import UsageError
from byteps_py.tensors import Layout, Op
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import check_dense
from byteps_py.torch.collectives.slot_view import SlotView
from byteps_py.torch.collectives.work import Attempt, NamedWork
from byteps_py.torch.horovod import size_headers
from byteps_py.torch.horovod.api import result_of
from byteps_py.torch.horovod.operation_names import kind_in_group, named_work, start_when_name_is_free
from byteps_py.torch.horovod.process_sets import ProcessSet, global_process_set, group_of
from byteps_py.torch.horovod.two_rounds import TwoRoundOperation

Splits = torch.Tensor | Sequence[int] | None


# ---- public functions --------------------------------------------------------------------------------------


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to send each rank its rows of ``tensor``. ``synchronize(handle)`` returns (received rows, received_splits).

    splits: the number of rows for each rank, in rank order: a list or an int32 tensor; by default all ranks get equally
    many. Rows beyond the sum of the splits are not sent. received_splits: int32, the number of rows from each rank.
    """
    return start_alltoall(contexts.current(), tensor, splits, name, group_of(process_set))


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The rows that all ranks send to this one, in rank order. With ``splits``: (rows, received_splits).

    tensor: dense, on cpu or cuda, of any dtype but quantized ones, of 1 to 13 dimensions. Ranks may differ in the first
    dimension; the other dimensions and the dtype are the same on all ranks. splits: see alltoall_async.
    Differentiable: a gradient goes back to the rank that sent the row.
    Any thread may call it. Raises NotInitializedError, UsageError (a ValueError), and MismatchError, StallError or
    PeerLostError (each a HorovodInternalError).

    >>> import torch, byteps_py as hvd
    >>> hvd.init()
    >>> hvd.alltoall(torch.tensor([1, 2, 3]), splits=[2])  # a job of one rank
    (tensor([1, 2]), tensor([2], dtype=torch.int32))
    >>> hvd.shutdown()
    """
    return _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet) -> Any:
        context = contexts.current()
        handle = start_alltoall(context, tensor, splits, name, group_of(process_set), background=False)
        output, received = result_of(handle)
        ctx.arguments = context, received.tolist(), name, process_set, tensor.shape[:1]
        if splits is None:
            return output
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        context, received, name, process_set, (rows,) = ctx.arguments
        grad_name = None if name is None else f"{name}.grad"
        with contexts.use(context):  # autograd may run this on a thread of its own
            handle = start_alltoall(context, grads[0], received, grad_name, group_of(process_set), background=False)
            gradient, _ = result_of(handle)
        if gradient.shape[0] < rows:  # rows that were sent to no rank
            zeros = gradient.new_zeros((rows - gradient.shape[0], *gradient.shape[1:]))
            gradient = torch.cat([gradient, zeros])
        return gradient, None, None, None


# ---- the operation ------------------------------------------------------------------------------------------


def start_alltoall(
    context: Context,
    tensor: torch.Tensor,
    splits: Splits,
    name: str | None,
    group: tuple[int, ...],
    background: bool = True,
) -> int:
    """Begin the exchange. Returns a handle, whose result is (tensor, received splits). Raises UsageError.

    background: whether a thread of the pool sends the data; False if the caller waits at once and sends them itself.
    """
    check_dense(tensor, name)
    found = tensor.detach()
    members = len(group) or context.session.size
    size_headers.header("alltoall", found, name)  # raises UsageError
    rows = rows_to_send(found.shape[0], splits, members)
    device = splits.device if isinstance(splits, torch.Tensor) else torch.device("cpu")
    kind = kind_in_group(group, "alltoall")
    full_name = context.names.in_turn(kind) if name is None else f"{kind}.{name}"

    def begin() -> NamedWork:
        exchange = AlltoallOperation(context, full_name, found, rows, group, device)
        if background:
            exchange.run_in_background()
        return named_work(context, full_name, name is None, Attempt(lambda: exchange.done, exchange.complete))

    return start_when_name_is_free(context, full_name, name, begin)


def rows_to_send(rows: int, splits: Splits, members: int) -> list[int]:
    """The number of rows for each member. Raises UsageError for splits that do not fit.

    >>> rows_to_send(6, None, 3), rows_to_send(6, [1, 0, 3], 3)
    ([2, 2, 2], [1, 0, 3])
    """
    if splits is None:
        if rows % members:
            raise UsageError(
                f"alltoall without splits: the first dimension, {rows}, is not divisible by the number of ranks, "
                f"{members}; give splits"
            )
        return [rows // members] * members
    if isinstance(splits, torch.Tensor):
        if splits.dtype is not torch.int32:
            raise UsageError(f"alltoall expects splits to contain 32-bit integer elements, got {splits.dtype}")
        if splits.dim() != 1:
            raise UsageError(f"alltoall: splits must have one dimension, got {splits.dim()}")
    found = [int(split) for split in (splits.tolist() if isinstance(splits, torch.Tensor) else splits)]
    if len(found) != members:
        raise UsageError(
            f"alltoall: Number of entries in splits, {len(found)}, does not equal the number of ranks, {members}"
        )
    if any(split < 0 for split in found):
        raise UsageError(f"alltoall: splits {found} contain a negative number")
    if sum(found) > rows:
        raise UsageError(
            f"alltoall: Sum of splits entries, {sum(found)}, is greater than the first dimension of the tensor, {rows}"
        )
    return found


class AlltoallOperation(TwoRoundOperation):
    """See TwoRoundOperation. rows: the number for each member. device: of the tensor of received splits."""

    def __init__(
        self,
        context: Context,
        name: str,
        tensor: torch.Tensor,
        rows: Sequence[int],
        group: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self._name = name
        self._tensor = tensor
        self._sent = rows
        self._received: list[int] = []
        self._group = group
        self._members = group or range(context.session.size)
        self._splits_device = device
        self._row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
        super().__init__(context, tensor.device)

    def _send_headers(self) -> SlotView:
        count = len(self._members)
        pieces = tuple((i * size_headers.NBYTES, size_headers.NBYTES) for i in range(count))
        view = self._context.byte_view(
            f"sizes.{self._name}", Op.EXCHANGE, self._group, count * size_headers.NBYTES, count * size_headers.NBYTES
        )
        words = [size_headers.header("alltoall", self._tensor, self._name, rows) for rows in self._sent]
        view.input(0, torch.int64, (count, size_headers.WORDS)).copy_(
            torch.tensor(words, dtype=torch.int64, device="cpu")
        )
        view.hand_over(Layout(pieces, pieces))
        return view

    def _send_data(self, header_view: SlotView) -> SlotView:
        count = len(self._members)
        words = header_view.result(0, torch.int64, (count, size_headers.WORDS)).numpy()[:, np.newaxis]
        size_headers.check("alltoall", self._name, self._members, words)
        self._received = [rows[0] for rows in size_headers.rows_of(words)]
        sends, receives = self._pieces(self._sent), self._pieces(self._received)
        view = self._context.byte_view(self._name, Op.EXCHANGE, self._group, _end(sends), _end(receives))
        whole = self._tensor[: sum(self._sent)]
        layout = Layout(sends, receives)
        if whole.numel():
            view.send(self._device, [view.input(0, whole.dtype, tuple(whole.shape))], [whole], layout)
        else:
            view.send(self._device, [], [], layout)
        return view

    def _deliver(self, view: SlotView) -> tuple[torch.Tensor, torch.Tensor]:
        output = self._tensor.new_empty((sum(self._received), *self._tensor.shape[1:]))
        if output.numel():
            view.fetch_views(self._device, [view.result(0, output.dtype, tuple(output.shape))], [output])
        return output, torch.tensor(self._received, dtype=torch.int32, device=self._splits_device)

    def _pieces(self, rows: Sequence[int]) -> tuple[tuple[int, int], ...]:
        lengths = [n * self._row_bytes for n in rows]
        return tuple(zip([0, *itertools.accumulate(lengths[:-1])], lengths, strict=True))


def _end(pieces: Sequence[tuple[int, int]]) -> int:
    offset, nbytes = pieces[-1]
    return offset + nbytes
