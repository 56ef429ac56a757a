"""Copies CUDA tensors to and from slots without blocking the stream that computes.

The memory of a slot is page-locked once. Copies run on a side stream, ordered by events against the caller's stream.
One thread per device waits for the outgoing copies and hands the slots over, because the service may only see bytes
that have arrived. A program without CUDA tensors does not import this module.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import torch

from byteps_py.errors import NotInitializedError
from byteps_py.session import Session, Slot
from byteps_py.system.shm import PAGE
from byteps_py.tensors import Layout
from byteps_py.torch.collectives.slot_view import Tensors

_JOIN_LIMIT_S = 10.0
_log = logging.getLogger("byteps_py")


_Departure = tuple[torch.cuda.Event, Session, Slot, Layout | None, Future[None]]


class LockedPages:
    """The ranges of addresses that are locked for copies, and the memory that each holds on to. Not thread-safe.

    CUDA refuses a copy of which only a part is locked, and does not lock a page twice. Memory that a slot gave back
    goes to others, in other pieces: a new slot may begin where a smaller one began, or in the middle of one.
    """

    def __init__(self) -> None:
        self._ranges: dict[range, list[memoryview]] = {}

    def add(self, address: int, memory: memoryview) -> tuple[list[range], range | None]:
        """``memory`` begins at ``address`` and has to be locked as a whole.

        Returns the ranges to unlock, and then the one to lock (None: it is locked already). Locked pages stay locked:
        the new range spans all those that it overlaps.
        """
        wanted = range(address, address + memory.nbytes)
        overlapping = [one for one in self._ranges if one.start < wanted.stop and wanted.start < one.stop]
        if any(one.start <= wanted.start and wanted.stop <= one.stop for one in overlapping):
            return [], None
        whole = range(min(one.start for one in [wanted, *overlapping]), max(one.stop for one in [wanted, *overlapping]))
        held = [view for one in overlapping for view in self._ranges.pop(one)]
        self._ranges[whole] = [*held, memory]
        return overlapping, whole

    def remove(self, pages: range) -> None:
        """``pages`` could not be locked."""
        del self._ranges[pages]

    def clear(self) -> list[range]:
        """Forget all ranges, and return them."""
        ranges = list(self._ranges)
        self._ranges.clear()
        return ranges


class CudaCopier:
    """The mover of one CUDA device. ``close`` ends its thread and unlocks the pages. Any thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._locked = LockedPages()
        self._lock = threading.Lock()  # nobody queues a copy of pages that another thread unlocks
        self._outgoing: queue.SimpleQueue[_Departure | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._deliver, name=f"byteps-copy-{device}", daemon=True)
        self._thread.start()

    def adopt(self, memory: memoryview) -> None:
        """Page-lock ``memory`` if it begins at a page and has at least one; otherwise CUDA copies through a buffer of
        its own."""
        if memory.nbytes < PAGE:
            return
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        if address % PAGE:
            return
        with self._lock, torch.cuda.device(self._device):
            stale, pages = self._locked.add(address, memory)
            if stale:
                self._side.synchronize()  # copies of these pages may be under way
                _unlock(stale)
            if pages is None:
                return
            error = int(torch.cuda.cudart().cudaHostRegister(pages.start, len(pages), 0))
            if error:
                self._locked.remove(pages)
                _log.warning(
                    "cudaHostRegister of %d bytes failed (CUDA error %d): copies are slower", len(pages), error
                )

    def send(
        self,
        session: Session,
        slot: Slot,
        views: Sequence[torch.Tensor],
        tensors: Tensors,
        layout: Layout | None = None,
    ) -> Future[None]:
        """See Mover. The tensors must not change until the operation has been waited for."""
        if any(tensor is None for tensor in tensors):
            self._side.synchronize()  # the host writes below, and an earlier fetch may still read the same memory
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with self._lock, torch.cuda.stream(self._side):
            for view, tensor in zip(views, tensors, strict=True):
                if tensor is None:
                    view.zero_()
                else:
                    view.copy_(tensor.to(view.dtype), non_blocking=True)  # converted on the device
                    tensor.record_stream(self._side)
            copied = self._side.record_event(torch.cuda.Event(blocking=True))  # its waiter sleeps, not spins
        departure: Future[None] = Future()
        self._outgoing.put((copied, session, slot, layout, departure))
        return departure

    def fetch(self, views: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """See Mover. Copies on the side stream; the caller's current stream waits for them."""
        # The outputs may still be in use by work queued on the caller's stream.
        caller = torch.cuda.current_stream(self._device)
        self._side.wait_stream(caller)
        with self._lock, torch.cuda.stream(self._side):
            for view, output in zip(views, outputs, strict=True):
                output.copy_(view, non_blocking=True)  # converted on the device
        caller.wait_stream(self._side)

    def close(self) -> None:
        """End the thread. Outgoing copies that are not handed over yet fail with NotInitializedError."""
        self._outgoing.put(None)
        self._thread.join(_JOIN_LIMIT_S)
        try:
            self._side.synchronize()
        except RuntimeError as error:  # no call of this process to the device succeeds any more
            _log.warning("%s has failed: %s", self._device, str(error).partition("\n")[0])
        _unlock(self._locked.clear())

    def _deliver(self) -> None:
        while (item := self._outgoing.get()) is not None:
            copied, session, slot, layout, departure = item
            try:
                copied.synchronize()  # frees the GIL
                session.hand_over(slot, layout=layout)
            except Exception as error:
                departure.set_exception(error)
            else:
                departure.set_result(None)
        while not self._outgoing.empty():
            if (item := self._outgoing.get()) is not None:
                item[4].set_exception(NotInitializedError("shut down before the tensor was copied from its device"))


def _unlock(pages: Iterable[range]) -> None:
    for one in pages:
        torch.cuda.cudart().cudaHostUnregister(one.start)
