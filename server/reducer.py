"""Carries out a round's sum: which memory is read, which is written, and by which thread.

Knows the kernels and where payloads lie, and nothing of rounds, peers or sockets. The loop's thread calls ``start``,
and ``done`` is called there. The sum is taken in place and in one pass: into the first received message, which is then
sent to all remote machines, and at the same time into the memory where a local machine wants it.

A contribution has its memory with it, which the pure core does not see. There are two kinds of memory. A message that
ZeroMQ received belongs to this process: the sum is written into it, and the same message is sent on. A shared segment
belongs to the CS of this machine: it is read, and written only where the CS wants the answer. The loop's thread owns
these objects; pool threads read and write the memory while a round is being reduced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zmq

from byteps_py.codecs import Coding, Draw
from byteps_py.dataplane.listener import Peer
from byteps_py.dataplane.seal import Digester
from byteps_py.errors import ProtocolError
from byteps_py.kernels.readiness import Pair, Readiness
from byteps_py.kernels.thread_pool import Work, default_threads
from byteps_py.rank_bits import OVERFLOW
from byteps_py.runtime import Runtime
from byteps_py.server.admission import codec_of
from byteps_py.server.round_state import Contribution, Merge
from byteps_py.system.log import logger
from byteps_py.system.shm import Segment
from byteps_py.tensor_codec import Codec
from byteps_py.tensors import Checks, DType, Op


class PayloadMemory(ABC):
    """``nbytes`` at ``address``, valid as long as this object lives."""

    address: int
    nbytes: int
    digest: bytes  # of the bytes to send from it; empty if none has been made

    @abstractmethod
    def message(self) -> zmq.Frame:
        """A message that sends these bytes without copying them."""


class FrameMemory(PayloadMemory):
    """The payload of a received message. It may be overwritten: no other process has it."""

    __slots__ = ("_frame", "address", "digest", "nbytes")

    def __init__(self, frame: zmq.Frame) -> None:
        self._frame = frame
        self.digest = b""
        self.nbytes = len(frame)
        self.address = np.frombuffer(frame.buffer, np.uint8).__array_interface__["data"][0] if self.nbytes else 0

    def message(self) -> zmq.Frame:
        return self._frame


class SharedMemory(PayloadMemory):
    """A piece of a segment that another process owns. The caller checks the bounds."""

    __slots__ = ("_offset", "_segment", "address", "digest", "nbytes")

    def __init__(self, segment: Segment, offset: int, nbytes: int) -> None:
        self.digest = b""
        self._segment = segment  # keeps the memory mapped
        self._offset = offset
        self.nbytes = nbytes
        self.address = segment.address + offset

    def message(self) -> zmq.Frame:
        return zmq.Frame(self._segment.view[self._offset : self._offset + self.nbytes])


class OwnMemory(PayloadMemory):
    """``buffer`` of this process, for values that it keeps."""

    __slots__ = ("_buffer", "address", "digest", "nbytes")

    def __init__(self, buffer: npt.NDArray[np.uint8]) -> None:
        self.digest = b""
        self._buffer = buffer
        self.nbytes = len(buffer)
        self.address = buffer.__array_interface__["data"][0]

    def message(self) -> zmq.Frame:
        return zmq.Frame(self._buffer.data)


@dataclass(slots=True, eq=False)
class Arrival(Contribution):
    """A contribution with its memory, or a CLOCK with its ``text``. ``answer``: where a local peer wants the result;
    None for a remote one. ``arrived_s``: when it was taken from the network, on the loop's clock. ``values``: the copy
    of accumulated values that answers a coded change."""

    origin: Peer
    payload: PayloadMemory | None = None
    answer: PayloadMemory | None = None
    arrived_s: float = 0.0
    text: bytes = b""
    values: PayloadMemory | None = None


#: Gets the error, if there was one, and the machines to blame for a result that is not finite (see rank_bits.py).
Done = Callable[[BaseException | None, int], None]

# A server does not hear of declarations, so it prepares the sums of these likely types. Other kernels are prepared when
# they are first needed: in milliseconds where a communication service has stored them on the same disk.
_LIKELY = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT64, DType.INT32, DType.INT64)


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One kernel call. ``inputs``, ``outputs``: addresses. ``result``: the memory that is sent to remote machines; None
    if there are none. ``outputs`` is empty when the result lies there already. ``blames``: for each input, the machines
    to blame if it is not finite; empty if that is not checked. ``codec``: of what is added; None: it is not coded.
    ``draw``: see codecs.Draw."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    result: PayloadMemory | None
    blames: tuple[int, ...] = ()
    codec: Codec | None = None
    draw: Draw | None = None

    @property
    def checks(self) -> Checks:
        return Checks.FINITE if self.blames else Checks.NONE

    def carry_out(self, runtime: Runtime, op: Op, dtype: DType, nbytes: int) -> int:
        """Run the kernel. Returns the machines to blame if the result is not finite, else 0. Any thread."""
        kernels, count = runtime.kernels, nbytes // dtype.itemsize
        if self.codec is not None and self.draw is not None:
            report = runtime.codecs.add(self.codec, self.inputs, self.outputs, nbytes, self.draw)
            if not self.blames:
                return 0
        elif not self.blames:
            kernels.reduce(op, dtype, self.inputs, self.outputs, count)
            return 0
        else:
            report = kernels.reduce_checked(self.checks, op, dtype, self.inputs, self.outputs, count)
        blame = OVERFLOW if report.overflowed else 0
        for i in report.poisoned:
            blame |= self.blames[i]
        return blame


def plan(op: Op, arrivals: Sequence[Arrival]) -> KernelCall:
    """The kernel call for these contributions of all machines, in machine order."""
    header = arrivals[0].header
    codec = codec_of(header.codec)
    draw = None
    if codec is not None:
        draw = Draw(header.key, header.drawn + header.round, header.offset // codec.item_bytes)
    givers = [a for a in arrivals if a.payload is not None]
    payloads = [a.payload for a in givers if a.payload is not None]
    inputs = tuple(payload.address for payload in payloads)
    outputs = [a.answer.address for a in arrivals if a.answer is not None]
    if op is Op.BROADCAST:
        return KernelCall(inputs, tuple(outputs), payloads[0])
    # Where a result is sent from: not written if only a machine that has it in its own memory needs it.
    is_sent = any(a.answer is None and a.header.wants_result for a in arrivals) or not outputs
    result = next((payload for payload in payloads if is_sent and isinstance(payload, FrameMemory)), None)
    blames = tuple(a.header.nonfinite_ranks for a in givers) if all(a.header.nonfinite_ranks for a in givers) else ()
    if result is not None and (len(inputs) > 1 or blames):
        outputs.append(result.address)
    return KernelCall(inputs, tuple(outputs), result, blames, codec, draw)


@dataclass(frozen=True, slots=True)
class CodedMerge(KernelCall):
    """Add a coded change, the second input, to values, the first one, and copy these to further outputs."""

    def carry_out(self, runtime: Runtime, op: Op, dtype: DType, nbytes: int) -> int:
        """See KernelCall."""
        values, count, copies = self.inputs[0], nbytes // dtype.itemsize, self.outputs
        if self.codec is not None and len(self.inputs) > 1:
            copies = copies[1:]
            runtime.codecs.decode_change(Coding(self.codec, dtype, count), self.inputs[1], (values,))
        for output in copies:
            runtime.move(output, values, nbytes)
        return 0


def plan_merge(merge: Merge[Arrival], runtime: Runtime) -> KernelCall:
    """The kernel call for a contribution to an accumulator. The copy for a remote machine is written into the
    message that it has sent, unless that is coded: the accumulator keeps it, and so it keeps a copy of one that lies in
    memory of its machine."""
    values, arrival = merge.accumulator.values, merge.contribution
    if not isinstance(values, PayloadMemory) or arrival.payload is None:
        raise ProtocolError(f"{merge.accumulator} has no values, or a contribution no bytes")
    if arrival.header.is_coded:
        return _plan_coded_merge(merge, values, arrival, runtime)
    inputs = (values.address, arrival.payload.address) if merge.adds else (values.address,)
    outputs = [values.address] if merge.adds else []
    if merge.answers:
        outputs.append((arrival.answer or arrival.payload).address)
    is_sent = merge.answers and arrival.answer is None
    return KernelCall(inputs, tuple(outputs), arrival.payload if is_sent else None)


def _plan_coded_merge(merge: Merge[Arrival], values: PayloadMemory, arrival: Arrival, runtime: Runtime) -> CodedMerge:
    header, payload = arrival.header, arrival.payload
    if merge.adds and isinstance(payload, SharedMemory):
        arrival.payload = OwnMemory(runtime.new_buffer(payload.nbytes))
        runtime.move(arrival.payload.address, payload.address, payload.nbytes)
    inputs = (values.address, arrival.payload.address) if merge.adds and arrival.payload else (values.address,)
    outputs = [values.address] if merge.adds else []
    if merge.copies:
        if arrival.answer is None:
            arrival.values = OwnMemory(runtime.new_buffer(header.length))
        outputs += [each.address for each in (arrival.answer or arrival.values,) if each is not None]
    return CodedMerge(inputs, tuple(outputs), arrival.values, (), codec_of(header.codec))


def copy_to_moved(
    runtime: Runtime, arrivals: Sequence[Arrival], waiting: Sequence[Arrival], result: PayloadMemory | None
) -> None:
    """Copy a result for local machines that connected again while their round was being reduced: they want it in
    another place than the one where the kernel wrote it. ``arrivals``, ``result``: as in ``plan``; ``waiting``: the
    contributions to answer."""
    for arrival in waiting:
        if arrival.answer is None or arrival in arrivals:
            continue
        first = next(each for each in arrivals if each.header.sender == arrival.header.sender)
        if (source := first.answer or result) is not None:
            runtime.move(arrival.answer.address, source.address, arrival.answer.nbytes)


class Reducer:
    """The kernels and their threads. ``digest``: makes the digest of a result while it is in the processor's caches.
    ``on_prepared``: called once, when the likely kernels are loaded or compiled."""

    def __init__(self, runtime: Runtime, threads: int, digest: Digester, on_prepared: Callable[[], None]) -> None:
        self._runtime = runtime
        self._loop = runtime.loop
        self._digest = digest
        self.threads = default_threads(threads)
        self._pool = runtime.thread_pool(self.threads, "sum")
        self._ready = Readiness(runtime.kernels.prepare, self._pool, self._loop, self._failed, runtime.codecs.prepare)
        self._ready.expect((Op.SUM, dtype) for dtype in _LIKELY)
        self._ready.when_done(on_prepared)

    def _failed(self, error: BaseException) -> None:
        logger.warning("a summing kernel can't be compiled; rounds that need it will fail: %r", error)

    def start(self, op: Op, dtype: DType, nbytes: int, plan: KernelCall, done: Done) -> None:
        """Carry out ``plan`` over ``nbytes`` per input, then call ``done``: at once, or later from the loop."""
        if not plan.outputs:
            self._finish(plan)
            done(None, 0)
            return
        pair: Pair = (op, dtype, plan.checks) if plan.blames else (op, dtype)
        if plan.codec is not None:
            pair = (op, dtype, plan.codec)
        touched = nbytes if plan.codec is None else plan.codec.dense_nbytes(nbytes)
        if touched <= self._runtime.thresholds.inline_server_sum and pair in self._ready:
            blame = plan.carry_out(self._runtime, op, dtype, nbytes)
            self._finish(plan)
            done(None, blame)
            return
        blame = 0

        def work() -> None:
            nonlocal blame
            blame = plan.carry_out(self._runtime, op, dtype, nbytes)
            self._finish(plan)

        def finished(error: BaseException | None) -> None:  # on a pool thread
            self._loop.post(lambda: done(error, blame))

        self._ready.submit(pair, 0, work, finished)

    def run_later(self, work: Work, priority: int, done: Callable[[BaseException | None], None]) -> None:
        """Run work that makes its kernels ready itself, before work of a lower priority; sums have 0. ``done``: as in
        ThreadPool.submit."""
        self._pool.submit(priority, work, done)

    def _finish(self, plan: KernelCall) -> None:
        """Any thread."""
        if plan.result is not None:
            plan.result.digest = self._digest(plan.result.message().buffer)

    def close(self) -> None:
        """End the threads. Waits for the sums under way, at most one partition per thread. Raises StallError."""
        self._pool.close()
