"""reduce() against the same arithmetic in numpy and torch, bit for bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.arithmetic import NUMPY, Memory, assert_same, bits, moderate_values, random_values, reference, run

from byteps_py.errors import UsageError
from byteps_py.kernels import bind, reduce
from byteps_py.kernels.jit import reduction_loops, streaming
from byteps_py.tensors import DType, Op

INTEGERS = [dtype for dtype in DType if not dtype.is_floating]
FOLDS = [Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX]
COUNTS = (0, 1, 3, 17, 64, 4097)


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
def test_reduce_equals_the_reference(dtype):
    rng = np.random.default_rng(int(dtype))
    for op, count, ranks, make in itertools.product(FOLDS, COUNTS, (1, 2, 3, 8, 11), (random_values, moderate_values)):
        arrays = [make(rng, dtype, count) for _ in range(ranks)]
        assert_same(dtype, run(op, dtype, arrays, shift=count % 3), reference(op, dtype, arrays))


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
def test_what_comes_from_memory_is_added_like_what_is_in_caches(dtype):
    """Bytes around the size from which on the loop is another one."""
    rng = np.random.default_rng(3)
    for nbytes, ranks in itertools.product((-64, -8, 0, 8, 64 + 24, 1000), (2, 3)):
        arrays = [
            random_values(rng, dtype, (reduction_loops._FROM_MEMORY + nbytes) // dtype.itemsize) for _ in range(ranks)
        ]
        assert_same(dtype, run(Op.SUM, dtype, arrays), reference(Op.SUM, dtype, arrays))


def test_what_is_bound_reads_and_writes_the_same_places_each_time():
    inputs, result = np.array([[1, 2], [3, 4]], np.float32), np.zeros(2, np.float32)
    call = bind(Op.SUM, DType.FLOAT32, [row.ctypes.data for row in inputs], [result.ctypes.data], 2)
    copy = bind(Op.SUM, DType.FLOAT32, [result.ctypes.data], [inputs[0].ctypes.data], 2)
    call()
    assert result.tolist() == [4, 6]
    copy()
    call()
    assert result.tolist() == [7, 10]


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
def test_divisor(dtype):
    rng = np.random.default_rng(7)
    for ranks, divisor, make in itertools.product((1, 2, 5), (2, 3, 7, 1000), (random_values, moderate_values)):
        arrays = [make(rng, dtype, 211) for _ in range(ranks)]
        assert_same(dtype, run(Op.SUM, dtype, arrays, divisor), reference(Op.SUM, dtype, arrays, divisor))


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_integers_divide_like_python(data):
    dtype = data.draw(st.sampled_from(INTEGERS))
    limits = np.iinfo(NUMPY[dtype])
    number = st.integers(int(limits.min), int(limits.max))
    values = data.draw(st.lists(number, min_size=1, max_size=70))
    divisor = data.draw(st.one_of(st.integers(2, 9), st.integers(2, 2**31)))
    got = run(Op.SUM, dtype, [np.array(values, NUMPY[dtype])], divisor)
    assert got.tolist() == [value // divisor for value in values]


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_any_reduction(data):
    dtype = data.draw(st.sampled_from(list(DType)))
    op = data.draw(st.sampled_from(FOLDS))
    ranks = data.draw(st.integers(1, 5))
    count = data.draw(st.integers(0, 200))
    divisor = data.draw(st.integers(1, 9))
    nbytes = count * dtype.itemsize
    raw = [data.draw(st.binary(min_size=nbytes, max_size=nbytes)) for _ in range(ranks)]
    arrays = [np.frombuffer(bytearray(part), NUMPY[dtype]) for part in raw]
    got = run(op, dtype, arrays, divisor, outputs=data.draw(st.integers(1, 4)), shift=data.draw(st.integers(0, 15)))
    assert_same(dtype, got, reference(op, dtype, arrays, divisor))


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=lambda dtype: dtype.name)
def test_rounding_of_every_16_bit_number(dtype):
    everything = np.arange(1 << 16, dtype=np.uint16).view(NUMPY[dtype])
    for step in range(1, 1 << 16, 5003):
        arrays = [everything, np.roll(everything, step)]
        assert_same(dtype, run(Op.SUM, dtype, arrays), reference(Op.SUM, dtype, arrays))
        assert_same(dtype, run(Op.PRODUCT, dtype, arrays), reference(Op.PRODUCT, dtype, arrays))


def test_a_sum_of_halves_is_rounded_once():
    # 2048 + 1 + 1: rounding to float16 after each step would lose both ones.
    arrays = [np.array([value], np.float16) for value in (2048, 1, 1)]
    assert run(Op.SUM, DType.FLOAT16, arrays).tolist() == [2050]


def test_inputs_are_added_first_to_last():
    arrays = [np.array([value], np.float32) for value in (1e30, 1, -1e30)]
    assert run(Op.SUM, DType.FLOAT32, arrays).tolist() == [0]
    assert run(Op.SUM, DType.FLOAT32, [arrays[0], arrays[2], arrays[1]]).tolist() == [1]


def test_the_rounded_sum_is_what_is_divided():
    # 65504 + 65504 is infinite in float16, though half of it is not.
    arrays = [np.array([65504], np.float16)] * 2
    assert run(Op.SUM, DType.FLOAT16, arrays, divisor=2).tolist() == [np.inf]


def test_the_ends_of_int64_divide_exactly():
    near = [base + step for base in (-(2**63), -(2**62), -(2**53), 0, 2**53, 2**62, 2**63) for step in range(-70, 71)]
    for divisor in (2, 3, 7, 64, 1000, 2**31 - 1, 2**40 - 1):
        dividends = [n for each in near for n in (each, each - each % divisor) if -(2**63) <= n < 2**63]
        got = run(Op.SUM, DType.INT64, [np.array(dividends, np.int64)], divisor)
        assert got.tolist() == [value // divisor for value in dividends]


def test_integers_wrap_around():
    assert run(Op.SUM, DType.INT8, [np.array([127], np.int8), np.array([1], np.int8)]).tolist() == [-128]
    assert run(Op.SUM, DType.UINT8, [np.array([255], np.uint8)] * 2).tolist() == [254]
    assert run(Op.PRODUCT, DType.INT64, [np.array([2**62], np.int64), np.array([4], np.int64)]).tolist() == [0]


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
def test_an_output_may_be_an_input(dtype):
    rng = np.random.default_rng(3)
    arrays = [moderate_values(rng, dtype, 1003) for _ in range(4)]
    expected = reference(Op.SUM, dtype, arrays, 3)
    for target in range(4):
        memories = [Memory(dtype, array, 8) for array in arrays]
        extra = Memory(dtype, arrays[0], 0)
        addresses = [memory.address for memory in memories]
        reduce(Op.SUM, dtype, addresses, [extra.address, addresses[target]], 1003, 3)
        assert_same(dtype, memories[target].values.copy(), expected)
        assert_same(dtype, extra.values.copy(), expected)


def test_all_outputs_may_be_inputs():
    rng = np.random.default_rng(4)
    memories = [Memory(DType.FLOAT32, moderate_values(rng, DType.FLOAT32, 777), 0) for _ in range(5)]
    expected = reference(Op.SUM, DType.FLOAT32, [memory.values.copy() for memory in memories])
    addresses = [memory.address for memory in memories]
    reduce(Op.SUM, DType.FLOAT32, addresses, addresses, 777)
    for memory in memories:
        assert_same(DType.FLOAT32, memory.values.copy(), expected)


@pytest.mark.parametrize("op", [Op.MIN, Op.MAX], ids=lambda op: op.name)
def test_min_and_max_propagate_nan_like_torch(op):
    values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -2.0, 1e-40], np.float32)
    a, b = (grid.ravel().copy() for grid in np.meshgrid(values, values))
    torch_op = torch.minimum if op is Op.MIN else torch.maximum
    expected = torch_op(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    np.testing.assert_array_equal(run(op, DType.FLOAT32, [a, b]), expected)  # takes 0.0 and -0.0 for equal
    zeros = np.array([0.0, -0.0], np.float32)
    assert np.signbit(run(op, DType.FLOAT32, [zeros, zeros[::-1].copy()])).tolist() == [op is Op.MIN] * 2


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
def test_broadcast_copies_bits(dtype):
    values = random_values(np.random.default_rng(5), dtype, 1001)
    got = run(Op.BROADCAST, dtype, [values], outputs=3, shift=1)
    np.testing.assert_array_equal(bits(got), bits(values))
    memory = Memory(dtype, values, 0)
    reduce(Op.BROADCAST, dtype, [memory.address], [memory.address], 1001)
    np.testing.assert_array_equal(bits(memory.values.copy()), bits(values))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(("nbytes", "shift"), [(1, 0), (63, 5), (64 << 10, 0), ((64 << 10) + 777, 0), (1 << 20, 13)])
def test_a_copy_past_the_caches_copies_the_same_bytes(monkeypatch, is_compiled, nbytes, shift):
    streaming.prepare()
    assert streaming.is_ready()
    if not is_compiled:  # yet
        monkeypatch.setattr(streaming._code, "ready", None)
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    targets = [np.full(nbytes + 200, 7, np.uint8) for _ in range(2)]
    addresses = tuple(target.ctypes.data + 100 + shift for target in targets)
    bind(Op.BROADCAST, DType.UINT8, (source.ctypes.data,), addresses, nbytes, past_caches=True)()
    for target in targets:
        begin, end = 100 + shift, 100 + shift + nbytes
        assert (target[begin:end] == source).all()
        assert (target[:begin] == 7).all()
        assert (target[end:] == 7).all()


def test_contradicting_arguments_are_refused():
    with pytest.raises(UsageError, match="at least one"):
        reduce(Op.SUM, DType.FLOAT32, [], [64], 1)
    with pytest.raises(UsageError, match="can't broadcast 2 contributions"):
        reduce(Op.BROADCAST, DType.FLOAT32, [64, 128], [64], 1)
    with pytest.raises(UsageError, match="divisor 2"):
        reduce(Op.BROADCAST, DType.FLOAT32, [64], [128], 1, 2)
