"""RunState on one rank: what a run that was saved goes on with, and what is refused. Whole jobs: tests/shadow."""

from __future__ import annotations

import io
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data
from torchdata.stateful_dataloader import StatefulDataLoader

import byteps_py as bps
from byteps_py.errors import UsageError
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.run.loader_position import random_states, set_random_states
from byteps_py.wire.data_link import MAX_ATTACHED_BYTES

SAMPLES, EPOCHS = 10, 3
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it


@pytest.fixture(autouse=True)
def _job() -> Iterator[None]:
    bps.init()
    yield
    bps.shutdown()


class Samples(data.Dataset[Any]):
    """With noise of three kinds."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((3,), random.random() + np.random.rand() + float(torch.rand(())) + index)


class Counting(data.IterableDataset[Any]):
    """Has a state of its own."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < SAMPLES:
            self.next += 1
            yield self.next, torch.full((3,), float(torch.rand(())) + self.next)
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: data.DataLoader(Samples(), 3),
    "one by one": lambda: data.DataLoader(Samples(), None),
    "shuffled": lambda: data.DataLoader(Samples(), 3, shuffle=True),
    "with a generator": lambda: data.DataLoader(Samples(), 3, shuffle=True, generator=generator()),
    "with two generators": lambda: data.DataLoader(
        Samples(), 3, sampler=data.RandomSampler(Samples(), generator=generator()), generator=generator()
    ),
    "with replacement": lambda: data.DataLoader(Samples(), 3, sampler=data.RandomSampler(Samples(), True, 50)),
    "weighted": lambda: data.DataLoader(Samples(), 3, sampler=data.WeightedRandomSampler([1.0] * 9, 9), drop_last=True),
    "a subset": lambda: data.DataLoader(Samples(), 3, sampler=data.SubsetRandomSampler([2, 3, 5, 7])),
    "distributed": lambda: data.DataLoader(Samples(), 3, sampler=data.DistributedSampler(Samples(), 2, 1)),
    "elastic": lambda: data.DataLoader(Samples(), 3, sampler=bps.elastic.ElasticSampler(Samples())),
    "workers": lambda: data.DataLoader(Samples(), 3, shuffle=True, num_workers=2),
    "stateful": lambda: StatefulDataLoader(Samples(), 3, shuffle=True),
    "stateful, own state": lambda: StatefulDataLoader(Counting(), 3),
}


class Run:
    """A small training, and what it has seen: of each batch the samples, the weights, the rate, the scale."""

    def __init__(self, loader: Any, hosted: bool = False) -> None:
        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        self.optimizer = bps.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.001), self.model.named_parameters(), hosted=hosted
        )
        self.each_batch = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.each_epoch = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.state = bps.RunState(
            self.model, self.optimizer, scheduler=[self.each_batch, self.each_epoch], scaler=self.scaler,
            loader=loader, extra={"best": 0.0},
        )  # fmt: skip
        self.seen: list[Any] = []

    def bodies(self) -> Iterator[int]:
        """Numbers, after each body. Negative ones: after an epoch."""
        for epoch in self.state.epochs(EPOCHS):
            for samples, inputs in self.state:
                loss = self.model(inputs).square().mean() * (float("inf") if self.state.iteration == 2 else 1.0)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
                self.each_batch.step()
                self.state.extra["best"] += 1.0
                self.seen.append((epoch, self.state.batch, torch.as_tensor(samples).tolist(), *self.facts()))
                yield self.state.iteration
            self.each_epoch.step()
            self.seen.append((epoch, "end", *self.facts()))
            yield -1 - epoch

    def facts(self) -> tuple[Any, ...]:
        weights = [value.tolist() for value in self.model.parameters()]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        drawn = random.random(), np.random.rand(), float(torch.rand(()))
        return weights, rates, self.scaler.get_scale(), self.state.extra["best"], drawn


