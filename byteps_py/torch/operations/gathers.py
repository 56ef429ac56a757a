"""allgather and alltoall: their sizes are not known in advance, so a first round exchanges headers, a second the data.

    start ─ headers to all ─► wait ─ lay out the data, or find that ranks disagree ─ exchange data ─► deliver
    └ caller's thread ────┘   └ caller of a synchronous function, or a thread of the pool ──────┘     └ synchronize ┘

If the ranks reach each other, the headers go from rank to rank, and so do the data of tensors in the host's memory
(collectives/peer_gathers.py). Otherwise they go through the communication service.

Tensors are dense, on cpu or cuda, of any dtype but quantized ones, of 1 to 13 dimensions. Ranks may differ in the first
dimension. Input tensors must not change before the operation is done: they are copied when the sizes are known.

Bytes, with n machines of l ranks each, through the services. First round: an allgather moves 1024 bytes from each rank
to each other machine, an alltoall 128 bytes from each rank to each rank on another machine. So l(n-1)·1024 or
l²(n-1)·128 bytes leave each machine, and as many arrive. Most of the 1024 bytes is room for data: an allgather ends
with the first round if every rank's data fit (896 bytes for one tensor, 128 less for each further tensor). Second
round: an allgather moves each rank's data once to each other machine, each tensor padded to a multiple of 16 bytes; an
alltoall moves each piece to its rank. (A group of more than 7 tensors has a round in between, of 128 bytes for each
tensor.) Any thread.
"""

from __future__ import annotations

import itertools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from byteps_py.errors import UsageError
from byteps_py.tensors import Layout, Op
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.completion import POOL
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import check_dense
from byteps_py.torch.collectives.peer_gathers import PeerGathers, PeerRound
from byteps_py.torch.collectives.slot_view import SlotView
from byteps_py.torch.collectives.tensor_bytes import octets, span
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

    _op: Op

    def __init__(self, context: Context, name: str, group: tuple[int, ...], device: torch.device) -> None:
        self._context, self._name, self._group = context, name, group
        self._members = group or range(context.session.size)
        self._me = self._members.index(context.session.rank)
        self._device = device
        self._is_on_host = device.type == "cpu"
        self._stream = context.mover(device).here()
        self._have_headers_come = threading.Event()
        self._continuing = threading.Lock()
        self._error: Exception | None = None
        self._direct: PeerRound | None = None
        self._result: Any = None  # of a round whose data went from rank to rank
        self._view: SlotView | None = None  # of the round of the service that is under way, or was the last one

    def begin(self, background: bool) -> None:
        """Send the headers. Called with the context's lock held. ``background``: a thread of the pool continues as soon
        as the headers of all have arrived; otherwise the caller is about to wait."""
        peers = PeerGathers.of(self._context)
        self._direct = peers.begin(self._op, self._name, self._group, self._first_message, self._is_on_host)
        if self._direct is None:
            self._view = self._send_headers()
        if background:
            POOL.run(self._continue_once)

    @property
    def done(self) -> bool:
        """True if ``complete`` would not block."""
        return self._have_headers_come.is_set() and (self._view is None or self._view.is_done)

    def complete(self) -> Any:
        """Wait, deliver and return the result. Raises as Session.wait does."""
        self._continue_once()
        if self._error is not None:
            raise self._error
        if self._view is None:
            return self._result
        self._view.wait()
        return self._deliver(self._view)

    def _continue_once(self) -> None:
        """Wait for the headers of all. Carry out the rest if it goes from rank to rank; otherwise begin it."""
        with self._continuing:
            if self._have_headers_come.is_set():
                return
            try:
                with self._stream:  # the stream that was current when the operation was started
                    if self._direct is not None:
                        self._direct.carry_out(self._continue_directly)
                    elif self._view is not None:
                        self._view.wait()
                        self._view = self._send_data(self._view) or self._view
            except Exception as error:
                self._error = error
            self._direct = None
            self._have_headers_come.set()

    def _continue_directly(self, every: torch.Tensor) -> None:
        direct = self._direct
        if direct is None:
            raise RuntimeError(f"{self._name}: no round from rank to rank")
        nbytes = self._read_messages(direct, every)
        if direct.is_direct(nbytes):
            self._result = self._exchange_data(direct, every)
            direct.report()
        else:
            self._view = self._send_pieces()

    @abstractmethod
    def _first_message(self) -> torch.Tensor:
        """The message to the other ranks, flat uint8. Its size depends on the operation and the group only."""

    @abstractmethod
    def _read_messages(self, direct: PeerRound, every: torch.Tensor) -> int:
        """Check and read the first messages of all ranks: uint8, [position in members, byte]. Returns the number of
        bytes that each rank receives, the same on all."""

    @abstractmethod
    def _exchange_data(self, direct: PeerRound, every: torch.Tensor) -> Any:
        """Exchange the data with the other ranks. Returns the result. ``every``: see ``_read_messages``."""

    @abstractmethod
    def _send_headers(self) -> SlotView:
        """Hand over the first round to the service."""

    @abstractmethod
    def _send_data(self, headers: SlotView) -> SlotView | None:
        """Read the other ranks' headers and hand over the second round to the service; None if it is not needed."""

    @abstractmethod
    def _send_pieces(self) -> SlotView:
        """Hand over the second round. The headers are read."""

    @abstractmethod
    def _deliver(self, view: SlotView) -> Any:
        """The result, read from ``view``: the second round's, or the first's if there was no second."""


