"""Hosted optimizers on real processes beside the same optimizers on the ranks. Arguments: the names of cases. Prints
"NAME: right" on each rank.

On the ranks, torch takes the correctly rounded square root here, as the services do.
"""

from __future__ import annotations

import copy
import gc
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES, case
from in_groups import add_sets, averaged, distributed, members
from torch import nn

import byteps_py as bps
from byteps_py.torch.collectives import context as contexts

Making = Callable[[Any], torch.optim.Optimizer]


def rounded_root(tensor: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.sqrt(tensor.detach().numpy()))


def new_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Small and large parameters, and one that no loss reaches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 600), nn.Tanh(), nn.Linear(600, 1)).to(dtype)
    model.register_parameter("unused", nn.Parameter(torch.ones(5, dtype=dtype)))
    return model


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + bps.rank())).to(dtype)


def two(making: Making, dtype: torch.dtype = torch.float32, **options: Any) -> Iterator[tuple[nn.Module, Any]]:
    """The same training on the ranks, and hosted."""
    for number, hosted in enumerate((False, True)):
        model = new_model(dtype)
        named = [(f"{making.__qualname__}.{number}.{name}", param) for name, param in model.named_parameters()]
        yield model, distributed(making(model.parameters()), named, hosted=hosted, **options)


def step(model: nn.Module, optimizer: Any, number: int, passes: int = 1) -> None:
    optimizer.zero_grad()
    for turn in range(passes):
        model(batch(10 * number + turn, next(model.parameters()).dtype)).square().sum().backward()
    optimizer.step()


def same(one: nn.Module, other: nn.Module, what: str) -> None:
    for (name, mine), (_, its) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(mine, its), f"{what}: {name} differs by {(mine - its).abs().max().item()}"


def same_states(one: Any, other: Any, what: str) -> None:
    mine, its = one["state"], other["state"]
    assert mine.keys() == its.keys(), f"{what}: {mine.keys()} {its.keys()}"
    for place, state in mine.items():
        kept = {name: value for name, value in state.items() if value is not None}
        assert kept.keys() == its[place].keys(), f"{what}: {kept.keys()} {its[place].keys()}"
        for name, value in kept.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(its[place][name])), f"{what}: {place} {name}"
    assert one["param_groups"] == other["param_groups"], what


def raises(kind: type[BaseException], text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert text in str(raised.value), f"{raised.value!r} does not say {text!r}"


OPTIMIZERS: dict[str, Making] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, weight_decay=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.01, foreach=False),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, amsgrad=True, foreach=False),
    "lamb": lambda params: bps.optim.LAMB(params, lr=0.01, weight_decay=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, initial_accumulator_value=0.1, foreach=False),
}


@case
def equal() -> None:
    """Bit for bit, with a schedule of learning rates; states, too."""
    for name, making in OPTIMIZERS.items():
        (one, on_ranks), (other, hosted) = two(making)
        schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in (on_ranks, hosted)]
        for number in range(5):
            step(one, on_ranks, number)
            step(other, hosted, number)
            same(one, other, f"{name}, step {number}")
            for schedule in schedules:
                schedule.step()
        same_states(on_ranks.state_dict(), hosted.state_dict(), name)
        for parameter in other.parameters():
            assert not hosted.state.get(parameter), "the ranks keep no states"


@case
def lamb() -> None:
    """Trust ratios are of whole parameters, whichever ranks have their parts; groups may go without."""
    models = []
    for number, is_hosted in enumerate((False, True)):
        model = new_model()
        decayed = [param for param in model.parameters() if param.dim() > 1]
        rest = [param for param in model.parameters() if param.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        named = [(f"lamb.{number}.{name}", param) for name, param in model.named_parameters()]
        optimizer = distributed(bps.optim.LAMB(groups, lr=0.02), named, hosted=is_hosted)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda turn: 1 / (1 + turn))
        for turn in range(4):
            model[2].weight.requires_grad_(turn != 1)
            step(model, optimizer, turn)
            schedule.step()
        models.append(model)
    same(*models, "LAMB")


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(11, 5, sparse=True)
        self.head = nn.Linear(5, 3)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(given)).tanh()


