"""Does a job on a machine with far more to do than it can lose a process that only had to wait for a processor?

    python -m benchmarks.busy_machine [--seconds 3600] [--spinners 16] [--json FILE]

Processes that do nothing but compute run beside a job of two emulated machines with two ranks each and a lent machine.
Its ranks sum eight tensors of 200 KB again and again and compare each result with the first. Any process that is taken
for dead ends it, or is reported. Printed: rounds, the longest one, the load at the end, lines that speak of a loss.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

_RANK = """
import sys, time, torch, byteps_py as bps
bps.init()
end = time.time() + float(sys.argv[1])
given = [torch.randn(50_000, generator=torch.Generator().manual_seed(i + 10 * bps.rank())) for i in range(8)]
rounds, longest_s, first, goes_on = 0, 0.0, None, True
while goes_on:
    began_s = time.time()
    handles = [bps.push_pull_async(tensor, average=False, name=f"g{i}") for i, tensor in enumerate(given)]
    results = [bps.synchronize(handle) for handle in handles]
    longest_s, rounds = max(longest_s, time.time() - began_s), rounds + 1
    first = first or [result.clone() for result in results]
    if not all(map(torch.equal, first, results)):
        raise SystemExit("a result differs from the first")
    if rounds % 20 == 0:
        goes_on = bool(bps.broadcast(torch.tensor([float(time.time() < end)]), 0, name="goes on").item())
if bps.rank() == 0:
    print("ROUNDS", rounds, longest_s, flush=True)
bps.shutdown()
"""
_OF_A_LOSS = ("lost", "given up", "nothing was heard", "can't be reached")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--spinners", type=int, default=8 * len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    spinners = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(arguments.spinners)]
    try:
        command = [sys.executable, "-m", "byteps_py.launch", "-np", "2", "--machines", "2", "--servers", "1"]
        command += [sys.executable, "-c", _RANK, str(arguments.seconds)]
        began_s = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
            lines = list(job.stdout or ())
        took_s, load = time.monotonic() - began_s, os.getloadavg()[0]
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
    losses = [line for line in lines if any(word in line for word in _OF_A_LOSS)]
    said = next((line.partition("ROUNDS ")[2].split() for line in lines if "ROUNDS " in line), ["0", "nan"])
    print("".join(losses), end="")
    print(
        f"{took_s:.0f} s at load {load:.0f} on {len(os.sched_getaffinity(0))} cores: {said[0]} rounds, the longest "
        f"{float(said[1]):.2f} s; {len(losses)} lines of a loss; exit code {job.returncode}"
    )
    if arguments.json is not None:
        facts = {"seconds": took_s, "load": load, "rounds": int(said[0]), "longest_s": float(said[1])}
        arguments.json.write_text(json.dumps({**facts, "losses": losses, "exit_code": job.returncode}, indent=2))
    return job.returncode or bool(losses)


if __name__ == "__main__":
    sys.exit(main())
