"""What horovod.torch offers beside its collectives, on a real job: every rank checks its results, and says so.

Adasum, sparse gradients of every kind, a predivided average, SyncBatchNorm, join; an elastic training whose ranks
disagree in the middle of a step, go back and go on; with the argument "lost" the last rank dies there instead.
"""

from __future__ import annotations

import os
import sys

import cases  # noqa: F401  (the default device)
import torch
from torch import nn

import byteps_py as bps
from byteps_py.torch.collectives.context import current
from byteps_py.torch.operations.adasum import adasum, start


def check(what: str, good: bool) -> None:
    if not good:
        sys.exit(f"rank {bps.rank()}: {what} is wrong")


def alike(what: str, tensor: torch.Tensor) -> None:
    """All ranks have these bits."""
    check(what, torch.equal(bps.broadcast(tensor.detach(), 0, name=f"alike.{what}"), tensor))


def check_adasum() -> None:
    same = torch.linspace(-3, 3, 5000)
    alone = torch.zeros(bps.size())
    alone[bps.rank()] = 0.1
    for _ in range(3):
        equal, orthogonal = adasum(current(), [same, alone], "known")
        check("adasum of equal vectors", torch.equal(equal, same))
        check("adasum of orthogonal vectors", torch.equal(orthogonal, torch.full((bps.size(),), 0.1)))
    names = [f"x{i}" for i in range(4)]
    random = torch.randn(700, generator=torch.Generator(torch.get_default_device()).manual_seed(bps.rank()))
    running = {name: start(current(), [random], name) for name in names}
    for name in names if bps.rank() % 2 else names[::-1]:
        alike("adasum", running[name].wait()[0])


def check_adasum_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 1))
    optimizer = bps.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters(), op=bps.Adasum
    )
    x = torch.randn(8, 3, generator=torch.Generator(torch.get_default_device()).manual_seed(bps.rank()))
    for _ in range(3):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for i, param in enumerate(model.parameters()):
        alike(f"adasum training {i}", param)


def check_sparse() -> None:
    """In step 0 the gradients are sparse on even ranks and missing on odd ones, then all sparse, then odd dense."""
    torch.manual_seed(0)
    table, other = nn.Parameter(torch.zeros(50, 4)), nn.Parameter(torch.zeros(3))
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([table, other], lr=1.0), [("table", table), ("other", other)])
    evens = -(-bps.size() // 2)
    for step in range(3):
        if bps.rank() % 2 == 0 or step == 1:
            rows = nn.functional.embedding(torch.tensor([7, 8 + bps.rank()]), table, sparse=True)
            rows.sum().backward()
        elif step == 2:
            (table[7] * 1.0).sum().backward()
        (other * 2).sum().backward()
        optimizer.synchronize()
        dense = table.grad.to_dense()
        takers = bps.size() if step else evens
        check(f"the sparse gradient of step {step}", torch.equal(dense[7], torch.full((4,), takers / bps.size())))
        check("the dense gradient beside it", torch.equal(other.grad, torch.full((3,), 2.0)))
        check("its kind", table.grad.is_sparse)
        optimizer.zero_grad()


def check_sparse_beside_dense() -> None:
    """From the first step on, gradients of even ranks are sparse and those of odd ranks dense, and leave at once."""
    table = nn.Parameter(torch.zeros(5, 2))
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([table], lr=1.0), [("mixed", table)])
    for _ in range(2):
        if bps.rank() % 2:
            bps.barrier()  # while the other ranks' gradients are in flight
            (table * torch.tensor([[1.0], [0], [0], [2], [0]])).sum().backward()
        else:
            nn.functional.embedding(torch.tensor([0, 3, 3]), table, sparse=True).sum().backward()
            bps.barrier()
        optimizer.synchronize()
        expected = torch.tensor([[1.0], [0], [0], [2], [0]]).expand(5, 2)
        check("a sparse gradient beside a dense one", torch.equal(table.grad.to_dense(), expected))
        optimizer.zero_grad()


