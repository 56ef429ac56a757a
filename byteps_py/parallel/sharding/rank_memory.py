"""The memory of a rank: memory that is allocated once, as in ZeRO-R (Rajbhandari et al., 2020), and a tally of the
memory that is held.

    TensorArena     one contiguous block for tensors that live long (section 6.3). An allocator that holds them between
                    short-lived ones ends up with much free memory in pieces that are too small
    FusedBuffer     one communication buffer of constant size, however large the model is (section 6.2)
    tally_memory    bytes of values, gradients and optimizer states

One thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

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
        """The bytes that ``take`` uses for a tensor, rounded up to a whole cache line."""
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


# ---- communication -------------------------------------------------------------------------------------------------


#: Halves of the buffer: one is filled while the other is under way.
_HALVES = 2


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Elements ``start`` to ``stop`` of tensor number ``tensor``, at ``offset`` in a chunk."""

    tensor: int
    start: int
    stop: int
    offset: int


def cut_chunks(sizes: Sequence[int], capacity: int) -> Iterator[list[ChunkPart]]:
    """Chunks of at most ``capacity`` elements that hold tensors of these sizes, one behind the other. Pure.

    >>> [[(part.tensor, part.start, part.stop) for part in chunk] for chunk in cut_chunks([3, 4], 5)]
    [[(0, 0, 3), (1, 0, 2)], [(1, 2, 4)]]
    """
    chunk: list[ChunkPart] = []
    held = 0
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + capacity - held)
            chunk.append(ChunkPart(tensor, start, stop, held))
            held += stop - start
            start = stop
            if held == capacity:
                yield chunk
                chunk, held = [], 0
    if chunk:
        yield chunk


@dataclass(slots=True)
class _ChunkUnderWay:
    work: dist.Work | None
    finish: Callable[[], None]


class FusedBuffer:
    """``nbytes`` of memory on ``device`` through which tensors of any size go, in chunks, each copied together from as
    many tensors as fit. A second chunk is filled while the first one is under way. Raises UsageError if it is too small
    for one element of each half.

        buffer.send(gradients, lambda chunk: dist.reduce(chunk, owner, async_op=True), receive)
        buffer.wait()
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        half = nbytes // _HALVES // 16 * 16
        if half < 16:
            raise UsageError(f"a communication buffer of {nbytes} bytes is too small: use at least {16 * _HALVES}")
        self.nbytes = half * _HALVES
        self._halves = [torch.empty(half, dtype=torch.uint8, device=device) for _ in range(_HALVES)]
        self._under_way: list[_ChunkUnderWay | None] = [None] * _HALVES
        self._next = 0

    def send(
        self,
        tensors: Sequence[torch.Tensor | None],
        sizes: Sequence[int],
        dtype: torch.dtype,
        start: Callable[[torch.Tensor], dist.Work | None],
        receive: Callable[[torch.Tensor, Sequence[ChunkPart]], None],
    ) -> None:
        """Copy ``tensors`` (None: zeros) of ``sizes`` elements into chunks and ``start`` each. ``receive`` gets a chunk
        and its contents, when its work is done: in a later call, or in ``wait``."""
        capacity = self._halves[0].numel() // dtype.itemsize
        for parts in cut_chunks(sizes, capacity):
            place = self._next
            self._next = (place + 1) % _HALVES
            self._finish(place)
            chunk = self._halves[place].view(dtype)[: parts[-1].offset + parts[-1].stop - parts[-1].start]
            for part in parts:
                into = chunk[part.offset : part.offset + part.stop - part.start]
                tensor = tensors[part.tensor]
                if tensor is None:
                    into.zero_()
                else:
                    into.copy_(tensor.reshape(-1)[part.start : part.stop])
            self._under_way[place] = _ChunkUnderWay(start(chunk), partial(receive, chunk, parts))

    def wait(self) -> None:
        """Receive all chunks that are under way, the oldest first."""
        for step in range(_HALVES):
            self._finish((self._next + step) % _HALVES)

    def forget(self) -> None:
        """Drop the transfers under way, after an error."""
        self._under_way = [None] * _HALVES

    def _finish(self, place: int) -> None:
        one = self._under_way[place]
        if one is not None:
            self._under_way[place] = None
            if one.work is not None:
                one.work.wait()
            one.finish()


# ---- what a rank holds ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryTally:
    """Bytes of memory, each counted once; in ``offloaded`` those of states that are not where the parameters are."""

    parameters: int
    gradients: int
    states: int
    offloaded: int

    @property
    def total(self) -> int:
        """All but ``offloaded``."""
        return self.parameters + self.gradients + self.states


def tally_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> MemoryTally:
    """Count the bytes that this rank holds now, by walking the memory of tensors: that of a view counts whole.

    Scalars, such as Adam's counts of steps, are left out. ``optimizer``: of torch, of ``shard``, or a
    ZeroRedundancyOptimizer.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    >>> tally_memory(model, optimizer)
    MemoryTally(parameters=40, gradients=40, states=80, offloaded=0)
    """
    inner = getattr(optimizer, "optim", None)
    states = (inner if isinstance(inner, torch.optim.Optimizer) else optimizer).state
    offload = getattr(optimizer, "offloaded", None)
    hosted = {id(one) for one in offload.host_tensors()} if offload is not None else set()
    # FSDP2's optimizer has the parts; the model may have whole parameters at this time.
    held = [one for group in optimizer.param_groups for one in group["params"]]
    parameters = list({id(one): one for one in (*model.parameters(), *held)}.values())
    seen: set[int] = set()
    of_states = [value for one in parameters for value in states.get(one, {}).values() if _counts(value)]
    return MemoryTally(
        _memory(parameters, seen),
        _memory([one.grad for one in parameters if one.grad is not None], seen),
        _memory([one for one in of_states if id(one) not in hosted], seen),
        sum(one.nbytes for one in of_states if id(one) in hosted),
    )


def _counts(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _memory(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage() if not local.is_sparse else local._values().untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
