"""A slot of the session as torch sees it: copies in, hand-over, wait, copies out.

``SlotView`` takes any layout of bytes or elements, and may be declared again. ``PieceView`` has pieces of fixed shapes:
the gradients of a bucket, laid end to end, or a single tensor. Neither knows names, groups, handles or futures. One
thread at a time: a thread that starts operations holds the lock of its group, queue or name.
"""

from __future__ import annotations

import ctypes
import math
import operator
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from byteps_py.chunks import CHUNK_BYTES, chunk_at
from byteps_py.errors import StallError, UsageError
from byteps_py.session import Session, Slot
from byteps_py.tensors import DType, Layout, Op, TensorSpec
from byteps_py.torch.engine.dtypes import WIRE
from byteps_py.torch.engine.movers import HostMover, Mover, Tensors

if TYPE_CHECKING:
    from byteps_py.torch.engine.work import Work

TORCH = {wire: dtype for dtype, wire in WIRE.items()}
CPU = torch.device("cpu")
MoverOf = Callable[[torch.device], Mover]
#: A tensor and its offset in the slot, in elements of the slot's dtype.
Place = tuple[int, torch.Tensor]
#: A device-to-host copy that takes longer than this has failed.
_COPY_LIMIT_S = 600.0
#: Below this, one thread copies as fast as several.
_LITTLE_BYTES = 1 << 20


