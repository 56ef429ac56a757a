"""The indices of a parameter that a tensor-parallel rank has.

One thread, no communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from byteps_py.errors import UsageError

#: The padded vocabulary is a multiple of this, times the number of ranks (Megatron-LM, section 3).
VOCABULARY_MULTIPLE = 128


def padded_vocabulary(vocabulary: int, ranks: int) -> int:
    """The smallest size from ``vocabulary`` on that is a multiple of ``VOCABULARY_MULTIPLE`` · ``ranks``.

    >>> padded_vocabulary(50257, 8)
    51200
    """
    unit = VOCABULARY_MULTIPLE * ranks
    return -(-vocabulary // unit) * unit


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a parameter.

    Attributes:
        dim: the dimension that is cut. The whole parameter has ``length`` indices there, the rank's has ``local``.
        spans: the ranges [start, stop) of the whole, in the order in which they lie in the rank's tensor from its
            beginning on. Padding follows them there. Several: those of fused projections.
        copies: for each span, how many ranks hold it, ranks that follow one another; (): one each.

    >>> whole = torch.arange(6)
    >>> Shard(0, ((1, 2), (4, 5)), 6, 3).cut(whole)  # one index of padding
    tensor([1, 4, 0])
    """

    dim: int
    spans: tuple[tuple[int, int], ...]
    length: int
    local: int
    copies: tuple[int, ...] = ()

    @property
    def start(self) -> int:
        """The start of the first span."""
        return self.spans[0][0]

    @property
    def stop(self) -> int:
        """The end of the last span."""
        return self.spans[-1][1]

    @property
    def size(self) -> int:
        """The indices of the rank's tensor that are no padding."""
        return sum(stop - start for start, stop in self.spans)

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """For each span that is not empty, its start and stop in the whole, and its start in the rank's tensor."""
        place = 0
        for start, stop in self.spans:
            if start < stop:
                yield start, stop, place
            place += stop - start

    def copied(self) -> tuple[tuple[int, int, int], ...]:
        """For each span that several ranks hold, its start and stop in the rank's tensor, and their number."""
        found, place = [], 0
        for (start, stop), count in zip(self.spans, self.copies or (1,) * len(self.spans), strict=True):
            if count > 1:
                found.append((place, place + stop - start, count))
            place += stop - start
        return tuple(found)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """The rank's part of ``whole``, a copy, with zeros for padding."""
        shape = [self.local if dim == self.dim else length for dim, length in enumerate(whole.shape)]
        own = whole.new_zeros(shape) if self.size < self.local else whole.new_empty(shape)
        for start, stop, place in self.pieces():
            own.narrow(self.dim, place, stop - start).copy_(whole.narrow(self.dim, start, stop - start))
        return own


@dataclass(frozen=True, slots=True)
class Blocks:
    """The features of a layer: one or several parts, one behind the other, each of equal blocks that stay whole.

    Attributes:
        counts: for each part, the number of its blocks.
        size: the features of a block.
    """

    counts: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, features: int, units: int | None, parts: int | Sequence[int] | None) -> Blocks:
        """See Column in planned_layers.py. Raises UsageError if they don't fit ``features``."""
        if isinstance(parts, Sequence):
            if units is not None:
                raise UsageError(
                    f"parts={tuple(parts)} and units={units}: count the heads of each part instead, such as "
                    "parts=(heads, kv_heads, kv_heads)"
                )
            if not parts or min(parts) < 1 or features % sum(parts):
                raise UsageError(
                    f"{features} features are no {sum(parts)} equal blocks, the sum of parts={tuple(parts)}: give the "
                    "sizes of the parts, or their numbers of heads"
                )
            return cls(tuple(parts), features // sum(parts))
        number = 1 if parts is None else parts
        if number < 1 or features % number:
            raise UsageError(f"{features} features are no {number} equal parts: give their sizes, as parts=(…, …)")
        length = features // number
        if units is not None and (units < 1 or length % units):
            what = f"{length} output features" if number == 1 else f"the {length} features of each part"
            raise UsageError(f"{what} are no {units} equal units: give the number of heads")
        count = length if units is None else units
        return cls((count,) * number, length // count)

    def shard(self, dim: int, ranks: int, rank: int, heads: int) -> Shard:
        """The shard of ``rank``: the same share of each part. A part of fewer blocks than ranks is held by several
        ranks each, if a part or another layer has more: ``heads`` blocks, those of the queries. Raises UsageError."""
        spans, copies, first = [], [], 0
        for count in self.counts:
            own, copied = count // ranks, 1
            start = rank * own
            if count % ranks:
                if ranks % count or heads <= count or heads % ranks or heads % count:
                    raise UsageError(self._refusal(count, ranks))
                own, copied = 1, ranks // count
                start = rank // copied
            spans.append((first + start * self.size, first + (start + own) * self.size))
            copies.append(copied)
            first += count * self.size
        local = sum(stop - start for start, stop in spans)
        return Shard(dim, tuple(spans), first, local, tuple(copies) if max(copies) > 1 else ())

    def _refusal(self, count: int, ranks: int) -> str:
        fits = max(factor for factor in range(1, min(count, ranks) + 1) if count % factor == 0)
        what, remedy = ("features", "a width that is a") if self.size == 1 else ("heads", "a")
        return (
            f"{ranks} tensor-parallel ranks do not divide {count} {what}: use tp={fits}, or {remedy} multiple of "
            f"{ranks}" + ("" if self.size == 1 else " heads")
        )


def vocabulary_shard(vocabulary: int, ranks: int, rank: int) -> Shard:
    """The tokens that ``rank`` has, padded: see ``padded_vocabulary``."""
    local = padded_vocabulary(vocabulary, ranks) // ranks if ranks > 1 else vocabulary
    start = min(rank * local, vocabulary)
    return Shard(0, ((start, min(start + local, vocabulary)),), vocabulary, local)
