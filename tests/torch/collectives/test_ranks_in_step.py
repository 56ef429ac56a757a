"""Ranks that plan their gradients differently, or that one by one leave a step out, learn of it at once, by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.threaded import ThreadedCluster
from torch import nn
from torch_training import Net, assert_same, loss_of, reference, run_steps, sgd, state_of, wrap, wrap_and_cross

import byteps_py.torch as bps
from byteps_py.torch.collectives.context import current

STEPS = 4


# ---- plans ---------------------------------------------------------------------------------------------------------


def reversed_names(model: Net, rank: int) -> Any:
    named = list(model.named_parameters())
    return bps.DistributedOptimizer(sgd(model.parameters()), named[::-1] if rank else named)


def unnamed_in_another_order(model: Net, rank: int) -> Any:
    params = list(model.parameters())
    return bps.DistributedOptimizer(sgd(params[::-1] if rank else params), num_groups=2)


def one_fewer(model: Net, rank: int) -> Any:
    params = [p for name, p in model.named_parameters() if not (rank and name == "last.bias")]
    return bps.DistributedOptimizer(sgd(params), model.named_parameters())


def with_options(different: dict[str, Any], common: dict[str, Any] | None = None) -> Callable[[Net, int], Any]:
    return lambda model, rank: wrap(model, **(different if rank else common or {}))


def other_groups(model: Net, rank: int) -> Any:
    first, last = list(model.first.parameters()), list(model.last.parameters())
    return wrap(model, groups=[first + last] if rank else [first, last])


def frozen_on_one(model: Net, rank: int) -> Any:
    model.first.weight.requires_grad_(not rank)
    return wrap(model)


DIFFERENT = {
    "names in another order": (
        reversed_names,
        r"number 1 .*: rank 0 gave 'first\.weight' float32\[40, 12\] in .*; rank 1 gave 'last\.bias' float32\[5\] in ",
    ),
    "unnamed": (
        unnamed_in_another_order,
        r"number 1 .*rank 0 gave 'push_pull\.parameter\.0\.0' float32\[40, 12\].*; rank 1 gave .*0\.0' float32\[5\]",
    ),
    "one fewer": (one_fewer, r"number \d+ .*: rank 0 gave '.*; rank 1 gave "),
    "num_groups": (
        with_options({"num_groups": 3}, {"num_groups": 2}),
        r"rank 0 gave '(.*)' .*in '.*'; rank 1 gave '\1' .*in '",
    ),
    "groups": (
        other_groups,
        r"rank 0 gave 'first\.weight' .* in 'Gradient.first\.weight\+1 .*; rank 1 gave 'first\.weight' .*weight\+3",
    ),
    "frozen": (frozen_on_one, r"rank 0 gave '(.*)' .*in '.*'; rank 1 gave '\1' .*in '.*"),
    "predivide": (with_options({"gradient_predivide_factor": 2.0}), r"rank 1 gave op=.*gradient_predivide_factor=2"),
    "op": (with_options({"op": bps.Sum}), r"number 0: rank 0 gave op=Average.*; rank 1 gave op=Sum"),
    "compression": (with_options({"compression": bps.Compression.fp16}), r"rank 1 gave .*compression=.*16"),
}


@pytest.mark.parametrize(("make", "said"), DIFFERENT.values(), ids=DIFFERENT)
@pytest.mark.parametrize("crosses", [False, True], ids=["plain", "CrossBarrier"])
def test_another_plan_is_an_error_in_the_first_step(make, said: str, crosses: bool) -> None:
    def step(optimizer: Any) -> None:
        optimizer.step()
        if crosses:
            optimizer.finish_updates()

    def main(rank: int) -> dict[str, torch.Tensor]:
        model = Net()
        optimizer = make(model, rank)
        if crosses:
            optimizer = bps.CrossBarrier(model, optimizer)
        for _ in range(2):  # it stays an error
            loss_of(model, rank, 0).backward()
            with pytest.raises(bps.MismatchError, match=said):
                step(optimizer)
            optimizer.zero_grad()
        model = Net()  # and it goes on, with names of its own
        named = [(f"second.{name}", param) for name, param in model.named_parameters()]
        optimizer = bps.DistributedOptimizer(sgd(model.parameters()), named)
        run_steps(model, optimizer, rank, range(STEPS))
        return state_of(model)

    assert_same(ThreadedCluster((1, 1)).run(main), reference(sgd, STEPS, (1, 1)))


def test_another_fusion_size_is_an_error_in_the_first_step() -> None:
    cluster = ThreadedCluster((1, 1))
    common = cluster.settings_of

    def settings_of(rank: int) -> Any:
        cluster.settings = {"fusion_bytes": 100 if rank else 10_000}
        return common(rank)

    cluster.settings_of = settings_of  # type: ignore[method-assign]

    def main(rank: int) -> None:
        model = Net()
        optimizer = wrap(model)
        loss_of(model, rank, 0).backward()
        with pytest.raises(
            bps.MismatchError, match=r"rank 0 gave '(.*)' .*in '.*'; rank 1 gave '\1'.* BYTEPS_FUSION_BYTES"
        ):
            optimizer.step()

    cluster.run(main)


def test_plans_are_compared_once_for_each_plan_and_job() -> None:
    cluster = ThreadedCluster((1, 1))

    def main(rank: int) -> None:
        model = Net()
        optimizer = bps.DistributedOptimizer(sgd(model.first.parameters()), model.named_parameters())
        for step in range(3 * STEPS):
            if step == STEPS:
                rest = [p for name, p in model.named_parameters() if not name.startswith("first")]
                optimizer.add_param_group({"params": rest})
            if step == 2 * STEPS:
                bps.suspend()
                bps.resume(2, 0)
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    cluster.run(main)
    assert len(cluster.plans) == 3


# ---- steps that are left out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dress", [wrap, wrap_and_cross], ids=["plain", "CrossBarrier"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_left_out_after_synchronize_on_one_rank_is_an_error_in_the_next(dress, set_to_none) -> None:
    def main(rank: int) -> None:
        model = Net()
        optimizer = dress(model)
        for step in range(3):
            loss_of(model, 1, step).backward()
            if step == 2:
                said = r"rank 1 gave .*\(1 step left out after synchronize\(\)\)"
                with pytest.raises(bps.MismatchError, match=said):
                    optimizer.synchronize()
                return
            optimizer.synchronize()
            if (rank, step) != (1, 1):
                with optimizer.skip_synchronize():
                    optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    ThreadedCluster((1, 1)).run(main)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_left_out_on_all_ranks_are_right(set_to_none) -> None:
    def main(rank: int) -> dict[str, torch.Tensor]:
        model = Net()
        optimizer = wrap(model)
        for step in range(STEPS):
            for use in (False, True):
                loss_of(model, rank, step).backward()
                optimizer.synchronize()
                if use:
                    with optimizer.skip_synchronize():
                        optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
        return state_of(model)

    for shared_memory in (False, True):
        cluster = ThreadedCluster((2, 2), shared_memory, fusion_bytes=600)
        assert_same(cluster.run(main), reference(sgd, STEPS, (2, 2)))


def test_ranks_that_are_made_equal_may_have_left_out_what_they_like() -> None:
    def main(rank: int) -> dict[str, torch.Tensor]:
        model = Net()
        optimizer = wrap(model, lambda params: torch.optim.SGD(params, lr=0.1))
        loss_of(model, rank, 7).backward()
        optimizer.synchronize()
        if rank == 0:
            with optimizer.skip_synchronize():
                optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict(Net().state_dict())
        bps.broadcast_optimizer_state(optimizer, root_rank=0)
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model)

    plain = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    assert_same(ThreadedCluster((1, 1)).run(main), reference(plain, STEPS, (1, 1)))


@pytest.mark.parametrize("more", [0, 1])
def test_a_closure_evaluated_more_often_on_one_rank_is_an_error_within_the_step(more: int) -> None:
    class Often(torch.optim.SGD):
        """Evaluates as often as this rank's loss says."""

        def step(self, closure: Callable[[], torch.Tensor]) -> torch.Tensor:
            for _ in range(round(closure().item())):
                loss = closure()
            super().step()
            return loss

    def main(rank: int) -> None:
        line = nn.Linear(2, 1)
        optimizer = wrap(line, lambda params: Often(params, lr=0.1))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = line(torch.ones(1, 2)).sum()
            loss.backward()
            return torch.tensor(2.0 + (rank == more))

        said = rf"rank {1 - more} has ended its step.*push_pull|rank {more} evaluates it for time 4"
        with pytest.raises(bps.MismatchError, match=said) as raised:
            optimizer.step(closure)
        assert re.search(rf"rank {more} evaluates it for time 4", str(raised.value))
        assert not current().session._closed

    ThreadedCluster((1, 1)).run(main)


def test_a_closure_evaluated_often_declares_nothing_anew() -> None:
    def main(rank: int) -> int:
        model = Net()
        optimizer = wrap(model, lambda params: torch.optim.LBFGS(params, max_iter=4, line_search_fn="strong_wolfe"))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, rank, 0)
            loss.backward()
            return bps.push_pull(loss.detach(), name="loss")

        for _ in range(2):
            optimizer.step(closure)
        return current().session.declarations

    assert ThreadedCluster((1, 1)).run(main) == [4, 4]  # the comparison of all ranks, gradients, evaluations, the loss
