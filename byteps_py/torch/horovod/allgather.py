"""allgather: every rank gets the rows of all, in the order of the ranks, of one tensor or of a group of them.

Bytes per machine: headers as in the package's docstring; then in: what the ranks of other machines give; out: what its
own ranks give, once to each other machine. Each tensor is filled up to a multiple of 16 bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from byteps_py.errors import UsageError
from byteps_py.tensors import Layout, Op
from byteps_py.torch.engine.context import Context
from byteps_py.torch.engine.dtypes import check_dense
from byteps_py.torch.engine.named_work import Attempt, NamedWork
from byteps_py.torch.engine.slot_view import SlotView
from byteps_py.torch.horovod import size_headers
from byteps_py.torch.horovod.ops import begin_when_free, kind_in, operation_of
from byteps_py.torch.horovod.two_rounds import TwoRounds

#: Of the first round, from each rank: its headers, then its data if there is room. Always as much, since ranks don't
#: know yet that they agree about anything.
FIRST_BYTES = 1024
#: Pieces of different tensors start at multiples of this: any dtype may lie there.
ALIGNMENT = 16
#: A group of more has its headers in a round of their own.
MOST_AT_ONCE = FIRST_BYTES // size_headers.NBYTES - 1


def start_gather(
    context: Context,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    group: tuple[int, ...],
    is_group: bool = False,
    background: bool = True,
) -> int:
    """Begin to gather each of ``tensors``. Returns a handle; its result is a tensor, of a group the tuple of them.

    ``background``: False if the caller waits for it at once.
    """
    for tensor in tensors:
        check_dense(tensor, name)
    devices = {str(tensor.device) for tensor in tensors}
    if len(devices) > 1:
        raise UsageError(f"allgather: the tensors of a group must lie on one device, got {', '.join(sorted(devices))}")
    found = [tensor.detach() for tensor in tensors]
    words = [
        size_headers.header("allgather", t, name, number_of_tensors=len(found)) for t in found
    ]  # raises UsageError
    kind = kind_in(group, "grouped_allgather" if is_group else "allgather")
    full = context.names.in_turn(kind) if name is None else f"{kind}.{name}"

    def begin() -> NamedWork:
        gather = Gather(context, full, found, words, group)
        if background:
            gather.go_on_alone()

        def complete() -> torch.Tensor | tuple[torch.Tensor, ...]:
            outputs = gather.complete()
            return tuple(outputs) if is_group else outputs[0]

        return operation_of(context, full, name is None, Attempt(lambda: gather.done, complete))

    return begin_when_free(context, full, name, begin)


class Gather(TwoRounds):
    """See TwoRounds. Each rank's piece: its tensors one after the other, each aligned."""

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
        layout = self._equal(FIRST_BYTES)
        view.input(0, torch.int64, (size_headers.WORDS,)).zero_()  # what a group of none says
        self._write(view, self._words[:MOST_AT_ONCE])
        mine = self._places([tensor.shape[0] for tensor in self._tensors])
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
        lengths = [self._places(rows)[-1] for rows in self._rows]
        if max(lengths) <= self._inline_bytes:
            self._starts = [i * FIRST_BYTES + self._header_bytes for i in range(len(self._members))]
            return None
        self._starts = [0, *itertools.accumulate(lengths[:-1])]
        me = self._members.index(self._context.session.rank)
        view = self._view("", lengths[me], sum(lengths))
        layout = Layout(((0, lengths[me]),), tuple(zip(self._starts, lengths, strict=True)))
        view.send(self._device, self._inputs(view, 0, self._places(self._rows[me])), self._tensors, layout)
        return view

    def _all_headers(self, header_view: SlotView) -> size_headers.Words:
        """[position in members, tensor, word]"""
        if len(self._tensors) <= MOST_AT_ONCE:
            return self._read(header_view, FIRST_BYTES, len(self._tensors))
        view = self._view("more sizes.", self._header_bytes, self._header_bytes * len(self._members))
        self._write(view, self._words)
        view.hand_over(self._equal(self._header_bytes))
        view.wait()
        return self._read(view, self._header_bytes, len(self._tensors))

    def _deliver(self, view: SlotView) -> list[torch.Tensor]:
        outputs = []
        views, targets = [], []
        places = [self._places(rows) for rows in self._rows]
        for number, tensor in enumerate(self._tensors):
            tail = tuple(tensor.shape[1:])
            output = tensor.new_empty((sum(rows[number] for rows in self._rows), *tail))
            first = 0
            for start, place, rows in zip(self._starts, places, self._rows, strict=True):
                if rows[number] and self._row_bytes[number]:
                    views.append(view.result(start + place[number], tensor.dtype, (rows[number], *tail)))
                    targets.append(output[first : first + rows[number]])
                first += rows[number]
            outputs.append(output)
        view.fetch_views(self._device, views, targets)
        return outputs

    def _view(self, prefix: str, nbytes_in: int, nbytes_out: int) -> SlotView:
        return self._context.byte_view(f"{prefix}{self._name}", Op.GATHER, self._group, nbytes_in, nbytes_out)

    def _equal(self, piece: int) -> Layout:
        """Of a round in which every rank gives as much."""
        return Layout(((0, piece),), tuple((i * piece, piece) for i in range(len(self._members))))

    def _write(self, view: SlotView, words: Sequence[Sequence[int]]) -> None:
        if words:
            view.input(0, torch.int64, (len(words), size_headers.WORDS)).copy_(torch.tensor(words, dtype=torch.int64))

    def _read(self, view: SlotView, piece: int, count: int) -> size_headers.Words:
        every = view.result(0, torch.int64, (len(self._members), piece // 8)).numpy()
        return every[:, : count * size_headers.WORDS].reshape(len(self._members), count, size_headers.WORDS)

    def _inputs(self, view: SlotView, start: int, places: Sequence[int]) -> list[torch.Tensor]:
        return [
            view.input(start + place, tensor.dtype, tuple(tensor.shape))
            for place, tensor in zip(places, self._tensors, strict=False)
        ]

    def _places(self, rows: Sequence[int]) -> list[int]:
        """Where each tensor of a rank with so many rows starts in its piece, and where the piece ends."""
        return [0, *itertools.accumulate(_aligned(n * nbytes) for n, nbytes in zip(rows, self._row_bytes, strict=True))]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
