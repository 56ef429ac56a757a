"""Checksums of gradients that were handed over: a change before the results arrive is noticed, however it was made.

Such a change would be lost, so it is an error. PyTorch counts changes in ``Tensor._version`` (see bucket.py), but not
those of its own unscaling kernel, of ``grad.data.mul_()`` or of ``grad.numpy()[…]``.

Owns the checksums of one round. Must not know names or hooks. ``send`` is called with the lock of the GradientReducer
held; ``changed`` by the training thread, while results are on their way. A thread compiles the kernel
(kernels/jit/background.py); until it is ready, zlib computes the checksums.

    several gradients:  gradients ─ copy ─► slot ─ checksum of each piece     later: gradients ─ copy ─► scratch ─ again
    one gradient:       checksum of its memory, copy ─► slot                  later: checksum of its memory
    CUDA:               norms, on the device                                  later: norms, compared on the device
"""

from __future__ import annotations

import ctypes
import functools
import math
import zlib
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import torch

from byteps_py.kernels.jit.background import Compiled
from byteps_py.torch.collectives.slot_view import PieceView, pieces

#: Arguments: address of the memory, address of a table with offset and length of each piece, number of pieces, address
#: of the checksums.
Kernel = Callable[[int, int, int, int], None]
Gradients = Sequence[torch.Tensor | None]
Contribution = Callable[[Gradients], Gradients]


class PieceChecksums:
    """Checksums of pieces of memory that lie one after the other. ``lengths``: of the pieces, in bytes."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._table = array("Q")
        offset = 0
        for nbytes in lengths:
            self._table.extend((offset, nbytes))
            offset += nbytes
        self._count = len(lengths)
        self._found = array("Q", bytes(8 * self._count)), array("Q", bytes(8 * self._count))
        self._kernel: Kernel | None = None

    def note(self, address: int) -> None:
        """Compute and keep the checksums of the memory at ``address``."""
        self._kernel = checksum_kernel().ready or _compute_with_zlib
        self._compute(address, 0)

    def changed(self, address: int) -> int | None:
        """The first piece at ``address`` whose checksum differs from the one that ``note`` kept; None if all agree."""
        self._compute(address, 1)
        before, after = self._found
        if before == after:
            return None
        return next(i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)

    def _compute(self, address: int, which: int) -> None:
        if self._kernel is not None:
            self._kernel(address, self._table.buffer_info()[0], self._count, self._found[which].buffer_info()[0])


def _compute_with_zlib(address: int, table: int, count: int, found: int) -> None:
    places = (ctypes.c_uint64 * (2 * count)).from_address(table)
    results = (ctypes.c_uint64 * count).from_address(found)
    for i in range(count):
        offset, nbytes = places[2 * i], places[2 * i + 1]
        results[i] = zlib.crc32((ctypes.c_char * nbytes).from_address(address + offset)) if nbytes else 0


@functools.cache
def checksum_kernel() -> Compiled[Kernel]:
    """The process's checksum kernel. Any thread."""

    def build() -> Kernel:
        from byteps_py.kernels.jit.result_checks import compile_checksums

        return compile_checksums()

    return Compiled("checksums", build, "computed by zlib")


