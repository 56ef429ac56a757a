"""Trains in stretches of ten steps: rank 0 waits for a line of its input before each. Prints a digest of the weights.

bpslaunch … python lent_training.py STRETCHES
"""

import hashlib
import sys

import torch

import byteps_py as bps

bps.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 16))
bps.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = bps.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), named_parameters=model.named_parameters()
)
samples = torch.Generator().manual_seed(1 + bps.rank())
for stretch in range(int(sys.argv[1])):
    print(f"stretch {stretch}", flush=True)
    if bps.rank() == 0:
        sys.stdin.readline()
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(32, 64, generator=samples)).square().mean().backward()
        optimizer.step()
digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
print(f"weights {digest}", flush=True)
bps.shutdown()
