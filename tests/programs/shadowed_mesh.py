"""Trains a model in parts with ``ParallelOptions(shadow=True)``, from the last step that servers hold.

    shadowed_mesh.py TPxCPxPPxDP[:STATES[:FLAG…]] STEPS [SECONDS]

FLAG: "tied" for a model whose first and last layer share a weight; "by_hand" for ``restore`` in place of a RunState;
"int8" for gradients that travel so.
Each rank prints ``rank R: restored at S`` first, then after each step ``rank R: step N: DIGEST`` of its parameters and
buffers, and at the end ``rank R: metrics`` with what bps.metrics() says. Waits so long after each step. The third
step's gradients overflow in one part of the model.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

import byteps_py.torch as bps
from byteps_py.parallel import Mesh, ParallelOptions, ParallelTraining, parallelize_model
from byteps_py.parallel.tensor import Column, Row

WIDTH, ROWS = 16, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.w2(self.w1(x).tanh()))


def new_training(mesh: Mesh, states: str, flags: list[str]) -> ParallelTraining:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, WIDTH))
    if "tied" in flags:
        model[5].weight = model[0].weight
    options = ParallelOptions(
        plan={"*.w1": Column(), "*.w2": Row()}, micro_batches=2, max_norm=0.5, hosted=states or True, shadow=True,
        compression=bps.Compression.int8 if "int8" in flags else bps.Compression.none,
    )  # fmt: skip
    new_optimizer = functools.partial(torch.optim.AdamW, lr=0.01)
    return parallelize_model(model, mesh, nn.functional.mse_loss, new_optimizer, options)


def digest(module: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        found.update(name.encode() + value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    dist.init_process_group("byteps")
    torch.set_num_threads(1)  # sums of a layer have other bits with more
    sizes, states, *flags = (*sys.argv[1].split(":"), "")
    steps, seconds = int(sys.argv[2]), float((sys.argv[3:] or ["0"])[0])
    mesh = Mesh(*(int(one) for one in sizes.split("x")))
    training = new_training(mesh, states, flags)
    training.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    module = training.local_module
    if by_hand := "by_hand" in flags:
        begun = training.restore() or 0
        if begun:
            training.scaler.load_state_dict(training.optimizer.shadow_extra)
        numbers: Iterable[int] = range(begun, steps)
    else:
        run = bps.RunState(module, training.optimizer, scaler=training.scaler)
        begun, numbers = run.iteration, run.iterations(steps)
    print(f"rank {bps.rank()}: restored at {begun}", flush=True)
    spoiled = next(iter(module.parameters()))
    for step in numbers:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(ROWS * mesh.dp, WIDTH, generator=generator).chunk(mesh.dp)[mesh.rank("dp")]
        is_bad = step == 2 and bps.rank() == bps.size() - 1
        worse = spoiled.register_hook(lambda grad: grad * float("inf")) if is_bad else None
        if by_hand:
            training.optimizer.shadow_extra = training.scaler.state_dict()
        training.step(inputs, inputs.flip(1))
        if mesh.rank("tp") == mesh.rank("cp") == 0 and mesh.rank("pp") == mesh.pp - 1:
            bps.count_batch(tokens=len(inputs) * WIDTH, samples=len(inputs))
        if worse is not None:
            worse.remove()
        print(f"rank {bps.rank()}: step {step + 1}: {digest(module)}", flush=True)
        time.sleep(seconds)
    print(f"rank {bps.rank()}: metrics {json.dumps(bps.metrics())}", flush=True)
    if not max(steps - 5, 1) <= training.optimizer.shadow_step < steps:
        raise SystemExit(f"after step {steps}, step {training.optimizer.shadow_step} is known to be held")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