@case
def sparse_rows() -> None:
    """Rows that no rank has in its batch stay; states lie with the owners of rows, and move in and out."""
    for name, making in {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.1, maximize=True),
        "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5),
    }.items():
        pairs = []
        for number, is_hosted in enumerate((False, True)):
            model = Words()
            named = [(f"sparse.{name}.{number}.{each}", param) for each, param in model.named_parameters()]
            pairs.append((model, distributed(making(model.parameters()), named, hosted=is_hosted)))
        (one, on_ranks), (other, hosted) = pairs
        for number in range(6):
            for model, optimizer in pairs:
                optimizer.zero_grad()
                torch.manual_seed(10 * number + bps.rank())
                model(torch.randperm(10)[:3]).square().sum().backward()  # no batch has word 10
                if number == 4 and optimizer is on_ranks:
                    on_ranks.synchronize()
                    grads = [
                        param.grad.coalesce().values() if param.grad.is_sparse else param.grad
                        for param in model.parameters()
                    ]
                    expected = nn.utils.get_total_norm(grads)
                    with on_ranks.skip_synchronize():
                        on_ranks.step()
                    continue
                if number == 4:
                    assert abs(optimizer.clip_grad_norm_(1e9) - expected) < 1e-6 * expected
                optimizer.step()
            same(one, other, f"{name}, step {number}")
            if number == 2:
                same_states(on_ranks.state_dict(), hosted.state_dict(), name)
                hosted.load_state_dict(on_ranks.state_dict())
        same_states(on_ranks.state_dict(), hosted.state_dict(), name)
        # A new optimizer learns that the gradient is sparse after it has loaded states.
        named = [(f"sparse.{name}.again.{each}", param) for each, param in other.named_parameters()]
        saved = hosted.state_dict()
        del hosted, pairs, optimizer
        again = distributed(making(other.parameters()), named, hosted=True)
        again.load_state_dict(saved)
        for model, optimizer in ((one, on_ranks), (other, again)):
            optimizer.zero_grad()
            model(torch.tensor([bps.rank(), 1])).square().sum().backward()
            optimizer.step()
        same(one, other, f"{name}, again")


@case
def delays() -> None:
    """Each gradient is used once, one step later, with the numbers of its own step."""
    model, other = new_model(), new_model()
    reference = OPTIMIZERS["adamw"](other.parameters())
    hosted = distributed(
        OPTIMIZERS["adamw"](model.parameters()),
        [(f"delays.{name}", param) for name, param in model.named_parameters()],
        hosted=True,
        delayed_update_after=2,
    )
    schedule = torch.optim.lr_scheduler.StepLR(hosted, 1, 0.5)
    waiting: tuple[float, list[torch.Tensor]] | None = None

    def apply() -> None:
        if waiting is not None:
            reference.param_groups[0]["lr"] = waiting[0]
            for param, grad in zip(other.parameters(), waiting[1], strict=True):
                param.grad = grad
            reference.step()

    for number in range(6):
        same(model, other, f"step {number}")
        hosted.zero_grad()
        model(batch(number)).square().sum().backward()
        grads = [
            torch.zeros_like(param) if param.grad is None and len(members()) > 1 else param.grad
            for param in model.parameters()
        ]
        grads = [None if grad is None else averaged(grad, name=f"delays.{place}") for place, grad in enumerate(grads)]
        if number == 4:  # clipping to what is larger than the norm
            assert hosted.clip_grad_norm_(1e9).isnan()
        lr = hosted.param_groups[0]["lr"]
        hosted.step()
        schedule.step()
        if number < 2:
            waiting = (lr, grads)
        apply()
        waiting = None if number < 2 else (lr, grads)
    same(model, other, "before it is flushed")
    assert hosted.clip_grad_norm_(1.0) > 0, "the norm of step 4"
    saved = hosted.state_dict()
    apply()
    same(model, other, "flushed")
    same_states(reference.state_dict() | {"param_groups": saved["param_groups"]}, saved, "flushed")
    for options in ({"hosted": True, "delayed_update_after": -1}, {"delayed_update_after": 1}):
        raises(
            bps.UsageError,
            "delayed_update_after",
            lambda: distributed(OPTIMIZERS["sgd"](model.parameters()), **options),  # noqa: B023
        )


