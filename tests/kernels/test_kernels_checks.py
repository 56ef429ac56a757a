"""reduce_checked(): the same bits as reduce(), and a true report about them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.arithmetic import NUMPY, Memory, assert_same, bits, moderate_values, random_values, reference

from byteps_py.errors import UsageError
from byteps_py.kernels import Report, reduce_checked
from byteps_py.kernels.jit.reduction_loops import _FROM_MEMORY, chunk_width
from byteps_py.kernels.jit.result_checks import MULTIPLIER, SHIFT
from byteps_py.tensors import Checks, DType, Op

BOTH = Checks.FINITE | Checks.CHECKSUM
FLOATS = [dtype for dtype in DType if dtype.is_floating]
NAN = {DType.FLOAT32: 0x7FC00001, DType.FLOAT64: 0xFFF8 << 48, DType.FLOAT16: 0x7E01, DType.BFLOAT16: 0xFFC1}
INFINITY = {DType.FLOAT32: 0xFF800000, DType.FLOAT64: 0x7FF0 << 48, DType.FLOAT16: 0x7C00, DType.BFLOAT16: 0xFF80}
LARGEST = {DType.FLOAT32: 0x7F7FFFFF, DType.FLOAT64: (0x7FF << 52) - 1, DType.FLOAT16: 0x7BFF, DType.BFLOAT16: 0x7F7F}


def run(dtype, arrays, *, op=Op.SUM, checks=BOTH, divisor=1, in_place=True, shift=0):
    """(result, report); the result lies over the last input, or apart."""
    memories = [Memory(dtype, array, shift + i % 8 * dtype.itemsize) for i, array in enumerate(arrays)]
    target = memories[-1] if in_place else Memory(dtype, np.zeros_like(arrays[0]), shift)
    addresses = [memory.address for memory in memories]
    report = reduce_checked(checks, op, dtype, addresses, [target.address], len(arrays[0]), divisor)
    assert all(memory.intact() for memory in (*memories, target))
    return target.values.copy(), report


def checksum_of(dtype, result):
    """The checksum as its docstring says it, in Python's integers."""

    def step(lane, word):
        return ((lane ^ lane >> SHIFT) + word) * MULTIPLIER % 2**64

    data = result.tobytes()
    chunk = chunk_width(dtype) * dtype.itemsize
    whole = len(data) - len(data) % chunk
    lanes = [0] * (chunk // 8)
    for i, word in enumerate(np.frombuffer(data[:whole], "<u8").tolist()):
        lanes[i % len(lanes)] = step(lanes[i % len(lanes)], word)
    rest = 0
    for start in range(whole, len(data), dtype.itemsize):
        rest = step(rest, int.from_bytes(data[start : start + dtype.itemsize], "little"))
    total = step(len(data), rest)
    for lane in lanes:
        total = step(total, lane)
    return total ^ total >> SHIFT


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
def test_results_are_the_same_with_checks_and_checksums_as_defined(dtype):
    rng = np.random.default_rng(int(dtype))
    cases = itertools.product((Op.SUM, Op.MAX), (0, 1, 63, 129, 1000), (1, 2, 3, 8), (1, 3), (True, False))
    for op, count, ranks, divisor, in_place in cases:
        if op is Op.MAX and divisor > 1:
            continue
        arrays = [random_values(rng, dtype, count) for _ in range(ranks)]
        result, report = run(dtype, arrays, op=op, divisor=divisor, in_place=in_place, shift=count % 3)
        assert_same(dtype, result, reference(op, dtype, arrays, divisor))
        assert report.checksum == checksum_of(dtype, result)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_a_poisoned_input_is_named_wherever_its_nan_is(dtype, ranks):
    count = 2 * chunk_width(dtype) + 64 // dtype.itemsize + 5  # two chunks, a line, and a tail
    clean = [moderate_values(np.random.default_rng(rank), dtype, count) for rank in range(ranks)]
    assert run(dtype, clean)[1].is_finite
    for position in range(count):
        rank = position % ranks
        poisoned = [array.copy() for array in clean]
        bits(poisoned[rank])[position] = (NAN, INFINITY)[position // ranks % 2][dtype]
        _, report = run(dtype, poisoned, checks=Checks.FINITE)
        assert report == Report((rank,), False, 0), position


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_a_poisoned_input_that_comes_from_memory_is_named(dtype):
    count = _FROM_MEMORY // dtype.itemsize + 64 // dtype.itemsize + 5
    clean = [moderate_values(np.random.default_rng(rank), dtype, count) for rank in range(3)]
    assert run(dtype, clean, checks=Checks.FINITE)[1].is_finite
    for rank, position in enumerate((0, count // 2 + 1, count - 1)):
        poisoned = [array.copy() for array in clean]
        bits(poisoned[rank])[position] = NAN[dtype]
        assert run(dtype, poisoned, checks=Checks.FINITE)[1] == Report((rank,), False, 0)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_all_poisoned_inputs_are_named(dtype):
    clean = [moderate_values(np.random.default_rng(rank), dtype, 300) for rank in range(70)]
    for rank, position in ((3, 0), (3, 299), (40, 150), (69, 150), (69, 298)):
        bits(clean[rank])[position] = NAN[dtype]
    assert run(dtype, clean)[1].poisoned == (3, 40, 69)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_an_overflow_is_nobody_s_poison(dtype):
    for count in (1, 200):
        large = np.zeros(count, NUMPY[dtype])
        bits(large)[0] = LARGEST[dtype]
        _, report = run(dtype, [large, large])
        assert (report.poisoned, report.overflowed, report.is_finite) == ((), True, False)
        poison = large.copy()
        bits(poison)[-1] = NAN[dtype]
        _, report = run(dtype, [large, large, poison])
        # Of one element, the poison explains the result; of more, the first still overflows.
        assert (report.poisoned, report.overflowed) == ((2,), count > 1)


def test_numbers_that_only_look_like_infinity_are_finite():
    for dtype in FLOATS:
        large = np.full(200, 0, NUMPY[dtype])
        bits(large)[:] = LARGEST[dtype]
        assert run(dtype, [large])[1].is_finite
    integers = np.full(200, 0x7F800000, np.int32)
    assert run(DType.INT32, [integers])[1].is_finite


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
def test_every_flipped_bit_changes_the_checksum(dtype):
    rng = np.random.default_rng(9)
    count = 3 * chunk_width(dtype) + 2
    values = random_values(rng, dtype, count)
    positions = sorted({0, count - 1, *rng.integers(0, count, 12).tolist()})

    def checksum(*flips):
        flipped = values.copy()
        for position, bit in flips:
            bits(flipped)[position] ^= bits(flipped).dtype.type(1 << bit)
        return run(dtype, [flipped], op=Op.BROADCAST, checks=Checks.CHECKSUM)[1].checksum

    single = [(position, bit) for position in positions for bit in range(dtype.itemsize * 8)]
    assert len({checksum(), *map(checksum, single)}) == len(single) + 1
    # The same bit twice in one lane, a chunk apart: sums miss that, and products where it is a word's highest.
    wrap = 3 * chunk_width(dtype)
    assert checksum() not in {checksum((p, bit), ((p + wrap // 3) % wrap, bit)) for p, bit in single if p < wrap}


def test_the_checksum_tells_lengths_and_orders_apart():
    zeros = [run(DType.FLOAT32, [np.zeros(count, np.float32)])[1].checksum for count in range(200)]
    assert len(set(zeros)) == 200
    values = np.arange(128, dtype=np.float32)
    orders = [run(DType.FLOAT32, [np.roll(values, shift)])[1].checksum for shift in range(128)]
    assert len(set(orders)) == 128


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
def test_a_checked_broadcast_copies_bits(dtype):
    values = random_values(np.random.default_rng(5), dtype, 1001)
    result, report = run(dtype, [values], op=Op.BROADCAST, in_place=False, shift=1)
    np.testing.assert_array_equal(bits(result), bits(values))
    assert report.checksum == checksum_of(dtype, values)
    assert report.poisoned == ((0,) if dtype.is_floating else ())


def test_contradicting_arguments_are_refused():
    for inputs, outputs, op, divisor in (
        ([], [64], Op.SUM, 1),
        ([64], [], Op.SUM, 1),
        ([64, 128], [64], Op.BROADCAST, 1),
        ([64], [128], Op.BROADCAST, 2),
    ):
        with pytest.raises(UsageError, match="at least one"):
            reduce_checked(BOTH, op, DType.FLOAT32, inputs, outputs, 1, divisor)
