"""How fast kernels add, against memcpy and a plain C loop on the same buffers, with and without checks.

    python benchmarks/kernels.py [--quick] [--sizes KB …] [--dtypes NAME …] [--inputs N …] [--json FILE]

Speed is bytes read and written, in GB/s: summing n inputs of S bytes moves (n + 1)·S. memcpy copies from buffer to
buffer through the same n + 1 of them, so that both have the same memory at work. With several threads each has
memory of its own, and the speeds are added. All contenders are called from C, in turns, so that a busy machine
disturbs all alike; a figure is the median over the rounds of the ratio to the same round's memcpy. Needs gcc.
In brackets: the tenths and ninetieths of the rounds.
What one call costs from Python, and how long kernels take to become ready, stands in the first lines.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from byteps_py.kernels import prepare, reduce, reduce_checked
from byteps_py.kernels.jit import numba_kernels
from byteps_py.tensors import Checks, DType, Op

SIZES_KB = (64, 256, 1024, 65536)
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32")
C_SOURCE = Path(__file__).with_suffix(".c")
ARGUMENTS = 7
CHECKED = {"+finite": Checks.FINITE, "+checksum": Checks.CHECKSUM, "+both": Checks.FINITE | Checks.CHECKSUM}


class Call(ctypes.Structure):
    _fields_ = (("function", ctypes.c_void_p), ("arguments", ctypes.c_int64 * ARGUMENTS))


@dataclass(frozen=True)
class Row:
    """One contender in one setting."""

    dtype: str
    size_kb: int
    inputs: int
    threads: int
    contender: str
    gb_per_s: float
    to_memcpy: float
    to_c: float
    #: Of the last two between rounds: the tenths and ninetieths.
    to_memcpy_range: tuple[float, float]
    to_c_range: tuple[float, float]


class Contender:
    """Calls to make one after the other, and the bytes that they move together."""

    def __init__(self, calls: list[tuple[int, tuple[int, ...]]], moved: int) -> None:
        padded = [Call(address, (*arguments, *[0] * (ARGUMENTS - len(arguments)))) for address, arguments in calls]
        self.calls = (Call * len(calls))(*padded)
        self.moved = moved


class Lane:
    """One thread's memory and what the contenders do with it. All pages are touched."""

    def __init__(self, library: ctypes.CDLL, dtype: DType, nbytes: int, inputs: int, in_place: bool) -> None:
        self._arrays = [np.zeros(nbytes + 4096, np.uint8) for _ in range(inputs + 1)]
        for array in self._arrays:
            array.fill(0)
        buffers = [-(-array.ctypes.data // 4096) * 4096 for array in self._arrays]
        if in_place:
            buffers = buffers[:-1]
        sources, target = buffers[:inputs], buffers[0 if in_place else -1]
        self._table = (ctypes.c_uint64 * (2 * inputs + 3))(*sources, target)
        self._status = (ctypes.c_uint64 * 8)()
        table, status = ctypes.addressof(self._table), ctypes.addressof(self._status)
        moved = (inputs + 1) * nbytes

        copies = [(buffers[(2 * i + 1) % len(buffers)], buffers[2 * i % len(buffers)]) for i in range(len(buffers))]
        memmove = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
        self.contenders = {
            "memcpy": Contender([(memmove, (*copy, nbytes)) for copy in copies], 2 * nbytes * len(copies))
        }
        plain = ctypes.cast(getattr(library, f"{dtype.name.lower()}_{inputs}"), ctypes.c_void_p).value or 0
        self.contenders["C"] = Contender([(plain, (table, target, nbytes // dtype.itemsize))], moved)
        for name, checks in {"reduce": Checks.NONE, **CHECKED}.items():
            arguments = (status, status + 8, table, inputs, 1, nbytes, 1)
            self.contenders[name] = Contender([(machine_code(dtype, checks), arguments)], moved)


def machine_code(dtype: DType, checks: Checks) -> int:
    """The kernel's address: a C function of (room for a result, room for an error, the kernel's arguments)."""
    (compiled_,) = numba_kernels.build(Op.SUM, dtype, checks).overloads.values()  # type: ignore[attr-defined]
    return int(compiled_.library.get_pointer_to_function(compiled_.fndesc.llvm_func_name))


def seconds(library: ctypes.CDLL, contenders: list[Contender], repeats: int) -> list[float]:
    """What ``repeats`` rounds of each take, one thread for each."""
    ready = threading.Barrier(len(contenders))
    taken = [0.0] * len(contenders)

    def run(index: int) -> None:
        calls = contenders[index].calls
        ready.wait()
        start = time.perf_counter()
        library.repeat(calls, len(calls), repeats)
        taken[index] = time.perf_counter() - start

    threads = [threading.Thread(target=run, args=(index,)) for index in range(1, len(contenders))]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    return taken


def measure(
    library: ctypes.CDLL, dtype: DType, size_kb: int, inputs: int, threads: int, in_place: bool, budget: Budget
) -> list[Row]:
    lanes = [Lane(library, dtype, size_kb << 10, inputs, in_place) for _ in range(threads)]
    speeds: dict[str, list[float]] = {name: [] for name in lanes[0].contenders}
    for number in range(budget.rounds + 1):
        for name, found in speeds.items():
            contenders = [lane.contenders[name] for lane in lanes]
            repeats = max(1, budget.sample_bytes // contenders[0].moved)
            taken = seconds(library, contenders, repeats)
            if number:  # the first round warms up
                found.append(sum(repeats * contenders[0].moved / each for each in taken) / 1e9)

    def ratios(name: str, other: str) -> list[float]:
        return sorted(a / b for a, b in zip(speeds[name], speeds[other], strict=True))

    rows = []
    for name, found in speeds.items():
        title = name + (", in place" if in_place else "")
        to_memcpy, to_c = ratios(name, "memcpy"), ratios(name, "C")
        rows.append(
            Row(
                dtype.name.lower(), size_kb, inputs, threads, title,
                statistics.median(found), statistics.median(to_memcpy), statistics.median(to_c),
                tenths(to_memcpy), tenths(to_c),
            )
        )  # fmt: skip
    return rows


def tenths(values: list[float]) -> tuple[float, float]:
    """The tenth and the ninetieth percentile of sorted values."""
    last = len(values) - 1
    return values[round(last / 10)], values[round(last * 9 / 10)]


@dataclass(frozen=True)
class Budget:
    rounds: int
    sample_bytes: int


def compile_c(folder: str) -> ctypes.CDLL:
    library = Path(folder, "kernels.so")
    command = ["gcc", "-O3", "-march=native", "-shared", "-fPIC", "-o", str(library), str(C_SOURCE)]
    subprocess.run(command, check=True, timeout=60)
    loaded = ctypes.CDLL(str(library))
    loaded.repeat.argtypes, loaded.repeat.restype = (ctypes.c_void_p, ctypes.c_long, ctypes.c_long), None
    return loaded


def call_us() -> dict[str, float]:
    """Microseconds of one call on 16 float32, two inputs: what Python costs."""
    arrays = [np.zeros(16, np.float32) for _ in range(2)]
    inputs = tuple(array.ctypes.data for array in arrays)
    both = Checks.FINITE | Checks.CHECKSUM
    calls = {
        "reduce()": lambda: reduce(Op.SUM, DType.FLOAT32, inputs, inputs[:1], 16),
        "reduce_checked()": lambda: reduce_checked(both, Op.SUM, DType.FLOAT32, inputs, inputs[:1], 16),
    }
    found = {}
    for name, call in calls.items():
        call()
        samples = []
        for _ in range(7):
            start = time.perf_counter()
            for _ in range(5_000):
                call()
            samples.append((time.perf_counter() - start) / 5_000 * 1e6)
        found[name] = statistics.median(samples)
    return found


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


def show(rows: list[Row]) -> None:
    """One line for each setting: GB/s of memcpy, ratios of the others to it, and of reduce to C."""
    first = rows[0]
    place = "in place" if first.contender.endswith("in place") else "new"
    ratios = "".join(f"{row.to_memcpy:11.2f}" for row in rows[1:])
    print(
        f"{first.dtype:9} {first.size_kb:8} {first.inputs:6} {first.threads:7} {place:>8} {first.gb_per_s:7.1f}"
        f"{ratios}{rows[2].to_c:13.2f} ({rows[2].to_c_range[0]:.2f} to {rows[2].to_c_range[1]:.2f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES_KB, metavar="KB", help="of one buffer")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=(*DTYPES, "int64"), metavar="NAME")
    parser.add_argument("--inputs", type=int, nargs="+", default=range(2, 9), choices=range(2, 9), metavar="N")
    parser.add_argument("--threads", type=int, nargs="+", default=(1, 2) if (os.cpu_count() or 1) > 1 else (1,))
    parser.add_argument("--quick", action="store_true", help="few rounds of small samples")
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    options = parser.parse_args()
    budget = Budget(3, 1 << 20) if options.quick else Budget(15, 128 << 20)

    prepare((Op.SUM, DType[name.upper()]) for name in options.dtypes)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        library = compile_c(folder)
        ready, calls = prepare_s(folder), call_us()
        for what, value in ready.items():
            print(f"prepare, {what}: {value * 1000:.0f} ms")
        for what, value in calls.items():
            print(f"one call of {what}: {value:.2f} µs")
        print(
            "\n                                                memcpy |     speed relative to memcpy                 |"
        )
        heads = "".join(f"{head:>11}" for head in ("C", "reduce", *CHECKED))
        print(f"{'dtype':9} {'KB':>8} {'inputs':>6} {'threads':>7} {'output':>8}    GB/s{heads}  reduce / C")
        for dtype in options.dtypes:
            for size_kb in options.sizes:
                for inputs in options.inputs:
                    for threads in options.threads:
                        for in_place in (True, False):
                            found = measure(library, DType[dtype.upper()], size_kb, inputs, threads, in_place, budget)
                            show(found)
                            rows += found
    if options.json:
        about = {
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "numpy": np.__version__,
        }
        result = {"about": about, "prepare_s": ready, "call_us": calls, "rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
