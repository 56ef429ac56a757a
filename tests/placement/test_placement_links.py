"""The shares behind unequal links: exact, and no worse than any others."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from byteps_py.errors import UsageError
from byteps_py.placement.link_optimum import LinkOptimum, classes
from byteps_py.placement.shares import Optimum

RATES = st.integers(1, 40)


@pytest.mark.parametrize(("n", "k"), list(itertools.product(range(1, 9), range(10))))
def test_equal_links_give_the_formula(n: int, k: int) -> None:
    best = LinkOptimum([400] * k, [400] * n)
    assert best.shares == Optimum(n, k).shares
    assert best.weights == Optimum(n, k).weights
    assert best.time * 400 == Optimum(n, k).time


@pytest.mark.parametrize(("n", "k"), list(itertools.product(range(2, 9), range(10))))
def test_almost_equal_links_give_almost_the_formula(n: int, k: int) -> None:
    best = LinkOptimum([400] * k, [400] * (n - 1) + [Fraction(399_999_999, 1_000_000)])
    assert float(best.time * 400) == pytest.approx(float(Optimum(n, k).time), rel=1e-6)


@given(st.lists(RATES, max_size=4), st.lists(RATES, min_size=2, max_size=5), st.data())
def test_no_other_shares_are_faster(cpu: list[int], gpu: list[int], data: st.DataObject) -> None:
    best = LinkOptimum(cpu, gpu)
    assert sum(best.shares) == 1
    assert min(best.shares) >= 0
    size = len(cpu) + len(gpu)
    others = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any))
    assert best.time <= best.time_of([Fraction(other, sum(others)) for other in others])
    # Nor are shares near the best ones.
    source, target = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    moved = list(best.shares)
    step = moved[source] / 8
    moved[source] -= step
    moved[target] += step
    assert best.time <= best.time_of(moved)


@given(st.lists(RATES, min_size=1, max_size=5), st.lists(RATES, min_size=3, max_size=5))
def test_the_time_is_the_linear_programs(cpu: list[int], gpu: list[int]) -> None:
    """Where every machine holds something, all are busy for the whole time: summed up, that gives the time."""
    n, best = len(gpu), LinkOptimum(cpu, gpu)
    assert best.time >= Fraction(1, min(gpu))
    if all(share > 0 for share in best.shares):
        level = (1 + Fraction(n, n - 2)) / (Fraction(sum(cpu), n) + Fraction(sum(gpu), n - 2))
        assert best.time == max(level, Fraction(1, min(gpu)))


def test_a_slow_worker_holds_nothing_and_a_slow_server_little() -> None:
    best = LinkOptimum([400, 100], [400, 400, 400, 200])
    assert best.time * 400 == 2  # the slow worker's link takes that long for the model alone
    assert best.shares[-1] == 0
    assert best.shares[0] == 4 * best.shares[1]
    assert best.time_of(Optimum(4, 2).shares) * 400 == Fraction(24, 5)


def test_servers_only() -> None:
    best = LinkOptimum([300, 100], [200, 100, 100], gpu_machines_sum=False)
    assert best.shares == (Fraction(3, 4), Fraction(1, 4), 0, 0, 0)
    assert LinkOptimum([1, 1, 1], [1, 1], gpu_machines_sum=False).weights == (2, 2, 0, 0, 0)


def test_two_gpu_machines_carry_the_model_whatever_they_hold() -> None:
    assert LinkOptimum([300], [400, 400]).shares == (Fraction(3, 8), Fraction(5, 16), Fraction(5, 16))
    assert LinkOptimum([900, 900], [400, 400]).shares == (Fraction(1, 2), Fraction(1, 2), 0, 0)


@pytest.mark.parametrize(
    ("cpu", "gpu", "text"), [([], [], "at least one"), ([0], [1], "above 0"), ([1], [float("nan")], "above 0")]
)
def test_impossible_links(cpu: list[float], gpu: list[float], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        LinkOptimum(cpu, gpu)
    with pytest.raises(UsageError, match="have to sum"):
        LinkOptimum([], [1, 1], gpu_machines_sum=False)


@given(st.lists(st.floats(1, 1e6), max_size=12))
def test_classes(rates: list[float]) -> None:
    evened = classes(rates)
    assert all(rate <= other <= rate / 0.85 * 1.0000001 for rate, other in zip(rates, evened, strict=True))
    levels = sorted(set(evened))
    assert all(low < 0.85 * high for low, high in itertools.pairwise(levels))
    assert classes([100.0, 98.0, 51.0, 50.0, 99.0]) == [100.0, 100.0, 51.0, 51.0, 100.0]
