"""The bytes that tensor and context parallelism carry between two machines, by the services' counters: the formulas of
docs/howto/parallelism.md. Without direct connections, so that the services carry everything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.clusters import bpslaunch
from support.paper_formulas import pipeline_hop_words, tensor_parallel_words

from byteps_py.parallel.context.head_tail import gathered_bytes

PROGRAM = Path(__file__).parents[1] / "programs" / "carry_parallel.py"
BATCH, SEQUENCE, WIDTH, KV_HEADS, HEAD_DIM, FLOAT32 = 2, 64, 256, 4, 32, 4
RANKS, MICRO_BATCHES = 2, 4
#: At most so many bytes describe a value between stages, and let ranks agree on a pipeline.
DESCRIPTION, AGREEMENT = 1024, 16_384
#: A layer has two pairs of column and row; the program has one.
PAIR = tensor_parallel_words(BATCH, SEQUENCE, WIDTH, RANKS) * FLOAT32 // 2
GATHERED = BATCH * gathered_bytes(SEQUENCE, RANKS, KV_HEADS, HEAD_DIM, FLOAT32)
#: With which the ranks say that they do not connect to each other.
ADDRESSES = 2 * 512
CARRIED = {"tensor": PAIR, "sequence": PAIR, "context": 2 * GATHERED}  # back: the gradients


def bytes_sent(case: str, folder: Path) -> int:
    """By all services of the job."""
    report = folder / "report.json"
    arguments = ["-np", "1", "--machines", str(RANKS), "--report", str(report)]
    run = bpslaunch(arguments, [PROGRAM, case], BYTEPS_DIRECT_CONNECTIONS="0")
    assert run.returncode == 0, run.stdout + run.stderr
    return sum(member["bytes_sent"] for member in json.loads(report.read_text())["members"])


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case == "tensor" else case for case in CARRIED]
)
def test_bytes_of_a_machine(case: str, tmp_path: Path) -> None:
    assert bytes_sent(case, tmp_path) == RANKS * (CARRIED[case] + ADDRESSES)


def test_bytes_of_a_pipeline(tmp_path: Path) -> None:
    """Activations there and gradients back; beside them, each message is described, and ranks agree on the pipeline."""
    carried = 2 * MICRO_BATCHES * pipeline_hop_words(BATCH, SEQUENCE, WIDTH) * FLOAT32
    sent = bytes_sent("pipeline", tmp_path)
    assert carried <= sent <= carried + 2 * MICRO_BATCHES * DESCRIPTION + AGREEMENT
