"""Shared memory of the simulated machines, where every access is checked; and the kernels that access it.

A block that was given back is overwritten and must not be touched: a kernel, a message or a rank that does, or
memory given back under a running kernel, is a violation. Addresses are real ones of this process.
"""

from __future__ import annotations

import bisect
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from byteps_py.codecs import Coding
from byteps_py.kernels.optimizer_steps import StepSegment, bind_segments
from byteps_py.kernels.update_rules import Scalar, StepKind
from byteps_py.server.reducer import KernelCall
from byteps_py.server.shadow_keeper import CodedTotal, apply_step
from byteps_py.system.shm import Block
from byteps_py.tensors import DType, Op
from byteps_py.worker.core.tensor import Compute
from byteps_py.worker.io.coded_parts import _decode, _encode

from .world import InvariantError, Process, World

ARENA_BYTES = 192 << 10
_LINE = 64
_SLOWEST_S = 10.0
_POISON = 0xA5
_KINDS: dict[DType, np.dtype[Any]] = {
    dtype: np.dtype(dtype.name.lower()) for dtype in DType if dtype is not DType.BFLOAT16
}
_COMBINE = {Op.SUM: np.add, Op.MIN: np.minimum, Op.MAX: np.maximum, Op.PRODUCT: np.multiply}
Bytes = npt.NDArray[np.uint8]
#: Values of an optimizer's state.
Wide = npt.NDArray[Any]
Range = tuple[int, int]  # (address, bytes)
LAMB_STATES = 4


def address_of(data: Bytes) -> int:
    return int(data.__array_interface__["data"][0])


def combine(op: Op, dtype: DType, inputs: Sequence[Bytes], divisor: int = 1) -> Bytes:
    """What the contract says: left to right in the wide type, rounded once; then divided, and rounded again."""
    kind = _KINDS[dtype]
    wide = np.dtype(np.float32) if dtype is DType.FLOAT16 else kind
    result = inputs[0].view(kind).astype(wide)
    with np.errstate(all="ignore"):
        for each in inputs[1:]:
            result = _COMBINE[op](result, each.view(kind).astype(wide))
        rounded = result.astype(kind)
        if divisor > 1 and dtype.is_floating:
            rounded = (rounded.astype(wide) / wide.type(divisor)).astype(kind)
        elif divisor > 1:
            rounded = np.floor_divide(rounded, kind.type(divisor))
    return rounded.view(np.uint8)


class Segment:
    """What a descriptor stands for. All processes see it at the same address."""

    def __init__(self, fd: int, data: Bytes) -> None:
        self.fd = fd
        self.nbytes = len(data)
        self.view = memoryview(data)  # type: ignore[arg-type]  # numpy's stubs
        self.address = address_of(data)

    def close(self) -> None:
        self.fd = -1


