"""Goodput of rare synchronisation while machines are killed and come back.

    python -m benchmarks.local_goodput [--machines 4] [--mbit 2] [--delay-ms 100] [--kill-every 30] [--seconds 90]
        [--step-ms 100] [--contenders diloco diloco_topk decoupled decoupled_topk] [--json FILE]

Hosts are network namespaces with shaped links (root needed). One rank on each trains the GPT of examples/gpt.py in an
elastic job; a step takes ``--step-ms``, most of which it sleeps, as if a GPU computed. In the second half of each turn
a machine is killed every ``--kill-every`` seconds, all its processes with SIGKILL, another one each time, and started
again at once. "steps" are those that all ranks have made, "goodput" the share of what the same job makes without kills,
"present" the share of the time for which ranks were there at all: a process takes some seconds to start. Steps that a
rank makes are never made again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.cluster.contenders import Layout, our_commands
from benchmarks.cluster.hosts import cluster
from benchmarks.turns import Command
from byteps_py.launch.process_guard import TOKEN_VARIABLE, sweep

ROOT = Path(__file__).parent.parent
CONTENDERS = ("diloco", "diloco_topk", "decoupled", "decoupled_topk")
_LIMIT_S = 120


class Cluster:
    """The processes of an elastic job: those of each machine can be killed, and started again."""

    def __init__(self, services: list[Command], machines: list[Command], folder: Path) -> None:
        self._machines, self._folder = machines, folder
        self._token = f"local-goodput-{os.getpid()}-{folder.name}"
        self._started = [self._start(command, "service") for command in services]
        for index in range(len(machines)):
            self.start(index)

    def _start(self, command: Command, mark: str) -> subprocess.Popen[bytes]:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **command.variables, TOKEN_VARIABLE: f"{self._token}-{mark}"}
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(command.words, env=variables, stdout=log, stderr=log)

    def start(self, index: int) -> None:
        self._started.append(self._start(self._machines[index], str(index)))

    def kill(self, index: int) -> None:
        sweep(f"{self._token}-{index}")

    def close(self) -> None:
        for mark in ("service", *map(str, range(len(self._machines)))):
            sweep(f"{self._token}-{mark}")
        for process in self._started:
            process.wait(_LIMIT_S)

    def counts(self) -> list[int]:
        """How many steps each rank has made."""
        return [len(path.read_text().splitlines()) for path in self._folder.glob("steps-*")]

    def steps(self) -> list[tuple[float, float]]:
        """Of all processes of ranks: when each of their steps began and ended."""
        found = []
        for path in self._folder.glob("steps-*"):
            for line in path.read_text().splitlines():
                begun, _, ended = line.partition(" ")
                if ended:  # else it was killed as it wrote
                    found.append((float(begun), float(ended)))
        return found

    def present_s(self, since_s: float, until_s: float) -> float:
        """For how long ranks were there, from each one's first step to its last, all together."""
        total = 0.0
        for path in self._folder.glob("steps-*"):
            times = [float(line.split()[0]) for line in path.read_text().splitlines() if line]
            inside = [at for at in times if since_s <= at < until_s]
            total += max(inside) - min(inside) if inside else 0.0
        return total


def turn(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="local-goodput-"))
    rates = [arguments.mbit] * arguments.machines
    with cluster(rates, arguments.delay_ms) as hosts:
        program = ["-m", "benchmarks.local_goodput_rank", name, *map(str, (arguments.every, arguments.step_ms, folder))]
        variables = {"PYTHONPATH": str(ROOT), "BYTEPS_ELASTIC": "1", "BYTEPS_MIN_NP": str(arguments.machines // 2)}
        services, machines = our_commands(Layout(hosts), program, variables)
        job = Cluster(services, machines, folder)
        try:
            until_s = time.monotonic() + _LIMIT_S
            while sum(count > 2 * arguments.every for count in job.counts()) < len(hosts):
                if time.monotonic() > until_s:
                    raise SystemExit(f"the job did not begin:\n{(folder / 'log').read_text()[-3000:]}")
                time.sleep(0.2)
            begun_s = time.time()
            time.sleep(arguments.seconds)
            middle_s, killed = time.time(), 0
            while (now := time.time()) < middle_s + arguments.seconds:
                if now >= middle_s + arguments.kill_every * (killed + 0.5):
                    victim = 1 + killed % (arguments.machines - 1)  # the first one has the scheduler
                    job.kill(victim)
                    job.start(victim)
                    killed += 1
                time.sleep(0.05)
            ended_s = time.time()
            found = job.steps()
            present_s = job.present_s(middle_s, ended_s)
        finally:
            job.close()
    calm, stormy = (
        sum(since_s <= ended < until_s for _, ended in found)
        for since_s, until_s in ((begun_s, middle_s), (middle_s, ended_s))
    )
    shutil.rmtree(folder)
    return {
        "contender": name,
        "kills": killed,
        "steps_calm": calm,
        "steps": stormy,
        "goodput": stormy / calm,
        "present": present_s / (arguments.seconds * arguments.machines),
        "ms_calm": 1e3 * arguments.seconds * arguments.machines / calm,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=2.0, help="of each link, each way")
    parser.add_argument("--delay-ms", type=float, default=100.0)
    parser.add_argument("--every", type=int, default=30)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--kill-every", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"{arguments.machines} machines, {arguments.mbit:g} Mbit/s and {arguments.delay_ms:g} ms each way, ", end="")
    print(f"every={arguments.every}, a machine killed every {arguments.kill_every:g} s")
    print("| contender | ms a step | kills | steps | goodput | present | load |\n|---|---|---|---|---|---|---|")
    rows = []
    for name in arguments.contenders:
        row = turn(arguments, name)
        rows.append(row)
        print(
            f"| {name} | {row['ms_calm']:.0f} | {row['kills']} | {row['steps']} of {row['steps_calm']} | "
            f"{row['goodput']:.3f} | {row['present']:.3f} | {row['load']:.1f} |",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
