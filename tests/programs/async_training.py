"""A rank that trains asynchronously, with one of the ways below. Prints what it finds."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable

import torch

import byteps_py.torch as bps
from byteps_py.errors import MismatchError, NonFiniteError

STEPS = 6


def new_model(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-1, 1, generator=generator)
    return model.to(dtype)


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    dtype = next(model.parameters()).dtype
    return (model(torch.randn(4, 3, generator=generator, dtype=torch.float64).to(dtype)) - rank).square().mean()


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().double().flatten() for param in model.parameters()])


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05, foreach=False)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)


Optimizers = Callable[[torch.nn.Module], torch.optim.Optimizer]


def still(model: torch.nn.Module) -> None:
    """Gradients that change nothing."""
    for param in model.parameters():
        param.grad = torch.zeros_like(param)


def emulate(optimizer_of: Optimizers, every: int, compensation: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Two machines in turn, in one process. Returns what each has at its end."""
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    models = [new_model(dtype) for _ in range(2)]
    optimizers = [optimizer_of(model) for model in models]
    shared = [param.detach().to(wide).clone() for param in models[0].parameters()]
    known = [[value.clone() for value in shared] for _ in models]  # by machine: its last copy
    for model, optimizer in zip(models, optimizers, strict=True):
        for _ in range(every):
            still(model)
            optimizer.step()
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            if (step + 1) % every:
                continue
            with torch.no_grad():
                for i, param in enumerate(model.parameters()):
                    own = param.clone()
                    shared[i] = shared[i] + (own - known[rank][i])
                    known[rank][i] = shared[i].clone()
                    param.copy_(shared[i])
                    if compensation:
                        others = param - own
                        param.sub_(others.mul_(param.grad).mul_(param.grad), alpha=0.05 * compensation)
    return [weights(model) for model in models]


def in_turn() -> None:
    """Machines step one after the other, so the order of their changes is known: the bits are those of one process."""
    cases: list[tuple[Optimizers, int, float, torch.dtype]] = [
        (sgd, 1, 0.0, torch.float64),
        (adam, 2, 0.0, torch.float64),
        (sgd, 1, 0.5, torch.float64),
        (adam, 1, 0.0, torch.float32),
        (sgd, 1, 0.0, torch.bfloat16),
    ]
    for optimizer_of, every, compensation, dtype in cases:
        model = new_model(dtype)
        if bps.rank():
            with torch.no_grad():
                model[0].weight.zero_()  # rank 0's are taken
        optimizer = bps.AsyncOptimizer(
            optimizer_of(model), model.named_parameters(), every=every, compensation=compensation
        )
        for _ in range(every):  # the first exchange is of all together
            still(model)
            optimizer.step()
        bps.barrier()
        for step in range(STEPS):
            for turn in range(bps.size()):
                if bps.rank() == turn:
                    optimizer.zero_grad()
                    loss_of(model, turn, step).backward()
                    optimizer.step()
                bps.barrier()
        expected = emulate(optimizer_of, every, compensation, dtype)[bps.rank()]
        print(f"{optimizer_of.__name__} {every} {compensation} {dtype}: {torch.equal(weights(model), expected)}")


def fast_and_slow() -> None:
    """Rank 0 makes all its steps, and then rank 1 its own: neither waits for the other."""
    model = torch.nn.Linear(3, 1).double()
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    still(model)
    optimizer.step()
    bps.barrier()
    for rank, steps in enumerate((200, 3)):
        if bps.rank() == rank:
            for _ in range(steps):
                for param in model.parameters():
                    param.grad = torch.full_like(param, -1.0)
                optimizer.step()
        bps.barrier()
    bps.join()
    bps.broadcast_parameters(model.state_dict(), 1)
    print(f"{type(optimizer).__name__}: {set(weights(model).tolist())}")


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def broken() -> None:
    """Values that are not finite, options that differ, and parameters that are changed or loaded between steps."""
    model = torch.nn.Linear(2, 1).double()
    optimizer = bps.AsyncOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    still(model)
    optimizer.step()
    before = weights(model)
    if bps.rank() == 1:
        model.weight.grad = torch.tensor([[0.0, float("nan")]], dtype=torch.float64)
        try:
            optimizer.step()
        except NonFiniteError as error:
            print(said(error))
    else:
        optimizer.step()
    print(f"unchanged: {torch.equal(before, weights(model))}")
    bps.barrier()
    still(model)
    optimizer.step()
    with torch.no_grad():
        model.weight.fill_(3.0)
    optimizer.load_state_dict(optimizer.state_dict())
    still(model)
    optimizer.step()
    print(f"loaded: {model.weight.tolist()}")
    bps.barrier()
    if bps.rank() == 1:
        with torch.no_grad():
            model.weight.add_(1.0)
    optimizer.step()
    bps.barrier()
    optimizer.step()
    print(f"changed: {model.weight.tolist()}")
    other = bps.AsyncOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), staleness=2 + bps.rank()
    )
    still(model)
    try:
        other.step()
    except MismatchError as error:
        print(said(error))


def alone() -> None:
    """One machine: its ranks step together, and add their changes."""
    model = torch.nn.Linear(2, 1).double()
    optimizer = bps.AsyncOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    before = weights(model)
    for _ in range(3):
        for param in model.parameters():
            param.grad = torch.full_like(param, -1.0 - bps.rank())
        optimizer.step()
    print(f"changed: {(weights(model) - before).tolist()}")


