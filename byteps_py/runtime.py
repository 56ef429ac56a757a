"""Everything that a service takes from its process and its machine, as one object that constructors receive.

A service process makes one ``Runtime()``. The tests' simulator gives each simulated process another one, with a virtual
clock, network and memory; a test may replace a single field. The loop's thread uses it.
"""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import zmq

from byteps_py import codecs, kernels
from byteps_py.codecs import Coding, Draw
from byteps_py.config.settings import Settings
from byteps_py.dataplane.dialer import Dialer
from byteps_py.dataplane.link_rate import LinkRateMeter, open_link_rate_meter
from byteps_py.dataplane.listener import DataListener
from byteps_py.dataplane.nixl_agent import open_rdma_lane
from byteps_py.dataplane.rdma_lane import RdmaLane
from byteps_py.dataplane.relay import Relay, open_relay
from byteps_py.kernels.thread_pool import ThreadPool
from byteps_py.kernels.update_rules import StepKind
from byteps_py.system import channel
from byteps_py.system.loop import EventLoop
from byteps_py.system.process_memory import available_memory_bytes
from byteps_py.system.shm import Arena, Segment
from byteps_py.tensor_codec import Codec
from byteps_py.tensors import Checks, DType, Op
from byteps_py.wire.chunks import CHUNK_BYTES


class Kernels(Protocol):
    """The functions of ``byteps_py.kernels``: arithmetic on memory, by address. Any thread."""

    def reduce(
        self, op: Op, dtype: DType, inputs: Sequence[int], outputs: Sequence[int], count: int, divisor: int = 1
    ) -> None: ...

    def bind(
        self,
        op: Op,
        dtype: DType,
        inputs: Sequence[int],
        outputs: Sequence[int],
        count: int,
        divisor: int = 1,
        past_caches: bool = False,
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

    def bind_step(
        self,
        kind: StepKind,
        states: Sequence[int],
        inputs: Sequence[int],
        outputs: Sequence[int],
        divisor: int = 1,
    ) -> Callable[[Sequence[float], range], None]: ...

    def prepare_step(self, kind: StepKind) -> None: ...

    def square_sum(self, dtype: DType, inputs: Sequence[int], elements: range, divisor: int = 1) -> float: ...


class Codecs(Protocol):
    """The functions of ``byteps_py.codecs``, by address. Any thread."""

    def prepare(self, codec: Codec, dtype: DType) -> None: ...

    def encode(self, coding: Coding, inputs: Sequence[int], output: int) -> kernels.Report: ...

    def add(
        self, codec: Codec, inputs: Sequence[int], outputs: Sequence[int], nbytes: int, draw: Draw
    ) -> kernels.Report: ...

    def decode(self, coding: Coding, source: int, outputs: Sequence[int], divisor: int, given: int) -> None: ...

    def add_up(self, coding: Coding, sources: Sequence[int], outputs: Sequence[int], divisor: int) -> None: ...

    def encode_change(self, coding: Coding, source: int, results: Sequence[int], output: int) -> None: ...

    def decode_change(self, coding: Coding, source: int, results: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Sizes in bytes at which a service does something in another way, and one time in seconds.

    Attributes:
        inline_sum: a kernel of a communication service that reads and writes fewer bytes runs on the loop's thread,
            since a round trip through the thread pool costs 50 to 100 µs. Measured: summing 256 KB over 2 ranks takes
            90 µs on the loop's thread, and 150 to 190 µs through the thread pool.
        last_inline_sum: the same limit for the last piece of a tensor of one machine, for which the loop would only
            wait (1 MB: 115 µs, was 200). It allows 1 MB of 4 ranks.
        inline_delivery: the same limit for what brings an answer to the ranks. A wake-up finds cold caches, and the
            thread pool's and the one after it cost as much processor time as copying 1 MB.
        past_caches: answers for a tensor of this size and more go past the caches, which don't hold its result any
            more when the next one comes.
        inline_copy: a copy of fewer bytes runs on the loop's thread.
        inline_server_sum: a server sums up to this size itself, in less time than handing it to another thread takes.
        local_sum_piece: where nothing is sent to another machine, a tensor is cut into pieces of this size, only so
            that several threads can sum it.
        local_copy_piece: the same for copies.
        joint_copy: pieces up to this size are copied together, once all are there.
        copied_answer: a piece of fewer bytes is copied into its message; a larger one is sent from its place in memory.
        chunk: see chunks.py. Ranks use the same size.
        sent_check_s: how soon to check again whether ZeroMQ has sent a frame. Sending takes so little time that
            checking sooner would not help.
    """

    inline_sum: int = 1 << 20
    last_inline_sum: int = 8 << 20
    inline_delivery: int = 2 << 20
    past_caches: int = 8 << 20
    inline_copy: int = 256 << 10
    inline_server_sum: int = 64 << 10
    local_sum_piece: int = 1 << 20
    local_copy_piece: int = 1 << 20
    joint_copy: int = 256 << 10
    copied_answer: int = 256 << 10
    chunk: int = CHUNK_BYTES
    sent_check_s: float = 0.001


def new_buffer(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory of this process. A page uses none until it is written."""
    return np.empty(nbytes, np.uint8)


def has_ended(pidfd: int) -> bool:
    """True if the process of ``pidfd`` has ended."""
    return bool(select.select([pidfd], [], [], 0)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The event loop, which is also the clock (``loop.time()``), and the classes and functions that a service uses."""

    loop: EventLoop = field(default_factory=EventLoop)
    thread_pool: type[ThreadPool] = ThreadPool
    kernels: Kernels = kernels
    codecs: Codecs = codecs
    zmq_context: type[zmq.Context[zmq.Socket[bytes]]] = zmq.Context
    dialer: type[Dialer] = Dialer
    data_listener: type[DataListener] = DataListener
    rdma_lane: Callable[[Settings, EventLoop], RdmaLane | None] = open_rdma_lane
    relay: Callable[[Settings], Relay | None] = open_relay
    local_listener: type[channel.Listener] = channel.Listener
    connect_local: Callable[[str, float], channel.Channel] = channel.connect
    arena: type[Arena] = Arena
    segment: type[Segment] = Segment
    move: Callable[[int, int, int], object] = ctypes.memmove  # (target, source, bytes)
    new_buffer: Callable[[int], npt.NDArray[np.uint8]] = new_buffer  # of so many bytes
    available_memory: Callable[[], float] = available_memory_bytes
    link_rate_meter: Callable[[Settings, EventLoop], LinkRateMeter | None] = open_link_rate_meter
    getpid: Callable[[], int] = os.getpid
    open_pidfd: Callable[[int], int] = os.pidfd_open
    has_ended: Callable[[int], bool] = has_ended
    close_fd: Callable[[int], None] = os.close
    thresholds: Thresholds = Thresholds()
