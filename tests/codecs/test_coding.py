"""The kernels of codecs against the same in plain torch, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.coded_sums import CodedSums

from byteps_py import codecs
from byteps_py.codecs import Coding
from byteps_py.errors import UsageError
from byteps_py.tensor_codec import Codec, CodecKind
from byteps_py.torch.collectives.dtypes import WIRE

INT8, E4M3, E5M2 = (Codec(kind) for kind in list(CodecKind)[:3])
TOPK = Codec.topk(0.01)
CODECS = [INT8, E4M3, E5M2, TOPK, Codec.topk(1.0), Codec.topk(1 / 4096)]


class Machines:
    """Machines and a server that call the kernels, in this process."""

    def __init__(self, codec: Codec, count: int, dtype: torch.dtype, machines: int) -> None:
        self.codec, self.count, self.dtype = codec, count, dtype
        self.errors = [np.zeros(count, np.float32) for _ in range(machines)]
        self.contributions = [np.full(codec.coded_nbytes(count), 0xFF, np.uint8) for _ in range(machines)]
        self.reports: list[codecs.Report] = []

    def coding(self, machine: int) -> Coding:
        error = self.errors[machine].ctypes.data if self.codec.error_feedback else 0
        return Coding(self.codec, WIRE[self.dtype], self.count, error)

    def round(self, ranks: list[list[torch.Tensor]], divisor: int = 1) -> list[torch.Tensor]:
        """The results of the machines."""
        self.reports = []
        for machine, tensors in enumerate(ranks):
            given = self.contributions[machine].ctypes.data
            self.reports.append(codecs.encode(self.coding(machine), [t.data_ptr() for t in tensors], given))
        copies = [given.copy() for given in self.contributions]
        other = np.empty_like(copies[0])
        inputs, outputs = [copy.ctypes.data for copy in copies], [copies[0].ctypes.data, other.ctypes.data]
        self.reports.append(codecs.add(self.codec, inputs, outputs, len(other)))
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
    real, expected = Machines(codec, count, dtype, machines), CodedSums(codec, local)
    for round_ in range(4):
        ranks = [values(count, dtype, 100 * round_ + rank) for rank in range(machines * local)]
        if round_ == 1 and count:
            ranks[-1][count // 2] = poison
        found = real.round([ranks[i * local : (i + 1) * local] for i in range(machines)], divisor)
        due = expected(ranks, divisor)
        assert all(torch.equal(bits(each), bits(due)) for each in found), f"round {round_}"
        assert expected.errors is not None
        if codec.error_feedback:
            assert all(
                torch.equal(bits(torch.from_numpy(mine)), bits(theirs))
                for mine, theirs in zip(real.errors, expected.errors, strict=True)
            )


@pytest.mark.parametrize("codec", [INT8, TOPK], ids=str)
@pytest.mark.parametrize("feedback", [False, True], ids=["plain", "feedback"])
def test_like_plain_torch(codec: Codec, feedback: bool) -> None:
    codec = Codec(codec.kind, codec.entries, feedback)
    compare(codec, 9_000, torch.float32, (3, 2), 6, float("nan"))
    compare(codec, 1, torch.float32, (2, 1), 1, 1e-40)


@pytest.mark.slow  # each kind and dtype compiles kernels of its own
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("feedback", [False, True], ids=["plain", "feedback"])
def test_other_codecs_and_dtypes(codec: Codec, feedback: bool) -> None:
    codec = Codec(codec.kind, codec.entries, feedback)
    compare(codec, 9_000, torch.float32, (3, 2), 6, float("inf"))
    compare(codec, 256, torch.float16, (2, 2), 4, float("inf"))
    compare(codec, 5_001, torch.bfloat16, (2, 1), 2, float("-inf"))


@pytest.mark.parametrize("codec", [INT8, TOPK], ids=str)
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


def test_one_contribution_is_the_answer() -> None:
    for codec in CODECS:
        given = np.frombuffer(np.random.default_rng(1).bytes(2 * codec.item_bytes), np.uint8)
        taken = np.zeros_like(given)
        codecs.add(codec, [given.ctypes.data], [taken.ctypes.data], len(given))
        assert (given == taken).all()


def test_positions_outside_of_a_block_are_left_out() -> None:
    """Whatever another machine sends, nothing is written elsewhere."""
    codec = Codec.topk(0.01)
    wild = np.full(2 * codec.item_bytes, 0xEE, np.uint8)
    out = np.zeros(3 * codec.item_bytes, np.uint8)
    codecs.add(codec, [wild.ctypes.data] * 2, [out.ctypes.data], len(wild))
    assert not out[2 * codec.item_bytes :].any()
    result, error = np.ones(8192, np.float32), np.ones(8192, np.float32)
    coding = Coding(codec, WIRE[torch.float32], 5000, error.ctypes.data)
    codecs.decode(coding, wild.ctypes.data, [result.ctypes.data], 1, wild.ctypes.data)
    assert not result[:5000].any()
    assert result[5000:].all()
    assert error.all()


def test_codes_of_codecs() -> None:
    for codec in (*CODECS, Codec.topk(0.3, error_feedback=True), Codec(CodecKind.INT8, error_feedback=True)):
        assert Codec.from_code(codec.code) == codec
        assert Codec.from_code(codec.on_wire.code) == Codec(codec.kind, codec.entries)
    for code in (0, 5, 4, 1 | 1 << 8, 4 | 4097 << 8):
        with pytest.raises((UsageError, ValueError)):
            Codec.from_code(code)
    for ratio in (0, -1, 1.01, float("nan")):
        with pytest.raises(UsageError, match=r"topk sends a share above 0 and up to 1"):
            Codec.topk(ratio)
