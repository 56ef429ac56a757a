"""Movers copy tensors to and from slots: one for each device. That of the host is here, that of CUDA in cuda.py.
None knows names, groups or operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from byteps_py.session import Session, Slot
from byteps_py.tensors import Layout
from byteps_py.wire.chunks import CHUNK_BYTES, TensorChunks

Tensors = Sequence[torch.Tensor | None]


class QueuedWork(Protocol):
    """What a thread had queued on its current stream of a device when it asked ``Mover.queued``. Any thread."""

    def order(self, *tensors: torch.Tensor) -> None:
        """What the calling thread queues from now on runs after it. ``tensors``: what that work reads; their memory
        stays as it is until then."""

    def synchronize(self) -> None:
        """Return when it has run."""

    def renewed(self) -> QueuedWork:
        """What the calling thread has queued on the same device by now."""


class Mover(Protocol):
    """Copies the tensors of one device to and from slots. Any thread."""

    def adopt(self, memory: memoryview) -> None:
        """``memory`` will be used for copies from now on."""

    def send(
        self,
        session: Session,
        slot: Slot,
        views: Sequence[torch.Tensor],
        tensors: Tensors,
        layout: Layout | None = None,
    ) -> Future[None] | None:
        """Copy tensors (None: zeros) to views of the slot's input, converting dtypes, then hand the slot over. Returns
        a future of that; None: it is done."""

    def fetch(self, views: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Copy views to outputs, converting dtypes, ordered before later work of the caller on the outputs."""

    def finish_fetches(self) -> None:
        """Return when the memory of views that were fetched may change."""

    def queued(self) -> QueuedWork | None:
        """What the calling thread has queued on the device; None: nothing is ever queued there."""

    def here(self) -> AbstractContextManager[object]:
        """A context in which any thread queues its work where the calling thread does now."""

    def aside(self) -> Callable[[], AbstractContextManager[object]]:
        """Makes contexts in which a thread queues its work apart from all other work, in order. One thread at a
        time."""

    def close(self) -> None:
        """Release the memory that ``adopt`` has acquired. No call follows."""


MoverOf = Callable[[torch.device], Mover]


class HostMover:
    """The mover for tensors in the host's memory: the calling thread copies."""

    def adopt(self, memory: memoryview) -> None:
        pass

    def send(
        self,
        session: Session,
        slot: Slot,
        views: Sequence[torch.Tensor],
        tensors: Tensors,
        layout: Layout | None = None,
    ) -> None:
        if not can_contribute_in_chunks(session, slot, views, tensors):
            copy_in(views, tensors)
            session.hand_over(slot, layout=layout)
            return
        for view, tensor, written in chunks_to_send(session, slot, views[0], tensors[0]):
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor)
            session.hand_over(slot, written)

    def fetch(self, views: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(list(outputs), list(views))

    def finish_fetches(self) -> None:
        pass

    def queued(self) -> None:
        return None

    def here(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def aside(self) -> Callable[[], AbstractContextManager[object]]:
        return contextlib.nullcontext

    def close(self) -> None:
        pass


def can_contribute_in_chunks(session: Session, slot: Slot, views: Sequence[torch.Tensor], tensors: Tensors) -> bool:
    """True if chunks gain something: other machines wait for the first of them, and all bytes are copied unchanged."""
    if session.num_machines == 1 or slot.spec.nbytes < 2 * CHUNK_BYTES or len(views) != 1:
        return False
    tensor = tensors[0]
    is_there = tensor is not None and tensor.data_ptr() == views[0].data_ptr()
    return slot.spec.op.kernel.is_reduction and not is_there and (tensor is None or tensor.is_contiguous())


def chunks_to_send(
    session: Session, slot: Slot, view: torch.Tensor, tensor: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, int]]:
    """The chunks of ``tensor`` (None: zeros), in the order in which they are copied: a copied chunk travels while the
    next one is being copied. (part of ``view``, part of ``tensor``, bytes that are there once it is copied)."""
    target, source = view.view(-1), tensor.reshape(-1) if tensor is not None else None
    itemsize, written = slot.spec.dtype.itemsize, 0
    for offset, length in TensorChunks(slot.spec, session.size):
        elements = slice(offset // itemsize, (offset + length) // itemsize)
        written += length
        yield target[elements], None if source is None else source[elements], written


def copy_in(views: Sequence[torch.Tensor], tensors: Tensors) -> None:
    """Fill views with tensors, all in the host's memory; None: zeros. One call for all is far cheaper than one call
    each."""
    targets, sources = [], []
    for view, tensor in zip(views, tensors, strict=True):
        if tensor is None:
            view.zero_()
        elif tensor.data_ptr() != view.data_ptr() or not tensor.is_contiguous():
            targets.append(view)
            sources.append(tensor)
    if targets:
        torch._foreach_copy_(targets, sources)
