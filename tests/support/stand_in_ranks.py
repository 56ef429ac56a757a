"""Ranks as threads, each with a StandInDevice: what the product does with CUDA tensors, without CUDA."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from byteps_py.session import Slot
from byteps_py.system.shm import PAGE
from byteps_py.tensors import Layout, TensorSpec
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.cuda import CudaCopier
from byteps_py.torch.collectives.movers import Mover
from byteps_py.wire.chunks import CHUNK_BYTES, TensorChunks

from .stand_in_device import MakesTensors, Site, StandInDevice
from .threaded import ThreadedCluster, ThreadedSession

T = TypeVar("T")


class DeviceContext(Context):
    """A context whose CUDA device is ``device``."""

    def __init__(self, device: StandInDevice, opener: Any) -> None:
        super().__init__(opener)
        self.device = device

    def new_copier(self, device: torch.device) -> Mover:
        return CudaCopier(device, self.device)


class WatchedSession(ThreadedSession):
    """A session whose slots' memory is watched, in whole pages. Results of large slots come in chunks."""

    def __init__(self, cluster: ThreadedCluster, rank: int, device: StandInDevice) -> None:
        super().__init__(cluster, rank)
        self.device = device
        self._given: dict[Slot, int] = {}
        self._chunks: dict[Slot, int] = {}

    def _declare(self, spec: TensorSpec) -> None:
        if (before := self._slots.get(spec.name)) is not None:
            self._give_away(before)
        super()._declare(spec)
        old = self._slots[spec.name]
        new = {id(memory): self._pages(memory.nbytes) for memory in (*old.inputs, old.result)}
        inputs = tuple(new[id(memory)] for memory in old.inputs)
        self._slots[spec.name] = Slot(spec, inputs, new[id(old.result)])

    def join(self, timeout_s: float | None = None) -> int:
        for slot in self._slots.values():
            self._give_away(slot)
        return super().join(timeout_s)

    def _give_away(self, slot: Slot) -> None:
        for memory in {id(memory): memory for memory in (*slot.inputs, slot.result)}.values():
            self.device.host(memory, True, "the service gives a slot's memory to others")

    def _pages(self, nbytes: int) -> memoryview:
        memory = memoryview(mmap.mmap(-1, max(1, -(-nbytes // PAGE)) * PAGE))[:nbytes]
        memory[:] = b"\xff" * nbytes
        self.device.watch(memory)
        return memory

    def hand_over(self, slot: Slot, nbytes: int | None = None, layout: Layout | None = None) -> None:
        whole = slot.spec.nbytes
        left, end = self._given.get(slot, 0), whole if nbytes is None else nbytes
        at = 0
        for offset, length in TensorChunks(slot.spec, self.size) if slot.spec.op.kernel.is_reduction else ():
            if left <= at < end:
                self.device.host(slot.input[offset : offset + length], False, "the service reads a contribution")
            at += length
        if not slot.spec.op.kernel.is_reduction:
            self.device.host(slot.input, False, "the service reads a contribution")
        self._given[slot] = end % whole if whole else 0
        if end == whole:
            for memory in {id(memory): memory for memory in (slot.input, slot.result)}.values():
                self.device.host(memory, True, "the service writes a slot")
            self._chunks[slot] = 0
        super().hand_over(slot, nbytes, layout)

    def request_chunks(self, slot: Slot) -> bool:
        return self.num_machines > 1 and len(slot.result) >= 2 * CHUNK_BYTES

    def wait_for_chunks(self, slot: Slot, timeout_s: float | None = None) -> list[int]:
        """One chunk each time; the last one comes with the end of the round."""
        self._wait_until(lambda: not slot.pending, timeout_s, "chunks")
        chunk = self._chunks[slot]
        self._chunks[slot] += 1
        return [chunk] if (chunk + 1) * CHUNK_BYTES < len(slot.result) else []


class DeviceCluster(ThreadedCluster):
    """See ThreadedCluster. ``races``: of all ranks' devices, after ``run``. ``drop``: see StandInDevice."""

    def __init__(
        self, machines: Sequence[int] = (1, 1), shared_memory: bool = False, drop: Site | None = None, **settings: Any
    ) -> None:
        super().__init__(machines, shared_memory, **settings)
        self.devices = [StandInDevice(drop) for _ in range(self.size)]

    def context(self, rank: int) -> Context:
        device = self.devices[rank]
        context = DeviceContext(device, lambda settings: WatchedSession(self, rank, device))
        context.open(self.settings_of(rank))
        return context

    def on_devices(self, function: Callable[[int, StandInDevice], T]) -> list[T]:
        """``function(rank, device)`` on a thread per rank. It may ask for tensors on ``cuda``."""

        def main(rank: int) -> T:
            with MakesTensors(self.devices[rank]):
                return function(rank, self.devices[rank])

        return self.run(main)

    @property
    def races(self) -> list[str]:
        return list(dict.fromkeys(race for device in self.devices for race in device.races))

    @property
    def sites(self) -> set[Site]:
        return {site for device in self.devices for site in device.sites}


class OnStreams:
    """A process group of gloo as one of NCCL: its operations are queued on a stream of its own."""

    def __init__(self, group: dist.ProcessGroup, device: StandInDevice) -> None:
        self._group, self._device = group, device
        self._stream = device.new_stream(device.device)

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._group, name)

        def run(*tensors: Any) -> OnStreams:
            self._stream.wait_stream(self._device.current(self._device.device))
            with self._device.using(self._stream):
                self._device.together(lambda *given: operation(*given).wait(), tensors)
            return self

        return run if name != "shutdown" else operation

    def wait(self) -> None:
        self._device.current(self._device.device).wait_stream(self._stream)
