"""Sums across machines against the number of CPU machines, as users call them, beside gloo and theory: time and CPU.

    python -m benchmarks.cluster [--workers 4] [--servers 0 1 2 3 4] [--mbit 400] [--mb 1 24 64] [--rounds 3]
        [--contenders session push_pull_inplace push_pull allreduce_ optimizer hosted_machine hosted_sharded all_reduce]
        [--json FILE]
    python -m benchmarks.cluster --workers 2 --servers 0 1 2 --mbit 0 --rounds 5

Hosts are network namespaces with shaped links (root needed), and with --mbit 0 emulated machines on loopback. In each
round gloo and a bare TCP echo run beside one fresh job for each number of CPU machines k, in the same hosts. All take
turns: gloo, DistributedDataParallel over gloo ("ddp"), then our calls one after the other. A step of the optimizer, and
of hosted ones with states on each machine ("hosted_machine") and a part with each rank ("hosted_sharded"), is compared
with one of ddp, everything else with gloo's all_reduce.

Two tables for each size. In the first, of the first contender, "t·B/M" is the time in units of the model's bytes over a
link's bandwidth: the placement's optimum is 2n(n−1)/(n² + kn − 2k), a ring's 2(n−1)/n, the classical parameter server's
n/k. The second has the processor seconds of all processes of a job per GB of tensor and machine: of ranks, CSs, SSs and
the scheduler (launchers are in the sum only). The echo's are per GB that each of two processes sends and receives.
Links between namespaces need BYTEPS_SECRET, so what ours sends there is sealed, and gloo's is not; loopback has no
secret, unless --secret gives it one. Up to 8 MB, calls follow one another; above, ranks wait for each other before each
call.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.cluster.contenders import SECRET, Layout, counts_of
from benchmarks.cluster.hosts import network
from benchmarks.cluster.measure import Found, Seen, new_seen, turns
from benchmarks.cluster.rank import ECHO, GLOO, OURS, STEPS
from byteps_py.placement.shares import Optimum

SERVERS_ONLY = "servers only"
_KINDS = {"all": "all", "rank": "rank", "cs": "CS", "ss": "SS", "scheduler": "sched."}


def spread(times: list[float]) -> float:
    """The largest over the smallest."""
    return max(times) / min(times)


def peer_of(name: str) -> str:
    return "ddp" if name in STEPS else "gloo"


def theoretical_gain(n: int, k: int, name: str) -> float:
    """Over the ring."""
    optimum = Optimum(n, k)
    return float(optimum.gain_over_ring / (optimum.gain_over_servers_only if name == SERVERS_ONLY else 1))


def measure(arguments: argparse.Namespace, sizes: dict[int, list[int]], tuning: dict[str, str]) -> Seen:
    """``sizes``: by bytes, the elements of each tensor."""
    n, seen = arguments.workers, new_seen()
    peers = ["gloo", "ddp"] if set(STEPS) & set(arguments.contenders) else ["gloo"]
    with network(n + max(arguments.servers), arguments.mbit) as hosts:
        workers, spare = hosts[:n], hosts[n:]
        for _ in range(arguments.rounds):
            with contextlib.ExitStack() as stack:
                echo = stack.enter_context(turns("echo", Layout(workers), arguments.repeats))
                gloo = stack.enter_context(turns("gloo", Layout(workers, ranks=arguments.ranks), arguments.repeats))
                for k in arguments.servers:
                    layout = Layout(workers, spare[:k], arguments.ranks)
                    with turns("ours", layout, arguments.repeats, tuning) as ours:
                        for nbytes, counts in sizes.items():
                            echo.take(*ECHO, counts, seen[ECHO[0], 0, nbytes])
                            for name in peers:
                                gloo.take(name, counts, seen[name, 0, nbytes])
                            for name in arguments.contenders:
                                ours.take(name, counts, seen[name, k, nbytes])
                    if k and not arguments.skip_servers_only:
                        variables = {**tuning, "BYTEPS_PLACEMENT": "servers-only"}
                        with turns("ours", layout, arguments.repeats, variables) as ours:
                            for nbytes, counts in sizes.items():
                                ours.take(arguments.contenders[0], counts, seen[SERVERS_ONLY, k, nbytes])
    return seen


def show_theory(arguments: argparse.Namespace, seen: Seen, nbytes: int, unit_s: float) -> None:
    n, first = arguments.workers, arguments.contenders[0]
    gloo = seen["gloo", 0, nbytes]
    print(f"gloo {gloo.median_s:.3f} s = {gloo.median_s / unit_s:.3f} M/B (ring's optimum {2 * (n - 1) / n:.3f})")
    print(
        f"spread of gloo's calls ×{spread(gloo.times_s):.3f}; ours ({first}), of each k: "
        + ", ".join(f"×{spread(seen[first, k, nbytes].times_s):.3f}" for k in arguments.servers)
    )
    print(" k   ours s  t·B/M  optimum  ours/optimum  gain over gloo (theory)  servers only s  gain (theory)")
    for k in arguments.servers:
        optimum, ours = Optimum(n, k), seen[first, k, nbytes].median_s
        line = (
            f"{k:2d} {ours:8.3f} {ours / unit_s:6.3f} {float(optimum.time):8.3f} {ours / unit_s / optimum.time:13.3f}"
        )
        line += f" {gloo.median_s / ours:14.3f} ({float(optimum.gain_over_ring):.3f})"
        if (SERVERS_ONLY, k, nbytes) in seen:
            only = seen[SERVERS_ONLY, k, nbytes].median_s
            line += f" {only:18.3f} {only / ours:8.3f} ({float(optimum.gain_over_servers_only):.3f})"
        print(line)


def show_calls(arguments: argparse.Namespace, seen: Seen, nbytes: int) -> None:
    """Every contender's time and processor time, and both beside its peer's; the latter also beside the echo's."""
    print(
        f" k {'call':18} {'ms (min to max)':>26} {'gain':>7} {'of theory':>9} | CPU s/GB"
        + "".join(f"{title:>8}" for title in _KINDS.values())
        + f"{'/ peer':>8}{'/ echo':>8}"
    )
    echo = seen[ECHO[0], 0, nbytes]
    for (name, k, size), found in sorted(seen.items(), key=lambda item: item[0][1]):
        if size != nbytes:
            continue
        gain, of_theory, peer, machines = "", "", "", "-"
        if name not in (*GLOO, *ECHO):
            other, machines = seen[peer_of(name), 0, nbytes], str(k)
            ratio = other.median_s / found.median_s
            gain, peer = f"{ratio:.3f}", f"{found.cpu() / other.cpu():.2f}"
            if arguments.mbit:
                of_theory = f"{ratio / theoretical_gain(arguments.workers, k, name):.3f}"
        times = [second * 1e3 for second in found.times_s]
        took = f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"
        line = f"{machines:>2} {name:18} {took:>26} {gain:>7} {of_theory:>9} | {'':8}"
        line += "".join(f"{found.cpu(kind):8.2f}" for kind in _KINDS)
        print(line + f"{peer:>8}{found.cpu() / echo.cpu():8.2f}")


