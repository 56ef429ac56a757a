"""Memory for tensors that live long: one contiguous block, so that they do not lie scattered among short-lived ones
(ZeRO-R's memory defragmentation, Rajbhandari et al., 2020, section 6.3).

An allocator that holds long-lived tensors between short-lived ones ends up with much free memory in pieces that are too
small. One thread.
"""

from __future__ import annotations

import math

import torch

from byteps_py.errors import UsageError

_ALIGNMENT = 64


class TensorArena:
    """A block of memory from which tensors are taken one behind the other. When all of them have been given back, it
    begins again at the front.

    Raises UsageError when a tensor no longer fits.

    >>> arena = TensorArena(1024, torch.device("cpu"))
    >>> first = arena.take((4, 8), torch.float32)
    >>> first.shape, arena.used_bytes
    (torch.Size([4, 8]), 128)
    >>> arena.give_back(first)
    >>> arena.used_bytes
    0
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        if nbytes < 0:
            raise UsageError(f"an arena of {nbytes} bytes can't be made")
        self.nbytes = nbytes
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.used_bytes = 0
        self._live = 0

    @staticmethod
    def bytes_for(shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """What ``take`` uses up: the tensor's bytes, up to a whole cache line."""
        return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with undefined values."""
        wanted = self.bytes_for(shape, dtype)
        if self.used_bytes + wanted > self.nbytes:
            raise UsageError(
                f"an arena of {self.nbytes} bytes has {self.nbytes - self.used_bytes} left, and a tensor of shape "
                f"{tuple(shape)} needs {wanted}: make it larger, or give tensors back"
            )
        length = math.prod(shape) * dtype.itemsize
        tensor = self.memory[self.used_bytes : self.used_bytes + length].view(dtype).view(shape)
        self.used_bytes += wanted
        self._live += 1
        return tensor

    def give_back(self, tensor: torch.Tensor) -> None:
        """The caller uses ``tensor`` no more. Raises UsageError if it is not of this arena."""
        own = self.memory.untyped_storage().data_ptr()
        if tensor.untyped_storage().data_ptr() != own or not self._live:
            raise UsageError("a tensor that is given back to an arena must have been taken from it, once")
        self._live -= 1
        if not self._live:
            self.used_bytes = 0
