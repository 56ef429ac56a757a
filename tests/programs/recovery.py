"""Trains in stretches of a few steps; before each, rank 0 waits for a line. Prints the digest of the weights, and the
longest step of each stretch. TEST_HOSTED: the services make the optimizer's steps. TEST_COMPRESSION: compresses the
gradients to this codec."""

from __future__ import annotations

import hashlib
import os
import sys
import time

import torch

import byteps_py as bps

WIDTH = 256
COMPRESSIONS = {
    "none": bps.Compression.none,
    "int8": bps.Compression.int8,
    "topk": bps.Compression.topk(0.05, error_feedback=True),
    "randomk": bps.Compression.randomk(0.05, error_feedback=True),
    "dithering": bps.Compression.with_momentum(bps.Compression.dithering(7)),
    "thc": bps.Compression.thc(),
}


def main(stretches: int, steps: int) -> None:
    bps.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        model.named_parameters(),
        COMPRESSIONS[os.environ.get("TEST_COMPRESSION", "none")],
        hosted="TEST_HOSTED" in os.environ,
    )
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    data = torch.Generator().manual_seed(bps.rank())
    for stretch in range(stretches):
        if bps.rank() == 0:
            print(f"stretch {stretch}", flush=True)
            sys.stdin.readline()
        bps.barrier()
        longest_s = 0.0
        for _ in range(steps):
            began_s = time.monotonic()
            x = torch.randn(8, WIDTH, generator=data)
            optimizer.zero_grad()
            (model(x) - x).pow(2).mean().backward()
            optimizer.step()
            longest_s = max(longest_s, time.monotonic() - began_s)
        if bps.rank() == 0:
            print(f"longest step of stretch {stretch}: {longest_s:.2f} s", flush=True)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"rank {bps.rank()} digest {hashlib.sha256(weights).hexdigest()}", flush=True)
    bps.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
