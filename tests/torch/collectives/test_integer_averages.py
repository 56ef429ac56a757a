"""Averages of integers whose sum is none of their dtype's numbers: exact, in every operation."""

from __future__ import annotations

import pytest
import torch
from support.threaded import ThreadedCluster

import byteps_py.torch as hvd
from byteps_py.torch.collectives.integer_averages import mean, summands

DTYPES = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
#: Machines, and how many ranks there are.
CLUSTERS = [(1, 1), (2, 1), (3, 2)]


def values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """The extremes, what lies beside them, and some numbers; the same number of rows for every rank."""
    info = torch.iinfo(dtype)
    edges = [info.max, info.min, info.max - rank, info.min + rank, rank, info.max // (rank + 1), 1, -(rank % 2)]
    return torch.tensor([edges, edges[::-1]] * 15, dtype=torch.int64).to(dtype)


def expected(dtype: torch.dtype, ranks: range, rounding: str) -> torch.Tensor:
    """In Python's integers, which have no end."""
    rows = list(zip(*[values(rank, dtype).flatten().tolist() for rank in ranks], strict=True))
    floor = [sum(row) // len(row) for row in rows]
    cut = [-(-sum(row) // len(row)) if sum(row) < 0 else sum(row) // len(row) for row in rows]
    return torch.tensor(floor if rounding == "floor" else cut, dtype=dtype).view(values(0, dtype).shape)


@pytest.mark.parametrize("machines", CLUSTERS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_sum_wraps_around(machines, dtype) -> None:
    size = sum(machines)
    cut, floor = (expected(dtype, range(size), rounding) for rounding in ("trunc", "floor"))

    def main(rank: int) -> None:
        x = values(rank, dtype)
        assert torch.equal(hvd.push_pull(x), floor)
        assert torch.equal(hvd.push_pull(x, name="x"), floor)
        assert torch.equal(hvd.push_pull_inplace(x.clone()), floor)
        assert torch.equal(hvd.allreduce(x, op=hvd.Average), cut)
        assert torch.equal(hvd.allreduce_(x.clone(), op=hvd.Average), cut)
        assert torch.equal(hvd.synchronize(hvd.allreduce_async(x.t(), name="y")), cut.t())
        assert torch.equal(hvd.allreduce(x[0, 0]), cut[0, 0])
        others = torch.ones(3), x, torch.full((2,), 7, dtype=torch.int64), x.to(torch.int64)
        found = hvd.grouped_allreduce(others)
        assert torch.equal(found[0], torch.ones(3))
        assert torch.equal(found[1], cut)
        assert torch.equal(found[2], others[2])
        assert torch.equal(found[3], cut.to(torch.int64))
        rows = len(x) // size
        if rows * size == len(x):
            mine = cut[rank * rows : (rank + 1) * rows]
            assert torch.equal(hvd.reducescatter(x), mine)
            assert torch.equal(hvd.grouped_reducescatter([x, x])[1], mine)
        assert torch.equal(x, values(rank, dtype))
        sparse = hvd.sparse_allreduce_async(x.to_sparse(), "sparse", hvd.Average)()
        assert torch.equal(sparse.to_dense(), cut)
        with pytest.raises(hvd.MismatchError, match=r"average of (u?int8|int16)"):
            hvd.allreduce(torch.ones(2, dtype=torch.int8 if rank else torch.int16), name="differ")

    ThreadedCluster(machines).run(main)


@pytest.mark.parametrize("count", [1, 2, 3, 1000, 1 << 16])
def test_means_of_many(count) -> None:
    for dtype in DTYPES:
        info = torch.iinfo(dtype)
        for number in (info.max, info.min, 0, info.min + 1):
            sums = summands(torch.full((2,), number, dtype=dtype)) * count
            for rounding in ("floor", "trunc"):
                assert mean(sums, count, dtype, rounding).tolist() == [number] * 2


def test_factors_come_before_and_after() -> None:
    def main(rank: int) -> None:
        x = torch.full((3,), 100, dtype=torch.int8)
        assert hvd.allreduce(x, prescale_factor=0.5, postscale_factor=2.0).tolist() == [100] * 3
        assert hvd.allreduce(x.to(torch.int64), postscale_factor=3.0).tolist() == [300] * 3

    ThreadedCluster((2, 1)).run(main)
