"""What sums with a codec must be: machines and a server in one process, written down a second time in plain torch.

One object for each tensor: it keeps the machines' errors from round to round.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from byteps_py.tensor_codec import Codec, CodecKind
from byteps_py.tensors import key_of

_FLOAT8 = {CodecKind.FLOAT8_E4M3: torch.float8_e4m3fn, CodecKind.FLOAT8_E5M2: torch.float8_e5m2}


def blocks_of(values: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of ``size`` elements, the last one filled with zeros."""
    rows = -(-values.numel() // size)
    return torch.cat([values.flatten(), values.new_zeros(rows * size - values.numel())]).view(rows, size)


def scaled(kind: CodecKind, values: torch.Tensor) -> torch.Tensor:
    """What the scaled bytes of ``values``, float32, decode to."""
    blocks = blocks_of(values, 256)
    largest = blocks.abs().amax(1, keepdim=True)
    top = 127.0 if kind is CodecKind.INT8 else torch.finfo(_FLOAT8[kind]).max
    scale = largest / top
    numbers = blocks * (1.0 / scale)
    codes = numbers.round() + 0.0 if kind is CodecKind.INT8 else numbers.to(_FLOAT8[kind]).float()
    decoded = codes * scale
    decoded = torch.where(largest < 2.0**-100, 0.0, decoded)
    decoded = torch.where(largest.isfinite(), decoded, torch.nan)
    return decoded.flatten()[: values.numel()]


def lane_sums(rows: torch.Tensor) -> torch.Tensor:
    """The sum of each row, of a multiple of 16 numbers: every 16th is added up, and then halves of these sums."""
    lanes = torch.zeros(len(rows), 16)
    for part in rows.view(len(rows), rows.shape[1] // 16, 16).unbind(1):
        lanes = lanes + part
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes


def signs(is_scaled: bool, values: torch.Tensor, count: int) -> torch.Tensor:
    """What the signs of ``values`` decode to, of a tensor of ``count`` elements."""
    blocks = blocks_of(values, 2048)
    there = torch.full((len(blocks), 1), 2048.0)
    there[-1:] = count - 2048 * (len(blocks) - 1)
    scale = lane_sums(blocks.abs() / 2048) / (there / 2048) if is_scaled else torch.ones(len(blocks), 1)
    is_good = scale.isfinite() & blocks.isfinite().all(1, keepdim=True)
    decoded = torch.where(blocks < 0, -scale, scale)
    return torch.where(is_good, decoded, torch.nan).flatten()[: values.numel()]


Words = npt.NDArray[np.uint64]


def mixed(value: Words) -> Words:
    """splitmix64."""
    x = value + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def salts(codec: Codec, name: str, round_: int, giver: int, blocks: int, first: int = 0) -> Words:
    """The salt of each block, from ``first`` on."""
    data = struct.pack("<IQQI", codec.seed, key_of(name), round_, giver)
    stream = np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), "<u8")
    return mixed(stream + mixed(np.arange(first, first + blocks, dtype=np.uint64)))


def noise(salt: Words) -> npt.NDArray[np.uint32]:
    """256 numbers of 32 bits for each salt."""
    low, high = (salt & np.uint64(0xFFFFFFFF)).astype(np.uint32)[:, None], (salt >> np.uint64(32)).astype(np.uint32)
    x = np.arange(256, dtype=np.uint32) * np.uint32(0x9E3779B1) + low
    x = ((x ^ x >> np.uint32(16)) + high[:, None]) * np.uint32(0x7FEB352D)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)


