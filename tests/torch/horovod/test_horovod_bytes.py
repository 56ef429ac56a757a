"""What Horovod's operations carry, per machine, to the byte: the table in docs/reference/horovod.md."""

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
#: With which the ranks connect to each other.
ADDRESSES = OTHER * RANKS * 2 * 512
#: Out of each machine, and in.
CARRIED = {
    "allgather": OTHER * RANKS * BYTES + HEADERS,
    "small allgather": HEADERS,
    "alltoall": RANKS * BYTES * OTHER // MACHINES + OTHER * RANKS * RANKS * 128,
    "reducescatter": BYTES * OTHER // MACHINES,
}


@pytest.mark.parametrize("kind", CARRIED)
def test_bytes_of_a_machine(kind: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run = bpslaunch(["-np", str(RANKS), "--machines", str(MACHINES), "--report", str(report)], [PROGRAM, kind])
    assert run.returncode == 0, run.stdout + run.stderr
    members = json.loads(report.read_text())["members"]
    carried = [(m["bytes_sent"] - ADDRESSES, m["bytes_received"] - ADDRESSES) for m in members if m["kind"] == "worker"]
    assert carried == [(CARRIED[kind], CARRIED[kind])] * MACHINES