@case
def delays_as_in_the_paper() -> None:
    """f = p²/2: the first gradient waits for the second step, then p(k+1) = p(k) - 0.1·p(k-1)."""
    param = nn.Parameter(torch.ones(1, dtype=torch.float64))
    hosted = distributed(torch.optim.SGD([param], lr=0.1), [("paper", param)], hosted=True, delayed_update_after=0)
    seen = []
    for _ in range(7):
        hosted.zero_grad()
        (param.square() / 2).sum().backward()
        hosted.step()
        seen.append(param.item())
    assert seen == pytest.approx([1, 0.9, 0.8, 0.71, 0.63, 0.559, 0.496], abs=1e-12), seen
    if len(members()) > 1:
        hosted.flush()
        kept = param.item()
        hosted.param_groups[0]["lr"] = 0.1 + bps.rank()
        (param.square() / 2).sum().backward()
        hosted.step()  # returns before ranks have compared
        hosted.param_groups[0]["lr"] = 0.1
        raises(bps.MismatchError, "lr of param_groups[0] is", hosted.step)
        assert param.item() == kept
        hosted.step()
        hosted.flush()
        assert param.item() < kept
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    raises(bps.UsageError, "GradScaler", lambda: scaler.unscale_(hosted))


class SideStream:
    """Stands in for the mover of a device: one thread makes all copies in order, and hands over what has arrived."""

    def __init__(self) -> None:
        self.stream = ThreadPoolExecutor(1)
        self.sent: set[tuple[torch.dtype, torch.dtype]] = set()
        self.fetched: set[tuple[torch.dtype, torch.dtype]] = set()
        self.adopted: set[int] = set()

    def adopt(self, memory: memoryview) -> None:
        self.adopted.add(np.frombuffer(memory, np.uint8).ctypes.data)

    def send(self, session: Any, slot: Any, views: Any, tensors: Any, layout: Any = None) -> Any:
        given = [None if tensor is None else tensor.detach() for tensor in tensors]
        self.sent |= {(each.dtype, view.dtype) for view, each in zip(views, given, strict=True) if each is not None}

        def copy_and_tell() -> None:
            for view, tensor in zip(views, given, strict=True):
                if tensor is None:
                    view.zero_()
                else:
                    view.copy_(tensor)
            session.hand_over(slot, layout=layout)

        return self.stream.submit(copy_and_tell)

    def fetch(self, views: Any, outputs: Any) -> None:
        self.fetched |= {(view.dtype, output.dtype) for view, output in zip(views, outputs, strict=True)}
        self.stream.submit(lambda: [output.data.copy_(view) for view, output in zip(views, outputs, strict=True)])
        self.stream.submit(lambda: None).result()  # as the caller's stream waits for the side stream

    def queued(self) -> None:
        """Tensors lie in the host's memory: nothing is queued there."""

    def close(self) -> None:
        self.stream.shutdown()


@case
def streams() -> None:
    """Parameters of a device: gradients travel in their dtype through its mover, and parameters in theirs."""
    for dtype in (torch.float32, torch.bfloat16):
        models = []
        for number in range(2):
            side = SideStream()
            movers = contexts.current()._movers
            plain = movers.pop(torch.device("cpu"), None)
            if number:
                movers[torch.device("cpu")] = side
            model = new_model(dtype)
            named = [(f"streams.{dtype}.{number}.{name}", param) for name, param in model.named_parameters()]
            optimizer = distributed(
                torch.optim.AdamW(model.parameters(), lr=0.01), named, hosted=True, delayed_update_after=2
            )
            for turn in range(4):
                step(model, optimizer, turn)
            optimizer.flush()
            models.append(model)
            if number:
                # Beside gradients travel what ranks agree on, and their plans.
                assert (dtype, dtype) in side.sent
                assert {each for each in side.sent if each[0] is dtype} == {(dtype, dtype)}
                assert side.fetched == {(dtype, dtype)}, side.fetched
                (states, *_) = optimizer._stepper.states._of.values()
                assert np.frombuffer(states._part.target.result, np.uint8).ctypes.data in side.adopted
                movers.pop(torch.device("cpu"))
            if plain is not None:
                movers[torch.device("cpu")] = plain
            side.close()
        same(*models, "streams")


