"""A slot of the session as torch sees it: copies in, hand-over, wait, copies out.

``SlotView`` takes any layout of bytes or elements, and can be declared again. ``PieceView`` has pieces of fixed shapes:
the gradients of a bucket, concatenated, or a single tensor. Neither knows names, groups, handles or futures. One thread
at a time: a thread that starts operations holds the lock of its group, queue or name.
"""

from __future__ import annotations

import ctypes
import math
import operator
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from byteps_py.errors import StallError, UsageError
from byteps_py.session import Session, Slot
from byteps_py.tensors import DType, Layout, Op, TensorSpec
from byteps_py.torch.collectives.dtypes import WIRE
from byteps_py.torch.collectives.movers import HostMover, Mover, MoverOf, QueuedWork, Tensors
from byteps_py.wire.chunks import CHUNK_BYTES, chunk_at

if TYPE_CHECKING:
    from byteps_py.torch.collectives.work import Work

TORCH = {wire: dtype for dtype, wire in WIRE.items()}
CPU = torch.device("cpu")
#: A tensor and its offset in the slot, in elements of the slot's dtype.
Place = tuple[int, torch.Tensor]
#: A device-to-host copy that takes longer than this has failed.
_COPY_LIMIT_S = 600.0
#: Up to this size, one thread copies as fast as several.
_SMALL_BYTES = 1 << 20


