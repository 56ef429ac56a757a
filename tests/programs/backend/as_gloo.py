"""What scripts written for gloo do, and a backend may have overlooked: sparse tensors, coalesced gathers, wrong roots,
outputs that can't be written to, timeouts in seconds."""

from __future__ import annotations

import functools
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import byteps_py.torch as bps
from backend.common import feature, raises, rank, same, size, values
from backend.groups import groups


def _sparse(r: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``count`` rows of 3, some of them twice, in a tensor of 7."""
    rows = torch.tensor([(2 * r + i) % 5 for i in range(count)], dtype=torch.int64)
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values(r, count, 3, dtype=dtype), (7, 3))


@feature
def sparse_all_reduce() -> None:
    for group, ranks, _ in groups():
        for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
            counts = {r: 2 * (r % 3) for r in ranks}  # some have nothing
            tensor = _sparse(rank(), counts[rank()], dtype)
            dist.all_reduce(tensor, group=group)
            assert tensor.is_coalesced()
            same(tensor.to_dense(), sum(_sparse(r, counts[r], dtype).to_dense() for r in ranks))  # type: ignore[arg-type]
        works = []
        tensors = [_sparse(rank(), 2 + i) for i in range(5)]
        for tensor in tensors:
            work = dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group, async_op=True)
            assert work is not None
            works.append(work)
        for work in reversed(works):
            work.wait()
        for i, tensor in enumerate(tensors):
            total = sum(_sparse(r, 2 + i).to_dense() for r in ranks)
            same(tensor.to_dense(), total / len(ranks))  # type: ignore[operator]
        largest = functools.partial(dist.all_reduce, _sparse(0, 2), dist.ReduceOp.MAX, group=group)
        raises(bps.UsageError, "only SUM and AVG", largest)
    uneven = torch.sparse_coo_tensor(torch.zeros(1, 0), torch.zeros(0), (7 + rank(),))
    raises(bps.MismatchError, "rank 1 torch.float32[8] with 1 sparse dimension", lambda: dist.all_reduce(uneven))
    dist.all_reduce(tensor := _sparse(rank(), 2))
    same(tensor.to_dense(), sum(_sparse(r, 2).to_dense() for r in range(size())))  # type: ignore[arg-type]


@feature
def sparse_embedding_under_ddp() -> None:
    def gradient(model: torch.nn.Module, r: int) -> torch.Tensor:
        model.zero_grad()
        (model(torch.tensor([r, 5, r])) * 4).sum().backward()
        (parameter,) = model.parameters()
        assert parameter.grad is not None
        return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad

    alone = torch.nn.Embedding(8, 2, sparse=True)
    expected = sum(gradient(alone, r) for r in range(size())) / size()
    model = DistributedDataParallel(alone)
    for _ in range(2):
        same(gradient(model, rank()), expected)  # type: ignore[arg-type]


@feature
def join_that_divides_by_those_who_are_left() -> None:
    for is_view in (False, True):
        linear = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.constant_(linear.weight, 1.0)
        model = DistributedDataParallel(linear, gradient_as_bucket_view=is_view)
        with model.join(divide_by_initial_world_size=False):
            for step in range(2 + rank()):
                model.zero_grad()
                model(torch.full((1, 2), float(4 * rank()))).sum().backward()
                left = [r for r in range(size()) if step < 2 + r]
                assert linear.weight.grad is not None
                same(linear.weight.grad, torch.full((1, 2), sum(4.0 * r for r in left) / len(left)))


@feature
def coalesced_gather_of_as_many_tensors_as_members() -> None:
    for group, ranks, me in groups():
        for count in (len(ranks), len(ranks) + 1):
            given = [[values(r + i, i + 1, 2) for i in range(count)] for r in ranks]
            outputs = [[torch.empty(i + 1, 2) for i in range(count)] for _ in ranks]
            dist.all_gather_coalesced(outputs, given[me], group=group)
            for found, expected in zip(outputs, given, strict=True):
                same(found, expected)


@feature
def roots_that_are_not_there() -> None:
    world = dist.group.WORLD
    assert world is not None
    one = torch.ones(1)
    options = dist.BroadcastOptions()
    options.rootRank = size()
    raises(bps.UsageError, "invalid root rank", lambda: world.broadcast([one], options))
    for kind, call in (
        (dist.ReduceOptions, lambda given: world.reduce([one], given)),
        (dist.GatherOptions, lambda given: world.gather([], [one], given)),
        (dist.ScatterOptions, lambda given: world.scatter([one], [], given)),
    ):
        for root in (-1, size()):
            some = kind()
            some.rootRank = root
            raises(bps.UsageError, f"invalid root rank: {root}", lambda: call(some))  # noqa: B023
    dist.barrier()


@feature
def outputs_that_overlap() -> None:
    row = torch.zeros(1, 3).expand(4, 3)
    for _ in range(2):
        raises(bps.UsageError, "several elements at one address", lambda: dist.all_reduce(row))
        outputs = [row] * size()
        raises(bps.UsageError, "several elements at one address", lambda: dist.all_gather(outputs, row))  # noqa: B023
        tensor = torch.ones(4, 3)
        dist.all_reduce(tensor)
        same(tensor, torch.full((4, 3), float(size())))
    gathered = [torch.empty(4, 3) for _ in range(size())]
    dist.all_gather(gathered, torch.full((1, 3), float(rank())).expand(4, 3))  # to be read, it may
    same(gathered, [torch.full((4, 3), float(r)) for r in range(size())])


@feature
def timeouts_in_seconds() -> None:
    group = dist.new_group()
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    assert work is not None
    assert work.wait(30.0)  # type: ignore[arg-type]  # C++ takes it from gloo's users
    assert isinstance(group, dist.ProcessGroup)
    group.monitored_barrier(30.0)  # type: ignore[arg-type]
    dist.barrier()
    if rank() == 0:
        raises(bps.StallError, "failed to pass monitoredBarrier", lambda: group.monitored_barrier(timedelta(0)))
    dist.barrier()
