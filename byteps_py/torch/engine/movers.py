"""Movers carry tensors of one device to and from slots. The host's is here, that of a CUDA device in cuda.py."""

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
    """Carries tensors of one device to and from slots."""

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
        """Copy tensors (zeros for None) to views, then hand the slot over. None: it is done already."""

    def fetch(self, views: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Copy views to outputs, in order with what the caller does with the outputs afterwards."""

    def close(self) -> None:
        """No more copies; give back what ``adopt`` took."""


class HostMover:
    """For tensors in the host's memory: the calling thread copies."""

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
        if _may_go_in_strips(session, slot, views, tensors):
            self._send_strips(session, slot, views[0], tensors[0])
        else:
            copy_in(views, tensors)
            session.hand_over(slot, layout=layout)

    @staticmethod
    def _send_strips(session: Session, slot: Slot, view: torch.Tensor, tensor: torch.Tensor | None) -> None:
        """Copy in strips: a strip that is copied travels while the next one is being copied."""
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


def _may_go_in_strips(session: Session, slot: Slot, views: Sequence[torch.Tensor], tensors: Tensors) -> bool:
    """Strips pay off where other machines wait for the first of them, and all bytes are to be copied as they lie."""
    if session.num_machines == 1 or slot.spec.nbytes < 2 * CHUNK_BYTES or len(views) != 1:
        return False
    tensor = tensors[0]
    is_there = tensor is not None and tensor.data_ptr() == views[0].data_ptr()
    return slot.spec.op.is_reduction and not is_there and (tensor is None or tensor.is_contiguous())


def copy_in(views: Sequence[torch.Tensor], tensors: Tensors) -> None:
    """Fill host views from host tensors; None stands for zeros. One call for all: far cheaper than one each."""
    targets, sources = [], []
    for view, tensor in zip(views, tensors, strict=True):
        if tensor is None:
            view.zero_()
        elif tensor.data_ptr() != view.data_ptr() or not tensor.is_contiguous():
            targets.append(view)
            sources.append(tensor)
    if targets:
        torch._foreach_copy_(targets, sources)
