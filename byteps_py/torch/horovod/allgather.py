"""allgather: every rank gets the rows of all ranks, in rank order. Names and arguments as in Horovod. Any thread.

Tensors are dense, on cpu or cuda, of any dtype but quantized ones, of 1 to 13 dimensions. Ranks may differ in the first
dimension. A tensor must not change before the operation is synchronized.

Bytes per machine: the headers (see the package's docstring). Then in: the data of the ranks on other machines; out: the
data of its own ranks, once to each other machine. Each tensor is padded to a multiple of 16 bytes.

All functions raise NotInitializedError outside init() … shutdown() and UsageError (a ValueError) for misuse. Waiting
for the result raises MismatchError, StallError or PeerLostError (each a HorovodInternalError).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from byteps_py.errors import UsageError
from byteps_py.tensors import Layout, Op
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import check_are_tensors, check_dense
from byteps_py.torch.collectives.slot_view import SlotView
from byteps_py.torch.collectives.work import Attempt, NamedWork
from byteps_py.torch.horovod import size_headers
from byteps_py.torch.horovod.api import result_of
from byteps_py.torch.horovod.operation_names import kind_in_group, named_work, start_when_name_is_free
from byteps_py.torch.horovod.ops import Average, tensor_list
from byteps_py.torch.horovod.process_sets import ProcessSet, global_process_set, group_of, members_of
from byteps_py.torch.horovod.reduction_plans import ReductionOptions
from byteps_py.torch.horovod.reductions import start_reduction
from byteps_py.torch.horovod.two_rounds import TwoRoundOperation

#: Bytes that each rank sends in the first round: its headers, then its data if there is room. A constant, because ranks
#: do not know yet whether they agree about anything.
FIRST_BYTES = 1024
#: Pieces of different tensors start at multiples of this, so that any dtype is aligned.
ALIGNMENT = 16
#: A larger group of tensors sends its headers in a round of their own.
MOST_AT_ONCE = FIRST_BYTES // size_headers.NBYTES - 1

# ---- public functions --------------------------------------------------------------------------------------


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin to concatenate the tensors of all ranks along the first dimension. ``synchronize(handle)`` returns the
    result, a new tensor. See allgather."""
    return start_gather(contexts.current(), [tensor], name, group_of(process_set))


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensors of all ranks, concatenated along the first dimension in rank order.

    tensor: dense, on cpu or cuda, of any dtype but quantized ones, of 1 to 13 dimensions. Ranks may differ in the first
    dimension, which may be 0; the other dimensions and the dtype are the same on all ranks.
    Differentiable: a rank's gradient is the average of all ranks' gradients of its rows.
    Any thread may call it. Raises NotInitializedError, UsageError (a ValueError), and MismatchError, StallError or
    PeerLostError (each a HorovodInternalError).

    >>> import torch, byteps_py as hvd
    >>> hvd.init()
    >>> hvd.allgather(torch.tensor([[1, 2]]))  # a job of one rank
    tensor([[1, 2]])
    >>> hvd.shutdown()
    """
    check_are_tensors((tensor,), name)
    (result,) = _Allgather.apply(name, process_set, False, tensor)  # type: ignore[no-untyped-call]
    gathered: torch.Tensor = result
    return gathered


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to gather each of ``tensors`` as one operation. ``synchronize(handle)`` returns a tuple of new tensors."""
    return start_gather(contexts.current(), tensor_list(tensors), name, group_of(process_set), is_group=True)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """The allgather of each of ``tensors``, as one operation. Differentiable; see allgather."""
    results: tuple[torch.Tensor, ...] = _Allgather.apply(name, process_set, True, *tensor_list(tensors))  # type: ignore[no-untyped-call]
    return results


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, is_group: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        context = contexts.current()
        ctx.arguments = context, name, process_set, [tensor.shape[:1] for tensor in tensors]
        group = group_of(process_set)
        result = result_of(start_gather(context, tensors, name, group, is_group, background=False))
        return result if is_group else (result,)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        context, name, process_set, rows = ctx.arguments
        with contexts.use(context):  # autograd may run this on a thread of its own
            members = members_of(process_set)
            grad_name = None if name is None else f"{name}.grad"
            options = ReductionOptions(Average, "allgather.grad", group_of(process_set))
            means = result_of(start_reduction(context, grads, None, grad_name, options, is_group=True))
            dimensions = torch.tensor([[shape[0] for shape in rows]], device="cpu")
            handle = start_gather(
                context, [dimensions], grad_name and f"{grad_name}.rows", group_of(process_set), background=False
            )
            before = result_of(handle)[: members.index(context.session.rank)].sum(0).tolist()
        mine = [mean.narrow(0, first, shape[0]) for mean, first, shape in zip(means, before, rows, strict=True)]
        return None, None, None, *mine


