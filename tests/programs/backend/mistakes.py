"""Calls on which ranks disagree, and undefined calls: each rank raises the right error, and the group can be used
afterwards or raises an error that says that it can't."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

import byteps_py.torch as bps
from backend.common import feature, raises, same, size
from backend.groups import groups


@feature
def errors() -> None:
    _, _, me = next(groups())
    for again in range(2):
        raises(bps.MismatchError, "float32", lambda: dist.all_reduce(torch.ones(2000 + 10 * again + me)))  # noqa: B023
        raises(bps.MismatchError, "rank", lambda: dist.broadcast(torch.ones(2000), me))
        tensor = torch.ones(3 + again)
        dist.all_reduce(tensor)
        same(tensor, torch.full((3 + again,), float(size())))
    work = dist.all_reduce(torch.ones(3000 + me), async_op=True)
    assert work is not None
    raises(RuntimeError, "MismatchError", work.get_future().wait)
    assert isinstance(work.exception(), bps.MismatchError)
    assert work.is_completed()
    assert not work.is_success()
    group = dist.new_group()
    for count in (3, 4):
        dist.all_reduce(torch.ones(count), group=group)
    text = "operation 3 of a process group"  # what both know already is found out a moment later
    raises(bps.MismatchError, text, lambda: dist.all_reduce(torch.ones(3 if me else 4), group=group))
    raises(bps.MismatchError, text, lambda: dist.all_reduce(torch.ones(3), group=group))
    group = dist.new_group()
    for count in (300_000, 300_001):
        raises(bps.MismatchError, "float32", lambda: dist.all_reduce(torch.ones(count + 10 * me), group=group))  # noqa: B023
        raises(bps.MismatchError, "float32", lambda: dist.all_reduce(torch.ones(count if me else 3), group=group))  # noqa: B023
        for _ in range(2):
            dist.all_reduce(tensor := torch.ones(count), group=group)
            same(tensor, torch.full((count,), float(size())))
        own, rows = torch.empty(count + me), torch.ones(size(), count + me)
        text = f"scattered sum of float32[{size()}, "  # of any two that differ
        raises(bps.MismatchError, text, lambda: dist.reduce_scatter_tensor(own, rows, group=group))  # noqa: B023
        share = torch.empty(count)
        dist.reduce_scatter_tensor(share, torch.ones(size(), count), group=group)
        same(share, torch.full((count,), float(size())))
    text = "of a process group of ranks"
    raises(bps.MismatchError, text, lambda: dist.all_reduce(torch.ones(300_000 + (me > 0)), group=group))
    raises(bps.MismatchError, text, lambda: dist.all_reduce(torch.ones(300_000), group=group))
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    if me == 0:
        raises(
            bps.StallError,
            "not complete within its timeout of 0.3 s",
            lambda: dist.all_reduce(torch.ones(5), group=group),
        )
    dist.barrier()
    if me:
        dist.all_reduce(torch.ones(5), group=group)
    sparse = torch.eye(3).to_sparse_csr()
    raises(bps.UsageError, "sparse", lambda: dist.group.WORLD.allreduce([sparse]))  # type: ignore[union-attr]
    raises(bps.UsageError, "times as large", lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(5)))
