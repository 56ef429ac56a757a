"""Sums that go to two places in one pass: the bits of the service's kernels, wherever rows and results lie."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from byteps_py.kernels import reduce
from byteps_py.kernels.jit import streaming
from byteps_py.tensors import Op
from byteps_py.torch.collectives.all_reduce import shares
from byteps_py.torch.collectives.dtypes import WIRE

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LARGE = 70_000  # elements: more bytes than what goes past the caches begins with
ODD = [0.0, -0.0, 1e-45, 65504.0, float("inf"), float("-inf"), float("nan")]


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> Iterator[None]:
    shares.kernels.cache_clear()
    streaming.prepare()
    assert streaming.is_ready()
    yield
    shares.kernels.cache_clear()
    streaming._choices.clear()


def values(dtype: torch.dtype, count: int, generator: torch.Generator) -> torch.Tensor:
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, (count,), dtype=dtype, generator=generator)
    found = torch.randn(count, dtype=torch.float64, generator=generator) * 2.0 ** (torch.arange(count) % 40 - 20)
    found[torch.randint(0, count, (count // 8,), generator=generator)] = float(
        ODD[int(torch.randint(0, len(ODD), (1,), generator=generator))]
    )
    return found.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit, but for what a NaN carries."""
    if a.is_floating_point():
        nan = a.isnan()
        if not torch.equal(nan, b.isnan()):
            return False
        a, b = a.masked_fill(nan, 0), b.masked_fill(nan, 0)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", WIRE, ids=str)
def test_both_places_have_the_bits_of_the_service(dtype: torch.dtype, seed: int, is_compiled: bool) -> None:
    choice, generator = random.Random(f"{seed} {dtype}"), torch.Generator().manual_seed(seed)
    n = choice.choice([2, 2, 3, 4, 7])
    average = dtype.is_floating_point and choice.random() < 0.5
    for past_caches in (False, True):
        count = choice.choice([1, 63, 64, 1000, LARGE, LARGE + 13])
        if is_compiled:
            compiled = shares.kernels(WIRE[dtype], n, average)
            compiled.prepare()
            assert compiled.is_ready()
        nbytes = count * dtype.itemsize
        streaming._choices[nbytes.bit_length()].streams = past_caches
        shifts = [choice.randrange(70) for _ in range(n + 2)]
        buffers = [values(dtype, count + 200, generator) for _ in range(n + 2)]
        places = [buffer[shift : shift + count] for buffer, shift in zip(buffers, shifts, strict=True)]
        *rows, total, copy = places
        if choice.random() < 0.5:  # past the caches goes what lies at a multiple of 64
            copy = buffers[-1][(-buffers[-1].data_ptr() % 64) // dtype.itemsize :][:count]
        own = choice.randrange(n)
        where = choice.choice(["in place", "apart", "nowhere"])
        expected = torch.empty(count, dtype=dtype)
        addresses = [row.data_ptr() for row in rows]
        reduce(Op.SUM, WIRE[dtype], addresses, [expected.data_ptr()], count, n if average else 1)
        before = [buffer.clone() for buffer in buffers]
        target = {"in place": addresses[own], "apart": total.data_ptr(), "nowhere": None}[where]
        shares.add_to_both(dtype, count, addresses, target, copy.data_ptr(), average)
        found = {"in place": rows[own], "apart": total, "nowhere": copy}[where]
        assert same(found, expected)
        assert same(copy, expected)
        for changed in (found, copy):  # and nothing else is written
            for buffer, old in zip(buffers, before, strict=True):
                first = (changed.data_ptr() - buffer.data_ptr()) // dtype.itemsize
                if 0 <= first < buffer.numel():
                    old[first : first + count] = changed
        assert all(same(buffer, old) for buffer, old in zip(buffers, before, strict=True))


def test_it_is_compiled_with_the_first_large_one() -> None:
    a, b, copy = torch.ones(LARGE), torch.ones(LARGE), torch.empty(LARGE)
    compiled = shares.kernels(WIRE[a.dtype], 2, False)
    for _ in range(2):
        shares.add_to_both(a.dtype, LARGE, [a.data_ptr(), b.data_ptr()], a.data_ptr(), copy.data_ptr(), False)
        assert compiled.is_ready()
    assert bool((a == 3).all())
    assert bool((copy == 3).all())


def test_small_ones_do_not_start_a_compiler() -> None:
    a, copy = torch.ones(10), torch.empty(10)
    shares.add_to_both(a.dtype, 10, [a.data_ptr(), a.data_ptr()], None, copy.data_ptr(), True)
    assert bool((copy == 1).all())
    assert not shares.kernels(WIRE[a.dtype], 2, True).is_ready(0)
