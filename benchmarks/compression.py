"""What compression costs and saves: kernels beside memcpy, and sums over slow links beside float32, bfloat16 and gloo.

    python -m benchmarks.compression [--mbit 100] [--mb 32] [--workers 4] [--servers 2] [--rounds 3] [--json FILE]
    python -m benchmarks.compression --rounds 0     only kernels; --no-kernels: only sums

Kernels: GB/s of float32 that one core codes, decodes, and adds on a server (of four contributions; "read" counts what
it reads of their codes), in 64 MB, which no cache holds, beside memcpy in the same rounds. "bytes kept" are those that
a machine keeps for each element, with error feedback. Times are the processor's: other work takes none of them. A
figure is the median, "of memcpy" the median of the rounds' ratios.

"powersgd" and "ddp_powersgd" are whole steps with a gradient of a square matrix: DistributedOptimizer with factors of
rank 4, and torch's PowerSGD hook over gloo.

Sums: hosts are network namespaces with shaped links (root needed). All calls take turns in one job, gloo in its own.
"sent" is what a GPU machine's link carries for a call, with all headers, each way; "CPU" is of all processes, per GB of
float32 tensor and machine.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.cluster.contenders import Layout
from benchmarks.cluster.hosts import Host, cluster
from benchmarks.cluster.measure import Found, turns
from benchmarks.cluster.rank import COMPRESSED, GLOO, POWERSGD, POWERSGD_HOOK
from byteps_py import codecs
from byteps_py.codecs import Coding
from byteps_py.tensor_codec import Codec, CodecKind
from byteps_py.tensors import DType

CODECS = {
    "int8": Codec(CodecKind.INT8),
    "float8": Codec(CodecKind.FLOAT8_E4M3),
    "float8_e5m2": Codec(CodecKind.FLOAT8_E5M2),
    "thc": Codec(CodecKind.THC, error_feedback=True),
    "thc, 16 bits": Codec(CodecKind.THC_WIDE, error_feedback=True),
    "dithering, 8 bits": Codec(CodecKind.DITHERING_LINEAR, 127),
    "dithering, 4 bits": Codec(CodecKind.DITHERING_LINEAR, 7),
    "dithering, 2 bits": Codec(CodecKind.DITHERING_LINEAR, 1),
    "dithering, 4 bits, l2": Codec(CodecKind.DITHERING_LINEAR_L2, 7),
    "dithering, natural": Codec(CodecKind.DITHERING_NATURAL, 7),
    "onebit": Codec(CodecKind.ONEBIT_SCALED),
    "onebit, no scaling": Codec(CodecKind.ONEBIT),
    "topk": Codec.topk(0.01),
    "topk, 3 %, 2 bits": Codec.topk(0.03, bits=2),
    "randomk": Codec.randomk(0.01),
}
_COUNT = 16 << 20  # 64 MB
_SERVER_INPUTS = 4
_ROUNDS = 9


@dataclass
class KernelRow:
    """GB/s of float32 elements; ``ratio``: of memcpy."""

    kernel: str
    gb_per_s: float
    ratio: float


@dataclass
class CodecRow:
    """``fewer_bytes``: float32's over the codec's. ``kept_bytes``: for each element, on a machine, with feedback."""

    codec: str
    fewer_bytes: float
    kept_bytes: float
    added_gb_per_s: float


@dataclass
class SumRow:
    """``sent_mb``: of one GPU machine's link, each way, for one call. ``ratio_*``: float32's over this one's."""

    call: str
    median_s: float
    slowest_s: float
    sent_mb: float
    ratio_time: float
    ratio_bytes: float
    cpu_s_per_gb: float


