"""A model's buffers as bytes, for records and checkpoints, and back. Any thread."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

import torch

from byteps_py.errors import ProtocolError, UsageError
from byteps_py.shadow.record import StoredBuffer

#: Where buffers have more bytes than this together, those of at least so many are sent only once they change.
MANY_BYTES = 512 << 10
LARGE_BYTES = 16 << 10


class ModelBuffers:
    """The persistent buffers of a model, as they travel with each step.

    A large one that has not changed since the model was made, such as a mask, does not travel: the restarted program
    makes the same again, which its checksum shows. ``restored``: those that had changed before this process began.
    """

    def __init__(self, model: torch.nn.Module, restored: Iterable[str] = ()) -> None:
        self._model = model
        found, never = self._persistent(), set(restored)
        is_much = sum(buffer.nbytes for buffer in found.values()) > MANY_BYTES
        self._unchanged = {
            name: (buffer.clone(), checksum_of(buffer))
            for name, buffer in found.items()
            if is_much and buffer.nbytes >= LARGE_BYTES and name not in never
        }

    def _persistent(self) -> dict[str, torch.Tensor]:
        """By their names in the model's state_dict."""
        mine = {id(buffer) for buffer in self._model.buffers()}
        state = self._model.state_dict(keep_vars=True)
        return {name: value.detach() for name, value in state.items() if id(value) in mine}

    def sizes(self) -> dict[str, int]:
        """Bytes of those that travel, as long as no other one changes."""
        return {name: value.nbytes for name, value in self._persistent().items() if name not in self._unchanged}

    def stored(self) -> tuple[dict[str, StoredBuffer], dict[str, str]]:
        """Those that travel, and the checksums of those that do not."""
        found = self._persistent()
        for name, (first, _) in list(self._unchanged.items()):
            if name not in found or not _is_same(found[name], first):
                del self._unchanged[name]
        constants = {name: checksum for name, (_, checksum) in self._unchanged.items()}
        return {name: _stored(value.cpu()) for name, value in found.items() if name not in constants}, constants

    def check(self, constants: Mapping[str, str]) -> None:
        """Raises UsageError if a buffer of the model is another one than that with this checksum."""
        found = self._persistent()
        for name, checksum in constants.items():
            if name not in found or checksum_of(found[name]) != checksum:
                raise UsageError(
                    f"restore(): the model's buffer {name!r} is not the one that the job began with. It is large, and "
                    "did not change, so it was not sent with the steps: make the model as in the first run"
                )


def checksum_of(buffer: torch.Tensor) -> str:
    """Equal for buffers that are equal to the bit."""
    stored = _stored(buffer.detach().cpu())
    return hashlib.sha256(f"{stored.dtype} {stored.shape} ".encode() + stored.data).hexdigest()


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    views = [each.contiguous().view(-1).view(torch.uint8) for each in (one, other)]  # NaN is equal to itself
    return torch.equal(*views)


def _stored(buffer: torch.Tensor) -> StoredBuffer:
    data = buffer.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return StoredBuffer(str(buffer.dtype), tuple(buffer.shape), data)


def tensors_of(buffers: Mapping[str, StoredBuffer]) -> dict[str, torch.Tensor]:
    """The buffers as tensors on the CPU. Raises ProtocolError if one is damaged."""
    found = {}
    for name, each in buffers.items():
        dtype = dtype_named(each.dtype)
        if len(each.data) != math.prod(each.shape) * dtype.itemsize:
            raise ProtocolError(f"buffer {name!r} of shape {list(each.shape)} has {len(each.data)} bytes")
        flat = torch.empty(len(each.data), dtype=torch.uint8, device="cpu")
        flat.numpy()[:] = memoryview(each.data)
        found[name] = flat.view(dtype).view(each.shape)
    return found


def dtype_named(name: str) -> torch.dtype:
    """The dtype that torch prints as ``name``. Raises ProtocolError if there is none."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ProtocolError(f"{name!r} is no dtype")
    return found