class SlotView:
    """``declare`` or ``adopt`` comes before the first ``begin``, and after a failure.

    ``occupant``: the operation under way, None if the slot is vacant.
    """

    def __init__(self, session: Session, mover_of: MoverOf) -> None:
        self.session = session
        self.occupant: Work | None = None
        self._slot: Slot | None = None
        self._mover_of = mover_of
        self._departure: Future[None] | None = None
        self._adopted: set[int] = set()  # movers that know the slot's memory
        self._fetched_by: Mover | None = None  # which may still copy the last result to its device
        self._due: Sequence[Place] = ()  # where the result goes, if it is delivered in chunks
        self._taken: list[tuple[int, int]] = []  # (offset, length) in bytes: copied parts of the result
        self._receives_in_chunks: bool | None = None  # None: the session was not asked yet
        self._inputs: list[torch.Tensor] = []
        self._result = torch.empty(0, device="cpu")

    # ---- declaration -----------------------------------------------------------------------------------

    def declare(self, spec: TensorSpec) -> None:
        """Make the slot fit ``spec``. It must be vacant. Raises the errors of Session.declare."""
        before = self._slot
        if before is not None and before.error is None and before.spec.agrees_with(spec) and spec.fits_in(before.spec):
            return
        if self._fetched_by is not None:
            self._fetched_by.finish_fetches()  # the memory goes to another slot
            self._fetched_by = None
        self.adopt(self.session.declare([spec])[0])

    def declare_bytes(self, name: str, op: Op, group: tuple[int, ...], nbytes_in: int, nbytes_out: int) -> None:
        """Make the slot fit a gather or an exchange of ``nbytes_in`` and ``nbytes_out`` bytes. It never shrinks."""
        if not self.fits(nbytes_in, nbytes_out):
            had = self._slot.spec.shape if self._slot is not None and self._slot.spec.op is op else (0, 0)
            buffer = [
                have if want <= have else capacity_for(want)
                for want, have in zip((nbytes_in, nbytes_out), had, strict=True)
            ]
            self.declare(TensorSpec(name, DType.UINT8, tuple(buffer), op, group=group))

    def adopt(self, slot: Slot) -> None:
        """Use ``slot``, which has just been declared."""
        if slot is not self._slot:
            self._slot = slot
            self._adopted.clear()
            self._receives_in_chunks = None
            self._view_memory(slot)

    def _view_memory(self, slot: Slot) -> None:
        dtype = TORCH[slot.spec.dtype]
        self._inputs = [_elements(memory, dtype) for memory in slot.inputs]
        self._result = _elements(slot.result, dtype)

    def fits(self, nbytes_in: int, nbytes_out: int) -> bool:
        """True if a gather or an exchange of these sizes needs no new declaration."""
        slot = self._slot
        return (
            slot is not None and slot.error is None and all(map(operator.le, (nbytes_in, nbytes_out), slot.spec.shape))
        )

    @property
    def slot(self) -> Slot:
        """The slot of the latest declaration. Raises UsageError before the first one."""
        if self._slot is None:
            raise UsageError("a slot is used before it is declared")
        return self._slot

    @property
    def name(self) -> str:
        """The name of the slot's tensor. Raises UsageError before the first declaration."""
        return self.slot.spec.name

    @property
    def is_usable(self) -> bool:
        """False before the first declaration and after a failed one: the slot must be declared (again)."""
        return self._slot is not None and self._slot.error is None

    @property
    def has_failed(self) -> bool:
        """True if its declaration has failed."""
        return self._slot is not None and self._slot.error is not None

    # ---- memory ----------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the slot's elements."""
        return TORCH[self.slot.spec.dtype]

    def input(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A part of the next contribution, of a slot of bytes. ``offset`` in bytes."""
        return _typed(self._input, offset, dtype, shape)

    def result(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A part of the result, of a slot of bytes; valid from ``wait`` to the next round. ``offset`` in bytes."""
        return _typed(self._result, offset, dtype, shape)

    @property
    def _input(self) -> torch.Tensor:
        """The buffer for the next contribution."""
        return self._inputs[self.slot.round % len(self._inputs)]

    # ---- a round ---------------------------------------------------------------------------------------

    def begin(
        self, device: torch.device, places: Sequence[Place], layout: Layout | None = None, due: Sequence[Place] = ()
    ) -> None:
        """Copy tensors in and hand the round over. CUDA: both happen later, ordered after the caller's stream.

        ``due``: where ``fetch_places`` will copy the result; ``wait`` copies the parts that are delivered early. Raises
        the errors of Session.hand_over.
        """
        self._taken.clear()
        self._due = due if self._can_receive_in_chunks(device, due) else ()
        buffer = self._input
        if self._is_small_copy(device, places, buffer):
            for offset, tensor in places:
                nbytes = tensor.numel() * buffer.itemsize
                ctypes.memmove(buffer.data_ptr() + offset * buffer.itemsize, tensor.data_ptr(), nbytes)
            self._departure = None
            self.session.hand_over(self.slot, layout=layout)
            return
        views = [_piece(buffer, offset, tensor) for offset, tensor in places]
        self.send(device, views, [tensor.detach() for _, tensor in places], layout)

    def send(
        self, device: torch.device, views: Sequence[torch.Tensor], tensors: Tensors, layout: Layout | None = None
    ) -> None:
        """Copy tensors (None: zeros) to views of the input, and hand it over. CUDA: both happen later, ordered after
        the caller's stream."""
        mover = self._mover(device)
        if self._fetched_by is not None and self._fetched_by is not mover:
            self._fetched_by.finish_fetches()  # the copy of its last result is not ordered with these copies
            self._fetched_by = None
        with torch.no_grad():
            self._departure = mover.send(self.session, self.slot, views, tensors, layout)

    def hand_over(self, layout: Layout | None = None) -> None:
        """Hand over the current bytes of the input."""
        if self._fetched_by is not None:  # the copy from the result may still run; the mover orders the two
            self._departure = self._fetched_by.send(self.session, self.slot, (), (), layout)
        else:
            self._departure = None
            self.session.hand_over(self.slot, layout=layout)

    def wait_for_departure(self, timeout_s: float | None = None) -> None:
        """Return when the round has been handed over. Raises StallError, and the error of the hand-over."""
        departure = self._departure
        if departure is not None:
            limit_s = _COPY_LIMIT_S if timeout_s is None else min(timeout_s, _COPY_LIMIT_S)
            try:
                departure.result(limit_s)
            except TimeoutError as error:
                raise StallError(f"tensor {self.name!r}: not copied from its device within {limit_s:g} s") from error
            self._departure = None

    @property
    def is_done(self) -> bool:
        """True if ``wait`` would return, or raise, at once."""
        return (self._departure is None or self._departure.done()) and self.session.is_done(self.slot)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the result of the round is delivered. Raises the errors of Session.wait."""
        self.wait_for_departure(timeout_s)
        slot = self.slot
        if self._due and timeout_s is not None:
            deadline = time.monotonic() + timeout_s
            while chunks := self.session.wait_for_chunks(slot, max(0.0, deadline - time.monotonic())):
                for chunk in chunks:
                    self._take(*chunk_at(chunk, len(slot.result)))
            timeout_s = max(0.0, deadline - time.monotonic())
        self.session.wait(slot, timeout_s)

    def fetch_places(self, device: torch.device, places: Sequence[Place]) -> None:
        """Copy the result to the tensors of ``places``."""
        buffer = self._result
        if self._taken:
            end = 0
            for offset, nbytes in sorted([*self._taken, (len(self.slot.result), 0)]):
                self._take(end, offset - end)
                end = offset + nbytes
        elif self._is_small_copy(device, places, buffer):
            for offset, tensor in places:
                nbytes = tensor.numel() * buffer.itemsize
                ctypes.memmove(tensor.data_ptr(), buffer.data_ptr() + offset * buffer.itemsize, nbytes)
        else:
            views = [_piece(buffer, offset, tensor) for offset, tensor in places]
            self.fetch_views(device, views, [tensor.detach() for _, tensor in places])

    def fetch_views(self, device: torch.device, views: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Copy views of the result to ``outputs``, converting dtypes."""
        if views:
            mover = self._mover(device)
            self._fetched_by = mover if device.type == "cuda" else None
            with torch.no_grad():
                mover.fetch(views, outputs)

    def clear(self) -> None:
        """The operation is over: keep no reference to the caller's tensors."""
        self.occupant, self._due = None, ()

    def queued(self, device: torch.device) -> QueuedWork | None:
        """See Mover.queued."""
        return self._mover_of(device).queued()

    # ---- details ---------------------------------------------------------------------------------------

    def _mover(self, device: torch.device) -> Mover:
        """The mover of ``device``, after it has adopted the slot's memory."""
        mover = self._mover_of(device)
        if id(mover) not in self._adopted:
            self._adopted.add(id(mover))
            for memory in {id(memory): memory for memory in (*self.slot.inputs, self.slot.result)}.values():
                mover.adopt(memory)
        return mover

    def _can_receive_in_chunks(self, device: torch.device, due: Sequence[Place]) -> bool:
        """True if chunks gain something, and all bytes are copied unchanged."""
        if device.type not in ("cpu", "cuda") or len(self.slot.result) < 2 * CHUNK_BYTES or not due:
            return False
        if not all(tensor.dtype is self._result.dtype and tensor.is_contiguous() for _, tensor in due):
            return False
        if self._receives_in_chunks is None:
            self._receives_in_chunks = self.session.request_chunks(self.slot)
        return self._receives_in_chunks

    def _take(self, offset: int, nbytes: int) -> None:
        """Copy a range of the result, in bytes, to where it is due."""
        itemsize = self._result.itemsize
        for place, tensor in self._due:
            first, length = place * itemsize, tensor.numel() * itemsize
            begin, end = max(offset, first), min(offset + nbytes, first + length)
            if begin >= end:
                continue
            if tensor.device.type == "cpu":
                ctypes.memmove(tensor.data_ptr() + begin - first, self._result.data_ptr() + begin, end - begin)
            else:
                view = self._result[begin // itemsize : end // itemsize]
                output = tensor.detach().view(-1)[(begin - first) // itemsize : (end - first) // itemsize]
                self.fetch_views(tensor.device, [view], [output])
        self._taken.append((offset, nbytes))

    def _is_small_copy(self, device: torch.device, places: Sequence[Place], buffer: torch.Tensor) -> bool:
        """True for plain copies of little memory, where torch's own calls would cost more than the copy."""
        if device.type != "cpu" or self._fetched_by is not None:
            return False
        return all(
            tensor.dtype is buffer.dtype and tensor.is_contiguous() and tensor.numel() * buffer.itemsize <= _SMALL_BYTES
            for _, tensor in places
        )


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """A tensor to declare. ``dtype``, ``shapes``: of its pieces; the dtype is one of the wire's. ``device``: of the
    tensors that are copied. ``result_shapes``: of the pieces of the result, if these differ."""

    spec: TensorSpec
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    device: torch.device
    result_shapes: tuple[tuple[int, ...], ...] | None = None


class PieceView(SlotView):
    """A slot as consecutive pieces of the request's shapes and dtype."""

    def __init__(self, session: Session, mover_of: MoverOf, slot: Slot, request: TensorRequest) -> None:
        super().__init__(session, mover_of)
        self.request = request
        self.shapes = request.shapes
        self.adopt(slot)
        self.mover = self._mover(request.device)

    def _view_memory(self, slot: Slot) -> None:
        request = self.request
        self._piece_inputs = [pieces(memory, request.dtype, request.shapes) for memory in slot.inputs]
        shapes = request.shapes if request.result_shapes is None else request.result_shapes
        #: The pieces of the result, valid from ``wait`` to the next round.
        self.results = pieces(slot.result, request.dtype, shapes)
        #: Their addresses.
        self.result_addresses = [piece.data_ptr() for piece in self.results]
        self._input_addresses = [np.frombuffer(m, np.uint8).ctypes.data if len(m) else 0 for m in slot.inputs]

    @property
    def dtype(self) -> torch.dtype:
        return self.request.dtype

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The pieces of the next contribution."""
        return self._piece_inputs[self.slot.round % len(self._piece_inputs)]

    @property
    def input_address(self) -> int:
        """The address of the first of them."""
        return self._input_addresses[self.slot.round % len(self._input_addresses)]

    @property
    def is_on_device(self) -> bool:
        """True if its tensors are not in the host's memory."""
        return not isinstance(self.mover, HostMover)

    def contribute(self, tensors: Tensors) -> None:
        """Copy ``tensors``, one for each piece (None: zeros), and hand the slot over."""
        with torch.no_grad():
            self._departure = self.mover.send(self.session, self.slot, self.inputs, tensors)

    def contribute_input(self) -> None:
        """Hand over the current bytes of the input. A rank that is not the root of a broadcast also takes part this
        way."""
        self._departure = self.mover.send(self.session, self.slot, (), ())

    def fetch(self, outputs: Sequence[torch.Tensor], pieces: Sequence[int] | None = None) -> None:
        """Copy the results (of the pieces with these indices; None: all) to ``outputs``, converting dtypes."""
        views = self.results if pieces is None else [self.results[i] for i in pieces]
        if outputs:
            with torch.no_grad():
                self.mover.fetch(views, outputs)


def capacity_for(nbytes: int) -> int:
    """The capacity that is declared for ``nbytes``: at most a quarter more, so that a growing tensor is rarely declared
    again.

    >>> [capacity_for(n) for n in (0, 1, 4096, 5000, 100_000)]
    [0, 4096, 4096, 5120, 114688]
    """
    if nbytes <= 4096:
        return 4096 if nbytes else 0
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


def pieces(memory: memoryview, dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """``memory`` as consecutive tensors of ``shapes``; they share it."""
    # Through numpy, which keeps the memory mapped as long as a view exists; torch.frombuffer does not.
    # Each piece separately: slices of one tensor would share its version counter, so that a change of one
    # gradient would look like a change of all.
    found = []
    start = 0
    for shape in shapes:
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes:
            octets = np.frombuffer(memory, np.uint8, nbytes, start)
            found.append(torch.from_numpy(octets).view(dtype).view(tuple(shape)))
        else:
            found.append(torch.empty(tuple(shape), dtype=dtype, device="cpu"))
        start += nbytes
    return found


def _elements(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The whole of ``memory`` as a flat tensor."""
    if not memory.nbytes:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(dtype)


def _piece(buffer: torch.Tensor, offset: int, tensor: torch.Tensor) -> torch.Tensor:
    """The part of ``buffer`` from ``offset``, in elements, with the shape of ``tensor``."""
    shape = tensor.shape
    count = math.prod(shape)
    piece = buffer if not offset and count == buffer.numel() else buffer[offset : offset + count]
    return piece if len(shape) == 1 else piece.view(shape)


def _typed(octets: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return octets[offset : offset + nbytes].view(dtype).view(shape)
