"""NaN given to the collectives of torch.distributed by the last rank. Run by test_nonfinite.py under bpslaunch.

First what passes, then a training step that does not: the last rank's own error ends it, the others raise its words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import byteps_py.torch as bps

os.environ["BYTEPS_NONFINITE"] = "skip"
bps.init()
with pytest.raises(bps.UnsupportedError, match="can't leave out a step"):
    # A store of its own: the next group must not meet what is left of this one's.
    dist.init_process_group("byteps", store=dist.HashStore(), rank=bps.rank(), world_size=bps.size())
bps.shutdown()

os.environ["BYTEPS_NONFINITE"] = "raise"
bps.init()
dist.init_process_group("byteps", rank=bps.rank(), world_size=bps.size())
rank, size = dist.get_rank(), dist.get_world_size()
last = size - 1
value = float("nan") if rank == last else 1.0

dist.all_reduce(torch.full((3,), -torch.inf), dist.ReduceOp.MAX)  # as masks are
dist.all_gather([torch.empty(2) for _ in range(size)], torch.full((2,), value))
large = torch.full((1 << 17,), 3e38 / (1 << 10))  # its sum over the elements is infinite, its values are not
dist.all_reduce(large)
assert torch.isfinite(large).all()


def refused(text: str, act: Callable[..., object], *given: object) -> None:
    """Only by the rank that gives it: the others would wait."""
    if rank == last:
        with pytest.raises(bps.NonFiniteInputError, match=re.escape(text)) as caught:
            act(*given)
        assert f"from rank {last}, sum " in str(caught.value)


bad = torch.zeros(size, 4)
bad[size - 1, 2] = value
refused(f"'reduce_scatter_tensor' (1 of {4 * size} values", dist.reduce_scatter_tensor, torch.empty(4), bad.view(-1))
refused(f"'all_reduce' (1 of {4 * size} values, the first at [{last}, 2]), of shape", dist.all_reduce, bad)
refused("'all_reduce of a sparse tensor' (1 of 1 values, the first at [1, 0])", dist.all_reduce,
        torch.sparse_coo_tensor([[1], [0]], [value], (3, 3)))  # fmt: skip
refused("'all_reduce_coalesced, tensor 1'", dist.all_reduce_coalesced, [torch.ones(2), torch.full((2,), value)])
refused("'reduce'", dist.reduce, torch.full((2,), 1j * value), 0)
dist.barrier()

net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
dist.barrier()  # that neither is told of the other's end before it is here
print(f"rank {rank} is ready", flush=True)
net(torch.full((3, 4), value)).sum().backward()
raise SystemExit("nobody has said anything")
