"""What a service takes from its process and its machine: one object, given to the constructors that need it.

A service process makes one ``Runtime()``. The simulator of the tests gives each of its processes another one, with a
virtual clock, network and memory; a test may replace a single field.
"""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import zmq

from byteps_py import channel, kernels
from byteps_py.chunks import CHUNK_BYTES
from byteps_py.dataplane.dialer import Dialer
from byteps_py.dataplane.listener import DataListener
from byteps_py.kernels.engine import Engine
from byteps_py.loop import EventLoop
from byteps_py.shm import Arena, Segment
from byteps_py.tensors import Checks, DType, Op


class Kernels(Protocol):
    """byteps_py.kernels: arithmetic on memory, by address. Any thread."""

    def reduce(
        self, op: Op, dtype: DType, inputs: Sequence[int], outputs: Sequence[int], count: int, divisor: int = 1
    ) -> None: ...

    def bind(
        self, op: Op, dtype: DType, inputs: Sequence[int], outputs: Sequence[int], count: int, divisor: int = 1
    ) -> Callable[[], None]: ...

    def reduce_checked(
        self,
        checks: Checks,
        op: Op,
        dtype: DType,
        inputs: Sequence[int],
        outputs: Sequence[int],
        count: int,
        divisor: int = 1,
    ) -> kernels.Report: ...

    def prepare(self, pairs: Iterable[tuple[Op, DType]], checks: Checks = Checks.NONE) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Sizes in bytes at which a service does something in another way, and one time in seconds.

    ``inline_sum``: a communication service's kernel that reads and writes fewer bytes runs on the loop's thread, since
        the way to the engine and back costs 50 to 100 µs. Measured: 256 KB summed over 2 ranks takes 90 µs so, through
        the engine 150 to 190.
    ``last_inline_sum``: the same for the last piece of a tensor of one machine, whose end the loop would only wait for
        (1 MB: 115 µs, was 200), up to 4 ranks' 1 MB.
    ``inline_copy``: copies of fewer bytes run on the loop's thread.
    ``inline_server_sum``: a server's sum up to this size takes less time than handing it to another thread.
    ``local_sum_piece``, ``local_copy_piece``: where nothing is sent to another machine, a tensor is cut only so that
        several threads can work on it.
    ``joint_copy``: pieces up to this size are copied together when all are there.
    ``copied_answer``: a piece of fewer bytes is copied into its message; a larger one is sent from where it lies.
    ``chunk``: see chunks.py. Ranks use the same.
    ``sent_check_s``: a frame that can't be sent from where it lies is sent in time so short that nothing sooner is
        worth asking.
    """

    inline_sum: int = 1 << 20
    last_inline_sum: int = 8 << 20
    inline_copy: int = 256 << 10
    inline_server_sum: int = 64 << 10
    local_sum_piece: int = 1 << 20
    local_copy_piece: int = 1 << 20
    joint_copy: int = 256 << 10
    copied_answer: int = 256 << 10
    chunk: int = CHUNK_BYTES
    sent_check_s: float = 0.001


def has_ended(pidfd: int) -> bool:
    """The process has ended."""
    return bool(select.select([pidfd], [], [], 0)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """``loop`` is also the clock: ``loop.time()``. The other fields are classes to make something of, or functions."""

    loop: EventLoop = field(default_factory=EventLoop)
    engine: type[Engine] = Engine
    kernels: Kernels = kernels
    zmq_context: type[zmq.Context[zmq.Socket[bytes]]] = zmq.Context
    dialer: type[Dialer] = Dialer
    data_listener: type[DataListener] = DataListener
    local_listener: type[channel.Listener] = channel.Listener
    connect_local: Callable[[str, float], channel.Channel] = channel.connect
    arena: type[Arena] = Arena
    segment: type[Segment] = Segment
    move: Callable[[int, int, int], object] = ctypes.memmove  # (target, source, bytes)
    getpid: Callable[[], int] = os.getpid
    open_pidfd: Callable[[int], int] = os.pidfd_open
    has_ended: Callable[[int], bool] = has_ended  # the process of a pidfd
    close_fd: Callable[[int], None] = os.close
    thresholds: Thresholds = Thresholds()
