"""Sums of float32 tensors over the ranks of one machine: this project beside gloo and Open MPI.

    python benchmarks/reduction.py [--ranks 2 4] [--rounds 3] [--quick] [--json FILE]

The contenders take turns, round after round, each in fresh processes; a figure is the median over the rounds of
the median call. Open MPI takes part if mpirun and mpi4py are there, not bound to cores: as it comes, and with an
allocator that keeps memory that is freed, as the others have, since in large sums it pays for fresh pages in each call.
Beside the smallest size stands what two wake-ups cost here (wakeups.py), measured in the same rounds. A last table
shows CPU seconds per GB in each of this project's processes, on one machine and on two.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from wakeups import floors

RANK = Path(__file__).with_name("reduction_rank.py")
SIZES = [4, 1 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
QUICK = [4, 64 << 10, 4 << 20, 64 << 20]
TITLES = {
    "arena": "ours, in the arena",
    "tensor": "ours, any tensor by name",
    "backend": "ours, torch.distributed",
    "gloo": "gloo",
    "mpi": "Open MPI",
    "mpi_keeps": "Open MPI, keeps memory",
}


KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def has_open_mpi() -> bool:
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        return False
    return shutil.which("mpirun") is not None


def run(contender: str, ranks: int, sizes: list[int], seconds: float, launcher: list[str]) -> list[dict[str, Any]]:
    """One job; returns rank 0's lines."""
    way = contender.removesuffix("_keeps")
    program = [sys.executable, str(RANK), way, "--seconds", str(seconds), "--sizes", *map(str, sizes)]
    environment = {**os.environ, **({} if contender == "mpi" else KEEPS_MEMORY), "OMP_NUM_THREADS": "1"}
    if way == "mpi":
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(ranks), *program]
    elif contender in ("gloo", "backend"):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port",
            str(free_port()), *program[1:],
        ]  # fmt: skip
    else:
        command = [sys.executable, "-m", "byteps_py.launch", "--no-tag-output", "-np", str(ranks), *launcher, *program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{contender} with {ranks} ranks failed:\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def compare(ranks: int, sizes: list[int], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """One row per size: seconds of each contender, median and spread (largest over smallest round)."""
    contenders = ["arena", "tensor", "backend", "gloo", *(["mpi", "mpi_keeps"] if has_open_mpi() else [])]
    seen: dict[tuple[str, int], list[float]] = defaultdict(list)
    waking: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for title, seconds_ in floors().items():
            waking[title].append(seconds_)
        for contender in contenders:
            for line in run(contender, ranks, sizes, seconds, []):
                seen[contender, line["bytes"]].append(line["median_s"])
    rows = []
    for nbytes in sizes:
        row: dict[str, Any] = {"ranks": ranks, "bytes": nbytes}
        row["floors_s"] = {title: statistics.median(times) for title, times in waking.items()}
        for contender in contenders:
            times = seen[contender, nbytes]
            row[contender] = {"median_s": statistics.median(times), "spread": max(times) / min(times)}
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    contenders = [name for name in TITLES if name in rows[0]]
    print(f"\n{rows[0]['ranks']} ranks on one machine; time of one sum, (spread over the rounds), GB/s of tensor")
    print("     bytes" + "".join(f"{TITLES[name]:>30}" for name in contenders))
    for row in rows:
        cells = []
        for name in contenders:
            seconds, spread = row[name]["median_s"], row[name]["spread"]
            cells.append(f"{seconds * 1e6:12.0f} µs (×{spread:4.2f}) {row['bytes'] / seconds / 1e9:5.2f}")
        print(f"{row['bytes']:10d}" + "".join(f"{cell:>30}" for cell in cells))
    smallest = rows[0]["arena"]["median_s"]
    for title, seconds in rows[0]["floors_s"].items():
        print(f"a bare round trip, {title}: {seconds * 1e6:.1f} µs; ours is {smallest / seconds:.1f} times that")


def cpu_per_gb(seconds: float) -> list[dict[str, Any]]:
    """CPU seconds per GB of tensor, by process: one machine of 2 ranks; 2 machines of 1 rank and a CPU server."""
    rows = []
    nbytes = 16 << 20
    for title, ranks, launcher in (
        ("1 machine × 2 ranks", 2, []),
        ("2 machines × 1 rank, k = 1", 1, ["--machines", "2", "--servers", "1"]),
    ):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            (line,) = run("arena", ranks, [nbytes], seconds, [*launcher, "--report", str(report)])
            members = json.loads(report.read_text())["members"]
        repeats = int(min(1000, max(4, seconds * 1e9 / (nbytes + 1e6)))) + 3
        reduced_gb = repeats * nbytes / 1e9
        rows.append({"layout": title, "process": "rank 0", "cpu_s_per_gb": line["rank_cpu_s"] / (nbytes / 1e9)})
        for member in members:
            share = member["share"] if member["kind"] == "server" else 1.0
            if share:
                name = f"{'SS' if member['kind'] == 'server' else 'CS'} on {member['machine_id']}"
                # start-up (loading kernels) is in it: the longer the run, the smaller its part
                rows.append({"layout": title, "process": name, "cpu_s_per_gb": member["cpu_s"] / (reduced_gb * share)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not has_open_mpi():
        print("Open MPI is left out: it needs mpirun and mpi4py")
    sizes, seconds = (QUICK, 0.3) if arguments.quick else (SIZES, 1.0)
    rows = []
    for ranks in arguments.ranks:
        rows.append(compare(ranks, sizes, arguments.rounds, seconds))
        show(rows[-1])
    cpu = cpu_per_gb(2.0 if arguments.quick else 8.0)
    print("\nCPU seconds per GB of tensor summed (a server's: per GB of its share; services' start-up included)")
    for row in cpu:
        print(f"{row['layout']:28} {row['process']:12} {row['cpu_s_per_gb']:6.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"reductions": rows, "cpu": cpu}, indent=1))


if __name__ == "__main__":
    main()
