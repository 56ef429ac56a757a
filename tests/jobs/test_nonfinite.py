"""NaN and infinity in gradients: named by rank, parameter and step, on every rank, in that step; raised, left out or
let pass. tests/programs/nonfinite.py has the scenarios; what needs no processes is here."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from support.clusters import bpslaunch

from byteps_py import kernels, rank_bits
from byteps_py.config.settings import Settings
from byteps_py.errors import ConfigurationError, NonFiniteError
from byteps_py.runtime import Runtime
from byteps_py.server.reducer import KernelCall
from byteps_py.tensors import DType, NonFinite, Op, TensorSpec
from byteps_py.torch.collectives import nonfinite

PROGRAM = Path(__file__).parents[1] / "programs" / "nonfinite.py"
ENVIRON = {"BYTEPS_PARTITION_BYTES": str(64 << 10), "PS_HEARTBEAT_TIMEOUT": "30"}


@pytest.mark.timeout(200)
def test_every_rank_learns_what_it_was_in_the_same_step() -> None:
    run = bpslaunch(
        ["-np", "1", "--machines", "2"], [PROGRAM], BYTEPS_PARTITION_BYTES=str(64 << 10), PS_HEARTBEAT_TIMEOUT="30"
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("all is well") == 2, run.stdout + run.stderr
    # Each step that is left out is logged once on each machine, with the reason.
    left_out = [line for line in run.stderr.splitlines() if "a step is left out on every rank" in line]
    assert left_out
    named = re.compile(r"from rank 1, step 3: in the gradients of '(0\.)?weight'")
    assert all(named.search(line) for line in left_out)


@pytest.mark.parametrize("layout", ["-np 2", "-np 1 --machines 2 --servers 1", "-np 2 --machines 2"])
def test_the_services_say_who_it_was(layout: str) -> None:
    run = bpslaunch(
        layout.split(), [PROGRAM.with_name("blame.py")], BYTEPS_PARTITION_BYTES=str(64 << 10), PS_HEARTBEAT_TIMEOUT="30"
    )
    assert run.returncode == 0, run.stdout + run.stderr
    ranks = 4 if layout == "-np 2 --machines 2" else 2
    assert run.stdout.count("all is well") == ranks, run.stdout + run.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", [pytest.param("-np 2", marks=pytest.mark.slow), "-np 1 --machines 2"])
def test_the_backend_looks_at_what_is_added(layout: str) -> None:
    run = bpslaunch(layout.split(), [PROGRAM.with_name("nonfinite_backend.py")], PS_HEARTBEAT_TIMEOUT="30")
    assert run.returncode != 0
    assert run.stdout.count("is ready") == 2, run.stdout + run.stderr
    # Both ranks end with an error. That of the first, a consequence, is not shown where it is the plain one.
    assert run.stderr.count("exited with status 1") == 2, run.stderr
    said = [line for line in run.stderr.splitlines() if "NaN or infinity from rank 1, sum " in line]
    assert any("NonFiniteInputError" in line for line in said), run.stderr


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[1.0, 2.0], [3.0, 4.0]], 0),
        ([[1.0, 2.0], [np.nan, 4.0]], 0b100),
        ([[1.0, -np.inf], [np.nan, 4.0]], 0b110),
        ([[1.0, np.inf], [1.0, -np.inf]], 0b110),
        ([[3e38, 1.0], [3e38, 1.0]], rank_bits.OVERFLOW),
        ([[1.0, np.nan]], 0b010),  # all others have joined: there is nothing to add
    ],
)
def test_a_server_blames_whom_its_contributions_name(values: list[list[float]], expected: int) -> None:
    arrays = [np.array(row, np.float32) for row in values]
    inputs = tuple(array.ctypes.data for array in arrays)
    plan = KernelCall(inputs, inputs[:1], None, blames=(0b010, 0b100)[: len(arrays)])
    runtime = cast(Runtime, SimpleNamespace(kernels=kernels))  # without a loop
    assert plan.carry_out(runtime, Op.SUM, DType.FLOAT32, arrays[0].nbytes) == expected


def test_blame_of_many_ranks() -> None:
    assert rank_bits.ranks_of(rank_bits.of_rank(62, 63), 63) == [62]
    assert rank_bits.ranks_of(rank_bits.OVERFLOW, 63) == []
    for size in (64, 100, 1000):
        for rank in (0, 1, size // 2, size - 1):
            bit = rank_bits.of_rank(rank, size)
            assert bit < rank_bits.OVERFLOW
            assert rank in rank_bits.ranks_of(bit, size)
            assert len(rank_bits.ranks_of(bit, size)) <= size // 63 + 1


def test_only_dense_floating_reductions_are_guarded() -> None:
    assert TensorSpec("w", DType.FLOAT16, (3,), nonfinite=NonFinite.SKIP).is_guarded
    assert not TensorSpec("w", DType.FLOAT16, (3,)).is_guarded
    assert not TensorSpec("w", DType.INT32, (3,), nonfinite=NonFinite.RAISE).is_guarded
    assert not TensorSpec("w", DType.FLOAT32, (3,), Op.BROADCAST, root=0, nonfinite=NonFinite.RAISE).is_guarded
    assert not TensorSpec("w", DType.FLOAT32, (3,), scatters=True, nonfinite=NonFinite.RAISE).is_guarded


def test_the_sentence() -> None:
    grad = torch.zeros(2, 3, dtype=torch.float16)
    assert nonfinite.where("w", grad) is None
    grad[1, 2] = torch.inf
    place = nonfinite.where("w", grad, torch.float32)
    assert place == "'w' (1 of 6 values as float16, the first at [1, 2])"
    error = nonfinite.explain(rank_bits.of_rank(0, 4) | rank_bits.of_rank(2, 4), 4, 9, [place, "a", "b", "c", "d"])
    assert isinstance(error, FloatingPointError)
    assert str(error).startswith(
        f"NaN or infinity from ranks 0, 2, step 9: in the gradients of {place}, a, b and 2 more;"
    )


def test_a_job_of_one_rank_looks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import byteps_py as bps

    monkeypatch.setenv("BYTEPS_NONFINITE", "raise")
    bps.init()
    try:
        weight = torch.nn.Parameter(torch.ones(2))
        opt = bps.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)])
        (weight * torch.tensor([1.0, torch.nan])).sum().backward()
        with pytest.raises(NonFiniteError, match=r"from rank 0: in the gradients of 'w' \(1 of 2 values"):
            opt.step()
        assert weight.tolist() == [1.0, 1.0]
    finally:
        bps.shutdown()


def test_the_setting_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="takes one of allow, raise, skip"):
        Settings.from_env({"BYTEPS_NONFINITE": "maybe"})
