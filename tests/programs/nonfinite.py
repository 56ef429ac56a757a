"""A rank that gets NaN or infinity in its gradients, in every mode. Run by test_nonfinite.py under bpslaunch.

Each scenario is a job of its own under one launcher: init, a few steps, shutdown. Step 3 is poisoned on one rank. What
comes of it must be the same on all ranks, in that step, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import byteps_py as bps

torch.set_num_threads(1)
SIZE = int(os.environ["DMLC_NUM_WORKER"]) * int(os.environ["BYTEPS_LOCAL_SIZE"])
POISONED = SIZE - 1  # the rank
STEPS, BAD = 4, 3


@contextmanager
def job(mode: str) -> Iterator[int]:
    os.environ["BYTEPS_NONFINITE"] = mode
    bps.init()
    try:
        yield bps.rank()
    finally:
        bps.shutdown()


def model() -> torch.nn.Sequential:
    torch.manual_seed(1)
    # The first is large enough to travel alone and in parts, the rest travel together.
    return torch.nn.Sequential(torch.nn.Linear(64, 800), torch.nn.Linear(800, 3), torch.nn.Linear(3, 2))


def optimizer(net: torch.nn.Module, lr: float = 0.01) -> Any:
    return bps.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9), net.named_parameters(), op=bps.Sum
    )


def backward(net: torch.nn.Module, rank: int, scaler: torch.amp.GradScaler | None = None) -> None:
    """Gradients that differ by rank."""
    loss = net(torch.full((2, 64), 0.01 * (rank + 1))).sum()
    (loss if scaler is None else scaler.scale(loss)).backward()


def poison(net: torch.nn.Sequential, rank: int, value: float, where: tuple[int, int] = (5, 7)) -> Callable[[int], None]:
    """The gradient of the second layer's weight gets ``value`` in the bad step, on one rank, before it leaves."""
    now = 0

    def hook(grad: torch.Tensor) -> torch.Tensor:
        if now == BAD and rank == POISONED:
            grad = grad.clone()
            grad[where] = value
        return grad

    def at(step: int) -> None:
        nonlocal now
        now = step

    net[0].weight.register_hook(hook)
    return at


def digest(net: torch.nn.Module) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in net.parameters())


def same_everywhere(what: object) -> None:
    assert len(set(bps.allgather_object(what))) == 1, what


def error_of(act: Callable[[], object], kind: type[Exception]) -> str:
    try:
        act()
    except kind as error:
        return str(error)
    raise SystemExit(f"no {kind.__name__}")


def finite(net: torch.nn.Module) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in net.parameters())


def raises(value: float) -> None:
    with job("raise") as rank:
        net = model()
        opt, at = optimizer(net), poison(net, rank, value)
        said = ""
        for step in range(1, STEPS + 1):
            at(step)
            opt.zero_grad()
            backward(net, rank)
            if step == BAD:
                said = error_of(opt.step, bps.NonFiniteError)
            else:
                opt.step()
        assert finite(net)
        expected = (
            f"NaN or infinity from rank {POISONED}, step {BAD}: in the gradients of "
            "'0.weight' (1 of 51200 values, the first at [5, 7]); look at"
        )
        assert said.startswith(expected), said
        same_everywhere((said, digest(net)))


def skips(closure: bool, synchronized: bool) -> None:
    """As if the bad step had not been."""
    with job("skip") as rank:
        net, reference = model(), model()
        opt, at = optimizer(net), poison(net, rank, float("inf"))
        other = optimizer(reference)
        for step in range(1, STEPS + 1):
            at(step)
            opt.zero_grad()

            def evaluate(step: int = step) -> torch.Tensor:
                opt.zero_grad()
                backward(net, rank)
                return torch.tensor(float(step))

            if closure:
                assert float(opt.step(evaluate)) == step
            else:
                evaluate()
                if synchronized:
                    opt.synchronize()
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e6)
                    with opt.skip_synchronize():
                        opt.step()
                else:
                    opt.step()
            if step != BAD:
                other.zero_grad()
                backward(reference, rank)
                other.step()
        assert digest(net) == digest(reference)
        same_everywhere(digest(net))


def cross_barrier_skips() -> None:
    """What travels with the bad gradient is left out, the rest is not."""
    with job("skip") as rank:
        net = model()
        opt, at = bps.CrossBarrier(net, optimizer(net)), poison(net, rank, float("nan"))
        for step in range(1, STEPS + 1):
            at(step)
            backward(net, rank)
            opt.step()
            opt.zero_grad()
        opt.finish_updates()
        assert finite(net)
        same_everywhere(digest(net))


