"""An elastic job with ``shadow=True``: after each loss of ranks it goes on from its last step, not from a commit.

shadowed_elastic.py STEPS
"""

from __future__ import annotations

import hashlib
import sys
import time

import torch

import byteps_py as bps


def digest(model: torch.nn.Module) -> str:
    values = [value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for value in model.parameters()]
    return hashlib.sha256(b"".join(values)).hexdigest()[:16]


def main() -> None:
    bps.init()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Tanh(), torch.nn.Linear(300, 4))
    optimizer = bps.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01), named_parameters=model.named_parameters(), shadow=True
    )
    state = bps.elastic.TorchState(model=model, optimizer=optimizer)

    @bps.elastic.run
    def train(state: bps.elastic.TorchState) -> None:
        begun = bps.restore(model, optimizer) or 0
        print(f"rank {bps.rank()} of {bps.size()} begins at {begun}: {digest(model)}", flush=True)
        for step in range(begun, int(sys.argv[1])):
            torch.manual_seed(1000 * step + bps.rank())
            model(torch.randn(8, 20)).square().mean().backward()
            optimizer.shadow_extra = {"step": step}
            optimizer.step()
            optimizer.zero_grad()
            print(f"rank {bps.rank()} of {bps.size()} step {step + 1}: {digest(model)}", flush=True)
            time.sleep(0.02)  # so that there is time to kill one of them

    train(state)
    bps.shutdown()


if __name__ == "__main__":
    main()
