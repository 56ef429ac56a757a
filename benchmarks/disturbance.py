"""How much a pure-Python loop in the training process loses while 1 GB of gradients is reduced in the background.

    python benchmarks/disturbance.py [--rounds 3] [--gigabytes 1] [--json FILE]

On a training machine the communication service has cores to spare; on two cores it would simply take the trainer's.
So rank 0 is pinned to one core and everything else (rank 1, the service) to another: what rank 0's loop loses is what
its own process does for the communication (GIL, threads, locks), plus what the cores share of caches and memory. A
process of no job that copies memory on the other core shows that last part alone. The peer is gloo's all-reduce with
async_op, as DDP uses it: its threads live in the training process, and so on the trainer's core; once more with these
threads moved to the other core, where ours are. Stretches of the loop beside communication and without it take turns; a
loss is that of the whole (mean) and of the typical millisecond (median). A machine that others use, too, spoils the
mean. So the CPU time is shown that the training process spends outside the loop while it communicates, as a share of
that time: it can lose no more than this to its own threads.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TENSOR_BYTES = 256 << 20
LOOP = 20_000  # about a millisecond
TITLES = {
    "ours": "ours", "gloo": "gloo, async_op", "gloo_apart": "gloo, threads apart", "copies": "unrelated copies",
}  # fmt: skip


def loop_s() -> float:
    """Seconds that the loop of pure Python takes."""
    began = time.perf_counter()
    total = 0
    for i in range(LOOP):
        total += i & 3
    return time.perf_counter() - began


# ---- one rank --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Background:
    """``start`` begins to reduce a tensor; ``done`` asks whether that is over; ``wait`` waits for it."""

    rank: int
    start: Callable[[], object]
    done: Callable[[], bool]
    wait: Callable[[], object]
    close: Callable[[], object]


def ours() -> Background:
    from byteps_py.session import open_session
    from byteps_py.tensors import DType, TensorSpec

    session = open_session()
    (slot,) = session.declare([TensorSpec("gradient", DType.FLOAT32, (TENSOR_BYTES // 4,))])
    np.frombuffer(slot.input, np.float32)[:] = 1

    def close() -> None:
        session.barrier()
        session.close()

    return Background(
        session.rank,
        lambda: session.hand_over(slot),
        lambda: session.is_done(slot),
        lambda: session.wait(slot),
        close,
    )


def gloo() -> Background:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    values = torch.ones(TENSOR_BYTES // 4)
    works: list[Any] = []

    def start() -> None:
        works[:] = [dist.all_reduce(values, async_op=True)]

    return Background(
        dist.get_rank(), start, lambda: works[0].is_completed(), lambda: works[0].wait(), dist.destroy_process_group
    )


def move_threads(core: int) -> None:
    """All of this process but the main one."""
    for task in map(int, os.listdir("/proc/self/task")):
        if task != os.getpid():
            os.sched_setaffinity(task, {core})


def rank(contender: str, repeats: int, core: int, other: int) -> None:
    """``core``: where the first rank goes; before its libraries start threads, so that these go there as well."""
    is_first = os.environ.get("BYTEPS_LOCAL_RANK", os.environ.get("LOCAL_RANK")) == "0"
    if is_first:
        os.sched_setaffinity(0, {core})
    background = {"ours": ours, "gloo": gloo, "gloo_apart": gloo}[contender]()
    beside: list[float] = []
    alone: list[float] = []
    took_s = other_cpu_s = 0.0
    for repeat in range(repeats + 1):
        if is_first and contender == "gloo_apart":
            move_threads(other)
        began, process_s, thread_s = time.perf_counter(), time.process_time(), time.thread_time()
        background.start()
        started_s = time.thread_time() - thread_s
        loops = []
        while background.rank == 0 and not background.done():
            loops.append(loop_s())
        background.wait()
        if background.rank == 0 and repeat:  # the first touches memory for the first time
            took_s += time.perf_counter() - began
            other_cpu_s += time.process_time() - process_s - (time.thread_time() - thread_s) + started_s
            beside += loops
            alone += [loop_s() for _ in loops]
    if background.rank == 0:
        print(json.dumps({"beside_s": beside, "alone_s": alone, "other": [other_cpu_s / took_s]}), flush=True)
    background.close()


# ---- the comparison --------------------------------------------------------------------------------------------------


def run(contender: str, repeats: int, cores: list[int]) -> dict[str, list[float]]:
    """One job of two ranks; what its first rank measured."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    starter = {
        "ours": ["-m", "byteps_py.launch", "--no-tag-output", "-np", "2", sys.executable],
    }.get(contender, ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port])
    rest = ["--as", contender, "--repeats", str(repeats), "--core", str(cores[0]), "--other", str(cores[1])]
    os.sched_setaffinity(0, {cores[1]})  # inherited by all that is started
    command = [sys.executable, *starter, str(Path(__file__)), *rest]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{contender} failed:\n{done.stderr}")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    measured: dict[str, list[float]] = json.loads(line)
    return measured


def copies(repeats: int, cores: list[int]) -> dict[str, list[float]]:
    """The loop on one core, a process that copies memory on the other, stopped and continued in turns."""
    program = f"import numpy as np; a = np.ones({TENSOR_BYTES // 4}, np.float32); b = a.copy()\nwhile True: b[:] = a"
    os.sched_setaffinity(0, {cores[1]})
    copier = subprocess.Popen([sys.executable, "-c", program])
    os.sched_setaffinity(0, {cores[0]})
    beside: list[float] = []
    alone: list[float] = []
    try:
        for _ in range(repeats):
            copier.send_signal(signal.SIGCONT)
            beside += [loop_s() for _ in range(100)]
            copier.send_signal(signal.SIGSTOP)
            alone += [loop_s() for _ in range(100)]
    finally:
        copier.kill()
        copier.wait()
    return {"beside_s": beside, "alone_s": alone, "other": [0.0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--as", dest="contender", help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--other", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        rank(arguments.contender, arguments.repeats, arguments.core, arguments.other)
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this needs two cores: one for the trainer, one for everything else")
    repeats = max(1, round(arguments.gigabytes * 1e9 / TENSOR_BYTES))
    seen: dict[str, dict[str, list[float]]] = {name: {"beside_s": [], "alone_s": [], "other": []} for name in TITLES}
    for _ in range(arguments.rounds):
        for name in TITLES:
            measured = copies(repeats, cores) if name == "copies" else run(name, repeats, cores)
            for where, times in measured.items():
                seen[name][where] += times
    print(f"a pure-Python loop on core {cores[0]}; all else on core {cores[1]}: {arguments.gigabytes:g} GB per round")
    heads = f"{'alone':>12}{'beside':>12}{'loss, mean':>12}{'median':>9}{'CPU elsewhere':>15}"
    print(f"{'beside it':20}{'loops':>8}{heads}")
    rows = []
    for name, title in TITLES.items():
        alone, beside = seen[name]["alone_s"], seen[name]["beside_s"]
        mean = statistics.fmean(beside) / statistics.fmean(alone) - 1
        median = statistics.median(beside) / statistics.median(alone) - 1
        cells = f"{statistics.fmean(alone) * 1e3:9.3f} ms{statistics.fmean(beside) * 1e3:9.3f} ms"
        other = statistics.median(seen[name]["other"])
        print(f"{title:20}{len(beside):8d}{cells}{mean:12.1%}{median:9.1%}{other:15.2%}")
        row = {"beside": title, "loops": len(beside), "loss_mean": mean, "loss_median": median, "other_cpu": other}
        rows.append({**row, **seen[name]})
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
