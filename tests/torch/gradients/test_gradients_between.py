"""What a training does to gradients between backward() and step() has its effect, or is an error: it is never lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.threaded import ThreadedCluster
from torch import nn
from torch_training import Net, assert_same, loss_of, reference, sgd, state_of, wrap, wrap_and_cross

import byteps_py.torch as bps
from byteps_py.torch.gradients import gradient_checksums

MACHINES = (2, 2)
STEPS = 4
SMALL_BUCKETS = 600  # bytes: several buckets, fused and single
MAKERS = [
    sgd,
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    lambda params: torch.optim.AdamW(params, lr=0.01),
]


@pytest.fixture(params=["compiled", "zlib"])
def checksum_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to compute checksums."""
    kernel = gradient_checksums.checksum_kernel()
    if request.param == "compiled":
        kernel.prepare()
        assert kernel.is_ready()
    else:
        monkeypatch.setattr(kernel, "ready", None)
        monkeypatch.setattr(kernel, "prepare", lambda: None)


# ---- GradScaler --------------------------------------------------------------------------------------------------


def scaled_steps(scaler: Any, model: nn.Module, optimizer: Any, rank: int, clip: bool) -> None:
    """As PyTorch's users write it: nothing of this package in the loop."""
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, step)).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@pytest.mark.parametrize("make", MAKERS, ids=["sgd", "fused sgd", "fused adamw", "adamw"])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("dress", [wrap, wrap_and_cross], ids=["plain", "CrossBarrier"])
def test_a_scaler_needs_no_synchronize(make, clip, dress) -> None:
    def main(rank: int) -> dict[str, torch.Tensor]:
        model = Net()
        optimizer = dress(model, make)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # a power of two is exact
        scaled_steps(scaler, model, optimizer, rank, clip)
        return state_of(model)

    expected = reference(make, STEPS, MACHINES, before_step=clipped if clip else lambda model: None)
    assert_same(ThreadedCluster(MACHINES, fusion_bytes=SMALL_BUCKETS).run(main), expected)


@pytest.mark.parametrize("make", MAKERS, ids=["sgd", "fused sgd", "fused adamw", "adamw"])
@pytest.mark.parametrize("options", [{}, {"op": bps.Adasum}], ids=["average", "adasum"])
def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(make, options) -> None:
    def main(rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = Net()
        optimizer = wrap(model, make, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scales = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            scaler.scale(loss * float("inf") if (rank, step) == (1, 2) else loss).backward()
            before = state_of(model)
            scaler.step(optimizer)
            scaler.update()
            after = state_of(model)
            assert any(not torch.equal(after[name], before[name]) for name in after) == (step != 2)
            scales.append(scaler.get_scale())
        return scales, state_of(model)

    (scales, state), *others = ThreadedCluster((1, 1)).run(main)
    assert scales == [1024.0, 1024.0, 512.0, 512.0]
    for its_scales, its_state in others:
        assert its_scales == scales
        assert_same([its_state], state)
    assert all(value.isfinite().all() for value in state.values())


def test_a_scaler_takes_gradients_as_they_are_where_it_is_told_to() -> None:
    """Horovod's order, without unscale_(): averaged once, also where a rank's own would overflow."""

    def main(rank: int) -> dict[str, torch.Tensor]:
        model = Net()
        optimizer = wrap(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(STEPS):
            scaler.scale(loss_of(model, rank, step)).backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return state_of(model)

    assert_same(ThreadedCluster(MACHINES).run(main), reference(sgd, STEPS, MACHINES))


def test_a_schedule_may_be_read_between_backward_and_step_on_one_rank_alone() -> None:
    """Nothing but a scaler makes the optimizer wait for others."""

    def main(rank: int) -> dict[str, torch.Tensor]:
        model = Net()
        optimizer = wrap(model)
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            if rank == 0:
                assert optimizer.param_groups[0]["lr"] == 0.1
                assert optimizer._stepper.wrapped.passes.has_begun
            bps.push_pull(torch.ones(1), name="loss")
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model)

    assert_same(ThreadedCluster(MACHINES).run(main), reference(sgd, STEPS, MACHINES))


# ---- other changes -----------------------------------------------------------------------------------------------


def new_data(grad: torch.Tensor) -> None:
    grad.data = grad.detach() * 0.5


def one_element(grad: torch.Tensor) -> None:
    grad.numpy()[-1] += 1.0


def unscaled(grad: torch.Tensor) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_([grad], torch.zeros(1), torch.full((1,), 0.5))


CHANGES = {
    "data.mul_": lambda grad: grad.data.mul_(0.5),
    "data =": new_data,
    "numpy": one_element,
    "unscale kernel": unscaled,
    "mul_": lambda grad: grad.mul_(0.5),
    "data.zero_": lambda grad: grad.data.zero_(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("which", ["0.weight", "2.bias"], ids=["alone", "with others"])
@pytest.mark.parametrize("options", [{}, {"compression": bps.Compression.bf16}, {"gradient_predivide_factor": 2.0}],
                         ids=["plain", "compressed", "predivided"])  # fmt: skip
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.usefixtures("checksum_kernel")
def test_a_change_of_what_was_handed_over_is_noticed(
    change: Callable[[torch.Tensor], object], which: str, options: dict[str, Any], set_to_none: bool
) -> None:
    def main(rank: int) -> None:
        model = nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 5))
        optimizer = wrap(model, **options)
        param = dict(model.named_parameters())[which]
        for step in range(3):
            model(torch.ones(2, 4)).square().sum().backward()
            if step == 1:
                change(param.grad)
                with pytest.raises(bps.GradientOrderError, match=rf"gradient of '{which}' was changed after backward"):
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    ThreadedCluster((1, 1), fusion_bytes=SMALL_BUCKETS).run(main)


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.usefixtures("checksum_kernel")
def test_gradients_that_stay_where_results_lie_may_be_read(shared_memory: bool) -> None:
    """zero_grad(set_to_none=False) leaves them there; the service then writes the next result."""

    def main(rank: int) -> dict[str, torch.Tensor]:
        model = Net()
        optimizer = wrap(model)
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            own = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            bps.barrier()  # gradients that are complete are combined now
            for mine, param in zip(own, model.parameters(), strict=True):
                assert mine is None or torch.equal(mine, param.grad)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return state_of(model)

    cluster = ThreadedCluster(MACHINES, shared_memory, fusion_bytes=SMALL_BUCKETS)
    assert_same(cluster.run(main), reference(sgd, STEPS, MACHINES))


@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.usefixtures("checksum_kernel")
def test_a_change_of_a_sparse_gradient_is_noticed(coalesced: bool) -> None:
    def main(rank: int) -> None:
        table = nn.Embedding(6, 2, sparse=True)
        optimizer = bps.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), table.named_parameters())
        rows = torch.tensor([1, 4]) if coalesced else torch.tensor([1, 4, 1])
        for step in range(4):  # sparse from the second on
            table(rows).sum().backward()
            if step == 2:
                table.weight.grad._values().data.mul_(0.5)
                with pytest.raises(bps.GradientOrderError, match="gradient of 'weight' was changed"):
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()

    ThreadedCluster((1, 1)).run(main)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_a_gradient_on_its_way_that_is_filled_behind_autograds_back(value: float) -> None:
    """CrossBarrier: ``grad.data.zero_()`` after step(), as old scripts zero gradients."""

    def main(rank: int) -> dict[str, torch.Tensor]:
        model = Net()
        optimizer = wrap_and_cross(model)
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            optimizer.step()
            for param in model.parameters():
                param.grad.data.fill_(value)
            optimizer.finish_updates()
            assert all(torch.equal(p.grad, torch.full_like(p, value)) for p in model.parameters())
            model.zero_grad()
        return state_of(model)

    assert_same(ThreadedCluster(MACHINES).run(main), reference(sgd, STEPS, MACHINES))


