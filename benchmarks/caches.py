"""What it costs to write memory that another process has read: through the caches, and past them.

    python benchmarks/caches.py [--kilobytes 64 256 1024 2048 4096 16384] [--rounds 3] [--json FILE]

Two processes in turn: one copies a buffer to shared memory, the other copies it from there. Which cores they run on
decides: those that share a cache hand lines over cheaply, those of another core complex or socket do not. So the first
column says how processes of this machine stand to each other just now; on a virtual machine it may change at any time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from byteps_py.kernels.jit import streaming

_TURNS = 60
_LIMIT_S = 30.0
Copy = Callable[[int, int, int], object]
WAYS: dict[str, Copy] = {"usual": ctypes.memmove, "past": streaming.copy_past_caches}


class Turn:
    """A number in shared memory: whose turn it is."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory, self._offset = memory, offset

    def wait(self, number: int) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while struct.unpack_from("q", self._memory, self._offset)[0] != number:
            if time.monotonic() > deadline:
                raise SystemExit("the other process does not take its turn")

    def pass_on(self, number: int) -> None:
        struct.pack_into("q", self._memory, self._offset, number)


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def seconds(nbytes: int, writes: Copy) -> tuple[float, float]:
    """(to write, to read), medians."""
    shared = mmap.mmap(-1, nbytes + mmap.PAGESIZE)
    times = mmap.mmap(-1, mmap.PAGESIZE)
    turn, place = Turn(shared, nbytes), address_of(shared)
    private = mmap.mmap(-1, nbytes)
    private.write(b"\1" * nbytes)
    own = address_of(private)

    def copies(copy: Copy, target: int, source: int, first: int) -> Iterator[float]:
        for number in range(first, 2 * _TURNS, 2):
            turn.wait(number)
            began = time.perf_counter()
            copy(target, source, nbytes)
            yield time.perf_counter() - began
            turn.pass_on(number + 1)

    child = os.fork()
    if not child:
        struct.pack_into("d", times, 0, statistics.median(copies(ctypes.memmove, own, place, 1)))
        os._exit(0)
    written_s = statistics.median(copies(writes, place, own, 0))
    if os.waitpid(child, 0)[1]:
        raise SystemExit("the process that reads has failed")
    return written_s, float(struct.unpack_from("d", times)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kilobytes", type=int, nargs="+", default=[64, 256, 1024, 2048, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    streaming.prepare()
    if not streaming.is_ready():
        raise SystemExit("no way past the caches on this machine: see the log")
    rows = []
    print("GB/s of one process that writes, and of the other, which reads what was written")
    print("      KB         usual way: writes  reads      past the caches: writes  reads")
    for kilobytes in arguments.kilobytes:
        nbytes = kilobytes << 10
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(arguments.rounds):
            for way, copy in WAYS.items():
                found[way].append(seconds(nbytes, copy))
        medians = {
            way: [statistics.median(column) for column in zip(*pairs, strict=True)] for way, pairs in found.items()
        }
        rates = {way: [nbytes / s / 1e9 for s in pair] for way, pair in medians.items()}
        print(
            f"{kilobytes:8d}{rates['usual'][0]:27.1f}{rates['usual'][1]:7.1f}{rates['past'][0]:29.1f}{rates['past'][1]:7.1f}"
        )
        rows.append({"bytes": nbytes, "gigabytes_per_s": rates})
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
