"""Planted errors of two real ranks are found and named (programs/numerics.py)."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from support.breaking import command
from support.clusters import ROOT
from support.documents import Page, at_own_places, commands_of

from byteps_py.cli.__main__ import main
from byteps_py.tools.numerics import compare

PROGRAM = str(ROOT / "tests" / "programs" / "numerics.py")
#: (reference, run, the beginning of what is said)
PLANTED = [
    (
        "tp_reference",
        "tp_forward",
        "step 1, micro-batch 1, forward, 1.down output (row-parallel all-reduce over tp), rank 1 (tp 1), differs along "
        "tp: 192 of 192 elements differ, max ",
    ),
    (
        "tp_reference",
        "tp_backward",
        "step 0, micro-batch 1, backward, 0.up grad_input (column-parallel all-reduce over tp), ranks 0-1, wrong on "
        "all ranks along tp: 192 of 192 elements differ, max ",
    ),
    (
        "dp_reference",
        "dp_update",
        "step 1, reduction, 1.up weight, rank 1 (dp 1), differs along dp: 1024 of 1024 elements differ, max ",
    ),
    (
        "dp_reference_digests",
        "dp_update",
        "step 1, reduction, 1.up weight, rank 1 (dp 1), differs along dp: the digests differ (norm ",
    ),
]


def without_figures(text: str) -> str:
    return re.sub(r"max \d+ ulp|relative error \S+|\d+(?= more tensors| tensors equal)", "…", text)


def launch(layout: str, names: str, ranks: int, *arguments: str) -> None:
    line = [sys.executable, "-m", "byteps_py.launch", *layout.split(), sys.executable, PROGRAM, *arguments]
    with command(*line, PYTHONWARNINGS="default", OMP_NUM_THREADS="1") as job:
        assert job.end() == 0, job.text
    for name in names.split():
        assert job.text.count(f"{name}: recorded") == ranks, job.text


@pytest.mark.timeout(180)
def test_planted_errors_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch("-np 2", "tp tp_forward tp_backward tp_digests dp dp_update unused pp dtensor", 2, str(tmp_path))

    def run(reference: str, name: str, *options: str) -> int:
        return main(["numerics", "compare", str(tmp_path / reference), str(tmp_path / name), *options])

    for name in ("tp", "dp", "pp"):  # a reference in the same order has the same bits
        result = compare(tmp_path / f"{name}_reference", tmp_path / name)
        assert result.is_equal, result.as_text()
        assert result.equal > 150

    result = compare(tmp_path / "dtensor_reference", tmp_path / "dtensor")
    assert (result.is_equal, result.equal) == (True, 4)

    for reference, name, beginning in PLANTED:
        assert run(reference, name) == 1
        first = capsys.readouterr().out.splitlines()[0]
        assert first.startswith(f"The first tensor that differs: {beginning}"), first

    [(line, shown)] = commands_of(Page(ROOT / "docs" / "howto" / "compare-runs.md").blocks_after("numerics compare")[0])
    places = {" reference run": f" {tmp_path}/tp_reference {tmp_path}/tp_forward"}
    assert main(shlex.split(at_own_places(line, places))[1:]) == 1
    assert without_figures(capsys.readouterr().out) == without_figures(shown)

    assert run("tp_reference", "tp_forward", "--json") == 1
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    found = answer["first_difference"]
    assert (found["step"], found["micro_batch"], found["phase"], found["module"]) == (1, 1, "forward", "1.down")
    assert (found["ranks"], found["mesh_dimension"], found["elements"]) == ([1], "tp", 192)
    assert answer["different"] + answer["equal"] == compare(tmp_path / "tp_reference", tmp_path / "tp").equal

    # Another order of accumulation has other bits, and no large errors.
    result = compare(tmp_path / "tp_sequential", tmp_path / "tp")
    assert result.differences[0].key.text == "step 0, micro-batch 0, forward, 0.down output"
    assert run("tp_sequential", "tp", "--tolerance", "0.2") == 0

    # Parts of which only digests are known are not called equal.
    assert run("tp_reference", "tp_digests") == 2
    assert "record both runs with values=True" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layout", "ranks", "machines"),
    [("-np 3", 3, "3"), pytest.param("-np 2 --machines 2", 4, "2 2", marks=pytest.mark.slow)],
)
def test_sums_have_the_bits_of_the_backend(layout: str, ranks: int, machines: str) -> None:
    launch(layout, "sums", ranks, "", *machines.split())
