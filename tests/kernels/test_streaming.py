"""Copies to memory that another process reads: which way they go, and that all of it arrives."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

import pytest
import torch

from byteps_py.kernels.jit import streaming
from byteps_py.kernels.jit.streaming import LEAST_BYTES, Choice

MB = 1 << 20
#: Seconds for a byte: through the caches, past them; of a piece that goes the other way.
SHARED = {"usual": 1 / 30e9, "past": 1 / 25e9, "piece usual": 1 / 15e9, "piece past": 1 / 8e9}
APART = {"usual": 1 / 2.5e9, "past": 1 / 22e9, "piece usual": 1 / 2.3e9, "piece past": 1 / 7e9}


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    """The instructions are there, and nothing is known of how long copies take."""
    streaming.prepare()
    assert streaming.is_ready()
    streaming._choices.clear()
    yield
    streaming._choices.clear()


def go_on(choice: Choice, costs: dict[str, float], copies: int, noise: random.Random | None = None) -> list[bool]:
    """So many copies of a megabyte; which way each went."""
    ways = []
    for _ in range(copies):
        spike = 20.0 if noise is not None and noise.random() < 0.1 else 1.0  # another process had the core
        if choice.is_try_due():
            way = not choice.streams
            choice.took(way, LEAST_BYTES, LEAST_BYTES * costs["piece past" if way else "piece usual"] * spike)
        ways.append(choice.streams)
        choice.took(choice.streams, MB, MB * costs["past" if choice.streams else "usual"] * spike)
    return ways


@pytest.mark.parametrize("seed", [None, *range(20)])
def test_the_way_is_the_one_that_pays_where_processes_run(seed: int | None) -> None:
    noise = None if seed is None else random.Random(seed)
    choice, most = Choice(), 0 if noise is None else 25
    for _ in range(3):
        assert sum(go_on(choice, SHARED, 560, noise)[60:]) <= most
        assert sum(go_on(choice, APART, 560, noise)[60:]) >= 500 - most


def test_it_is_known_after_a_few_copies() -> None:
    assert go_on(Choice(), APART, 6)[-1]


def test_what_is_tried_costs_little() -> None:
    choice = Choice()
    go_on(choice, APART, 100)
    assert sum(choice.is_try_due() for _ in range(320)) == 10


def test_another_thread_may_change_over_meanwhile() -> None:
    choice = Choice()
    go_on(choice, SHARED, 20)

    class Shared(dict[bool, deque[float]]):
        def __getitem__(self, way: bool) -> deque[float]:
            costs = super().__getitem__(way)
            if way:
                costs = deque(costs)
                for found in self.values():  # as the other thread does
                    found.clear()
            return costs

    choice._costs = Shared(choice._costs)
    choice.took(False, MB, MB * SHARED["usual"])
    assert not choice.streams


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("streams", [False, True])
def test_all_of_it_arrives_and_nothing_else(streams: bool, seed: int) -> None:
    choice = random.Random(seed)
    nbytes = choice.choice([1, 63, 64, 4096, LEAST_BYTES - 1, LEAST_BYTES, LEAST_BYTES + 255, MB, MB + 17])
    nbytes += choice.randrange(64)
    to, start = choice.randrange(130), choice.randrange(130)
    source = torch.randint(0, 255, (nbytes + 300,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    for _ in range(12):  # with tries, and without
        target = torch.full((nbytes + 300,), 255, dtype=torch.uint8)
        streaming._choices[nbytes.bit_length()].streams = streams
        streaming.copy(target.data_ptr() + to, source.data_ptr() + start, nbytes)
        assert torch.equal(target[to : to + nbytes], source[start : start + nbytes])
        assert bool((target[:to] == 255).all())
        assert bool((target[to + nbytes :] == 255).all())


def test_what_is_small_goes_the_usual_way() -> None:
    data = torch.zeros(2 * LEAST_BYTES, dtype=torch.uint8)
    streaming.copy(data.data_ptr(), data.data_ptr() + LEAST_BYTES, LEAST_BYTES - 1)
    assert not streaming._choices


def test_where_nothing_can_be_compiled_copies_go_the_usual_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_() -> streaming.Stream:
        raise RuntimeError("no such processor")

    for name, value in {"_build": compile_, "_thread": None, "ready": None, "_fallback": "as usual"}.items():
        monkeypatch.setattr(streaming._code, name, value)
    source, target = torch.arange(MB), torch.zeros(MB, dtype=torch.int64)
    with caplog.at_level("INFO", "byteps_py"):
        streaming.copy(target.data_ptr(), source.data_ptr(), target.nbytes)
        assert not streaming.is_ready()
    assert "streaming: as usual" in caplog.text
    assert "no such processor" in caplog.text
    streaming.copy(target.data_ptr(), source.data_ptr(), target.nbytes)
    assert torch.equal(target, source)
