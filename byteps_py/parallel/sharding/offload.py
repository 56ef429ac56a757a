"""Optimizer states in host memory (Paddle's optimize_offload): prefetch, compute, offload, segment by segment.

    host     states of all segments, at rest
               │ prefetch i+1        ▲ offload i−1          on a side stream
    device     one of two buffers: the states of segment i, which the optimizer changes

CUDA parameters have their states in pinned memory. Those of the CPU have them in a memfd: shared memory without a name,
which is not part of the process's own (anonymous) memory. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from byteps_py.parallel.sharding.rank_memory import TensorArena
from byteps_py.parallel.sharding.segments import NamedParameter
from byteps_py.system.shm import Segment


class SideStream(Protocol):
    """Runs copies in the order in which they are submitted."""

    def submit(self, copies: Callable[[], None]) -> Any:
        """Run ``copies`` after the computations so far. Returns a mark for ``wait``."""

    def wait(self, mark: Any) -> None:
        """Let later work of the caller's stream wait for the copies of ``mark``."""

    def finish(self) -> None:
        """Return when all copies are done."""


class NoStream:
    """Copies at once: for tensors of the CPU.

    >>> stream = NoStream()
    >>> stream.wait(stream.submit(lambda: print("copied")))
    copied
    """

    def submit(self, copies: Callable[[], None]) -> None:
        """Run ``copies`` now."""
        copies()

    def wait(self, mark: None) -> None:
        """There is nothing to wait for."""

    def finish(self) -> None:
        """There is nothing to wait for."""


class CudaSideStream:
    """A CUDA stream of its own on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def submit(self, copies: Callable[[], None]) -> torch.cuda.Event:
        """Enqueue ``copies`` behind the device's current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies()
        mark = torch.cuda.Event()
        mark.record(self._stream)
        return mark

    def wait(self, mark: torch.cuda.Event) -> None:
        """Make the device's current stream wait."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self) -> None:
        """Block until the stream is empty."""
        self._stream.synchronize()


# ---- states --------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _HostStates:
    """The states of one segment's own parameters in host memory: (parameter, name) -> tensor."""

    memory: torch.Tensor
    segment: Segment | None
    tensors: dict[tuple[torch.Tensor, str], torch.Tensor]


class OffloadedStates:
    """The states of ``optimizer`` for ``segments``: lists of own parameters that step together."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        segments: Sequence[Sequence[NamedParameter]],
        device: torch.device,
        stream: SideStream | None = None,
    ) -> None:
        self._optimizer, self._device = optimizer, device
        self._segments = [[member.parameter for member in segment] for segment in segments]
        self._host: list[_HostStates | None] = [None] * len(self._segments)
        self._stream: SideStream = stream or (CudaSideStream(device) if device.type == "cuda" else NoStream())
        self._buffers: list[TensorArena] = []
        self._marks: list[Any] = [None] * len(self._segments)

    @property
    def host_bytes(self) -> int:
        """The number of bytes of the states in host memory."""
        return sum(tensor.nbytes for tensor in self.host_tensors())

    def host_tensors(self) -> list[torch.Tensor]:
        """The states in host memory."""
        return [tensor for one in self._host if one is not None for tensor in one.tensors.values()]

    def step(self, compute: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """``compute(parameters)`` steps some parameters; call it for each segment, with the states on the device."""
        self._size_buffers()
        self._prefetch(0)
        for place, parameters in enumerate(self._segments):
            self._prefetch(place + 1)
            self._stream.wait(self._marks[place])
            compute(parameters)
            self._offload(place)

    def rest(self) -> None:
        """Move all states to host memory, as after ``load_state_dict``."""
        self._stream.finish()
        self._host = [None] * len(self._segments)
        for place in range(len(self._segments)):
            self._offload(place)
        self._stream.finish()

    def finish(self) -> None:
        """Wait until the states in host memory are valid."""
        self._stream.finish()

    # ---- inside ----------------------------------------------------------------------------------------------

    def _size_buffers(self) -> None:
        largest = max(
            (sum(_room(one) for one in host.tensors.values()) for host in self._host if host is not None), default=0
        )
        if not self._buffers or self._buffers[0].nbytes < largest:
            self._stream.finish()
            self._buffers = [TensorArena(largest, self._device) for _ in range(2)]

    def _prefetch(self, place: int) -> None:
        if place < len(self._segments):
            host = self._host[place]
            if host is not None:
                buffer = self._buffers[place % 2]
                pairs = []
                for (parameter, name), tensor in host.tensors.items():
                    there = buffer.take(tuple(tensor.shape), tensor.dtype)
                    pairs.append((there, tensor))
                    self._optimizer.state[parameter][name] = there
                self._marks[place] = self._stream.submit(partial(_copy, pairs))
            else:
                self._marks[place] = self._stream.submit(partial(_copy, []))

    def _offload(self, place: int) -> None:
        found: dict[tuple[torch.Tensor, str], torch.Tensor] = {
            (parameter, name): tensor
            for parameter in self._segments[place]
            for name, tensor in self._optimizer.state.get(parameter, {}).items()
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.numel()
        }
        host = self._host[place]
        if host is None or {key: (one.shape, one.dtype) for key, one in host.tensors.items()} != {
            key: (one.shape, one.dtype) for key, one in found.items()
        }:
            self._stream.finish()
            host = self._host[place] = self._allocate(found) if found else None
        pairs = []
        for key, tensor in found.items():
            target = host.tensors[key] if host is not None else tensor
            pairs.append((target, tensor))
            self._optimizer.state[key[0]][key[1]] = target
        self._stream.submit(partial(_copy, pairs))
        buffer = self._buffers[place % 2] if self._buffers else None
        are_new = False
        for _, tensor in pairs:
            if buffer is not None and tensor.untyped_storage().data_ptr() == buffer.memory.untyped_storage().data_ptr():
                buffer.give_back(tensor)
            else:
                are_new = True
        if are_new:  # the optimizer's own tensors, which are freed now: in its first step
            self._stream.finish()

    def _allocate(self, found: dict[tuple[torch.Tensor, str], torch.Tensor]) -> _HostStates:
        nbytes = sum(_room(tensor) for tensor in found.values())
        segment = None
        if self._device.type == "cuda":
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        else:
            segment = Segment.create(nbytes)
            memory = torch.frombuffer(segment.view, dtype=torch.uint8, count=nbytes)
            segment.close_descriptor()  # the mapping lives as long as tensors of it
        tensors, used = {}, 0
        for key, tensor in found.items():
            tensors[key] = memory[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            used += _room(tensor)
        return _HostStates(memory, segment, tensors)


def _room(tensor: torch.Tensor) -> int:
    return TensorArena.bytes_for(tuple(tensor.shape), tensor.dtype)


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for into, tensor in pairs:
        into.copy_(tensor, non_blocking=True)
