"""CUDA tensors give what host tensors give: copies on the side stream, page-locked slots, conversions on the device."""

from __future__ import annotations

import copy

import pytest
import torch
from support.threaded import ThreadedCluster, contract
from torch import nn
from torch_training import wrap
from torch_values import values

import byteps_py.torch as bps

MACHINES = (2, 1)
SIZE = sum(MACHINES)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("shared_memory", [True, False])
def test_cuda_tensors_are_reduced_like_host_tensors(shared_memory) -> None:
    def main(rank: int):
        found = []
        for shape in ((), (3,), (5, 7), (1 << 20,)):
            x = values(rank, torch.float32, shape).cuda()
            found += [bps.push_pull(x, average=False, name=f"{shape}").cpu() for _ in range(3)]
            bps.broadcast_(x, 1)
            found.append(x.cpu())
            found.append(bps.push_pull(x.t() if x.dim() == 2 else x, compression=bps.Compression.fp16).cpu())
        return found

    for found in ThreadedCluster(MACHINES, shared_memory).run(main):
        for i, shape in enumerate(((), (3,), (5, 7), (1 << 20,))):
            parts = [values(rank, torch.float32, shape) for rank in range(SIZE)]
            total = contract(parts, MACHINES)
            assert all(torch.equal(result, total) for result in found[5 * i : 5 * i + 3])
            assert torch.equal(found[5 * i + 3], parts[1])
            root = [parts[1].half()] * SIZE
            mean = contract(root, MACHINES, average=True).float()
            assert torch.equal(found[5 * i + 4], mean.t() if len(shape) == 2 else mean)


@pytest.mark.parametrize("rows", [3, 5000])
def test_cuda_tensors_are_gathered_exchanged_and_scattered_like_host_tensors(rows) -> None:
    def collect(rank: int, device: str) -> list[torch.Tensor]:
        x = values(rank, torch.float32, (rows + rank, 7)).to(device)
        found = []
        for turn in range(3):  # memory that a copy may still be reading is used again
            found.append(bps.allgather(x + turn, name="x"))
            found += bps.grouped_allgather([x.long(), x[:1] > turn], name="x")
            found += bps.alltoall(x + turn, [1, 0, 2], name="x")
            found.append(bps.reducescatter(x[:rows] + turn, name="x", postscale_factor=2.0))
            found.append(bps.allreduce(x[:rows] + turn, name="x", prescale_factor=0.5, op=bps.Sum))
            handles = [bps.allgather_async(x * turn, name=f"{i}") for i in range(4)]
            found += [bps.synchronize(handle) for handle in handles]
        received = found[4]
        assert received.dtype is torch.int32
        assert all(tensor.device.type == device for tensor in found if tensor.dtype is not torch.int32)
        return [tensor.cpu() for tensor in found]

    on_host = ThreadedCluster(MACHINES).run(lambda rank: collect(rank, "cpu"))
    on_device = ThreadedCluster(MACHINES).run(lambda rank: collect(rank, "cuda"))
    for host, device in zip(on_host, on_device, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(host, device, strict=True))


@pytest.mark.parametrize("compression", [bps.Compression.none, bps.Compression.bf16])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_cuda_gradients_are_averaged_exactly(compression, set_to_none) -> None:
    def grads(rank: int, model: nn.Module) -> list[torch.Tensor]:
        x = torch.arange(12.0).mul(rank + 1).view(1, 12).cuda()  # exact in any order: no reference to a kernel
        model(x).sum().backward()
        return [p.grad for p in model.parameters()]

    def main(rank: int):
        model = nn.Sequential(nn.Linear(12, 3), nn.Linear(3, 2)).cuda()
        for param in model.parameters():
            nn.init.ones_(param)
        optimizer = wrap(model, lambda params: torch.optim.SGD(params, lr=0.0), compression=compression)
        history = []
        for _ in range(3):
            grads(rank, model)
            optimizer.synchronize()
            history.append([p.grad.cpu().clone() for p in model.parameters()])
            optimizer.zero_grad(set_to_none=set_to_none)
        model.zero_grad()
        return history, [grad.cpu() for grad in _local(grads, rank, model)]

    results = ThreadedCluster((2, 1)).run(main)
    wire = compression.wire_dtype(torch.float32)
    for position, parts in enumerate(zip(*[local for _, local in results], strict=True)):
        mean = contract([part.to(wire) for part in parts], (2, 1), average=True).float()
        for history, _ in results:
            assert all(torch.equal(step[position], mean) for step in history)


def _local(grads, rank, model):
    """Gradients of a copy that nothing reduces."""
    return grads(rank, copy.deepcopy(model))


def test_work_that_is_queued_on_streams_is_waited_for() -> None:
    """Values that a stream still computes are added, and work on the caller's stream sees the result."""

    def main(rank: int):
        stream = torch.cuda.Stream()
        found = []
        with torch.cuda.stream(stream):
            x = torch.zeros(1 << 20, device="cuda")
            for step in range(3):
                torch.cuda._sleep(20_000_000)  # about 10 ms
                x.fill_(rank + step)
                y = bps.push_pull(x, average=False, name="x")
                z = y + 1
                bps.push_pull_inplace(x, average=False, name="in place")
                found.append((z.clone(), x.clone()))
        stream.synchronize()
        return [(z.cpu(), x.cpu()) for z, x in found]

    for steps in ThreadedCluster(MACHINES, shared_memory=True).run(main):
        for step, (z, x) in enumerate(steps):
            total = sum(rank + step for rank in range(SIZE))
            assert torch.equal(z, torch.full_like(z, total + 1))
            assert torch.equal(x, torch.full_like(x, total))
