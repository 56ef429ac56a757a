"""How ranks count their optimizer steps: alike if they do the same, and not at all when that can't be known."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from support.threaded import ThreadedCluster
from torch import nn
from torch_training import sgd, wrap

import byteps_py.torch as bps
from byteps_py.errors import GradientOrderError
from byteps_py.torch.collectives import context as contexts

KIND = "gradients to combine"
Stepper = tuple[nn.Module, torch.optim.Optimizer]


def counts() -> dict[str, tuple[int, int]]:
    return dict(contexts.current().session.steps_begun)


def plain() -> Stepper:
    model = nn.Linear(2, 2)
    return model, wrap(model)


def crossing() -> Stepper:
    model = nn.Linear(2, 2)
    return model, bps.CrossBarrier(model, wrap(model))


def in_ddp() -> Stepper:
    model = nn.Linear(2, 2)
    return bps.parallel.DistributedDataParallel(model), sgd(model.parameters())


def step(stepper: Stepper) -> None:
    model, optimizer = stepper
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("second", [plain, crossing, in_ddp], ids=lambda make: make.__name__)
def test_each_step_counts_once(second: Callable[[], Stepper]) -> None:
    def main(rank: int) -> list[dict[str, tuple[int, int]]]:
        one, other = plain(), second()
        said = [counts()]
        for stepper in (one, one, other, one, other):
            step(stepper)
            said.append(counts())
        other[0](torch.ones(1, 2))  # CrossBarrier finishes its step
        return said

    expected = [{}, *({KIND: each} for each in [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)])]
    assert ThreadedCluster((1, 1)).run(main) == [expected] * 2


def test_a_round_without_a_step_counts() -> None:
    def main(rank: int) -> dict[str, tuple[int, int]]:
        model, optimizer = plain()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        return counts()

    assert ThreadedCluster((1, 1)).run(main) == [{KIND: (1, 1)}] * 2


def test_frozen_models_exchange_nothing_and_count_nothing() -> None:
    """After the first step, in which ranks compare what they train: they may then step unequally often."""

    def main(rank: int) -> dict[str, tuple[int, int]]:
        model, optimizer = plain()
        for param in model.parameters():
            param.requires_grad_(False)
        for _ in range(1 + rank):
            optimizer.step()
        return counts()

    assert ThreadedCluster((1, 1)).run(main) == [{KIND: (1, 1)}] * 2


def test_groups_of_ranks_are_counted_apart() -> None:
    def main(rank: int) -> list[tuple[int, int]]:
        both, mine = bps.add_process_set([0, 1]), bps.add_process_set([0])
        steppers = []
        for process_set in (both, None):
            model = nn.Linear(2, 2)
            optimizer = bps.DistributedOptimizer(
                sgd(model.parameters()), model.named_parameters(), process_set=process_set or bps.global_process_set
            )
            steppers.append((model, optimizer))
        for stepper in (*steppers, steppers[0]):
            step(stepper)
        assert mine.ranks == [0]
        return sorted(counts().values())

    assert ThreadedCluster((1, 1, 1)).run(main) == [[(1, 1), (2, 1)]] * 2 + [[(1, 1)]]


def test_after_a_join_counts_begin_anew_under_another_name() -> None:
    def main(rank: int) -> list[dict[str, tuple[int, int]]]:
        stepper = plain()
        step(stepper)
        said = [counts()]
        bps.join()
        said.append(counts())
        step(stepper)
        return [*said, counts()]

    assert ThreadedCluster((1, 1)).run(main) == [[{KIND: (1, 1)}, {}, {f"{KIND}, since join 1": (1, 1)}]] * 2


def test_after_a_step_that_failed_nothing_is_counted() -> None:
    def main(rank: int) -> dict[str, tuple[int, int]]:
        model, optimizer = stepper = plain()
        step(stepper)
        model(torch.ones(1, 2)).sum().backward()
        next(iter(model.parameters())).grad.mul_(2)
        with pytest.raises(GradientOrderError):
            optimizer.step()
        step(stepper)
        return counts()

    assert ThreadedCluster((1, 1)).run(main) == [{}, {}]


def test_steps_of_several_threads_are_not_counted() -> None:
    def main(rank: int) -> dict[str, tuple[int, int]]:
        context = contexts.current()
        one, other = plain(), plain()
        step(one)

        def beside() -> None:
            with contexts.use(context):
                step(other)

        thread = threading.Thread(target=beside)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        step(one)
        return counts()

    assert ThreadedCluster((1, 1)).run(main) == [{}, {}]