def saved_and_loaded(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(("kind", "hosted"), [*((kind, False) for kind in LOADERS), ("shuffled", True)])
def test_a_run_that_was_saved_goes_on_as_if_it_had_not_ended(kind: str, hosted: bool) -> None:
    whole = Run(LOADERS[kind](), hosted)
    states = [saved_and_loaded(whole.state.state_dict()) for _ in whole.bodies()]
    places = list(enumerate(states, 1))
    for length, state in places[1::5] if kind in ("workers", "one by one", "with replacement") else places:
        again = Run(LOADERS[kind](), hosted)
        random.random()
        again.state.load_state_dict(state)
        assert again.state.extra["best"] == state["ranks"][0]["extra"]["best"]
        for _ in again.bodies():
            pass
        assert again.seen == whole.seen[length:]
        assert again.state.iteration == whole.state.iteration


def test_a_run_without_a_loader_counts() -> None:
    def run(state: bps.RunState, to: int) -> list[tuple[int, float]]:
        return [(number, random.random()) for number in state.iterations(to)]

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = bps.RunState(model, optimizer)
    random.seed(1)
    first = run(state, 4)
    saved = state.state_dict()
    rest = run(state, 9)
    again = bps.RunState(model, optimizer)
    again.load_state_dict(saved)
    assert run(again, 9) == rest
    assert [number for number, _ in first + rest] == list(range(9))
    with pytest.raises(UsageError, match="this RunState has no loader"):
        list(again)


def test_an_epoch_that_is_left_is_over() -> None:
    model = torch.nn.Linear(1, 1)
    state = bps.RunState(model, torch.optim.SGD(model.parameters()), loader=data.DataLoader(range(10), 2))
    seen = [(epoch, batch.tolist()) for epoch in state.epochs(2) for batch in itertools.islice(state, 2)]
    assert seen == [(0, [0, 1]), (0, [2, 3]), (1, [0, 1]), (1, [2, 3])]
    assert [batch.tolist() for batch in itertools.islice(state, 1)] == [[0, 1]]
    assert state.epoch == 2


def test_what_the_script_does_before_the_first_batch_is_done_once() -> None:
    """It is a part of what was saved."""

    def script(saved: Any = None) -> list[Any]:
        torch.manual_seed(1)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        loader = data.DataLoader(range(6), 2, shuffle=True)
        state = bps.RunState(model, optimizer, scheduler=scheduler, loader=loader)
        if saved is not None:
            state.load_state_dict(saved)
        seen = []
        for epoch in state.epochs(2):
            optimizer.step()
            scheduler.step()
            random.random()
            for batch in state:
                seen.append((epoch, batch.tolist(), optimizer.param_groups[0]["lr"], random.random()))
                if saved is None and state.iteration == 2:
                    seen.append(state.state_dict())
        return seen

    random.seed(1)
    *_, saved, third, fourth, fifth, sixth = script()
    assert script(saved) == [third, fourth, fifth, sixth]


@pytest.mark.parametrize(("ranks", "skipped"), [(1, 4), (2, 8)])
def test_other_numbers_of_ranks_divide_the_rest_anew(ranks: int, skipped: int) -> None:
    """``skipped``: samples that the ranks of the run before have used."""

    def script(saved: Any = None) -> bps.RunState:
        model = torch.nn.Linear(1, 1)
        sampler = bps.elastic.ElasticSampler(range(20), seed=3)
        sampler.num_replicas = ranks if saved is None else 1
        loader = data.DataLoader(range(20), 2, sampler=sampler)
        state = bps.RunState(model, torch.optim.SGD(model.parameters()), loader=loader)
        if saved is not None:
            state.load_state_dict(saved)
        return state

    before = script()
    batches = iter(before)
    next(batches), next(batches)
    saved = before.state_dict()
    saved["ranks"][0]["loader"]["used"] = skipped
    saved["ranks"][0]["size"] = ranks if ranks > 1 else 3
    saved["ranks"][0]["random"] = None  # as for a rank that was not there before
    order = list(bps.elastic.ElasticSampler(range(20), seed=3))
    after = script(saved)
    own = torch.get_rng_state()
    found = [batch.tolist() for batch in after]
    assert torch.equal(torch.get_rng_state(), own)
    assert list(itertools.chain(*found)) == order[skipped:]
    assert [len(batch.tolist()) for batch in after] == [2] * 10
    assert after.epoch == 1


class OwnSampler(data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([random.randrange(SAMPLES)])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: [torch.ones(1)], r"a loader without state: list has no state_dict\(\) and load_state_dict\(\)"),
        (lambda: (batch for batch in ()), r"a loader without state: generator .* StatefulDataLoader"),
        (lambda: data.DataLoader(Counting(), 2), "its dataset Counting is an IterableDataset"),
        (lambda: data.DataLoader(Samples(), 2, sampler=OwnSampler()), "its sampler OwnSampler may choose another"),
        (
            lambda: data.DataLoader(Samples(), batch_sampler=[[1, 2], [3]]),
            "its batch_sampler list may choose another order",
        ),
        (
            lambda: data.DataLoader(Samples(), 2, num_workers=1, persistent_workers=True),
            "persistent_workers=True lets random states of workers go on",
        ),
        (lambda: data.DataLoader(Samples(), 2, num_workers=1, in_order=False), "in_order=False gives batches in"),
    ],
)
def test_a_loader_whose_position_can_not_be_put_back_is_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Run(make())


