"""Movers copy the tensors of one device to and from slots: the host's mover here, that of CUDA devices in cuda.py. Any
thread may call, one at a time for each slot."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from byteps_py.chunks import CHUNK_BYTES, TensorChunks
from byteps_py.session import Session, Slot
from byteps_py.tensors import Layout

Tensors = Sequence[torch.Tensor | None]


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

    def close(self) -> None:
        """Release what ``adopt`` has acquired. No call follows."""


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
        if _may_go_in_chunks(session, slot, views, tensors):
            self._send_chunks(session, slot, views[0], tensors[0])
        else:
            copy_in(views, tensors)
            session.hand_over(slot, layout=layout)

    @staticmethod
    def _send_chunks(session: Session, slot: Slot, view: torch.Tensor, tensor: torch.Tensor | None) -> None:
        """Copy chunk by chunk: a copied chunk travels while the next one is being copied."""
        target, source = view.view(-1), tensor.reshape(-1) if tensor is not None else None
        itemsize, written = slot.spec.dtype.itemsize, 0
        for offset, length in TensorChunks(slot.spec, session.size):
            elements = slice(offset // itemsize, (offset + length) // itemsize)
            if source is None:
                target[elements].zero_()
            else:
                target[elements].copy_(source[elements])
            written += length
            session.hand_over(slot, written)

    def fetch(self, views: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(list(outputs), list(views))

    def close(self) -> None:
        pass


def _may_go_in_chunks(session: Session, slot: Slot, views: Sequence[torch.Tensor], tensors: Tensors) -> bool:
    """True if chunks gain something: other machines wait for the first of them, and all bytes are copied unchanged."""
    if session.num_machines == 1 or slot.spec.nbytes < 2 * CHUNK_BYTES or len(views) != 1:
        return False
    tensor = tensors[0]
    is_there = tensor is not None and tensor.data_ptr() == views[0].data_ptr()
    return slot.spec.op.is_reduction and not is_there and (tensor is None or tensor.is_contiguous())


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
