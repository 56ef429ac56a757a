"""Hosted optimizers that step under the backward pass, on real processes, beside the same optimizers on the ranks.
Arguments: the names of cases. Prints "NAME: right" on each rank.

On the ranks, torch takes the correctly rounded square root here, as the services do.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from cases import CASES, case
from hosted import OPTIMIZERS, Making, SideStream, batch, new_model, raises, rounded_root, same, same_states, step
from in_groups import add_sets, distributed, members
from torch import nn

import byteps_py as bps
from byteps_py.torch.collectives import context as contexts

#: Optimizers between backward() and step() when the job ends.
KEPT: list[Any] = []
HERE = [name for name in OPTIMIZERS if name != "lamb"]
LIMIT_S = 60.0


def layers(model: nn.Module) -> list[dict[str, Any]]:
    """A param_group, and so a bucket, for each layer. The first layer's is handed over last."""
    return [{"params": list(each.parameters())} for each in (model[0], model[2], model[4])]  # type: ignore[index]


def hosted(making: Making, model: nn.Module, what: str, **options: Any) -> Any:
    named = [(f"backward.{what}.{name}", param) for name, param in model.named_parameters()]
    options = {"hosted": True, "step_in_backward": True} | options
    return distributed(making(layers(model)), named, **options)


def two(making: Making, what: str, **options: Any) -> Iterator[tuple[nn.Module, Any]]:
    """The same training on the ranks, and hosted under the backward pass."""
    for on_ranks in (True, False):
        model = new_model()
        kept = {"hosted": False, "step_in_backward": False} if on_ranks else {}
        yield model, hosted(making, model, f"{what}.{on_ranks}", **options, **kept)


def backward(model: nn.Module, number: int) -> None:
    model(batch(10 * number)).square().sum().backward()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {LIMIT_S:g} s"
        time.sleep(1e-3)


def in_time(optimizer: Any, what: str) -> None:
    """Wait until the services know of the steps of all buckets that backward() has completed."""
    round_ = optimizer._stepper.timing.backward.round
    assert round_ is not None, f"{what}: no step was begun under the backward pass"
    sent = sum(bucket.sent for bucket in optimizer._stepper.reducer.buckets)
    assert sent >= 3, f"{what}: {sent} buckets"
    until(lambda: len(round_.begun) == sent, what)


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "byteps-step-in-backward"]


def go_on(first: tuple[nn.Module, Any], second: tuple[nn.Module, Any], numbers: range) -> None:
    """Steps of both models, with the same weights after each."""
    for number in numbers:
        for model, optimizer in (first, second):
            step(model, optimizer, number)
        same(first[0], second[0], f"step {number}")


@case
def equal_under_backward() -> None:
    """Bit for bit, with a schedule of learning rates; states, too. From the second step on, steps begin early."""
    for name in HERE:
        (one, on_ranks), (other, optimizer) = two(OPTIMIZERS[name], name)
        schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (on_ranks, optimizer)]
        for number in range(5):
            for model, each in ((one, on_ranks), (other, optimizer)):
                each.zero_grad()
                backward(model, number)
                if each is optimizer and number:
                    in_time(optimizer, f"{name}, step {number}")
                each.step()
            same(one, other, f"{name}, step {number}")
            assert not threads()
            for schedule in schedules:
                schedule.step()
        same_states(on_ranks.state_dict(), optimizer.state_dict(), name)


@case
def steps_while_backward_runs() -> None:
    """The last layer's new parameters are there before the first layer's gradients are handed over."""
    (one, on_ranks), (other, optimizer) = two(OPTIMIZERS["adamw"], "while")
    last, first = other[4].weight, other[0].weight  # type: ignore[index]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def wait_for_the_last_layer(grad: torch.Tensor) -> None:
        reducer, all_states = optimizer._stepper.reducer, optimizer._stepper.states
        if not all_states.are_made:
            return
        place = reducer.place(last)
        assert place.bucket.sent
        assert not reducer.place(first).bucket.sent
        states, session = all_states.in_services(place.bucket), contexts.current().session
        target = states._part.target
        until(lambda: target.round == place.bucket.round and session.is_done(target), "the last layer's parameters")
        seen.append((last.detach().clone(), states._results[place.position].clone()))

    first.register_hook(wait_for_the_last_layer)
    for number in range(3):
        step(one, on_ranks, number)
        kept = last.detach().clone()
        step(other, optimizer, number)
        if number:
            before, after = seen.pop()
            assert torch.equal(before, kept), "a parameter has changed under the backward pass"
            assert torch.equal(after, last)
            assert not torch.equal(before, after)
        same(one, other, f"step {number}")


