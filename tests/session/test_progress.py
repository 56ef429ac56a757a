"""What a rank counts of its training: steps of several optimizers, rates, and waits."""

from __future__ import annotations

import threading
import time

import pytest

from byteps_py.session.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_steps_and_their_times(clock: Clock) -> None:
    progress = Progress(clock, lambda: clock.now_s + 1e9)
    progress.stepped(1)
    assert (progress.steps, progress.step_s, progress.last_step_at_s) == (1, 0.0, 1e9 + 100)
    clock.now_s += 0.5
    progress.stepped(1)
    assert (progress.steps, progress.step_s, progress.last_step_at_s) == (2, 0.5, 1e9 + 100.5)


@pytest.mark.parametrize(
    ("made", "steps"),
    [
        ("gdgdgd", 3),  # a generator and a discriminator
        ("gddgdd", 4),  # the discriminator steps most often
        ("abcdabcd", 2),  # one optimizer for each parameter
        ("ggg", 3),
    ],
)
def test_several_optimizers_make_a_step_together(made: str, steps: int, clock: Clock) -> None:
    progress = Progress(clock)
    for optimizer in made:
        clock.now_s += 1
        progress.stepped(ord(optimizer))
    assert progress.steps == steps


def test_a_run_that_goes_on_from_a_step_has_no_time_for_the_first_one(clock: Clock) -> None:
    progress = Progress(clock)
    progress.steps = 1000
    progress.stepped(1)
    assert (progress.steps, progress.step_s) == (1001, 0.0)


def test_rates_are_of_the_last_ten_seconds(clock: Clock) -> None:
    progress = Progress(clock)
    for _ in range(30):  # 100 tokens a second
        clock.now_s += 1
        progress.tokens += 100
        progress.stepped(1)
        progress.rates()
    assert progress.rates()["tokens_per_second"] == pytest.approx(100)
    for _ in range(12):
        clock.now_s += 1
        progress.tokens += 7
        progress.rates()
    found = progress.rates()
    assert (found["tokens_per_second"], found["steps_per_second"]) == (pytest.approx(7), 0)


def test_rates_may_be_asked_for_as_often_as_one_likes(clock: Clock) -> None:
    progress = Progress(clock)
    for _ in range(2000):
        clock.now_s += 0.01
        progress.tokens += 1
        progress.rates()
    assert progress.rates()["tokens_per_second"] == pytest.approx(100, rel=0.02)


def test_waits_of_the_scripts_threads_count_and_those_of_the_packages_do_not() -> None:
    progress = Progress()
    since_s = time.monotonic() - 2
    threads = [threading.Thread(target=progress.waited, args=(since_s,), name=name) for name in ("byteps-pool", "own")]
    for thread in threads:
        thread.start()
        thread.join()
    assert 2 <= progress.exposed_s < 4


def test_futures_count_from_the_last_one_that_was_asked_for_until_all_are_complete() -> None:
    progress = Progress()
    progress.future_begun()
    progress.future_begun()
    progress.future_ended()
    assert progress.exposed_s == 0
    progress.future_ended()
    assert progress.exposed_s > 0


def test_the_first_group_is_no_recovery() -> None:
    progress = Progress()
    assert progress.recoveries == 0
    progress.groups = 3
    assert progress.recoveries == 2