class SlotView:
    """``declare`` or ``adopt`` comes before the first ``begin``, and after a failure.

    ``occupant``: the operation under way in it, None if the slot is vacant.
    """

    def __init__(self, session: Session, mover_of: MoverOf) -> None:
        self.session = session
        self.occupant: Work | None = None
        self._slot: Slot | None = None
        self._mover_of = mover_of
        self._departure: Future[None] | None = None
        self._adopted: set[int] = set()  # movers that know the slot's memory
        self._fetched_on: torch.device | None = None  # the CUDA device to which the last result was copied
        self._due: Sequence[Place] = ()  # where the result goes, if it comes in strips
        self._taken: list[tuple[int, int]] = []  # (offset, length) in bytes, of the result: copied there already
        self._comes_in_strips: bool | None = None  # None: not asked for
        self._inputs: list[torch.Tensor] = []
        self._result = torch.empty(0)

    # ---- declaration -----------------------------------------------------------------------------------

    def declare(self, spec: TensorSpec) -> None:
        """Have room for ``spec``. The slot must be vacant."""
        before = self._slot
        if before is not None and before.error is None and before.spec.agrees_with(spec) and spec.fits_in(before.spec):
            return
        self.adopt(self.session.declare([spec])[0])

    def declare_bytes(self, name: str, op: Op, group: tuple[int, ...], nbytes_in: int, nbytes_out: int) -> None:
        """Have room for a gather or an exchange of so many bytes, and at least for what there was room for."""
        if not self.has_room(nbytes_in, nbytes_out):
            had = self._slot.spec.shape if self._slot is not None and self._slot.spec.op is op else (0, 0)
            room = [
                have if want <= have else room_for(want)
                for want, have in zip((nbytes_in, nbytes_out), had, strict=True)
            ]
            self.declare(TensorSpec(name, DType.UINT8, tuple(room), op, group=group))

    def adopt(self, slot: Slot) -> None:
        """Use ``slot``, which has just been declared."""
        if slot is not self._slot:
            self._slot = slot
            self._adopted.clear()
            self._comes_in_strips = None
            self._view_memory(slot)

    def _view_memory(self, slot: Slot) -> None:
        dtype = TORCH[slot.spec.dtype]
        self._inputs = [_elements(memory, dtype) for memory in slot.inputs]
        self._result = _elements(slot.result, dtype)

    def has_room(self, nbytes_in: int, nbytes_out: int) -> bool:
        """True if a gather or an exchange of so many bytes needs no new declaration."""
        slot = self._slot
        return (
            slot is not None and slot.error is None and all(map(operator.le, (nbytes_in, nbytes_out), slot.spec.shape))
        )

    @property
    def slot(self) -> Slot:
        if self._slot is None:
            raise UsageError("a slot is used before it is declared")
        return self._slot

    @property
    def name(self) -> str:
        return self.slot.spec.name

    @property
    def is_usable(self) -> bool:
        """False before the first declaration, and once a declaration has failed: it must be declared again."""
        return self._slot is not None and self._slot.error is None

    @property
    def has_failed(self) -> bool:
        """True if its declaration has become void."""
        return self._slot is not None and self._slot.error is not None

    # ---- memory ----------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        return TORCH[self.slot.spec.dtype]

    def input(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A piece of the next contribution, of a slot of bytes."""
        return _typed(self._input, offset, dtype, shape)

    def result(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A piece of the result, of a slot of bytes: valid from ``wait`` to the next round."""
        return _typed(self._result, offset, dtype, shape)

    @property
    def _input(self) -> torch.Tensor:
        """Where the next contribution lies."""
        return self._inputs[self.slot.round % len(self._inputs)]

    # ---- a round ---------------------------------------------------------------------------------------

    def begin(
        self, device: torch.device, places: Sequence[Place], layout: Layout | None = None, due: Sequence[Place] = ()
    ) -> None:
        """Copy tensors in and hand the round over. CUDA: both follow when the device has come so far.

        ``due``: where ``fetch_places`` will copy the result to; what of it is there early, ``wait`` copies.
        """
        self._taken.clear()
        self._due = due if self._may_come_in_strips(device, due) else ()
        room = self._input
        if self._is_little(device, places, room):
            for offset, tensor in places:
                nbytes = tensor.numel() * room.itemsize
                ctypes.memmove(room.data_ptr() + offset * room.itemsize, tensor.data_ptr(), nbytes)
            self._departure = None
            self.session.hand_over(self.slot, layout=layout)
            return
        views = [_piece(room, offset, tensor) for offset, tensor in places]
        self.send(device, views, [tensor.detach() for _, tensor in places], layout)

    def send(
        self, device: torch.device, views: Sequence[torch.Tensor], tensors: Tensors, layout: Layout | None = None
    ) -> None:
        """Copy tensors to views of the input, and hand it over. CUDA: both follow when the device has come so far."""
        if self._fetched_on is not None and self._fetched_on != device:
            torch.cuda.synchronize(self._fetched_on)  # its last result may still be read, in no order with these copies
            self._fetched_on = None
        with torch.no_grad():
            self._departure = self._mover(device).send(self.session, self.slot, views, tensors, layout)

    def hand_over(self, layout: Layout | None = None) -> None:
        """Hand over what the input holds."""
        if self._fetched_on is not None:  # the copy from the result may not be over yet: the mover knows
            self.send(self._fetched_on, (), (), layout)
        else:
            self._departure = None
            self.session.hand_over(self.slot, layout=layout)

    def wait_for_departure(self, timeout_s: float | None = None) -> None:
        """Return when the round has been handed over. Raises StallError."""
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
        """Return when the round's result is there. Raises what Session.wait raises."""
        self.wait_for_departure(timeout_s)
        slot = self.slot
        if self._due and timeout_s is not None:
            deadline = time.monotonic() + timeout_s
            while strips := self.session.wait_for_strips(slot, max(0.0, deadline - time.monotonic())):
                for strip in strips:
                    self._take(*chunk_at(strip, len(slot.result)))
            timeout_s = max(0.0, deadline - time.monotonic())
        self.session.wait(slot, timeout_s)

    def fetch_places(self, device: torch.device, places: Sequence[Place]) -> None:
        """Copy the result to tensors."""
        room = self._result
        if self._taken:
            end = 0
            for offset, nbytes in sorted([*self._taken, (len(self.slot.result), 0)]):
                self._take(end, offset - end)
                end = offset + nbytes
        elif self._is_little(device, places, room):
            for offset, tensor in places:
                nbytes = tensor.numel() * room.itemsize
                ctypes.memmove(tensor.data_ptr(), room.data_ptr() + offset * room.itemsize, nbytes)
        else:
            views = [_piece(room, offset, tensor) for offset, tensor in places]
            self.fetch_views(device, views, [tensor.detach() for _, tensor in places])

    def fetch_views(self, device: torch.device, views: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Copy views of the result to outputs, converting dtypes."""
        if views:
            self._fetched_on = device if device.type == "cuda" else None
            with torch.no_grad():
                self._mover(device).fetch(views, outputs)

    def vacate(self) -> None:
        """Its operation is over: nothing of the caller's is kept alive here."""
        self.occupant, self._due = None, ()

    # ---- inside ----------------------------------------------------------------------------------------

    def _mover(self, device: torch.device) -> Mover:
        """That of ``device``, which knows the slot's memory."""
        mover = self._mover_of(device)
        if id(mover) not in self._adopted:
            self._adopted.add(id(mover))
            for memory in {id(memory): memory for memory in (*self.slot.inputs, self.slot.result)}.values():
                mover.adopt(memory)
        return mover

    def _may_come_in_strips(self, device: torch.device, due: Sequence[Place]) -> bool:
        """Whether it is worth it, and all is to be copied as it lies."""
        if device.type != "cpu" or len(self.slot.result) < 2 * CHUNK_BYTES or not due:
            return False
        if not all(tensor.dtype is self._result.dtype and tensor.is_contiguous() for _, tensor in due):
            return False
        if self._comes_in_strips is None:
            self._comes_in_strips = self.session.take_in_strips(self.slot)
        return self._comes_in_strips

    def _take(self, offset: int, nbytes: int) -> None:
        """Copy a range of the result, in bytes, to where it is due."""
        itemsize = self._result.itemsize
        for place, tensor in self._due:
            first, length = place * itemsize, tensor.numel() * itemsize
            begin, end = max(offset, first), min(offset + nbytes, first + length)
            if begin < end:
                ctypes.memmove(tensor.data_ptr() + begin - first, self._result.data_ptr() + begin, end - begin)
        self._taken.append((offset, nbytes))

    def _is_little(self, device: torch.device, places: Sequence[Place], room: torch.Tensor) -> bool:
        """Whether a plain copy of little memory is all there is to do: torch's own calls would cost more than it."""
        if device.type != "cpu" or self._fetched_on is not None:
            return False
        return all(
            tensor.dtype is room.dtype and tensor.is_contiguous() and tensor.numel() * room.itemsize <= _LITTLE_BYTES
            for _, tensor in places
        )


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """A tensor to declare: its spec, and how torch sees it (wire dtype, pieces, device).

    ``result_shapes``: the pieces of the result, where they are others.
    """

    spec: TensorSpec
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    device: torch.device
    result_shapes: tuple[tuple[int, ...], ...] | None = None


class PieceView(SlotView):
    """A slot as pieces of the request's shapes, all of its dtype (the wire's), laid end to end."""

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
        #: The pieces of the result; what they show is valid from ``wait`` to the next round.
        self.results = pieces(slot.result, request.dtype, shapes)
        #: Where they lie.
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
        """Where they begin."""
        return self._input_addresses[self.slot.round % len(self._input_addresses)]

    @property
    def is_on_device(self) -> bool:
        """Its tensors are not in the host's memory."""
        return not isinstance(self.mover, HostMover)

    def contribute(self, tensors: Tensors) -> None:
        """Send ``tensors``, one per piece; None contributes zeros."""
        with torch.no_grad():
            self._departure = self.mover.send(self.session, self.slot, self.inputs, tensors)

    def contribute_input(self) -> None:
        """Send what the memory holds. A rank that is not the root of a broadcast takes part so, too."""
        self._departure = self.mover.send(self.session, self.slot, (), ())

    def fetch(self, outputs: Sequence[torch.Tensor], pieces: Sequence[int] | None = None) -> None:
        """Copy the results (of ``pieces``; default all) to ``outputs``, converting dtypes."""
        views = self.results if pieces is None else [self.results[i] for i in pieces]
        if outputs:
            with torch.no_grad():
                self.mover.fetch(views, outputs)


def room_for(nbytes: int) -> int:
    """The room that is made for ``nbytes``: at most a quarter more, so that a growing tensor is rarely declared again.

    >>> [room_for(n) for n in (0, 1, 4096, 5000, 100_000)]
    [0, 4096, 4096, 5120, 114688]
    """
    if nbytes <= 4096:
        return 4096 if nbytes else 0
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


def pieces(memory: memoryview, dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """``memory`` as tensors of ``shapes``, end to end."""
    # Through numpy, which keeps the memory mapped for as long as a view lives; torch.frombuffer does not.
    # Each piece by itself: pieces cut from one tensor would share its version counter, by which a change of
    # one gradient would look like a change of all.
    found = []
    start = 0
    for shape in shapes:
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes:
            octets = np.frombuffer(memory, np.uint8, nbytes, start)
            found.append(torch.from_numpy(octets).view(dtype).view(tuple(shape)))
        else:
            found.append(torch.empty(tuple(shape), dtype=dtype))
        start += nbytes
    return found


def _elements(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """All of ``memory``, flat."""
    if not memory.nbytes:
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(dtype)


def _piece(room: torch.Tensor, offset: int, tensor: torch.Tensor) -> torch.Tensor:
    """The piece of ``room``, from an offset in elements, with the tensor's shape."""
    shape = tensor.shape
    count = math.prod(shape)
    piece = room if not offset and count == room.numel() else room[offset : offset + count]
    return piece if len(shape) == 1 else piece.view(shape)


def _typed(octets: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    return octets[offset : offset + nbytes].view(dtype).view(shape)
