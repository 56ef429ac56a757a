"""The parts of a checkpoint's tensors that a rank reads, and their destinations: the overlaps of the pieces that ranks
saved with those of this rank. Reads nothing. One thread."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from byteps_py.errors import CheckpointError, UsageError
from byteps_py.parallel.checkpoint.contents import MODEL, OPTIMIZER
from byteps_py.parallel.tensor.shard import Shard
from byteps_py.torch.gradients.whole_state import chunks_fault, cover_fault

_REGION = re.compile(r"(.*)@(\d+):(\d+):(\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A part of a stored tensor, ``chunk`` of the entry ``key``, and the tensor of this rank that it goes to."""

    key: str
    chunk: ChunkStorageMetadata
    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class StoredNames:
    """The entries of a checkpoint: for each name its pieces, as (dim, start, stop) -> (key, metadata); None: whole."""

    names: Mapping[str, Mapping[tuple[int, int, int] | None, tuple[str, Any]]]
    path: str

    @classmethod
    def of(cls, metadata: Mapping[str, Any], path: str) -> StoredNames:
        """``metadata``: of torch.distributed.checkpoint, by key. Raises CheckpointError for a tensor that is not
        whole."""
        names: dict[str, dict[tuple[int, int, int] | None, tuple[str, Any]]] = {}
        for key, one in metadata.items():
            if isinstance(one, TensorStorageMetadata) and (fault := chunks_fault(one)):
                raise CheckpointError(f"{path}: {bare(key)!r} is damaged: {fault}")
            found = _REGION.fullmatch(key)
            if found is not None:
                names.setdefault(found[1], {})[int(found[2]), int(found[3]), int(found[4])] = key, one
            else:
                names.setdefault(key, {})[None] = key, one
        return cls(names, path)

    def entries(self, name: str) -> list[str]:
        """The entries of the optimizer's state of a parameter."""
        prefix = f"{OPTIMIZER}{name}."
        return [one.removeprefix(prefix) for one in self.names if one.startswith(prefix)]

    def is_tensor(self, name: str) -> bool:
        """True if the entry is a tensor, and no other object."""
        _, one = next(iter(self._of(name).values()))
        return isinstance(one, TensorStorageMetadata)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor. Raises UsageError if there is no such tensor."""
        stored = self._of(name)
        _, one = stored[None] if None in stored else next(iter(stored.values()))
        shape = list(one.size)
        if None not in stored:
            regions = [region for region in stored if region is not None]
            shape[regions[0][0]] = max(stop for _, _, stop in regions)
        return tuple(shape)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        _, one = next(iter(self._of(name).values()))
        dtype: torch.dtype = one.properties.dtype
        return dtype

    def check(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Raise UsageError unless a tensor of this whole shape and dtype takes up the stored one without a loss."""
        if not self.is_tensor(name):
            raise UsageError(f"{self.path}: {bare(name)!r} is no tensor there, and one of shape {list(shape)} here")
        if self.shape(name) != tuple(shape):
            raise UsageError(
                f"{self.path}: {bare(name)!r} has the shape {self.shape(name)} there, {tuple(shape)} here: it is of "
                "another model"
            )
        there = self.dtype(name)
        is_wider = there.is_floating_point and dtype.is_floating_point and torch.promote_types(there, dtype) == dtype
        if there != dtype and not is_wider:
            raise UsageError(
                f"{self.path}: {bare(name)!r} is of {there} there, and of {dtype} here, which would lose digits: load "
                f"it into a model of {there}, and convert that"
            )

    def pieces(
        self, name: str, target: torch.Tensor, chunk: ChunkStorageMetadata, shard: Shard | None = None
    ) -> list[StoredPiece]:
        """The pieces that cover ``target``: the part ``chunk`` of this tensor-parallel rank's tensor, whose place in
        the whole ``shard`` gives. Raises CheckpointError if they are not all there."""
        if not chunk.sizes:  # a scalar
            return [StoredPiece(self._whole(name), chunk, target)]
        if shard is None:
            boxes = [(list(chunk.offsets), target)]
        else:
            boxes = [box for span in shard.pieces() if (box := _span_box(span, shard.dim, chunk, target)) is not None]
        dim, regions = self._regions(name)
        found: list[StoredPiece] = []
        for offsets, part in boxes:
            for low, high, key in regions if part.numel() else ():
                begin, end = max(low, offsets[dim]), min(high, offsets[dim] + part.shape[dim])
                if begin < end:
                    piece = part.narrow(dim, begin - offsets[dim], end - begin)
                    inside = list(offsets)
                    inside[dim] = begin - low
                    found.append(StoredPiece(key, _chunk(inside, piece.shape), piece))
        return found

    def _regions(self, name: str) -> tuple[int, list[tuple[int, int, str]]]:
        """The dimension along which a tensor is cut, and (start, stop, key) of its parts. Raises CheckpointError unless
        they have each index once."""
        shape = self.shape(name)
        parts = [(*(region or (0, 0, shape[0])), key) for region, (key, _) in self._of(name).items()]
        dim, other = min(parts)[0], max(parts)[0]
        if dim != other:
            raise CheckpointError(
                f"{self.path}: {bare(name)!r} is there twice, cut along dimension {dim} and along dimension {other}"
            )
        indices = f"the indices {{}} to {{}} of dimension {dim}"
        if fault := cover_fault(range(shape[dim]), (range(start, stop) for _, start, stop, _ in parts), indices):
            raise CheckpointError(f"{self.path}: of {bare(name)!r}, {fault}")
        return dim, [part[1:] for part in sorted(parts)]

    def _of(self, name: str) -> Mapping[tuple[int, int, int] | None, tuple[str, Any]]:
        if name not in self.names:
            raise UsageError(f"{self.path}: there is no {bare(name)!r}: it is of another model")
        return self.names[name]

    def _whole(self, name: str) -> str:
        stored = self._of(name)
        if None not in stored:
            raise UsageError(f"{self.path}: {bare(name)!r} is in parts there: it is of another model")
        return stored[None][0]


def _span_box(
    span: tuple[int, int, int], dim: int, chunk: ChunkStorageMetadata, target: torch.Tensor
) -> tuple[list[int], torch.Tensor] | None:
    """The overlap of a span (start and stop in the whole, place in the rank's tensor) with ``chunk`` of the rank's
    tensor: its beginning in the whole, and the part of ``target``. None if there is none."""
    start, stop, place = span
    low = max(place, chunk.offsets[dim])
    high = min(place + stop - start, chunk.offsets[dim] + chunk.sizes[dim])
    if low >= high:
        return None
    offsets = list(chunk.offsets)
    offsets[dim] = start + low - place
    return offsets, target.narrow(dim, low - chunk.offsets[dim], high - low)


def _chunk(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def bare(name: str) -> str:
    """A name as users know it."""
    return name.removeprefix(MODEL) if name.startswith(MODEL) else name.removeprefix(OPTIMIZER)