@case
def ranks_with_other_numbers() -> None:
    """No rank has the step, whichever partitions were summed; then training goes on."""
    (one, on_ranks), (other, optimizer) = two(OPTIMIZERS["adamw"], "mismatch")
    for number in range(2):
        step(one, on_ranks, number)
        step(other, optimizer, number)
    if len(members()) > 1:
        states = optimizer.state_dict()
        for again in (True, False):  # step() again with the same sums, or drop them
            optimizer.zero_grad()
            backward(other, 2)
            optimizer.step()
            step(one, on_ranks, 2)
            same(one, other, "before")
            states = optimizer.state_dict()
            optimizer.zero_grad()
            optimizer.param_groups[1]["lr"] = 0.01 + bps.rank()
            backward(other, 3)
            raises(bps.MismatchError, "lr of param_groups[1] is", optimizer.step)
            same(one, other, "a step that was refused")
            optimizer.param_groups[1]["lr"] = 0.01
            same_states(states, optimizer.state_dict(), "a step that was refused")
            if again:
                optimizer.step()
                step(one, on_ranks, 3)
                same(one, other, "again")
    for wrong in (float("nan"), float("inf")):
        optimizer.param_groups[0]["lr"] = wrong
        optimizer.zero_grad()
        backward(other, 4)
        raises(bps.UsageError, "lr=", optimizer.step)
        same(one, other, "a step without a number")
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.param_groups[2]["amsgrad"] = False
    optimizer.zero_grad()
    backward(other, 4)
    raises(bps.UsageError, "param_groups[2] has changed", optimizer.step)
    same(one, other, "a step with another rule")
    optimizer.param_groups[2]["amsgrad"] = True
    go_on((one, on_ranks), (other, optimizer), range(5, 7))
    same_states(on_ranks.state_dict(), optimizer.state_dict(), "in the end")


@case
def too_late() -> None:
    """Calls between backward() and step() that come too late are errors, and the step is whole."""
    (one, on_ranks), (other, optimizer) = two(OPTIMIZERS["momentum"], "late")
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (on_ranks, optimizer)]
    step(one, on_ranks, 0)
    step(other, optimizer, 0)
    for number in range(1, 5):
        for model, each in ((one, on_ranks), (other, optimizer)):
            each.zero_grad()
            if number == 1:  # the other layers are stepped with zeros in step(), with the numbers of backward(), too
                model[0](batch(number)).square().sum().backward()  # type: ignore[index]
            else:
                backward(model, number)
        raises(bps.GradientOrderError, "zero_grad() was called after loss.backward()", optimizer.zero_grad)
        raises(bps.GradientOrderError, "state_dict() was called after", optimizer.state_dict)
        more = {"params": [nn.Parameter(torch.ones(3))]}
        raises(bps.GradientOrderError, "add_param_group() was called after", lambda: optimizer.add_param_group(more))  # noqa: B023
        if number == 1:
            schedules[1].step()
            text = "Step a learning-rate scheduler after optimizer.step()"
        elif number == 2:
            in_time(optimizer, "late")  # before that, the step would see the change
            with torch.no_grad():
                other[0].bias.add_(1.0)  # type: ignore[index]
            text = "0.bias' was changed after backward()"
        elif number == 3:
            lr = optimizer.param_groups[0]["lr"]
            optimizer.param_groups[0]["lr"] = float("nan")
            text = "lr of param_groups[0] has changed"
        else:
            raises(bps.GradientOrderError, "computed more than", lambda: backward(other, 9))
            text = "was changed after backward()"
        raises(bps.GradientOrderError, text, optimizer.step)
        on_ranks.step()
        if number == 1:
            schedules[0].step()
        if number == 3:
            optimizer.param_groups[0]["lr"] = lr
        same(one, other, f"step {number}")
    raises(bps.UsageError, "takes no closure", lambda: optimizer.step(lambda: 0.0))
    go_on((one, on_ranks), (other, optimizer), range(5, 7))
    same_states(on_ranks.state_dict(), optimizer.state_dict(), "in the end")


