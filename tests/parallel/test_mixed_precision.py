"""The table of mixed precision in docs/howto/mixed-precision.md: each row trains beside one process
(programs/mixed_precision.py), or has a test elsewhere."""

from __future__ import annotations

import re
import sys

import pytest
from support.breaking import command
from support.clusters import ROOT

PROGRAM = ROOT / "tests" / "programs" / "mixed_precision.py"
PAGE = ROOT / "docs" / "howto" / "mixed-precision.md"
#: Of each row: cases of the program, and other tests.
ROWS: dict[str, tuple[str, ...]] = {
    "data parallel": ("data_parallel", "test_gradients_between.py::test_a_scaler_needs_no_synchronize"),
    "hosted": ("hosted", "hosted_masters", "test_hosted.py::test_beside_the_optimizer_on_the_ranks"),
    "shadowed": (
        "test_torch_restore.py::test_a_step_that_a_scaler_skips_counts_as_a_call",
        "test_torch_restore.py::test_calls_of_step_that_made_none_count",
        "test_resume_example.py::test_it_goes_on_from_what_servers_hold",
    ),
    "sharded": ("sharded", "test_sharding.py::test_beside_one_process"),
    "FSDP2": ("fsdp", "test_fsdp_cache.py::test_beside_plain_fsdp"),
    "tensor parallel": ("tensor_parallel", "tensor_parallel_language"),
    "context parallel": ("context_parallel",),
    "pipeline": ("pipeline", "test_pipelines.py::test_beside_one_process"),
    "several of them": ("several", "copies_in_columns"),
}


def test_every_row_of_the_table_has_its_tests() -> None:
    [table] = re.findall(r"^# Mixed precision\n(?:.*\n)*?\|---\|---\|\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
    rows = re.findall(r"^\| \[?([\w ]+)", table, re.MULTILINE)
    assert [row.strip() for row in rows] == list(ROWS)
    cases = re.findall(r"^@in_both\ndef (\w+)\(", PROGRAM.read_text(), re.MULTILINE)
    for name in (name for names in ROWS.values() for name in names):
        file, _, function = name.partition("::")
        found = f"\ndef {function}(" in next((ROOT / "tests").rglob(file)).read_text() if function else name in cases
        assert found, f"{name} does not exist"


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        (
            "-np 2",
            "data_parallel hosted hosted_masters sharded fsdp tensor_parallel tensor_parallel_language "
            "context_parallel pipeline",
        ),
        (
            "-np 1 --machines 2 --servers 1",
            "data_parallel hosted hosted_masters sharded fsdp tensor_parallel context_parallel pipeline",
        ),
        ("-np 4", "data_parallel hosted hosted_masters sharded context_parallel pipeline several copies_in_columns"),
    ],
)
def test_beside_one_process(layout: str, cases: str) -> None:
    words = layout.split()
    ranks = int(words[1]) * (int(words[3]) if "--machines" in words else 1)
    program = [sys.executable, str(PROGRAM), *cases.split()]
    with command(sys.executable, "-m", "byteps_py.launch", *words, *program, OMP_NUM_THREADS="1") as job:
        assert job.end() == 0, job.text
    for case in cases.split():
        assert job.text.count(f"{case}: right") == ranks, job.text
