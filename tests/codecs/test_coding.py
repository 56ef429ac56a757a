"""The kernels of codecs against the same in plain torch, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.coded_sums import CodedSums, blocks_of

from byteps_py import codecs
from byteps_py.codecs import Coding, Draw
from byteps_py.errors import UsageError
from byteps_py.tensor_codec import MAX_SEED, Codec, CodecKind
from byteps_py.tensors import key_of
from byteps_py.torch.collectives.dtypes import WIRE

INT8, E4M3, E5M2 = (Codec(kind) for kind in list(CodecKind)[:3])
TOPK, TOPK_2BIT, RANDOMK = Codec.topk(0.01), Codec.topk(0.03, bits=2), Codec.randomk(0.03, seed=7)
ONEBIT, ONEBIT_SCALED = Codec(CodecKind.ONEBIT), Codec(CodecKind.ONEBIT_SCALED)
DITHERINGS = [
    Codec(CodecKind.DITHERING_LINEAR, 127),
    Codec(CodecKind.DITHERING_LINEAR, 7, seed=2020),
    Codec(CodecKind.DITHERING_LINEAR_L2, 1, seed=MAX_SEED),
    Codec(CodecKind.DITHERING_NATURAL, 7),
    Codec(CodecKind.DITHERING_NATURAL, 1),
    Codec(CodecKind.DITHERING_NATURAL_L2, 127, seed=1),
]
THC, THC_WIDE = (Codec(kind, error_feedback=True) for kind in (CodecKind.THC, CodecKind.THC_WIDE))
FAST = [INT8, TOPK_2BIT, ONEBIT_SCALED, RANDOMK, DITHERINGS[1], THC]  # of each kernel that is told apart, one
CODECS = [
    INT8, E4M3, E5M2, TOPK, Codec.topk(1.0), Codec.topk(1 / 4096), TOPK_2BIT, Codec.topk(1.0, bits=2),
    Codec.topk(1 / 4096, bits=2), ONEBIT, ONEBIT_SCALED, RANDOMK, Codec.randomk(1.0), *DITHERINGS, THC, THC_WIDE,
]  # fmt: skip
NAME = "a tensor"


class Machines:
    """Machines and a server that call the kernels, in this process."""

    def __init__(self, codec: Codec, count: int, dtype: torch.dtype, machines: int, local: int = 1) -> None:
        self.codec, self.count, self.dtype, self.local = codec, count, dtype, local
        self.number = 0
        self.errors = [np.zeros(count, np.float32) for _ in range(machines)]
        self.moments = [np.zeros(count, np.float32) for _ in range(machines)]
        self.agreed = [np.zeros(-(-count // codec.block), np.float32) for _ in range(machines)]
        self.contributions = [np.full(codec.coded_nbytes(count), 0xFF, np.uint8) for _ in range(machines)]
        self.reports: list[codecs.Report] = []

    def coding(self, machine: int) -> Coding:
        error = self.errors[machine].ctypes.data if self.codec.error_feedback else 0
        moments = self.moments[machine].ctypes.data if self.codec.momentum else 0
        draw = Draw(key_of(NAME), self.number, 0, machine * self.local)
        agreed = self.agreed[machine].ctypes.data
        return Coding(self.codec, WIRE[self.dtype], self.count, error, moments, draw, agreed, len(self.errors))

    def round(self, ranks: list[list[torch.Tensor]], divisor: int = 1) -> list[torch.Tensor]:
        """The results of the machines."""
        self.reports, self.number = [], self.number + 1
        for machine, tensors in enumerate(ranks):
            given = self.contributions[machine].ctypes.data
            self.reports.append(codecs.encode(self.coding(machine), [t.data_ptr() for t in tensors], given))
        copies = [given.copy() for given in self.contributions]
        other = np.empty_like(copies[0])
        inputs, outputs = [copy.ctypes.data for copy in copies], [copies[0].ctypes.data, other.ctypes.data]
        self.reports.append(codecs.add(self.codec, inputs, outputs, len(other), Draw(key_of(NAME), self.number)))
        assert (copies[0] == other).all()
        results = []
        for machine, given in enumerate(self.contributions):
            outputs = [torch.full((self.count,), 7.0, dtype=self.dtype) for _ in ranks[machine]]
            places = [each.data_ptr() for each in outputs]
            codecs.decode(self.coding(machine), other.ctypes.data, places, divisor, given.ctypes.data)
            assert all(torch.equal(bits(outputs[0]), bits(each)) for each in outputs)
            results.append(outputs[0])
        return results


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """To compare NaN and zeros, too; a NaN's own bits mean nothing."""
    clean = torch.where(tensor.isnan(), torch.nan, tensor)
    return clean.contiguous().view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