class Arena:
    """Stands for byteps_py.system.shm.Arena; one segment."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._data: Bytes = np.zeros(ARENA_BYTES, np.uint8)
        self.base = address_of(self._data)
        self._used = 0
        self._spare: dict[int, list[Block]] = {}
        self._starts: list[int] = []  # of blocks in use, sorted
        self.blocks: dict[int, Block] = {}  # in use, by start
        self.segments = [Segment(memory.new_descriptor(self._data), self._data)]

    def allocate(self, nbytes: int) -> Block:
        rounded = max(_LINE, -(-nbytes // _LINE) * _LINE)
        spare = self._spare.get(rounded)
        if spare:
            block = spare.pop()
        else:
            block = Block(0, self._used, rounded, self.base + self._used)
            self._used += rounded
            if self._used > ARENA_BYTES:
                raise InvariantError(f"memory leaks: more than {ARENA_BYTES} bytes are in use")
        self.blocks[block.offset] = block
        bisect.insort(self._starts, block.offset)
        return block

    def free(self, block: Block) -> None:
        if self.blocks.pop(block.offset, None) is not block:
            raise InvariantError(f"the block at {block.offset} is given back twice")
        self._starts.remove(block.offset)
        self._memory.check_idle(block)
        self._data[block.offset : block.offset + block.nbytes] = _POISON
        self._spare.setdefault(block.nbytes, []).append(block)

    def find(self, address: int, nbytes: int) -> Bytes:
        offset = address - self.base
        at = bisect.bisect_right(self._starts, offset) - 1
        block = self.blocks[self._starts[at]] if at >= 0 else None
        if block is None or offset + nbytes > block.offset + block.nbytes:
            raise InvariantError(f"{nbytes} bytes at {offset} of shared memory are used after they were given back")
        return self._data[offset : offset + nbytes]

    def peek(self, address: int, nbytes: int) -> Bytes:
        return self._data[address - self.base : address - self.base + nbytes]

    def close_descriptors(self) -> None: ...

    def close(self) -> None: ...


class Frame:
    """Stands for a received zmq.Frame. Once nobody holds it, its memory must not be touched."""

    def __init__(self, memory: Memory, data: Bytes) -> None:
        self._memory = memory
        self.data = data
        self.address = address_of(data)
        if len(data):
            memory.frames[self.address] = data

    def __len__(self) -> int:
        return len(self.data)

    def __del__(self) -> None:
        self._memory.frames.pop(self.address, None)

    @property
    def buffer(self) -> memoryview:
        return memoryview(self.data)  # type: ignore[arg-type]  # numpy's stubs

    @property
    def bytes(self) -> bytes:
        return self.data.tobytes()


class Memory:
    """All of it. ``available_bytes``: as far as servers know, for states; ``most_waiting_bytes``: for steps to be
    applied, of one server."""

    available_bytes = float(1 << 40)
    most_waiting_bytes = math.inf

    def __init__(self) -> None:
        self.arenas: list[Arena] = []
        self.frames: dict[int, Bytes] = {}
        self._by_descriptor: dict[int, Bytes] = {}
        self._busy: list[tuple[int, int]] = []  # (address, bytes) that running kernels use

    def new_arena(self, elsewhere: object = None) -> Arena:
        """Its pages are there at once, so ``elsewhere`` has nothing to do."""
        self.arenas.append(Arena(self))
        return self.arenas[-1]

    def new_buffer(self, nbytes: int) -> Bytes:
        """Memory of one process, in use until nobody has it."""
        data = np.full(nbytes, _POISON, np.uint8)
        address, buffer = address_of(data), data[:]
        self.frames[address] = data
        weakref.finalize(buffer, self.frames.pop, address, None).atexit = False
        return buffer

    def new_descriptor(self, data: Bytes) -> int:
        fd = 1_000_000 + len(self._by_descriptor)
        self._by_descriptor[fd] = data
        return fd

    def map_segment(self, fd: int, nbytes: int) -> Segment:
        """Stands for byteps_py.system.shm.Segment(fd, nbytes)."""
        return Segment(fd, self._by_descriptor[fd][:nbytes])

    def find(self, address: int, nbytes: int) -> Bytes:
        """The bytes there, whoever uses them by now."""
        for arena in self.arenas:
            if arena.base <= address < arena.base + ARENA_BYTES:
                return arena.peek(address, nbytes)
        return self.at(address, nbytes)

    def at(self, address: int, nbytes: int) -> Bytes:
        """The bytes there, in use as they must be."""
        for arena in self.arenas:
            if arena.base <= address < arena.base + ARENA_BYTES:
                return arena.find(address, nbytes)
        for start, data in self.frames.items():
            if start <= address and address + nbytes <= start + len(data):
                return data[address - start : address - start + nbytes]
        raise InvariantError(f"{nbytes} bytes are used of a message that was given back, or never was")

    def move(self, target: int, source: int, nbytes: int) -> None:
        """Stands for ctypes.memmove."""
        self.at(target, nbytes)[:] = self.at(source, nbytes)

    def hold(self, ranges: list[tuple[int, int]]) -> None:
        """A kernel begins to use these."""
        self._busy += ranges

    def let_go(self, ranges: list[tuple[int, int]]) -> None:
        for each in ranges:
            self._busy.remove(each)

    def check_idle(self, block: Block) -> None:
        for address, nbytes in self._busy:
            if address < block.address + block.nbytes and block.address < address + nbytes:
                raise InvariantError("memory is given back while a kernel runs on it")


class Kernels:
    """Stands for the module byteps_py.kernels. ``is_lenient``: see ThreadPool."""

    def __init__(self, memory: Memory, is_lenient: bool = False) -> None:
        self._memory = memory
        self._read = memory.find if is_lenient else memory.at

    def prepare(self, pairs: object) -> None: ...

    def reduce(
        self, op: Op, dtype: DType, inputs: Sequence[int], outputs: Sequence[int], count: int, divisor: int = 1
    ) -> None:
        nbytes = count * dtype.itemsize
        sources = [self._read(address, nbytes) for address in inputs]
        targets = [self._memory.at(address, nbytes) for address in outputs]
        result = combine(op, dtype, sources, divisor)
        for target in targets:
            target[:] = result

    def bind(self, *call: Any, past_caches: bool = False) -> Callable[[], None]:
        return functools.partial(self.reduce, *call)

    def prepare_step(self, kind: StepKind) -> None: ...

    def bind_step(
        self, kind: StepKind, states: Sequence[int], inputs: Sequence[int], outputs: Sequence[int], divisor: int = 1
    ) -> StepKernel:
        return StepKernel(self._memory, kind, tuple(states), tuple(inputs), tuple(outputs), divisor)

    def square_sum(self, dtype: DType, inputs: Sequence[int], elements: range, divisor: int = 1) -> float:
        if not elements:
            return 0.0
        start, nbytes = elements.start * dtype.itemsize, len(elements) * dtype.itemsize
        return square_sum(dtype, combine(Op.SUM, dtype, [self._read(at + start, nbytes) for at in inputs], divisor))


def square_sum(dtype: DType, data: Bytes) -> float:
    values = data.view(_KINDS[dtype]).astype(np.float64)
    return float(values @ values)


def wide_values(kind: StepKind, data: Bytes) -> Wide:
    """An average of gradients, in the type of the step."""
    return data.view(_KINDS[kind.gradient]).astype(np.float64 if kind.gradient is DType.FLOAT64 else np.float32)


def update(states: Sequence[Wide], gradient: Wide, scalars: Sequence[float]) -> None:
    """A step of SGD with momentum, if there is a second state; with four, the first phase of something like LAMB, which
    leaves the update in the last one. With powers of two as numbers, no fused operation gives other bits."""
    real = gradient.dtype.type
    if len(states) == LAMB_STATES:
        kept = real(scalars[Scalar.MOMENTUM])
        states[1][:] = states[1] * kept + gradient * real(scalars[Scalar.GAIN])
        states[2][:] = states[2] * kept + gradient * gradient * real(scalars[Scalar.SQUARE_GAIN])
        states[3][:] = states[1] + states[2] * real(scalars[Scalar.STEP])
        return
    if len(states) > 1:
        states[1][:] = states[1] * real(scalars[Scalar.MOMENTUM]) + gradient * real(scalars[Scalar.GAIN])
        gradient = states[1]
    states[0][:] = states[0] + gradient * real(scalars[Scalar.STEP])


def stored(kind: StepKind, master: Wide) -> Bytes:
    """Parameters as they travel."""
    with np.errstate(all="ignore"):
        return master.astype(_KINDS[kind.parameter]).view(np.uint8)


class StepKernel:
    """What bind_step returns."""

    def __init__(
        self,
        memory: Memory,
        kind: StepKind,
        states: tuple[int, ...],
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        divisor: int,
    ) -> None:
        self._memory, self._kind, self._divisor = memory, kind, divisor
        self._states, self._inputs, self._outputs = states, inputs, outputs

    def inputs(self, elements: range) -> list[Range]:
        return self._ranges(self._inputs, self._kind.gradient.itemsize, elements)

    def outputs(self, elements: range) -> list[Range]:
        states = self._ranges(self._states, self._kind.state_itemsize, elements)
        return [*states, *self._ranges(self._outputs, self._kind.parameter.itemsize, elements)]

    def __call__(self, scalars: Sequence[float], elements: range) -> None:
        memory, kind = self._memory, self._kind
        sources = [memory.at(*each) for each in self.inputs(elements)]
        gradient = wide_values(kind, combine(Op.SUM, kind.gradient, sources, self._divisor))
        places = [memory.at(*each) for each in self.outputs(elements)]
        states = [place.view(gradient.dtype) for place in places[: kind.states]]
        update(states, gradient, scalars)
        for target in places[kind.states :]:
            target[:] = stored(kind, states[0])

    @staticmethod
    def _ranges(addresses: tuple[int, ...], itemsize: int, elements: range) -> list[Range]:
        return [(address + elements.start * itemsize, len(elements) * itemsize) for address in addresses]


class StepCall(NamedTuple):
    """What apply_step is called with."""

    kernels: Kernels
    kind: StepKind
    states: list[int]
    total: int
    divisor: int
    segments: Sequence[StepSegment]
    code: CodedTotal | None = None

    def ranges(self) -> tuple[list[Range], list[Range]]:
        run = bind_segments(self.kind, self.states, [self.total], [], self.divisor, self.kernels.bind_step)
        read, written = _ranges(_step_kernels(run), self.segments)
        if self.code is not None:
            coding = self.code.coding
            read = [(self.total, coding.codec.coded_nbytes(coding.count))]
        return read, written


def _ranges(kernels: dict[bool, StepKernel], segments: Sequence[StepSegment]) -> tuple[list[Range], list[Range]]:
    calls = [(kernels[bool(segment.scalars[Scalar.PHASE])], segment.elements) for segment in segments]
    read = [each for kernel, elements in calls for each in kernel.inputs(elements)]
    return read, [each for kernel, elements in calls for each in kernel.outputs(elements)]


def is_shadows(work: Callable[[], None]) -> bool:
    """It steps states that a server keeps."""
    return isinstance(work, functools.partial) and work.func is apply_step


def _use_of(work: Callable[[], None]) -> tuple[list[Range], list[Range]] | None:
    """What a kernel reads, and what it writes; None if it is none."""
    if (closure := getattr(work, "__closure__", None)) is not None:  # a server's
        names = work.__code__.co_freevars  # type: ignore[attr-defined]
        known = dict(zip(names, (cell.cell_contents for cell in closure), strict=True))
        plan = known.get("plan")
        if not isinstance(plan, KernelCall):
            return None
        dtype, inputs, outputs = known["dtype"], plan.inputs, plan.outputs
        count = known["nbytes"] // dtype.itemsize
    elif not isinstance(work, functools.partial):
        return None
    elif work.func in (_encode, _decode):
        return _use_of_codec(work.args[1], work.args[2], work.func is _encode)
    elif is_shadows(work):
        return StepCall(**work.keywords).ranges()
    elif len(work.args) == 4 and (kernels := _step_kernels(work.args[1])):
        return _ranges(kernels, work.args[2])
    elif len(work.args) < 5:
        return None
    else:
        _, dtype, inputs, outputs, count = work.args[:5]
    nbytes = count * dtype.itemsize
    return [(address, nbytes) for address in inputs], [(address, nbytes) for address in outputs]


def _use_of_codec(coding: Coding, compute: Compute, encodes: bool) -> tuple[list[Range], list[Range]]:
    dense, sent = coding.count * coding.dtype.itemsize, coding.codec.coded_nbytes(coding.count)
    read, written = (dense, sent) if encodes else (sent, dense)
    return [(address, read) for address in compute.inputs], [(address, written) for address in compute.outputs]


def _step_kernels(run: Callable[..., None]) -> dict[bool, StepKernel]:
    """Of what bind_segments returns: of the first phase, and of LAMB's second one."""
    code = getattr(run, "__code__", None)
    cells = dict(zip(code.co_freevars, run.__closure__ or (), strict=True)) if code is not None else {}
    if {*cells} != {"apply", "update"}:
        return {}
    return {False: cells["update"].cell_contents, True: cells["apply"].cell_contents}


