"""Values of tensors without torch: their bits, distances in units of the last place, and sums in rank order; whole
tensors from the parts that the ranks of a run hold. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from byteps_py.errors import UsageError
from byteps_py.tools.numerics.records import HEAD_TAIL, PARTIAL, SHARD, TensorPlacement, TensorRecord

Array = npt.NDArray[Any]

_FLOATS = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.uint32, "float64": np.uint64}
_OTHERS = {
    "bool": np.uint8,
    "uint8": np.uint8,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
}


def bits_of(data: bytes, dtype: str, shape: Sequence[int]) -> Array:
    """A tensor's bits: unsigned integers for floats, else its values. Raises UsageError if the dtype is unknown, or
    the bytes are too few or too many.

    >>> bits_of(bytes([0x80, 0x3F]), "bfloat16", [1]).tolist()
    [16256]
    """
    kind = _FLOATS.get(dtype, _OTHERS.get(dtype))
    if kind is None:
        raise UsageError(f"dtype {dtype} can't be compared element by element: {', '.join((*_FLOATS, *_OTHERS))} can")
    try:
        return np.frombuffer(data, kind).reshape(tuple(shape))
    except ValueError as error:
        raise UsageError(f"{len(data)} bytes for shape {list(shape)} of {dtype}: record the run again") from error


def numbers_of(bits: Array, dtype: str) -> npt.NDArray[np.float64]:
    """The values in float64.

    >>> numbers_of(np.array([0x3F80], np.uint16), "bfloat16").tolist()
    [1.0]
    """
    return _exact(bits, dtype).astype(np.float64)


def _exact(bits: Array, dtype: str) -> Array:
    """The values in float32 or, of larger types, their own."""
    bits = np.ascontiguousarray(bits)
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return bits.view(dtype) if dtype in _FLOATS else bits


def ulps_between(one: Array, other: Array, dtype: str) -> Array | None:
    """The number of representable values from one tensor's elements to the other's; None for other dtypes than
    floats. +0 and -0 are 1 apart.

    >>> ulps_between(np.array([0x3F80], np.uint16), np.array([0x3F82], np.uint16), "bfloat16").tolist()
    [2]
    """
    if dtype not in _FLOATS:
        return None
    ordered = [_ordered(bits) for bits in (one, other)]
    return np.where(ordered[0] > ordered[1], ordered[0] - ordered[1], ordered[1] - ordered[0])


def _ordered(bits: Array) -> Array:
    """Unsigned integers in the order of the floats."""
    sign = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def sum_in_order(parts: Sequence[Array], dtype: str) -> Array:
    """The bits of the sum of several tensors, from the first to the last, as a machine's sum
    (docs/internals/protocol.md): in float32 (float64 for float64), rounded once."""
    total = _exact(parts[0], dtype).copy()
    for part in parts[1:]:
        total += _exact(part, dtype)
    if dtype == "bfloat16":
        return _rounded_to_bfloat16(total)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return total.astype(np.float16).view(np.uint16)
    return total.view(_FLOATS[dtype]) if dtype in _FLOATS else total


def _rounded_to_bfloat16(values: npt.NDArray[np.float32]) -> Array:
    """To the nearest, halves to even."""
    bits = values.view(np.uint32)
    halfway = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits.astype(np.uint64) + halfway) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


# ---- tensors that ranks hold in parts ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """One rank's record of a tensor."""

    rank: int
    record: TensorRecord
    read: Callable[[TensorRecord], bytes | None]

    @property
    def is_whole(self) -> bool:
        """Whether the rank has the whole tensor."""
        return not any(self.cuts(name) for name in self.record.placements)

    def cuts(self, dimension: str) -> bool:
        """Whether ranks along this dimension of the mesh hold different parts."""
        placement = self.record.placements.get(dimension)
        return placement is not None and placement.kind in (SHARD, HEAD_TAIL, PARTIAL)


@dataclass(frozen=True, slots=True)
class AssembledTensor:
    """A whole tensor from the parts of ``ranks``. ``owners``: for each element the rank that holds it, -1: all."""

    bits: Array
    owners: Array
    ranks: tuple[int, ...]

    def holders(self, mask: Array) -> set[int]:
        """The ranks that hold the elements of ``mask``."""
        found = {int(rank) for rank in np.unique(self.owners[mask])}
        return set(self.ranks) if -1 in found else found


