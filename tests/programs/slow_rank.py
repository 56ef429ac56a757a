"""Rank 2 computes three times as long as the others, in each step, until rank 0 is told to end."""

from __future__ import annotations

import sys
import threading
import time

import torch

import byteps_py as bps

STEP_S = 0.03

bps.init()
is_over = torch.zeros(1)
told = threading.Event()
if bps.rank() == 0:
    threading.Thread(target=lambda: (sys.stdin.readline(), told.set()), daemon=True).start()
gradients = [torch.ones(10_000) for _ in range(4)]
model = torch.nn.Linear(100, 100)
optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.001), model.named_parameters())
while not is_over.item():
    optimizer.zero_grad()
    time.sleep(3 * STEP_S if bps.rank() == 2 else STEP_S)
    model(torch.ones(100)).sum().backward()
    optimizer.step()
    is_over = bps.allreduce(torch.full((1,), float(told.is_set())), op=bps.Sum, name="end")
bps.shutdown()
