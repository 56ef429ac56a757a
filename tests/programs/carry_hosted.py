"""Steps of a hosted optimizer, whose bytes are counted: carry_hosted.py ELEMENTS STEPS.

If servers keep its states, it ends once they have all of them.
"""

from __future__ import annotations

import select
import sys
import time

import torch

import byteps_py as bps
from byteps_py.config.settings import Settings
from byteps_py.shadow import Restorable, ShadowReader, latest_step


def wait_until_held(settings: Settings, step: int) -> None:
    until_s = time.monotonic() + 60
    with ShadowReader(settings) as reader:
        while True:
            found = latest_step(reader.describe())
            if isinstance(found, Restorable) and found.step >= step:
                return
            if time.monotonic() > until_s:
                raise SystemExit(f"step {step} is not held: {found}")
            select.select([], [], [], 0.02)


def main() -> None:
    elements, steps = map(int, sys.argv[1:])
    bps.init()
    param = torch.nn.Parameter(torch.zeros(elements))
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("param", param)], hosted=True)
    for _ in range(steps):
        param.grad = None
        param.sum().backward()
        optimizer.step()
    if not torch.equal(param, torch.full_like(param, -float(steps))):
        raise SystemExit(f"wrong: {param}")
    settings = Settings.from_env()
    if settings.shadow:
        if bps.rank() == 0:
            wait_until_held(settings, steps)
        bps.barrier()
    bps.shutdown()


if __name__ == "__main__":
    main()
