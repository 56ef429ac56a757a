"""A rank that trains for some steps, and prints which operators of torch touched gradients, in units of whole ones."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import byteps_py as bps

COUNT = 1 << 20
STEPS = int(sys.argv[1])


class Watch(TorchDispatchMode):
    """Sums up, by operator that has made or may have written to a tensor, what part of a gradient it had."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        largest = max((t.numel() for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor)), default=0)
        if largest > 1 and not is_view:
            self.seen[func._schema.name] += largest / COUNT
        return result


def main() -> None:
    bps.init()
    weight = torch.nn.Parameter(torch.zeros(COUNT))
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), [("weight", weight)])
    watch = Watch()
    rank = bps.rank()
    data = torch.full((COUNT,), float(rank + 1))
    place = 0
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        loss = torch.dot(weight, data)
        if not step:  # declares
            loss.backward()
            optimizer.step()
            continue
        with watch:
            loss.backward()
            optimizer.synchronize()
            place = weight.grad.data_ptr()
            with optimizer.skip_synchronize():
                optimizer.step()
        assert weight.grad.data_ptr() == place
    exact = bool((weight.detach() == -0.5 * (STEPS + 1) * (bps.size() + 1) / 2).all())
    mapped = Path("/proc/self/maps").read_text().splitlines()
    inside = any("memfd:byteps" in line and _covers(line, place) for line in mapped)
    answer = {"rank": rank, "operators": watch.seen, "exact": exact, "in_shared_memory": inside}
    os.write(1, (json.dumps(answer) + "\n").encode())
    bps.shutdown()


def _covers(line: str, address: int) -> bool:
    start, end = (int(edge, 16) for edge in line.split()[0].split("-"))
    return start <= address < end


if __name__ == "__main__":
    main()