def check_process_set() -> None:
    """The first and the last rank train together, each way; ranks between them do nothing of it."""
    ends = sorted({0, bps.size() - 1})
    pair = bps.add_process_set(ends) if len(ends) < bps.size() else bps.global_process_set
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    for options in ({}, {"op": bps.Adasum}):
        params = list(model.parameters()) if not options else list(model[2].parameters())
        optimizer = bps.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), process_set=pair, **options)
        for step in range(2):
            model(torch.tensor([[bps.rank() % 5, step], [5, 5]])).square().sum().backward()
            optimizer.step()
            model.zero_grad() if options else optimizer.zero_grad()
    if bps.rank() in ends:
        norm = bps.SyncBatchNorm(3, process_set=pair)
        norm(torch.randn(2, 3, generator=torch.Generator(torch.get_default_device()).manual_seed(bps.rank())))
        for i, tensor in enumerate([*model.parameters(), norm.running_mean]):
            name = f"ends.{i}"
            first = bps.broadcast(tensor.detach(), 0, name=name, process_set=pair)
            check("training in a process set", torch.equal(first, tensor))


def check_predivide() -> None:
    weight = nn.Parameter(torch.zeros(5))
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("w", weight)], gradient_predivide_factor=float(bps.size())
    )
    (weight * (bps.rank() + 1.0) * bps.size()).sum().backward()
    optimizer.step()
    check("a predivided average", torch.equal(weight, torch.full((5,), -sum(range(1, bps.size() + 1)) * 1.0)))


def check_batch_norm() -> None:
    layer = bps.SyncBatchNorm(2)
    batches = [
        torch.randn(2 + rank, 2, 3, generator=torch.Generator(torch.get_default_device()).manual_seed(rank))
        for rank in range(bps.size())
    ]
    whole = torch.cat(batches).requires_grad_()
    expected = nn.BatchNorm1d(2)(whole)
    (expected * expected.sigmoid()).sum().backward()
    own = batches[bps.rank()].requires_grad_()
    found = layer(own)
    (found * found.sigmoid()).sum().backward()
    first = sum(2 + rank for rank in range(bps.rank()))
    rows = slice(first, first + 2 + bps.rank())
    check("SyncBatchNorm", torch.allclose(found, expected[rows], atol=1e-5))
    check("SyncBatchNorm's gradient", torch.allclose(own.grad, whole.grad[rows], atol=1e-5))
    alike("running_var", layer.running_var)


def check_join() -> None:
    """Ranks with different numbers of batches, for two epochs."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("joined", weight)])
    for _ in range(2):
        for _ in range(bps.rank() + 1):
            (weight * bps.size()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        bps.join()
        bps.broadcast_parameters([("joined", weight.data)], bps.size() - 1)
    check("training with join", torch.equal(weight, torch.full((3,), -1.0 * bps.size() * (bps.size() + 1))))


def elastic(lost: bool) -> tuple[float, list[str]]:
    """A training whose step 2 fails twice after its backward pass, or in which a rank dies there."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("elastic", weight)])
    left = [2]
    events: list[str] = []

    @bps.elastic.run
    def train(state):
        while state.step < 5:
            fails = state.step == 2 and left[0] > 0
            if not (fails and left[0] == 1 and bps.rank() % 2):  # the second time odd ranks fail earlier
                # What a step that fails has handed over must count nowhere.
                (weight * (100.0 if fails else state.step + 1.0)).sum().backward()
            if fails:
                left[0] -= 1
                if lost and bps.rank() == bps.size() - 1:
                    os._exit(0)  # bpslaunch ends the others of a rank that fails, and this is about them
                bps.push_pull(torch.ones(1 + bps.rank()), name="disagree")
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1
            state.commit()

    state = bps.elastic.TorchState(model=nn.ParameterList([weight]), optimizer=optimizer, step=0)
    state.register_reset_callbacks([lambda: events.append(f"reset at {state.step}")])
    train(state)
    return weight[0].item(), events


def main() -> None:
    torch.set_num_threads(1)
    bps.init()
    lost = "lost" in sys.argv
    if lost:
        try:
            elastic(lost)
        except bps.RendezvousError as error:
            os.write(1, f"rank {bps.is_initialized()}: {error}\n".encode())
            sys.exit(4)
    parts = [check_adasum, check_adasum_training, check_sparse, check_sparse_beside_dense, check_process_set]
    parts += [check_predivide, check_batch_norm, check_join]
    for part in parts:
        part()
    result, events = elastic(lost)
    check("an elastic training", (result, events) == (-15.0, ["reset at 2"] * 2))
    os.write(1, f"rank {bps.rank()} of {bps.size()}: all right\n".encode())
    bps.shutdown()


if __name__ == "__main__":
    main()
