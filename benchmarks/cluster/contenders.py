"""Starts a contender on shaped hosts, every process as on a real machine, and returns the times that it measured."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster.hosts import Host
from byteps_py.placement.models import load_model

RANK = Path(__file__).with_name("rank.py")
PORT = 9700


def counts_of(model: str, nbytes: int) -> list[int]:
    """Elements of each float32 tensor: one large tensor, or a model's list."""
    if model == "one":
        return [nbytes // 4]
    return [math.prod(shape) for _, shape in load_model(model)]


def start(host: Host, arguments: Sequence[str], variables: dict[str, str], **how: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(host.command(arguments), env=environment, text=True, **how)


def run_ours(
    workers: Sequence[Host],
    servers: Sequence[Host],
    counts: Sequence[int],
    variables: dict[str, str],
    told_mbit: dict[Host, float] | None = None,
) -> list[float]:
    """``told_mbit``: link rates that hosts are told; others find out by themselves."""
    common = {
        "DMLC_PS_ROOT_URI": workers[0].address,
        "DMLC_PS_ROOT_PORT": str(PORT),
        "DMLC_NUM_WORKER": str(len(workers)),
        "DMLC_NUM_SERVER": str(len(servers)),
        "BYTEPS_LOCAL_SIZE": "1",
        "BYTEPS_SECRET": "secret of the benchmark",
        **variables,
    }
    launch = [sys.executable, "-m", "byteps_py.launch", "--no-tag-output"]
    program = [sys.executable, str(RANK), "ours", "--counts", ",".join(map(str, counts))]

    def own(host: Host, role: str) -> dict[str, str]:
        told = {"BYTEPS_LINK_MBIT": str(told_mbit[host])} if told_mbit else {}
        return {**common, **told, "DMLC_ROLE": role, "DMLC_NODE_HOST": host.address}

    services = [start(workers[0], launch, {**common, "DMLC_ROLE": "scheduler"})]
    services += [start(host, launch, own(host, "server")) for host in servers]
    ranks = []
    for index, host in enumerate(workers):
        variables = {**own(host, "worker"), "DMLC_WORKER_ID": str(index)}
        ranks.append(start(host, [*launch, *program], variables, stdout=subprocess.PIPE))
    return finish(ranks, services)


def run_gloo(workers: Sequence[Host], counts: Sequence[int]) -> list[float]:
    program = [sys.executable, str(RANK), "gloo", "--counts", ",".join(map(str, counts))]
    ranks = []
    for index, host in enumerate(workers):
        own = {
            "RANK": str(index),
            "WORLD_SIZE": str(len(workers)),
            "MASTER_ADDR": workers[0].address,
            "MASTER_PORT": str(PORT + 1),
            "GLOO_SOCKET_IFNAME": host.interface,
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns of hosts that have no names
        }
        ranks.append(start(host, program, own, stdout=subprocess.PIPE))
    return finish(ranks, [])


def finish(ranks: Sequence[subprocess.Popen[str]], services: Sequence[subprocess.Popen[str]]) -> list[float]:
    """The times that rank 0 printed. Raises SystemExit if anything failed."""
    try:
        output = ranks[0].communicate(timeout=300)[0]
        codes = [process.wait(60) for process in [*ranks, *services]]
    finally:
        for process in [*ranks, *services]:
            process.kill()
    if any(codes):
        raise SystemExit(f"a process failed: exit codes {codes}")
    times: list[float] = json.loads(output)["times_s"]
    return times
