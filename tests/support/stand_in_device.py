"""A CUDA device that is none. Its tensors lie in the host's memory and its operations run at once, but it remembers
what orders them: which stream they were queued on, and what that stream, or the host, had waited for.

Two accesses to the same bytes, one of which writes, are a race if nothing orders them: on a real device they may run in
either order, or together. So a missing wait is found even though the values are right here. Each actor (a stream, or
the host: all threads together) has a vector clock, as in race detectors for threads.

    with StandInDevice() as device:
        x = device.tensor(torch.ones(3))       # x.device is cuda:0, x.is_cuda
        side = device.new_stream(x.device)
        with device.using(side):
            y = x + 1                          # a race: x was written on another stream
        print(device.races)

``drop``: a place in the product (see ``Site``) whose calls do nothing: a mutation. ``sites``: the places that called.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

PRODUCT = str(Path(__file__).parents[2] / "byteps_py")
HOST = 0
Clock = dict[int, int]


class Site(NamedTuple):
    """A line of the product that orders something, and how."""

    file: str
    function: str
    line: int
    call: str


class Access(NamedTuple):
    """Bytes that an actor has read or written, as the ``count``-th thing that it did."""

    start: int
    stop: int
    is_write: bool
    actor: int
    count: int
    what: str


class StandInStream:
    """See DeviceStream."""

    def __init__(self, device: StandInDevice, actor: int) -> None:
        self.device, self.actor = device, actor

    def wait_stream(self, other: StandInStream) -> None:
        self.device.order(self.actor, self.device.clock_of(other.actor), "wait_stream")

    def wait_event(self, event: StandInEvent) -> None:
        self.device.order(self.actor, event.clock, "wait_event")

    def record_event(self, event: StandInEvent) -> StandInEvent:
        if not self.device.is_dropped("record_event"):
            event.clock = self.device.clock_of(self.actor)
        return event

    def synchronize(self) -> None:
        self.device.order(HOST, self.device.clock_of(self.actor), "synchronize")


class StandInEvent:
    """See DeviceEvent."""

    def __init__(self, device: StandInDevice) -> None:
        self.device = device
        self.clock: Clock = {}  # an event that was never recorded orders nothing

    def synchronize(self) -> None:
        self.device.order(HOST, self.clock, "synchronize of an event")


class Using:
    """See DeviceStreams.using. As torch's, it can be entered again."""

    def __init__(self, device: StandInDevice, stream: StandInStream) -> None:
        self._device, self._stream = device, stream

    def __enter__(self) -> None:
        self._device.enter(self._stream)

    def __exit__(self, *error: object) -> None:
        self._device.leave()


class DeviceMemory:
    """The memory of a tensor and of all its views. Once nothing holds it, the device may give it to others."""

    def __init__(self, device: StandInDevice, host: torch.Tensor, actor: int) -> None:
        self.device, self.actor = device, actor
        self.storage = host.untyped_storage()
        self.start = self.storage.data_ptr()
        self.stop = self.start + self.storage.nbytes()
        self.used_by: set[int] = set()
        device.count(self.storage.nbytes())

    def __del__(self) -> None:
        self.device.freed(self)


