"""A rank that sums until its standard input, rank 0's, ends; then it prints the number of right sums:
until_told.py [ELEMENTS]."""

from __future__ import annotations

import select
import sys

import torch

import byteps_py as bps

bps.init()
tensor = torch.full((int(sys.argv[1]) if sys.argv[1:] else 50_000,), float(bps.rank() + 1))
expected = torch.full_like(tensor, sum(range(1, bps.size() + 1)))
rounds = 0
is_over = torch.zeros(1)
while not is_over:
    assert torch.equal(bps.push_pull(tensor, name="values", average=False), expected)
    rounds += 1
    is_told = bps.rank() == 0 and bool(select.select([sys.stdin], [], [], 0)[0])
    is_over = bps.push_pull(torch.tensor([float(is_told)]), name="over", average=False)
    if rounds == 1:  # it has opened every port that it will open
        print(f"rank {bps.rank()} is ready", flush=True)
print(f"rank {bps.rank()} is done after {rounds} right sums", flush=True)
bps.shutdown()
