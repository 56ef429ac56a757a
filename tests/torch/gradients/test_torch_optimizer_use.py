"""DistributedOptimizer while the training changes, and when it is misused."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from support.threaded import ThreadedCluster, contract
from torch import nn
from torch_training import Net, assert_same, gradients, loss_of, reference, sgd, state_of, wrap

import byteps_py.torch as bps
from byteps_py.torch.gradients.bucket import AFTER, BucketState, plan_buckets

MACHINES = (2, 2)
STEPS = 4
SMALL_BUCKETS = 600  # bytes: several buckets, fused and single


def test_freezing_and_unfreezing() -> None:
    def main(rank: int):
        model = Net()
        model.first.requires_grad_(False)
        optimizer = wrap(model)
        history = []
        for step, (first, last) in enumerate([(False, True), (True, True), (True, False), (True, True)]):
            model.first.requires_grad_(first)
            model.last.requires_grad_(last)
            loss_of(model, rank, step).backward()
            optimizer.synchronize()
            history.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            optimizer.zero_grad()
        return history

    histories = ThreadedCluster(MACHINES, fusion_bytes=SMALL_BUCKETS).run(main)
    model = Net()
    for step, frozen in enumerate([("first",), (), ("last",), ()]):
        by_rank = [gradients(model, rank, [step]) for rank in range(4)]
        for i, (name, _) in enumerate(model.named_parameters()):
            mean = contract([grads[i] for grads in by_rank], MACHINES, average=True)
            for history in histories:
                if name.split(".")[0] in frozen:
                    assert history[step][i] is None
                else:
                    assert torch.equal(history[step][i], mean), (step, name)


def test_add_param_group() -> None:
    def main(rank: int):
        model = Net()
        optimizer = bps.DistributedOptimizer(sgd(model.first.parameters()), model.named_parameters())
        rest = [p for name, p in model.named_parameters() if not name.startswith("first")]
        optimizer.add_param_group({"params": rest})
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model)

    assert_same(ThreadedCluster(MACHINES).run(main), reference(sgd, STEPS, MACHINES))


def test_two_models_with_equal_names_and_a_second_optimizer_for_the_first() -> None:
    def main(rank: int):
        models = Net(), Net()
        optimizers = [wrap(model) for model in models]
        for step in range(STEPS):
            if step == 2:
                optimizers[0] = wrap(models[0], lambda params: torch.optim.SGD(params, lr=0.05))
            losses = [loss_of(model, rank, step) for model in models]
            (losses[0] + losses[1]).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return state_of(models[1])

    assert_same(ThreadedCluster(MACHINES).run(main), reference(sgd, STEPS, MACHINES))


def test_suspend_and_resume_between_steps() -> None:
    def main(rank: int):
        model = Net()
        optimizer = wrap(model)
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                bps.suspend()
                assert not bps.is_initialized()
                bps.resume(2, 0)
        return state_of(model)

    assert_same(ThreadedCluster(MACHINES).run(main), reference(sgd, STEPS, MACHINES))


def test_state_and_schedulers_of_the_wrapped_optimizer_are_kept() -> None:
    def main(rank: int) -> None:
        model = Net()
        plain = torch.optim.Adam(model.parameters(), lr=0.5)
        before = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        plain.step()
        plain.zero_grad()
        optimizer = bps.DistributedOptimizer(plain, model.named_parameters())
        assert isinstance(optimizer, torch.optim.Adam)
        assert type(optimizer).__name__ == "Adam"
        assert optimizer.state[model.first.weight]["step"] == 1
        after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
        loss_of(model, rank, 0).backward()
        optimizer.step()
        before.step()
        after.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 0.5 * 0.1)
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        steps = []
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        optimizer.zero_grad()
        loss_of(model, rank, 0).backward()
        optimizer.step()
        assert steps == [1]

    ThreadedCluster((1, 1)).run(main)


def test_gradient_scaler_with_synchronize() -> None:
    def main(rank: int) -> dict[str, torch.Tensor]:
        model = Net()
        optimizer = wrap(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(STEPS):
            scaler.scale(loss_of(model, rank, step)).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return state_of(model)

    assert_same(ThreadedCluster(MACHINES).run(main), reference(sgd, STEPS, MACHINES))  # a power of two is exact


# ---- misuse --------------------------------------------------------------------------------------------------


def alone(function):
    """Run on a job of one rank: misuse is misuse there too."""
    ThreadedCluster((1,)).run(lambda rank: function())


@pytest.mark.parametrize("size", [1, 2])
def test_calls_out_of_order(size) -> None:
    def main(rank: int) -> None:
        model = Net()
        optimizer = wrap(model)
        loss_of(model, rank, 0).backward()
        with pytest.raises(bps.GradientOrderError, match=r"before optimizer\.step"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="prohibited"):  # Horovod's type
            optimizer.zero_grad()
        with pytest.raises(ValueError, match="more than backward_passes_per_step times before call to step"):
            loss_of(model, rank, 1).backward()

    ThreadedCluster((1,) * size).run(main)


class Mostly(nn.Module):
    """Most of it is not used, so that its bucket is not complete before step()."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 1)
        self.unused = nn.ModuleList(nn.Linear(2, 1) for _ in range(3))
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.parametrize("size", [1, 2])
def test_computed_twice_in_a_bucket_that_is_not_complete(size) -> None:
    def main(rank: int) -> list[float]:
        model = Mostly()
        optimizer = wrap(model, lambda params: torch.optim.SGD(params, lr=1.0))
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(bps.GradientOrderError, match=r"'used\..*' came .* more than backward_passes"):
            optimizer.step()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()  # and it goes on
        optimizer.step()
        return model.used.weight.flatten().tolist()

    assert ThreadedCluster((1,) * size).run(main) == [[-0.5, -0.5]] * size


