"""What a call reads and changes beside weights, gradients and the optimizer's states, to make the call again: the
model's buffers, which of its modules train, and the batch. The training thread calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from byteps_py.errors import CommunicationError
from byteps_py.wording import bytes_text

#: Larger buffers, such as masks, are not copied in order to take changes back.
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SavedBuffer:
    """A buffer before a forward pass. ``value``: a copy; None if it is large."""

    owner: nn.Module
    name: str
    tensor: torch.Tensor
    version: int
    value: torch.Tensor | None

    @property
    def has_changed(self) -> bool:
        """True if the forward pass has changed the buffer. Norms change theirs in a way that tensors do not count."""
        norm = isinstance(self.owner, _NormBase) and self.owner.training
        return norm or self.owner._buffers.get(self.name) is not self.tensor or self.tensor._version != self.version

    def restore(self) -> None:
        """Take back the changes."""
        if self.value is not None:
            self.tensor.data.copy_(self.value)
            self.owner._buffers[self.name] = self.tensor


def saved_buffers(modules: Iterable[nn.Module]) -> list[SavedBuffer]:
    """The buffers of ``modules``, and of the modules in them, that are saved."""
    return [
        SavedBuffer(owner, name, buffer, buffer._version, buffer.clone() if buffer.nbytes <= _MOST_BYTES else None)
        for module in modules
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]


@dataclass(frozen=True, slots=True)
class ModelState:
    """Before a call. ``modes``: which modules are in training mode. ``batch``: its tensors, and how often each was
    changed."""

    buffers: Sequence[SavedBuffer]
    modes: Sequence[tuple[nn.Module, bool]]
    batch: Sequence[tuple[torch.Tensor, int]]

    @classmethod
    def of(cls, model: nn.Module, batch: Iterable[torch.Tensor]) -> ModelState:
        """As it is now."""
        return cls(
            saved_buffers([model]),
            [(one, one.training) for one in model.modules()],
            [(one, _version(one)) for one in batch],
        )

    def check(self) -> None:
        """Raises CommunicationError if the call can't be made again, because something has changed that is not kept."""
        for one, version in self.batch:
            if one.requires_grad or _version(one) != version:
                why = "was changed in place" if _version(one) != version else "requires gradients"
                raise CommunicationError(
                    f"all ranks are started again: the batch can't be used again, as a tensor of it, of shape "
                    f"{list(one.shape)}, {why}"
                )
        if lost := next((one for one in self.buffers if one.value is None and one.has_changed), None):
            raise CommunicationError(
                f"all ranks are started again: the step under way has changed the buffer {lost.name!r} of a "
                f"{type(lost.owner).__name__}, and one of {bytes_text(lost.tensor.nbytes)} is too large to be kept"
            )

    def put_back(self) -> None:
        """Be as it was then."""
        for saved in self.buffers:
            saved.restore()
        for module, is_training in self.modes:
            module.training = is_training


def _version(tensor: torch.Tensor) -> int:
    """The number of changes in place; they are not counted for a tensor that was made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version