@case
def accumulates() -> None:
    (one, on_ranks), (other, hosted) = two(OPTIMIZERS["adamw"], backward_passes_per_step=2)
    for number in range(3):
        step(one, on_ranks, number, 2)
        step(other, hosted, number, 2)
        same(one, other, f"step {number}")


@case
def freezes() -> None:
    (one, on_ranks), (other, hosted) = two(OPTIMIZERS["momentum"])
    for number in range(6):
        for model in (one, other):
            model[2].weight.requires_grad_(number not in (1, 2))
        step(one, on_ranks, number)
        step(other, hosted, number)
        same(one, other, f"step {number}")


@case
def groups() -> None:
    """Of different numbers, and one that is added later."""
    models = []
    for number, hosted in enumerate((False, True)):
        model = new_model()
        params = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.1, "weight_decay": 0.0}]
        named = [(f"groups.{number}.{name}", param) for name, param in model.named_parameters()]
        optimizer = distributed(torch.optim.AdamW(params, lr=0.01, foreach=False), named, hosted=hosted)
        for turn in range(4):
            if turn == 2:
                optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.5})
            step(model, optimizer, turn)
        models.append((model, optimizer))
    same(models[0][0], models[1][0], "groups")
    same_states(models[0][1].state_dict(), models[1][1].state_dict(), "groups")


@case
def states_move() -> None:
    """From the ranks to the services and back, in the middle of a training."""
    for name, making in OPTIMIZERS.items():
        (one, on_ranks), (other, hosted) = two(making)
        for number in range(2):
            step(one, on_ranks, number)
        other.load_state_dict(one.state_dict())
        hosted.load_state_dict(on_ranks.state_dict())
        for number in range(2, 4):
            step(one, on_ranks, number)
            step(other, hosted, number)
            same(one, other, f"{name}, step {number}")
        on_ranks.load_state_dict(hosted.state_dict())
        for number in range(4, 6):
            step(one, on_ranks, number)
            step(other, hosted, number)
            same(one, other, f"{name}, step {number}")
        wrong = hosted.state_dict()
        for state in wrong["state"].values():
            for key, value in state.items():
                if value.dim():
                    state[key] = value.new_zeros(2, 2)
        if any(value.dim() for state in wrong["state"].values() for value in state.values()):
            raises(bps.UsageError, "of another optimizer or model", lambda: hosted.load_state_dict(wrong))  # noqa: B023


@case
def takes_over() -> None:
    """States that the optimizer had before it was wrapped."""
    trained = new_model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01, foreach=False)
    for number in range(2):
        optimizer.zero_grad()
        trained(torch.ones(1, 7) * number).sum().backward()
        optimizer.step()
    models = []
    for number, hosted in enumerate((False, True)):
        model = new_model()
        model.load_state_dict(trained.state_dict())
        inner = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        inner.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares tensors
        named = [(f"taken.{number}.{name}", param) for name, param in model.named_parameters()]
        wrapped = distributed(inner, named, hosted=hosted)
        step(model, wrapped, 5)
        models.append(model)
    same(*models, "taken over")


@case
def half_precision() -> None:
    """bfloat16 parameters beside float32 masters on the ranks, with the same gradients of bfloat16."""
    model = new_model(torch.bfloat16)
    named = [(f"half.{name}", param) for name, param in model.named_parameters()]
    hosted = distributed(torch.optim.AdamW(model.parameters(), lr=0.01), named, hosted=True)
    masters = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    reference = torch.optim.AdamW(masters, lr=0.01, foreach=False)
    for number in range(5):
        hosted.zero_grad()
        model(batch(number, torch.bfloat16)).square().sum().backward()
        for place, (param, master) in enumerate(zip(model.parameters(), masters, strict=True)):
            grad = param.grad if param.grad is not None else torch.zeros_like(param)
            master.grad = averaged(grad, name=f"half.{place}").float()
        hosted.step()
        reference.step()
        for param, master in zip(model.parameters(), masters, strict=True):
            assert torch.equal(param, master.detach().bfloat16()), f"step {number}"
    for place, state in hosted.state_dict()["state"].items():
        assert torch.equal(state["master_param"], masters[place].detach())


