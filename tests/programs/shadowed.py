"""Trains with ``shadow=True``, from the last step that servers hold. Says what it has after each step.

    shadowed.py OPTIMIZER[+CODEC][-in-backward] STEPS [SECONDS]

Rank 0 prints ``restored at S`` first, then after each step ``step N: DIGEST``: of the parameters and buffers.
Waits so long after each step.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterable

import torch

import byteps_py as bps

OPTIMIZERS: dict[str, Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.02),
    "lamb": lambda params: bps.optim.LAMB(params, lr=0.01),
}


CODECS = {"": bps.Compression.none, "int8": bps.Compression.int8, "topk": bps.Compression.topk(0.3)}


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def make_model() -> torch.nn.Module:
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 300), torch.nn.BatchNorm1d(300), torch.nn.Tanh(), torch.nn.Dropout(0.1),
        torch.nn.Linear(300, 300), torch.nn.Tanh(), torch.nn.Linear(300, 4),
    )  # fmt: skip
    model[4].to(torch.bfloat16)
    return model


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    for layer in model:
        x = layer(x.to(next(layer.parameters()).dtype) if list(layer.parameters()) else x)
    return x.float().square().mean()


def main() -> None:
    bps.init()
    torch.set_num_threads(1)  # sums of a layer have other bits with more
    name, _, way = sys.argv[1].partition("-")
    kind, _, codec = name.partition("+")
    steps, seconds = int(sys.argv[2]), float((sys.argv[3:] or ["0"])[0])
    model = make_model()
    optimizer = bps.DistributedOptimizer(
        OPTIMIZERS[kind](model.parameters()),
        named_parameters=model.named_parameters(),
        compression=CODECS[codec],
        hosted="machine" if codec == "topk" else False,
        shadow=True,
        step_in_backward=bool(way),
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    torch.manual_seed(100 + bps.rank())
    begun = bps.restore(model, optimizer)
    if begun is not None:
        torch.set_rng_state(optimizer.shadow_extra["random"])
        scheduler.load_state_dict(optimizer.shadow_extra["scheduler"])
        scheduler.step()
    if bps.rank() == 0:
        print(f"restored at {begun}", flush=True)
    for step in range(begun or 0, steps):
        loss_of(model, torch.randn(8, 20)).backward()
        optimizer.shadow_extra = {"random": torch.get_rng_state(), "scheduler": scheduler.state_dict()}
        if step % 3 == 2 and not way:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if bps.rank() == 0:
            print(f"step {step + 1}: {digest(model)}", flush=True)
        time.sleep(seconds)
    if not max(steps - 5, 1) <= optimizer.shadow_step < steps:
        raise SystemExit(f"after step {steps}, step {optimizer.shadow_step} is known to be held")
    bps.shutdown()


if __name__ == "__main__":
    main()
