"""Resident memory of each process while 1 GB of gradients goes through, on one machine and across two with a server;
and what a partition of 4 MB costs each service in processor time and context switches.

    python benchmarks/memory.py [--gigabytes 1] [--rounds 6] [--json FILE]

All gradients are on their way at once, in tensors of 16 MB. Every process of the job is read from /proc (smaps_rollup:
a page that several processes map is shared out between them), once when the cluster stands and then until the end; a
figure is the largest that was seen. Held against two limits: what a machine shares must not exceed one result per
rank and two contributions per tensor, plus the credit twice (answers that may come, and those that came and wait for
the processor); and what is a service's own must not grow by more than the partitions in flight and a constant. The peer
is arithmetic: gloo reduces in place and needs none of it, and stores no round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TENSOR_BYTES = 16 << 20
CONSTANT = 8 << 20  # objects that stand for messages, what the allocator keeps
FIELDS = ("Rss", "Pss", "Pss_Anon", "Pss_Shmem")
LAYOUTS = {
    "1 machine, 2 ranks": (1, 2, ["-np", "2"]),
    "2 machines, 1 rank each, 1 server": (2, 1, ["-np", "1", "--machines", "2", "--servers", "1"]),
    "2 machines, 2 ranks each, 1 server": (2, 2, ["-np", "2", "--machines", "2", "--servers", "1"]),
}
#: Modules are named on a service's command line; a launcher's line names its job's command too.
ROLES = {"byteps_py.worker": "CS", "byteps_py.server": "SS", "byteps_py.scheduler": "scheduler", "--as-rank": "rank"}

Memory = dict[str, int]  # field → bytes


class Work(NamedTuple):
    cpu_s: float
    switches: int


def rank(tensors: int, rounds: int) -> None:
    from byteps_py.session import open_session
    from byteps_py.tensors import DType, TensorSpec

    session = open_session()
    (small,) = session.declare([TensorSpec("first", DType.FLOAT32, (1024,))])  # loads what is loaded once
    session.hand_over(small)
    session.wait(small)
    session.barrier()
    if session.rank == 0:
        print("started", flush=True)
        sys.stdin.readline()
    session.barrier()
    specs = [TensorSpec(f"gradient {i}", DType.FLOAT32, (TENSOR_BYTES // 4,)) for i in range(tensors)]
    slots = session.declare(specs)
    for _ in range(rounds):
        for slot in slots:
            np.frombuffer(slot.input, np.float32)[:] = 1
            session.hand_over(slot)
        for slot in slots:
            session.wait(slot)
    session.barrier()
    session.close()


def role_of(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    if "byteps_py.launch" in words:
        return "launcher"
    return next((role for word, role in ROLES.items() if word in words), "other")


def job_of(launcher: int) -> list[int]:
    """The launcher's process and all below it."""
    found = [launcher]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


def read(pid: int) -> Memory:
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return {words[0][:-1]: int(words[1]) << 10 for words in lines if words[0][:-1] in FIELDS}


def used(pid: int) -> Work:
    """So far, by all its threads that are there."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    lines = [line for task in Path(f"/proc/{pid}/task").glob("*/status") for line in task.read_text().splitlines()]
    return Work(cpu_s, sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line))


def sample(launcher: int) -> dict[int, tuple[str, Memory, Work]]:
    seen = {}
    for pid in job_of(launcher):
        try:
            seen[pid] = role_of(pid), read(pid), used(pid)
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
    return seen


def run(
    launcher: list[str], tensors: int, rounds: int
) -> tuple[dict[int, tuple[str, Memory, Work]], dict[int, Memory], dict[int, Work], int]:
    """(each process when the cluster stands, the largest of each figure after that, what it had done when it was seen
    last, the largest sum of shared memory at one time)."""
    program = [sys.executable, __file__, "--as-rank", "--tensors", str(tensors), "--rounds", str(rounds)]
    command = [sys.executable, "-m", "byteps_py.launch", "--no-tag-output", *launcher, *program]
    job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert job.stdin is not None
    assert job.stdout is not None
    if job.stdout.readline().strip() != "started":
        raise SystemExit(f"the job did not start: {' '.join(command)}")
    before = sample(job.pid)
    job.stdin.write("\n")
    job.stdin.flush()
    peak: dict[int, Memory] = defaultdict(lambda: dict.fromkeys(FIELDS, 0))
    done: dict[int, Work] = {}
    shared = 0
    while job.poll() is None:
        now = sample(job.pid)
        shared = max(shared, sum(memory["Pss_Shmem"] for _, memory, _ in now.values()))
        for pid, (_, memory, work) in now.items():
            done[pid] = work
            for field, nbytes in memory.items():
                peak[pid][field] = max(peak[pid][field], nbytes)
        time.sleep(0.05)
    if job.returncode:
        raise SystemExit(f"the job failed with {job.returncode}: {' '.join(command)}")
    return before, peak, done, shared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tensors", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        rank(arguments.tensors, arguments.rounds)
        return
    from byteps_py.config import tuning
    from byteps_py.config.settings import Settings

    settings = Settings.from_env()
    tensors = max(1, round(arguments.gigabytes * 1e9 / TENSOR_BYTES))
    whole = tensors * TENSOR_BYTES
    results = []
    for title, (machines, ranks, launcher) in LAYOUTS.items():
        # Loopback is so fast that partitions are as large as they may be.
        credit = settings.credit_bytes or tuning.credit_bytes(settings.max_partition_bytes, machines, is_shared=True)
        before, peak, done, shared = run(launcher, tensors, arguments.rounds)
        partitions = whole // settings.max_partition_bytes * arguments.rounds
        print(f"\n{title}: {whole / 1e6:.0f} MB of gradients per rank, credit {credit / 1e6:.0f} MB")
        print("MB, largest seen; CPU ms and context switches for each partition of the model")
        heads = (*FIELDS, "own, idle", "own, grown", "CPU ms", "switches")
        print(f"{'process':12}" + "".join(f"{head:>12}" for head in heads))
        rows = []
        for pid, (role, idle, work) in before.items():
            if role in ("launcher", "other"):
                continue
            row: dict[str, Any] = {"process": role, "idle": idle["Pss_Anon"]}
            row["grown"] = peak[pid]["Pss_Anon"] - idle["Pss_Anon"]
            row["cpu_ms"] = (done[pid].cpu_s - work.cpu_s) * 1000 / partitions
            row["switches"] = (done[pid].switches - work.switches) / partitions
            row |= {field: peak[pid][field] for field in FIELDS}
            cells = [*(peak[pid][field] for field in FIELDS), idle["Pss_Anon"], row["grown"]]
            line = "".join(f"{nbytes / 1e6:12.1f}" for nbytes in cells)
            print(f"{role:12}{line}{row['cpu_ms']:12.2f}{row['switches']:12.1f}")
            rows.append(row)
        limit = machines * (ranks * whole + (2 * (whole + credit) if machines > 1 else 0))
        per_machine = whole * machines
        print(f"shared: {shared / per_machine:.2f} times the gradients per machine; limit {limit / per_machine:.2f}")
        flight = machines * credit + CONSTANT
        for row in rows:
            if row["process"] in ("CS", "SS"):
                verdict = "within" if row["grown"] <= flight else "above"
                print(f"{row['process']} grew by {row['grown'] / 1e6:.1f} MB: {verdict} {flight / 1e6:.0f} MB")
        results.append({"layout": title, "gradients": whole, "processes": rows, "shared": shared, "limit": limit})
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