@case
def loads_masters() -> None:
    """SGD without momentum has no states but the masters of bfloat16 parameters."""

    def new(name: str) -> tuple[nn.Module, Any]:
        model = new_model(torch.bfloat16)
        named = [(f"{name}.{each}", param) for each, param in model.named_parameters()]
        return model, distributed(torch.optim.SGD(model.parameters(), lr=1e-4), named, hosted=True)

    def advance(model: nn.Module, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        model(batch(number, torch.bfloat16)).square().sum().backward()
        optimizer.step()

    (model, optimizer), (again, loaded) = new("kept"), new("loaded")
    for number in range(3):
        advance(model, optimizer, number)
    again.load_state_dict(model.state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    for each in (model, optimizer), (again, loaded):
        advance(*each, 3)
    states = [each.state_dict()["state"] for each in (optimizer, loaded)]
    assert states[0].keys() == states[1].keys() != set()
    for place, state in states[0].items():
        assert torch.equal(state["master_param"], states[1][place]["master_param"])


@case
def compresses() -> None:
    (one, on_ranks), (other, hosted) = two(OPTIMIZERS["sgd"], compression=bps.Compression.bf16)
    for number in range(3):
        step(one, on_ranks, number)
        step(other, hosted, number)
        same(one, other, f"step {number}")


@case
def clips() -> None:
    (one, on_ranks), (other, hosted) = two(OPTIMIZERS["adamw"])
    for number, limit in enumerate((0.5, 1e9, 0.01)):
        for model, optimizer in ((one, on_ranks), (other, hosted)):
            optimizer.zero_grad()
            model(batch(number)).square().sum().backward()
        on_ranks.synchronize()
        expected = nn.utils.clip_grad_norm_(one.parameters(), limit)
        with on_ranks.skip_synchronize():
            on_ranks.step()
        found = hosted.clip_grad_norm_(limit)
        assert abs(found - expected) <= 1e-6 * expected, (found, expected)
        hosted.step()
        for mine, its in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)  # torch's norm is of float32


def scaled_step(model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler, number: int, limit: float) -> None:
    """As scripts with a scaler do. The batch of the last rank overflows in step 2."""
    optimizer.zero_grad()
    factor = float("inf") if number == 2 and bps.rank() == members()[-1] else 1.0
    scaler.scale(model(batch(number)).square().sum() * factor).backward()
    if limit:
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(limit)
    scaler.step(optimizer)
    scaler.update()


@case
def scales() -> None:
    """With a GradScaler. An overflow on one rank makes all skip, and all scales stay equal."""
    (one, on_ranks), (other, hosted) = two(OPTIMIZERS["adamw"])
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    seen = []
    for number in range(6):
        before = [param.clone() for param in other.parameters()]
        scaled_step(one, on_ranks, scalers[0], number, 0)
        scaled_step(other, hosted, scalers[1], number, 0)
        same(one, other, f"step {number}")
        assert all(map(torch.equal, before, other.parameters())) == (number == 2)
        seen.append(scalers[1].get_scale())
        assert seen[-1] == scalers[0].get_scale()
    assert seen == [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11, 2.0**11], seen
    same_states(on_ranks.state_dict(), hosted.state_dict(), "scaled")


@case
def scales_to_a_limit() -> None:
    """The limit is of the gradients without their scale."""
    (one, plain), (other, hosted) = two(OPTIMIZERS["adamw"])
    plain = distributed(
        OPTIMIZERS["adamw"](one.parameters()),
        [(f"unscaled.{name}", param) for name, param in one.named_parameters()],
        hosted=True,
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for number in range(4):
        if number != 2:  # which overflows below
            plain.zero_grad()
            one(batch(number)).square().sum().backward()
            plain.clip_grad_norm_(0.5)
            plain.step()
        scaled_step(other, hosted, scaler, number, 0.5)
        same(one, other, f"step {number}")
    assert scaler.get_scale() == 2.0**9
    if len(members()) > 1:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** bps.rank())
        raises(bps.MismatchError, "the factor of a GradScaler", lambda: scaled_step(other, hosted, scaler, 4, 0))


@case
def scales_float16() -> None:
    """float16 parameters have float32 masters, so that a scaler needs no copies of its own."""
    model = new_model(torch.float16)
    named = [(f"float16.{name}", param) for name, param in model.named_parameters()]
    hosted = distributed(torch.optim.SGD(model.parameters(), lr=0.01), named, hosted=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=100)
    while scaler.get_scale() > 2.0**23 or not hosted.state_dict()["state"]:
        hosted.zero_grad()
        scaler.scale(model(batch(0, torch.float16)).float().sum()).backward()
        scaler.step(hosted)
        scaler.update()
        assert scaler.get_scale() >= 1
    assert scaler.get_scale() < 2.0**24
    assert all(param.isfinite().all() for param in model.parameters())


@case
def not_finite() -> None:
    """BYTEPS_NONFINITE: all ranks say which rank it was, and nobody steps."""
    wanted = os.environ.get("BYTEPS_NONFINITE")
    if wanted not in ("raise", "skip"):
        return
    model = new_model()
    named = [(f"nonfinite.{name}", param) for name, param in model.named_parameters()]
    hosted = distributed(torch.optim.SGD(model.parameters(), lr=0.01), named, hosted=True)
    step(model, hosted, 0)
    before = [param.clone() for param in model.parameters()]
    hosted.zero_grad()
    culprit = members()[-1]
    factor = float("nan") if bps.rank() == culprit else 1.0
    handle = model[4].bias.register_hook(lambda grad: grad * factor)
    model(batch(1)).sum().backward()
    handle.remove()
    if wanted == "raise":
        raises(bps.NonFiniteError, f"from rank {culprit}, step", hosted.step)
    else:
        hosted.step()
    assert all(map(torch.equal, before, model.parameters()))
    step(model, hosted, 2)
    assert not all(map(torch.equal, before, model.parameters()))
    delayed = distributed(
        torch.optim.SGD([param := nn.Parameter(torch.ones(3))], lr=1.0), hosted=True, delayed_update_after=0
    )
    (param * factor).sum().backward()
    delayed.step()
    delayed.zero_grad()  # what the error needs was kept
    if wanted == "raise":
        raises(bps.NonFiniteError, f"from rank {culprit}, step", delayed.flush)
    else:
        delayed.flush()
    assert torch.equal(param, torch.ones(3))


@case
def clips_nothing_to_a_number() -> None:
    """A gradient that is NaN makes all parameters so, as torch's clipping does."""
    (one, on_ranks), (other, hosted) = two(OPTIMIZERS["sgd"])
    for model, optimizer in ((one, on_ranks), (other, hosted)):
        model(batch(0) * float("nan")).sum().backward()
        model.unused.grad = torch.ones(5)
        if optimizer is on_ranks:
            on_ranks.synchronize()
            nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            with on_ranks.skip_synchronize():
                on_ranks.step()
        else:
            assert hosted.clip_grad_norm_(1.0).isnan()
            hosted.step()
    for mine, its in zip(one.parameters(), other.parameters(), strict=True):
        assert mine.isnan().all()
        assert its.isnan().all()


@case
def takes_changes() -> None:
    """Of parameters, between steps, however they are made."""
    (one, on_ranks), (other, hosted) = two(OPTIMIZERS["momentum"])
    for number in range(4):
        step(one, on_ranks, number)
        step(other, hosted, number)
        for model in (one, other):
            for param in model.parameters():
                param.data.clamp_(-0.05, 0.05)
        same(one, other, f"step {number}")


def elastic_training(hosted: bool) -> nn.Module:
    """A training whose ranks disagree in the middle of a step, twice, and go back to their last commit."""
    model = new_model()
    optimizer = distributed(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), list(model.named_parameters()), hosted=hosted
    )
    left = [2]

    @bps.elastic.run
    def train(state: Any) -> None:
        while state.step < 5:
            if state.step == 2 and left[0]:
                left[0] -= 1
                model(batch(99)).sum().backward()  # what a step that fails has handed over counts nowhere
                bps.push_pull(torch.ones(1 + bps.rank()), name="disagree")
            step(model, optimizer, state.step)
            state.step += 1
            state.commit()

    train(bps.elastic.TorchState(model=model, optimizer=optimizer, step=0))
    return model