class ThreadPool:
    """Stands for byteps_py.kernels.thread_pool.ThreadPool: work ends after any time, in any order. What a kernel reads
    must not change before it ends; unless it ``is_lenient``: a server whose answer nobody waits for any more may sum
    what it likes. Where it writes must be nobody else's all the same.
    A process that ends leaves half a result behind. ``slowness``: how much longer all takes."""

    def __init__(
        self, world: World, memory: Memory, process: Process, is_lenient: bool = False, slowness: float = 1.0
    ) -> None:
        self._world = world
        self._memory = memory
        self._process = process
        self._is_lenient = is_lenient
        self._slowness = slowness
        self._held: list[list[tuple[int, int]]] = []
        self._of_shadows: list[list[tuple[int, int]]] = []  # some of these
        process.on_end.append(self._end)

    def _end(self) -> None:
        for ranges in self._held:
            self._memory.let_go(ranges)
            for address, nbytes in ranges if self._is_lenient else ():
                self._memory.find(address, nbytes)[: nbytes // 2] = _POISON
        self._held.clear()

    def submit(self, priority: int, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        ranges, before = self._claim(work)
        if is_shadows(work):
            self._of_shadows.append(ranges)

        def run() -> None:
            self._held.remove(ranges)
            self._of_shadows = [each for each in self._of_shadows if each is not ranges]
            self._memory.let_go(ranges)
            for (address, nbytes), data in zip(ranges, before, strict=False):
                if self._memory.at(address, nbytes).tobytes() != data:
                    raise InvariantError("the memory that a kernel reads was written before it was done")
            work()
            done(None)

        # Some take long: until after the end of the tensor that they work for.
        delay_s = self._world.delay() * self._world.random.choice((1, 1, 1, 10))
        if self._slowness > 1.0:
            delay_s = min(delay_s * self._slowness, _SLOWEST_S)
            self._world.expect_quiet(delay_s)
        self._world.after(delay_s, self._process, "kernel", run)

    def _claim(self, work: Callable[[], None]) -> tuple[list[tuple[int, int]], list[bytes]]:
        """What a kernel uses, inputs first, and what lies in the inputs now."""
        use = _use_of(work)
        if use is None:
            self._held.append([])
            return self._held[-1], []
        inputs, outputs = use
        is_strict = not self._is_lenient or is_shadows(work)
        pure_inputs = [each for each in inputs if each not in outputs] if is_strict else []
        ranges = [*pure_inputs, *outputs]
        self._memory.hold(ranges)
        self._held.append(ranges)
        return ranges, [self._memory.at(*each).tobytes() for each in pure_inputs]

    def close(self) -> None:
        """Steps of states that have not begun do not: the states outlive this."""
        for ranges in self._of_shadows:
            self._held.remove(ranges)
            self._memory.let_go(ranges)
        self._of_shadows.clear()
