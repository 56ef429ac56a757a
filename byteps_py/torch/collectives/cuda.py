"""Copies CUDA tensors to and from slots without blocking the stream that computes.

The memory of a slot is page-locked once. Copies run on two side streams, one for each direction, ordered by events
against the caller's stream: no call waits for the whole device. One thread per device waits for the outgoing copies and
hands the slots over, because the service may only see bytes that have arrived. A program without CUDA tensors does not
import this module.

    caller's stream   computes ──┐                                ┌── sees the result
    out                          └► copy of a part ─► event       │
    the copier's thread                                 └► hand_over(part) … network …
    in                                                            └─ copy of the result, or of a part of it
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, cast

import torch

from byteps_py.errors import NotInitializedError
from byteps_py.session import Session, Slot
from byteps_py.system.shm import PAGE
from byteps_py.tensors import Layout
from byteps_py.torch.collectives.movers import Tensors, can_contribute_in_chunks, chunks_to_send

_JOIN_LIMIT_S = 10.0
_log = logging.getLogger("byteps_py")


class DeviceEvent(Protocol):
    """A place in a stream's work."""

    def synchronize(self) -> None:
        """Return when the work before it is done."""


class DeviceStream(Protocol):
    """Runs what is queued on it, in order. Waits are part of the queue: they do not stop the host."""

    def wait_stream(self, other: Any) -> None:
        """Let later work on this stream wait for all that is queued on ``other`` now."""

    def wait_event(self, event: Any) -> None:
        """Let later work on this stream wait for ``event``."""

    def record_event(self, event: Any) -> Any:
        """Make ``event`` stand for all that is queued now, and return it."""

    def synchronize(self) -> None:
        """Return when all that is queued has run."""


class DeviceStreams(Protocol):
    """The calls to CUDA that order copies. Tests have another one, which finds copies that nothing orders."""

    def new_stream(self, device: torch.device) -> DeviceStream:
        """Another stream."""

    def current(self, device: torch.device) -> DeviceStream:
        """The calling thread's stream, on which torch queues its operations."""

    def using(self, stream: DeviceStream) -> AbstractContextManager[object]:
        """Make ``stream`` the calling thread's."""

    def new_event(self) -> DeviceEvent:
        """An event whose waiter sleeps, not spins."""

    def lock(self, device: torch.device, pages: range) -> int:
        """Lock these addresses for copies. Returns CUDA's error number, or 0."""

    def unlock(self, pages: range) -> None:
        """Undo ``lock``."""


class CudaStreams:
    """See DeviceStreams."""

    def new_stream(self, device: torch.device) -> DeviceStream:
        return torch.cuda.Stream(device)

    def current(self, device: torch.device) -> DeviceStream:
        return torch.cuda.current_stream(device)

    def using(self, stream: DeviceStream) -> AbstractContextManager[object]:
        return cast(AbstractContextManager[object], torch.cuda.stream(cast(torch.cuda.Stream, stream)))

    def new_event(self) -> DeviceEvent:
        return torch.cuda.Event(blocking=True)

    def lock(self, device: torch.device, pages: range) -> int:
        with torch.cuda.device(device):
            return int(torch.cuda.cudart().cudaHostRegister(pages.start, len(pages), 0))

    def unlock(self, pages: range) -> None:
        torch.cuda.cudart().cudaHostUnregister(pages.start)


class _Departure(NamedTuple):
    """``nbytes`` of a slot's input (None: all) can be handed over after ``copied``. ``done``: of the whole slot."""

    copied: DeviceEvent
    session: Session
    slot: Slot
    nbytes: int | None
    layout: Layout | None
    done: Future[None]

    @property
    def is_last(self) -> bool:
        return self.nbytes is None or self.nbytes == self.slot.spec.nbytes


