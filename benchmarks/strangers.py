"""What a summation server's workers lose while strangers knock at its port, with noise or greetings that lead nowhere.

    python benchmarks/strangers.py [--rate 100] [--runs 5] [--gigabytes 2] [--json FILE]

The peer is the same server in peace: runs take turns, see benchmarks/server.py for what one is. A stranger connects,
says something of each kind in turn, and keeps the connection until the server ends it. Printed: goodput, CPU seconds of
the server per GB, how long the connections of strangers lasted, and what they cost the server in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import server as benchmark

#: Nothing; noise; a greeting of ZeroMQ's and no more; one that claims a message of 2^60 bytes.
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
WORDS = (b"", os.urandom(4096), _GREETING[:64], _GREETING[:64] + b"\x02" + (1 << 60).to_bytes(8, "big"))


def knock(address: str, rate: float) -> None:
    """Until the standard input ends. Prints how many came, and the longest and the median life of those that ended."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    words = itertools.cycle(WORDS)
    lives: list[float] = []
    waiting: dict[int, tuple[socket.socket, float]] = {}
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    print("ready", flush=True)
    sys.stdin.readline()
    came, began = 0, time.monotonic()
    is_over = False
    while not is_over:
        now = time.monotonic()
        while came < rate * (now - began):
            stranger = socket.create_connection((host, int(port)))
            with contextlib.suppress(OSError):
                stranger.sendall(next(words))
            stranger.setblocking(False)
            waiting[stranger.fileno()] = stranger, time.monotonic()
            poll.register(stranger, select.POLLIN)
            came += 1
        for fd, _ in poll.poll(1000 / rate):
            if fd == sys.stdin.fileno():
                is_over = True
                continue
            stranger, since = waiting[fd]
            with contextlib.suppress(BlockingIOError):
                try:
                    if stranger.recv(4096):
                        continue
                except ConnectionError:
                    pass
                poll.unregister(fd)
                lives.append(time.monotonic() - since)
                stranger.close()
                del waiting[fd]
    print(came, max(lives, default=0.0), statistics.median(lives) if lives else 0.0, flush=True)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def main() -> None:
    if sys.argv[1:2] == ["--knock"]:
        knock(sys.argv[2], float(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=100.0, help="strangers per second")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.workers, options.in_flight = 2, 8
    options.partition_bytes = benchmark.settings(2).max_partition_bytes
    server = benchmark.start("--serve", "sums", "--workers", 2)
    address = benchmark.line_of(server)
    found: dict[str, list[list[float]]] = {"peace": [], "strangers": []}
    lives: list[list[float]] = []
    benchmark.measure(server, address, options, 0, True)  # warms up
    for run in range(options.runs):
        found["peace"].append(benchmark.measure(server, address, options, 2 * run + 1, True))
        before = resident_bytes(server.pid)
        command = [sys.executable, __file__, "--knock", address, str(options.rate)]
        strangers = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        benchmark.line_of(strangers)
        assert strangers.stdin is not None
        strangers.stdin.write("go\n")
        strangers.stdin.flush()
        found["strangers"].append(benchmark.measure(server, address, options, 2 * run + 2, True))
        more = resident_bytes(server.pid) - before
        text = strangers.communicate("\n")[0]
        lives.append([*map(float, text.split()), more])
    server.communicate()
    for kind, results in found.items():
        rates, costs, *_ = zip(*results, strict=True)
        print(
            f"{kind:10} {benchmark.spread(rates, 2)} Gbit/s each way per worker {benchmark.spread(costs, 2)} CPU s/GB"
        )
    ratios = [theirs[0] / ours[0] for theirs, ours in zip(found["strangers"], found["peace"], strict=True)]
    print(f"goodput beside {options.rate:g} strangers a second over that in peace: {benchmark.spread(ratios, 2)}")
    came, longest, median, more = zip(*lives, strict=True)
    each = max(more) / max(came)
    print(
        f"{sum(came):.0f} strangers; those that the server has ended lasted {statistics.median(median):.1f} s, at most "
        f"{max(longest):.1f} s; its memory grew by at most {each / 1024:.0f} KB for each"
    )
    if options.json:
        options.json.write_text(json.dumps({**found, "strangers_seen": lives}, indent=1))


if __name__ == "__main__":
    main()