def rows_of(arguments: argparse.Namespace, seen: Seen, nbytes: int, unit_s: float | None) -> list[dict[str, Any]]:
    def as_json(found: Found) -> dict[str, Any]:
        return {"times_s": found.times_s, "cpu_s_per_gb": found.cpu_s_per_gb}

    first = arguments.contenders[0]
    return [
        {
            "n": arguments.workers, "ranks": arguments.ranks, "k": k, "bytes": nbytes, "mbit": arguments.mbit,
            "unit_s": unit_s,
            "ours_s": seen[first, k, nbytes].times_s, "gloo_s": seen["gloo", 0, nbytes].times_s,
            "servers_only_s": seen[SERVERS_ONLY, k, nbytes].times_s if (SERVERS_ONLY, k, nbytes) in seen else [],
            "calls": {
                name: as_json(found) for (name, of_k, size), found in seen.items()
                if size == nbytes and (of_k == k or name in (*GLOO, *ECHO))
            },
        }
        for k in arguments.servers
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1, help="of each worker machine; theory is that of machines")
    parser.add_argument("--servers", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--mbit", type=float, default=400, help="of each link, each way; 0: loopback, no namespaces")
    parser.add_argument("--mb", type=float, nargs="+", default=[64], help="sizes of the one large tensor")
    parser.add_argument("--model", default="one", help="one (large tensor), or a model known to bps placement")
    parser.add_argument("--contenders", nargs="+", choices=OURS, default=list(OURS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--repeats", type=int, default=3, help="calls of a turn; of small ones as many as make 64 MB, up to 100"
    )
    parser.add_argument("--partition-bytes", type=int, help="default: as the product chooses")
    parser.add_argument("--credit", type=int, help="bytes in flight per worker machine; default: likewise")
    parser.add_argument("--skip-servers-only", action="store_true")
    parser.add_argument("--secret", action="store_true", help="on loopback too: what ours sends is sealed")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.workers < 2:
        parser.error("--workers must be at least 2: one machine sends nothing")
    given = {"BYTEPS_PARTITION_BYTES": arguments.partition_bytes, "BYTEPS_SCHEDULING_CREDIT": arguments.credit}
    tuning = {name: str(value) for name, value in given.items() if value is not None}
    every = [counts_of(arguments.model, int(mb * (1 << 20))) for mb in arguments.mb]
    sizes = {4 * sum(counts): counts for counts in every}
    secret = {"BYTEPS_SECRET": SECRET} if arguments.secret else {}
    seen = measure(arguments, sizes, {**tuning, **secret})
    rows = []
    ranks = f" of {arguments.ranks} ranks" if arguments.ranks > 1 else ""
    for nbytes, counts in sizes.items():
        links = f"{arguments.mbit:g} Mbit/s each way" if arguments.mbit else "loopback"
        sealed = "sealed" if arguments.secret or arguments.mbit else "no secret"
        print(
            f"\nn = {arguments.workers}{ranks}, {nbytes / 1e6:.3g} MB in {len(counts)} tensors, {links}, {sealed}; "
            + (", ".join(f"{name}={value}" for name, value in tuning.items()) or "default settings")
        )
        unit_s = nbytes * 8 / (arguments.mbit * 1e6) if arguments.mbit else None  # M/B
        if unit_s:
            show_theory(arguments, seen, nbytes, unit_s)
        show_calls(arguments, seen, nbytes)
        rows += rows_of(arguments, seen, nbytes, unit_s)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