def test_what_can_not_be_kept_is_refused() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(UsageError, match=r"extra\['lock'\] can't be pickled"):
        bps.RunState(model, optimizer, extra={"lock": threading.Lock()})
    with pytest.raises(UsageError, match=r"scheduler is a float, which has no state_dict\(\)"):
        bps.RunState(model, optimizer, scheduler=0.1)
    with pytest.raises(UsageError, match=r"path= is a folder of `bps checkpoint`, which needs .* shadow=True"):
        bps.RunState(model, optimizer, path="/tmp")
    with pytest.raises(UsageError, match=r"optimizer is a dict: give a torch\.optim\.Optimizer"):
        bps.RunState(model, optimizer.state_dict())
    with pytest.raises(UsageError, match="this is no state_dict of a RunState"):
        bps.RunState(model, optimizer).load_state_dict(model.state_dict())


def test_a_run_that_has_changed_is_refused_before_anything_changes() -> None:
    run = Run(LOADERS["shuffled"]())
    next(bodies := run.bodies())
    saved = run.state.state_dict()
    bodies.close()
    model = torch.nn.Linear(1, 1)
    before = model.weight.item()
    optimizer = torch.optim.SGD(model.parameters())
    for changes, text in (
        ({"loader": LOADERS["elastic"]()}, "had another loader: counted, and now it is elastic"),
        ({"loader": LOADERS["shuffled"]()}, "had another number of schedulers: 2, and now it is 0"),
    ):
        with pytest.raises(UsageError, match=text):
            bps.RunState(model, optimizer, **changes).load_state_dict(saved)
    with pytest.raises(UsageError, match=r"attached is of another program: .* optimizer\.shadow_extra, as it did"):
        bps.RunState(model, optimizer).load_state_dict({**saved, "ranks": [{"random": 1}]})
    with pytest.raises(UsageError, match="it has 1 optimizers, and this run 2"):
        bps.RunState(model, [optimizer, optimizer]).load_state_dict(saved)
    assert model.weight.item() == before


@pytest.mark.parametrize(
    ("other", "size", "text"),
    [
        (lambda: data.DataLoader(Samples(), 2, shuffle=True), 1, "the loader is another one .*'batch_size': 3"),
        (lambda: data.DataLoader(range(9), 3, shuffle=True), 1, "the loader is another one .*'samples': 10"),
        (LOADERS["with a generator"], 1, "had a generator in the run before, or has one now"),
        (LOADERS["shuffled"], 2, "RandomSampler can't divide the rest of an epoch anew: restart it with as many"),
        (LOADERS["stateful"], 2, "StatefulDataLoader keeps each rank's own position, and the run had another number"),
    ],
)
def test_a_loader_that_does_not_have_the_rest_of_the_epoch_is_refused(
    other: Callable[[], Any], size: int, text: str
) -> None:
    run = Run(LOADERS["stateful" if other is LOADERS["stateful"] else "shuffled"]())
    next(bodies := run.bodies())
    saved = run.state.state_dict()
    bodies.close()
    saved["ranks"][0]["size"] = size
    again = Run(other())
    again.state.load_state_dict(saved)
    with pytest.raises(UsageError, match=text):
        next(again.bodies())


def test_samples_that_somebody_else_counts_are_refused() -> None:
    sampler = bps.elastic.ElasticSampler(range(10))
    model = torch.nn.Linear(1, 1)
    loader = data.DataLoader(range(10), 2, sampler=sampler)
    state = bps.RunState(model, torch.optim.SGD(model.parameters()), loader=loader)
    batches = iter(state)
    next(batches)
    sampler.record_batch(0, 2)
    with pytest.raises(UsageError, match="RunState counts the samples of its ElasticSampler"):
        next(batches)


