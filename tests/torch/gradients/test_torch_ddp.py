"""DistributedDataParallel with plain optimizers: exact, and done when backward() returns."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from support.threaded import ThreadedCluster, contract
from torch import distributed as dist, nn
from torch.utils.checkpoint import checkpoint
from torch_training import Net, assert_same, gradients, loss_of, reference, state_of

import byteps_py.torch as bps
from byteps_py.errors import UsageError
from byteps_py.torch.gradients.distributed_data_parallel import DistributedDataParallel

MACHINES = (2, 2)
STEPS = 4


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def batch(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("fusion_bytes", [0, 600, 1 << 20])
def test_training_is_exact(set_to_none, fusion_bytes) -> None:
    def main(rank: int):
        model = DistributedDataParallel(Net())
        optimizer = sgd(model.parameters())
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model, rank, step).backward()
            optimizer.step()
        return state_of(model.module)

    states = ThreadedCluster(MACHINES, fusion_bytes=fusion_bytes).run(main)
    assert_same(states, reference(sgd, STEPS, MACHINES))


def test_compression() -> None:
    def main(rank: int):
        model = DistributedDataParallel(Net(), compression=bps.Compression.bf16)
        optimizer = sgd(model.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        return state_of(model.module)

    expected = reference(sgd, STEPS, MACHINES, wire=torch.bfloat16)
    assert_same(ThreadedCluster(MACHINES).run(main), expected)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_sync_accumulates(set_to_none) -> None:
    cluster = ThreadedCluster(MACHINES)

    def main(rank: int):
        model = DistributedDataParallel(Net())
        optimizer = sgd(model.parameters())
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=set_to_none)
            with model.no_sync():
                for pass_ in range(2):
                    loss_of(model, rank, 3 * step + pass_).backward()
            loss_of(model, rank, 3 * step + 2).backward()
            optimizer.step()
        return state_of(model.module)

    assert_same(cluster.run(main), reference(sgd, STEPS, MACHINES, passes=3))
    gradient_rounds = [name for name, _ in cluster.rounds if "Gradient" in name]
    assert len(gradient_rounds) == STEPS * len(set(gradient_rounds))


def test_the_forward_pass_decides() -> None:
    def main(rank: int):
        model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
        x = torch.full((1, 2), float(rank))
        with model.no_sync():
            loss = model(x).sum()
        loss.backward()
        assert torch.equal(model.module.weight.grad, x)
        model.zero_grad()
        loss = model(x).sum()
        with torch.no_grad():
            model(x)  # an evaluation in between
        loss.backward()
        assert torch.equal(model.module.weight.grad, torch.full((1, 2), 0.5))

    ThreadedCluster((1, 1)).run(main)


def test_two_backward_passes_without_zero_grad_add_up() -> None:
    def main(rank: int):
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        for value in (1.0, 2.0):
            model(torch.tensor([[value + rank]])).sum().backward()
        return model.module.weight.grad.item()

    assert ThreadedCluster((1, 1)).run(main) == [1.5 + 2.5] * 2


def test_ranks_start_equal_and_buffers_follow_rank_0() -> None:
    def main(rank: int):
        torch.manual_seed(rank)
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        module.register_buffer("mask", torch.tensor([rank == 0, True]))
        module.register_buffer("phase", torch.tensor([1j * rank, 2.0]))
        model = DistributedDataParallel(module)
        start = state_of(model)
        for step in range(2):
            model(batch(10 * rank + step, 8, 4)).square().sum().backward()
        own = module[1].running_mean.clone()
        with torch.no_grad():
            model.eval()(batch(0, 8, 4))
        return start, own, state_of(model)

    results = ThreadedCluster((1, 2)).run(main)
    for start, own, end in results:
        assert_same([start], results[0][0])
        assert_same([end], results[0][2])
        assert torch.equal(end["module.1.running_mean"], results[0][1])
        assert end["module.1.num_batches_tracked"] == 2
        assert own.shape == (4,)
    assert not torch.equal(results[1][1], results[0][1])
    assert results[0][0]["module.mask"].tolist() == [True, True]


def test_buffers_are_left_alone_if_told_so() -> None:
    def main(rank: int):
        model = DistributedDataParallel(nn.BatchNorm1d(4), broadcast_buffers=False)
        for step in range(2):
            model(batch(10 * rank + step, 8, 4)).square().sum().backward()
        return model.module.running_mean

    cluster = ThreadedCluster((1, 1))
    first, second = cluster.run(main)
    assert not torch.equal(first, second)
    assert not any(".Buffer." in name for name, _ in cluster.rounds)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
            hidden = checkpoint(self.net.first, x.requires_grad_(), use_reentrant=use_reentrant)
            return checkpoint(self.net.last, torch.relu(hidden), use_reentrant=use_reentrant)

    def main(rank: int):
        model = DistributedDataParallel(Checkpointed())
        loss_of(model, rank, 0).backward()
        return [p.grad for p in model.parameters()]

    by_rank = [gradients(Checkpointed(), rank, [0]) for rank in range(2)]
    for found in ThreadedCluster((2,)).run(main):
        for grad, parts in zip(found, zip(*by_rank, strict=True), strict=True):
            assert torch.equal(grad, contract(parts, (2,), average=True))


def test_checkpoints_that_compute_a_gradient_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)
            return checkpoint(self.layer, hidden, use_reentrant=True)

    def main(rank: int) -> None:
        model = DistributedDataParallel(Twice())
        with pytest.raises(bps.GradientOrderError, match=r"'layer\..*' came too often: .* use_reentrant=False"):
            model(torch.ones(1, 4)).sum().backward()

    ThreadedCluster((1,)).run(main)


def test_outputs_of_any_shape_and_double_use() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

        def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
            return {"ab": [self.a(x), self.b(x)]}

    def main(rank: int):
        model = DistributedDataParallel(Both())
        one, two = model(torch.ones(1, 1)), model(torch.full((1, 1), 2.0))
        used = one["ab"][rank] + two["ab"][0]  # rank 0 leaves b out
        used.sum().backward()
        return [p.grad.item() for p in model.parameters()]

    assert ThreadedCluster((1, 1)).run(main) == [[2.5, 0.5]] * 2


def test_autograd_grad_reduces_nothing() -> None:
    cluster = ThreadedCluster((1, 1))

    def main(rank: int):
        model = DistributedDataParallel(nn.Linear(2, 1))
        x = torch.ones(1, 2, requires_grad=True)
        torch.autograd.grad(model(x).sum(), x)
        assert model.module.weight.grad is None
        model(x).sum().backward()
        model.synchronize()  # nothing left to do
        return model.module.bias.grad.item()

    assert cluster.run(main) == [1.0, 1.0]
    assert len([name for name, _ in cluster.rounds if "Gradient" in name]) == 1


def test_errors_come_out_of_backward() -> None:
    cluster = ThreadedCluster((1, 1))

    def main(rank: int):
        model = DistributedDataParallel(nn.Linear(2, 1))
        loss = model(torch.ones(1, 2)).sum()
        bps.barrier()
        if rank == 0:
            cluster.fail(bps.PeerLostError("rank 1 is gone"))
            with pytest.raises(bps.PeerLostError, match="rank 1 is gone"):
                loss.backward()

    cluster.run(main)


def test_two_models_and_one_wrapped_again() -> None:
    def main(rank: int):
        module = nn.Linear(1, 1, bias=False)
        first, other = DistributedDataParallel(module), DistributedDataParallel(nn.Linear(1, 1, bias=False))
        (first(torch.ones(1, 1)) + 3 * other(torch.full((1, 1), float(rank)))).sum().backward()
        assert (module.weight.grad.item(), other.module.weight.grad.item()) == (1.0, 1.5)
        del first
        module.zero_grad()
        again = DistributedDataParallel(module)
        again(torch.full((1, 1), float(rank))).sum().backward()
        assert module.weight.grad.item() == 0.5

    ThreadedCluster((1, 1)).run(main)


def test_it_says_what_to_copy_and_save_instead() -> None:
    def main(rank: int) -> None:
        model = DistributedDataParallel(Net())
        for attempt in (copy.deepcopy, copy.copy, pickle.dumps, lambda it: torch.save(it, io.BytesIO())):
            with pytest.raises(UsageError, match=r"Copy model.module, or save and send model.module.state_dict\(\)"):
                attempt(model)
        mean = copy.deepcopy(model.module)  # of weights, say
        loss_of(mean, rank, 0).backward()
        assert all(p.grad is None for p in model.parameters())

    ThreadedCluster((1, 1)).run(main)


def test_torchs_module_takes_the_hook() -> None:
    """DistributedDataParallel compares the annotations of a hook with its own types; texts are none of them."""
    hook = inspect.signature(bps.ddp_comm_hook)
    assert hook.parameters["bucket"].annotation is dist.GradBucket
    assert hook.return_annotation == torch.futures.Future[torch.Tensor]