def assemble(pieces: Sequence[TensorPiece], sizes: Mapping[str, int]) -> list[AssembledTensor]:
    """Every whole copy of one tensor that the ranks hold together.

    All parts are there (``missing_parts``). Raises UsageError if they don't fit, or if the ranks describe them
    differently.
    """
    cut = [name for name in pieces[0].record.placements if pieces[0].cuts(name)]
    for piece in pieces:
        if [name for name in piece.record.placements if piece.cuts(name)] != cut:
            raise UsageError(
                f"{_name(piece)}: rank {pieces[0].rank} cuts it along {', '.join(cut) or 'no dimension'}, rank "
                f"{piece.rank} does not: give all ranks the same rules"
            )
    parts = []
    for piece in pieces:
        data = piece.read(piece.record)
        if data is None:
            raise UsageError(f"{_name(piece)}: rank {piece.rank} has not kept its values: record with values=True")
        bits = bits_of(data, piece.record.dtype, piece.record.shape)
        owners = np.full(bits.shape, piece.rank, np.int32)
        parts.append((piece, AssembledTensor(bits, owners, (piece.rank,))))
    for dimension in reversed(cut):  # what was cut last is joined first
        groups: dict[tuple[tuple[str, int], ...], list[tuple[TensorPiece, AssembledTensor]]] = {}
        for piece, part in parts:
            # Ranks along dimensions that are joined already are represented by their first.
            place = tuple(sorted((name, at) for name, at in piece.record.coordinates.items() if name != dimension))
            groups.setdefault(place, []).append((piece, part))
        parts = []
        for group in groups.values():
            group.sort(key=lambda each: each[0].record.coordinates[dimension])
            parts.append(
                (group[0][0], _joined([(each.record.placements[dimension], part) for each, part in group], group[0][0]))
            )
    return [part for _, part in parts]


def missing_parts(pieces: Sequence[TensorPiece], sizes: Mapping[str, int]) -> str:
    """The ranks that have not recorded their parts of a tensor, for a message; "" if all have."""
    for dimension in pieces[0].record.placements:
        groups: dict[tuple[tuple[str, int], ...], set[int]] = {}
        for piece in pieces:
            if piece.cuts(dimension):
                coordinates = piece.record.coordinates
                place = tuple(sorted((name, at) for name, at in coordinates.items() if name != dimension))
                groups.setdefault(place, set()).add(coordinates[dimension])
        for place, there in groups.items():
            missing = sorted(set(range(sizes.get(dimension, 1))) - there)
            if missing:
                others = "".join(f", {name} {at}" for name, at in place if sizes.get(name, 1) > 1)
                return f"the part of {dimension} {', '.join(map(str, missing))}{others}"
    return ""


def _joined(parts: Sequence[tuple[TensorPlacement, AssembledTensor]], piece: TensorPiece) -> AssembledTensor:
    placement, first = parts[0]
    ranks = tuple(rank for _, part in parts for rank in part.ranks)
    if placement.kind == PARTIAL:
        if any(part.bits.shape != first.bits.shape for _, part in parts):
            raise UsageError(f"{_name(piece)}: partial sums of different shapes: give a rule with its placements")
        bits = sum_in_order([part.bits for _, part in parts], piece.record.dtype)
        return AssembledTensor(bits, np.full(bits.shape, -1, np.int32), ranks)
    rank_count = first.bits.ndim
    dim = placement.dim + rank_count if placement.dim < 0 else placement.dim
    if not 0 <= dim < rank_count:
        raise UsageError(
            f"{_name(piece)}: it is cut along its dimension {placement.dim}, but has shape {list(first.bits.shape)}: "
            "change the rule, or give a narrower pattern"
        )
    try:
        bits = np.concatenate([part.bits for _, part in parts], dim)
        owners = np.concatenate([part.owners for _, part in parts], dim)
    except ValueError as error:
        shapes = [list(part.bits.shape) for _, part in parts]
        raise UsageError(f"{_name(piece)}: parts of shapes {shapes} don't fit along dimension {dim}") from error
    places = _places(parts, dim, piece)
    if places is not None:
        bits, owners = (np.take(array, np.argsort(places), dim) for array in (bits, owners))
    return AssembledTensor(bits, owners, ranks)


def _places(parts: Sequence[tuple[TensorPlacement, AssembledTensor]], dim: int, piece: TensorPiece) -> list[int] | None:
    """The index of each element of the concatenated parts in the whole; None: they are in order."""
    lengths = [part.bits.shape[dim] for _, part in parts]
    spans: list[Sequence[tuple[int, int]]]
    if parts[0][0].kind == HEAD_TAIL:
        half, count = lengths[0] // 2, len(parts)
        if any(length != 2 * half for length in lengths):
            raise UsageError(
                f"{_name(piece)}: head–tail chunks of different lengths {lengths}: give the spans, sharded(dim, spans)"
            )
        tails = [2 * count - 1 - number for number in range(count)]
        spans = [
            [(number * half, (number + 1) * half), (tail * half, (tail + 1) * half)]
            for number, tail in enumerate(tails)
        ]
    elif parts[0][0].spans is None:
        return None
    else:
        spans = [placement.spans or () for placement, _ in parts]
    places = [place for own in spans for start, stop in own for place in range(start, stop)]
    own_lengths = [sum(stop - start for start, stop in own) for own in spans]
    if own_lengths != lengths or sorted(places) != list(range(sum(lengths))):
        raise UsageError(
            f"{_name(piece)}: the ranks' spans {[list(own) for own in spans]} do not give each of {sum(lengths)} "
            f"indices once (the parts have lengths {lengths}): correct the spans of sharded()"
        )
    return places


def _name(piece: TensorPiece) -> str:
    return f"step {piece.record.step}, {piece.record.phase}, {piece.record.module or 'the model'} {piece.record.tensor}"
