"""BytePS's names with BytePS's arguments, its modules, and what its examples do with them."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
import torch
from support.clusters import bpslaunch
from support.threaded import ThreadedCluster
from torch_training import Net, assert_same, loss_of, reference, sgd, state_of

import byteps_py
import byteps_py.torch as bps
from byteps_py.config.settings import Settings
from byteps_py.torch.collectives.context import Context, use

PROGRAM = Path(__file__).parents[1] / "programs" / "byteps_user.py"
MACHINES = (2, 2)
STEPS = 4
REDUCTION = "tensor average=True name=None version=0 priority=0"
#: Parameters in order; ``=``: has a default. ``init`` and ``resume`` take more, see docs/reference/byteps.md.
SIGNATURES = {
    "shutdown": "",
    "suspend": "",
    "resume": "num_workers num_servers global_rank",
    "size": "",
    "local_size": "",
    "rank": "",
    "local_rank": "",
    "declare": "name",
    "poll": "handle",
    "synchronize": "handle",
    "push_pull": f"{REDUCTION} compression=none",
    "push_pull_async": REDUCTION,
    "push_pull_inplace": REDUCTION,
    "push_pull_async_inplace": REDUCTION,
    "byteps_push_pull": REDUCTION,
    "broadcast_parameters": "params root_rank prefix",
    "broadcast_optimizer_state": "optimizer root_rank prefix",
    "DistributedOptimizer": "optimizer named_parameters=None compression=none backward_passes_per_step=1",
    "CrossBarrier": "model optimizer named_parameters=None compression=none backward_passes_per_step=1 "
    "num_steps=1000000",
    "DistributedDataParallel": "module device_ids=None broadcast_buffers=True compression=none",
    "get_pushpull_speed": "",
}
#: What each of BytePS's modules offers.
MODULES = {
    "cross_barrier": "CrossBarrier Compression init shutdown size local_size rank local_rank poll synchronize "
    "byteps_push_pull broadcast_parameters broadcast_optimizer_state",
    "ops": "init shutdown suspend resume size local_size rank local_rank declare poll synchronize push_pull "
    "push_pull_async push_pull_inplace push_pull_async_inplace get_pushpull_speed",
    "compression": "Compression",
    "parallel": "DistributedDataParallel",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_byteps(name: str) -> None:
    expected = SIGNATURES[name].split()
    parameters = list(inspect.signature(getattr(bps, name)).parameters.values())
    found = [
        parameter.name
        if parameter.default is parameter.empty or "=" not in wanted
        else f"{parameter.name}={'none' if parameter.default is bps.Compression.none else parameter.default}"
        for parameter, wanted in zip(parameters, expected, strict=False)
    ]
    assert found == expected
    assert all(p.default is not p.empty for p in parameters[len(expected) :])
    assert getattr(byteps_py, name) is getattr(bps, name)


@pytest.mark.parametrize("module", MODULES)
def test_modules_offer_what_byteps_do(module: str) -> None:
    found = importlib.import_module(f"byteps_py.torch.{module}")
    for name in MODULES[module].split():
        assert getattr(found, name) is getattr(bps, name)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        found.nothing_like_it  # noqa: B018


def test_the_module_of_the_cross_barrier_is_one() -> None:
    assert importlib.import_module("byteps_py.cross_barrier") is importlib.import_module(
        "byteps_py.torch.cross_barrier"
    )


def test_cross_barrier_takes_a_plain_optimizer() -> None:
    """And completes its updates in step number num_steps."""

    def main(rank: int) -> dict[str, torch.Tensor]:
        model = Net()
        optimizer = bps.CrossBarrier(
            model, sgd(model.parameters()), named_parameters=model.named_parameters(), compression=bps.Compression.none,
            backward_passes_per_step=1, num_steps=STEPS,
        )  # fmt: skip
        bps.broadcast_parameters(model.state_dict(), root_rank=0)
        bps.broadcast_optimizer_state(optimizer, root_rank=0)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        # Not state_dict(), which would complete them.
        return {name: param.detach().clone() for name, param in model.named_parameters()}

    expected = reference(sgd, STEPS, MACHINES)
    weights = ThreadedCluster(MACHINES).run(main)
    named = weights[0].keys()
    assert_same(weights, {name: expected[name] for name in named})
    assert {name for name, _ in Net().named_parameters()} == named


def test_cross_barrier_passes_on_what_it_is_given() -> None:
    def main(rank: int) -> dict[str, torch.Tensor]:
        states = []
        for cross in (False, True):
            model = Net()
            names, options = model.named_parameters(), (bps.Compression.fp16, 2)
            plain = sgd(model.parameters())
            optimizer = (
                bps.CrossBarrier(model, plain, names, *options)
                if cross
                else bps.DistributedOptimizer(plain, names, *options)
            )
            for step in range(2 * STEPS):
                loss_of(model, rank, step).backward()
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            states.append(state_of(model))
        assert_same([states[1]], states[0])
        return states[0]

    ThreadedCluster(MACHINES).run(main)


@pytest.mark.parametrize(
    "given", [{"named_parameters": []}, {"compression": bps.Compression.fp16}, {"backward_passes_per_step": 2}]
)
def test_cross_barrier_of_a_wrapped_optimizer_takes_no_arguments_for_wrapping(given: dict[str, object]) -> None:
    with use(Context()):
        bps.init(settings=Settings())
        model = torch.nn.Linear(2, 1)
        optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        with pytest.raises(bps.UsageError, match="is a DistributedOptimizer already: give named_parameters"):
            bps.CrossBarrier(model, optimizer, **given)
        bps.shutdown()


def test_places_are_known_while_suspended() -> None:
    def main(rank: int) -> None:
        asked = (bps.rank, bps.size, bps.local_rank, bps.local_size, bps.cross_rank, bps.cross_size)
        before = [ask() for ask in asked]
        bps.suspend()
        assert not bps.is_initialized()
        assert [ask() for ask in asked] == before
        assert bps.is_homogeneous()
        bps.suspend()  # again: nothing changes
        assert bps.rank() == rank
        with pytest.raises(bps.NotInitializedError):
            bps.push_pull(torch.ones(1), name="x")
        bps.resume(len(MACHINES), 0)
        assert [ask() for ask in asked] == before
        bps.suspend()
        bps.shutdown()
        for ask in asked:
            with pytest.raises(bps.NotInitializedError):
                ask()

    ThreadedCluster(MACHINES).run(main)


@pytest.mark.parametrize(
    ("options", "ranks"), [pytest.param(["-np", "2"], 2, marks=pytest.mark.slow), (["-np", "1", "--machines", "2"], 2)]
)
def test_a_program_as_byteps_users_write_it(options: list[str], ranks: int) -> None:
    done = bpslaunch(options, [PROGRAM])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{ranks} ranks: equal weights with and without barrier, and after resume"]