class _QueuedOnCuda:
    """See QueuedWork."""

    def __init__(self, streams: DeviceStreams, device: torch.device) -> None:
        self._streams, self._device = streams, device
        self._event = streams.current(device).record_event(streams.new_event())

    def order(self, *tensors: torch.Tensor) -> None:
        current = self._streams.current(self._device)
        current.wait_event(self._event)
        for tensor in tensors:
            tensor.record_stream(cast(torch.cuda.Stream, current))

    def synchronize(self) -> None:
        self._event.synchronize()

    def renewed(self) -> _QueuedOnCuda:
        return _QueuedOnCuda(self._streams, self._device)


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

    def __init__(self, device: torch.device, streams: DeviceStreams | None = None) -> None:
        self._device = device
        self._streams = streams or CudaStreams()
        self._out, self._in = self._streams.new_stream(device), self._streams.new_stream(device)
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
        with self._lock:
            stale, pages = self._locked.add(address, memory)
            if stale:  # copies of these pages may be under way
                self._out.synchronize()
                self._in.synchronize()
                self._unlock(stale)
            if pages is None:
                return
            error = self._streams.lock(self._device, pages)
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
            self._in.synchronize()  # the host writes below, and an earlier fetch may still read the same memory
        departure: Future[None] = Future()
        self._out.wait_stream(self._streams.current(self._device))
        self._out.wait_stream(self._in)  # the round overwrites what an earlier fetch may still read
        with self._lock, self._streams.using(self._out):
            if can_contribute_in_chunks(session, slot, views, tensors):
                for view, tensor, written in chunks_to_send(session, slot, views[0], tensors[0]):
                    self._copy_out((view,), (tensor,))
                    self._leave(session, slot, departure, written)
            else:
                self._copy_out(views, tensors)
                self._leave(session, slot, departure, None, layout)
        return departure

    def _copy_out(self, views: Sequence[torch.Tensor], tensors: Tensors) -> None:
        for view, tensor in zip(views, tensors, strict=True):
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor.to(view.dtype), non_blocking=True)  # converted on the device
                tensor.record_stream(cast(torch.cuda.Stream, self._out))

    def _leave(
        self, session: Session, slot: Slot, departure: Future[None], nbytes: int | None, layout: Layout | None = None
    ) -> None:
        copied = self._out.record_event(self._streams.new_event())
        self._outgoing.put(_Departure(copied, session, slot, nbytes, layout, departure))

    def fetch(self, views: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """See Mover. Copies on a side stream; the caller's current stream waits for them."""
        # The outputs may still be in use by work queued on the caller's stream.
        caller = self._streams.current(self._device)
        self._in.wait_stream(caller)
        with self._lock, self._streams.using(self._in):
            for view, output in zip(views, outputs, strict=True):
                output.copy_(view, non_blocking=True)  # converted on the device
                output.record_stream(cast(torch.cuda.Stream, self._in))  # it may have come from another stream
        caller.wait_stream(self._in)

    def finish_fetches(self) -> None:
        self._in.synchronize()

    def queued(self) -> _QueuedOnCuda:
        return _QueuedOnCuda(self._streams, self._device)

    def here(self) -> AbstractContextManager[object]:
        return self._streams.using(self._streams.current(self._device))

    def aside(self) -> Callable[[], AbstractContextManager[object]]:
        return functools.partial(self._streams.using, self._streams.new_stream(self._device))

    def close(self) -> None:
        """End the thread. Outgoing copies that are not handed over yet fail with NotInitializedError."""
        self._outgoing.put(None)
        self._thread.join(_JOIN_LIMIT_S)
        try:
            self._out.synchronize()
            self._in.synchronize()
        except RuntimeError as error:  # no call of this process to the device succeeds any more
            _log.warning("%s has failed: %s", self._device, str(error).partition("\n")[0])
        self._unlock(self._locked.clear())

    def _deliver(self) -> None:
        while (item := self._outgoing.get()) is not None:
            if item.done.done():  # an earlier part has failed
                continue
            try:
                item.copied.synchronize()  # frees the GIL
                item.session.hand_over(item.slot, item.nbytes, item.layout)
            except Exception as error:
                item.done.set_exception(error)
            else:
                if item.is_last:
                    item.done.set_result(None)
        while not self._outgoing.empty():
            if (item := self._outgoing.get()) is not None and not item.done.done():
                item.done.set_exception(NotInitializedError("shut down before the tensor was copied from its device"))

    def _unlock(self, pages: Iterable[range]) -> None:
        for one in pages:
            self._streams.unlock(one)
