"""Optimizers whose states the services keep, on real processes: the same weights as on the ranks, bit for bit
(programs/hosted.py)."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import pytest
import torch
from support.breaking import command
from support.clusters import ROOT

from byteps_py.launch.process_plan import free_port

PROGRAM = ROOT / "tests" / "programs" / "hosted.py"
CASES = re.findall(r"^@case\ndef (\w+)\(", PROGRAM.read_text(), re.MULTILINE)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "layout",
    [
        "-np 1",
        pytest.param("-np 2", marks=pytest.mark.slow),
        "-np 1 --machines 2 --servers 1",
        pytest.param("-np 1 --machines 2 --servers 2", marks=pytest.mark.slow),  # CPU machines add all sums
        pytest.param("-np 2 --machines 2", marks=pytest.mark.slow),
        pytest.param("-np 1 --machines 3 --servers 3", marks=pytest.mark.long),
        pytest.param("-np 3", marks=pytest.mark.long),
        pytest.param("-np 2 --servers 1", marks=pytest.mark.long),  # which adds nothing
        pytest.param("-np 1 --machines 2 --servers 3", marks=pytest.mark.slow),
    ],
)
def test_beside_the_optimizer_on_the_ranks(layout: str) -> None:
    check_all_cases(layout, "auto")


def check_all_cases(layout: str, states: str) -> None:
    words = layout.split()
    ranks = int(words[1]) * (int(words[3]) if len(words) > 2 else 1)
    arguments = [sys.executable, "-m", "byteps_py.launch", *words, sys.executable, str(PROGRAM)]
    with command(*arguments, BYTEPS_HOSTED_STATES=states) as job:
        assert job.end() == 0, job.text
    for case in CASES:
        assert job.text.count(f"{case}: right") == ranks, job.text


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("-np 1 --machines 2 --servers 1", marks=pytest.mark.slow),
        pytest.param("-np 2 --machines 2", marks=pytest.mark.long),
        pytest.param("-np 1 --machines 3 --servers 2", marks=pytest.mark.long),
    ],
)
def test_states_on_each_machine(layout: str) -> None:
    """All cases: where states are changes no bits."""
    check_all_cases(layout, "machine")


#: Cases that need no group of all ranks.
IN_SETS = (
    *("equal", "lamb", "sparse_rows", "delays", "streams", "accumulates", "freezes", "groups", "states_move"),
    *("takes_over", "half_precision", "loads_masters", "compresses", "clips", "scales", "scales_to_a_limit"),
    *("scales_float16", "takes_changes", "refused"),
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layout", "groups", "states", "cases"),
    [
        pytest.param(
            "-np 2 --machines 2 --servers 1",
            "0,2;1,3",
            "sharded",
            ("equal", "clips", "states_move"),
            marks=pytest.mark.slow,
        ),
        pytest.param("-np 2 --machines 2", "0,2;1,3", "machine", IN_SETS, marks=pytest.mark.long),
        pytest.param("-np 4", "0,2;1,3", "auto", IN_SETS, marks=pytest.mark.long),
        pytest.param("-np 1 --machines 4 --servers 1", "0,3;1,2", "sharded", IN_SETS, marks=pytest.mark.slow),
        pytest.param("-np 1 --machines 4 --servers 1", "0,3;1,2", "machine", IN_SETS, marks=pytest.mark.long),
        # Two ranks on one machine and one on the other; the fourth trains alone.
        pytest.param("-np 2 --machines 2", "0,1,2", "machine", IN_SETS, marks=pytest.mark.slow),
        pytest.param("-np 2 --machines 2 --servers 1", "0,1,3", "sharded", IN_SETS, marks=pytest.mark.long),
        pytest.param("-np 2 --machines 2 --servers 1", "0,1;2,3", "machine", IN_SETS, marks=pytest.mark.long),
    ],
)
def test_process_sets(layout: str, groups: str, states: str, cases: tuple[str, ...]) -> None:
    """Each keeps states of its own, at the same time, and has the bits of the optimizer on its ranks."""
    arguments = [sys.executable, "-m", "byteps_py.launch", *layout.split(), sys.executable, str(PROGRAM), *cases]
    with command(*arguments, BYTEPS_HOSTED_STATES=states, TEST_GROUPS=groups) as job:
        assert job.end() == 0, job.text
    for case in cases:
        assert job.text.count(f"{case}: right") == 4, job.text


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_states_on_machines_with_different_numbers_of_ranks() -> None:
    """The second rank of the larger one owns nothing; norms and gathered states are still of all elements."""
    cases = ("lamb", "clips", "states_move")
    common = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "0",
    }
    launch = (sys.executable, "-m", "byteps_py.launch")
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(command(*launch, DMLC_ROLE="scheduler", **common))]
        for machine, ranks in enumerate(("1", "2")):
            jobs.append(
                stack.enter_context(
                    command(
                        *launch, sys.executable, str(PROGRAM), *cases, DMLC_ROLE="worker", DMLC_WORKER_ID=str(machine),
                        BYTEPS_MACHINE_ID=f"m{machine}", BYTEPS_LOCAL_SIZE=ranks, BYTEPS_HOSTED_STATES="machine",
                        **common,
                    )
                )
            )  # fmt: skip
        for job in jobs:
            assert job.end() == 0, job.text
        for case in cases:
            assert [job.text.count(f"{case}: right") for job in jobs] == [0, 1, 2]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_gradients_that_are_not_finite(nonfinite: str) -> None:
    words = ["-np", "2", sys.executable, str(PROGRAM), "not_finite"]
    with command(sys.executable, "-m", "byteps_py.launch", *words, BYTEPS_NONFINITE=nonfinite) as job:
        assert job.end() == 0, job.text
    assert job.text.count("not_finite: right") == 2, job.text


@pytest.mark.timeout(180)
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_parameters_on_cuda() -> None:
    words = ["-np", "2", sys.executable, str(PROGRAM), "on_cuda"]
    with command(sys.executable, "-m", "byteps_py.launch", *words) as job:
        assert job.end() == 0, job.text
    assert job.text.count("on_cuda: right") == 2, job.text


@pytest.mark.timeout(180)
def test_the_block_of_the_page_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "howto" / "sharding.md").read_text(), re.DOTALL)
    (block,) = [one for one in blocks if "hosted=True" in one]
    script = tmp_path / "train.py"
    script.write_text(block)
    with command(sys.executable, "-m", "byteps_py.launch", "-np", "2", sys.executable, str(script)) as job:
        assert job.end() == 0, job.text


@pytest.mark.timeout(180)
@pytest.mark.slow
@pytest.mark.parametrize("partition", ["4096", "65536"])
def test_partitions_do_not_matter(partition: str) -> None:
    layout = ["-np", "2", "--machines", "2", "--servers", "2"]
    arguments = [
        sys.executable,
        "-m",
        "byteps_py.launch",
        *layout,
        sys.executable,
        str(PROGRAM),
        "equal",
        "groups",
        "lamb",
    ]
    with command(*arguments, BYTEPS_PARTITION_BYTES=partition, BYTEPS_FUSION_BYTES="10000") as job:
        assert job.end() == 0, job.text
    assert job.text.count("equal: right") == 4, job.text
