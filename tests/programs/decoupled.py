"""A rank that trains with DecoupledDiLoCo, in one of the ways below. Prints what it finds."""

from __future__ import annotations

import copy
import hashlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import byteps_py.torch as bps
from byteps_py.errors import NonFiniteError, UsageError
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.local import DecoupledDiLoCo, DiLoCo, Streaming


def new_model(seed: int = 0, width: int = 8) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 4)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-0.5, 0.5, generator=generator)
    return model


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)


def averaging(model: torch.nn.Module) -> torch.optim.Optimizer:
    """An outer optimizer."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


def train(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * bps.rank() + step)
        optimizer.zero_grad()
        inputs = torch.randn(5, 4, generator=generator).to(next(model.parameters()).dtype)
        (model(inputs) - bps.rank()).square().mean().backward()
        optimizer.step()


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def are_equal(model: torch.nn.Module) -> bool:
    """On all ranks."""
    everyone = bps.allgather(weights(model).unsqueeze(0), name="weights")
    return torch.equal(everyone, weights(model).expand(bps.size(), -1))


def in_step() -> None:
    """With all machines in each step it is DiLoCo, momentum included, but for the order in which changes are added."""
    for streaming in (Streaming(), Streaming(2), Streaming(2, 3)):
        models = [new_model(bps.rank()), new_model(bps.rank())]
        one = DecoupledDiLoCo(models[0], adamw(models[0]), every=6, quorum=99, streaming=streaming)
        two = DiLoCo(models[1], adamw(models[1]), every=6, streaming=streaming)
        for model, optimizer in zip(models, (one, two), strict=True):
            train(model, optimizer, range(27))
        close = torch.allclose(*map(weights, models), rtol=0, atol=1e-12)
        one.synchronize()
        print(f"{streaming}: {close}, equal: {are_equal(models[0])}", flush=True)


def slow() -> None:
    """The first rank makes 20 steps alone, and the second one then one. Nothing is lost."""
    model = new_model()
    before = weights(model)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = DecoupledDiLoCo(model, inner, averaging(model), every=1, quorum=1)

    def step(gradient: float) -> None:
        for param in model.parameters():
            param.grad = torch.full_like(param, gradient)
        optimizer.step()

    for _ in range(2):  # these waves wait for all machines, and measure
        step(0.0)
    bps.barrier()
    for rank, (steps, gradient) in enumerate(((20, -1.0), (1, -6.0))):
        for _ in range(steps if bps.rank() == rank else 0):
            step(gradient)
        bps.barrier()
    optimizer.synchronize()
    print(f"changed: {(weights(model) - before).mean():.3f}, equal: {are_equal(model)}")
    step(-3.0)
    optimizer.synchronize()
    print(f"and then: {(weights(model) - before).mean():.3f}, equal: {are_equal(model)}")


def states() -> None:
    """Each rank saves and loads its own."""
    model = new_model()
    streaming = Streaming(2, 2)
    optimizer = DecoupledDiLoCo(model, adamw(model), every=4, quorum=2, streaming=streaming)
    train(model, optimizer, range(7))
    again = new_model(5 + bps.rank())
    resumed = DecoupledDiLoCo(again, adamw(again), every=4, quorum=2, streaming=streaming)
    state = copy.deepcopy(optimizer.state_dict())
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(state)
    train(model, optimizer, range(7, 13))
    train(again, resumed, range(7, 13))
    optimizer.synchronize()
    resumed.synchronize()
    print(f"resumed: {torch.allclose(weights(again), weights(model), rtol=0, atol=1e-12)}, {resumed.steps}")


CODED = {"int8": bps.Compression.int8, "topk": bps.Compression.topk(0.1, bits=2)}


def coded(kind: str) -> None:
    """With a codec changes are about the same, and all of them count."""
    models = [new_model(bps.rank()).float(), new_model(bps.rank()).float()]
    for model, compression in zip(models, (CODED[kind], bps.Compression.none), strict=True):
        optimizer = DecoupledDiLoCo(
            model, adamw(model), averaging(model), every=6, quorum=2, streaming=Streaming(2), compression=compression
        )
        train(model, optimizer, range(27))
        optimizer.synchronize()
    print(f"{kind}: equal: {are_equal(models[0])}, near: {torch.allclose(*map(weights, models), rtol=0, atol=0.1)}")


def coded_states() -> None:
    """A rank goes on with what it had not sent."""

    def plain(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    model = new_model().float()
    how: Any = {"every": 4, "quorum": 2, "compression": CODED["topk"]}
    optimizer = DecoupledDiLoCo(model, plain(model), averaging(model), **how)
    train(model, optimizer, range(8))
    state, own = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    has_errors = all(bool(each.any()) for fragment in state["fragments"] for each in fragment["unsent"])
    train(model, optimizer, range(8, 16))
    optimizer.synchronize()
    again = new_model(5 + bps.rank()).float()
    resumed = DecoupledDiLoCo(again, plain(again), averaging(again), **how)
    again.load_state_dict(own)
    resumed.load_state_dict(state)
    train(again, resumed, range(8, 16))
    resumed.synchronize()
    off = float((weights(again) - weights(model)).abs().max())
    print(f"errors: {has_errors}, resumed: {off < 1e-4 or off}, equal: {are_equal(again)}")


def wrong() -> None:
    model = new_model()
    optimizer = DecoupledDiLoCo(model, adamw(model), every=2, quorum=1)
    train(model, optimizer, range(4))
    bps.barrier()
    train(model, optimizer, range(4, 5))
    if bps.rank() == 1:
        with torch.no_grad():
            model[0].weight[0, 0] = float("nan")
    try:
        optimizer.step()
    except NonFiniteError as error:
        print(f"NonFiniteError: {error}")
    print(f"finite: {bool(weights(model).isfinite().all())}")
    bps.join()
    pieces = DiLoCo(model, adamw(model), every=2, streaming=Streaming(2))
    try:
        optimizer.load_state_dict(pieces.state_dict())
    except UsageError as error:
        print(f"UsageError: {error}")


def noisy(steps: str, kind: str = "") -> None:
    """Machines step at random speed, so that waves, and all bits, differ from run to run."""
    speed = random.Random(os.urandom(8))
    model = new_model(width=64)
    model = model.float() if kind else model
    compression = CODED[kind] if kind else bps.Compression.none
    streaming = Streaming(2, 1)
    optimizer = DecoupledDiLoCo(model, adamw(model), every=3, quorum=1, streaming=streaming, compression=compression)
    seen = hashlib.sha256()
    for step in range(int(steps)):
        time.sleep(speed.random() * 0.01 * (1 + 5 * bps.rank()))
        train(model, optimizer, range(step, step + 1))
        if step == 10 and bps.rank() == 0:
            print("ten steps", flush=True)
        seen.update(weights(model).numpy().tobytes())
    optimizer.synchronize()
    seen.update(weights(model).numpy().tobytes())
    print(f"rank {bps.rank()}: {seen.hexdigest()}")


def elastic(kind: str) -> None:
    """Machines are killed, and the others lose no step of their own. One that takes the place goes on with them. Ends
    when the third group has made 20 steps."""
    model = new_model(bps.rank())
    streaming = Streaming(2, 2)
    optimizer = (
        DecoupledDiLoCo(model, adamw(model), averaging(model), every=5, quorum=2, streaming=streaming)
        if kind == "decoupled"
        else DiLoCo(model, adamw(model), every=5, streaming=streaming)
    )
    begun: list[int] = []  # at which steps groups began
    groups = 1 if "IS_NEW" in os.environ else 3
    alone = 0

    @bps.elastic.run
    def loop(state: Any) -> None:
        nonlocal alone
        before = optimizer.steps
        begun.append(before)
        print(f"rank {bps.rank()} of {bps.size()} goes on from step {before}", flush=True)
        while len(begun) < groups or optimizer.steps < before + 20:
            time.sleep(0.02)
            train(model, optimizer, range(optimizer.steps, optimizer.steps + 1))
            alone += contexts.current().is_between  # steps

    loop(bps.elastic.TorchState(optimizer=optimizer))
    optimizer.synchronize()
    print(f"{bps.size()} ranks ended, trained alone: {alone > 0}, equal: {are_equal(model)}", flush=True)


def elastic_errors(kind: str) -> None:
    """Two machines learn something, of which codes lack most, and a third one, which learns nothing, is killed. What
    was not sent goes on with the group of the others."""
    is_new = "IS_NEW" in os.environ
    model = new_model(width=64).float()
    before, own = weights(model), torch.Generator().manual_seed(int(os.environ["DMLC_WORKER_ID"]))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    options: dict[str, Any] = {"every": 2, "compression": bps.Compression.onebit(error_feedback=True)}
    if kind == "decoupled":
        options |= {"quorum": 3, "compression": bps.Compression.topk(0.05)}
    made = DecoupledDiLoCo if kind == "decoupled" else DiLoCo
    optimizer: Any = made(model, inner, averaging(model), **options)
    learned = torch.zeros_like(before)

    def step(learns: bool) -> None:
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
            if learns:
                param.grad.normal_(generator=own)
        if learns:
            learned.add_(torch.cat([param.grad.flatten() for param in model.parameters()]))
        optimizer.step()

    @bps.elastic.run
    def loop(state: Any) -> None:
        if bps.size() == 3:
            for _ in range(4):
                step(learns=not is_new)
            print("has learned", flush=True)
            if is_new:
                signal.pause()  # until it is killed; the others wait for it in their next exchange
            while True:
                time.sleep(0.02)
                step(learns=False)
        if kind == "decoupled":
            found = [error for errors in optimizer._owed.values() for error in errors if error is not None]
        else:
            states = contexts.current().session.coded_states().values()
            found = [torch.frombuffer(bytearray(each.data), dtype=torch.float32) for each in states if each.data]
        print(f"owes: {any(bool(error.any()) for error in found)}", flush=True)
        for _ in range(4):
            step(learns=False)

    loop(bps.elastic.TorchState(optimizer=optimizer))
    optimizer.synchronize()
    total = bps.push_pull(learned, average=False, name="learned")
    off = float((weights(model) - before + total / 3).abs().max())
    print(f"equal: {are_equal(model)}, off by {off:.4f}, nothing is missing: {off < 1e-4}", flush=True)


WAYS: tuple[Callable[..., None], ...] = (
    in_step, slow, coded, states, coded_states, wrong, noisy, elastic, elastic_errors
)  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    bps.init()
    ways: dict[str, Callable[..., None]] = {way.__name__: way for way in WAYS}
    name, *arguments = sys.argv[1:]
    ways[name](*arguments)
    bps.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
