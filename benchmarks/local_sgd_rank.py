"""One rank of benchmarks/local_sgd.py: the GPT of examples/gpt.py. Arguments: the contender, width and layers, steps
from one outer step to the next, steps of a turn, the learning rate of the outer step and its Nesterov momentum."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn import functional

import byteps_py as bps
from benchmarks.turns import orders
from examples.gpt import GPT, random_batch, read_text

_CONTEXT, _SEQUENCES, _HELD_OUT_BATCHES = 64, 8, 40


def _diloco(name: str, model: nn.Module, inner: torch.optim.Optimizer, every: int, lr: float, momentum: float) -> Any:
    outer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
    compression = {
        "diloco": bps.Compression.none,
        "diloco_int8": bps.Compression.with_error_feedback(bps.Compression.int8),
        "diloco_topk": bps.Compression.topk(0.03, bits=2),
    }
    return bps.local.DiLoCo(model, inner, outer, every=every, compression=compression[name])


def main() -> None:
    name, *numbers = sys.argv[1:]
    width, layers, every, steps = map(int, numbers[:4])
    lr, momentum = map(float, numbers[4:])
    torch.set_num_threads(1)
    letters, data, held_out = read_text()
    torch.manual_seed(0)
    model = GPT(len(letters), _CONTEXT, width, layers, heads=4)
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    forward: nn.Module = model
    if name == "gloo":
        dist.init_process_group("gloo")
        rank, optimizer = dist.get_rank(), inner
        ddp = nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(None, fp16_compress_hook)
        forward = ddp
    else:
        bps.init()
        rank = bps.rank()
        if name == "fp16":
            bps.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer = bps.DistributedOptimizer(inner, model.named_parameters(), bps.Compression.fp16)
        else:
            optimizer = _diloco(name, model, inner, every, lr, momentum)

    def loss_of(source: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        inputs, targets = random_batch(source, _SEQUENCES, _CONTEXT, generator)
        return functional.cross_entropy(forward(inputs).flatten(0, 1), targets.flatten())

    own = torch.Generator().manual_seed(1 + rank)

    def train() -> dict[str, float]:
        began_s = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(data, own).backward()
            optimizer.step()
        peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        return {"ms": (time.perf_counter() - began_s) * 1e3 / steps, "peak_gb": peak_gb}

    def evaluate() -> float:
        if name.startswith("diloco"):
            optimizer.synchronize()
        with torch.no_grad():
            losses = [loss_of(held_out, torch.Generator().manual_seed(i)) for i in range(_HELD_OUT_BATCHES)]
        return float(torch.stack(losses).mean())

    does: dict[str, Callable[[], object]] = {"steps": train, "loss": evaluate}
    with orders() as words:
        for word, answer in words:
            answer(does[word]())
    if name == "gloo":
        dist.destroy_process_group()
    else:
        bps.shutdown()


if __name__ == "__main__":
    main()
