"""The bytes that tensor and context parallelism carry between two machines, by the services' counters: the formulas of
docs/parallelism.md. Without direct connections, so that the services carry everything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.clusters import bpslaunch

from byteps_py.parallel.context.balance import gathered_bytes
from byteps_py.parallel.mesh.formulas import tensor_parallel_words

PROGRAM = Path(__file__).parent / "programs" / "carry_parallel.py"
BATCH, SEQUENCE, WIDTH, KV_HEADS, HEAD_DIM, FLOAT32 = 2, 64, 256, 4, 32, 4
RANKS = 2
#: A layer has two pairs of column and row; the program has one.
PAIR = tensor_parallel_words(BATCH, SEQUENCE, WIDTH, RANKS) * FLOAT32 // 2
GATHERED = BATCH * gathered_bytes(SEQUENCE, RANKS, KV_HEADS, HEAD_DIM, FLOAT32)
#: With which the ranks say that they do not connect to each other.
ADDRESSES = 2 * 512
CARRIED = {"tensor": PAIR, "sequence": PAIR, "context": 2 * GATHERED}  # back: the gradients


@pytest.mark.parametrize("case", CARRIED)
def test_bytes_of_a_machine(case: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["-np", "1", "--machines", str(RANKS), "--report", str(report)]
    run = bpslaunch(arguments, [PROGRAM, case], BYTEPS_DIRECT_CONNECTIONS="0")
    assert run.returncode == 0, run.stdout + run.stderr
    members = json.loads(report.read_text())["members"]
    sent = sum(member["bytes_sent"] for member in members)
    assert sent == RANKS * (CARRIED[case] + ADDRESSES), members
