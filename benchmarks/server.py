"""A summation server under its workers over loopback TCP, beside a bare pyzmq echo of the same traffic and gloo.

    python benchmarks/server.py [--workers 2] [--runs 5] [--gigabytes 2] [--in-flight 8] [--untuned] [--json FILE]

Client processes push float32 partitions and wait for their sums, several in flight. The echo sends every message
straight back: what the sockets alone would allow. BYTEPS_SECRET and BYTEPS_ENCRYPT=1 protect the sums' messages. Both
servers stay up; runs alternate between them, and with all-reduces by gloo between as many processes, of as many bytes,
as many in flight and one at a time (with two processes each sends and receives what a worker does; with n of them
2(n−1)/n times as much, which is counted). Printed: goodput in each direction per worker; CPU seconds, page faults and
context switches of the server per GB that it received (4 MB partitions: 238 of them); of gloo CPU seconds of all
processes per GB that all receive; and what the server used while idle for a second.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from byteps_py.config.settings import Settings
from byteps_py.dataplane.authenticator import show_password
from byteps_py.dataplane.handshake import CallerHandshake
from byteps_py.dataplane.seal import Seal
from byteps_py.proto import control_pb2 as pb
from byteps_py.system.loop import EventLoop
from byteps_py.system.process_memory import keep_freed_memory
from byteps_py.tensors import DType, Op
from byteps_py.wire.data_link import Header, Kind

IDLE_S = 1.0


def settings(workers: int) -> Settings:
    secret, encrypt = os.environ.get("BYTEPS_SECRET", ""), os.environ.get("BYTEPS_ENCRYPT") == "1"
    return Settings(
        scheduler_host="127.0.0.1", scheduler_port=1, job_id="benchmark", num_workers=workers, secret=secret,
        encrypt=encrypt,
    )  # fmt: skip


# ---- the two servers: each prints its address, and ends when its standard input does -----------------------------


class FixedMembership:
    """Stands where the scheduler's link would: the members are there from the start."""

    def __init__(self, workers: int, loop: EventLoop, on_message: Callable[[pb.SchedulerMessage], None]) -> None:
        members = [pb.Member(machine_index=i) for i in range(workers)]
        membership = pb.Membership(epoch=1, workers=members, partition_bytes=settings(workers).max_partition_bytes)
        loop.post(lambda: on_message(pb.SchedulerMessage(membership=membership)))

    def send(self, message: pb.MemberMessage) -> None: ...

    def close(self, reason: str) -> None: ...


def serve_sums(workers: int) -> None:
    from byteps_py.runtime import Runtime
    from byteps_py.server.service import SummationService

    service = SummationService(
        settings(workers),
        pb.MACHINE_KIND_CPU,
        lambda settings, register, loop, events: FixedMembership(workers, loop, events.on_message),
        Runtime(),
    )
    print(service.address, flush=True)

    def stop_with_input() -> None:
        sys.stdin.read()
        service.stop("done")
        service.stop("done")  # at once: nobody is there who could take over its keys

    threading.Thread(target=stop_with_input, daemon=True).start()
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
        router.send_multipart(frames, copy=False)
    router.close()
    context.term()


# ---- a worker: says ready, runs when told, prints the seconds it took ---------------------------------------------


def shake_hands(dealer: zmq.Socket[bytes], address: str, index: int) -> tuple[Seal, Seal]:
    caller = CallerHandshake(settings(index + 1), index, address)
    dealer.send_multipart([Header(Kind.HELLO, index).pack(), caller.hello])
    proof, out, back = caller.answer(dealer.recv_multipart()[1])
    dealer.send_multipart([Header(Kind.PROOF, index).pack(), proof])
    header, payload = dealer.recv_multipart(copy=False)
    back.open(header.bytes, payload)  # WELCOME
    return out, back