def dithered(codec: Codec, values: torch.Tensor, salt: Words) -> torch.Tensor:
    """What ``values``, rounded by chance, decode to."""
    blocks = blocks_of(values, 256)
    largest = blocks.abs().amax(1, keepdim=True)
    is_bad, is_none = ~largest.isfinite(), largest < 2.0**-100
    scale, levels = largest, torch.tensor(float(codec.entries))
    if codec.kind in (CodecKind.DITHERING_LINEAR_L2, CodecKind.DITHERING_NATURAL_L2):
        # Rounded twice, a square root in float64 is that of float32; torch's own is not always.
        scale = largest * lane_sums((blocks * (1.0 / largest)) ** 2).double().sqrt().float()
    drawn = noise(salt)
    if codec.kind in (CodecKind.DITHERING_LINEAR, CodecKind.DITHERING_LINEAR_L2):
        chance = torch.from_numpy((drawn >> np.uint32(16)).astype(np.float32) + np.float32(0.5)) * 2.0**-16
        step = scale / levels
        decoded = (blocks.abs() * (1.0 / step) + chance).floor().minimum(levels) * step
    else:
        part = blocks.abs() * (1.0 / scale)
        fraction = torch.from_numpy((drawn & np.uint32(0x7FFFFF)).astype(np.int32))
        exponent = (part.view(torch.int32) + fraction >> 23) - 127  # a fraction beyond 1 becomes the next exponent
        least = -(codec.entries - 1)
        is_low = part < 2.0**least
        is_up = fraction.float() * 2.0**-23 < part * 2.0**-least
        low = torch.where(is_up, 2.0**least, 0.0)
        high = (exponent.clamp(-126, 0) + 127 << 23).view(torch.float32)
        decoded = torch.where(is_low, low, high) * scale
    decoded = torch.where(blocks < 0, -decoded, decoded) + 0.0
    decoded = torch.where(is_none, 0.0, decoded)
    is_bad = is_bad | ~scale.isfinite() & ~is_none
    return torch.where(is_bad, torch.nan, decoded).flatten()[: values.numel()]


def drawn_positions(codec: Codec, salt: Words) -> npt.NDArray[np.int64]:
    """Of each block, the positions that are sent, in order."""
    entry, s = np.arange(codec.entries, dtype=np.int64), salt.astype(np.int64)[:, None]
    last = np.int64(4095)
    x = (entry * (s & last | 1) + (s >> 12 & last)) & last
    x ^= x >> 6
    x = (x * (s >> 24 & last | 1) + (s >> 36 & last)) & last
    x ^= x >> 5
    result: npt.NDArray[np.int64] = (x * 1597 + (s >> 48 & last)) & last
    return result


def is_chosen(entries: int, values: torch.Tensor, count: int) -> torch.Tensor:
    """Which of ``values`` are sent; of the last block, only the first ``count`` elements of the tensor are there."""
    chosen = torch.zeros(values.shape, dtype=torch.bool)
    for row, block in enumerate(values):
        there = block[: max(0, min(len(block), count - row * len(block)))]
        order = (there.view(torch.int32) & 0x7FFFFFFF).sort(descending=True, stable=True).indices
        chosen[row, order[:entries]] = True
    return chosen


