"""Two epochs of uneven training data with DistributedOptimizer. Run by test_join.py under bpslaunch."""

from __future__ import annotations

import os

import torch

import byteps_py as bps

#: Batches of each rank, by epoch. In the first one, a rank joins before it has made a step.
EPOCHS = ((0, 1), (1, 3), (4, 2))


def gradient(epoch: int, step: int, rank: int) -> float:
    return float(1 + epoch + 10 * step + 100 * rank)


def main() -> None:
    bps.init()
    rank, size = bps.rank(), bps.size()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters()
    )
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    weight = 0.0
    for epoch, counts in enumerate(EPOCHS):
        for step in range(counts[rank]):
            optimizer.zero_grad()
            (model.weight * gradient(epoch, step, rank)).sum().backward()
            optimizer.step()
            weight -= sum(gradient(epoch, step, r) for r in range(size) if counts[r] > step) / size
            assert model.weight.item() == weight, (epoch, step, model.weight.item(), weight)
        last = bps.join()
        assert last == counts.index(max(counts)), last
        bps.broadcast_parameters(model.state_dict(), root_rank=last)
        weight = model.weight.item()
    total = bps.push_pull(torch.ones(3), name="after", average=False)
    assert torch.equal(total, torch.full((3,), float(size)))
    os.write(1, f"rank {rank} is done\n".encode())
    bps.shutdown()


if __name__ == "__main__":
    main()