def test_what_is_not_final_may_be_changed() -> None:
    """After one of two passes: a gradient may be clipped, and a step with it is one like any other."""

    def main(rank: int) -> list[float]:
        model = Mostly()
        optimizer = wrap(model, lambda params: torch.optim.SGD(params, lr=1.0), backward_passes_per_step=2)
        model(torch.full((1, 2), 2.0 + rank)).sum().backward()
        with torch.no_grad():
            model.used.weight.grad.clamp_(max=2.5)
        optimizer.step()
        return model.used.weight.flatten().tolist()

    assert ThreadedCluster((1, 1)).run(main) == [[0.5 - 2.25] * 2] * 2


def test_state_loaded_between_two_passes_exchanges_nothing() -> None:
    def main(rank: int) -> None:
        model = Mostly()
        optimizer = wrap(model, backward_passes_per_step=2)
        model(torch.ones(1, 2)).sum().backward()
        if rank == 0:  # only this rank: other ranks would not answer
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()

    cluster = ThreadedCluster((1, 1))
    cluster.run(main)
    assert not [name for name, _ in cluster.rounds if "Gradient" in name]


def test_a_change_that_would_be_lost_is_an_error() -> None:
    def main(rank: int):
        model = Net()
        optimizer = wrap(model)
        loss_of(model, rank, 0).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(bps.GradientOrderError, match="changed after backward"):
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model, rank, 0).backward()  # and it goes on
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, rank, 0).backward()
        model.zero_grad()
        with pytest.raises(bps.GradientOrderError, match="changed after backward"):
            optimizer.step()

    ThreadedCluster((1, 1)).run(main)


def test_names_are_checked() -> None:
    def main() -> None:
        model = nn.Linear(2, 2)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        pairs = [("a", model.weight), ("a", model.bias)]
        with pytest.raises(ValueError, match=r"must be unique\. Found duplicates: a"):
            bps.DistributedOptimizer(plain, pairs)
        with pytest.raises(ValueError, match="one or more model parameters were not named"):
            bps.DistributedOptimizer(plain, pairs[:1])
        with pytest.raises(ValueError, match="sequence of tuples"):
            bps.DistributedOptimizer(plain, model.parameters())
        with pytest.raises(ValueError, match="at least 1"):
            bps.DistributedOptimizer(plain, backward_passes_per_step=0)
        with pytest.raises(ValueError, match="already"):
            bps.DistributedOptimizer(bps.DistributedOptimizer(plain))

    alone(main)
    with pytest.raises(bps.NotInitializedError):
        bps.DistributedOptimizer(torch.optim.SGD(nn.Linear(1, 1).parameters()))


def test_passes_can_be_changed_between_steps_only() -> None:
    def main(rank: int) -> None:
        model = nn.Linear(2, 1, bias=False)
        optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        optimizer.set_backward_passes_per_step(2)
        assert optimizer.backward_passes_per_step == 2
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ValueError, match="between backward"):
            optimizer.set_backward_passes_per_step(1)
        optimizer.synchronize()
        assert torch.equal(model.weight.grad, torch.full((1, 2), 2.0))

    ThreadedCluster((2,)).run(main)


