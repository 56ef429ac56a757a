"""Gathers and exchanges by name, from rank to rank where all wait for them, for test_gathers_by_name.py."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import byteps_py.torch as hvd
from byteps_py.errors import JoinedError, MismatchError
from byteps_py.torch.collectives.negotiated_gathers import NegotiatedRound

#: One for each round that has gone from rank to rank, since the last look.
direct: list[None] = []


def count_direct() -> None:
    report = NegotiatedRound.report

    def counted(*arguments: Any) -> None:
        report(*arguments)
        direct.append(None)

    NegotiatedRound.report = counted  # type: ignore[method-assign]


def expect_direct(count: int) -> None:
    assert len(direct) == count, f"{len(direct)} rounds among the ranks, not {count}"
    direct.clear()


def mine(rows: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(rows * (rank + 1) * 3) % 100 + rank).to(dtype).view(-1, 3)


def sizes() -> None:
    """Nothing, what goes in a message, and what does not; of one tensor and of several."""
    rank, size = hvd.rank(), hvd.size()
    for rows in (0, 1, 5, 1000, 100_000):
        expected = torch.cat([mine(rows, other) for other in range(size)])
        for name in ("x", "x", None):
            assert torch.equal(hvd.allgather(mine(rows, rank), name=name and f"{name}{rows}"), expected)
        with_gaps = mine(rows, rank, torch.bool).t().contiguous().t()
        one, other = hvd.grouped_allgather([mine(rows, rank), with_gaps], f"{rows}")
        assert torch.equal(one, expected)
        assert torch.equal(other, expected.bool())
        given = torch.arange(rows * size) + 1000 * rank
        received, splits = hvd.alltoall(given, [rows] * size, f"{rows}")
        assert torch.equal(received, torch.cat([torch.arange(rows) + rows * rank + 1000 * r for r in range(size)]))
        assert splits.tolist() == [rows] * size
        # Between machines, those without a name go through the service, and those of which each byte would go to a
        # machine more than once, if there are many.
        is_on_machine = hvd.local_size() == size
        is_copied = not is_on_machine and hvd.local_size() > 1 and rows == 100_000
        expect_direct(1 if is_copied else 5 if is_on_machine else 4)


def different_splits() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = [(rank + other) % 3 for other in range(size)]
    received, splits = hvd.alltoall(torch.full((10, 7), rank), rows, "splits")
    assert splits.tolist() == rows
    assert torch.equal(received, torch.repeat_interleave(torch.arange(size), splits.long())[:, None].expand(-1, 7))
    expect_direct(1)


def not_all_wait() -> None:
    """One rank does not: all go through the service, and offer again once all have waited."""
    expected = torch.cat([mine(9, other) for other in range(hvd.size())])
    for waits, count in ((True, 1), (False, 0), (True, 0), (True, 1)):
        if waits or hvd.rank():
            found = hvd.allgather(mine(9, hvd.rank()), name="late")
        else:
            found = hvd.synchronize(hvd.allgather_async(mine(9, 0), name="late"))
        assert torch.equal(found, expected)
        expect_direct(count)


def mistakes() -> None:
    for name, columns in (("small", 3), ("large", 30_000)):
        with pytest.raises(MismatchError, match=r"Mismatched allgather tensor shapes: .*rank 1 gave"):
            hvd.allgather(torch.ones(2, columns + (hvd.rank() == 1)), name=name)
        assert hvd.allgather(torch.ones(2, columns), name=name).shape == (2 * hvd.size(), columns)
    with pytest.raises(MismatchError, match="Mismatched number of tensors"):
        hvd.grouped_allgather([torch.ones(1)] * (1 + hvd.rank() % 2), "number")
    with pytest.raises(MismatchError, match="Mismatched data types"):
        hvd.alltoall(torch.ones(hvd.size(), dtype=torch.float64 if hvd.rank() else torch.float32), name="dtype")
    direct.clear()


def who_joins() -> None:
    """A gather needs every rank."""
    if hvd.rank():
        with pytest.raises(JoinedError):
            hvd.allgather(torch.ones(4), name="x5")
    hvd.join()
    direct.clear()
    assert torch.equal(hvd.allgather(torch.ones(4), name="x5"), torch.ones(4 * hvd.size()))
    expect_direct(1)


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    count_direct()
    for run in (sizes, different_splits, not_all_wait, mistakes, who_joins):
        run()
        print(f"{hvd.rank()}: {run.__name__}: all is well\n", end="", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    sys.exit(main())
