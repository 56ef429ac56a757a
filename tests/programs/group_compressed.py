"""Sums of process groups that travel compressed, beside machines and a server that are emulated in this process.
Arguments: names of cases; none: all. Prints "NAME: right" on each rank."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import case, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # for support
from support.coded_sums import CodedPieces, CodedSums

import byteps_py as bps
from byteps_py.errors import MismatchError
from byteps_py.parallel.collectives import reduce_scatter_single
from byteps_py.torch.compression import Compressor

INT8 = bps.ProcessGroupOptions(compression=bps.Compression.int8)


def contribution(rank: int, number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, 20_011, generator=generator).to(dtype)


def group_of(compression: object) -> dist.ProcessGroup:
    return dist.new_group(pg_options=bps.ProcessGroupOptions(compression=compression))  # type: ignore[return-value]


@case
def int8() -> None:
    all_reduce([bps.Compression.int8], [torch.float32])


@case
def other_codecs() -> None:
    all_reduce(
        [bps.Compression.topk(0.05), bps.Compression.randomk(0.1)], [torch.float32, torch.bfloat16, torch.float32]
    )


def all_reduce(compressions: Sequence[type[Compressor]], dtypes: Sequence[torch.dtype]) -> None:
    for compression in compressions:
        group, codec = group_of(compression), compression.codec
        assert codec is not None
        for number, dtype in enumerate(dtypes):
            given = [contribution(rank, number, dtype) for rank in range(bps.size())]
            for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, bps.size())):
                found = given[bps.rank()].clone()
                dist.all_reduce(found, op, group=group)
                if codec.draws:  # from the slot's name and round: the same on all ranks
                    largest = found.clone()
                    dist.all_reduce(largest, dist.ReduceOp.MAX)
                    assert torch.equal(found, largest)
                else:
                    assert torch.equal(found, CodedSums(codec, bps.local_size())(given, divisor))


@case
def other_operations() -> None:
    """Pieces are coded one by one; and what has no codec travels as it is."""
    group = group_of(bps.Compression.int8)
    given = [contribution(rank, 5)[:, :20_000] for rank in range(bps.size())]
    assert INT8.compression.codec is not None
    due = CodedSums(INT8.compression.codec, bps.local_size())([each.contiguous() for each in given])
    pieces = CodedPieces(INT8.compression.codec, bps.local_size(), "", bps.size())([t.flatten() for t in given])
    piece = torch.empty(due.numel() // bps.size())
    reduce_scatter_single(piece, given[bps.rank()].contiguous().flatten(), group)
    assert torch.equal(piece, pieces.chunk(bps.size())[bps.rank()])
    whole = given[bps.rank()].clone()
    work = dist.all_reduce(whole, group=group, async_op=True)
    assert work is not None
    work.wait()
    assert torch.equal(whole, due)
    for tensor, op in (
        (torch.ones(50_000, dtype=torch.int64), dist.ReduceOp.SUM),
        (torch.ones(50_000, dtype=torch.float64), dist.ReduceOp.SUM),
        (torch.ones(50_000), dist.ReduceOp.MAX),
        (torch.ones(50), dist.ReduceOp.SUM),
    ):
        dist.all_reduce(tensor, op, group=group)
        assert (tensor == (bps.size() if op is dist.ReduceOp.SUM else 1)).all()


@case
def ranks_that_differ() -> None:
    group = dist.new_group(
        pg_options=bps.ProcessGroupOptions(
            timedelta(seconds=30), bps.Compression.int8 if bps.rank() else bps.Compression.float8
        )
    )
    with pytest.raises(MismatchError, match=r"compressed to int8"):
        dist.all_reduce(torch.ones(50_000), group=group)


@case
def copies_of_shards() -> None:
    """HSDP: sums over the copies of a shard have the codec of their group."""
    if bps.size() % 2:
        return
    shape, names = (2, bps.size() // 2), ("replicate", "shard")
    override = {"replicate": ("byteps", INT8)}
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=override)
    plain = init_device_mesh("cpu", shape, mesh_dim_names=names)
    found = []
    for each in (mesh, plain):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(300, 400, bias=False), mesh=each)
        model(torch.randn(4, 300, generator=torch.Generator().manual_seed(bps.rank()))).square().sum().backward()
        gradient = model.weight.grad
        assert isinstance(gradient, DTensor)
        found.append(gradient.to_local())
    coded, exact = found
    assert not torch.equal(coded, exact)
    assert (coded - exact).abs().max() <= exact.abs().max() / 60
    copies = [torch.empty_like(coded) for _ in range(bps.size())]
    dist.all_gather(copies, coded)
    assert torch.equal(coded, copies[(bps.rank() + bps.size() // 2) % bps.size()])


if __name__ == "__main__":
    run(sys.argv[1:])
