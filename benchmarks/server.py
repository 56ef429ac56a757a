"""A summation server under two workers over loopback TCP, beside a bare pyzmq echo of the same traffic.

    python benchmarks/server.py [--runs 5] [--gigabytes 2] [--in-flight 8] [--untuned]

Two client processes push float32 partitions and wait for their sums, several in flight. The echo sends every message
straight back: what the sockets alone would allow. Both servers stay up; runs alternate between them. Printed: goodput
in each direction per worker, and CPU seconds and page faults of the server per GB that it received.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from byteps_py.loop import EventLoop
from byteps_py.malloc import keep_freed_memory
from byteps_py.proto import control_pb2 as pb
from byteps_py.settings import Settings
from byteps_py.tensors import DType, Op
from byteps_py.wire import Header, Kind

WORKERS = 2
SETTINGS = Settings(scheduler_host="127.0.0.1", scheduler_port=1, job_id="benchmark", num_workers=WORKERS)


# ---- the two servers: each prints its address, and ends when its standard input does -----------------------------


class FixedMembership:
    """Stands where the scheduler's link would: the members are there from the start."""

    def __init__(self, loop: EventLoop, on_message: Callable[[pb.SchedulerMessage], None]) -> None:
        members = [pb.Member(machine_index=i) for i in range(WORKERS)]
        membership = pb.Membership(epoch=1, workers=members, partition_bytes=SETTINGS.partition_bytes)
        loop.post(lambda: on_message(pb.SchedulerMessage(membership=membership)))

    def send(self, message: pb.MemberMessage) -> None: ...

    def close(self, reason: str) -> None: ...


def serve_sums() -> None:
    from byteps_py.server.service import Service

    service = Service(
        SETTINGS,
        pb.MACHINE_KIND_CPU,
        lambda settings, register, loop, on_message, on_lost, heartbeat: FixedMembership(loop, on_message),
    )
    print(service.address, flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), service.stop("done")), daemon=True).start()
    service.run()


def serve_echo() -> None:
    context = zmq.Context(io_threads=2)
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    print(f"tcp://127.0.0.1:{port}", flush=True)
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if sys.stdin.fileno() in ready:
            break
        frames = router.recv_multipart(copy=False)
        if len(frames[2]):  # not a HELLO
            router.send_multipart(frames, copy=False)
    router.close()
    context.term()


# ---- a worker: says ready, runs when told, prints the seconds it took ---------------------------------------------


def work(address: str, index: int, nbytes: int, in_flight: int, count: int) -> None:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(address)
    dealer.send_multipart([Header(Kind.HELLO, index).pack(), b""])
    buffers = [memoryview(bytearray(os.urandom(16) * (nbytes // 16))) for _ in range(in_flight)]
    rounds = [0] * in_flight
    base = int(sys.argv[-1])  # rounds of earlier runs on the same server

    def push(slot: int) -> None:
        rounds[slot] += 1
        header = Header(
            Kind.PUSH, index, 1, DType.FLOAT32, Op.SUM, key=slot, generation=1, round=base + rounds[slot], length=nbytes
        )
        dealer.send(header.pack(), zmq.SNDMORE)
        dealer.send(buffers[slot], copy=False)

    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    for slot in range(in_flight):
        push(slot)
    for done in range(1, count + 1):
        if not dealer.poll(30_000):
            sys.exit("no answer for 30 s")
        header, payload = dealer.recv_multipart(copy=False)
        if len(payload) != nbytes:
            sys.exit(f"{len(payload)} bytes came: {payload.bytes[:200]!r}")
        if done + in_flight <= count:
            push(Header.unpack(header.buffer).key)
    print(time.monotonic() - began, flush=True)
    dealer.close()
    context.term()


# ---- the comparison -----------------------------------------------------------------------------------------------


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        sys.exit("a process of the benchmark has failed")
    return line


def used(pid: int) -> tuple[float, int]:
    """(CPU seconds, page faults) of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(fields[7])


def measure(server: subprocess.Popen[str], address: str, options: argparse.Namespace, run: int) -> tuple[float, ...]:
    """(Gbit/s each way per worker, CPU seconds per GB received, page faults per GB)."""
    count = int(options.gigabytes * 1e9 / WORKERS / options.partition_bytes)
    base = run * (count + 1)
    shape = (options.partition_bytes, options.in_flight, count)
    workers = [start("--work", address, i, *shape, base) for i in range(WORKERS)]
    for worker in workers:
        line_of(worker)
    cpu_before, faults_before = used(server.pid)
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    elapsed = max(float(line_of(worker)) for worker in workers)
    cpu, faults = used(server.pid)
    for worker in workers:
        worker.communicate()
    gigabytes = WORKERS * count * options.partition_bytes / 1e9
    rate = gigabytes / WORKERS * 8 / elapsed
    return rate, (cpu - cpu_before) / gigabytes, (faults - faults_before) / gigabytes


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        address, *numbers = sys.argv[2:]
        index, nbytes, in_flight, count, _ = map(int, numbers)
        return work(address, index, nbytes, in_flight, count)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="pushed in each run, by both workers together")
    parser.add_argument("--partition-bytes", type=int, default=SETTINGS.partition_bytes)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--untuned", action="store_true", help="leave the servers' allocator as it is")
    parser.add_argument("--serve", choices=("sums", "echo"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        if not options.untuned:
            keep_freed_memory(1 << 30)
        return serve_sums() if options.serve == "sums" else serve_echo()
    untuned = ["--untuned"] if options.untuned else []
    servers = {kind: start("--serve", kind, *untuned) for kind in ("echo", "sums")}
    addresses = {kind: line_of(server) for kind, server in servers.items()}
    found: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in servers}
    for run in range(options.runs + 1):
        for kind, server in servers.items():
            result = measure(server, addresses[kind], options, run)
            if run:  # the first warms up
                found[kind].append(result)
    for server in servers.values():
        server.communicate()
    print(f"{WORKERS} workers, {options.partition_bytes} bytes, {options.in_flight} in flight, median (min to max)")
    for kind, results in found.items():
        columns = [
            f"{statistics.median(c):8.{d}f} ({min(c):.{d}f} to {max(c):.{d}f}) {unit}"
            for c, d, unit in zip(
                zip(*results, strict=True), (2, 3, 0), ("Gbit/s", "CPU s/GB", "faults/GB"), strict=True
            )
        ]
        print(f"{kind:5}", *columns, sep="  ")
    ratios = [s[0] / e[0] for s, e in zip(found["sums"], found["echo"], strict=True)]
    print(f"sums / echo, run by run: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return None


if __name__ == "__main__":
    main()