class StandInDevice:
    """See DeviceStreams. One device, of one rank. Any thread."""

    def __init__(self, drop: Site | None = None, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self.races: list[str] = []
        self.sites: set[Site] = set()
        #: By tensors now, and at most so far.
        self.used_bytes = self.most_bytes = 0
        self._drop = drop
        self._lock = threading.RLock()
        self._clocks: list[Clock] = [{}]
        self._log: list[Access] = []
        self._watched: list[tuple[int, int]] = []
        self._locked: list[range] = []
        self._pinned: list[torch.Tensor] = []
        self._thread = threading.local()
        self._default = self.new_stream(self.device)

    # ---- DeviceStreams ---------------------------------------------------------------------------------

    def new_stream(self, device: torch.device) -> StandInStream:
        with self._lock:
            self._clocks.append({})
            return StandInStream(self, len(self._clocks) - 1)

    def current(self, device: torch.device) -> StandInStream:
        stack: list[StandInStream] = getattr(self._thread, "stack", [])
        return stack[-1] if stack else self._default

    def using(self, stream: StandInStream) -> Using:
        return Using(self, stream)

    def enter(self, stream: StandInStream) -> None:
        """Queue the calling thread's operations on ``stream``, until ``leave``."""
        self._thread.stack = [*getattr(self._thread, "stack", []), stream]

    def leave(self) -> None:
        """Go back to the stream before."""
        self._thread.stack = self._thread.stack[:-1]

    def new_event(self) -> StandInEvent:
        return StandInEvent(self)

    def lock(self, device: torch.device, pages: range) -> int:
        with self._lock:
            assert all(pages.stop <= one.start or one.stop <= pages.start for one in self._locked), "locked twice"
            self._locked.append(pages)
            return 0

    def unlock(self, pages: range) -> None:
        """Copies of the pages that may be under way are races with it."""
        with self._lock:
            self._locked.remove(pages)
            self._check(HOST, pages.start, pages.stop, True, "pages are unlocked")

    @property
    def locked_pages(self) -> int:
        return len(self._locked)

    # ---- clocks ----------------------------------------------------------------------------------------

    def clock_of(self, actor: int) -> Clock:
        """All that is queued on a stream now."""
        with self._lock:
            return dict(self._clocks[actor])

    def order(self, actor: int, clock: Clock, call: str) -> None:
        """What ``actor`` does from now on comes after ``clock``."""
        if self.is_dropped(call):
            return
        with self._lock:
            own = self._clocks[actor]
            for other, count in [*clock.items(), *self._clocks[HOST].items()]:
                own[other] = max(own.get(other, 0), count)

    def is_dropped(self, call: str) -> bool:
        """Note the place in the product that makes this call. True if it is the one to drop."""
        frame = product_frame(sys._getframe(2))
        if frame is None:
            return False
        while frame.f_code.co_qualname.startswith("_QueuedOnCuda."):  # it only says what its caller wants
            frame = product_frame(frame.f_back) or frame
        if frame.f_code.co_qualname.startswith("CudaCopier.queued"):
            frame = product_frame(frame.f_back) or frame
        code = frame.f_code
        site = Site(Path(code.co_filename).name, code.co_qualname, frame.f_lineno, call)
        with self._lock:
            self.sites.add(site)
        return site == self._drop

    # ---- accesses --------------------------------------------------------------------------------------

    def watch(self, memory: memoryview) -> None:
        """``memory`` of the host takes part: copies of the device and the host's own accesses."""
        start, stop = span_of(memory)
        with self._lock:
            self._watched.append((start, stop))

    def is_watched(self, tensor: torch.Tensor) -> bool:
        """It begins in memory that takes part."""
        address = tensor.data_ptr() if tensor.layout is torch.strided and tensor.device.type == "cpu" else 0
        with self._lock:
            return any(start <= address < stop for start, stop in self._watched)

    def host(self, memory: memoryview, is_write: bool, what: str) -> None:
        """The host reads or writes ``memory``."""
        self.access(HOST, *span_of(memory), is_write, what)

    def host_tensor(self, tensor: torch.Tensor, what: str) -> None:
        """The host reads a contiguous ``tensor`` of its own memory."""
        self.access(HOST, tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, False, what)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, of the host's memory, takes part as long as this device is there."""
        self._pinned.append(tensor)
        with self._lock:
            self._watched.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        return tensor

    def access(self, actor: int, start: int, stop: int, is_write: bool, what: str) -> None:
        """An access now. An earlier one that nothing orders before it is a race, if one of both writes."""
        with self._lock:
            if start >= stop or not any(a < stop and start < b for a, b in self._watched):
                return
            self._check(actor, start, stop, is_write, what)
            own = self._clocks[actor]
            own[actor] = own.get(actor, 0) + 1
            covered = [e for e in self._log if start <= e.start and e.stop <= stop and (is_write or not e.is_write)]
            replaced = {e for e in covered if is_write or e.actor == actor}
            self._log = [e for e in self._log if e not in replaced]
            self._log.append(Access(start, stop, is_write, actor, own[actor], what))

    def _check(self, actor: int, start: int, stop: int, is_write: bool, what: str, known: Clock | None = None) -> None:
        known = self._clocks[actor] if known is None else known
        for other, count in self._clocks[HOST].items():  # whoever queues has done all that it did before
            known[other] = max(known.get(other, 0), count)
        for each in self._log:
            is_shared = each.start < stop and start < each.stop and each.actor != actor
            if is_shared and (is_write or each.is_write) and known.get(each.actor, 0) < each.count:
                names = ["the host" if number == HOST else f"stream {number}" for number in (actor, each.actor)]
                self.races.append(f"{names[0]}: {what}; nothing orders it after {names[1]}: {each.what}")

    # ---- tensors ---------------------------------------------------------------------------------------

    def tensor(self, host: torch.Tensor) -> torch.Tensor:
        """A copy of ``host`` on this device, made on the current stream."""
        return self.own(host.clone())

    def own(self, host: torch.Tensor) -> torch.Tensor:
        """``host``, which nobody else has, as a tensor of the device."""
        actor = self.current(self.device).actor
        memory = DeviceMemory(self, host, actor)
        with self._lock:
            self._watched.append((memory.start, memory.stop))
        self.access(actor, memory.start, memory.stop, True, "memory is filled")
        return StandInTensor(host, memory)

    def record_stream(self, tensor: StandInTensor, stream: StandInStream) -> None:
        """See torch.Tensor.record_stream."""
        if not self.is_dropped("record_stream"):
            tensor.memory.used_by.add(stream.actor)

    def count(self, nbytes: int) -> None:
        """So many bytes more are in use; less than 0: fewer."""
        with self._lock:
            self.used_bytes += nbytes
            self.most_bytes = max(self.most_bytes, self.used_bytes)

    def freed(self, memory: DeviceMemory) -> None:
        """The next tensor there is written on the stream on which this one was allocated. Other streams must have been
        recorded, or their accesses be over for that stream."""
        self.count(memory.start - memory.stop)
        with self._lock:
            inside = {e for e in self._log if e.start < memory.stop and memory.start < e.stop}
            if inside:
                clocks = [self._clocks[actor] for actor in (memory.actor, *memory.used_by)]
                known = {actor: max(clock.get(actor, 0) for clock in clocks) for clock in clocks for actor in clock}
                self._check(memory.actor, memory.start, memory.stop, True, "freed memory is used again", known)
            self._log = [e for e in self._log if e not in inside]
            with contextlib.suppress(ValueError):
                self._watched.remove((memory.start, memory.stop))

    def run(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """``function`` on the current stream. The host has waited for all that it gets back."""
        stream = self.current(self.device)
        plain, options = tree_map_only(StandInTensor, lambda tensor: tensor.values, (list(args), dict(kwargs)))
        target = next((each for each in [*plain[1:], *options.values()] if isinstance(each, torch.device | str)), None)
        if target is not None and torch.device(target).type == "cuda":
            plain, options = tree_map_only(torch.device, lambda _: torch.device("cpu"), (plain, options))
        goes_to_host = function is torch.Tensor.cpu or (target is not None and torch.device(target).type == "cpu")
        with Recorder(self, stream.actor) as recorder:
            result = function(*plain, **options)
        given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
        found = [each for each in tree_flatten(result)[0] if isinstance(each, torch.Tensor)]
        if goes_to_host:
            for each in given:
                if isinstance(each, StandInTensor):
                    self.access(stream.actor, each.memory.start, each.memory.stop, False, "a copy to the host")
        if goes_to_host or (recorder.has_read and not found):
            self._come_back(stream)
        return (
            result.clone()
            if goes_to_host
            else tree_map_only(torch.Tensor, lambda each: self._wrapped(each, given), result)
        )

    def _wrapped(self, result: torch.Tensor, given: Sequence[torch.Tensor]) -> torch.Tensor:
        for each in given:
            values = each.values if isinstance(each, StandInTensor) else each
            if values is result:
                return each
            if isinstance(each, StandInTensor) and each.memory.start == result.untyped_storage().data_ptr():
                return StandInTensor(result, each.memory)
        return self.own(result)

    def together(self, function: Any, given: Any) -> None:
        """``function`` on tensors of the device, as one operation of the current stream that reads and writes them."""
        actor = self.current(self.device).actor
        for each in tree_flatten(given)[0]:
            if isinstance(each, StandInTensor):
                start = each.values.data_ptr()
                self.access(actor, start, start + each.values.nbytes, True, "a collective")
        function(*tree_map_only(StandInTensor, lambda tensor: tensor.values, given))

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """See torch.Tensor.copy_."""
        stream = self.current(self.device)
        ends = [each.values if isinstance(each, StandInTensor) else each for each in (target, source)]
        with Recorder(self, stream.actor):
            ends[0].copy_(ends[1])
        if not non_blocking and not (isinstance(target, StandInTensor) and isinstance(source, StandInTensor)):
            self._come_back(stream)
        return target

    def _come_back(self, stream: StandInStream) -> None:
        with self._lock:
            for other, count in self._clocks[stream.actor].items():
                self._clocks[HOST][other] = max(self._clocks[HOST].get(other, 0), count)

    def __enter__(self) -> StandInDevice:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            assert not self.races, "\n".join(dict.fromkeys(self.races))


#: What takes a tensor for its size only.
_MAKES = ("aten::new_", "aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like")


class Recorder(TorchDispatchMode):
    """Notes what each operation reads and writes."""

    def __init__(self, device: StandInDevice, actor: int) -> None:
        super().__init__()
        self._device, self._actor = device, actor
        self.has_read = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        is_view = schema.returns and all(
            each.alias_info is not None and not each.alias_info.is_write for each in schema.returns
        )
        if not is_view and not func._schema.name.startswith(_MAKES):
            named = dict(zip((each.name for each in schema.arguments), args, strict=False)) | (kwargs or {})
            for each in schema.arguments:
                is_write = each.alias_info is not None and each.alias_info.is_write
                for tensor in tree_flatten(named.get(each.name))[0]:
                    if isinstance(tensor, torch.Tensor) and tensor.numel():
                        self.has_read |= not is_write
                        extent = sum(
                            (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
                        )
                        start = tensor.data_ptr()
                        stop = start + (extent + 1) * tensor.itemsize
                        self._device.access(self._actor, start, stop, is_write, str(func))
        return func(*args, **(kwargs or {}))


_OTHER_GETTERS = {"data", "T", "mT", "H"}


class StandInTensor(torch.Tensor):
    """A tensor of a StandInDevice. ``values``: where its values are."""

    values: torch.Tensor
    memory: DeviceMemory

    @staticmethod
    def __new__(cls, values: torch.Tensor, memory: DeviceMemory) -> StandInTensor:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=memory.device.device
        )

    def __init__(self, values: torch.Tensor, memory: DeviceMemory) -> None:
        self.values, self.memory = values, memory

    def record_stream(self, stream: Any) -> None:  # torch reads the type of its argument first
        self.memory.device.record_stream(self, stream)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("__get__", "__set__") and func.__self__.__name__ not in _OTHER_GETTERS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = next(each for each in tree_flatten((args, kwargs))[0] if isinstance(each, StandInTensor))
        device = first.memory.device
        if func is torch.Tensor.copy_:
            return device.copy(*args, **kwargs)
        return device.run(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} does not go through __torch_function__")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"StandInTensor({self.values!r})"


class MakesTensors(TorchFunctionMode):
    """Makes the tensors that the calling thread asks for with ``device=`` of a StandInDevice, or moves there. What the
    thread itself does with watched memory takes part as well."""

    def __init__(self, device: StandInDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_flatten((args, kwargs))[0]
        targets = [each for each in given if isinstance(each, torch.device) and each.type == "cuda"]
        if any(isinstance(each, StandInTensor) for each in given):
            return func(*args, **kwargs)
        if kwargs.pop("pin_memory", False):
            return self._device.pinned(func(*args, **kwargs))
        if not targets:
            if func is torch.Tensor.tolist:  # no operation of its own
                self._device.host_tensor(args[0], "the host reads")
            if any(isinstance(each, torch.Tensor) and self._device.is_watched(each) for each in given):
                with Recorder(self._device, HOST):
                    return func(*args, **kwargs)
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        return self._device.tensor(func(*args, **kwargs))


def product_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the product, from ``frame`` outwards."""
    while frame is not None and not frame.f_code.co_filename.startswith(PRODUCT):
        frame = frame.f_back
    return frame


def span_of(memory: memoryview) -> tuple[int, int]:
    """(first address, address after the last)."""
    if not memory.nbytes:
        return 0, 0
    start = np.frombuffer(memory, np.uint8).ctypes.data
    return start, start + memory.nbytes
