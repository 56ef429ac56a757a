"""Trains with a RunState and ``shadow=True``, from what servers hold. Nothing here depends on where it begins.

    run_state.py LOADER EPOCHS [PLACE EPOCH BATCH]

CHECKPOINTS: a variable, the folder of checkpoints to go on from if servers hold nothing.

LOADER: see LOADERS; "accumulated" takes two batches for each step, "elastic-job" is an elastic job, "in-backward" steps
in the backward pass, without a scaler. Each rank prints after each body of the loop ``rank R of SIZE body N: samples
I,J lr L scale S DIGEST``: the digest of the weights, buffers, and random numbers drawn then.
Waits for SIGKILL in the epoch and batch, where it prints ``waits``: PLACE is "body" (between optimizer.step() and the
rest of the body), "before" (optimizer.step()), "end" (of the epoch; BATCH has no meaning), or "never".
"""

from __future__ import annotations

import copy
import hashlib
import os
import random
import signal
import sys
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import byteps_py as bps

SAMPLES, BATCH, WIDTH = 36, 4, 20
#: The body whose gradients overflow.
OVERFLOW = 3


class Samples(Dataset[Any]):
    """Each with random noise of three kinds."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        noise = random.random() + np.random.rand() + torch.rand(())
        return index, torch.sin(torch.arange(WIDTH) * (index + 1.0)) + 0.1 * noise


def stateful() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader  # has a RandomSampler of its own

    return StatefulDataLoader(Samples(), BATCH, sampler=DistributedSampler(Samples(), bps.size(), bps.rank(), seed=3))


def stateful_shuffled() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Samples(), BATCH, shuffle=True)


LOADERS = {
    "shuffled": lambda: DataLoader(Samples(), BATCH, shuffle=True),
    "distributed": lambda: DataLoader(Samples(), BATCH, sampler=DistributedSampler(Samples(), bps.size(), bps.rank())),
    "accumulated": lambda: DataLoader(Samples(), 6, shuffle=True, generator=torch.Generator().manual_seed(4)),
    "workers": lambda: DataLoader(Samples(), BATCH, shuffle=True, num_workers=2),
    "elastic": lambda: DataLoader(Samples(), 3, sampler=bps.elastic.ElasticSampler(Samples())),
    "in-backward": lambda: DataLoader(Samples(), BATCH, shuffle=True),
    "elastic-job": lambda: DataLoader(Samples(), 3, sampler=bps.elastic.ElasticSampler(Samples())),
    "stateful": stateful,
    "stateful-shuffled": stateful_shuffled,
}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 60), torch.nn.BatchNorm1d(60), torch.nn.Tanh(), torch.nn.Dropout(0.2),
            torch.nn.Linear(60, 1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def digest(*models: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for model in models:
        for value in model.state_dict().values():
            found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def wait_to_be_killed() -> None:
    print(f"rank {bps.rank()} waits", flush=True)
    signal.pause()


def main() -> None:
    bps.init()
    torch.set_num_threads(1)
    kind, epochs, *crash = sys.argv[1:]
    place, crash_epoch, crash_batch = crash[0] if crash else "never", *(int(word) for word in crash[1:] or (0, 0))
    model = Net()
    average = copy.deepcopy(model)
    optimizer = bps.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=2 if kind == "accumulated" else 1,
        shadow=True,
        step_in_backward=kind == "in-backward",
    )
    warming = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)  # after each step
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)  # after each epoch
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=kind != "in-backward")
    random.seed(bps.rank())
    np.random.seed(10 + bps.rank())
    torch.manual_seed(20 + bps.rank())
    loader = LOADERS[kind]()
    extra = {"average": average, "losses": []}

    def train(state: Any) -> None:
        run = bps.RunState(
            model, optimizer, scheduler=[warming, plateau], scaler=scaler, loader=loader, extra=extra,
            path=os.environ.get("CHECKPOINTS"),
        )  # fmt: skip
        for epoch in run.epochs(int(epochs)):
            torch.rand(1)  # what an epoch begins with is not repeated
            for samples, inputs in run:
                if kind == "elastic-job":
                    time.sleep(0.02)  # so that there is time to kill one of them
                is_here = (epoch, run.batch) == (crash_epoch, crash_batch)
                if is_here and place == "before":
                    wait_to_be_killed()
                loss = model(inputs).square().mean()
                is_bad = scaler.is_enabled() and run.iteration == OVERFLOW
                scaler.scale(loss * (float("inf") if is_bad else 1.0)).backward()
                if kind != "accumulated" or run.batch % 2 == 0:
                    scaler.step(optimizer)
                    if is_here and place == "body":
                        wait_to_be_killed()
                    scaler.update()
                    optimizer.zero_grad()
                    warming.step()
                run.extra["losses"] = [*run.extra["losses"], loss.item()][-4:]
                for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                    mean.data.lerp_(value.data, 0.1)
                used = ",".join(str(int(each)) for each in samples)
                drawn = random.random() + np.random.rand() + float(torch.rand(()))
                print(
                    f"rank {bps.rank()} of {bps.size()} body {run.iteration}: samples {used} "
                    f"lr {optimizer.param_groups[0]['lr']!r} scale {scaler.get_scale():g} "
                    f"{digest(model, average)} {drawn!r} {sum(run.extra['losses'])!r}",
                    flush=True,
                )
            if epoch == crash_epoch and place == "end":
                wait_to_be_killed()
            plateau.step(float(bps.push_pull(torch.tensor(sum(run.extra["losses"]) + random.random()), name="losses")))

    if kind == "elastic-job":
        bps.elastic.run(train)(bps.elastic.TorchState(model=model, optimizer=optimizer))
    else:
        train(None)
    bps.shutdown()


if __name__ == "__main__":
    main()
