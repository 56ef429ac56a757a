"""How long training takes to go on, or to end with an error that says why, after each kind of fault.

    python -m benchmarks.recovery [--repeat 5] [--only NAME …] [--json FILE]

Real processes, default settings (a beat every 200 ms, dead after 1 s of silence), 2 GPU machines and a CPU machine
emulated on this one; a rank is a process that trains 1.6 M parameters with torch on the CPU. Times are read from one
clock by all processes. The bounds are what this project has set itself; the peers, none of which goes on after most of
these faults, stand in docs/explanation/recovery.md. Other work of this machine shows, too: its load is printed. The
exit status is 1 if something went otherwise than it has to, or weights differ; a bound that is missed is only marked.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.recovery import ended, network, regrouped, survived
from benchmarks.recovery.launcher import UnforeseenError
from benchmarks.recovery.rows import HEADER, Row

ACTS: dict[str, Callable[[int, survived.History], list[Row]]] = {
    "server-killed": survived.server_killed,
    "all-servers-but-one-killed": survived.all_but_one_killed,
    "server-frozen": survived.server_frozen,
    "server-comes-and-goes": survived.server_comes_and_goes,
    "scheduler-killed": survived.scheduler_killed,
    "rank-killed": ended.rank_killed,
    "machine-killed": ended.machine_killed,
    "machine-frozen": ended.machine_frozen,
    "service-killed": ended.service_killed,
    "exception": ended.exception,
    "elastic-rank-killed": regrouped.rank_killed,
    "elastic-machine-killed": regrouped.machine_killed,
    "elastic-machine-preempted": regrouped.machine_preempted,
    "elastic-machine-joins": regrouped.machine_joins,
    "network-fails": network.network_fails,
    "connection-cut": network.connection_cut,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5, help="runs of each row (default 5)")
    parser.add_argument("--only", nargs="+", choices=list(ACTS), metavar="NAME", help=", ".join(ACTS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    history = survived.History()
    rows: list[Row] = []
    for name, act in ACTS.items():
        if arguments.only and name not in arguments.only:
            continue
        began_s, load = time.monotonic(), os.getloadavg()[0]
        found = act(arguments.repeat, history)
        rows += found
        for row in found:
            row.load = load, os.getloadavg()[0]
            print(row, file=sys.stderr)
        loads = f"load {load:.1f} before and {os.getloadavg()[0]:.1f} after"
        print(f"{name}: {time.monotonic() - began_s:.0f} s, {loads}", file=sys.stderr, flush=True)
    failed = ""
    try:
        history.compare()
    except UnforeseenError as error:
        failed = f"FAILED: no run without faults to compare with: {error}"
    calm = f"; a step without faults takes {history.calm_s * 1e3:.0f} ms" if history.calm_s else ""
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}{calm}")
    print(HEADER)
    for row in rows:
        print(row)
    for row in rows:
        for text in row.failures:
            print(f"FAILED: {row.title}: {text}")
    if failed:
        print(failed)
    if arguments.json:
        result = {"cores": os.cpu_count(), "calm_step_s": history.calm_s, "rows": [row.to_json() for row in rows]}
        arguments.json.write_text(json.dumps(result, indent=1))
    return int(bool(failed) or any(row.failures or row.same_bits is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
