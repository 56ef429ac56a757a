"""One rank that trains until it is told to end, and writes down when: ``python rank.py FOLDER [elastic]``.

Each line of its own file in FOLDER is a JSON object: what happened (started, imported, ready, step, raises, error,
end), and at which time (``time.monotonic()``, the same clock in all processes). Files there tell it what to do: ``go``
to load torch, ``raise`` to fail, if it holds this rank's number, ``end`` that this is the last step.

A step is a real one: forward, backward with gradients averaged over all ranks meanwhile, an optimizer with momentum.
It begins with COMPUTE_S of rest, the part in which a GPU computes and the machine's CPU has nothing to do. What it
leads to is written as a hash of all weights, so that runs can be compared step by step.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
IS_ELASTIC = "elastic" in sys.argv[2:]
WIDTH, LAYERS = 512, 6  # 6.3 MB
COMPUTE_S = float(os.environ["RECOVERY_COMPUTE_S"])
_NAME = f"{os.environ['BYTEPS_MACHINE_ID']}.{os.environ.get('BYTEPS_LOCAL_RANK', '0')}"
_FILE = os.open(FOLDER / f"{_NAME}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def note(what: str, at_s: float | None = None, **more: Any) -> None:
    os.write(_FILE, (json.dumps({"what": what, "at": at_s or time.monotonic(), **more}) + "\n").encode())


while not (FOLDER / "go").exists():
    time.sleep(0.05)
note("started")

import torch  # noqa: E402
import xxhash  # noqa: E402

import byteps_py.torch as bps  # noqa: E402


def hash_of(model: torch.nn.Module) -> str:
    hashed = xxhash.xxh3_128()
    for parameter in model.parameters():
        hashed.update(parameter.detach().numpy())
    return hashed.hexdigest()


def batch(number: int) -> torch.Tensor:
    """The same in every run, and another one on every rank and in every step."""
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * number + bps.rank()))


def fail_if_told(number: int) -> None:
    told = FOLDER / "raise"
    if told.exists() and told.read_text() == str(bps.rank()):
        note("raises")
        raise ValueError(f"the data of step {number} are bad")


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)  # loads much of torch
    note("imported")
    try:
        bps.init()
        note("ready", pid=os.getpid())
        train(model, optimizer)
    except bps.HorovodInternalError as error:
        note("error", text=f"{type(error).__name__}: {error}")
        sys.exit(3)
    bps.shutdown()
    note("end")


def train(model: torch.nn.Module, local: torch.optim.Optimizer) -> None:
    optimizer = bps.DistributedOptimizer(local, named_parameters=model.named_parameters())

    def step(number: int) -> bool:
        """True if it was the last."""
        began_s = time.monotonic()
        time.sleep(COMPUTE_S)
        fail_if_told(number)
        inputs = batch(number)
        optimizer.zero_grad()
        (model(inputs) - inputs).pow(2).mean().backward()
        optimizer.step()
        is_last = bps.broadcast(torch.tensor([(FOLDER / "end").exists()]), 0, name="is_last")
        ended_s = time.monotonic()
        note("step", ended_s, began=began_s, number=number, size=bps.size(), weights=hash_of(model))
        return bool(is_last)

    @bps.elastic.run
    def train_elastically(state: Any) -> None:
        is_last = False
        while not is_last:
            is_last = step(state.number)
            state.number += 1
            state.commit()

    if IS_ELASTIC:
        train_elastically(bps.elastic.TorchState(model, optimizer, number=0))
        return
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    next(number for number in itertools.count() if step(number))


if __name__ == "__main__":
    main()
