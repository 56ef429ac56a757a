"""What the smallest reduction can't do without: messages over Unix sockets between processes that sleep meanwhile.

    python benchmarks/wakeups.py [--rounds 5] [--json FILE]

Processes that do nothing but answer: two in C, two in Python, and three in Python in the shape of a reduction (a hub
answers both others once it has heard from both). Where the system puts a process that it wakes matters most: on the
core of the one that sent, a round trip costs the two wake-ups' own work; on a core that sleeps, in a virtual machine,
several times that. Two ranks on two cores have one such crossing at least.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

ROUNDS = 5000
_MESSAGE = b"x" * 17  # as long as a READY or DONE of this project
_C = """
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
static double now() { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
static int order(const void *a, const void *b) { double d = *(double *)a - *(double *)b; return d > 0 ? 1 : -(d < 0); }
int main(void) {
  static double took[ROUNDS]; char text[64]; int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends)) return 1;
  if (!fork()) { close(ends[0]); while (recv(ends[1], text, 64, 0) > 0) send(ends[1], text, 17, 0); _exit(0); }
  close(ends[1]);
  for (int i = 0; i < ROUNDS; i++) {
    double began = now(); send(ends[0], text, 17, 0); recv(ends[0], text, 64, 0); took[i] = now() - began;
  }
  qsort(took, ROUNDS, sizeof *took, order); printf("%.9f\\n", took[ROUNDS / 2]); return 0;
}
"""


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _fork(work: Iterable[None], *mine: socket.socket) -> int:
    """A process that runs ``work`` to its end; ``mine`` are closed here, so that it sees the end of the others."""
    pid = os.fork()
    if not pid:
        for _ in work:
            pass
        os._exit(0)
    for end in mine:
        end.close()
    return pid


def _answer(ends: list[socket.socket], others: list[socket.socket]) -> Iterable[None]:
    """Hear from each, answer all, until the first hangs up."""
    for end in others:
        end.close()
    while all(end.recv(64) for end in ends):
        for end in ends:
            end.send(_MESSAGE)
        yield


def _ask(end: socket.socket, others: list[socket.socket]) -> Iterable[None]:
    for other in others:
        other.close()
    for _ in range(ROUNDS):
        end.send(_MESSAGE)
        end.recv(64)
        yield


def _median_s(end: socket.socket) -> float:
    took = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        end.send(_MESSAGE)
        end.recv(64)
        took.append(time.perf_counter() - began)
    end.close()
    return statistics.median(took)


def in_c() -> float | None:
    """None without a C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "wakeups"
        options = ["-O2", f"-DROUNDS={ROUNDS}", "-x", "c", "-o", str(program), "-"]
        subprocess.run([compiler, *options], input=_C, text=True, check=True)
        return float(subprocess.run([program], capture_output=True, text=True, check=True).stdout)


def in_python() -> float:
    near, far = _pair()
    pid = _fork(_answer([far], [near]), far)
    median_s = _median_s(near)
    os.waitpid(pid, 0)
    return median_s


def in_a_star() -> float:
    first, first_far = _pair()
    second, second_far = _pair()
    hub = _fork(_answer([first_far, second_far], [first, second]), first_far, second_far)
    other = _fork(_ask(second, [first]), second)
    median_s = _median_s(first)
    os.waitpid(other, 0)
    os.waitpid(hub, 0)
    return median_s


def floors() -> dict[str, float]:
    """Seconds of a round trip, by what makes it."""
    measured = {
        "2 processes in C": in_c(),
        "2 processes in Python": in_python(),
        "2 in Python around a hub": in_a_star(),
    }
    return {title: seconds for title, seconds in measured.items() if seconds is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rounds = [floors() for _ in range(arguments.rounds)]
    seen = {title: [found[title] for found in rounds] for title in rounds[0]}
    for title, times in seen.items():
        print(f"{title:28} {statistics.median(times) * 1e6:6.1f} µs (×{max(times) / min(times):.2f} between rounds)")
    if arguments.json:
        arguments.json.write_text(json.dumps(seen, indent=1))


if __name__ == "__main__":
    main()
