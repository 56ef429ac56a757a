"""What a simulated process is given for its operating system, its machine and its network."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from byteps_py.runtime import Runtime, Thresholds

from .codecs import Codecs
from .ledger import Ledger
from .local import Listener, Local
from .memory import Kernels, Memory, ThreadPool
from .network import Network
from .peers import PeerDialer, PeerListener
from .program import PARTITION_BYTES
from .tables import slowness
from .world import Process, World


@dataclass(frozen=True, kw_only=True)
class SimulatedRuntime(Runtime):
    """Of ``process``."""

    process: Process
    network: Network
    ledger: Ledger


class Runtimes:
    """Those of a world. Half of all kernels are small enough for the loop's thread, half are not."""

    def __init__(self, world: World, memory: Memory, local: Local, network: Network, ledger: Ledger) -> None:
        self._world = world
        self._memory = memory
        self._local = local
        self._network = network
        self._ledger = ledger
        small = PARTITION_BYTES * world.random.choice((0, 1, 2, 100))
        chunk = world.random.choice((8, 32, 64))
        self.thresholds = Thresholds(
            inline_sum=small,
            last_inline_sum=small,
            inline_delivery=small,
            past_caches=0,
            inline_copy=small,
            inline_server_sum=small,
            local_sum_piece=PARTITION_BYTES,
            local_copy_piece=PARTITION_BYTES // 2,
            joint_copy=small // 4,
            copied_answer=world.random.choice((1, 20, 1000)),
            chunk=chunk,
            sent_check_s=0.01,
        )

    def of_communication_service(self, process: Process) -> SimulatedRuntime:
        thread_pool = functools.partial(_thread_pool, self._world, self._memory, process)
        return self._of(process, thread_pool=thread_pool, kernels=Kernels(self._memory), codecs=Codecs(self._memory))

    def of_summation_service(self, process: Process) -> SimulatedRuntime:
        more = {"is_lenient": True, "slowness": slowness(self._world.seed)}
        thread_pool = functools.partial(_thread_pool, self._world, self._memory, process, **more)
        kernels, codecs = Kernels(self._memory, is_lenient=True), Codecs(self._memory, is_lenient=True)
        return self._of(process, thread_pool=thread_pool, kernels=kernels, codecs=codecs)

    def _of(self, process: Process, **fields: Any) -> SimulatedRuntime:
        world, memory, local, network = self._world, self._memory, self._local, self._network

        def listen(host: str, settings: object, traffic: object, *given: Any) -> PeerListener:
            return PeerListener(network, process, *given)

        return SimulatedRuntime(
            process=process,
            network=network,
            ledger=self._ledger,
            loop=local.new_loop(process),
            zmq_context=lambda: SimpleNamespace(term=lambda: None),
            dialer=functools.partial(PeerDialer, network),
            data_listener=listen,
            relay=lambda settings: None,
            local_listener=functools.partial(Listener, world, local, process),
            connect_local=lambda name, timeout_s: local.connect(name, process),
            arena=memory.new_arena,
            segment=memory.map_segment,
            move=memory.move,
            new_buffer=memory.new_buffer,
            available_memory=lambda: memory.available_bytes,
            link_rate_meter=lambda *_: None,
            getpid=lambda: process.pid,
            open_pidfd=lambda pid: local.open_pidfd(pid, process),
            has_ended=lambda pidfd: local.sources[pidfd].is_readable,
            close_fd=lambda fd: None,
            thresholds=self.thresholds,
            **fields,
        )


def _thread_pool(world: World, memory: Memory, process: Process, threads: int, name: str, **more: Any) -> ThreadPool:
    return ThreadPool(world, memory, process, **more)
