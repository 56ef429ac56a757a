"""The demo that ``make demo`` runs: it trains one model three times on emulated machines, with 2, 0 and 1 CPU machines.

Two worker machines of two ranks each run examples/digits.py with k summation servers on CPU machines, for k = 2, 0 and
1. All processes are separate. The weights at the end must be the same, bit for bit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from byteps_py.placement.shares import Optimum

MACHINES = 2
RANKS_PER_MACHINE = 2
GOAL = 0.97
HERE = Path(__file__).parent


def run(servers: int, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """One training run with ``servers`` CPU machines. Returns its outcome and the scheduler's report."""
    outcome, report = folder / f"outcome-{servers}.json", folder / f"report-{servers}.json"
    began = time.perf_counter()
    print(f"── {MACHINES} worker machines × {RANKS_PER_MACHINE} ranks, k = {servers} CPU servers", flush=True)
    command = [
        sys.executable, "-m", "byteps_py.launch", "-np", str(RANKS_PER_MACHINE), "--machines", str(MACHINES),
        "--servers", str(servers), "--partition-bytes", "262144", "--report", str(report),
        sys.executable, str(HERE / "digits.py"), "--json", str(outcome),
    ]  # fmt: skip
    code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(f"the run with k = {servers} failed: bpslaunch ended with exit code {code}")
    print(f"   {time.perf_counter() - began:.1f} s from start to end\n", flush=True)
    return json.loads(outcome.read_text()), json.loads(report.read_text())


def show_shares(servers: int, report: dict[str, Any]) -> None:
    """Print what each summation server carried, and its share by the formula."""
    optimum = Optimum(MACHINES, servers)
    holders = [m for m in report["members"] if m["kind"] == "server" and m["bytes_summed"]]
    holders.sort(key=lambda m: (not m["machine"].startswith("CPU"), m["machine_id"]))  # in the formula's order
    total = sum(m["bytes_summed"] for m in holders) or 1
    print(f"   server                   bytes summed   share  formula (n = {MACHINES}, k = {servers})")
    for member, weight in zip(holders, optimum.server_weights, strict=True):
        share = member["bytes_summed"] / total
        name = f"{member['machine_id']} ({member['machine'].split()[0]} machine)"
        print(f"   {name:22} {member['bytes_summed'] / 1e6:11.1f} MB  {share:6.1%}  {weight / optimum.interval:6.1%}")
    print()


def main() -> None:
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        for servers in (2, 0, 1):
            outcomes[servers], report = run(servers, Path(folder))
            show_shares(servers, report)
    print("k   test accuracy   images/s   one reduction   weights")
    for servers, outcome in outcomes.items():
        print(
            f"{servers}   {outcome['accuracy']:13.2%}   {outcome['images_per_s']:8.0f}   "
            f"{outcome['reduction_s'] * 1e3:10.1f} ms   {outcome['weights']}"
        )
    if len({outcome["weights"] for outcome in outcomes.values()}) != 1:
        raise SystemExit("the weights differ: the determinism contract is broken")
    if min(outcome["accuracy"] for outcome in outcomes.values()) < GOAL:
        raise SystemExit(f"the accuracy is below {GOAL:.0%}")
    print("\nThe weights are the same bit for bit, whatever machines did the sums.")


if __name__ == "__main__":
    main()