@case
def is_refused() -> None:
    model = new_model()

    def make(name: str, **options: Any) -> Any:
        return hosted(OPTIMIZERS[name], model, f"refused.{name}", **options)

    raises(bps.UsageError, "step_in_backward needs hosted=True", lambda: make("sgd", hosted=False))
    raises(bps.UsageError, "delayed_update_after", lambda: make("sgd", delayed_update_after=1))
    raises(bps.UsageError, "LAMB needs norms", lambda: make("lamb"))
    optimizer = make("sgd")
    raises(bps.UsageError, "hosted optimizer", lambda: bps.CrossBarrier(model, optimizer))
    before = [param.clone() for param in model.parameters()]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(0)).sum()).backward()
    raises(bps.UsageError, "GradScaler", lambda: scaler.unscale_(optimizer))
    raises(bps.UsageError, "GradScaler", lambda: scaler.step(optimizer))
    raises(bps.UsageError, "clip_grad_norm_()", lambda: optimizer.clip_grad_norm_(1.0))
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.step()
    assert not all(map(torch.equal, before, model.parameters()))
    embedding = nn.Embedding(5, 3, sparse=True)
    before = [embedding.weight.detach().clone()]
    sparse = distributed(
        torch.optim.SGD(embedding.parameters(), lr=0.1),
        [("refused.sparse", embedding.weight)],
        hosted=True,
        step_in_backward=True,
    )

    def sparse_step() -> None:
        embedding(torch.tensor([1])).sum().backward()
        sparse.step()

    raises(bps.UsageError, "'refused.sparse' is sparse", sparse_step)
    assert torch.equal(before[0], embedding.weight)


@case
def refused_if_not_finite() -> None:
    if os.environ.get("BYTEPS_NONFINITE", "allow") != "allow":
        raises(bps.UsageError, "BYTEPS_NONFINITE", lambda: hosted(OPTIMIZERS["sgd"], new_model(), "nonfinite"))


@case
def parts_of_the_model() -> None:
    """Ranks that use different layers, layers that are frozen, and several passes for a step."""
    (one, on_ranks), (other, optimizer) = two(OPTIMIZERS["adamw"], "parts", backward_passes_per_step=2)
    for number in range(6):
        for model, each in ((one, on_ranks), (other, optimizer)):
            model[2].weight.requires_grad_(number not in (2, 3))  # type: ignore[index]
            each.zero_grad()
            for turn in range(2):
                loss = model(batch(10 * number + turn)).square().sum()
                if number == 4 and bps.rank() == 0 and len(members()) > 1:
                    loss = model[0](batch(number)).square().sum()  # type: ignore[index]
                loss.backward()
            each.step()
        same(one, other, f"step {number}")
    same_states(on_ranks.state_dict(), optimizer.state_dict(), "parts")
    for model, each in ((one, on_ranks), (other, optimizer)):
        each.add_param_group({"params": [model.unused], "lr": 0.5})
        for number in range(2):
            step(model, each, number, 2)
    same(one, other, "another group")


@case
def is_discarded() -> None:
    """load_state_dict() between backward() and step(): the parameters are not taken, and states are those that are
    loaded."""
    (one, on_ranks), (other, optimizer) = two(OPTIMIZERS["adamw"], "discarded")
    for number in range(2):
        step(one, on_ranks, number)
        step(other, optimizer, number)
    saved = on_ranks.state_dict()
    optimizer.zero_grad()
    backward(other, 2)
    in_time(optimizer, "discarded")
    optimizer.load_state_dict(saved)
    same(one, other, "discarded")
    assert not threads()
    go_on((one, on_ranks), (other, optimizer), range(3, 6))
    same_states(on_ranks.state_dict(), optimizer.state_dict(), "in the end")