# ---- allgather ---------------------------------------------------------------------------------------------


def gathered(tensor: torch.Tensor, name: str, group: tuple[int, ...] = ()) -> torch.Tensor:
    """The rows of the ranks of ``group``, () for all, in rank order, a new tensor. Waits for the other ranks."""
    result: torch.Tensor = result_of(start_gather([tensor], name, group, background=False))
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
        gather.begin(background)

        def complete() -> torch.Tensor | tuple[torch.Tensor, ...]:
            outputs = gather.complete()
            return tuple(outputs) if is_group else outputs[0]

        return named_work(context, full_name, name is None, Attempt(lambda: gather.done, complete))

    return start_when_name_is_free(context, full_name, name, begin)


class AllgatherOperation(TwoRoundOperation):
    """See TwoRoundOperation. A rank's piece is its tensors one after the other, each aligned."""

    _op = Op.GATHER

    def __init__(
        self,
        context: Context,
        name: str,
        tensors: Sequence[torch.Tensor],
        words: Sequence[Sequence[int]],
        group: tuple[int, ...],
    ) -> None:
        super().__init__(context, name, group, tensors[0].device if tensors else torch.device("cpu"))
        self._tensors = tensors
        self._words = words
        self._at_once = len(tensors) <= MOST_AT_ONCE
        self._header_bytes = size_headers.NBYTES * len(tensors)
        self._inline_bytes = FIRST_BYTES - self._header_bytes if self._at_once else -1
        self._row_bytes = [math.prod(tensor.shape[1:]) * tensor.dtype.itemsize for tensor in tensors]
        self._rows: list[list[int]] = []  # [position in members][tensor], once known
        self._lengths: list[int] = []  # of each member's piece, in bytes, once known
        self._starts: list[int] = []  # of each member's data in the result

    def _send_headers(self) -> SlotView:
        view = self._service_view("sizes.", FIRST_BYTES, FIRST_BYTES * len(self._members))
        layout = self._equal_pieces(FIRST_BYTES)
        view.input(0, torch.int64, (size_headers.WORDS,)).zero_()  # the header of a group without tensors
        self._write(view, self._words[:MOST_AT_ONCE])
        mine = self._offsets([tensor.shape[0] for tensor in self._tensors])
        if mine[-1] > self._inline_bytes:
            view.hand_over(layout)
        else:
            view.send(self._device, self._inputs(view, self._header_bytes, mine), self._tensors, layout)
        return view

    def _send_data(self, headers: SlotView) -> SlotView | None:
        self._read(headers.result(0, torch.int64, (len(self._members), FIRST_BYTES // 8)), self._more_headers)
        if max(self._lengths) > self._inline_bytes:
            return self._send_pieces()
        self._starts = self._inline_starts
        return None

    def _read(self, first: torch.Tensor, more_headers: Callable[[], size_headers.Words]) -> None:
        """Check and read the headers. ``first``: int64, the message of each member in the first round.
        ``more_headers`` returns those of a large group of tensors."""
        size_headers.check_numbers(self._name, self._members, _words(first, 1)[:, 0])
        words = _words(first, len(self._tensors)) if self._at_once else more_headers()
        size_headers.check("allgather", self._name, self._members, words)
        self._rows = size_headers.rows_of(words)
        self._lengths = [self._offsets(rows)[-1] for rows in self._rows]

    @property
    def _inline_starts(self) -> list[int]:
        """The offset of each member's data in the messages of the first round."""
        return [i * FIRST_BYTES + self._header_bytes for i in range(len(self._members))]

    def _send_pieces(self) -> SlotView:
        me, lengths = self._me, self._lengths
        self._starts = [0, *itertools.accumulate(lengths[:-1])]
        view = self._service_view("", lengths[me], sum(lengths))
        layout = Layout(((0, lengths[me]),), tuple(zip(self._starts, lengths, strict=True)))
        view.send(self._device, self._inputs(view, 0, self._offsets(self._rows[me])), self._tensors, layout)
        return view

    def _more_headers(self) -> size_headers.Words:
        """[position in members, tensor, word]"""
        view = self._service_view("more sizes.", self._header_bytes, self._header_bytes * len(self._members))
        self._write(view, self._words)
        view.hand_over(self._equal_pieces(self._header_bytes))
        view.wait()
        return _words(view.result(0, torch.int64, (len(self._members), self._header_bytes // 8)), len(self._tensors))

    def _deliver(self, view: SlotView) -> list[torch.Tensor]:
        outputs, targets = self._outputs()
        places = [(place, target) for member in targets for place, target in member]
        views = [view.result(place, target.dtype, tuple(target.shape)) for place, target in places]
        view.fetch_views(self._device, views, [target for _, target in places])
        return outputs

    def _outputs(self) -> tuple[list[torch.Tensor], list[list[tuple[int, torch.Tensor]]]]:
        """(the results, to be filled; for each member, the parts of them that it fills, and where its data lie)."""
        numbers = range(len(self._tensors))
        outputs = [
            tensor.new_empty((sum(rows[number] for rows in self._rows), *tensor.shape[1:]))
            for number, tensor in enumerate(self._tensors)
        ]
        firsts, targets = [0 for _ in numbers], []
        for start, rows in zip(self._starts, self._rows, strict=True):
            offset = self._offsets(rows)
            parts = [(start + offset[n], outputs[n].narrow(0, firsts[n], rows[n])) for n in numbers]
            targets.append([(place, part) for place, part in parts if part.numel()])
            firsts = [first + count for first, count in zip(firsts, rows, strict=True)]
        return outputs, targets

    def _first_message(self) -> torch.Tensor:
        message = torch.zeros(FIRST_BYTES, dtype=torch.uint8, device="cpu")
        if self._words:
            words = octets(torch.tensor(self._words[:MOST_AT_ONCE], dtype=torch.int64, device="cpu"))
            message[: words.numel()] = words
        offsets = self._offsets([tensor.shape[0] for tensor in self._tensors])
        if self._is_on_host and offsets[-1] <= self._inline_bytes:
            for offset, tensor in zip(offsets, self._tensors, strict=False):
                data = octets(tensor)
                message[self._header_bytes + offset :][: data.numel()] = data
        return message

    def _read_messages(self, direct: PeerRound, every: torch.Tensor) -> int:
        self._read(every.view(torch.int64), lambda: self._more_headers_of(direct))
        return sum(self._lengths)

    def _more_headers_of(self, direct: PeerRound) -> size_headers.Words:
        """[position in members, tensor, word]"""
        mine = torch.tensor(self._words, dtype=torch.int64, device="cpu").view(-1)
        every = mine.new_empty((len(self._members), mine.numel()))
        every[self._me] = mine
        receives = {p: [span(every[p])] for p in direct.group.others}
        direct.exchange([(tuple(direct.group.others), [span(mine)])], receives, (mine, every))
        return _words(every, len(self._tensors))

    def _exchange_data(self, direct: PeerRound, every: torch.Tensor) -> list[torch.Tensor]:
        direct.check(self._lengths[self._me], sum(self._lengths))
        self._starts = self._inline_starts
        outputs, targets = self._outputs()
        if max(self._lengths) <= self._inline_bytes:
            whole = every.view(-1)
            for place, target in itertools.chain.from_iterable(targets):
                octets(target).copy_(whole[place : place + target.nbytes])
        else:
            given = [octets(tensor) for tensor in self._tensors if tensor.numel()]
            for (_, target), data in zip(targets[self._me], given, strict=True):
                octets(target).copy_(data)
            receives = {p: [span(target) for _, target in targets[p]] for p in direct.group.others if targets[p]}
            sends = [(tuple(direct.group.others), [span(data) for data in given])] if given else []
            direct.exchange(sends, receives, (given, outputs))
        return outputs

    def _service_view(self, prefix: str, nbytes_in: int, nbytes_out: int) -> SlotView:
        return self._context.byte_view(f"{prefix}{self._name}", Op.GATHER, self._group, nbytes_in, nbytes_out)

    def _equal_pieces(self, piece: int) -> Layout:
        """The layout of a round in which each rank sends ``piece`` bytes."""
        return Layout(((0, piece),), tuple((i * piece, piece) for i in range(len(self._members))))

    def _write(self, view: SlotView, words: Sequence[Sequence[int]]) -> None:
        if words:
            view.input(0, torch.int64, (len(words), size_headers.WORDS)).copy_(
                torch.tensor(words, dtype=torch.int64, device="cpu")
            )

    def _inputs(self, view: SlotView, start: int, offsets: Sequence[int]) -> list[torch.Tensor]:
        return [
            view.input(start + offset, tensor.dtype, tuple(tensor.shape))
            for offset, tensor in zip(offsets, self._tensors, strict=False)
        ]

    def _offsets(self, rows: Sequence[int]) -> list[int]:
        """Offsets of a rank's tensors, with ``rows`` rows each, in its piece, and the length of the piece."""
        return [0, *itertools.accumulate(_aligned(n * nbytes) for n, nbytes in zip(rows, self._row_bytes, strict=True))]


def _words(first: torch.Tensor, count: int) -> size_headers.Words:
    """[position in members, tensor, word], of each member's message, int64: its headers come first."""
    every: size_headers.Words = first.numpy()[:, : count * size_headers.WORDS]
    return every.reshape(len(every), count, size_headers.WORDS)


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
        exchange.begin(background)
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

    _op = Op.EXCHANGE

    def __init__(
        self,
        context: Context,
        name: str,
        tensor: torch.Tensor,
        rows: Sequence[int],
        group: tuple[int, ...],
        device: torch.device,
    ) -> None:
        super().__init__(context, name, group, tensor.device)
        self._tensor = tensor
        self._sent = rows
        self._received: list[int] = []
        self._splits_device = device
        self._row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize

    def _send_headers(self) -> SlotView:
        count = len(self._members)
        pieces = tuple((i * size_headers.NBYTES, size_headers.NBYTES) for i in range(count))
        view = self._context.byte_view(
            f"sizes.{self._name}", Op.EXCHANGE, self._group, count * size_headers.NBYTES, count * size_headers.NBYTES
        )
        view.input(0, torch.int64, (count, size_headers.WORDS)).copy_(self._headers_for_all())
        view.hand_over(Layout(pieces, pieces))
        return view

    def _headers_for_all(self) -> torch.Tensor:
        """int64, [position in members, word]"""
        words = [size_headers.header("alltoall", self._tensor, self._name, rows) for rows in self._sent]
        return torch.tensor(words, dtype=torch.int64, device="cpu")

    def _send_data(self, headers: SlotView) -> SlotView:
        self._read(headers.result(0, torch.int64, (len(self._members), size_headers.WORDS)))
        return self._send_pieces()

    def _send_pieces(self) -> SlotView:
        sends, receives = self._pieces(self._sent), self._pieces(self._received)
        view = self._context.byte_view(self._name, Op.EXCHANGE, self._group, _end(sends), _end(receives))
        whole = self._tensor[: sum(self._sent)]
        layout = Layout(sends, receives)
        if whole.numel():
            view.send(self._device, [view.input(0, whole.dtype, tuple(whole.shape))], [whole], layout)
        else:
            view.send(self._device, [], [], layout)
        return view

    def _read(self, headers: torch.Tensor) -> None:
        """Check and read the messages of all members to this one: int64, [position in members, word]."""
        words = headers.numpy()[:, np.newaxis]
        size_headers.check("alltoall", self._name, self._members, words)
        self._received = [rows[0] for rows in size_headers.rows_of(words)]

    def _deliver(self, view: SlotView) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = self._results()
        if output.numel():
            view.fetch_views(self._device, [view.result(0, output.dtype, tuple(output.shape))], [output])
        return output, received

    def _results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(the rows that this rank gets, to be filled; how many of each rank)."""
        output = self._tensor.new_empty((sum(self._received), *self._tensor.shape[1:]))
        return output, torch.tensor(self._received, dtype=torch.int32, device=self._splits_device)

    def _first_message(self) -> torch.Tensor:
        words = [*size_headers.header("alltoall", self._tensor, self._name), *self._sent]
        return torch.tensor(words, dtype=torch.int64, device="cpu").view(torch.uint8)

    def _read_messages(self, direct: PeerRound, every: torch.Tensor) -> int:
        words = every.view(torch.int64)
        headers = words[:, : size_headers.WORDS].clone()
        headers[:, size_headers.ROWS] = words[:, size_headers.WORDS + self._me]
        self._read(headers)
        return _end(self._pieces(self._received))

    def _exchange_data(self, direct: PeerRound, every: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        me, others = self._me, direct.group.others
        sends, receives = self._pieces(self._sent), self._pieces(self._received)
        direct.check(_end(sends), _end(receives))
        output, received = self._results()
        given, taken = octets(self._tensor[: sum(self._sent)]), octets(output)
        (first, count), (target, _) = sends[me], receives[me]
        taken[target : target + count].copy_(given[first : first + count])
        direct.exchange(
            [((p,), [(given.data_ptr() + sends[p][0], sends[p][1])]) for p in others],
            {p: [(taken.data_ptr() + receives[p][0], receives[p][1])] for p in others},
            (given, output),
        )
        return output, received

    def _pieces(self, rows: Sequence[int]) -> tuple[tuple[int, int], ...]:
        lengths = [n * self._row_bytes for n in rows]
        return tuple(zip([0, *itertools.accumulate(lengths[:-1])], lengths, strict=True))


def _end(pieces: Sequence[tuple[int, int]]) -> int:
    offset, nbytes = pieces[-1]
    return offset + nbytes