def in_two_bits(blocks: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """What the ``chosen`` elements, as signs and one of two magnitudes in each block, decode to."""
    decoded = torch.zeros_like(blocks)
    for row, block in enumerate(blocks):
        sent = [(i, float(block[i])) for i in torch.nonzero(chosen[row]).flatten().tolist() if block[i] != 0]
        finite = [abs(value) for _, value in sent if math.isfinite(value)]
        least = torch.tensor(sum(finite) / max(len(finite), 1)).item()  # rounded to float32
        if len(finite) < len(sent):
            worst = [abs(value) for _, value in sent if not math.isfinite(value)]
            high, least = (math.nan if any(map(math.isnan, worst)) else math.inf), math.inf
        else:
            above = [value for value in finite if value >= least]
            high = sum(above) / max(len(above), 1)
        below = [value for value in finite if value < least]
        low = sum(below) / max(len(below), 1)
        for i, value in sent:
            size = low if abs(value) < least else high
            decoded[row, i] = math.copysign(size, value) if value == value else math.nan
    return decoded


@dataclass
class CodedSums:
    """Sums of one tensor over machines of ``local_size`` ranks each, or of so many as a list says. ``name``: as the
    services know it. ``is_answered``: the sum is coded, too; of pieces it is not. ``first_block``: of a piece, in its
    tensor."""

    codec: Codec
    local_size: int | Sequence[int] = 1
    name: str = ""
    errors: list[torch.Tensor] | None = None
    moments: list[torch.Tensor] | None = None
    agreed: torch.Tensor | None = None
    integer_blocks: int = 0  # of THC, in the last round: those that were added as integers
    round: int = 0
    is_answered: bool = True
    first_block: int = 0

    def __call__(self, tensors: Sequence[torch.Tensor], divisor: int = 1) -> torch.Tensor:
        """The result of one round, of the ranks' ``tensors`` in order."""
        first, sizes, codec = tensors[0], self.local_size, self.codec
        if isinstance(sizes, int):
            sizes = [sizes] * (len(tensors) // sizes)
        ends = list(itertools.accumulate(sizes))
        machines = [tensors[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        givers = [end - size for end, size in zip(ends, sizes, strict=True)]
        sums = [self._folded([tensor.float().flatten() for tensor in each]) for each in machines]
        self.round += 1
        if len(sums) == 1:
            return self._delivered(sums[0], first, divisor)
        if self.errors is None or self.moments is None:
            self.errors, self.moments = ([torch.zeros_like(each) for each in sums] for _ in range(2))
        moments = self.moments
        if codec.momentum:
            mu = torch.tensor(codec.momentum)
            moments = [mu * moment + each for moment, each in zip(moments, sums, strict=True)]
            sums = [each + mu * moment for moment, each in zip(moments, sums, strict=True)]
        if codec.error_feedback:
            sums = [each + error for each, error in zip(sums, self.errors, strict=True)]
        if codec.kind in (CodecKind.TOPK, CodecKind.TOPK_2BIT):
            result = self._topk(sums)
        elif codec.kind is CodecKind.RANDOMK:
            result = self._randomk(sums)
        elif codec.is_thc:
            result = self._thc(sums)
        else:
            result = self._rounded(sums, givers)
        for machine, (value, moment) in enumerate(zip(sums, moments, strict=True)):
            self.moments[machine] = torch.where(self._is_bad(value), self.moments[machine], moment)
        return self._delivered(result, first, divisor)

    @staticmethod
    def _folded(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    @staticmethod
    def _delivered(result: torch.Tensor, like: torch.Tensor, divisor: int) -> torch.Tensor:
        rounded = result.to(like.dtype)
        return (rounded / divisor if divisor > 1 else rounded).view(like.shape)

    def _is_bad(self, value: torch.Tensor) -> torch.Tensor:
        """Which elements are in a block with NaN or infinity."""
        size = self.codec.block
        bad = ~blocks_of(value, size).isfinite().all(1, keepdim=True)
        return bad.expand(-1, size).flatten()[: value.numel()]

    def _coded(self, value: torch.Tensor, giver: int) -> torch.Tensor:
        """What the code of a machine, or of the server, decodes to."""
        codec = self.codec
        if codec.kind in (CodecKind.ONEBIT, CodecKind.ONEBIT_SCALED):
            return signs(codec.kind is CodecKind.ONEBIT_SCALED, value, value.numel())
        if codec.entries:
            blocks = -(-value.numel() // codec.block)
            return dithered(codec, value, salts(codec, self.name, self.round, giver, blocks, self.first_block))
        return scaled(codec.kind, value)

    def _rounded(self, sums: list[torch.Tensor], givers: list[int]) -> torch.Tensor:
        sent = [self._coded(each, giver) for each, giver in zip(sums, givers, strict=True)]
        assert self.errors is not None
        for machine, (value, code) in enumerate(zip(sums, sent, strict=True)):
            self.errors[machine] = torch.where(self._is_bad(value), self.errors[machine], value - code)
        total = self._folded(sent)
        return self._coded(total, 0xFFFFFFFF) if self.is_answered else total

    def _randomk(self, sums: list[torch.Tensor]) -> torch.Tensor:
        assert self.errors is not None
        count, size = sums[0].numel(), self.codec.block
        salt = salts(self.codec, self.name, self.round, 0xFFFFFFFF, -(-count // size), self.first_block)
        chosen = torch.zeros(len(salt), size, dtype=torch.bool)
        chosen.scatter_(1, torch.from_numpy(drawn_positions(self.codec, salt)), True)
        is_sent, sent = chosen.flatten()[:count], []
        for machine, value in enumerate(sums):
            bad = self._is_bad(value)
            sent.append(torch.where(is_sent, torch.where(bad, torch.nan, value), 0.0))
            self.errors[machine] = torch.where(bad, self.errors[machine], torch.where(is_sent, 0.0, value))
        return self._folded(sent)

    def _thc(self, sums: list[torch.Tensor]) -> torch.Tensor:
        assert self.errors is not None
        blocks = [blocks_of(each, 256) for each in sums]
        if self.agreed is None:
            self.agreed = torch.zeros(len(blocks[0]), 1)
        most = 32767 if self.codec.kind is CodecKind.THC_WIDE else 127
        levels = min(127, most // len(sums))
        steps, lanes, largest = [], [], torch.zeros_like(self.agreed)
        for machine, (value, block) in enumerate(zip(sums, blocks, strict=True)):
            mine = block.abs().amax(1, keepdim=True)
            step, lane = self._lanes(block, torch.where(self.agreed >= 2.0**-100, self.agreed, mine), mine, levels)
            bad, rest = self._is_bad(value), (block - lane * step).flatten()[: value.numel()]
            self.errors[machine] = torch.where(bad, self.errors[machine], rest)
            steps.append(step)
            lanes.append(lane)
            largest = torch.where(mine.isfinite(), torch.maximum(largest, mine), torch.nan)
        self.agreed = torch.where(largest.isfinite(), largest, self.agreed)
        total = self._folded([lane * step for lane, step in zip(lanes, steps, strict=True)])
        reach = total.abs().amax(1, keepdim=True)
        step, lane = self._lanes(total, reach, reach, most)
        is_agreed = (torch.cat(steps, 1) == steps[0]).all(1, keepdim=True) & (steps[0] < 2.0**112)
        self.integer_blocks = int(is_agreed.sum())
        result = torch.where(is_agreed, self._folded(lanes) * steps[0], lane * step)
        return result.flatten()[: sums[0].numel()]

    @staticmethod
    def _lanes(
        block: torch.Tensor, reach: torch.Tensor, largest: torch.Tensor, levels: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(length of a step, multiples of it) for each block."""
        step = torch.where(reach < 2.0**-100, 0.0, reach / torch.tensor(float(levels)))
        step = torch.where(largest.isfinite(), step, torch.nan)
        lane = (block * (1.0 / step)).clamp(-levels, levels).round() + 0.0
        return step, torch.where(step > 0, lane, 0.0)

    def _topk(self, sums: list[torch.Tensor]) -> torch.Tensor:
        assert self.errors is not None
        count, size, entries = sums[0].numel(), self.codec.block, self.codec.entries
        blocks = [blocks_of(each, size) for each in sums]
        chosen = [is_chosen(entries, each, count) for each in blocks]
        is_short = self.codec.kind is CodecKind.TOPK_2BIT
        codes = [
            in_two_bits(each, which) if is_short else torch.where(which, each, 0.0)
            for each, which in zip(blocks, chosen, strict=True)
        ]
        total = torch.zeros_like(blocks[0])
        for code in codes:
            total += code
        answered = is_chosen(entries, total, total.numel())
        result = torch.where(answered, total, 0.0)
        if is_short:
            result = in_two_bits(total, answered)
            answered = result != 0
        if not self.is_answered:
            result, answered = total, torch.ones_like(answered)
        for machine, (each, code, which) in enumerate(zip(blocks, codes, chosen, strict=True)):
            kept = blocks_of(self.errors[machine], size)
            bad = ~each.isfinite().all(1, keepdim=True)
            lacking = torch.where(which, each - code, each)
            error = torch.where(bad, kept, torch.where(which & ~answered, lacking + code, lacking))
            self.errors[machine] = error.flatten()[:count]
        return result.flatten()[:count]


class CodedPieces:
    """The same of scattered sums, whose pieces, so many rows for each of ``members`` ranks, machines code one by one.
    Returns all pieces, one after the other."""

    def __init__(self, codec: Codec, local_size: int | Sequence[int], name: str, members: int) -> None:
        self.codec = codec
        self._facts = codec, local_size, name
        self._members = members
        self._pieces: list[CodedSums] = []

    def __call__(self, tensors: Sequence[torch.Tensor], divisor: int = 1) -> torch.Tensor:
        """See CodedSums."""
        parts = [torch.tensor_split(tensor, self._members) for tensor in tensors]
        counts = [-(-piece.numel() // self.codec.block) for piece in parts[0]]
        self._pieces = self._pieces or [
            CodedSums(*self._facts, is_answered=False, first_block=first)
            for first in itertools.accumulate(counts[:-1], initial=0)
        ]
        each = zip(self._pieces, zip(*parts, strict=True), strict=True)
        return torch.cat([piece(given, divisor) for piece, given in each]).view(tensors[0].shape)
