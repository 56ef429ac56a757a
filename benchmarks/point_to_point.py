"""Between machines: send/recv, all-reduce, all-gather and push_pull as programs call them, beside gloo.

    python -m benchmarks.point_to_point [--layouts 2x1 2x2 4x1] [--rounds 5] [--sizes …] [--json FILE]

MxN: M machines of N ranks, all emulated on this one. Ranks of different machines share no memory, and use loopback
TCP. All jobs are alive at once and take turns, round after round: in each turn one job carries out one operation with
one size for a while, and the others sleep. A figure is the median over the rounds of a turn's median call; beside it
stands the spread over the rounds. "CPU" is the processor time of all the job's processes, services too, per GB of
tensor and machine. gloo spins while it waits, so its own varies.

send_recv is one way: half of a message there and back between rank 0 and a rank of the last machine. push_pull goes
through ``byteps_py``'s own interface, beside gloo's all_reduce.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.turns import Job, orders

BACKENDS = ("byteps", "gloo")
OPERATIONS = ("send_recv", "all_reduce", "all_gather", "push_pull")
SIZES = [4, 1 << 10, 64 << 10, 1 << 20, 16 << 20]
_WARM_UP = 5
_GB = 1e9
_HZ = os.sysconf("SC_CLK_TCK")

Call = Callable[[], object]


# ---- a rank ------------------------------------------------------------------------------------------------


def send_recv(backend: str, nbytes: int) -> Call:
    tensor, rank, last = torch.ones(max(1, nbytes // 4)), dist.get_rank(), dist.get_world_size() - 1

    def call() -> None:
        if rank == 0:
            dist.send(tensor, last)
            dist.recv(tensor, last)
        elif rank == last:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)

    return call


def all_reduce(backend: str, nbytes: int) -> Call:
    tensor = torch.zeros(max(1, nbytes // 4))
    return lambda: dist.all_reduce(tensor)


def all_gather(backend: str, nbytes: int) -> Call:
    """``nbytes`` of each rank."""
    mine = torch.ones(max(1, nbytes // 4))
    whole = torch.empty(mine.numel() * dist.get_world_size())
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the name from torch 2.13 on
    return lambda: gather(whole, mine)


def push_pull(backend: str, nbytes: int) -> Call:
    tensor = torch.zeros(max(1, nbytes // 4))
    if backend == "gloo":
        return lambda: dist.all_reduce(tensor)
    import byteps_py as bps

    name = f"benchmark {nbytes}"
    return lambda: bps.push_pull_inplace(tensor, average=False, name=name)


def measure(call: Call, nbytes: int, seconds: float) -> list[float]:
    """The median call, as this rank sees it, and how many there were. A barrier comes before all of them."""
    for _ in range(_WARM_UP):
        call()
    count = int(min(300, max(4, seconds * 1e9 / (8 * nbytes + 2e6))))
    dist.barrier()
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    dist.barrier()
    return [statistics.median(times), count + _WARM_UP]


def serve(backend: str, door: str) -> None:
    if backend == "byteps":
        import byteps_py as bps

        bps.init()
    dist.init_process_group(backend)
    calls: dict[tuple[str, int], Call] = {}
    with orders(door, dist.get_rank()) as words:
        for word, answer in words:
            operation, nbytes, seconds = word.split()
            key = operation, int(nbytes)
            if key not in calls:
                calls[key] = globals()[operation](backend, key[1])
            found = measure(calls[key], key[1], float(seconds))
            answer(found if dist.get_rank() == 0 else None)
    dist.destroy_process_group()


# ---- the benchmark -----------------------------------------------------------------------------------------


def cpu_s(job: Job) -> float:
    """Processor seconds of all the job's processes so far."""
    total = 0
    for pid in job.pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / _HZ


def run(layout: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    machines, ranks = map(int, layout.split("x"))
    times: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    costs: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        jobs = {}
        for number, backend in enumerate(BACKENDS):
            program = [__file__, "--rank", backend]
            place = {
                "MASTER_PORT": str(29_700 + number), "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR",
                "PYTHONPATH": str(Path(__file__).parent.parent),
            }  # fmt: skip
            jobs[backend] = job = Job(f"{layout}-{backend}", ranks, machines, program, **place)
            stack.callback(job.close)
            job.meet()
        for operation in arguments.operations:
            for nbytes in arguments.sizes:
                for _ in range(arguments.rounds):
                    for backend, job in jobs.items():
                        before = cpu_s(job)
                        answers = job.tell(f"{operation} {nbytes} {arguments.seconds}")
                        ((median_s, calls),) = [answer for answer in answers if answer is not None]
                        key = operation, nbytes, backend
                        times[key].append(median_s / (2 if operation == "send_recv" else 1))
                        costs[key].append((cpu_s(job) - before) / (calls * max(4, nbytes) * machines / _GB))
    return show(layout, times, costs)


def show(
    layout: str, times: dict[tuple[str, int, str], list[float]], costs: dict[tuple[str, int, str], list[float]]
) -> list[dict[str, Any]]:
    print(f"\n{layout} (machines x ranks), loopback; time of one call, (spread); CPU s per GB and machine")
    print(f"{'operation':12}{'bytes':>10}{'byteps':>22}{'gloo':>22}{'byteps/gloo':>13}{'CPU byteps':>12}{'gloo':>10}")
    rows = []
    for operation, nbytes in dict.fromkeys((operation, nbytes) for operation, nbytes, _ in times):
        row: dict[str, Any] = {"layout": layout, "operation": operation, "bytes": nbytes}
        cells = []
        for backend in BACKENDS:
            found = times[operation, nbytes, backend]
            row[backend] = statistics.median(found)
            row[f"{backend}_rounds_s"] = found
            row[f"{backend}_cpu_s_per_gb"] = statistics.median(costs[operation, nbytes, backend])
            cells.append(f"{row[backend] * 1e6:11.0f} µs ×{max(found) / min(found):4.2f}")
        row["ratio"] = row["byteps"] / row["gloo"]
        line = f"{operation:12}{nbytes:10d}" + "".join(f"{cell:>22}" for cell in cells) + f"{row['ratio']:13.2f}"
        if nbytes >= 1 << 20:
            line += "".join(f"{row[f'{backend}_cpu_s_per_gb']:11.2f}" for backend in BACKENDS)
        print(line, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["2x1", "2x2", "4x1"], metavar="MxN")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.4, help="of one turn, about")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", choices=BACKENDS, help=argparse.SUPPRESS)
    parser.add_argument("--door", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        serve(arguments.rank, arguments.door)
        return
    rows = [row for layout in arguments.layouts for row in run(layout, arguments)]
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
