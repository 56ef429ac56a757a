"""What the services carry in Horovod's operations, per machine, to the byte: the table in docs/reference/horovod.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.clusters import bpslaunch

PROGRAM = Path(__file__).parents[2] / "programs" / "carry_horovod.py"
MACHINES, RANKS = 2, 2
BYTES = 3000 * 16
OTHER = MACHINES - 1
HEADERS = OTHER * RANKS * 1024
#: Of each round in which the ranks exchange addresses, or say that they are connected.
ADDRESSES = OTHER * RANKS * 512
#: Out of each machine, and in.
CARRIED = {
    "allgather": OTHER * RANKS * BYTES + HEADERS,
    "small allgather": HEADERS,
    "alltoall": RANKS * BYTES * OTHER // MACHINES + OTHER * RANKS * RANKS * 128,
    "reducescatter": BYTES * OTHER // MACHINES,
}


def carried(kind: str, tmp_path: Path, connects: bool) -> list[tuple[int, int]]:
    """(sent, received) bytes of each machine's service."""
    report = tmp_path / "report.json"
    options = ["-np", str(RANKS), "--machines", str(MACHINES), "--report", str(report)]
    run = bpslaunch(options, [PROGRAM, kind], BYTEPS_DIRECT_CONNECTIONS=str(int(connects)))
    assert run.returncode == 0, run.stdout + run.stderr
    members = json.loads(report.read_text())["members"]
    addresses = ADDRESSES * (2 if connects else 1)
    return [(m["bytes_sent"] - addresses, m["bytes_received"] - addresses) for m in members if m["kind"] == "worker"]


@pytest.mark.parametrize("kind", CARRIED)
def test_bytes_of_a_machine(kind: str, tmp_path: Path) -> None:
    assert carried(kind, tmp_path, connects=False) == [(CARRIED[kind], CARRIED[kind])] * MACHINES


@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_gathers_need_no_service(kind: str, tmp_path: Path) -> None:
    assert carried(kind, tmp_path, connects=True) == [(0, 0)] * MACHINES