def values(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(count, generator=generator) * 10 ** torch.randint(-9, 3, (count,), generator=generator)
    found[::7] = found[::7].round()  # equal magnitudes
    return found.to(dtype)


def compare(codec: Codec, count: int, dtype: torch.dtype, layout: tuple[int, int], divisor: int, poison: float) -> None:
    machines, local = layout
    real, expected = Machines(codec, count, dtype, machines, local), CodedSums(codec, local, NAME)
    for round_ in range(4):
        ranks = [values(count, dtype, 100 * round_ + rank) for rank in range(machines * local)]
        if round_ == 1 and count:
            ranks[-1][count // 2] = poison
        found = real.round([ranks[i * local : (i + 1) * local] for i in range(machines)], divisor)
        due = expected(ranks, divisor)
        assert all(torch.equal(bits(each), bits(due)) for each in found), f"round {round_}"
        assert expected.errors is not None
        assert expected.moments is not None
        states = [(real.errors, expected.errors)] if codec.error_feedback else []
        states += [(real.moments, expected.moments)] if codec.momentum else []
        for mine, theirs in (pair for each in states for pair in zip(*each, strict=True)):
            assert torch.equal(bits(torch.from_numpy(mine)), bits(theirs))


@pytest.mark.parametrize("codec", FAST, ids=str)
@pytest.mark.parametrize("feedback", [False, True], ids=["plain", "feedback"])
def test_like_plain_torch(codec: Codec, feedback: bool) -> None:
    codec = replace(codec, error_feedback=feedback or codec.is_thc, momentum=0.9 if feedback else 0.0)
    compare(codec, 9_000, torch.float32, (3, 2), 6, float("nan"))
    compare(codec, 1, torch.float32, (2, 1), 1, 1e-40)


@pytest.mark.parametrize(
    "codec",
    # Each kind and dtype compiles kernels of its own.
    [pytest.param(each, marks=pytest.mark.slow if each in (*FAST, TOPK) else pytest.mark.long) for each in CODECS],
    ids=str,
)
@pytest.mark.parametrize("feedback", [False, True], ids=["plain", "feedback"])
def test_other_codecs_and_dtypes(codec: Codec, feedback: bool) -> None:
    codec = replace(codec, error_feedback=feedback or codec.is_thc)
    compare(codec, 9_000, torch.float32, (3, 2), 6, float("inf"))
    compare(codec, 256, torch.float16, (2, 2), 4, float("inf"))
    compare(replace(codec, momentum=0.5), 5_001, torch.bfloat16, (2, 1), 2, float("-inf"))


@pytest.mark.parametrize("codec", FAST, ids=str)
def test_reports_say_who_is_not_finite(codec: Codec) -> None:
    real = Machines(codec, 300, torch.float32, 2)
    good, bad = torch.ones(300), torch.ones(300)
    bad[299] = float("nan")
    real.round([[good, good], [good, bad]])
    assert [report.poisoned for report in real.reports] == [(), (1,), (1,)]
    huge = torch.full((300,), 3e38)
    real.round([[huge], [huge]])
    assert [report.overflowed for report in real.reports] == [False, False, True]
    real.round([[huge, huge], [good]])
    assert [(report.poisoned, report.overflowed) for report in real.reports] == [((), True), ((), False), ((0,), False)]


def compare_pieces(codec: Codec, count: int, dtype: torch.dtype, divisor: int) -> None:
    """Of 3 machines, from a block on that is not the tensor's first."""
    codec = replace(codec, error_feedback=True)
    expected = CodedSums(codec, 1, NAME, is_answered=False, first_block=2)
    errors = [np.zeros(count, np.float32) for _ in range(3)]
    codes = [np.zeros(codec.coded_nbytes(count), np.uint8) for _ in range(3)]
    for round_ in range(1, 4):
        ranks = [values(count, dtype, 100 * round_ + rank) for rank in range(3)]
        if round_ == 2:
            ranks[1][count - 1] = float("nan")
        for giver, (given, error, code) in enumerate(zip(ranks, errors, codes, strict=True)):
            coding = Coding(codec, WIRE[dtype], count, error.ctypes.data, 0, Draw(key_of(NAME), round_, 2, giver))
            codecs.encode(coding, [given.data_ptr()], code.ctypes.data)
        results = [torch.full((count,), 7.0, dtype=dtype) for _ in range(2)]
        coding = Coding(codec, WIRE[dtype], count, draw=Draw(key_of(NAME), round_, 2))
        codecs.add_up(coding, [each.ctypes.data for each in codes], [each.data_ptr() for each in results], divisor)
        due = expected(ranks, divisor)
        assert all(torch.equal(bits(each), bits(due)) for each in results), f"round {round_}"
        assert expected.errors is not None
        for mine, theirs in zip(errors, expected.errors, strict=True):
            assert torch.equal(bits(torch.from_numpy(mine)), bits(theirs))


@pytest.mark.parametrize("codec", [each for each in FAST if not each.is_thc], ids=str)
def test_pieces_are_added_up_as_in_plain_torch(codec: Codec) -> None:
    compare_pieces(codec, (1 << 16) + codec.block + 3, torch.float32, 3)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [each for each in CODECS if not each.is_thc], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_pieces_of_other_dtypes(codec: Codec, dtype: torch.dtype) -> None:
    compare_pieces(codec, 5_001, dtype, 2)


@pytest.mark.parametrize("codec", [THC, THC_WIDE], ids=str)
def test_thc_adds_integers(codec: Codec) -> None:
    """From the second round on, for any number of machines; where lanes are full, none overflows."""
    for machines in (2, 5, 18, 127):
        real, expected = Machines(codec, 700, torch.float32, machines), CodedSums(codec, 1, NAME)
        for round_ in range(4):
            same = values(700, torch.float32, round_)
            ranks = [
                same if round_ == 2 else values(700, torch.float32, 999 * rank + round_) for rank in range(machines)
            ]
            found = real.round([[each] for each in ranks])
            due = expected(ranks)
            assert all(torch.equal(bits(each), bits(due)) for each in found)
            assert expected.integer_blocks == (3 if round_ else 0)
            assert expected.agreed is not None
            for mine in real.agreed:
                assert torch.equal(torch.from_numpy(mine), expected.agreed.flatten())


def test_thc_sends_later_what_it_cuts_off() -> None:
    real = Machines(THC, 256, torch.float32, 2)
    total = torch.zeros(256)
    for round_ in range(30):
        given = torch.zeros(256) if round_ else torch.ones(256)
        given[7] = 100.0 if round_ == 1 else 0.0
        total += real.round([[given], [given]])[0]
    assert (total[8:] == 2).all()
    assert abs(total[7] - 200) < 2


def test_two_bits_are_means_of_small_and_large_magnitudes() -> None:
    real = Machines(replace(Codec.topk(4 / 4096, bits=2), error_feedback=True), 4096, torch.float32, 2)
    given, nothing = torch.zeros(4096), torch.zeros(4096)
    given[[5, 4095, 77, 78, 79]] = torch.tensor([1.0, -3.0, 8.0, -10.0, 0.5])
    (found, _) = real.round([[given], [nothing]])
    assert found[[5, 4095, 77, 78, 79]].tolist() == [2.0, -2.0, 9.0, -9.0, 0.0]
    assert found.count_nonzero() == 4
    assert real.errors[0][[5, 4095, 77, 78, 79]].tolist() == [-1.0, -1.0, -1.0, -1.0, 0.5]
    (found, _) = real.round([[nothing], [nothing]])  # the rest, of five elements that are not 0 the largest four
    assert found[[5, 77, 78, 79, 4095]].tolist() == [-1.0, -1.0, -1.0, 0.0, -1.0]
    (found, _) = real.round([[nothing], [nothing]])
    assert found.nonzero().flatten().tolist() == [79]
    (found, _) = real.round([[nothing], [nothing]])
    assert not found.any()
    assert not real.errors[0].any()


def test_one_contribution_is_the_answer() -> None:
    for codec in CODECS:
        given = np.frombuffer(np.random.default_rng(1).bytes(2 * codec.item_bytes), np.uint8)
        taken = np.zeros_like(given)
        codecs.add(codec, [given.ctypes.data], [taken.ctypes.data], len(given))
        assert (given == taken).all()


@pytest.mark.parametrize("codec", FAST, ids=str)
def test_any_bytes_are_added_and_decoded(codec: Codec) -> None:
    """Whatever other machines send, nothing is written behind the outputs, and copies of an answer are equal."""
    rng, count = np.random.default_rng(5), 2 * codec.block - 3
    nbytes, guard = codec.coded_nbytes(count), np.frombuffer(b"guard123" * 8, np.uint8)
    given = [np.frombuffer(rng.bytes(nbytes), np.uint8) for _ in range(3)]
    answers = [np.concatenate([np.zeros(nbytes, np.uint8), guard]) for _ in range(2)]
    codecs.add(codec, [each.ctypes.data for each in given], [each.ctypes.data for each in answers], nbytes)
    assert (answers[0] == answers[1]).all()
    assert (answers[0][nbytes:] == guard).all()
    for source in (*given, *answers):
        result, error = (np.concatenate([np.zeros(4 * count, np.uint8), guard]) for _ in range(2))
        agreed = np.concatenate([np.zeros(8, np.uint8), guard])
        coding = Coding(codec, WIRE[torch.float32], count, error.ctypes.data, agreed=agreed.ctypes.data)
        codecs.decode(coding, source.ctypes.data, [result.ctypes.data], 3, given[0].ctypes.data)
        assert all((each[-len(guard) :] == guard).all() for each in (result, error, agreed))


def test_positions_outside_of_a_block_are_left_out() -> None:
    """Whatever another machine sends, nothing is written elsewhere: here the end of a block that the tensor lacks."""
    codec = Codec.topk(0.01, bits=2)
    code = np.zeros(2 * codec.item_bytes, np.uint8)
    whole = np.zeros(8192, np.float32)
    whole[[4096 + 903, 4096 + 904, 8191]] = 1, 2, 3
    codecs.encode(Coding(codec, WIRE[torch.float32], 8192), [whole.ctypes.data], code.ctypes.data)
    for wild, most in ((code, 1), (np.full_like(code, 0xFF), 2), (np.full_like(code, 0xEE), 2 * codec.entries)):
        out = np.zeros(3 * codec.item_bytes, np.uint8)
        codecs.add(codec, [wild.ctypes.data] * 2, [out.ctypes.data], len(wild))
        assert not out[2 * codec.item_bytes :].any()
        result, error = np.ones(8192, np.float32), np.ones(8192, np.float32)
        coding = Coding(codec, WIRE[torch.float32], 5000, error.ctypes.data)
        codecs.decode(coding, wild.ctypes.data, [result.ctypes.data], 1, wild.ctypes.data)
        assert np.count_nonzero(result[:5000]) <= most
        assert result[5000:].all()
        assert error.all()
        assert wild is not code or result[4096 + 903] == 1  # the only one below the mean of all three


@pytest.mark.parametrize("entries", [1, 2, 41, 123, 2049, 4096])
@pytest.mark.parametrize("kind", [pytest.param(CodecKind.TOPK, marks=pytest.mark.slow), CodecKind.TOPK_2BIT])
def test_positions_travel_as_elias_and_fano_wrote_them(kind: CodecKind, entries: int) -> None:
    """The bits of a block, read as the Codec's docstring says."""
    codec, values = Codec(kind, entries), np.random.default_rng(entries).normal(size=4096).astype(np.float32)
    code = np.zeros(codec.item_bytes, np.uint8)
    codecs.encode(Coding(codec, WIRE[torch.float32], 4096), [values.ctypes.data], code.ctypes.data)
    low_bits = 12 - (entries - 1).bit_length()
    head = 4 * entries if kind is CodecKind.TOPK else 8
    bits = np.unpackbits(code[head:], bitorder="little")
    highs = np.flatnonzero(bits[: entries + (4096 >> low_bits)]) - np.arange(entries)
    lows = bits[entries + (4096 >> low_bits) :][: entries * low_bits].reshape(entries, low_bits)
    found = (highs << low_bits) + lows @ (1 << np.arange(low_bits))
    expected = np.sort(np.argsort(-np.abs(values), kind="stable")[:entries])
    assert (found == expected).all()
    if kind is CodecKind.TOPK:
        assert (code[:head].view(np.float32) == values[expected]).all()


def test_codes_of_codecs() -> None:
    assert [THC.levels(n) for n in (2, 4, 8, 16, 18, 127, 128)] == [63, 31, 15, 7, 7, 1, 0]
    assert [THC_WIDE.levels(n) for n in (2, 258, 259)] == [127, 127, 126]
    feedback = [replace(codec, error_feedback=True, momentum=0.25) for codec in CODECS]
    for codec in (*CODECS, *feedback):
        assert Codec.from_code(codec.code, codec.momentum) == codec
        assert Codec.from_code(codec.on_wire.code) == replace(codec, error_feedback=False, momentum=0.0)
        assert codec.code < 1 << 64
    for code in (0, 4, 14, 99, 1 | 1 << 8, 4 | 4097 << 8, 14 | 4097 << 8, 1 | 1 << 32, 1 | 1 << 24, 7, 8, 8 | 128 << 8):
        with pytest.raises((UsageError, ValueError)):
            Codec.from_code(code)
    for ratio in (0, -1, 1.01, float("nan")):
        with pytest.raises(UsageError, match=r"topk sends a share above 0 and up to 1"):
            Codec.topk(ratio)
        with pytest.raises(UsageError, match=r"randomk sends a share above 0 and up to 1"):
            Codec.randomk(ratio)
    with pytest.raises(UsageError, match=r"topk sends values of 32 or 2 bits, not bits=4"):
        Codec.topk(0.1, bits=4)
    for momentum in (-0.1, 1.0, float("nan")):
        with pytest.raises(UsageError, match="momentum is a factor of at least 0 and below 1"):
            Codec(CodecKind.INT8, momentum=momentum)


def test_what_is_drawn_depends_on_tensor_and_round_only() -> None:
    """Not on how a tensor is cut into partitions; and each element comes equally often."""
    codec, count = Codec.randomk(0.1, seed=1), 8 * 4096
    tensor, whole, part = torch.ones(count), np.zeros(count, np.float32), np.zeros(count // 2, np.float32)
    often = np.zeros(count)
    code = np.zeros(codec.coded_nbytes(count), np.uint8)
    for number in range(400):
        coding = Coding(codec, WIRE[torch.float32], count, draw=Draw(5, number))
        codecs.encode(coding, [tensor.data_ptr()], code.ctypes.data)
        codecs.decode(coding, code.ctypes.data, [whole.ctypes.data], 1, 0)
        assert whole.sum() == 8 * codec.entries
        often += whole
    half = Coding(codec, WIRE[torch.float32], count // 2, draw=Draw(5, 399, block=4, giver=3))
    codecs.encode(half, [tensor[count // 2 :].data_ptr()], code.ctypes.data)
    codecs.decode(half, code.ctypes.data, [part.ctypes.data], 1, 0)
    assert (part == whole[count // 2 :]).all()
    due = 400 * codec.entries / 4096
    assert abs(((often - due) ** 2 / (due * (1 - codec.entries / 4096))).mean() - 1) < 0.05  # like throwing dice


@pytest.mark.parametrize("codec", DITHERINGS[1:4:2], ids=str)
def test_dithering_is_right_on_average(codec: Codec) -> None:
    given = values(4096, torch.float32, 3).clamp(-1, 1)
    code, found = np.zeros(codec.coded_nbytes(4096), np.uint8), torch.zeros(4096)
    total, rounds = torch.zeros(4096, dtype=torch.float64), 2_000
    for number in range(rounds):
        coding = Coding(codec, WIRE[torch.float32], 4096, draw=Draw(1, number))
        codecs.encode(coding, [given.data_ptr()], code.ctypes.data)
        codecs.decode(coding, code.ctypes.data, [found.data_ptr()], 1, 0)
        total += found
    step = blocks_of(given, 256).abs().amax(1, keepdim=True).expand(-1, 256).flatten() / (
        7 if "linear" in str(codec) else 2
    )
    assert ((total / rounds - given).abs() < 5 * step / rounds**0.5).all()