@case
def goes_back() -> None:
    if len(members()) > 1:
        same(elastic_training(False), elastic_training(True), "elastic")


@case
def comes_again() -> None:
    """States end with the job, and go on in the next one from a state_dict."""
    if len(members()) > 1:
        return
    (one, on_ranks), (other, hosted) = two(OPTIMIZERS["momentum"])
    for number in range(2):
        step(one, on_ranks, number)
        step(other, hosted, number)
    saved = hosted.state_dict()
    bps.shutdown()
    bps.init()
    raises(bps.UsageError, "load_state_dict() a saved one first", lambda: step(other, hosted, 2))
    hosted.load_state_dict(saved)
    for number in range(2, 4):
        step(one, on_ranks, number)
        step(other, hosted, number)
        same(one, other, f"step {number}")


@case
def the_root_loads() -> None:
    """As scripts for Horovod do: rank 0 reads a checkpoint and sends it."""
    (one, on_ranks), (other, hosted) = two(OPTIMIZERS["momentum"])
    for number in range(2):
        step(one, on_ranks, number)
    bps.broadcast_optimizer_state(hosted, 0)  # nothing yet
    other.load_state_dict(one.state_dict())
    if bps.rank() == 0:
        hosted.load_state_dict(on_ranks.state_dict())
    bps.broadcast_optimizer_state(hosted, 0)
    for number in range(2, 4):
        step(one, on_ranks, number)
        step(other, hosted, number)
        same(one, other, f"step {number}")


