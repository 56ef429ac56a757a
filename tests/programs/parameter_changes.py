"""Hosted optimizers whose parameters travel as what a step changes, beside the same in this process. Run under
bpslaunch with BYTEPS_FUSION_BYTES=0; prints "right" on each rank. Arguments: names of cases; none: all."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for support
from support.coded_sums import CodedSums, scaled
from support.threaded import contract

import byteps_py as bps
from byteps_py.tensor_codec import CodecKind

torch.set_num_threads(1)
C = bps.Compression
STEPS = 6


def sgd(params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


#: The optimizer, how gradients travel, and what else is asked for.
CASES: dict[str, tuple[Callable[..., torch.optim.Optimizer], Any, dict[str, Any]]] = {
    "plain": (sgd, C.none, {}),
    "coded": (sgd, C.with_error_feedback(C.int8), {}),
    "nesterov": (lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.5, nesterov=True), C.none, {}),
    "in backward": (sgd, C.int8, {"step_in_backward": True}),
}


def network() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(70, 301), torch.nn.Tanh(), torch.nn.Linear(301, 3, bias=False))


def gradients(net: torch.nn.Module, rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    net.zero_grad()
    net(torch.randn(4, 70, generator=generator)).pow(2).sum().backward()
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


class Emulated:
    """The model as ranks see it, the changes that they have got, and the masters with their optimizer."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], codec: Any, names: list[str]) -> None:
        self.seen, masters = network(), network()
        self.given = [parameter.detach().clone() for parameter in self.seen.parameters()]
        self.masters = list(masters.parameters())
        self._optimizer = make(self.masters)
        self._sums = [None if codec is None else CodedSums(codec, bps.local_size(), f"Gradient.{n}") for n in names]

    def step(self, number: int) -> None:
        every = [gradients(self.seen, rank, number) for rank in range(bps.size())]
        for i, master in enumerate(self.masters):
            parts, sums = [each[i] for each in every], self._sums[i]
            machines = [bps.local_size()] * (bps.size() // bps.local_size())
            master.grad = contract(parts, machines, average=True) if sums is None else sums(parts, bps.size())
        self._optimizer.step()
        with torch.no_grad():
            for seen, given, master in zip(self.seen.parameters(), self.given, self.masters, strict=True):
                given += scaled(CodecKind.INT8, (master - given).flatten()).view(given.shape)
                seen.copy_(given)

    def change(self) -> None:
        """The training changes the first parameter."""
        with torch.no_grad():
            seen = next(iter(self.seen.parameters()))
            before = seen.clone()
            seen[:100] *= 0.5
            self.masters[0].copy_(torch.where(seen == before, self.masters[0], seen))


def check(net: torch.nn.Module, emulated: Emulated, what: str) -> None:
    for (name, mine), theirs in zip(net.named_parameters(), emulated.seen.parameters(), strict=True):
        if not torch.equal(mine, theirs):
            sys.exit(f"rank {bps.rank()}: {what}: {name} differs by {(mine - theirs).abs().max()}")


def run(name: str) -> None:
    make, compression, more = CASES[name]
    net = network()
    names = [f"{name} {key}" for key, _ in net.named_parameters()]
    how = {"hosted": "sharded", "parameter_compression": C.int8, **more}
    optimizer = bps.DistributedOptimizer(
        make(net.parameters()), list(zip(names, net.parameters(), strict=True)), compression, **how
    )
    emulated = Emulated(make, compression.codec, names)
    for step in range(STEPS):
        gradients(net, bps.rank(), step)
        optimizer.step()
        emulated.step(step)
        check(net, emulated, f"{name}, step {step}")
        if step == 2:
            with torch.no_grad():
                next(iter(net.parameters()))[:100] *= 0.5
            emulated.change()
    saved = optimizer.state_dict()
    for place, master in enumerate(emulated.masters):
        if not torch.equal(saved["state"][place]["master_param"], master):
            sys.exit(f"rank {bps.rank()}: {name}: the master of parameter {place} differs")
    if compression.codec is not None and compression.codec.has_states:
        return  # what was not sent of gradients belongs to their names
    weights = net.state_dict()
    del optimizer
    net = network()
    net.load_state_dict(weights)
    names = [f"again {each}" for each in names]
    named = list(zip(names, net.parameters(), strict=True))
    optimizer = bps.DistributedOptimizer(make(net.parameters()), named, compression, **how)
    optimizer.load_state_dict(saved)
    for step in range(STEPS, STEPS + 3):
        gradients(net, bps.rank(), step)
        optimizer.step()
        emulated.step(step)
        check(net, emulated, f"{name}, step {step}, after a restart")


def unequal() -> None:
    net = network()
    if bps.rank():
        torch.nn.init.zeros_(net[2].weight)
    named = [(f"unequal {key}", parameter) for key, parameter in net.named_parameters()]
    optimizer = bps.DistributedOptimizer(sgd(net.parameters()), named, hosted="sharded", parameter_compression=C.int8)
    gradients(net, bps.rank(), 0)
    with pytest.raises(bps.UsageError, match=r"differ between ranks, which get only what a step changes"):
        optimizer.step()


if __name__ == "__main__":
    assert os.environ["BYTEPS_FUSION_BYTES"] == "0"
    bps.init()
    for each in sys.argv[1:] or (*CASES, "unequal"):
        if each == "unequal":
            unequal()
        else:
            run(each)
    print("right", flush=True)
    bps.shutdown()
