"""alltoall: each rank cuts its tensor along the first dimension, and gets the pieces that the others have for it.

Bytes per machine: headers as in the package's docstring; then each piece goes once, from the machine of the rank that
has it to that of the rank it is for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
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

Splits = torch.Tensor | Sequence[int] | None


def start_alltoall(
    context: Context,
    tensor: torch.Tensor,
    splits: Splits,
    name: str | None,
    group: tuple[int, ...],
    background: bool = True,
) -> int:
    """Begin the exchange. Returns a handle; its result is (tensor, received splits). Raises UsageError.

    ``background``: False if the caller waits for it at once.
    """
    check_dense(tensor, name)
    found = tensor.detach()
    members = len(group) or context.session.size
    size_headers.header("alltoall", found, name)  # raises UsageError
    rows = rows_to_send(found.shape[0], splits, members)
    device = splits.device if isinstance(splits, torch.Tensor) else torch.device("cpu")
    kind = kind_in(group, "alltoall")
    full = context.names.in_turn(kind) if name is None else f"{kind}.{name}"

    def begin() -> NamedWork:
        exchange = Alltoall(context, full, found, rows, group, device)
        if background:
            exchange.go_on_alone()
        return operation_of(context, full, name is None, Attempt(lambda: exchange.done, exchange.complete))

    return begin_when_free(context, full, name, begin)


def rows_to_send(rows: int, splits: Splits, members: int) -> list[int]:
    """How many rows go to each member. Raises UsageError for splits that don't fit.

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
        raise UsageError(f"alltoall: splits {found} contain a negative one")
    if sum(found) > rows:
        raise UsageError(
            f"alltoall: Sum of splits entries, {sum(found)}, is greater than the first dimension of the tensor, {rows}"
        )
    return found


class Alltoall(TwoRounds):
    """See TwoRounds. ``rows``: how many go to each member; ``device``: where the received splits go."""

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
        view.input(0, torch.int64, (count, size_headers.WORDS)).copy_(torch.tensor(words, dtype=torch.int64))
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
