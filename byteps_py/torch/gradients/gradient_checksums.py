"""What a bucket's gradients were when they were handed over: whatever is done to them before they are combined is lost,
so it must be noticed. The version of a tensor (bucket.py) misses what is done behind autograd's back.

Owns the checksums of one round. Must not know names or hooks. ``send`` is called with the lock of the GradientReducer
held; ``changed`` by the training thread, while results are on their way.

    together: gradients ─ copy ─► slot ─ checksum of each piece        later: gradients ─ copy ─► scratch ─ the same
    alone:    gradient ─ checksum where it lies, copy ─► slot          later: the same
    CUDA:     norms, on the device                                      later: the same
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from byteps_py.torch.engine.slot_view import PieceView, pieces
from byteps_py.torch.gradients import checksums
from byteps_py.torch.gradients.checksums import Pieces

Gradients = Sequence[torch.Tensor | None]
Contribution = Callable[[Gradients], Gradients]


class Scratch:
    """Memory for one bucket at a time: the buckets of a reducer share it."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def memory(self, nbytes: int) -> bytearray:
        if len(self._memory) < nbytes:
            self._memory = bytearray(nbytes)
        return self._memory


class GradientChecksums:
    """``contribution``: what is sent for gradients, which is they themselves or what becomes of them."""

    def __init__(self, scratch: Scratch, contribution: Contribution) -> None:
        self._scratch, self._contribution = scratch, contribution
        self._memory: bytearray | None = None  # that ``_views`` look at
        self._views: list[torch.Tensor] = []
        self._together: Pieces | None = None
        self._alone: Pieces | None = None
        self._slot_view: PieceView | None = None
        self.reset()

    def reset(self) -> None:
        """Nothing was handed over."""
        self._has_sent_together = self._has_sent_alone = False
        self._address = 0  # of the gradient that was sent alone
        self._norms: torch.Tensor | None = None

    def send(self, slot_view: PieceView, gradients: Gradients) -> None:
        """Hand them over, and remember what they are."""
        self._slot_view = slot_view
        checksums.kernel().prepare()
        only = gradients[0] if len(gradients) == 1 else None
        if slot_view.is_on_device:
            self._norms = _norms(gradients)
            slot_view.contribute(self._contribution(gradients))
        elif only is not None and only.is_contiguous():
            slot_view.contribute(self._contribution(gradients))
            if self._alone is None:
                self._alone = Pieces([only.nbytes])
            self._alone.note(only.data_ptr())
            self._has_sent_alone, self._address = True, only.data_ptr()
        else:
            _fill(slot_view.inputs, self._contribution(gradients))
            if self._together is None:
                self._together = Pieces([math.prod(shape) * slot_view.dtype.itemsize for shape in slot_view.shapes])
            self._together.note(slot_view.input_address)
            self._has_sent_together = True
            slot_view.contribute_input()  # what there is to send is in place

    def changed(self, gradients: Gradients) -> int | None:
        """The first of ``gradients`` that is not what it was in ``send``, if there is one."""
        if self._has_sent_alone and self._alone is not None:
            only = gradients[0]
            if only is None or only.data_ptr() != self._address or not only.is_contiguous():
                return 0
            return self._alone.changed(self._address)
        if self._has_sent_together and self._together is not None and self._slot_view is not None:
            memory = self._scratch.memory(self._slot_view.slot.spec.nbytes)
            if memory is not self._memory:
                self._views = pieces(memoryview(memory), self._slot_view.dtype, self._slot_view.shapes)
                self._memory = memory
            try:
                _fill(self._views, self._contribution(gradients))
            except RuntimeError:  # their shapes are others
                return next(
                    i for i, grad in enumerate(gradients) if grad is not None and grad.shape != self._views[i].shape
                )
            return self._together.changed(np.frombuffer(memory, np.uint8).ctypes.data if memory else 0)
        if self._norms is not None:
            norms = _norms(gradients)
            if norms.shape != self._norms.shape:
                return 0
            # As bits: of NaN none is equal to another.
            found = (norms.view(torch.int64) != self._norms.view(torch.int64)).nonzero()
            return [i for i, grad in enumerate(gradients) if grad is not None][int(found[0])] if len(found) else None
        return None


def _fill(views: Sequence[torch.Tensor], tensors: Gradients) -> None:
    """Copy; None stands for zeros."""
    targets = [view for view, tensor in zip(views, tensors, strict=True) if tensor is not None]
    sources = [tensor for tensor in tensors if tensor is not None]
    with torch.no_grad():
        if len(sources) < len(views):
            for view, tensor in zip(views, tensors, strict=True):
                if tensor is None:
                    view.zero_()
        if targets:
            torch._foreach_copy_(targets, sources)


def _norms(gradients: Gradients) -> torch.Tensor:
    """One number for each gradient that there is, on their device."""
    given = [grad.detach() for grad in gradients if grad is not None]
    if not given:
        return torch.empty(0, dtype=torch.float64)
    return torch.stack([norm.double() for norm in torch._foreach_norm(given, 2)])
