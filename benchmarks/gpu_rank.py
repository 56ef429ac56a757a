"""One rank of benchmarks/gpu.py. Arguments: the device, the model's width and layers, MB of the sum, the contender."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent.parent))

import byteps_py as bps
from benchmarks.turns import orders

STEPS = 5
ROWS, TOKENS = 4, 512


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(call: Callable[[], Any], device: torch.device, count: int) -> float:
    """Of one of ``count`` calls."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return (time.perf_counter() - began) / count * 1e3


def copies(device: torch.device, nbytes: int) -> dict[str, float]:
    """GB/s of copies between the device and page-locked memory of the host."""
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    found = {}
    for name, target, source in (("to_host", here, there), ("to_device", there, here)):
        target.copy_(source)
        one = milliseconds(lambda target=target, source=source: target.copy_(source, non_blocking=True), device, 5)  # type: ignore[misc]
        found[name] = nbytes / one * 1e-6
    return found


def main() -> None:
    kind, width, layers, sum_mb, contender = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
    torch.set_num_threads(1)
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True, device=device)
    model: nn.Module = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    model_mb = sum(parameter.nbytes for parameter in model.parameters()) * 1e-6
    batch = torch.randn(ROWS, TOKENS, width, device=device)
    vector = torch.randn(sum_mb * 250_000, device=device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    add: Callable[[], Any] | None = None
    if contender == "byteps":
        bps.init()
        optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
        add = lambda: bps.push_pull_inplace(vector, average=True, name="vector")  # noqa: E731
    elif contender != "alone":
        dist.init_process_group(contender.split()[0])
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        add = lambda: dist.all_reduce(vector)  # noqa: E731

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(kind, torch.bfloat16):
            loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()

    facts = {"device": torch.cuda.get_device_name(device) if kind == "cuda" else "CPU", "model_mb": model_mb}
    first = {**facts, **copies(device, sum_mb * 1_000_000), "sum_mb": sum_mb, "steps": STEPS}
    with orders(first) as words:
        for word, answer in words:
            if word == "step":
                answer(milliseconds(step, device, STEPS))
            else:
                answer(None if add is None else milliseconds(add, device, STEPS))
    if contender == "byteps":
        bps.shutdown()
    elif contender != "alone":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
