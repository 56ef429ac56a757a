"""Carries out a round's sum: which memory is read, which is written, and by which thread.

Knows the kernels and where payloads lie; nothing of rounds, peers or sockets. ``start`` is for the loop thread;
``done`` is called there, too. The sum is taken in place, in one pass: into the first received message, which is
then sent to every remote machine, and at once into the place where a local machine wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from byteps_py import kernels
from byteps_py.kernels.engine import Engine, default_threads
from byteps_py.loop import EventLoop
from byteps_py.server.arrival import Arrival, FrameMemory, Memory
from byteps_py.tensors import DType, Op

Done = Callable[[BaseException | None], None]

#: Up to this size a sum takes less time than handing it to another thread and back.
INLINE_BYTES = 64 << 10
_LIKELY = [(Op.SUM, DType.FLOAT32), (Op.SUM, DType.FLOAT16), (Op.SUM, DType.BFLOAT16)]


@dataclass(frozen=True, slots=True)
class Plan:
    """One kernel call. ``result``: what remote machines are sent; None if there are none.
    ``outputs`` is empty when the result lies there already."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    result: Memory | None


def plan(op: Op, arrivals: Sequence[Arrival]) -> Plan:
    """Who reads and writes what. ``arrivals``: all machines' contributions, in machine order."""
    payloads = [a.payload for a in arrivals if a.payload is not None]
    inputs = tuple(payload.address for payload in payloads)
    outputs = [a.answer.address for a in arrivals if a.answer is not None]
    if op is Op.BROADCAST:
        return Plan(inputs, tuple(outputs), payloads[0])
    result = next((payload for payload in payloads if isinstance(payload, FrameMemory)), None)
    if result is not None and len(inputs) > 1:
        outputs.append(result.address)
    return Plan(inputs, tuple(outputs), result)


class Reducer:
    """The kernels and their threads. ``on_prepared``: called once, when the likely kernels are loaded or compiled."""

    def __init__(self, loop: EventLoop, threads: int, on_prepared: Callable[[], None]) -> None:
        self._loop = loop
        self._on_prepared = on_prepared
        self._preparing = len(_LIKELY)
        self._engine = Engine(default_threads(threads), "sum")
        self._ready: set[tuple[Op, DType]] = set()  # compiled: a call takes no longer than its memory does
        for pair in _LIKELY:
            self._engine.submit(-1, lambda pair=pair: kernels.prepare([pair]), self._prepared(pair))  # type: ignore[misc]

    def _prepared(self, pair: tuple[Op, DType]) -> Done:
        def finish(error: BaseException | None) -> None:
            if error is None:  # else the first sum will meet it again, and its machines be told
                self._ready.add(pair)
            self._preparing -= 1
            if not self._preparing:
                self._on_prepared()

        return lambda error: self._loop.post(lambda: finish(error))

    def start(self, op: Op, dtype: DType, nbytes: int, plan: Plan, done: Done) -> None:
        """Carry out ``plan`` over ``nbytes`` per input, then call ``done``: at once, or later from the loop."""
        if not plan.outputs:
            done(None)
            return

        def work() -> None:
            kernels.reduce(op, dtype, plan.inputs, plan.outputs, nbytes // dtype.itemsize)

        if nbytes <= INLINE_BYTES and (op is Op.BROADCAST or (op, dtype) in self._ready):
            work()
            done(None)
            return

        def finished(error: BaseException | None) -> None:  # on an engine thread
            self._loop.post(lambda: self._finish((op, dtype), done, error))

        self._engine.submit(0, work, finished)

    def _finish(self, pair: tuple[Op, DType], done: Done, error: BaseException | None) -> None:
        if error is None:
            self._ready.add(pair)
        done(error)

    def close(self) -> None:
        """Waits for the sum in hand, at most one partition per thread."""
        self._engine.close()
