"""A model's buffers as bytes, for records and checkpoints, and back. Any thread."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from byteps_py.errors import ProtocolError
from byteps_py.shadow.record import StoredBuffer


def stored_buffers(model: torch.nn.Module) -> dict[str, StoredBuffer]:
    """The model's persistent buffers, by their names in its state_dict."""
    mine = {id(buffer) for buffer in model.buffers()}
    state = model.state_dict(keep_vars=True)
    return {name: _stored(value.detach().cpu()) for name, value in state.items() if id(value) in mine}


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
