"""What may come between two steps with CrossBarrier: the weights stay those of the DistributedOptimizer."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.threaded import ThreadedCluster
from torch import nn
from torch_training import Net, assert_equal, loss_of, run_steps, state_of, wrap, wrap_and_cross

import byteps_py.torch as bps
from byteps_py.errors import UsageError

MACHINES = (2, 2)
STEPS = 4
SMALL_BUCKETS = 600  # bytes: several buckets, fused and single


def interruptions() -> dict[str, Callable[[nn.Module, Any, int], None]]:
    def evaluation(model: nn.Module, optimizer: Any, rank: int) -> None:
        model.eval()
        with torch.inference_mode():
            loss_of(model, rank, 99)
        model.train()

    def autocast(model: nn.Module, optimizer: Any, rank: int) -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            loss_of(model, rank, 99)

    def model_state(model: nn.Module, optimizer: Any, rank: int) -> None:
        saved = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            model.first.weight.zero_()
        model.load_state_dict(saved)

    def model_load(model: nn.Module, optimizer: Any, rank: int) -> None:
        model.load_state_dict(Net().state_dict())

    def layer_state(model: nn.Module, optimizer: Any, rank: int) -> None:
        saved = copy.deepcopy(model.last.state_dict())
        model.last.load_state_dict(saved)

    def optimizer_state(model: nn.Module, optimizer: Any, rank: int) -> None:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def optimizer_load(model: nn.Module, optimizer: Any, rank: int) -> None:
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.3).state_dict())

    def shutdown(model: nn.Module, optimizer: Any, rank: int) -> None:
        bps.suspend()
        bps.resume(len(MACHINES), 0)

    def freeze(model: nn.Module, optimizer: Any, rank: int) -> None:
        model.first.requires_grad_(False)

    def unfreeze(model: nn.Module, optimizer: Any, rank: int) -> None:
        model.never.requires_grad_(True)

    def another_step(model: nn.Module, optimizer: Any, rank: int) -> None:
        optimizer.step()  # zeros, and momentum
        optimizer.zero_grad()

    def clipped_step(model: nn.Module, optimizer: Any, rank: int) -> None:
        loss_of(model, rank, 50).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()

    def group(model: nn.Module, optimizer: Any, rank: int) -> None:
        model.extra = nn.Linear(2, 2).requires_grad_(True)
        nn.init.ones_(model.extra.weight)
        nn.init.ones_(model.extra.bias)
        optimizer.add_param_group({"params": model.extra.parameters(), "lr": 0.5})

    return {what.__name__: what for what in (
        evaluation, autocast, model_state, model_load, layer_state, optimizer_state, optimizer_load, shutdown, freeze,
        unfreeze, another_step, clipped_step, group,
    )}  # fmt: skip


@pytest.mark.parametrize("interrupt", interruptions().values(), ids=interruptions())
def test_what_comes_between_two_steps(interrupt) -> None:
    def main(crossing: bool):
        def rank_main(rank: int):
            model = Net()
            model.never.requires_grad_(False)
            model.never.weight.grad = torch.ones(3, 3)  # frozen, but it has a gradient: SGD uses it
            optimizer = (wrap_and_cross if crossing else wrap)(model)
            run_steps(model, optimizer, rank, range(2))
            interrupt(model, optimizer, rank)
            run_steps(model, optimizer, rank, range(2, STEPS))
            return state_of(model)

        return rank_main

    crossed, plain = (
        ThreadedCluster(MACHINES, fusion_bytes=SMALL_BUCKETS).run(main(crossing)) for crossing in (True, False)
    )
    assert_equal(crossed, plain)


def test_a_copy_of_the_model_waits_for_nothing() -> None:
    def main(rank: int) -> None:
        model = Net()
        optimizer = wrap_and_cross(model)
        run_steps(model, optimizer, rank, range(1))
        optimizer.finish_updates()
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        loss_of(model, rank, 1).backward()
        optimizer.step()
        for each in copies:
            assert_equal([state_of(each)], [state_of(copies[0])])
            loss_of(each, rank, 1).backward()
        with pytest.raises(UsageError, match="can't be copied or pickled"):
            copy.deepcopy(optimizer)
        optimizer.finish_updates()

    ThreadedCluster((1, 1)).run(main)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo reads it
def test_compiled_models_get_the_same_bits() -> None:
    """dynamo must not trace the hooks, and with them AdamW's step, which would then compute in other dtypes."""

    def main(rank: int) -> list[dict[str, Any]]:
        states = []
        for is_crossed in (False, True):
            torch.manual_seed(0)
            torch.compiler.reset()  # it would take the graph of the first model, which has no hooks
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            named = model.named_parameters()
            if is_crossed:
                optimizer = bps.CrossBarrier(model, optimizer, named)
            else:
                optimizer = bps.DistributedOptimizer(optimizer, named)
            compiled = torch.compile(model, backend="eager")
            for _ in range(STEPS):
                optimizer.zero_grad()
                compiled(torch.randn(3, 4, dtype=torch.float64)).square().mean().backward()
                optimizer.step()
            states.append(copy.deepcopy(model.state_dict()))
        return states

    ((plain, crossed),) = ThreadedCluster((1,)).run(main)
    assert all(torch.equal(value, crossed[name]) for name, value in plain.items())
