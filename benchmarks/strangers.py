"""What a summation server's workers lose while strangers knock at its port, with noise or greetings that lead nowhere.

    python benchmarks/strangers.py [--rate 100] [--runs 5] [--gigabytes 2] [--json FILE]

The peer is the same server in peace: runs take turns, see benchmarks/server.py for what one is. Strangers are those of
the tests (tests/support/strangers.py), each kind in turn, and stay until the server ends their connection. Printed:
goodput, CPU seconds of the server per GB, how long the connections of strangers lasted, how many were ended before they
had been let in and said all they wanted, and what they cost the server in memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import select
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.strangers import HALF_OPEN, ZMTP, Visit, begin_visit, resident_bytes, see_off

import server as benchmark

KINDS = [each for each in HALF_OPEN if each.after in ((), ZMTP)]


def knock(address: str, rate: float) -> None:
    """Until the standard input ends; then wait until all have been sent away. Prints how many came, the longest and
    the median life, and how many were ended too early."""
    kinds = itertools.cycle(KINDS)
    came: list[Visit] = []
    waiting: dict[int, Visit] = {}
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    is_over = False
    while not is_over:
        now = time.monotonic()
        while len(came) < rate * (now - began):
            stranger = begin_visit(address, next(kinds), ZMTP)
            came.append(stranger)
            waiting[stranger.sock.fileno()] = stranger
            poll.register(stranger.sock, select.POLLIN)
        for fd, _ in poll.poll(1000 / rate):
            if fd == sys.stdin.fileno():
                is_over = True
                continue
            stranger = waiting[fd]
            stranger.read()
            if stranger.ended_s is not None:
                poll.unregister(fd)
                stranger.close()
                del waiting[fd]
    see_off(waiting.values())
    lives = [stranger.lasted_s for stranger in came] or [0.0]
    cut_short = sum(not stranger.is_through for stranger in came)
    print(len(came), max(lives), statistics.median(lives), cut_short, flush=True)


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
    came, longest, median, cut_short, more = zip(*lives, strict=True)
    each = max(more) / max(came)
    print(
        f"{sum(came):.0f} strangers; they lasted {statistics.median(median):.1f} s, at most "
        f"{max(longest):.1f} s, {sum(cut_short):.0f} of them too early; its memory grew by at most "
        f"{each / 1024:.0f} KB for each"
    )
    if options.json:
        options.json.write_text(json.dumps({**found, "strangers_seen": lives}, indent=1))


if __name__ == "__main__":
    main()
