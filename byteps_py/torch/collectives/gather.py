"""allgather: every rank gets the rows of all, in the order of the ranks, of one tensor or of a group of them.

Bytes per machine: headers as in the package's docstring; then, of the B bytes that all ranks give together, in: B less
what its own ranks give; out: what its own ranks give, once to each other rank elsewhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch

from byteps_py.tensors import Layout, Op
from byteps_py.torch.collectives import headers
from byteps_py.torch.collectives.rooms import Room, aligned, rooms_of
from byteps_py.torch.collectives.two_rounds import TwoRounds
from byteps_py.torch.context import Context
from byteps_py.torch.dtypes import check_dense
from byteps_py.torch.handles import Operation
from byteps_py.torch.ops import begin_when_free, kind_in, operation_of

#: So many bytes of data ride in the first round.
INLINE_BYTES = 896


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
    found = [tensor.detach() for tensor in tensors]
    words = [headers.header("allgather", tensor, name) for tensor in found]  # raises UsageError
    kind = kind_in(group, "grouped_allgather" if is_group else "allgather")
    full = context.names.in_turn(kind) if name is None else f"{kind}.{name}"

    def begin() -> Operation:
        gather = Gather(context, full, found, words, group)
        if background:
            gather.go_on_alone()

        def complete() -> torch.Tensor | tuple[torch.Tensor, ...]:
            outputs = gather.complete()
            return tuple(outputs) if is_group else outputs[0]

        return operation_of(context, full, name is None, lambda: gather.done, complete)

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
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._row_bytes = [math.prod(tensor.shape[1:]) * tensor.dtype.itemsize for tensor in tensors]
        self._rows: list[list[int]] = []  # [position in members][tensor], once known
        self._starts: list[int] = []  # of each member's data in the result
        super().__init__(context, self._device)

    def _send_headers(self) -> Room:
        count = len(self._members)
        self._header_bytes = headers.NBYTES * len(self._tensors)
        piece = self._header_bytes + INLINE_BYTES
        room = rooms_of(self._context).get(
            f"sizes.{self._name}", Op.GATHER, self._group, piece, piece * count, self._device
        )
        layout = Layout(((0, piece),), tuple((i * piece, piece) for i in range(count)))
        if self._tensors:
            about = torch.tensor(self._words, dtype=torch.int64)
            room.input(0, torch.int64, (len(self._tensors), headers.WORDS)).copy_(about)
        mine = self._places([tensor.shape[0] for tensor in self._tensors])
        if mine[-1] > INLINE_BYTES:
            room.send_as_it_is(layout)
        else:
            room.send(self._inputs(room, self._header_bytes, mine), self._tensors, layout)
        return room

    def _send_data(self, headers_room: Room) -> Room | None:
        count, piece = len(self._members), self._header_bytes + INLINE_BYTES
        words = np.stack(
            [
                headers_room.result(i * piece, torch.int64, (len(self._tensors), headers.WORDS)).numpy()
                for i in range(count)
            ]
        )
        headers.check("allgather", self._name, self._members, words)
        self._rows = headers.rows_of(words)
        lengths = [self._places(rows)[-1] for rows in self._rows]
        if max(lengths) <= INLINE_BYTES:
            self._starts = [i * piece + self._header_bytes for i in range(count)]
            return None
        self._starts = [0, *itertools.accumulate(lengths[:-1])]
        me = self._members.index(self._context.session.rank)
        room = rooms_of(self._context).get(self._name, Op.GATHER, self._group, lengths[me], sum(lengths), self._device)
        layout = Layout(((0, lengths[me]),), tuple(zip(self._starts, lengths, strict=True)))
        room.send(self._inputs(room, 0, self._places(self._rows[me])), self._tensors, layout)
        return room

    def _deliver(self, room: Room) -> list[torch.Tensor]:
        outputs = []
        views, targets = [], []
        places = [self._places(rows) for rows in self._rows]
        for number, tensor in enumerate(self._tensors):
            tail = tuple(tensor.shape[1:])
            output = tensor.new_empty((sum(rows[number] for rows in self._rows), *tail))
            first = 0
            for start, place, rows in zip(self._starts, places, self._rows, strict=True):
                if rows[number] and self._row_bytes[number]:
                    views.append(room.result(start + place[number], tensor.dtype, (rows[number], *tail)))
                    targets.append(output[first : first + rows[number]])
                first += rows[number]
            outputs.append(output)
        if views:
            with torch.no_grad():
                room.mover.fetch(views, targets)
        return outputs

    def _inputs(self, room: Room, start: int, places: Sequence[int]) -> list[torch.Tensor]:
        return [
            room.input(start + place, tensor.dtype, tuple(tensor.shape))
            for place, tensor in zip(places, self._tensors, strict=False)
        ]

    def _places(self, rows: Sequence[int]) -> list[int]:
        """Where each tensor of a rank with so many rows starts in its piece, and where the piece ends."""
        return [0, *itertools.accumulate(aligned(n * nbytes) for n, nbytes in zip(rows, self._row_bytes, strict=True))]
