"""Broadcasts of tensors, parameters, objects and optimizer states, bit for bit."""

from __future__ import annotations

import pytest
import torch
from support.threaded import ThreadedCluster
from torch import nn
from torch_values import same

import byteps_py.torch as bps
from byteps_py.torch.collectives.dtypes import WIRE
from byteps_py.torch.operations.broadcasts import CHUNK_BYTES, cut

MACHINES = (2, 1)
SIZE = sum(MACHINES)

# ---- broadcast -----------------------------------------------------------------------------------------------

EVERY_DTYPE = [*WIRE, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16]


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_broadcast_copies_bits(dtype) -> None:
    bits = [torch.randint(0, 2 if dtype is torch.bool else 256, (64,), dtype=torch.uint8) for _ in range(SIZE)]

    def main(rank: int):
        x = bits[rank].clone().view(dtype).view(2, -1)
        out = bps.broadcast(x, 1, name="x")
        assert same(x.view(torch.uint8), bits[rank].view(2, -1))
        handle = bps.broadcast_async_(x.t(), 2)  # not contiguous
        bps.synchronize(handle)
        return out, x, bps.synchronize(bps.broadcast_async(x[0, 0], 0))

    for out, x, scalar in ThreadedCluster(MACHINES).run(main):
        assert same(out.view(torch.uint8), bits[1].view(2, -1))
        assert same(x.view(torch.uint8), bits[2].view(2, -1))
        assert scalar.shape == ()


def test_broadcast_keeps_negative_zero_and_is_differentiable() -> None:
    def main(rank: int):
        x = torch.tensor([-0.0, float("nan"), 1.0] if rank == 1 else [1.0, 2.0, 3.0], requires_grad=True)
        y = bps.broadcast(x, 1)
        (y * (rank + 1)).sum().backward()
        return y.detach(), x.grad

    expected = torch.tensor([-0.0, float("nan"), 1.0])
    for rank, (y, grad) in enumerate(ThreadedCluster((1, 1)).run(main)):
        assert same(y, expected)
        assert grad.tolist() == ([1.5] * 3 if rank == 1 else [0.0] * 3)


def test_broadcast_parameters() -> None:
    def main(rank: int):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        model.register_buffer("flag", torch.tensor([rank == 1]))
        bps.broadcast_parameters(model.state_dict(), 1)
        bps.broadcast_parameters(list(model.named_parameters()), 1)
        bps.broadcast_parameters(list(model.parameters()), 1)
        for wrong in (model.named_parameters(), [model[0].weight, "x"], model):
            with pytest.raises(ValueError, match="invalid params of type"):
                bps.broadcast_parameters(wrong, 0)
        with pytest.raises(ValueError, match="not a tensor"):
            bps.broadcast_parameters({"lr": 0.1}, 0)
        return model.state_dict()

    first, *others = ThreadedCluster(MACHINES).run(main)
    assert first["flag"].tolist() == [True]
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_broadcast_parameters_of_different_models() -> None:
    def main(rank: int):
        with pytest.raises(bps.MismatchError, match=r"Parameter\.bias"):
            bps.broadcast_parameters(nn.Linear(2, 2 + rank).state_dict(), 0)
        bps.broadcast_parameters(nn.Linear(2, 2).state_dict(), 0)

    ThreadedCluster((1, 1)).run(main)


class _Unpicklable:
    def __reduce__(self):
        raise TypeError("not this one")


def test_broadcast_object() -> None:
    big = {"list": list(range(3000)), "bytes": bytes(range(256)) * 40_000}  # 10 MB: several windows of chunks

    def main(rank: int):
        assert bps.broadcast_object({"rank": rank, "none": None}, 1) == {"rank": 1, "none": None}
        assert bps.broadcast_object("", name="empty") == ""
        if rank == 0:
            with pytest.raises(TypeError, match="not this one"):
                bps.broadcast_object(_Unpicklable(), 0)
        else:
            with pytest.raises(bps.CommunicationError, match=r"rank 0 could not pickle .*: TypeError: not this one"):
                bps.broadcast_object(None, 0)
        return bps.broadcast_object(big if rank == 0 else None) == big

    assert all(ThreadedCluster(MACHINES).run(main))


def test_chunks_cover_all_bytes_once() -> None:
    lengths = [0, 3, CHUNK_BYTES[-1] + 5, 0, 0, 2 * CHUNK_BYTES[-1], 7, 0]
    ends = [0] * len(lengths)
    for size, pieces in cut(lengths):
        assert size in CHUNK_BYTES
        assert 0 < sum(length for _, _, length in pieces) <= size
        for buffer, start, length in pieces:
            assert start == ends[buffer]
            ends[buffer] += length
    assert ends == lengths


# ---- optimizer states ----------------------------------------------------------------------------------------


def _stepped(optimizer, steps: int):
    for _ in range(steps):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.rand_like(param)
        optimizer.step()
    return optimizer


MAKERS = {
    "adam": lambda params, rank: torch.optim.Adam(params, lr=0.1 * (rank + 1), amsgrad=rank == 0),
    "momentum": lambda params, rank: torch.optim.SGD(params, lr=1 + rank, momentum=0.5, nesterov=True),
    "sgd": lambda params, rank: torch.optim.SGD(params, lr=0.5 + rank, foreach=None if rank else True),
    "tensor lr": lambda params, rank: torch.optim.Adam(params, lr=torch.tensor(0.1 + rank), betas=(0.5, 0.9)),
    "adagrad": lambda params, rank: torch.optim.Adagrad(params, lr=0.1 + rank),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("wrapped", [True, False])
def test_broadcast_optimizer_state(kind, wrapped) -> None:
    def main(rank: int):
        model = nn.Linear(3, 2)
        optimizer = _stepped(MAKERS[kind](model.parameters(), rank), 2 * (rank == 1))
        if wrapped:
            optimizer = bps.DistributedOptimizer(optimizer)
        bps.broadcast_optimizer_state(optimizer, 1)
        return optimizer.state_dict()

    zero, one, two = ThreadedCluster(MACHINES).run(main)
    for other in (zero, two):
        assert repr(other) == repr(one)
        for index, state in one["state"].items():
            for key, value in state.items():
                assert type(other["state"][index][key]) is type(value)
                assert other["state"][index][key] is not value
                assert not isinstance(value, torch.Tensor) or same(other["state"][index][key], value)
        for group, expected in zip(other["param_groups"], one["param_groups"], strict=True):
            assert {key: type(value) for key, value in group.items()} == {k: type(v) for k, v in expected.items()}


def test_gradients_may_be_read_once_the_state_of_a_new_optimizer_is_broadcast() -> None:
    def main(rank: int) -> None:
        model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
        model[1].bias.requires_grad_(False)
        model[1].weight.grad = torch.ones(1, 2)
        optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        before = [param.detach().clone() for param in model.parameters()]
        if rank:
            bps.broadcast_optimizer_state(optimizer, 0, model)
        else:
            bps.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
        assert model[0].weight.grad.is_sparse
        assert not model[0].weight.grad.to_dense().any()
        assert torch.equal(model[1].weight.grad, torch.ones(1, 2))
        assert model[1].bias.grad is None
        assert all(map(torch.equal, before, model.parameters()))

    ThreadedCluster((1, 1)).run(main)


def test_lbfgs_state_is_refused() -> None:
    def main(rank: int):
        with pytest.raises(ValueError, match=r"cannot broadcast torch.optim.LBFGS state"):
            bps.broadcast_optimizer_state(torch.optim.LBFGS(nn.Linear(1, 1).parameters()), 0)

    ThreadedCluster((2,)).run(main)
