"""One rank of benchmarks/sparse_embeddings.py. Arguments: the contender, rows, width, lookups, the exponent of Zipf's
law, steps of a turn."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import byteps_py as bps
from benchmarks.turns import orders
from byteps_py.torch.gradients import sparse_bucket


def drawn(rows: int, lookups: int, exponent: float, generator: np.random.Generator) -> Any:
    """A function that draws the rows of a step. The frequent rows lie anywhere in the table, on all ranks the same."""
    shares = np.cumsum(1.0 / np.arange(1, rows + 1) ** exponent)
    places = np.random.default_rng(0).permutation(rows)

    def draw() -> torch.Tensor:
        found = np.searchsorted(shares, generator.random(lookups) * shares[-1])
        return torch.from_numpy(places[found])

    return draw


def main() -> None:
    name, rows, width, lookups, exponent, steps = sys.argv[1], *map(float, sys.argv[2:])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = nn.Embedding(int(rows), int(width), sparse="dense" not in name)
    optimizer: Any = torch.optim.SGD(table.parameters(), lr=0.1)
    model: nn.Module = table
    if name.startswith("gloo"):
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        if name == "gloo_dense":
            model = nn.parallel.DistributedDataParallel(table)
    else:
        bps.init()
        rank = bps.rank()
        optimizer = bps.DistributedOptimizer(optimizer, table.named_parameters())
        if name == "gathered":
            sparse_bucket.can_pay = lambda *_: False  # type: ignore[assignment]
    draw = drawn(int(rows), int(lookups), exponent, np.random.default_rng(1 + rank))
    weights = torch.randn(int(lookups), int(width))

    def turn() -> dict[str, float]:
        began_s = time.perf_counter()
        for _ in range(int(steps)):
            optimizer.zero_grad()
            (model(draw()) * weights).sum().backward()
            if name == "gloo":  # as DistributedDataParallel's reducer does with sparse gradients
                assert table.weight.grad is not None
                table.weight.grad = table.weight.grad.coalesce() / dist.get_world_size()
                dist.all_reduce(table.weight.grad)
            optimizer.step()
        peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        return {"ms": (time.perf_counter() - began_s) * 1e3 / steps, "peak_gb": peak_gb}

    with orders() as words:
        for _, answer in words:
            answer(turn())
    if name.startswith("gloo"):
        dist.destroy_process_group()
    else:
        bps.shutdown()


if __name__ == "__main__":
    main()
