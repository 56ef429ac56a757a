"""What BytePS's examples call (benchmark, cross barrier, DDP, elastic), with its import changed to ours."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F  # noqa: N812  as BytePS's users write

import byteps_py.torch as bps
import byteps_py.torch.cross_barrier as crossing
from byteps_py.torch.parallel import DistributedDataParallel as DDP  # noqa: N817

STEPS = 4


def network() -> torch.nn.Module:
    torch.manual_seed(bps.rank())  # the broadcast makes them equal
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5)
    )


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(7 + bps.rank())
    for _ in range(STEPS):
        data = torch.rand(8, 1, 8, 8, generator=generator)
        target = torch.randint(5, (8,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def main() -> None:
    torch.set_num_threads(1)
    bps.init()
    found = []

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = bps.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=bps.Compression.none
    )
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    bps.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer)
    found.append(weights(model))

    model = network()
    optimizer = crossing.CrossBarrier(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=crossing.Compression.none,
        num_steps=STEPS,
    )
    crossing.broadcast_parameters(model.state_dict(), root_rank=0)
    crossing.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer)
    found.append(weights(model))

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model = DDP(model, device_ids=[bps.local_rank()], broadcast_buffers=False)
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    bps.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer)
    found.append(weights(model))
    assert all(torch.equal(found[0], other) for other in found[1:]), found

    bps.suspend()
    place = bps.rank(), bps.local_rank(), bps.size()
    bps.resume(int(os.environ["DMLC_NUM_WORKER"]), int(os.environ["DMLC_NUM_SERVER"]), bps.rank())
    assert place == (bps.rank(), bps.local_rank(), bps.size())
    assert torch.equal(bps.push_pull(found[0], average=True, name="weights"), found[0])
    if bps.rank() == 0:
        print(f"{bps.size()} ranks: equal weights with and without barrier, and after resume")
    bps.shutdown()


if __name__ == "__main__":
    main()
