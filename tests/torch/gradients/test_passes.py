"""How often a gradient's bytes are read and written between backward() and the optimizer, counted where it is done.

In every process, the bytes that kernels and ctypes.memmove move (programs/passes/sitecustomize.py); in the ranks, each
operator of torch that touches gradients, autograd's own and the optimizer's among them. Accumulating right into
the shared memory instead of handing over would read it, too, and need it zeroed first: a pass more.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.clusters import ROOT, bpslaunch

PROGRAM = ROOT / "tests/programs/passes/trains.py"
STEPS = 3
WHOLE = (STEPS + 1) * (4 << 20)  # bytes of one rank's gradients, over the rounds

Bytes = tuple[int, int]  # read, written


def train(options: Sequence[str], folder: Path) -> tuple[list[dict[str, object]], dict[str, list[Bytes]]]:
    """(what each rank says, the bytes that the processes of each role moved)"""
    done = bpslaunch(options, [PROGRAM, str(STEPS)], PASSES_FOLDER=str(folder), PYTHONPATH=str(PROGRAM.parent))
    assert done.returncode == 0, done.stderr
    moved: dict[str, list[Bytes]] = {}
    for path in folder.iterdir():
        counts = json.loads(path.read_text())
        moved.setdefault(counts["role"], []).append((counts.get("read", 0), counts.get("written", 0)))
    return [json.loads(line) for line in done.stdout.splitlines()], moved


def total(moved: list[Bytes]) -> Bytes:
    return sum(read for read, _ in moved), sum(written for _, written in moved)


@pytest.mark.parametrize(
    ("options", "copied_by", "workers", "servers"),
    [
        # The sum reads every rank's gradient and writes every rank's result, in one pass.
        pytest.param(["-np", "2"], "aten::_foreach_copy_", [(2 * WHOLE, 2 * WHOLE)], (0, 0), marks=pytest.mark.slow),
        # The rank's gradient is the machine's contribution as it lies; the answer is written once more, to the rank.
        # A server reads both contributions and writes one result; those on the two GPU machines, with a quarter of
        # the tensor each, another one to shared memory.
        pytest.param(
            ["-np", "1", "--machines", "2", "--servers", "1"],
            "aten::copy_",  # in chunks
            [(WHOLE, WHOLE), (WHOLE, WHOLE)],
            (2 * WHOLE, WHOLE + WHOLE // 2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one machine", "two machines"],
)
def test_a_gradient_is_moved_no_more_often_than_it_must(
    options: list[str], copied_by: str, workers: list[Bytes], servers: Bytes, tmp_path: Path
) -> None:
    ranks, moved = train(options, tmp_path)
    assert len(ranks) == 2
    for rank in ranks:
        # autograd's write, the hand-over, the optimizer's reading of the result where it lies
        assert rank["operators"] == {"aten::mul": STEPS, copied_by: STEPS, "aten::add_": STEPS}
        assert rank["exact"] is True
        assert rank["in_shared_memory"] is True
    assert moved["worker"] == workers
    assert total(moved.get("server", [])) == servers
    assert total(moved["rank"]) == (0, 0)