@case
def is_forgotten() -> None:
    """States of an optimizer that is gone are given back: at the latest when the next one asks for states."""
    if len(members()) == 1:
        return
    kept, previous = contexts.current().session.state_host._shards, set()  # type: ignore[attr-defined]
    for number in range(4):
        before = set(kept)
        model = new_model()
        named = [(f"forgotten.{number}.{name}", param) for name, param in model.named_parameters()]
        optimizer = distributed(torch.optim.SGD(model.parameters(), lr=0.1), named, hosted=True)
        step(model, optimizer, number)
        new = kept - before
        assert new, kept
        assert not previous & kept, (previous, kept)
        previous = new
        del optimizer, model, named
        gc.collect()


@case
def zeroes_in_place() -> None:
    (one, on_ranks), (other, hosted) = two(OPTIMIZERS["momentum"])
    for number in range(3):
        for model, optimizer in ((one, on_ranks), (other, hosted)):
            optimizer.zero_grad(set_to_none=False)
            assert all(param.grad is None or not param.grad.any() for param in model.parameters())
            model(batch(number)).square().sum().backward()
            optimizer.step()
        same(one, other, f"step {number}")


@case
def owns_parameters() -> None:
    """One hosted optimizer has a parameter at a time, and of the shape that it has first."""
    model = new_model()
    first = distributed(
        torch.optim.SGD(model.parameters(), lr=0.1), [(f"o.{n}", p) for n, p in model.named_parameters()], hosted=True
    )
    step(model, first, 0)

    def second() -> Any:
        names = [(f"again.{name}", param) for name, param in model.named_parameters()]
        return distributed(torch.optim.SGD(model[4].parameters(), lr=0.1), names, hosted=True)

    raises(bps.UsageError, "'again.4.weight' belongs to another hosted optimizer", second)
    other = distributed(torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1), hosted=True)
    raises(bps.UsageError, "belongs to another", lambda: other.add_param_group({"params": [model[0].bias]}))
    assert len(other.param_groups) == 1
    step(model, first, 1)
    with torch.no_grad():
        model[4].bias.grad = None
        model[4].bias.data = torch.zeros(2)
    model[4].weight.data = model[4].weight.data.repeat(2, 1)
    model[4].weight.grad = None
    raises(bps.UsageError, "has changed its shape from [1", lambda: step(model, first, 2))
    model = new_model()
    step(model, second(), 3)


@case
def on_cuda() -> None:
    """Parameters on a GPU become those of the CPU, for equal gradients."""
    if not torch.cuda.is_available():
        return
    for dtype in (torch.float32, torch.bfloat16):
        models = []
        for device in ("cpu", "cuda"):
            model = new_model(dtype).to(device)
            named = [(f"{device}.{dtype}.{name}", param) for name, param in model.named_parameters()]
            optimizer = distributed(torch.optim.AdamW(model.parameters(), lr=0.01), named, hosted=True)
            for turn in range(4):
                optimizer.zero_grad()
                rng = torch.Generator().manual_seed(10 * turn + bps.rank())
                given = [torch.randn(p.shape, generator=rng).to(device, dtype) for p in model.parameters()]
                sum((p * grad).sum() for p, grad in zip(model.parameters(), given, strict=True)).backward()
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
            models.append(model.cpu())
        same(*models, "on CUDA")


