"""FSDP2 with compressed gradients, on real processes: bit for bit those of machines and a server in one process
(programs/fsdp_compressed.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from support.breaking import command
from support.clusters import ROOT
from torch.distributed.fsdp import FSDPModule

from byteps_py.errors import UnsupportedError, UsageError
from byteps_py.parallel.fsdp import compress_gradients

PROGRAM = ROOT / "tests" / "programs" / "fsdp_compressed.py"
LAUNCH = (sys.executable, "-m", "byteps_py.launch")
pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="torch 2.8 has no custom reduce-scatters"
)


def right(layout: str, *cases: str, **environ: str) -> set[str]:
    """Run the cases, or all. Returns the names of those that were right on all ranks."""
    words = layout.split()
    environ = {"BYTEPS_MIN_COMPRESS_BYTES": "0", "BYTEPS_PARTITION_BYTES": str(16 << 10), **environ}
    with command(*LAUNCH, *words, sys.executable, str(PROGRAM), *cases, limit_s=250, **environ) as job:
        assert job.end() == 0, job.text
    ranks = int(words[1]) * int(words[3])
    found = [line.split()[-2].removesuffix(":") for line in job.text.splitlines() if line.endswith(": right")]
    return {name for name in found if found.count(name) == ranks}


def test_like_one_process() -> None:
    assert right("-np 1 --machines 2", "int8_ef") == {"int8_ef"}


@pytest.mark.slow
def test_the_codec_saves_what_it_promises(tmp_path: Path) -> None:
    """All else travels by gloo: the service carries coded gradients, and little that ranks agree on."""
    report = tmp_path / "report.json"
    assert right(f"-np 1 --machines 2 --report {report}", "int8", TEST_BACKEND="gloo") == {"int8"}
    width, ranks, steps = 37, 2, 4  # of the program
    shapes = [[(2 * width, width), (2 * width, 1), (width, 2 * width)]] * 2 + [[(3, width), (3, 1)]]
    pieces = [sum(-(-rows // ranks) * columns for rows, columns in module) for module in shapes]
    coded = steps * sum(-(-piece // 256) * 260 for piece in pieces)
    members = [each for each in json.loads(report.read_text())["members"] if each["kind"] == "worker"]
    for sent in (each[direction] for each in members for direction in ("bytes_sent", "bytes_received")):
        assert coded <= sent < coded + 4096
    assert 3.5 * coded < steps * sum(pieces) * 4


SOME = ("topk_ef", "errors_go_on", "parallelize_a_pipeline", "not_all_parameters", "refused")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        ("-np 2 --machines 2 --servers 1", SOME),
        *(
            pytest.param(each, (), marks=pytest.mark.long)
            for each in ("-np 2 --machines 2 --servers 1", "-np 1 --machines 3")
        ),
    ],
)
def test_each_codec_is_like_one_process(layout: str, cases: tuple[str, ...]) -> None:
    assert {*SOME, *(() if cases else ("int8", "thc"))} <= right(layout, *cases)


@pytest.mark.slow
def test_over_another_backend() -> None:
    assert right("-np 1 --machines 2", "topk_ef", TEST_BACKEND="gloo") == {"topk_ef"}


@pytest.mark.slow
def test_ranks_that_are_not_finite_are_named() -> None:
    assert right("-np 1 --machines 2", "not_finite", BYTEPS_NONFINITE="raise") == {"not_finite"}


def test_an_old_torch_and_other_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"the model has no FSDP2 module; call fully_shard\(\) first"):
        compress_gradients(torch.nn.Linear(2, 2), "int8")
    monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter")
    with pytest.raises(UnsupportedError, match=r"has no FSDPModule\.set_custom_reduce_scatter; it needs torch 2\.9"):
        compress_gradients(torch.nn.Linear(2, 2), "int8")