def _took_s(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def codec_rows(rows: Sequence[KernelRow]) -> list[CodecRow]:
    """The bytes and memory of each codec, and the speed at which its sums read codes."""
    speeds = {row.kernel: row.gb_per_s for row in rows}
    found = []
    for name, codec in CODECS.items():
        fewer, agreed = 4 * codec.block / codec.item_bytes, 4 / codec.block if codec.is_thc else 0.0
        found.append(CodecRow(name, fewer, 4 + agreed, _SERVER_INPUTS * speeds[f"{name}: add"] / fewer))
    return found


def kernels() -> list[KernelRow]:
    values = np.random.default_rng(0).standard_normal(_COUNT).astype(np.float32)
    result, error = np.empty_like(values), np.zeros_like(values)
    works: dict[str, Callable[[], object]] = {
        "memcpy": lambda: ctypes.memmove(result.ctypes.data, values.ctypes.data, values.nbytes)
    }
    memory = []  # to which addresses point
    for name, codec in CODECS.items():
        given = [np.zeros(codec.coded_nbytes(_COUNT), np.uint8) for _ in range(_SERVER_INPUTS + 1)]
        memory += given
        places = [each.ctypes.data for each in given]
        plain = Coding(codec, DType.FLOAT32, _COUNT, machines=_SERVER_INPUTS)
        kept = replace(plain, error=error.ctypes.data)
        for place in places:
            codecs.encode(plain, [values.ctypes.data], place)

        def encode(coding: Coding = plain, place: int = places[0]) -> object:
            return codecs.encode(coding, [values.ctypes.data], place)

        def decode(coding: Coding = plain, place: int = places[0]) -> object:
            return codecs.decode(coding, place, [result.ctypes.data], 1, place)

        def add(codec: Codec = codec, places: list[int] = places, nbytes: int = len(given[0])) -> object:
            return codecs.add(codec, places[:-1], places[-1:], nbytes)

        works |= {f"{name}: encode": encode, f"{name}: decode": decode, f"{name}: add": add}
        # To another place: a THC's sum is one of integers only as long as steps are equal.
        other = np.zeros_like(given[0])
        memory.append(other)
        works[f"{name}: encode with feedback"] = functools.partial(encode, kept, other.ctypes.data)
    for work in works.values():
        work()
    seen: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(_ROUNDS):
        for name, work in works.items():
            seen[name].append(_took_s(work))
    rows = []
    for name, times in seen.items():
        ratios = [copy / mine for copy, mine in zip(seen["memcpy"], times, strict=True)]
        rows.append(KernelRow(name, values.nbytes / statistics.median(times) / 1e9, statistics.median(ratios)))
    return rows


def sent_bytes(hosts: Sequence[Host]) -> int:
    """What all ``hosts`` have sent over their links so far."""
    return sum(int(Path(f"/sys/class/net/{host.outside}/statistics/rx_bytes").read_text()) for host in hosts)


def sums(arguments: argparse.Namespace) -> list[SumRow]:
    n, k = arguments.workers, arguments.servers
    calls = arguments.calls or ["push_pull", *COMPRESSED, POWERSGD, "gloo", POWERSGD_HOOK]
    found = {name: Found() for name in calls}
    sent: dict[str, list[float]] = {name: [] for name in calls}
    counts = [arguments.mb << 18]
    with cluster([arguments.mbit] * (n + k)) as hosts, contextlib.ExitStack() as stack:
        workers, layout = hosts[:n], Layout(hosts[:n], hosts[n:])
        jobs = {kind: stack.enter_context(turns(kind, layout, 1)) for kind in ("ours", "gloo")}
        for number in range(arguments.rounds + 1):
            for name in calls:
                before = sent_bytes(workers)
                into = found[name] if number else Found()  # the first prepares the call
                jobs["gloo" if name in GLOO else "ours"].take(name, counts, into)
                if number:
                    sent[name].append((sent_bytes(workers) - before) / n / 1e6)
    plain_s, plain_mb = found[calls[0]].median_s, statistics.median(sent[calls[0]])
    rows = []
    for name, each in found.items():
        mb = statistics.median(sent[name])
        times = each.times_s
        rows.append(
            SumRow(
                "float32" if name == "push_pull" else name, each.median_s, max(times), mb, plain_s / each.median_s,
                plain_mb / mb, each.cpu(),
            )
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0, help="of each link, each way")
    parser.add_argument("--mb", type=int, default=32)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="0: no sums")
    parser.add_argument("--calls", nargs="+", help="those of benchmarks/cluster/rank.py; the first is compared with")
    parser.add_argument("--no-kernels", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}")
    found = [] if arguments.no_kernels else kernels()
    if found:
        print("| kernel, one core | GB/s of float32 | of memcpy |\n|---|---|---|")
        for kernel in found:
            print(f"| {kernel.kernel} | {kernel.gb_per_s:.1f} | {kernel.ratio:.2f} |")
        print("\n| codec | × fewer bytes | bytes kept | add: GB/s read |\n|---|---|---|---|")
        for each in codec_rows(found):
            print(f"| {each.codec} | {each.fewer_bytes:.2f} | {each.kept_bytes:.2f} | {each.added_gb_per_s:.1f} |")
    summed = sums(arguments) if arguments.rounds else []
    if summed:
        n, k = arguments.workers, arguments.servers
        print(f"\n{arguments.mb} MB of float32, n = {n}, k = {k}, {arguments.mbit:g} Mbit/s each way")
        print("| travels as | s | slowest | MB sent | × less time | × fewer bytes | CPU s/GB |")
        print("|---|---|---|---|---|---|---|")
        for row in summed:
            print(
                f"| {row.call} | {row.median_s:.3f} | {row.slowest_s:.3f} | {row.sent_mb:.2f} | {row.ratio_time:.2f} "
                f"| {row.ratio_bytes:.2f} | {row.cpu_s_per_gb:.1f} |"
            )
    if arguments.json:
        of_codecs = codec_rows(found) if found else []
        kinds = {"kernels": found, "codecs": of_codecs, "sums": summed}
        rows = {kind: [asdict(each) for each in those] for kind, those in kinds.items()}
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
