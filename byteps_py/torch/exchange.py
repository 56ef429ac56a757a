"""One declared tensor as torch sees it: views of its slot, one copy in, one wait, views or one copy out.

Owns the views of a slot's memory. Must not know optimizers, handles or names. One user at a time; different
exchanges may be used by different threads.

A bucket of gradients is an exchange with several pieces, laid end to end in logical (contiguous) order; a
single tensor is one with one piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import torch

from byteps_py.chunks import CHUNK_BYTES, TensorChunks
from byteps_py.errors import StallError
from byteps_py.session import Session, Slot
from byteps_py.tensors import Layout

#: A device-to-host copy that takes longer than this has failed.
_COPY_LIMIT_S = 600.0

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
    """For tensors in the host's memory: the copy is made by the calling thread."""

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
        """What is copied travels while the rest is being copied."""
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
    """It is worth it where other machines wait for the front, and all is to be copied as it lies."""
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


def finish_departure(departure: Future[None] | None, slot: Slot) -> None:
    """Wait for a mover's copy to the slot. Raises what it raises, or StallError."""
    if departure is not None:
        try:
            departure.result(_COPY_LIMIT_S)
        except TimeoutError as error:
            name = slot.spec.name
            raise StallError(f"tensor {name!r}: not copied from its device within {_COPY_LIMIT_S:g} s") from error


class Exchange:
    """``slot`` seen as pieces of ``shapes``, all of ``dtype`` (the wire's).

    ``result_shapes``: those of the result, where they are others.
    """

    def __init__(
        self,
        session: Session,
        slot: Slot,
        dtype: torch.dtype,
        shapes: Sequence[Sequence[int]],
        mover: Mover,
        result_shapes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.session = session
        self.slot = slot
        self.dtype = dtype
        self.mover = mover
        self._departure: Future[None] | None = None
        self.in_flight = False
        for memory in {id(m): m for m in (*slot.inputs, slot.result)}.values():
            mover.adopt(memory)
        self.shapes = shapes
        self._inputs = [pieces(memory, dtype, shapes) for memory in slot.inputs]
        #: The pieces of the result; what they show is valid from ``wait`` to the next ``send``.
        self.results = pieces(slot.result, dtype, shapes if result_shapes is None else result_shapes)
        #: Where they lie.
        self.result_addresses = [piece.data_ptr() for piece in self.results]
        self._input_addresses = [np.frombuffer(m, np.uint8).ctypes.data if len(m) else 0 for m in slot.inputs]

    @property
    def usable(self) -> bool:
        """False once its declaration has failed: the name must be declared again."""
        return self.slot.error is None

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The pieces of the next contribution."""
        return self._inputs[self.slot.round % len(self._inputs)]

    @property
    def input_address(self) -> int:
        """Where they begin."""
        return self._input_addresses[self.slot.round % len(self._inputs)]

    @property
    def is_on_device(self) -> bool:
        """Its tensors are not in the host's memory."""
        return not isinstance(self.mover, HostMover)

    def send(self, tensors: Tensors) -> None:
        """Contribute ``tensors``, one per piece; None contributes zeros."""
        with torch.no_grad():
            self._departure = self.mover.send(self.session, self.slot, self.inputs, tensors)
        self.in_flight = True

    def send_nothing(self) -> None:
        """Take part with whatever the memory holds: for a broadcast from another rank."""
        self._departure = self.mover.send(self.session, self.slot, (), ())
        self.in_flight = True

    @property
    def done(self) -> bool:
        """True once ``wait`` would not block."""
        return (self._departure is None or self._departure.done()) and self.session.is_done(self.slot)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when ``results`` is there. Raises what Session.wait raises."""
        departure, self._departure = self._departure, None
        self.in_flight = False
        finish_departure(departure, self.slot)
        self.session.wait(self.slot, timeout_s)

    def fetch(self, outputs: Sequence[torch.Tensor], pieces: Sequence[int] | None = None) -> None:
        """Copy the results (of ``pieces``; default all) to ``outputs``, converting dtypes."""
        views = self.results if pieces is None else [self.results[i] for i in pieces]
        if outputs:
            with torch.no_grad():
                self.mover.fetch(views, outputs)


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
