"""The lane by RDMA beside the one over TCP: partitions that a server answers with what it got, over loopback.

    python -m benchmarks.rdma_lane [--mbytes 4] [--messages 200] [--window 4]

Two processes: a machine pushes partitions, ``window`` at a time, and the server's answer is the message that has
arrived, as after a sum in place. Without a card, NIXL moves the bytes by UCX over TCP or between the processes' memory
(``sm``): this shows what the lane itself costs, and nothing of a card.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import zmq

from byteps_py.config.settings import Settings
from byteps_py.dataplane.nixl_agent import open_rdma_lane
from byteps_py.dataplane.traffic import Traffic
from byteps_py.runtime import Runtime
from byteps_py.server.contribution_listeners import ContributionListener
from byteps_py.server.reducer import Arrival
from byteps_py.system.loop import EventLoop
from byteps_py.system.rdma_devices import library
from byteps_py.system.shm import Arena, Block
from byteps_py.tensors import DType
from byteps_py.wire.data_link import Header, Kind
from byteps_py.worker.io.railed_link import RailedLink
from byteps_py.worker.io.server_links import LinkEvents, LinkOrigin, LinkTarget

WAYS = {"TCP": "", "RDMA, NIXL over TCP": "tcp", "RDMA, NIXL over shared memory": "tcp,sm"}


def _settings(transports: str, secret: str) -> Settings:
    base = Settings(
        scheduler_host="127.0.0.1", scheduler_port=9999, node_host="127.0.0.1", job_id="bench", secret=secret
    )
    return dataclasses.replace(base, enable_rdma="1", rdma_transports=transports) if transports else base


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(transports: str, secret: str, pipe: Connection) -> None:
    """Answer until the parent says that it is enough; then tell it the processor time."""
    settings, loop = _settings(transports, secret), EventLoop()

    def answer(arrival: Arrival) -> None:
        assert arrival.payload is not None
        arrival.origin.answer(arrival.header, arrival.payload.message())

    listener = ContributionListener(
        "127.0.0.1", settings, Traffic(), answer, lambda peer: None, lambda header: None, lambda *message: None
    )
    lane = open_rdma_lane(settings, loop)
    if lane is not None:
        listener.use_rdma(lane)
    listener.attach(loop)

    def said() -> None:
        if pipe.recv() == "end":
            loop.stop()
        else:
            pipe.send(_cpu_s())

    loop.add_reader(pipe.fileno(), said)
    pipe.send(listener.address)
    loop.run()
    listener.detach(loop)
    listener.close()
    if lane is not None:
        lane.close()


def measure(transports: str, secret: str, nbytes: int, messages: int, window: int) -> tuple[float, float]:
    """(GB/s in each direction, processor seconds of both processes for a GB that was pushed and answered)"""
    pipe, other = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(transports, secret, other))
    process.start()
    settings, loop, arena = _settings(transports, secret), EventLoop(), Arena()
    lane = open_rdma_lane(settings, loop)
    if lane is not None:
        lane.watch(arena)
    blocks = [arena.allocate(nbytes) for _ in range(window)]
    came: list[int] = []

    def view(block: Block, offset: int, length: int) -> memoryview:
        start = block.offset + offset
        return arena.segments[block.segment].view[start : start + length]

    def until(is_so: Callable[[], bool]) -> None:
        while not is_so():
            loop.run_once(loop.time() + 1)

    def push(number: int) -> None:
        block = blocks[number % window]
        link.push(Header(Kind.PUSH, 0, dtype=DType.UINT8, round=number, length=nbytes), block, 0, None)

    def answered(header: Header, frame: zmq.Frame | None) -> None:
        came.append(header.round)
        if (number := header.round + window) < limit:
            push(number)

    context = zmq.Context()
    link = RailedLink(
        LinkOrigin(context, Runtime(loop=loop), 0, settings, view, lane),
        LinkTarget(pipe.recv()),
        LinkEvents(answered, lambda: None, print),
    )
    until(lambda: link.is_open)
    for limit in (4 * window, messages):  # the first ones make memory and connections ready
        came.clear()
        pipe.send("cpu")
        theirs, mine, began = pipe.recv(), _cpu_s(), time.perf_counter()
        for number in range(window):
            push(number)
        until(lambda: len(came) == limit)  # noqa: B023
        took_s = time.perf_counter() - began
        pipe.send("cpu")
        used_s = pipe.recv() - theirs + _cpu_s() - mine
    pipe.send("end")
    process.join()
    link.close()
    if lane is not None:
        lane.close()
    loop.close()
    context.term()
    arena.close()
    moved = messages * nbytes / 1e9
    return moved / took_s, used_s / moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbytes", type=float, default=4, help="of a partition")
    parser.add_argument("--messages", type=int, default=200)
    parser.add_argument("--window", type=int, default=4, help="partitions in flight")
    given = parser.parse_args()
    ways = {name: transports for name, transports in WAYS.items() if library() or not transports}
    for what, secret in (("open", ""), ("signed", "a secret of a benchmark")):
        for name, transports in ways.items():
            rate, cpu_s = measure(transports, secret, int(given.mbytes * 2**20), given.messages, given.window)
            print(f"{name}, {what}: {rate:.2f} GB/s each way, {cpu_s:.2f} s of processor time a GB", flush=True)


if __name__ == "__main__":
    main()