def stretches(count: str, steps: str) -> None:
    """Steps that add 1 to the elements of the rank; a line of stdin ends a stretch. At the end all changes are there,
    and each once."""
    size, mine = bps.size(), bps.rank()
    model = torch.nn.Embedding(7001, size).double()
    with torch.no_grad():
        model.weight.zero_()
    optimizer = bps.AsyncOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), staleness=50)
    change = torch.zeros_like(model.weight)
    change[:, mine] = -1.0
    made = 0
    for stretch in range(int(count) + 1):
        if mine == 0 and stretch < int(count):
            print(f"stretch {stretch}", flush=True)
        is_over = False
        while not is_over:
            for _ in range(int(steps)):
                model.weight.grad = change
                optimizer.step()
                made += 1
                if set(model.weight.detach()[:, mine].tolist()) != {float(made)}:
                    raise AssertionError(f"rank {mine} has made {made} steps: {model.weight.tolist()}")
            line = torch.zeros(1, dtype=torch.uint8)
            if mine == 0:
                line[0] = stretch == int(count) or bool(sys.stdin.readline())
            is_over = bool(bps.broadcast(line, 0, name="over")[0])
    counts = bps.allgather(torch.tensor([float(made)], dtype=torch.float64), name="made")
    model.weight.grad = torch.zeros_like(change)
    optimizer.step()  # all have given by then
    if not torch.equal(model.weight.detach(), counts.expand(7001, size)):
        raise AssertionError(f"rank {mine}: {counts.tolist()} steps were made, and it has {model.weight.tolist()}")
    bps.barrier()
    print(f"digest {hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()}")


def noisy(steps: str, staleness: str) -> None:
    """Machines step at random speed, so the order of their changes, and all bits, differ from run to run."""
    speed = random.Random(os.urandom(8))
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
    optimizer = bps.AsyncOptimizer(adam(model), model.named_parameters(), staleness=int(staleness) or None)
    generator = torch.Generator().manual_seed(bps.rank())
    seen = hashlib.sha256()
    for step in range(int(steps)):
        optimizer.zero_grad()
        (model(torch.randn(8, 64, generator=generator)) - 1).square().mean().backward()
        time.sleep(speed.random() * 0.004 * (1 + bps.rank()))
        optimizer.step()
        if step == 10 and bps.rank() == 0:
            print("ten steps", flush=True)
        for param in model.parameters():
            seen.update(param.detach().numpy().tobytes())
    bps.join()
    print(f"rank {bps.rank()}: {seen.hexdigest()}")


def in_an_elastic_job(steps: str) -> None:
    """One machine is lost: the others go on from the last commit, and accumulate anew from there."""
    model = torch.nn.Linear(1, 3, bias=False).double()
    optimizer = bps.AsyncOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), staleness=2)
    with torch.no_grad():
        model.weight.zero_()
    state = bps.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    was_three = bps.size() == 3

    @bps.elastic.run
    def train(state: bps.elastic.TorchState) -> None:
        while state.step < int(steps):
            if was_three and bps.size() == 3 and bps.rank() == 2 and state.step == int(steps) // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            model.weight.grad = torch.full_like(model.weight, -1.0)
            optimizer.step()
            state.step += 1
            if state.step % 5 == 0:
                state.commit()

    train(state)
    bps.join()
    bps.broadcast_parameters(model.state_dict(), 0)
    at_most = 3 * int(steps)
    value = float(model.weight.detach()[0, 0])
    print(f"{bps.size()} ranks, whole changes: {value == int(value) and int(steps) < value <= at_most}")


def with_a_newcomer(steps: str) -> None:
    """A machine is killed, and another one comes: they accumulate anew each time, from the same parameters. Ends when
    the third group has made so many steps."""
    model = torch.nn.Linear(1, 3, bias=False).double()
    optimizer = bps.AsyncOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), every=2)
    with torch.no_grad():
        model.weight.fill_(0.5 if "IS_NEW" in os.environ else 0.0)  # a newcomer gets the others'
    groups, begun = 1 if "IS_NEW" in os.environ else 3, 0

    @bps.elastic.run
    def train(state: bps.elastic.TorchState) -> None:
        nonlocal begun
        begun += 1
        print(f"rank {bps.rank()} of {bps.size()} goes on from step {state.step}", flush=True)
        last = state.step + int(steps)
        while begun < groups or state.step < last:
            time.sleep(0.02)
            model.weight.grad = torch.full_like(model.weight, -1.0)
            optimizer.step()
            state.step += 1
            if state.step % 5 == 0:
                state.commit()

    train(bps.elastic.TorchState(model=model, optimizer=optimizer, step=0))
    bps.join()
    value = float(model.weight.detach()[0, 0])
    print(f"{bps.size()} ranks, whole changes: {value == int(value) and value > int(steps)}", flush=True)


def main() -> None:
    torch.manual_seed(0)
    bps.init()
    elastic = (in_an_elastic_job, with_a_newcomer)
    ways: dict[str, Callable[..., None]] = {
        way.__name__: way for way in (in_turn, fast_and_slow, broken, alone, stretches, noisy, *elastic)
    }
    name, *arguments = sys.argv[1:]
    ways[name](*arguments)
    bps.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
