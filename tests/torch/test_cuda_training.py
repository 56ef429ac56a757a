"""Horovod's ways of training with CUDA tensors give what host tensors give."""

from __future__ import annotations

import pytest
import torch
from support.threaded import ThreadedCluster
from torch import nn
from torch_training import Net, wrap
from torch_values import values

import byteps_py.torch as bps
from byteps_py.torch.collectives.context import current
from byteps_py.torch.operations.adasum import adasum

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def on_both(main):
    """main(rank, device) on two ranks, for host and device."""
    return [ThreadedCluster((1, 1)).run(lambda rank, device=device: main(rank, device)) for device in ("cpu", "cuda")]


def test_adasum() -> None:
    def main(rank: int, device: str):
        found = adasum(current(), [values(rank, torch.float32).to(device), torch.ones(3, device=device)], "x")
        assert all(tensor.device.type == device for tensor in found)
        return [tensor.cpu() for tensor in found]

    host, device = on_both(main)
    assert all(torch.equal(a, b) for x, y in zip(host, device, strict=True) for a, b in zip(x, y, strict=True))


# torch 2.11 says so for the tensors that coalesce() makes itself.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_gradients() -> None:
    def main(rank: int, device: str):
        model = nn.Embedding(9, 4, sparse=True).to(device)
        optimizer = wrap(model)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor([rank, 5], device=device)).sum().backward()
            optimizer.synchronize()
        assert model.weight.grad.device.type == device
        return model.weight.grad.to_dense().cpu()

    host, device = on_both(main)
    assert all(torch.equal(a, b) for a, b in zip(host, device, strict=True))


@pytest.mark.parametrize("options", [{"op": bps.Adasum}, {"gradient_predivide_factor": 2.0}], ids=str)
def test_optimizers(options) -> None:
    def main(rank: int, device: str):
        model = Net().to(device)
        optimizer = wrap(model, **options)
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(4, 12, generator=generator).to(device), True).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach().cpu() for param in model.parameters()]

    host, device = on_both(main)
    for x, y in zip(host, device, strict=True):
        for a, b in zip(x, y, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