# ---- who else holds the optimizer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dress", [wrap, wrap_and_cross], ids=["plain", "CrossBarrier"])
@pytest.mark.parametrize("loads", ["broadcast", "wrapped", "plain", "restore"])
def test_a_schedule_made_before_wrapping_goes_on(dress, loads) -> None:
    """All ranks follow the schedule after one rank loads a state, and both optimizers show the same state."""

    def main(rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = Net()
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
        optimizer = dress(model, lambda _: plain)
        rates = []
        for step in range(STEPS):
            if step in (0, 2):
                if loads == "broadcast":
                    bps.broadcast_optimizer_state(optimizer, root_rank=0)
                elif loads == "restore":
                    state = bps.elastic.TorchState(model=model, optimizer=optimizer)
                    state.restore()
                else:
                    its = optimizer if loads == "wrapped" else plain
                    its.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
                schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
            assert optimizer.param_groups is plain.param_groups
            assert optimizer.state is plain.state
        assert len(plain.state_dict()["state"]) == len(list(model.parameters()))
        return rates, state_of(model)

    (rates, state), *others = ThreadedCluster((2, 1)).run(main)
    assert rates == [0.05, 0.025, 0.0125, 0.00625]
    for its_rates, its_state in others:
        assert its_rates == rates
        assert_same([its_state], state)


@pytest.mark.parametrize("dress", [wrap, wrap_and_cross], ids=["plain", "CrossBarrier"])
def test_a_group_added_to_the_wrapped_optimizer_is_combined(dress) -> None:
    def main(rank: int) -> dict[str, torch.Tensor]:
        model = Net()
        plain = sgd(model.first.parameters())
        optimizer = dress(model, lambda _: plain)
        plain.add_param_group({"params": [p for name, p in model.named_parameters() if not name.startswith("first")]})
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        if dress is wrap_and_cross:
            optimizer.finish_updates()
        return state_of(model)

    assert_same(ThreadedCluster(MACHINES).run(main), reference(sgd, STEPS, MACHINES))


# ---- copies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dress", [wrap, wrap_and_cross], ids=["plain", "CrossBarrier"])
def test_a_copy_is_refused_with_what_to_save_instead(dress, tmp_path) -> None:
    import copy
    import pickle

    def main(rank: int) -> None:
        model = Net()
        optimizer = dress(model)
        for attempt in (copy.deepcopy, copy.copy, pickle.dumps, lambda o: torch.save({"o": o}, tmp_path / str(rank))):
            with pytest.raises(bps.UsageError, match=r"optimizer\.state_dict\(\)"):
                attempt(optimizer)
        kind = bps.UsageError if rank == 0 else bps.CommunicationError
        with pytest.raises(kind, match="broadcast_optimizer_state"):
            bps.broadcast_object(optimizer, root_rank=0)
        loss_of(model, rank, 0).backward()  # and it goes on
        optimizer.step()

    ThreadedCluster((1, 1)).run(main)