# ---- the operation ------------------------------------------------------------------------------------------


def start_gather(
    context: Context,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    group: tuple[int, ...],
    is_group: bool = False,
    background: bool = True,
) -> int:
    """Begin to gather each of ``tensors``. Returns a handle, whose result is a tensor, or a tuple for a group.

    background: whether a thread of the pool sends the data; False if the caller waits at once and sends them itself.
    Raises UsageError.
    """
    for tensor in tensors:
        check_dense(tensor, name)
    devices = {str(tensor.device) for tensor in tensors}
    if len(devices) > 1:
        raise UsageError(f"allgather: the tensors of a group must lie on one device, got {', '.join(sorted(devices))}")
    found = [tensor.detach() for tensor in tensors]
    # Raises UsageError for dtypes and shapes that a header can't describe.
    words = [size_headers.header("allgather", t, name, number_of_tensors=len(found)) for t in found]
    kind = kind_in_group(group, "grouped_allgather" if is_group else "allgather")
    full_name = context.names.in_turn(kind) if name is None else f"{kind}.{name}"

    def begin() -> NamedWork:
        gather = AllgatherOperation(context, full_name, found, words, group)
        if background:
            gather.run_in_background()

        def complete() -> torch.Tensor | tuple[torch.Tensor, ...]:
            outputs = gather.complete()
            return tuple(outputs) if is_group else outputs[0]

        return named_work(context, full_name, name is None, Attempt(lambda: gather.done, complete))

    return start_when_name_is_free(context, full_name, name, begin)


