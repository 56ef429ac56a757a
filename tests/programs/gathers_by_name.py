"""Gathers and exchanges from rank to rank, whoever waits for them, for test_gathers_by_name.py."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import byteps_py.torch as hvd
from byteps_py.errors import JoinedError, MismatchError
from byteps_py.torch.collectives.peer_gathers import PeerRound
from byteps_py.torch.operations.gathers import TwoRoundOperation

#: One for each round that has gone from rank to rank, since the last look.
direct: list[None] = []


def count_direct() -> None:
    report = PeerRound.report

    def counted(*arguments: Any) -> None:
        report(*arguments)
        direct.append(None)

    PeerRound.report = counted  # type: ignore[method-assign]


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
        # Between machines, those of which each byte would go to a machine more than once go through the service, if
        # there are many.
        is_copied = 1 < hvd.local_size() < size and rows == 100_000
        expect_direct(1 if is_copied else 5)


def different_splits() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = [(rank + other) % 3 for other in range(size)]
    received, splits = hvd.alltoall(torch.full((10, 7), rank), rows, "splits")
    assert splits.tolist() == rows
    assert torch.equal(received, torch.repeat_interleave(torch.arange(size), splits.long())[:, None].expand(-1, 7))
    expect_direct(1)


def not_all_wait() -> None:
    """Some ranks wait at once, others later, for as many as they like."""
    rank, size = hvd.rank(), hvd.size()
    for rows in (9, 3000):
        expected = torch.cat([mine(rows, other) for other in range(size)])
        if rank:
            handles = [hvd.allgather_async(mine(rows, rank), name=f"late {number}") for number in range(12)]
            found = [hvd.synchronize(handle) for handle in reversed(handles)]
        else:
            found = [hvd.allgather(mine(rows, rank), name=f"late {number}") for number in range(12)]
        assert all(torch.equal(each, expected) for each in found)
        expect_direct(12)
    handles = [hvd.alltoall_async(torch.arange(size) + rank + number) for number in range(20)]  # more than names
    for number, handle in enumerate(handles):
        received, _ = hvd.synchronize(handle)
        assert received.tolist() == [rank + other + number for other in range(size)]
    expect_direct(20)


def many_tensors() -> None:
    """Their headers do not fit in the first message."""
    rank, size = hvd.rank(), hvd.size()
    given = [mine(number % 3, rank, torch.int32) for number in range(20)]
    for number, found in enumerate(hvd.grouped_allgather(given, "many")):
        assert torch.equal(found, torch.cat([mine(number % 3, other, torch.int32) for other in range(size)]))
    expect_direct(1)


def on_a_device() -> None:
    """As if the tensors of rank 0 were not in the host's memory: only the headers go from rank to rank."""
    rank, size = hvd.rank(), hvd.size()
    begin = TwoRoundOperation.begin

    def begun(operation: TwoRoundOperation, background: bool) -> None:
        operation._is_on_host = bool(rank)
        begin(operation, background)

    TwoRoundOperation.begin = begun  # type: ignore[method-assign]
    for rows in (0, 5, 1000):
        expected = torch.cat([mine(rows, other) for other in range(size)])
        assert torch.equal(hvd.allgather(mine(rows, rank), name="device"), expected)
        assert torch.equal(hvd.synchronize(hvd.allgather_async(mine(rows, rank))), expected)
        received, _ = hvd.alltoall(torch.arange(rows * size), [rows] * size, "device")
        assert torch.equal(received, torch.arange(rows).add(rows * rank).repeat(size))
    TwoRoundOperation.begin = begin  # type: ignore[method-assign]
    expect_direct(0)


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
        with pytest.raises(JoinedError, match="rank 0"):
            hvd.allgather(torch.ones(4), name="x5")
        with pytest.raises(JoinedError, match="rank 0"):
            hvd.synchronize(hvd.alltoall_async(torch.ones(hvd.size())))
    hvd.join()
    direct.clear()
    assert torch.equal(hvd.allgather(torch.ones(4), name="x5"), torch.ones(4 * hvd.size()))
    expect_direct(1)


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    count_direct()
    for run in (sizes, different_splits, not_all_wait, many_tensors, on_a_device, mistakes, who_joins):
        run()
        print(f"{hvd.rank()}: {run.__name__}: all is well\n", end="", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    sys.exit(main())
