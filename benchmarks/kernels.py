"""How fast reduce() adds, against memcpy, numpy and a C loop, and what a call and a compilation cost.

    python benchmarks/kernels.py [--quick] [--json FILE]

Speed is bytes read and written, in GB/s: summing n inputs of S bytes moves (n + 1)·S, however often a contender
really touches memory. With several threads each has memory of its own, and the speeds are added. Contenders take
turns, so that a busy machine disturbs all alike; a row shows the median and the range of their rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from byteps_py.kernels import prepare, reduce
from byteps_py.tensors import DType, Op

SIZES = {"256 KB": 256 << 10, "4 MB": 4 << 20, "64 MB": 64 << 20}
DTYPES = (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16, DType.INT32, DType.INT64, DType.UINT8)
NUMPY = {d: np.dtype(d.name.lower()) for d in DTYPES if d not in (DType.FLOAT16, DType.BFLOAT16)}
Call = Callable[[], object]
Add = Callable[[int, int, int], None]  # (address to add to, address of what is added, count)
SAMPLE_BYTES = 128 << 20  # moved in one timed sample, at least

C_SOURCE = """
void add(float *restrict to, const float *restrict from, long count) {
    for (long i = 0; i < count; i++) to[i] += from[i];
}
"""


@dataclass(frozen=True)
class Row:
    """One line of the result; speeds in GB/s."""

    dtype: str
    size: str
    inputs: int
    threads: int
    contender: str
    median: float
    lowest: float
    highest: float


class Buffers:
    """One thread's memory: ``inputs`` arrays and one more for a separate output. All pages touched."""

    def __init__(self, inputs: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.arrays = [np.full(nbytes, 0, np.uint8) for _ in range(inputs + 1)]
        self.addresses = [array.ctypes.data for array in self.arrays]
        self.inputs = self.addresses[:-1]


def contenders(dtype: DType, buffers: Buffers, c_add: Add | None) -> dict[str, Call]:
    """By name, each one way to add all inputs once. All but one write the sum over the first input."""
    count = buffers.nbytes // dtype.itemsize
    inputs, first, extra = buffers.inputs, buffers.inputs[:1], buffers.addresses[-1:]
    found: dict[str, Call] = {
        "reduce, in place": lambda: reduce(Op.SUM, dtype, inputs, first, count),
        "reduce, new output": lambda: reduce(Op.SUM, dtype, inputs, extra, count),
    }
    if dtype in NUMPY:
        target, *others = (array.view(NUMPY[dtype]) for array in buffers.arrays[:-1])

        def with_numpy() -> None:
            for other in others:
                np.add(target, other, out=target)

        found["numpy, pairwise"] = with_numpy
    if c_add and dtype is DType.FLOAT32:

        def with_c() -> None:
            for other in inputs[1:]:
                c_add(inputs[0], other, count)

        found["C, pairwise"] = with_c
    return found


def timed(work: list[Call], repeats: int) -> float:
    """Seconds that ``repeats`` calls of each element of ``work`` take, one thread for each."""
    if len(work) == 1:
        start = time.perf_counter()
        for _ in range(repeats):
            work[0]()
        return time.perf_counter() - start
    ready = threading.Barrier(len(work) + 1)

    def run(call: Call) -> None:
        ready.wait()
        for _ in range(repeats):
            call()

    threads = [threading.Thread(target=run, args=(call,)) for call in work]
    for thread in threads:
        thread.start()
    ready.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def measure(dtype: DType, size: str, inputs: int, threads: int, rounds: int, c_add: Add | None) -> list[Row]:
    nbytes = SIZES[size]
    memories = [Buffers(inputs, nbytes) for _ in range(threads)]
    lanes = [contenders(dtype, memory, c_add) for memory in memories]
    # (the calls, one for each thread; bytes that one of them moves)
    work = {name: ([lane[name] for lane in lanes], (inputs + 1) * nbytes) for name in lanes[0]}
    copies: list[Call] = [partial(ctypes.memmove, m.addresses[1], m.addresses[0], nbytes) for m in memories]
    work["memcpy"] = (copies, 2 * nbytes)
    speeds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, (calls, moved) in work.items():
            repeats = max(1, SAMPLE_BYTES // moved)
            speed = threads * repeats * moved / timed(calls, repeats) / 1e9
            if number:  # the first round warms up
                speeds[name].append(speed)
    return [
        Row(dtype.name.lower(), size, inputs, threads, name, statistics.median(found), min(found), max(found))
        for name, found in speeds.items()
    ]


def compile_c(folder: str) -> Add | None:
    """The C loop, or None without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    source, library = Path(folder, "add.c"), Path(folder, "add.so")
    source.write_text(C_SOURCE)
    subprocess.run(
        [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60
    )
    add = ctypes.CDLL(str(library)).add
    add.argtypes, add.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long), None
    return add


def call_us() -> float:
    """Microseconds of one reduce() of 16 float32, two inputs: what Python costs."""
    memory = Buffers(2, 64)
    samples = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(20_000):
            reduce(Op.SUM, DType.FLOAT32, memory.inputs, memory.inputs[:1], 16)
        samples.append((time.perf_counter() - start) / 20_000 * 1e6)
    return statistics.median(samples)


def prepare_s(folder: str) -> dict[str, float]:
    """Seconds to make kernels ready in a fresh process: without, then with what the first one left on disk."""
    program = (
        "import time; from byteps_py.kernels import prepare; from byteps_py.tensors import DType, Op\n"
        "times = [time.perf_counter()]\n"
        "for dtype in (DType.FLOAT32, DType.FLOAT16): prepare([(Op.SUM, dtype)]); times.append(time.perf_counter())\n"
        "print(times[1] - times[0], times[2] - times[1])"
    )
    found = {}
    for state in ("cold", "warm"):
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
        command = [sys.executable, "-c", program]
        output = subprocess.run(
            command, env=environment, check=True, timeout=120, capture_output=True, text=True
        ).stdout
        found[f"{state}, numba and first kernel"], found[f"{state}, next kernel"] = map(float, output.split())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="float32 and float16, 2 and 4 inputs, fewer rounds")
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    options = parser.parse_args()
    dtypes = (DType.FLOAT32, DType.FLOAT16) if options.quick else DTYPES
    input_counts, rounds = ((2, 4), 3) if options.quick else ((2, 4, 8), 7)
    thread_counts = (1, 2) if (os.cpu_count() or 1) > 1 else (1,)

    prepare((Op.SUM, dtype) for dtype in dtypes)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        c_add = compile_c(folder)
        seconds = prepare_s(folder)
        overhead_us = call_us()
        for what, value in seconds.items():
            print(f"prepare, {what}: {value * 1000:.0f} ms")
        print(f"one call of reduce(): {overhead_us:.2f} µs\n")
        print(
            f"{'dtype':9} {'size':>7} {'inputs':>6} {'threads':>7}  {'contender':20} {'GB/s':>6}  {'range':>13} /memcpy"
        )
        for dtype in dtypes:
            for size in SIZES:
                for inputs in input_counts:
                    for threads in thread_counts:
                        found = measure(dtype, size, inputs, threads, rounds, c_add)
                        rows += found
                        copy = found[-1].median
                        for row in found:
                            print(
                                f"{row.dtype:9} {row.size:>7} {row.inputs:6} {row.threads:7}  {row.contender:20} "
                                f"{row.median:6.1f}  {row.lowest:5.1f} – {row.highest:5.1f} {row.median / copy:7.2f}",
                                flush=True,
                            )
    if options.json:
        about = {
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "numpy": np.__version__,
        }
        result = {"about": about, "prepare_s": seconds, "call_us": overhead_us, "rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
