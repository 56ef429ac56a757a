"""Elastic training with the membership it began with: commits, failures that all ranks see, notices of hosts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.threaded import ThreadedCluster
from torch import nn
from torch_training import Net, assert_same, loss_of, reference, sgd, state_of, wrap

import byteps_py
import byteps_py.torch as bps
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.elastic import ElasticSampler, HostUpdateResult, ObjectState, State, TorchState
from byteps_py.torch.elastic.state import (
    ModelStateHandler,
    OptimizerStateHandler,
    get_handler_registry,
    set_handler_registry,
)

MACHINES = (2, 1)
STEPS = 6


def disagree() -> None:
    """A failure that every rank sees."""
    bps.push_pull(torch.ones(2 + bps.rank()), name="disagree")


def train(fail_at: dict[int, int], commit_every: int = 2, cross: bool = False):
    """A training in which given steps fail given numbers of times, between backward() and step()."""

    def main(rank: int):
        torch.manual_seed(rank)
        model = Net()
        if rank:
            nn.init.zeros_(model.first.weight)  # sync() must repair it
        optimizer = wrap(model)
        if cross:
            optimizer = bps.CrossBarrier(model, optimizer)
        left = dict(fail_at)
        events: list[str] = []

        @bps.elastic.run
        def loop(state, suffix):
            events.append(f"from {state.step}")
            while state.step < STEPS:
                loss_of(model, rank, state.step).backward()
                if left.get(state.step):
                    left[state.step] -= 1
                    disagree()
                optimizer.step()
                optimizer.zero_grad()
                state.step += 1
                state.history.append(state.step)
                if state.step % commit_every == 0:
                    state.commit()
            return suffix

        state = TorchState(model, optimizer, step=0, history=[])
        state.register_reset_callbacks([lambda: events.append(f"reset at {state.step} of {bps.size()}")])
        events.append(loop(state, suffix="end"))
        if cross:
            optimizer.finish_updates()
        return state_of(model), events, state.history

    return main


@pytest.mark.parametrize("cross", [False, True])
def test_failures_change_nothing_but_the_way(cross) -> None:
    results = ThreadedCluster(MACHINES).run(train({1: 1, 3: 2}, cross=cross))
    assert_same([state for state, _, _ in results], reference(sgd, STEPS, MACHINES))
    for _, events, history in results:
        assert events == [
            "from 0",
            "reset at 0 of 3",
            "from 0",
            "reset at 2 of 3",
            "from 2",
            "reset at 2 of 3",
            "from 2",
            "end",
        ]
        assert history == [1, 2, 3, 4, 5, 6]


def test_a_failure_that_comes_again_and_again_is_raised() -> None:
    def main(rank: int) -> None:
        with pytest.raises(bps.HorovodInternalError, match="disagree"):
            train({4: 99})(rank)

    ThreadedCluster(MACHINES).run(main)


def test_other_errors_are_not_caught() -> None:
    def main(rank: int) -> None:
        @bps.elastic.run
        def loop(state):
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            loop(TorchState(step=0))

    ThreadedCluster((1, 1)).run(main)


@pytest.mark.parametrize(
    ("change", "synced"), [(HostUpdateResult.added, True), (HostUpdateResult.removed, False)], ids=["added", "removed"]
)
def test_a_notice_of_one_rank_interrupts_all_and_keeps_the_state(change, synced) -> None:
    def main(rank: int):
        syncs: list[int] = []

        class Counting(TorchState):
            def sync(self) -> None:
                syncs.append(self.step)
                super().sync()

        state = Counting(step=0)

        @bps.elastic.run
        def loop(state):
            while state.step < 3:
                state.step += 1
                if state.step == 2 and rank == 1:
                    state.on_hosts_updated(17, change)
                state.check_host_updates()
            return state.step

        return loop(state), syncs

    # Not committed, and kept all the same: it was no failure.
    assert ThreadedCluster((1, 1)).run(main) == [(3, [0, 2] if synced else [0])] * 2


def test_a_notice_counts_once() -> None:
    def main(rank: int) -> None:
        state = TorchState()
        state.on_hosts_updated(5)
        with pytest.raises(bps.HostsUpdatedInterrupt):
            state.check_host_updates()
        state.on_hosts_updated(5)
        state.on_hosts_updated(4)
        state.check_host_updates()
        state.on_hosts_updated(6)
        state.on_reset()  # forgets it
        state.commit()
        assert state.commits == 1

    ThreadedCluster((1, 1)).run(main)


def test_a_job_that_cant_be_joined_again() -> None:
    def main(rank: int) -> None:
        context = contexts.current()

        @bps.elastic.run
        def loop(state):
            def refuse(settings):
                raise bps.RendezvousError("nobody there")

            context._opener = refuse
            disagree()

        with pytest.raises(
            bps.RendezvousError, match=r"can't be joined again after MismatchError: nobody there.*the same"
        ):
            loop(TorchState(step=0))

    ThreadedCluster((1, 1)).run(main)


def test_what_a_torch_state_saves_and_makes_equal() -> None:
    def main(rank: int):
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, float(rank))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        sampler = ElasticSampler(range(10), shuffle=False)
        state = TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, data={"seen": [rank]})
        state.sync()
        assert torch.equal(model.weight, torch.zeros(2, 2))
        assert state.data == {"seen": [0]}
        assert optimizer.param_groups[0]["lr"] == 0.1

        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
        sampler.record_batch(0, 2)
        state.data["seen"].append(1)
        state.save()
        saved = state_of(model), scheduler.last_epoch, optimizer.param_groups[0]["lr"]
        for _ in range(2):  # restored twice: what is saved is not what is used
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            scheduler.step()
            sampler.set_epoch(1)
            state.data["seen"].append(2)
            state.restore()
            assert_same([state_of(model)], saved[0])
            assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == saved[1:]
            assert float(optimizer.state[model.weight]["step"]) == 1
            assert (sampler.epoch, list(sampler)) == (0, [[4, 6, 8], [5, 7, 9]][rank])
            assert state.data == {"seen": [0, 1]}

        other = nn.Linear(1, 1)
        state.model = other  # saved at once
        bias = other.bias.item()
        nn.init.ones_(other.bias)
        state.restore()
        assert other.bias.item() == bias
        assert state.model is other
        with pytest.raises(AttributeError, match="TorchState has no attribute 'nothing'"):
            state.nothing  # noqa: B018

    ThreadedCluster((1, 1)).run(main)


class _Overwrites(ModelStateHandler):
    def sync(self) -> None:
        for value in self.value.state_dict().values():
            value.fill_(9.0)


class _Fails(OptimizerStateHandler):
    def sync(self) -> None:
        raise bps.PeerLostError("lost rank 0")


@pytest.fixture
def failing_handlers() -> Iterator[None]:
    """A failure after the model was broadcast and before the optimizer was."""
    before = [*get_handler_registry()]
    set_handler_registry([(torch.nn.Module, _Overwrites), (torch.optim.Optimizer, _Fails)])
    yield
    set_handler_registry(before)


@pytest.mark.usefixtures("failing_handlers")
def test_a_state_that_could_not_be_made_equal_is_none_of_another_rank() -> None:
    """Going back, a rank has its own commit, and not half of each."""
    model = Net()
    before = state_of(model)
    state = TorchState(model, sgd(list(model.parameters())), step=3)
    with pytest.raises(bps.PeerLostError):
        state.sync()
    state.restore()
    assert_same([state_of(model)], before)


def test_a_state_of_ones_own() -> None:
    class Mine(State):
        pass

    state = Mine(bcast_object=lambda value: value, get_rank=lambda: 0)
    for act in (state.save, state.restore, state.sync):
        with pytest.raises(NotImplementedError, match="Mine must define"):
            act()
    state.check_host_updates()
    state.on_hosts_updated(1, HostUpdateResult.removed)
    with pytest.raises(bps.HostsUpdatedInterrupt) as raised:
        state.check_host_updates()
    assert raised.value.skip_sync

    objects = ObjectState(lambda value: {name: [item, 0] for name, item in value.items()}, lambda: 0, a=1, b=2)
    objects.sync()
    assert (objects.a, objects.b) == ([1, 0], [2, 0])
    objects.a.append(5)
    objects.restore()
    assert objects.a == [1, 0]


@pytest.mark.parametrize(("length", "batch"), [(12, 2), (13, 2), (1, 2), (0, 2)])
def test_the_sampler_gives_what_is_left_to_all(length, batch) -> None:
    def main(rank: int):
        sampler = ElasticSampler(range(length), seed=3)
        sampler.set_epoch(2)
        assert len(sampler) == len(list(sampler))
        first = sampler.get_indices(0, batch)
        assert first == list(sampler)[:batch]
        sampler.record_batch(0, batch)
        sampler.load_state_dict(sampler.state_dict())
        return first, list(sampler)

    results = ThreadedCluster((2, 1)).run(main)
    assert len({len(rest) for _, rest in results}) == 1
    covered = [index for first, rest in results for index in (*first, *rest)]
    assert set(covered) == set(range(length))
    assert len(covered) < length + 6
    assert next(zip(*results, strict=True)) != ([],) * 3 or not length


def test_where_it_is_found() -> None:
    assert byteps_py.elastic is bps.elastic is byteps_py.torch.elastic
    assert issubclass(bps.MismatchError, bps.HorovodInternalError)


def test_a_save_that_fails_saves_nothing() -> None:
    """As where the states of an optimizer are gathered from ranks of which one has died."""

    class Gathering(torch.optim.SGD):
        lacks_a_rank = False

        def state_dict(self) -> dict[str, Any]:
            if self.lacks_a_rank:
                raise bps.PeerLostError("rank 1 died")
            return super().state_dict()

    bps.init()
    try:
        model = torch.nn.Linear(2, 1)
        before = [param.detach().clone() for param in model.parameters()]
        optimizer = Gathering(model.parameters(), lr=0.5)
        state = bps.elastic.TorchState(model=model, optimizer=optimizer, step=0)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.step = 1
        optimizer.lacks_a_rank = True
        with pytest.raises(bps.PeerLostError):
            state.save()
        optimizer.lacks_a_rank = False
        state.restore()
        assert state.step == 0
        assert all(map(torch.equal, before, model.parameters()))
    finally:
        bps.shutdown()
