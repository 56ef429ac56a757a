"""Unnamed operations that ranks call in different orders, when all names are known already: an error, not a stall."""

from __future__ import annotations

import pytest
from support.clusters import bpslaunch

PROGRAM = """
import torch
import byteps_py as hvd
hvd.init()
for _ in range(33):  # from then on, names are used again
    hvd.allreduce(torch.ones(2))
    hvd.allreduce(torch.ones(3))
try:
    hvd.allreduce(torch.ones(2 + hvd.rank()))
except hvd.HorovodInternalError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


def told(options: str, **variables: str) -> None:
    run = bpslaunch(options.split(), ["-c", PROGRAM], **variables)
    lines = run.stdout.splitlines()
    assert len(lines) == 2, run.stdout + run.stderr
    assert lines[0] == lines[1]
    assert lines[0].startswith("MismatchError: Mismatched unnamed operations: rank 0 gave average of float32[2]")
    assert "rank 1 gave average of float32[3]" in lines[0]


def test_ranks_that_call_in_different_orders_are_told_so() -> None:
    told("-np 1 --machines 2")


@pytest.mark.slow
@pytest.mark.xfail(
    strict=True, reason="sums from rank to rank are not declared: nobody knows what they are; a StallError"
)
def test_ranks_of_one_machine_are_told_so() -> None:
    told("-np 2", BYTEPS_STALL_WARN_S="1", BYTEPS_STALL_LIMIT_S="10")