@case
def refused() -> None:
    model = new_model()
    named = [(f"refused.{name}", param) for name, param in model.named_parameters()]

    def hosted(optimizer: torch.optim.Optimizer, **options: Any) -> Any:
        return distributed(optimizer, named, hosted=True, **options)

    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    raises(
        bps.UsageError,
        "SGD, Adam, AdamW, Adagrad, LAMB, not of RMSprop",
        lambda: hosted(torch.optim.RMSprop(model.parameters())),
    )
    raises(bps.UsageError, "op is Max", lambda: hosted(sgd, op=bps.Max))
    raises(bps.UsageError, "gradient_predivide_factor", lambda: hosted(sgd, gradient_predivide_factor=2.0))
    raises(bps.UsageError, "num_groups or groups", lambda: hosted(sgd, num_groups=2))
    optimizer = hosted(sgd)
    raises(bps.UsageError, "takes no closure", lambda: optimizer.step(lambda: 0.0))
    raises(bps.UsageError, "clip_grad_norm_", optimizer.synchronize)
    raises(bps.UsageError, "max_norm is -1", lambda: optimizer.clip_grad_norm_(-1))
    step(model, optimizer, 0)
    before = [param.clone() for param in model.parameters()]
    if len(members()) > 1:
        optimizer.zero_grad()
        model(batch(1)).sum().backward()
        optimizer.param_groups[0]["lr"] = 0.1 + bps.rank()
        raises(bps.MismatchError, "lr of param_groups[0] is", optimizer.step)
        optimizer.param_groups[0]["lr"] = 0.1
        assert all(map(torch.equal, before, model.parameters())), "a step that was refused"
    raises(bps.UsageError, "each a part", lambda: bps.broadcast_optimizer_state(optimizer, 0))
    optimizer.param_groups[0]["lr"] = float("nan")
    raises(bps.UsageError, "lr=nan", lambda: step(model, optimizer, 2))
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.param_groups[0]["momentum"] = 0.5
    raises(bps.UsageError, "has changed", lambda: step(model, optimizer, 2))
    optimizer.param_groups[0]["momentum"] = 0.0
    assert all(map(torch.equal, before, model.parameters())), "a step that was refused"
    small = new_model()
    named_small = [(f"refused.small.{name}", param) for name, param in small.named_parameters()]
    too_large = distributed(torch.optim.Adam(small.parameters(), lr=0.1), named_small, hosted=True)
    too_large._stepper.states.available_bytes = lambda: 100.0
    raises(bps.UsageError, "GB left", lambda: step(small, too_large, 0))
    for kind, options, text in (
        (torch.optim.SGD, {"momentum": 0.5}, "momentum changes rows"),
        (torch.optim.SGD, {"weight_decay": 0.5}, "weight_decay changes rows"),
        (torch.optim.AdamW, {}, "ADAM changes rows"),
    ):
        embedding = nn.Embedding(5, 3, sparse=True)
        before = [embedding.weight.detach().clone()]
        sparse = distributed(
            kind(embedding.parameters(), lr=0.1, **options), [(f"refused.{text}", embedding.weight)], hosted=True
        )
        embedding(torch.tensor([1])).sum().backward()
        raises(bps.UsageError, text, sparse.step)
        assert torch.equal(before[0], embedding.weight)
    raises(bps.UsageError, "not of SparseAdam", lambda: hosted(torch.optim.SparseAdam(model.parameters())))


def main() -> None:
    torch.set_num_threads(1)
    torch.Tensor.sqrt = rounded_root  # type: ignore[method-assign]
    bps.init()
    add_sets()
    for name in sys.argv[1:] or CASES:
        CASES[name]()
        os.write(1, f"{name}: right\n".encode())
    bps.shutdown()


if __name__ == "__main__":
    main()
