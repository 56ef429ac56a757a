"""Buffers of a pipeline's modules, such as the running statistics of BatchNorm: the same on all copies of a stage, and
as they were if a step fails. One thread.

Copies of a stage (pipes of Chimera and GEMS, data-parallel copies) see other micro-batches, so their statistics differ
during a step. At its end all take those of the first copy, as with torch's DistributedDataParallel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from byteps_py.torch.run.model_state import SavedBuffer, saved_buffers


@contextlib.contextmanager
def as_before(saved: Sequence[SavedBuffer]) -> Iterator[None]:
    """A forward pass that is repeated sees these buffers, and its changes do not last."""
    present = [(one.owner._buffers, one.name, one.owner._buffers[one.name]) for one in saved if one.value is not None]
    try:
        for one in saved:
            if one.value is not None:
                one.owner._buffers[one.name] = one.value.clone()
        yield
    finally:
        for buffers, name, tensor in present:
            buffers[name] = tensor


def normalizes_batches(module: nn.Module) -> bool:
    """True if results of ``module`` depend on which samples are in one batch."""
    return any(isinstance(one, _BatchNorm) and (one.training or one.running_mean is None) for one in module.modules())


@dataclass(frozen=True, slots=True)
class CopiedBuffers:
    """The buffers of ``module``, which all ranks of ``group`` hold; those of rank ``source`` count."""

    module: nn.Module
    source: int
    group: dist.ProcessGroup

    def broadcast(self) -> None:
        """Give all ranks the values of rank ``source``, in one message."""
        buffers = list(self.module.buffers())
        if not buffers:
            return
        sizes = [buffer.nbytes for buffer in buffers]
        whole = torch.cat([buffer.detach().reshape(-1).view(torch.uint8) for buffer in buffers])
        dist.broadcast(whole, self.source, group=self.group)
        if dist.get_rank() != self.source:
            for buffer, piece in zip(buffers, whole.split(sizes), strict=True):
                # Autograd may still need tensors that it has kept from other steps: so no change that tensors count.
                buffer.data.copy_(piece.clone().view(buffer.dtype).view(buffer.shape))


@dataclass(slots=True)
class PipelineBuffers:
    """The buffers of all modules of this rank."""

    _modules: list[nn.Module] = field(default_factory=list)
    _copies: list[CopiedBuffers] = field(default_factory=list)
    _saved: list[SavedBuffer] | None = None

    def add(self, module: nn.Module) -> None:
        """A module of this rank."""
        self._modules.append(module)

    def share(self, module: nn.Module, source: int, group: dist.ProcessGroup) -> None:
        """A module that the ranks of ``group`` hold. All of them call this, in the same order."""
        self._copies.append(CopiedBuffers(module, source, group))
        self._copies[-1].broadcast()

    @contextlib.contextmanager
    def kept_if_it_fails(self) -> Iterator[None]:
        """Around the passes of a batch: after an exception, buffers have the values that they had before."""
        if self._saved is not None:
            yield  # inside another one
            return
        self._saved = saved_buffers(self._modules)
        try:
            yield
        except BaseException:
            for one in self._saved:
                if one.has_changed:
                    one.restore()
            raise
        finally:
            self._saved = None

    @property
    def have_changed(self) -> bool:
        """Since the passes of the batch began."""
        return any(one.has_changed for one in self._saved or ())

    def make_equal(self) -> None:
        """Give all copies of a stage the same buffers. All ranks of the pipeline call it."""
        for copies in self._copies:
            copies.broadcast()
