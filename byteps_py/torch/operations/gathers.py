"""allgather and alltoall: their sizes are not known in advance, so a first round exchanges headers, a second the data.

    start ─ headers to all ─► wait ─ lay out the data, or find that ranks disagree ─ send data ─► wait ─ deliver
    └ caller's thread ────┘   └ caller of a synchronous function, or a thread of the pool ────┘   └ synchronize ┘

Tensors are dense, on cpu or cuda, of any dtype but quantized ones, of 1 to 13 dimensions. Ranks may differ in the first
dimension. Input tensors must not change before the operation is done: they are copied when the sizes are known.

Bytes, with n machines of l ranks each. First round: an allgather moves 1024 bytes from each rank to each other machine,
an alltoall 128 bytes from each rank to each rank on another machine. So l(n-1)·1024 or l²(n-1)·128 bytes leave each
machine, and as many arrive. Most of the 1024 bytes is room for data: an allgather ends with the first round if every
rank's data fit (896 bytes for one tensor, 128 less for each further tensor). Second round: an allgather moves each
rank's data once to each other machine, each tensor padded to a multiple of 16 bytes; an alltoall moves each piece to
its rank. (A group of more than 7 tensors has a round in between, of 128 bytes for each tensor.) Any thread.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from byteps_py.errors import UsageError
from byteps_py.tensors import Layout, Op
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.completion import POOL
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import check_dense
from byteps_py.torch.collectives.slot_view import SlotView
from byteps_py.torch.collectives.work import Attempt, NamedWork
from byteps_py.torch.operations import size_headers
from byteps_py.torch.operations.handles import kind_in_group, named_work, result_of, start_when_name_is_free

#: Bytes that each rank sends in the first round: its headers, then its data if there is room. A constant, because ranks
#: do not know yet whether they agree about anything.
FIRST_BYTES = 1024
#: Pieces of different tensors start at multiples of this, so that any dtype is aligned.
ALIGNMENT = 16
#: A larger group of tensors sends its headers in a round of their own.
MOST_AT_ONCE = FIRST_BYTES // size_headers.NBYTES - 1

Splits = torch.Tensor | Sequence[int] | None


class TwoRoundOperation(ABC):
    """A running operation. ``device``: of its tensors. Any thread may wait for it."""

    def __init__(self, context: Context, device: torch.device) -> None:
        self._context = context
        self._device = device
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.stream(torch.cuda.current_stream(device)) if is_cuda else contextlib.nullcontext()
        self._is_data_sent = threading.Event()
        self._sending = threading.Lock()
        self._error: Exception | None = None
        self._headers = self._send_headers()
        self._data: SlotView | None = None

    def run_in_background(self) -> None:
        """Let a thread of the pool send the data as soon as the headers have arrived."""
        POOL.run(self._send_data_once)

    @property
    def done(self) -> bool:
        """True if ``complete`` would not block."""
        return self._is_data_sent.is_set() and (self._data is None or self._data.is_done)

    def complete(self) -> Any:
        """Wait, deliver and return the result. Raises as Session.wait does."""
        self._send_data_once()
        if self._error is not None:
            raise self._error
        if self._data is not None:
            self._data.wait()
        return self._deliver(self._headers if self._data is None else self._data)

    def _send_data_once(self) -> None:
        with self._sending:
            if self._is_data_sent.is_set():
                return
            try:
                self._headers.wait()
                with self._stream:  # the stream that was current when the operation was started
                    self._data = self._send_data(self._headers)
            except Exception as error:
                self._error = error
            self._is_data_sent.set()

    @abstractmethod
    def _send_headers(self) -> SlotView:
        """Hand over the first round."""

    @abstractmethod
    def _send_data(self, headers: SlotView) -> SlotView | None:
        """Read the other ranks' headers and hand over the second round; None if it is not needed."""

    @abstractmethod
    def _deliver(self, view: SlotView) -> Any:
        """The result, read from ``view``: the second round's, or the first's if there was no second."""


# ---- allgather ---------------------------------------------------------------------------------------------


def gathered(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The rows of all ranks, in rank order, a new tensor. Waits for the other ranks."""
    result: torch.Tensor = result_of(start_gather([tensor], name, (), background=False))
    return result


def start_gather(
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
    context = contexts.current()
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


# ---- alltoall ----------------------------------------------------------------------------------------------


def start_alltoall(
    tensor: torch.Tensor, splits: Splits, name: str | None, group: tuple[int, ...], background: bool = True
) -> int:
    """Begin the exchange. Returns a handle, whose result is (tensor, received splits). Raises UsageError.

    background: whether a thread of the pool sends the data; False if the caller waits at once and sends them itself.
    """
    context = contexts.current()
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
