"""Copies to memory that another process is about to read: through the caches, or past them, whichever is faster.

Where what the reader has read before still lies in caches of another part of the processor (a core complex, a socket),
each line has to be taken from there before it can be written again: 2.5 GB/s were measured, and 27 with stores that
bypass the caches. Where both share a cache the usual way is the faster one, by half. Which it is depends on the cores
on which processes happen to run, so it is measured, copy by copy.

There is no call for such stores in libc, so a few instructions are compiled, in a thread, when they are first needed;
until then, and where it can't be done, copies go the usual way. Any thread; the GIL is free meanwhile.
"""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict, deque
from collections.abc import Callable

from byteps_py.instructions import Compiled, address_of

#: Of less the reader loses what the writer gains.
LEAST_BYTES = 64 << 10
#: Past the caches one goes if the usual way takes so much longer. Where caches are not shared it takes twice to three
#: times as long as a piece past the caches, which first has to be thrown out of one's own; where they are, a quarter.
_TO_LEAVE = 1.25
#: And stays so while a piece that goes the usual way takes so much longer: where caches are not shared, 8 to 10 times.
_TO_STAY = 4.0
#: One copy in so many begins with a piece that goes the other way.
_COPIES_PER_TRY = 32
_PIECE_BYTES = 64 << 10
_REMEMBERED = 4  # of each way: the best of the last so many counts
_LINE = 64
_UNROLLED = 4
AT_ONCE_BYTES = _LINE * _UNROLLED

#: (target, source, bytes)
Stream = Callable[[int, int, int], None]


class Choice:
    """Which way to go, from how long copies took. Pure; any thread, races do no harm."""

    def __init__(self) -> None:
        self.streams = False
        self._copies = 0
        self._costs = {way: deque[float](maxlen=_REMEMBERED) for way in (False, True)}

    def is_try_due(self) -> bool:
        """True if the next copy is to begin with a piece that goes the other way."""
        self._copies += 1
        return self._copies % _COPIES_PER_TRY == 0 or len(self._costs[not self.streams]) < _REMEMBERED

    def took(self, streamed: bool, nbytes: int, seconds: float) -> None:
        self._costs[streamed].append(seconds / nbytes)
        usual, past = list(self._costs[False]), list(self._costs[True])  # another thread may clear them
        if len(usual) == len(past) == _REMEMBERED:
            streams = min(usual) > (_TO_STAY if self.streams else _TO_LEAVE) * min(past)
            if streams is not self.streams:
                self.streams = streams
                for costs in self._costs.values():  # what one way costs depends on which of them was the last one
                    costs.clear()


#: By the size of the copy, in powers of two.
_choices: defaultdict[int, Choice] = defaultdict(Choice)


def copy(target: int, source: int, nbytes: int) -> None:
    """``nbytes`` from one address to another, which do not overlap."""
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
    """Whether copies of that size do, at the moment: for who writes to such memory otherwise."""
    return nbytes >= LEAST_BYTES and _code.ready is not None and _choices[nbytes.bit_length()].streams


def choice(nbytes: int) -> Choice:
    """Which way copies of that size go: for who copies by itself."""
    return _choices[nbytes.bit_length()]


def address() -> int:
    """Of the instructions themselves, once ``is_ready``: they copy (target, source, bytes) past the caches, a multiple
    of ``AT_ONCE_BYTES`` to a multiple of a line."""
    return address_of(_ready())


def prepare() -> None:
    """Have the instructions compiled, unless they are. Returns at once."""
    _code.prepare()


def is_ready() -> bool:
    """Whether copies may go past the caches, once that is known, or within the time."""
    return _code.is_ready()


def _timed(choice: Choice, streamed: bool, target: int, source: int, nbytes: int) -> None:
    began = time.perf_counter()
    if streamed:
        copy_past_caches(target, source, nbytes)
    else:
        ctypes.memmove(target, source, nbytes)
    choice.took(streamed, nbytes, time.perf_counter() - began)


def copy_past_caches(target: int, source: int, nbytes: int) -> None:
    """The same as ``copy``, past the caches: once ``is_ready``."""
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
        raise RuntimeError("the instructions are not there; call prepare() and is_ready() first")
    return _code.ready


def _compile() -> Stream:
    from llvmlite import ir

    from byteps_py import llvm

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