def work(address: str, index: int, nbytes: int, in_flight: int, count: int, is_sums: bool) -> None:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    if is_sums:
        show_password(dealer, settings(index + 1), address)
    dealer.connect(address)
    out, back = shake_hands(dealer, address, index) if is_sums else (None, None)
    buffers = [memoryview(bytearray(os.urandom(16) * (nbytes // 16))) for _ in range(in_flight)]
    rounds = [0] * in_flight
    base = int(sys.argv[-1])  # rounds of earlier runs on the same server

    def push(slot: int) -> None:
        rounds[slot] += 1
        header = Header(
            Kind.PUSH, index, 1, DType.FLOAT32, Op.SUM, key=slot, generation=1, round=base + rounds[slot], length=nbytes
        )
        sealed, shown = out.seal(header.pack(), buffers[slot]) if out else (header.pack(), buffers[slot])
        dealer.send(sealed, zmq.SNDMORE)
        dealer.send(shown, copy=False)

    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    for slot in range(in_flight):
        push(slot)
    done = 0
    while done < count:
        if not dealer.poll(30_000):
            sys.exit("no answer for 30 s")
        sealed, payload = dealer.recv_multipart(copy=False)
        packed = sealed.bytes
        if back:
            packed, payload = back.open(packed, payload)
        header = Header.unpack(packed)
        if header.kind == Kind.AWAITED:  # others wait for what this one pushes as soon as it can
            continue
        if len(payload) != nbytes:
            sys.exit(f"{len(payload)} bytes came: {payload.bytes[:200]!r}")
        done += 1
        if done + in_flight <= count:
            push(header.key)
    print(time.monotonic() - began, flush=True)
    dealer.close()
    context.term()


def reduce_with_gloo(index: int, workers: int, nbytes: int, in_flight: int, count: int, port: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=index, world_size=workers)
    tensors = [torch.ones(nbytes // 4) for _ in range(in_flight)]
    for tensor in tensors:
        dist.all_reduce(tensor)
    print("ready", flush=True)
    sys.stdin.readline()
    began, cpu_s = time.monotonic(), time.process_time()
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for number in range(in_flight, count):
        works[number % in_flight].wait()
        works[number % in_flight] = dist.all_reduce(tensors[number % in_flight], async_op=True)
    for work in works:
        work.wait()
    print(time.monotonic() - began, time.process_time() - cpu_s, flush=True)
    dist.destroy_process_group()


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


def used(pid: int) -> tuple[float, int, int]:
    """(CPU seconds, page faults, context switches) of a process so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    switches = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        switches += sum(int(line.split()[1]) for line in status.read_text().splitlines() if "ctxt_switches" in line)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(fields[7]), switches


def race(processes: list[subprocess.Popen[str]]) -> list[list[float]]:
    """What each of them says at its end, once all are ready: the seconds it took come first."""
    for process in processes:
        line_of(process)
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [[float(word) for word in line_of(process).split()] for process in processes]
    for process in processes:
        process.communicate()
    return said


def measure(
    server: subprocess.Popen[str], address: str, options: argparse.Namespace, run: int, is_sums: bool
) -> list[float]:
    """Gbit/s each way per worker; per GB received: CPU seconds, page faults, context switches."""
    count = int(options.gigabytes * 1e9 / options.workers / options.partition_bytes)
    base = run * (count + 1)
    shape = (options.partition_bytes, options.in_flight, count, int(is_sums))
    before = used(server.pid)
    said = race([start("--work", address, i, *shape, base) for i in range(options.workers)])
    elapsed = max(seconds for (seconds,) in said)
    gigabytes = options.workers * count * options.partition_bytes / 1e9
    rate = gigabytes / options.workers * 8 / elapsed
    return [rate, *((now - then) / gigabytes for now, then in zip(used(server.pid), before, strict=True))]


def measure_gloo(options: argparse.Namespace, in_flight: int) -> list[float]:
    """Gbit/s each way per process; CPU seconds of all of them per GB that all receive."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    n = options.workers
    count = int(options.gigabytes * 1e9 / n / options.partition_bytes)
    said = race([start("--gloo", i, n, options.partition_bytes, in_flight, count, port) for i in range(n)])
    gigabytes = 2 * (n - 1) / n * count * options.partition_bytes / 1e9  # of each
    elapsed, cpu_s = max(row[0] for row in said), sum(row[1] for row in said)
    return [gigabytes * 8 / elapsed, cpu_s / (n * gigabytes)]


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        address, *numbers = sys.argv[2:]
        index, nbytes, in_flight, count, is_sums, _ = map(int, numbers)
        return work(address, index, nbytes, in_flight, count, bool(is_sums))
    if sys.argv[1:2] == ["--gloo"]:
        return reduce_with_gloo(*map(int, sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="pushed in each run, by all workers together")
    parser.add_argument("--partition-bytes", type=int, default=settings(2).max_partition_bytes)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--untuned", action="store_true", help="leave the servers' allocator as it is")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=("sums", "echo"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        if not options.untuned:
            keep_freed_memory(1 << 30)
        return serve_sums(options.workers) if options.serve == "sums" else serve_echo()
    return compare(options)


def compare(options: argparse.Namespace) -> None:
    untuned = ["--untuned"] if options.untuned else []
    servers = {kind: start("--serve", kind, "--workers", options.workers, *untuned) for kind in ("echo", "sums")}
    addresses = {kind: line_of(server) for kind, server in servers.items()}
    found: dict[str, list[list[float]]] = {kind: [] for kind in servers}
    ways = {"gloo": options.in_flight, "gloo, one at a time": 1}
    gloo: dict[str, list[list[float]]] = {way: [] for way in ways}
    for run in range(options.runs + 1):
        for kind, server in servers.items():
            result = measure(server, addresses[kind], options, run, kind == "sums")
            if run:  # the first warms up
                found[kind].append(result)
        for way, in_flight in ways.items() if run else ():
            gloo[way].append(measure_gloo(options, in_flight))
    before = used(servers["sums"].pid)
    time.sleep(IDLE_S)
    idle_s = used(servers["sums"].pid)[0] - before[0]
    for server in servers.values():
        server.communicate()
    sizes = f"{options.partition_bytes} bytes, {options.in_flight} in flight"
    print(f"{options.workers} workers, {sizes}; median (min to max)")
    for kind, results in found.items():
        columns = zip(
            zip(*results, strict=True), (2, 3, 0, 0), ("Gbit/s", "CPU s/GB", "faults/GB", "switches/GB"), strict=True
        )
        print(f"{kind:5}", *(spread(c, d) + f" {unit}" for c, d, unit in columns), sep="  ")
    for way, results in gloo.items():
        rates, cpu = zip(*results, strict=True)
        print(f"{way}  {spread(rates, 2)} Gbit/s  {spread(cpu, 3)} CPU s/GB")
    for kind, others in {"echo": found["echo"], **gloo}.items():
        ratios = [ours[0] / theirs[0] for ours, theirs in zip(found["sums"], others, strict=True)]
        print(f"sums / {kind}, run by run: {spread(ratios, 2)}")
    print(f"idle for {IDLE_S:g} s: {idle_s:.2f} CPU s")
    if options.json:
        options.json.write_text(json.dumps({**found, **gloo, "idle_cpu_s": idle_s}, indent=1))


def spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):8.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
