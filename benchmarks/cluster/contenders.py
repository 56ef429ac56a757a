"""What a job on hosts consists of: the processes of each contender, started as on a real machine.

A job of ours is a scheduler, a summation service on each CPU machine, and on each GPU machine bpslaunch with its
services and ranks. gloo's ranks are processes of their own.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cluster.hosts import Host
from benchmarks.turns import Command, Job
from byteps_py.launch.process_plan import free_port
from byteps_py.placement.placement_plan import load_model

SECRET = "secret of the benchmark"
_LAUNCH = (sys.executable, "-m", "byteps_py.launch", "--no-tag-output")
_LIMIT_S = 300


@dataclass(frozen=True)
class Layout:
    """``ranks`` of each worker. ``told_mbit``: link rates that hosts are told; others find out by themselves."""

    workers: Sequence[Host]
    servers: Sequence[Host] = ()
    ranks: int = 1
    told_mbit: Mapping[Host, float] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.workers) * self.ranks


def counts_of(model: str, nbytes: int) -> list[int]:
    """Elements of each float32 tensor: one large tensor, or a model's list."""
    if model == "one":
        return [max(1, nbytes // 4)]
    return [math.prod(shape) for _, shape in load_model(model)]


def our_commands(
    layout: Layout, program: Sequence[str], variables: Mapping[str, str] | None = None
) -> tuple[list[Command], list[Command]]:
    """Of the services; of the machines' launchers, whose ranks run ``program``. Links between hosts have a secret,
    without which no process listens there. Loopback has none, unless ``variables`` do."""
    workers, servers = layout.workers, layout.servers
    port = free_port()
    common = {
        "DMLC_PS_ROOT_URI": workers[0].address,
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": str(len(workers)),
        "DMLC_NUM_SERVER": str(len(servers)),
        "BYTEPS_JOB_ID": f"benchmark-{port}",
        "BYTEPS_LOCAL_SIZE": str(layout.ranks),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **({} if workers[0].is_loopback else {"BYTEPS_SECRET": SECRET}),
        **(variables or {}),
    }

    def own(host: Host, role: str) -> dict[str, str]:
        found = {**common, "DMLC_ROLE": role, "DMLC_NODE_HOST": host.address}
        if host in layout.told_mbit:
            found["BYTEPS_LINK_MBIT"] = str(layout.told_mbit[host])
        if host.is_loopback:
            found["BYTEPS_MACHINE_ID"] = f"m{host.index}"
        return found

    services = [Command(workers[0].command(_LAUNCH), own(workers[0], "scheduler"))]
    services += [Command(host.command(_LAUNCH), own(host, "server")) for host in servers]
    machines = [
        Command(
            host.command([*_LAUNCH, sys.executable, *program]), {**own(host, "worker"), "DMLC_WORKER_ID": str(index)}
        )
        for index, host in enumerate(workers)
    ]
    return services, machines


def torch_commands(layout: Layout, program: Sequence[str], variables: Mapping[str, str] | None = None) -> list[Command]:
    """Of ranks without services, such as gloo's."""
    port = free_port()
    places = [(host, local) for host in layout.workers for local in range(layout.ranks)]
    return [
        Command(
            host.command([sys.executable, *program]),
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(layout.size),
                "MASTER_ADDR": layout.workers[0].address,
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": host.interface,
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns of hosts that have no names
                **(variables or {}),
            },
        )
        for rank, (host, local) in enumerate(places)
    ]


def our_job(name: str, layout: Layout, program: Sequence[str], variables: Mapping[str, str] | None = None) -> Job:
    services, machines = our_commands(layout, program, variables)
    return Job(name, layout.size, [*services, *machines])


def torch_job(name: str, layout: Layout, program: Sequence[str], variables: Mapping[str, str] | None = None) -> Job:
    return Job(name, layout.size, torch_commands(layout, program, variables))


def start(command: Command, **how: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **command.variables}
    return subprocess.Popen(command.words, env=environment, text=True, **how)


def run(ranks: Sequence[Command], services: Sequence[Command] = ()) -> str:
    """Run a job to its end; what rank 0 printed. Raises SystemExit if anything failed."""
    served = [start(command) for command in services]
    processes = [start(command, stdout=subprocess.PIPE) for command in ranks]
    try:
        output: str = processes[0].communicate(timeout=_LIMIT_S)[0]
        codes = [process.wait(60) for process in [*processes, *served]]
    finally:
        for process in [*processes, *served]:
            process.kill()
    if any(codes):
        raise SystemExit(f"a process failed: exit codes {codes}")
    return output
