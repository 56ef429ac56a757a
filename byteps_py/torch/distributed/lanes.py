"""One slot of the session as torch sees it, used by one operation after the other.

Owns a slot's views and knows which operation is in it. Must not know process groups or futures. One thread at a time:
whoever starts operations holds the lock of its group or channel.
"""

from __future__ import annotations

import ctypes
import math
import operator
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import torch

from byteps_py.chunks import CHUNK_BYTES, chunk_at
from byteps_py.errors import StallError, UsageError
from byteps_py.session import Session, Slot
from byteps_py.tensors import Layout, TensorSpec
from byteps_py.torch.distributed.work import Pending
from byteps_py.torch.dtypes import WIRE
from byteps_py.torch.exchange import Mover

TORCH = {wire: dtype for dtype, wire in WIRE.items()}
MoverOf = Callable[[torch.device], Mover]
#: A tensor and where it goes, in elements of the lane's dtype.
Place = tuple[int, torch.Tensor]
_COPY_LIMIT_S = 600.0
#: Below this, one thread copies as fast as several.
_LITTLE_BYTES = 1 << 20


class Lane:
    """``declare`` before the first ``begin``, and after a failure."""

    def __init__(self, session: Session, mover_of: MoverOf) -> None:
        self._session = session
        self._mover_of = mover_of
        self._departure: Future[None] | None = None
        self._adopted: set[int] = set()
        self._fetched_on: torch.device | None = None  # a device that is not the host
        self._due: Sequence[Place] = ()  # where the result goes, if it is taken in strips
        self._taken: list[tuple[int, int]] = []  # (offset, length) in bytes, of the result: copied there already
        self._comes_in_strips: bool | None = None  # None: not asked for
        self.slot: Slot | None = None
        self.occupant: Pending | None = None
        self.inputs: list[torch.Tensor] = []
        self.result = torch.empty(0)

    def declare(self, spec: TensorSpec) -> None:
        """Have room for ``spec``. The lane must be vacant."""
        before = self.slot
        if before is not None and before.error is None and before.spec.agrees_with(spec) and spec.fits_in(before.spec):
            return
        self.adopt(self._session.declare([spec])[0])

    def adopt(self, slot: Slot) -> None:
        """Use ``slot``, which has just been declared."""
        if slot is not self.slot:
            self.slot = slot
            self._adopted.clear()
            self._comes_in_strips = None
            dtype = TORCH[slot.spec.dtype]
            self.inputs = [_view(memory, dtype) for memory in slot.inputs]
            self.result = _view(slot.result, dtype)

    def begin(
        self,
        device: torch.device,
        places: Sequence[Place],
        layout: Layout | None = None,
        due: Sequence[Place] = (),
    ) -> None:
        """Copy tensors in and hand the round over. CUDA: both follow when the device has come so far. ``due``: where
        ``fetch`` will copy the result to; what of it is there early, ``wait`` copies."""
        slot = self._declared
        self._taken.clear()
        self._due = due if self._may_come_in_strips(device, due) else ()
        room = self.inputs[slot.round % len(self.inputs)]
        if self._is_plain(device, places, room):
            for offset, tensor in places:
                nbytes = tensor.numel() * room.itemsize
                ctypes.memmove(room.data_ptr() + offset * room.itemsize, tensor.data_ptr(), nbytes)
            self._departure = None
            self._session.hand_over(slot, layout=layout)
            return
        mover = self._mover_of(device)
        if self._fetched_on is not None and self._fetched_on != device:
            torch.cuda.synchronize(self._fetched_on)  # its last result may still be read, in no order with these copies
            self._fetched_on = None
        if id(mover) not in self._adopted:
            self._adopted.add(id(mover))
            for memory in {id(memory): memory for memory in (*slot.inputs, slot.result)}.values():
                mover.adopt(memory)
        views = [self._piece(room, offset, tensor) for offset, tensor in places]
        with torch.no_grad():
            tensors = [tensor.detach() for _, tensor in places]
            self._departure = mover.send(self._session, slot, views, tensors, layout)

    def vacate(self) -> None:
        """Its operation is over: nothing of the caller's is kept alive here."""
        self.occupant, self._due = None, ()

    def departed(self, timeout_s: float) -> None:
        """Return when the round has been handed over. Raises StallError."""
        departure = self._departure
        if departure is not None:
            try:
                departure.result(min(timeout_s, _COPY_LIMIT_S))
            except TimeoutError as error:
                raise StallError(f"tensor {self._declared.spec.name!r}: still not copied from its device") from error
            self._departure = None

    @property
    def is_done(self) -> bool:
        """True if ``wait`` would return, or raise, at once."""
        return (self._departure is None or self._departure.done()) and self._session.is_done(self._declared)

    def wait(self, timeout_s: float) -> None:
        """Return when the round's result lies in ``result``. Raises what Session.wait raises."""
        self.departed(timeout_s)
        slot = self._declared
        if self._due:
            deadline = time.monotonic() + timeout_s
            while strips := self._session.wait_for_strips(slot, max(0.0, deadline - time.monotonic())):
                for strip in strips:
                    self._take(*chunk_at(strip, len(slot.result)))
            timeout_s = max(0.0, deadline - time.monotonic())
        self._session.wait(slot, timeout_s)

    def _may_come_in_strips(self, device: torch.device, due: Sequence[Place]) -> bool:
        """It is worth it, and all is to be copied as it lies."""
        if device.type != "cpu" or len(self._declared.result) < 2 * CHUNK_BYTES or not due:
            return False
        if not all(tensor.dtype is self.result.dtype and tensor.is_contiguous() for _, tensor in due):
            return False
        if self._comes_in_strips is None:
            self._comes_in_strips = self._session.take_in_strips(self._declared)
        return self._comes_in_strips

    def _take(self, offset: int, nbytes: int) -> None:
        """Copy a range of the result, in bytes, to where it is due."""
        itemsize = self.result.itemsize
        for place, tensor in self._due:
            first, length = place * itemsize, tensor.numel() * itemsize
            begin, end = max(offset, first), min(offset + nbytes, first + length)
            if begin < end:
                ctypes.memmove(tensor.data_ptr() + begin - first, self.result.data_ptr() + begin, end - begin)
        self._taken.append((offset, nbytes))

    def fetch(self, device: torch.device, places: Sequence[Place]) -> None:
        """Copy the result to tensors."""
        room = self.result
        if self._taken:
            end = 0
            for offset, nbytes in sorted([*self._taken, (len(self._declared.result), 0)]):
                self._take(end, offset - end)
                end = offset + nbytes
            return
        if self._is_plain(device, places, room):
            for offset, tensor in places:
                nbytes = tensor.numel() * room.itemsize
                ctypes.memmove(tensor.data_ptr(), room.data_ptr() + offset * room.itemsize, nbytes)
            return
        views = [self._piece(self.result, offset, tensor) for offset, tensor in places]
        if views:
            self._fetched_on = device if device.type == "cuda" else None
            with torch.no_grad():
                self._mover_of(device).fetch(views, [tensor.detach() for _, tensor in places])

    def _is_plain(self, device: torch.device, places: Sequence[Place], room: torch.Tensor) -> bool:
        """True if a plain copy of little memory is all there is to do: torch's own calls would cost more than it."""
        if device.type != "cpu" or self._fetched_on is not None:
            return False
        return all(
            tensor.dtype is room.dtype and tensor.is_contiguous() and tensor.numel() * room.itemsize <= _LITTLE_BYTES
            for _, tensor in places
        )

    def has_room(self, *nbytes: int) -> bool:
        """True if it need not be declared again for a gather or an exchange of so many bytes, in and out."""
        slot = self.slot
        return slot is not None and slot.error is None and all(map(operator.le, nbytes, slot.spec.shape))

    @property
    def name(self) -> str:
        """What its slot is called."""
        return self._declared.spec.name

    @property
    def usable(self) -> bool:
        """True if it has been declared and that is not void."""
        return self.slot is not None and self.slot.error is None

    @property
    def failed(self) -> bool:
        """True if its declaration has become void."""
        return self.slot is not None and self.slot.error is not None

    @property
    def _declared(self) -> Slot:
        if self.slot is None:
            raise UsageError("a lane is used before it is declared")
        return self.slot

    @staticmethod
    def _piece(room: torch.Tensor, offset: int, tensor: torch.Tensor) -> torch.Tensor:
        shape = tensor.shape
        count = math.prod(shape)
        piece = room if not offset and count == room.numel() else room[offset : offset + count]
        return piece if len(shape) == 1 else piece.view(shape)


def _view(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
    # Through numpy, which keeps the memory mapped for as long as a view lives; torch.frombuffer does not.
    if not memory.nbytes:
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(dtype)