@case
def copies_of_a_device() -> None:
    """Gradients that a side stream hands over later: a step is begun after that, although others are begun already."""
    models = []
    for number in range(2):
        side, movers = SideStream(), contexts.current()._movers
        plain = movers.pop(torch.device("cpu"), None)
        if number:
            movers[torch.device("cpu")] = side  # type: ignore[assignment]
        model = new_model()
        optimizer = hosted(OPTIMIZERS["adamw"], model, f"side.{number}", step_in_backward=bool(number))
        gate = threading.Event()

        def hold_the_first_layer(grad: torch.Tensor) -> None:
            if (round_ := optimizer._stepper.timing.backward.round) is not None:  # noqa: B023
                until(lambda: len(round_.begun) == 2, "the steps of the other layers")
                side.stream.submit(gate.wait, LIMIT_S)  # noqa: B023

        if number:
            model[0].weight.register_hook(hold_the_first_layer)  # type: ignore[index]
        for turn in range(4):
            gate.clear()
            optimizer.zero_grad()
            backward(model, turn)
            if number and turn:
                round_ = optimizer._stepper.timing.backward.round
                round_._thread.join(0.1)  # it may not go on
                assert len(round_.begun) == 2, "a step was begun before its gradients were handed over"
                gate.set()
                in_time(optimizer, "side stream")
            optimizer.step()
        models.append(model)
        movers.pop(torch.device("cpu"), None)
        if plain is not None:
            movers[torch.device("cpu")] = plain
        side.close()
    same(*models, "side stream")


@case
def is_gone() -> None:
    """An optimizer that is deleted between backward() and step() leaves no thread behind, and its parameters free."""
    model = new_model()
    optimizer = hosted(OPTIMIZERS["sgd"], model, "gone")
    step(model, optimizer, 0)
    backward(model, 1)
    in_time(optimizer, "gone")
    (thread,) = threads()
    del optimizer
    gc.collect()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    bps.barrier()
    for param in model.parameters():
        param.grad = None
    step(model, hosted(OPTIMIZERS["sgd"], model, "gone again"), 2)


@case
def on_cuda_under_backward() -> None:
    """Parameters on a GPU become those of the step that is made in step()."""
    if not torch.cuda.is_available():
        return
    for dtype in (torch.float32, torch.bfloat16):
        models = []
        for early in (False, True):
            model = new_model(dtype).cuda()
            optimizer = hosted(OPTIMIZERS["adamw"], model, f"cuda.{dtype}.{early}", step_in_backward=early)
            for turn in range(5):
                optimizer.zero_grad()
                rng = torch.Generator().manual_seed(10 * turn + bps.rank())
                given = [torch.randn(p.shape, generator=rng).to(p) for p in model.parameters()]
                sum((p * grad).sum() for p, grad in zip(model.parameters(), given, strict=True)).backward()
                optimizer.step()
            models.append(model.cpu())
        same(*models, "on CUDA")


def elastic_training(early: bool) -> nn.Module:
    """A training whose ranks disagree between backward() and step(), twice, and go back to their last commit."""
    model = new_model()
    making = OPTIMIZERS["momentum"]
    optimizer = hosted(making, model, f"elastic.{early}", step_in_backward=early)
    left = [2]

    @bps.elastic.run
    def train(state: Any) -> None:
        while state.step < 5:
            if state.step == 3 and left[0]:
                left[0] -= 1
                backward(model, 99)  # what a step that fails has begun counts nowhere
                bps.push_pull(torch.ones(1 + bps.rank()), name=f"disagree.{early}")
            step(model, optimizer, state.step)
            state.step += 1
            state.commit()

    train(bps.elastic.TorchState(model=model, optimizer=optimizer, step=0))
    return model


@case
def goes_back_under_backward() -> None:
    if len(members()) > 1:
        same(elastic_training(False), elastic_training(True), "elastic")


@case
def ends_in_between() -> None:
    """The job may end between backward() and step(). The last case."""
    model = new_model()
    optimizer = hosted(OPTIMIZERS["sgd"], model, "ends")
    step(model, optimizer, 0)
    backward(model, 1)
    KEPT.append((model, optimizer))


def main() -> None:
    torch.set_num_threads(1)
    torch.Tensor.sqrt = rounded_root  # type: ignore[method-assign]
    bps.init()
    add_sets()
    for name in sys.argv[1:] or [name for name, each in CASES.items() if each.__module__ == "__main__"]:
        CASES[name]()
        os.write(1, f"{name}: right\n".encode())
    bps.shutdown()
    until(lambda: not threads(), "the end of the last round's thread")


if __name__ == "__main__":
    main()