def cross_barrier_raises() -> None:
    with job("raise") as rank:
        net = model()
        opt, at = bps.CrossBarrier(net, optimizer(net)), poison(net, rank, float("nan"))
        told = {}
        for step in range(1, STEPS + 1):
            opt.zero_grad()
            try:
                at(step)
                backward(net, rank)
                opt.step()
                opt.zero_grad()
                opt.finish_updates()
            except bps.NonFiniteError as error:
                told[step] = str(error)
        assert list(told) == [BAD]
        assert f"rank {POISONED}, step {BAD}" in told[BAD], told
        assert finite(net)


def adasum(net: torch.nn.Module) -> Any:
    return bps.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), net.named_parameters(), op=bps.Adasum
    )


def adasum_raises_and_skips() -> None:
    """Nothing of the bad step stays in the weights, nor in the momentum, of any rank."""
    for mode in ("raise", "skip"):
        with job(mode) as rank:
            net, reference = model(), model()
            opt, at, other = adasum(net), poison(net, rank, float("nan")), adasum(reference)
            said = ""
            for step in range(1, STEPS + 1):
                at(step)
                backward(net, rank)
                if step == BAD and mode == "raise":
                    said = error_of(opt.step, bps.NonFiniteError)
                else:
                    opt.step()
                opt.zero_grad()
                if step != BAD:
                    backward(reference, rank)
                    other.step()
                    other.zero_grad()
            assert digest(net) == digest(reference)
            if mode == "raise":
                expected = f"NaN or infinity from rank {POISONED}, step {BAD}: in the gradients of '0.weight'; look at"
                assert said.startswith(expected), said
            same_everywhere((said, digest(net)))


def sparse_raises_and_skips() -> None:
    for mode in ("raise", "skip"):
        with job(mode) as rank:
            torch.manual_seed(1)
            table = torch.nn.Embedding(9, 3, sparse=True)
            opt = bps.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), table.named_parameters())
            said, before = "", b""
            for step in range(1, STEPS + 1):
                opt.zero_grad()
                rows = table(torch.tensor([rank, 5, 5]))
                factor = torch.tensor([[1.0], [float("inf") if step == BAD and rank == POISONED else 1.0], [1.0]])
                (rows * factor).sum().backward()
                if step == BAD and mode == "raise":
                    said = error_of(opt.step, bps.NonFiniteError)
                    before = digest(table)
                elif step == BAD:
                    before = digest(table)
                    opt.step()
                    assert digest(table) == before
                else:
                    opt.step()
            assert finite(table)
            assert digest(table) != before  # the step after the bad one was taken
            if mode == "raise":
                expected = f"NaN or infinity from rank {POISONED}, step {BAD}: in the gradients of 'weight' ("
                assert said.startswith(expected), said
                assert "the first at [5, 0]" in said, said
            same_everywhere((said, digest(table)))


def ddp_skips() -> None:
    with job("skip") as rank:
        net = model()
        wrapped = bps.parallel.DistributedDataParallel(net)
        at = poison(net, rank, float("nan"))
        sgd = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in range(1, STEPS + 1):
            at(step)
            sgd.zero_grad()
            backward(wrapped, rank)
            assert (net[0].weight.grad is None) == (step == BAD)
            sgd.step()
        assert finite(net)
        same_everywhere(digest(net))


def scaler_works(mode: str) -> None:
    """Mixed precision: infinity is how a GradScaler finds that its scale is too large; on all ranks alike."""
    with job(mode) as rank:
        net = model()
        opt, at = optimizer(net), poison(net, rank, float("inf"))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scales = []
        for step in range(1, STEPS + 1):
            at(step)
            opt.zero_grad()
            backward(net, rank, scaler)
            opt.synchronize()
            scaler.unscale_(opt)
            with opt.skip_synchronize():
                scaler.step(opt)
            scaler.update()
            scales.append(scaler.get_scale())
        assert finite(net)
        assert scales == [8.0, 8.0, 4.0, 4.0], scales
        same_everywhere(digest(net))


def modes_must_agree() -> None:
    os.environ["BYTEPS_NONFINITE"] = "raise" if int(os.environ["BYTEPS_LOCAL_RANK"]) else "allow"
    if int(os.environ["DMLC_NUM_WORKER"]) == SIZE:
        os.environ["BYTEPS_NONFINITE"] = "raise" if int(os.environ["DMLC_WORKER_ID"]) else "allow"
    bps.init()
    net = model()
    opt = optimizer(net)
    backward(net, bps.rank())
    said = error_of(opt.step, bps.MismatchError)
    assert "BYTEPS_NONFINITE=raise" in said, said
    bps.shutdown()


raises(float("nan"))
for closure, synchronized in ((False, False), (True, False), (False, True)):
    skips(closure, synchronized)
cross_barrier_skips()
cross_barrier_raises()
adasum_raises_and_skips()
sparse_raises_and_skips()
ddp_skips()
scaler_works("allow")
scaler_works("skip")
modes_must_agree()
os.write(1, b"all is well\n")
