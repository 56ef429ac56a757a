"""Puts tensors together that the ranks of a run hold in parts. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from byteps_py.errors import UsageError
from byteps_py.parallel.numerics.records import HEAD_TAIL, PARTIAL, SHARD, TensorPlacement, TensorRecord
from byteps_py.parallel.numerics.values import Array, bits_of, sum_in_order


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
