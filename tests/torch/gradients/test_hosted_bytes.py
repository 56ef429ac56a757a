"""The bytes that a hosted optimizer's steps carry between machines, by the services' counters: the formula of
worker/core/topology.py. Of M bytes of gradients and as many of parameters, GPU machines add g and CPU machines c:

    gradients to other machines' servers (n-1) g + n c, sums to their owners c, parameters (n-1) g + c + (n-1) c

so 2 (n-1) g + (2n+1) c in all; a CPU machine receives (n+1) and sends n times what it adds. If the states are shadowed,
CPU machines are sent the sums g as well, and the numbers of each step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.clusters import bpslaunch

from byteps_py.placement.hosted_shares import HostedOptimum
from byteps_py.placement.shares import Optimum

PROGRAM = Path(__file__).parents[2] / "programs" / "carry_hosted.py"
ELEMENTS = 1 << 18
M = 4 * ELEMENTS
PARTITION = 16 << 10
SHORT, LONG = 2, 7
#: At most, of one step: ranks compare their numbers.
NUMBERS = 2_000
#: At most, of the numbers of a partition's step, and of a rank's record of it.
STEP_BYTES, RECORD_BYTES = 300, 2_000


#: Logged when what was on its way is sent once more, and counted once more: the network's doing, not the step's.
BROKE = "broke; connecting again"
TRIES = 3


def members(machines: int, servers: int, steps: int, folder: Path, **environ: str) -> list[dict[str, Any]]:
    """The members of a run in which no connection broke."""
    report = folder / f"report{steps}.json"
    arguments = ["-np", "1", "--machines", str(machines), "--servers", str(servers), "--report", str(report)]
    for _ in range(TRIES):
        run = bpslaunch(
            arguments,
            [PROGRAM, str(ELEMENTS), str(steps)],
            BYTEPS_DIRECT_CONNECTIONS="0",
            BYTEPS_PARTITION_BYTES=str(PARTITION),
            BYTEPS_LOG_LEVEL="INFO",
            **environ,
        )
        said = run.stdout + run.stderr
        assert run.returncode == 0, said
        if BROKE not in said:
            break
    assert BROKE not in said, said
    found: list[dict[str, Any]] = json.loads(report.read_text())["members"]
    return found


def per_step(runs: list[list[dict[str, Any]]], name: str, machine: str = "") -> float:
    """Of all members, or of those of machines whose description begins with ``machine``."""
    short, long = (sum(each[name] for each in run if each["machine"].startswith(machine)) for run in runs)
    return (long - short) / (LONG - SHORT)


@pytest.mark.parametrize(
    ("machines", "servers"),
    [
        pytest.param(2, 0, marks=pytest.mark.long),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.long),
        pytest.param(3, 2, marks=pytest.mark.slow),
    ],
)
def test_bytes_of_a_step(machines: int, servers: int, tmp_path: Path) -> None:
    n = machines
    runs = [members(machines, servers, steps, tmp_path) for steps in (SHORT, LONG)]
    sent = per_step(runs, "bytes_sent")
    assert sent == per_step(runs, "bytes_received")
    cpu = round(per_step(runs, "bytes_sent", "CPU") / n / PARTITION) * PARTITION
    optimum = 0 if n == 2 and servers < n else servers * 2 * (n - 1) / (n * n + n + servers * (n - 3))
    assert cpu / M == pytest.approx(optimum, abs=2 * servers * PARTITION / M)
    formula = 2 * (n - 1) * (M - cpu) + (2 * n + 1) * cpu
    assert formula <= sent <= formula + NUMBERS
    assert (n + 1) * cpu <= per_step(runs, "bytes_received", "CPU") <= (n + 1) * cpu + NUMBERS
    # The same of all GPU machines, up to a partition: M + (n-2)/n g + c/n each.
    ours = per_step(runs, "bytes_sent", "GPU")
    assert ours == sent - per_step(runs, "bytes_sent", "CPU")
    each = [per_step(runs, "bytes_sent", f"GPU {index}") for index in range(n)]
    gpu = M - cpu
    expected = M + (n - 2) * gpu / n + cpu / n
    slack = 2 * n * PARTITION + NUMBERS if gpu else PARTITION + NUMBERS
    assert all(abs(carried - expected) <= slack + gpu * 0.05 for carried in each), (each, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("machines", "servers"), [pytest.param(2, 1, marks=pytest.mark.long), (3, 2)])
def test_bytes_of_a_step_with_states_on_each_machine(machines: int, servers: int, tmp_path: Path) -> None:
    """A step carries what an all-reduce does, see byteps_py/placement/shares.py: parameters are not sent."""
    n = machines
    runs = [members(n, servers, steps, tmp_path, BYTEPS_HOSTED_STATES="machine") for steps in (SHORT, LONG)]
    best = Optimum(n, servers)
    assert per_step(runs, "bytes_sent") == per_step(runs, "bytes_received")
    cpu = per_step(runs, "bytes_received", "CPU")
    assert cpu / M == pytest.approx(n * servers * best.cpu_weight / best.interval, abs=2 * servers * n * PARTITION / M)
    each = [per_step(runs, "bytes_sent", f"GPU {index}") for index in range(n)]
    slack = 2 * n * PARTITION + NUMBERS
    assert all(carried <= float(best.time) * M + slack for carried in each), (each, float(best.time) * M)


@pytest.mark.parametrize(
    ("machines", "servers"),
    [
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(3, 2, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.long),
        pytest.param(3, 1, marks=pytest.mark.long),
    ],
)
def test_bytes_of_a_shadowed_step(machines: int, servers: int, tmp_path: Path) -> None:
    n, k = machines, servers
    runs = [members(n, k, steps, tmp_path, BYTEPS_SHADOW="1") for steps in (SHORT, LONG)]
    sent = per_step(runs, "bytes_sent")
    cpu = round(per_step(runs, "bytes_sent", "CPU") / n / PARTITION) * PARTITION
    optimum = (k * (2 * n - 1) - n) / (n * n + k * (n - 2))
    assert cpu / M == pytest.approx(optimum, abs=2 * k * PARTITION / M)
    gpu = M - cpu
    formula = 2 * (n - 1) * gpu + (2 * n + 1) * cpu + gpu
    told = M // PARTITION * STEP_BYTES + n * RECORD_BYTES
    assert formula <= sent <= formula + NUMBERS + told, [
        sorted((each["machine"], each["bytes_sent"], each["bytes_received"]) for each in run) for run in runs
    ]
    received = per_step(runs, "bytes_received", "CPU")
    assert (n + 1) * cpu + gpu <= received <= (n + 1) * cpu + gpu + NUMBERS + told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machines", "servers", "copies"),
    [
        pytest.param(3, 1, 1, marks=pytest.mark.long),
        pytest.param(4, 2, 1, marks=pytest.mark.long),
        pytest.param(3, 0, 1, marks=pytest.mark.long),
        pytest.param(2, 2, 2, marks=pytest.mark.long),
        pytest.param(3, 1, 2, marks=pytest.mark.long),
    ],
)
def test_bytes_of_a_shadowed_step_with_states_on_each_machine(
    machines: int, servers: int, copies: int, tmp_path: Path
) -> None:
    """The busiest link carries what the formula says: that of a CPU machine, or without one that of any machine."""
    n, k = machines, servers
    environ = {"BYTEPS_SHADOW": "1", "BYTEPS_HOSTED_STATES": "machine", "BYTEPS_SHADOW_COPIES": str(copies)}
    runs = [members(n, k, steps, tmp_path, **environ) for steps in (SHORT, LONG)]
    carried = per_step(runs, "bytes_received", "CPU") / k if k else per_step(runs, "bytes_sent") / n
    best = HostedOptimum(n, k, is_sharded=False, is_shadowed=True, copies=copies)
    told = copies * (M // PARTITION * STEP_BYTES + n * RECORD_BYTES)
    assert carried / M == pytest.approx(float(best.time), abs=(2 * n * PARTITION + NUMBERS + told) / M)
