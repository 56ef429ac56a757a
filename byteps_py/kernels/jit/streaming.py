"""Copies to memory that another process reads next: through the caches or past them, whichever is faster.

``copy_past_caches`` is also for memory that is in no cache, where no measurement is needed: nothing has to be read
before it is written.

Suppose the memory's old contents still lie in caches of another part of the processor (a core complex, a socket), where
the reader read them. Then each line has to be fetched from there before it can be written: 2.5 GB/s were measured, and
27 GB/s with stores that bypass the caches. Where writer and reader share a cache, stores through it are faster, by
half. Which case holds depends on the cores on which the processes happen to run, so each copy is measured.

libc has no call for such stores, so this module compiles a few instructions in a background thread when they are first
needed. Until then, and where they can't be compiled, copies go through the caches. Any thread; the GIL is released
during a copy.
"""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict, deque
from collections.abc import Callable

from byteps_py.kernels.jit.background import Compiled, address_of

#: Smaller copies always go through the caches: the reader would lose what the writer gains.
LEAST_BYTES = 64 << 10
#: Copies change over to streaming when copies through the caches take this many times as long. Without a shared cache
#: these take two to three times as long as a streamed piece, which the writer's own cache has to drop first; with a
#: shared cache, a quarter.
_TO_LEAVE = 1.25
#: And they keep streaming while a piece through the caches takes this many times as long: without a shared cache it
#: takes 8 to 10 times.
_TO_STAY = 4.0
#: One copy in this many begins with a piece that goes the other way.
_COPIES_PER_TRY = 32
_PIECE_BYTES = 64 << 10
_REMEMBERED = 4  # measurements of each way; the best of them counts
_LINE = 64
_UNROLLED = 4
AT_ONCE_BYTES = _LINE * _UNROLLED

#: (target, source, bytes)
Stream = Callable[[int, int, int], None]


class Choice:
    """Decides which way copies of one size go, from how long earlier ones took. Pure; any thread, races do no harm."""

    def __init__(self) -> None:
        self.streams = False
        self._copies = 0
        self._costs = {way: deque[float](maxlen=_REMEMBERED) for way in (False, True)}

    def is_try_due(self) -> bool:
        """True if the next copy should begin with a piece that goes the other way."""
        self._copies += 1
        return self._copies % _COPIES_PER_TRY == 0 or len(self._costs[not self.streams]) < _REMEMBERED

    def took(self, streamed: bool, nbytes: int, seconds: float) -> None:
        """Record that ``nbytes`` took ``seconds``, ``streamed`` past the caches or not."""
        self._costs[streamed].append(seconds / nbytes)
        usual, past = list(self._costs[False]), list(self._costs[True])  # another thread may clear them
        if len(usual) == len(past) == _REMEMBERED:
            streams = min(usual) > (_TO_STAY if self.streams else _TO_LEAVE) * min(past)
            if streams is not self.streams:
                self.streams = streams
                for costs in self._costs.values():  # the cost of either way depends on which way the last copy went
                    costs.clear()


#: By the size of the copy, in powers of two.
_choices: defaultdict[int, Choice] = defaultdict(Choice)


def copy(target: int, source: int, nbytes: int) -> None:
    """Copy ``nbytes`` from address ``source`` to address ``target``; the two ranges must not overlap."""
    if nbytes < LEAST_BYTES or _code.ready is None:
        ctypes.memmove(target, source, nbytes)
        if nbytes >= LEAST_BYTES:
            _code.prepare()
        return
    choice = _choices[nbytes.bit_length()]
    done = 0
    if choice.is_try_due():
        done = min(_PIECE_BYTES, nbytes)
        _timed(choice, not choice.streams, target, source, done)
    if done < nbytes:
        _timed(choice, choice.streams, target + done, source + done, nbytes - done)


def goes_past_caches(nbytes: int) -> bool:
    """True if copies of this size bypass the caches at the moment. For callers that write to such memory themselves."""
    return nbytes >= LEAST_BYTES and _code.ready is not None and _choices[nbytes.bit_length()].streams


def choice(nbytes: int) -> Choice:
    """The decision for copies of this size, for callers that copy themselves and report with ``took``."""
    return _choices[nbytes.bit_length()]


def address() -> int:
    """The address of the compiled copy, for other compiled code. Call it only once ``is_ready`` returned True.

    The function takes (target, source, bytes): ``target`` a multiple of 64, ``bytes`` a multiple of ``AT_ONCE_BYTES``.
    """
    return address_of(_ready())


def prepare() -> None:
    """Start compiling the streamed copy unless that was started before. Returns at once."""
    _code.prepare()


def is_there() -> bool:
    """True if copies may bypass the caches by now. Does not wait."""
    return _code.ready is not None


def is_ready() -> bool:
    """True if copies may bypass the caches. Waits for a compilation that was started, for up to a minute."""
    return _code.is_ready()


def _timed(choice: Choice, streamed: bool, target: int, source: int, nbytes: int) -> None:
    began = time.perf_counter()
    if streamed:
        copy_past_caches(target, source, nbytes)
    else:
        ctypes.memmove(target, source, nbytes)
    choice.took(streamed, nbytes, time.perf_counter() - began)


def copy_past_caches(target: int, source: int, nbytes: int) -> None:
    """``copy`` past the caches in any case. Raises RuntimeError unless ``is_ready`` returned True before."""
    stream = _ready()
    head = min(-target % _LINE, nbytes)
    body = (nbytes - head) // AT_ONCE_BYTES * AT_ONCE_BYTES
    if head:
        ctypes.memmove(target, source, head)
    stream(target + head, source + head, body)
    done = head + body
    if done < nbytes:
        ctypes.memmove(target + done, source + done, nbytes - done)


def _ready() -> Stream:
    if _code.ready is None:
        raise RuntimeError("the streamed copy is not compiled; call prepare() and is_ready() first")
    return _code.ready


def _compile() -> Stream:
    from llvmlite import ir

    from byteps_py.kernels.jit import llvm

    module = llvm.new_module("byteps_streaming")
    line = ir.VectorType(ir.IntType(64), _LINE // 8)
    size = ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [size, size, size]), "stream")
    target, source, nbytes = function.args
    entry, loop, end = (function.append_basic_block(name) for name in ("entry", "loop", "end"))
    builder = ir.IRBuilder(entry)
    builder.cbranch(builder.icmp_unsigned("==", nbytes, size(0)), end, loop)
    builder.position_at_end(loop)
    at = builder.phi(size)
    values = []
    for i in range(_UNROLLED):
        address = builder.add(builder.add(source, at), size(i * _LINE))
        values.append(builder.load(builder.inttoptr(address, line.as_pointer()), align=1, typ=line))
    for i, value in enumerate(values):
        address = builder.add(builder.add(target, at), size(i * _LINE))
        llvm.store_past_caches(builder, value, address)
    after = builder.add(at, size(AT_ONCE_BYTES))
    at.add_incoming(size(0), entry)
    at.add_incoming(after, loop)
    builder.cbranch(builder.icmp_unsigned("<", after, nbytes), loop, end)
    builder.position_at_end(end)
    llvm.end_of_stores(builder)
    builder.ret_void()
    return llvm.compile_function(function)


_code = Compiled("streaming", _compile, "copies between processes of this machine go through the caches")