def test_numpy_s_other_generators_are_kept() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        states = random_states()
        drawn = np.random.rand()
        set_random_states(states)
        assert np.random.rand() == drawn
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_random_states_of_cuda_are_kept() -> None:
    device = torch.device("cuda")
    torch.rand(1, device=device)
    states = random_states()
    drawn = torch.rand(5, device=device)
    set_random_states(states)
    assert torch.equal(torch.rand(5, device=device), drawn)


def test_random_states_of_devices_that_are_not_there_are_told(caplog: pytest.LogCaptureFixture) -> None:
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    set_random_states({**random_states(), "cuda": [torch.zeros(16, dtype=torch.uint8)] * (there + 3)})
    assert f"of {there + 3} CUDA devices are to be put back, and this process has {there}" in caplog.text


@pytest.mark.parametrize("place", ["body", "end"])
@pytest.mark.parametrize("kind", ["shuffled", "elastic", "stateful"])
def test_a_living_process_goes_back(kind: str, place: str) -> None:
    """Weights are not the RunState's: whoever tells it to go back puts them back before."""

    def facts(run: Run) -> list[Any]:
        return [(*each[:-5], *each[-4:]) for each in run.seen]

    run = Run(LOADERS[kind]())
    attached = None
    for number in run.bodies():
        if number == 5:
            attached = saved_and_loaded(run.state.state_dict())["ranks"][0]
            first = len(run.seen)
        if number == (7 if place == "body" else -2) and attached is not None:
            before = facts(run)
            run.state._put_back(attached)
            attached = None
            run.seen = run.seen[:first]
    expected = Run(LOADERS[kind]())
    for _ in expected.bodies():
        pass
    assert before == facts(expected)[: len(before)]
    assert facts(run) == facts(expected)


# ---- shadow=True -----------------------------------------------------------------------------------------------------


class NothingHeld:
    """A reader of servers that hold nothing."""

    def describe(self, hold_s: float = 0.0) -> list[Any]:
        return []

    def close(self) -> None:
        pass


def shadowed(model: torch.nn.Module) -> Any:
    """Copies of its steps go nowhere."""
    contexts.current().session.has_shadow_servers = True
    kept = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = bps.DistributedOptimizer(kept, model.named_parameters(), shadow=True)
    shadow = optimizer._stepper.shadow
    shadow.open_reader = lambda context: NothingHeld()
    shadow.start = lambda context: None
    shadow.run = 1
    return optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()


def test_steps_that_a_restarted_job_could_not_go_on_behind_are_refused() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = shadowed(model)
    state = bps.RunState(model, optimizer, loader=data.DataLoader(range(6), 1))
    with pytest.raises(UsageError, match=r"RunState: step\(\) was called outside of the loop"):
        step(model, optimizer)
    bodies = iter(state)
    for _ in range(3):
        next(bodies)
        step(model, optimizer)
    with pytest.raises(UsageError, match=r"RunState: step\(\) was called twice in the body of the loop"):
        step(model, optimizer)
    assert optimizer._stepper.shadow.step == 3
    with pytest.raises(UsageError, match="a RunState attaches to this optimizer's steps"):
        optimizer.shadow_extra = 1


def test_a_later_run_state_takes_over() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = shadowed(model)
    first = bps.RunState(model, optimizer)
    numbers = first.iterations(3)
    next(numbers)
    step(model, optimizer)
    optimizer._stepper.shadow.loop = None
    with pytest.raises(UsageError, match="another RunState of this optimizer was made later"):
        next(numbers)


def test_what_can_not_be_attached_is_refused_at_once() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = shadowed(model)
    with pytest.raises(UsageError, match=r"what RunState attaches has 268\.5 MB, and 256 MiB are the most"):
        bps.RunState(model, optimizer, extra={"data": bytes(MAX_ATTACHED_BYTES)})
    other = torch.optim.SGD(model.parameters())
    with pytest.raises(UsageError, match="RunState: with shadow=True there is one optimizer"):
        bps.RunState(model, [optimizer, other])
