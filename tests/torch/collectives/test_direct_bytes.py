"""What each collective carries, per machine, to the byte: the table in docs/internals/collectives.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.clusters import bpslaunch

PROGRAM = Path(__file__).parents[2] / "programs" / "carry.py"
BYTES = 60_000
MACHINES, RANKS = 3, 2
OTHERS = BYTES * (MACHINES - 1) // MACHINES
#: Of each other machine's ranks a piece in int8: blocks of 256 elements, the last one filled up, with a scale.
CODED = (MACHINES - 1) * RANKS * -(-BYTES // 4 // (MACHINES * RANKS) // 256) * 260
#: What each machine sends and receives, with 3 machines of 2 ranks.
CARRIED = {
    # A piece goes once to each other machine, however many ranks it has.
    "gather": [(OTHERS, OTHERS)] * MACHINES,
    # Both ranks have something of their own for each rank of the others.
    "exchange": [(OTHERS * RANKS, OTHERS * RANKS)] * MACHINES,
    # Local ranks' tensors are summed first.
    "scatter": [(OTHERS, OTHERS)] * MACHINES,
    "coded_scatter": [(CODED, CODED)] * MACHINES,
}


@pytest.mark.parametrize("kind", CARRIED)
def test_bytes_of_a_machine(kind: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run = bpslaunch(["-np", str(RANKS), "--machines", str(MACHINES), "--report", str(report)], [PROGRAM, kind])
    assert run.returncode == 0, run.stdout + run.stderr
    members = json.loads(report.read_text())["members"]
    carried = [(m["bytes_sent"], m["bytes_received"]) for m in members if m["kind"] == "worker"]
    assert carried == CARRIED[kind]


def test_bytes_of_values_that_servers_keep(tmp_path: Path) -> None:
    """The first value as it is, both ways; then a code from each of two machines, which the other one gets."""
    report = tmp_path / "report.json"
    options = ["-np", str(RANKS), "--machines", "2", "--servers", "2", "--report", str(report)]
    run = bpslaunch(options, [PROGRAM, "coded_values"], BYTEPS_PARTITION_BYTES="16384")
    assert run.returncode == 0, run.stdout + run.stderr
    due = BYTES + -(-BYTES // 4 // 256) * 260
    for member in json.loads(report.read_text())["members"]:
        if member["kind"] == "worker":
            assert member["bytes_sent"] == due
            assert due < member["bytes_received"] < due + 1000  # clocks, and whose codes they are