class Scratch:
    """Memory that all buckets of a reducer share, one bucket at a time."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def memory(self, nbytes: int) -> bytearray:
        """At least ``nbytes``, valid until the next call."""
        if len(self._memory) < nbytes:
            self._memory = bytearray(nbytes)
        return self._memory


class GradientChecksums:
    """Checksums of one bucket's gradients. ``contribution``: computes what is sent from the gradients."""

    def __init__(self, scratch: Scratch, contribution: Contribution) -> None:
        self._scratch, self._contribution = scratch, contribution
        self._memory: bytearray | None = None  # the memory behind ``_views``
        self._views: list[torch.Tensor] = []
        self._together: PieceChecksums | None = None
        self._alone: PieceChecksums | None = None
        self._slot_view: PieceView | None = None
        self.reset()

    def reset(self) -> None:
        """Begin a round: nothing has been handed over."""
        self._has_sent_together = self._has_sent_alone = False
        self._address = 0  # of the gradient that was sent alone
        self._norms: torch.Tensor | None = None
        self._comparison: _NormComparison | None = None

    def send(self, slot_view: PieceView, gradients: Gradients) -> None:
        """Hand ``gradients`` over and keep their checksums."""
        self._slot_view = slot_view
        checksum_kernel().prepare()
        only = gradients[0] if len(gradients) == 1 else None
        if slot_view.is_on_device:
            self._norms = _norms(gradients)
            slot_view.contribute(self._contribution(gradients))
        elif only is not None and only.is_contiguous():
            slot_view.contribute(self._contribution(gradients))
            if self._alone is None:
                self._alone = PieceChecksums([only.nbytes])
            self._alone.note(only.data_ptr())
            self._has_sent_alone, self._address = True, only.data_ptr()
        else:
            _fill(slot_view.inputs, self._contribution(gradients))
            if self._together is None:
                lengths = [math.prod(shape) * slot_view.dtype.itemsize for shape in slot_view.shapes]
                self._together = PieceChecksums(lengths)
            self._together.note(slot_view.input_address)
            self._has_sent_together = True
            slot_view.contribute_input()  # the data are in the slot already

    def changed(self, gradients: Gradients) -> int | None:
        """The position of the first gradient that has changed since ``send``; None if none has. On a GPU the comparison
        only begins here, because waiting for it would stop the host: ``changed_on_device`` has its result."""
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
            except RuntimeError:  # a shape has changed
                return next(
                    i for i, grad in enumerate(gradients) if grad is not None and grad.shape != self._views[i].shape
                )
            return self._together.changed(np.frombuffer(memory, np.uint8).ctypes.data if memory else 0)
        if self._norms is not None and self._slot_view is not None:
            norms = _norms(gradients)
            if norms.shape != self._norms.shape:
                return 0
            given = [position for position, grad in enumerate(gradients) if grad is not None]
            self._comparison = _NormComparison(self._norms, norms, given, self._slot_view)
        return None

    def changed_on_device(self) -> int | None:
        """The result of the comparison that ``changed`` has begun."""
        comparison, self._comparison = self._comparison, None
        return comparison.result() if comparison is not None else None


class _NormComparison:
    """Compares norms on a GPU as bits, because NaN is not equal to NaN. ``positions``: of the gradients, which
    ``slot_view`` has sent."""

    def __init__(
        self, before: torch.Tensor, after: torch.Tensor, positions: Sequence[int], slot_view: PieceView
    ) -> None:
        self._positions = positions
        differ = before.view(torch.int64) != after.view(torch.int64)
        self._differ = torch.empty(differ.shape, dtype=torch.bool, device="cpu", pin_memory=differ.is_cuda)
        self._differ.copy_(differ, non_blocking=True)
        self._copied = slot_view.mover.queued()

    def result(self) -> int | None:
        """The position of the first gradient whose norm has changed; None if none has."""
        if self._copied is not None:
            self._copied.synchronize()
        return next(
            (position for position, differs in zip(self._positions, self._differ.tolist(), strict=True) if differs),
            None,
        )


def _fill(views: Sequence[torch.Tensor], tensors: Gradients) -> None:
    """Copy ``tensors`` into ``views``; None stands for zeros."""
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
    """The norm of each gradient that is not None, on the gradients' device."""
    given = [grad.detach() for grad in gradients if grad is not None]
    if not given:
        return torch.empty(0, dtype=torch.float64, device="cpu")
    norms = list(torch._foreach_norm(given, 2))
    if any(norm.dtype is not norms[0].dtype for norm in norms):
        norms = [norm.double() for norm in norms]
    return torch.stack(norms).double()