class AllgatherOperation(TwoRoundOperation):
    """See TwoRoundOperation. A rank's piece is its tensors one after the other, each aligned."""

    def __init__(
        self,
        context: Context,
        name: str,
        tensors: Sequence[torch.Tensor],
        words: Sequence[Sequence[int]],
        group: tuple[int, ...],
    ) -> None:
        self._name = name
        self._tensors = tensors
        self._words = words
        self._group = group
        self._members = group or range(context.session.size)
        self._row_bytes = [math.prod(tensor.shape[1:]) * tensor.dtype.itemsize for tensor in tensors]
        self._rows: list[list[int]] = []  # [position in members][tensor], once known
        self._starts: list[int] = []  # of each member's data in the result
        super().__init__(context, tensors[0].device if tensors else torch.device("cpu"))

    def _send_headers(self) -> SlotView:
        at_once = len(self._tensors) <= MOST_AT_ONCE
        self._header_bytes = size_headers.NBYTES * len(self._tensors)
        self._inline_bytes = FIRST_BYTES - self._header_bytes if at_once else -1
        view = self._view("sizes.", FIRST_BYTES, FIRST_BYTES * len(self._members))
        layout = self._equal_pieces(FIRST_BYTES)
        view.input(0, torch.int64, (size_headers.WORDS,)).zero_()  # the header of a group without tensors
        self._write(view, self._words[:MOST_AT_ONCE])
        mine = self._offsets([tensor.shape[0] for tensor in self._tensors])
        if mine[-1] > self._inline_bytes:
            view.hand_over(layout)
        else:
            view.send(self._device, self._inputs(view, self._header_bytes, mine), self._tensors, layout)
        return view

    def _send_data(self, header_view: SlotView) -> SlotView | None:
        first = self._read(header_view, FIRST_BYTES, 1)
        size_headers.check_numbers(self._name, self._members, first[:, 0])
        words = self._all_headers(header_view)
        size_headers.check("allgather", self._name, self._members, words)
        self._rows = size_headers.rows_of(words)
        lengths = [self._offsets(rows)[-1] for rows in self._rows]
        if max(lengths) <= self._inline_bytes:
            self._starts = [i * FIRST_BYTES + self._header_bytes for i in range(len(self._members))]
            return None
        self._starts = [0, *itertools.accumulate(lengths[:-1])]
        me = self._members.index(self._context.session.rank)
        view = self._view("", lengths[me], sum(lengths))
        layout = Layout(((0, lengths[me]),), tuple(zip(self._starts, lengths, strict=True)))
        view.send(self._device, self._inputs(view, 0, self._offsets(self._rows[me])), self._tensors, layout)
        return view

    def _all_headers(self, header_view: SlotView) -> size_headers.Words:
        """[position in members, tensor, word]"""
        if len(self._tensors) <= MOST_AT_ONCE:
            return self._read(header_view, FIRST_BYTES, len(self._tensors))
        view = self._view("more sizes.", self._header_bytes, self._header_bytes * len(self._members))
        self._write(view, self._words)
        view.hand_over(self._equal_pieces(self._header_bytes))
        view.wait()
        return self._read(view, self._header_bytes, len(self._tensors))

    def _deliver(self, view: SlotView) -> list[torch.Tensor]:
        outputs = []
        views, targets = [], []
        offsets = [self._offsets(rows) for rows in self._rows]
        for number, tensor in enumerate(self._tensors):
            tail = tuple(tensor.shape[1:])
            output = tensor.new_empty((sum(rows[number] for rows in self._rows), *tail))
            first = 0
            for start, offset, rows in zip(self._starts, offsets, self._rows, strict=True):
                if rows[number] and self._row_bytes[number]:
                    views.append(view.result(start + offset[number], tensor.dtype, (rows[number], *tail)))
                    targets.append(output[first : first + rows[number]])
                first += rows[number]
            outputs.append(output)
        view.fetch_views(self._device, views, targets)
        return outputs

    def _view(self, prefix: str, nbytes_in: int, nbytes_out: int) -> SlotView:
        return self._context.byte_view(f"{prefix}{self._name}", Op.GATHER, self._group, nbytes_in, nbytes_out)

    def _equal_pieces(self, piece: int) -> Layout:
        """The layout of a round in which each rank sends ``piece`` bytes."""
        return Layout(((0, piece),), tuple((i * piece, piece) for i in range(len(self._members))))

    def _write(self, view: SlotView, words: Sequence[Sequence[int]]) -> None:
        if words:
            view.input(0, torch.int64, (len(words), size_headers.WORDS)).copy_(
                torch.tensor(words, dtype=torch.int64, device="cpu")
            )

    def _read(self, view: SlotView, piece: int, count: int) -> size_headers.Words:
        every = view.result(0, torch.int64, (len(self._members), piece // 8)).numpy()
        return every[:, : count * size_headers.WORDS].reshape(len(self._members), count, size_headers.WORDS)

    def _inputs(self, view: SlotView, start: int, offsets: Sequence[int]) -> list[torch.Tensor]:
        return [
            view.input(start + offset, tensor.dtype, tuple(tensor.shape))
            for offset, tensor in zip(offsets, self._tensors, strict=False)
        ]

    def _offsets(self, rows: Sequence[int]) -> list[int]:
        """Offsets of a rank's tensors, with ``rows`` rows each, in its piece, and the length of the piece."""
        return [0, *itertools.accumulate(_aligned(n * nbytes) for n, nbytes in zip(rows, self._row_bytes, strict=True))]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