def test_ranks_that_disagree_are_told_and_may_go_on() -> None:
    def main(rank: int):
        wrong = nn.Linear(2, 2 + rank)
        optimizer = wrap(wrong)
        wrong(torch.ones(1, 2)).sum().backward()
        with pytest.raises(bps.MismatchError, match=r"Gradient.weight\+1 .*rank 0 gave .*rank 1 gave"):
            optimizer.step()
        model = Net()
        optimizer = wrap(model)
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model)

    assert_same(ThreadedCluster((1, 1)).run(main), reference(sgd, STEPS, (1, 1)))


def parts(rank: int) -> nn.Module:
    """Another part of a model on each rank, with other names, as the stages of a pipeline are."""
    return nn.Sequential(OrderedDict([(f"stage{rank}", nn.Linear(2, 2))]))


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def plain_step(model: nn.Module) -> None:
    step_of(model, wrap(model))


def crossing_step(model: nn.Module) -> None:
    step_of(model, bps.CrossBarrier(model, wrap(model)))
    model(torch.ones(1, 2))


def hosted_step(model: nn.Module) -> None:
    step_of(model, bps.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), hosted=True))


def ddp_step(model: nn.Module) -> None:
    step_of(bps.parallel.DistributedDataParallel(model), sgd(model.parameters()))


def broadcast(model: nn.Module) -> None:
    bps.broadcast_parameters(model.state_dict(), root_rank=0)


@pytest.mark.parametrize(
    "use", [plain_step, crossing_step, hosted_step, ddp_step, broadcast], ids=lambda use: use.__name__
)
def test_ranks_with_other_parameters_are_told_at_once(use: Callable[[nn.Module], None]) -> None:
    """They would wait for each other's tensors until the stall limit."""

    def main(rank: int) -> None:
        with pytest.raises(bps.MismatchError, match=r"rank 0 gave .*stage0.*rank 1 gave .*stage1.*process_set"):
            use(parts(rank))
        plain_step(nn.Linear(2, 2))  # the job goes on

    began = time.monotonic()
    ThreadedCluster((1, 1)).run(main)
    assert time.monotonic() - began < 10


def test_an_optimizer_that_one_rank_never_uses_does_not_count() -> None:
    def main(rank: int) -> None:
        if rank == 0:
            wrap(parts(7))
        plain_step(nn.Linear(2, 2))

    ThreadedCluster((1, 1)).run(main)


def test_optimizers_whose_gradients_come_in_another_order_are_the_same() -> None:
    """What counts is the order of their steps."""

    def main(rank: int) -> None:
        models = [parts(0), parts(1)]
        optimizers = [wrap(model) for model in models]
        for model in models if rank == 0 else models[::-1]:
            model(torch.ones(1, 2)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    ThreadedCluster((1, 1)).run(main)


def test_a_lost_peer_ends_step_with_its_error() -> None:
    cluster = ThreadedCluster((1, 1))

    def main(rank: int) -> None:
        model = Net()
        optimizer = wrap(model)
        if rank == 1:
            return
        loss_of(model, rank, 0).backward()
        cluster.fail(bps.PeerLostError("rank 1 is gone"))
        with pytest.raises(bps.PeerLostError, match="rank 1 is gone"):
            optimizer.step()

    cluster.run(main)


def test_layout() -> None:
    sizes = [4, 8, 100, 4, 4]
    assert plan_buckets(sizes, ["a"] * 5, 12) == [[4, 3], [2], [1, 0]]
    assert plan_buckets(sizes, ["a"] * 5, 0) == [[4], [3], [2], [1], [0]]
    assert plan_buckets([1, 1, 1, 1], ["a", "b", "a", "b"], 12) == [[3, 1], [2, 0]]
    assert plan_buckets([], [], 12) == []


def test_a_bucket_s_states_follow_one_another_as_the_table_says() -> None:
    assert set(AFTER) == set(BucketState)
    reachable = [BucketState.OPEN]
    for state in reachable:
        reachable += [after for after in AFTER[state] if after not in reachable]
    assert set(reachable) == set(BucketState)
    model = nn.Linear(2, 1, bias=False)
    bps.init()
    (bucket,) = bps.DistributedOptimizer(sgd(model.parameters()))._stepper.reducer.buckets
    with pytest.raises(RuntimeError, match="is OPEN: DONE can't follow"):
        bucket.move_to(BucketState.DONE)
    bucket.move_to(BucketState.SENT)
    assert bucket.sent
    bucket.reset()
    assert not bucket.sent
    bps.shutdown()
