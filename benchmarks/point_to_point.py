"""Between machines: send/recv, all-reduce, all-gather and push_pull as programs call them, beside gloo.

    python -m benchmarks.point_to_point [--layouts 2x1 2x2 4x1] [--rounds 5] [--sizes …] [--secret] [--json FILE]
    python -m benchmarks.point_to_point --delay-ms 0 1 [--mbit 1000]

MxN: M machines of N ranks. They are all emulated on this one, share no memory, and use loopback TCP. With --delay-ms or
--mbit each is a network namespace (root needed), and so many milliseconds pass on the way from one to another: a round
trip takes twice as long. All jobs are alive at once and take turns, round after round: in each turn one job carries out
one operation with one size for a while, and the others sleep. A figure is the median over the rounds of a turn's median
call; beside it stands the spread over the rounds. "CPU" is the processor time of all the job's processes, services too,
per GB of tensor and machine. gloo spins while it waits, so its own varies.

"sealed" is byteps with BYTEPS_SECRET: what machines send each other is authenticated. --secret adds it on loopback;
between namespaces no process listens without a secret, so it is there in place of "byteps".

send_recv is one way: half of a message there and back between rank 0 and a rank of the last machine. push_pull goes
through ``byteps_py``'s own interface, beside gloo's all_reduce. tensor_layers are the same tensor-parallel layers over
either backend, with their computation.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.cluster.contenders import SECRET, Layout, our_job, torch_job
from benchmarks.cluster.hosts import Host, network
from benchmarks.turns import Cost, Job, charged, new_cost, orders

BACKENDS = ("byteps", "gloo")
OPERATIONS = ("send_recv", "all_reduce", "all_gather", "push_pull", "tensor_layers")
SIZES = [4, 1 << 10, 64 << 10, 1 << 20, 16 << 20]
_WARM_UP = 5
#: Features of the layers that tensor parallelism cuts.
_WIDTH = 64
_GB = 1e9

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


def tensor_layers(backend: str, nbytes: int) -> Call:
    """A forward and a backward pass of a feed-forward block that tensor parallelism has cut for all ranks, of a batch
    of ``nbytes``: one sum of that size in each pass."""
    from byteps_py.parallel.tensor import Column, Row, parallelize

    torch.manual_seed(0)
    torch.set_num_threads(1)
    block = torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.ReLU(), torch.nn.Linear(_WIDTH, _WIDTH))
    layers = parallelize(block, {"0": Column(), "2": Row()}, dist.group.WORLD)
    batch = torch.ones(max(1, nbytes // (4 * _WIDTH)), _WIDTH, requires_grad=True)
    return lambda: layers(batch).sum().backward()


def measure(call: Call, count: int) -> float:
    """The median call, as this rank sees it. A barrier comes before all of them, and one after."""
    for _ in range(_WARM_UP):
        call()
    dist.barrier()
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    dist.barrier()
    return statistics.median(times)


def serve(backend: str) -> None:
    if backend == "byteps":
        import byteps_py as bps

        bps.init()
    dist.init_process_group(backend)
    calls: dict[tuple[str, int], Call] = {}
    with orders(dist.get_rank()) as words:
        for word, answer in words:
            operation, nbytes, count = word.split()
            key = operation, int(nbytes)
            if key not in calls:
                calls[key] = globals()[operation](backend, key[1])
            median_s = measure(calls[key], int(count))
            answer(median_s if dist.get_rank() == 0 else None)
    dist.destroy_process_group()


# ---- the benchmark -----------------------------------------------------------------------------------------


class Link(NamedTuple):
    """Between machines: of this rate (0: any), and with this delay. Without either, loopback."""

    mbit: float
    delay_ms: float | None

    @property
    def is_loopback(self) -> bool:
        return not self.mbit and self.delay_ms is None

    def __str__(self) -> str:
        if self.is_loopback:
            return "loopback"
        return f"{self.delay_ms or 0:g} ms of delay, " + (f"{self.mbit:g} Mbit/s each way" if self.mbit else "any rate")


class Seen(NamedTuple):
    """The rounds of one operation with one size and contender."""

    times_s: list[float]
    cost: Cost


def started(name: str, hosts: Sequence[Host], ranks: int, is_sealed: bool) -> Job:
    layout, variables = Layout(hosts, ranks=ranks), {"PYTHONPATH": str(Path(__file__).parent.parent)}
    if name == "gloo":
        return torch_job(name, layout, [__file__, "--rank", "gloo"], variables)
    secret = {"BYTEPS_SECRET": SECRET} if is_sealed else {}
    return our_job(name, layout, [__file__, "--rank", "byteps"], {**variables, **secret})


def run(layout: str, link: Link, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    machines, ranks = map(int, layout.split("x"))
    seen: dict[tuple[str, int, str], Seen] = defaultdict(lambda: Seen([], new_cost()))
    contenders = ["byteps"] if link.is_loopback else []
    contenders += ["sealed"] if arguments.secret or not link.is_loopback else []
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(network(machines, *link))
        jobs = {}
        for name in [*contenders, "gloo"]:
            jobs[name] = job = started(name, hosts, ranks, name == "sealed")
            stack.callback(job.close)
            job.meet()
        for operation in arguments.operations:
            for nbytes in arguments.sizes:
                for _ in range(arguments.rounds):
                    for name, job in jobs.items():
                        found = seen[operation, nbytes, name]
                        take(job, operation, nbytes, arguments.seconds, machines, found)
    return show(layout, link, seen)


def take(job: Job, operation: str, nbytes: int, seconds: float, machines: int, found: Seen) -> None:
    """One turn."""
    calls = calls_of(nbytes, seconds)
    gigabytes = (calls + _WARM_UP) * max(4, nbytes) * machines / _GB
    with charged(job, found.cost, gigabytes):
        answers = job.tell(f"{operation} {nbytes} {calls}")
    (median_s,) = [answer for answer in answers if answer is not None]
    found.times_s.append(median_s / (2 if operation == "send_recv" else 1))


def calls_of(nbytes: int, seconds: float) -> int:
    """As many as may take so long."""
    return int(min(300, max(4, seconds * 1e9 / (8 * nbytes + 2e6))))


def show(layout: str, link: Link, seen: dict[tuple[str, int, str], Seen]) -> list[dict[str, Any]]:
    names = list(dict.fromkeys(name for _, _, name in seen))
    ours = names[:-1]
    print(f"\n{layout} (machines x ranks), {link}; time of one call, (spread); CPU s per GB and machine")
    print(
        f"{'operation':12}{'bytes':>10}"
        + "".join(f"{name:>22}" for name in names)
        + "".join(f"{f'{name}/gloo':>13}" for name in ours)
        + "   CPU"
        + "".join(f"{name:>10}" for name in names)
    )
    rows = []
    for operation, nbytes in dict.fromkeys((operation, nbytes) for operation, nbytes, _ in seen):
        row: dict[str, Any] = {
            "layout": layout, "mbit": link.mbit, "delay_ms": link.delay_ms, "operation": operation, "bytes": nbytes,
        }  # fmt: skip
        line = f"{operation:12}{nbytes:10d}"
        for name in names:
            times_s, cost = seen[operation, nbytes, name]
            row[name] = statistics.median(times_s)
            row[f"{name}_rounds_s"] = times_s
            row[f"{name}_cpu_s_per_gb"] = statistics.median(cost["all"])
            row[f"{name}_cpu_s_per_gb_by_kind"] = {kind: statistics.median(each) for kind, each in cost.items()}
            line += f"{f'{row[name] * 1e6:11.0f} µs ×{max(times_s) / min(times_s):4.2f}':>22}"
        for name in ours:
            row["ratio" if name == "byteps" else f"{name}_ratio"] = row[name] / row["gloo"]
            line += f"{row[name] / row['gloo']:13.2f}"
        print(f"{line}{'':6}" + "".join(f"{row[f'{name}_cpu_s_per_gb']:10.3g}" for name in names), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["2x1", "2x2", "4x1"], metavar="MxN")
    parser.add_argument("--delay-ms", type=float, nargs="+", help="between namespaces, one way; one table for each")
    parser.add_argument("--mbit", type=float, default=0.0, help="of each link, each way; 0: as fast as it goes")
    parser.add_argument("--secret", action="store_true", help='on loopback too: byteps "sealed" beside "byteps"')
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.4, help="of one turn, about")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", choices=BACKENDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        serve(arguments.rank)
        return
    links = [Link(arguments.mbit, delay_ms) for delay_ms in arguments.delay_ms or [None]]
    rows = [row for link in links for layout in arguments.layouts for row in run(layout, link, arguments)]
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
