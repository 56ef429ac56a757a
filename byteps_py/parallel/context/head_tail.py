"""The tokens of a sequence that each rank of a context-parallel group holds (Llama 3, section 4), and how even their
work is: for planning, and to see the effect of a mask on the balance.

A sequence is cut into 2 * cp chunks of one length, cp being the number of ranks. Rank i holds the chunks i and
2 * cp - 1 - i: one early, one late chunk, so that all ranks have equal work under a causal mask. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from byteps_py.errors import UsageError
from byteps_py.parallel.context.document_mask import DocumentMask, spans_of


def head_tail_chunks(length: int, cp: int, rank: int) -> tuple[range, ...]:
    """The positions of the tokens that ``rank`` holds: its early and its late chunk. One chunk if it is alone.

    >>> head_tail_chunks(16, 2, 0)
    (range(0, 4), range(12, 16))

    Raises UsageError if ``length`` is not a multiple of 2 * cp.
    """
    if cp == 1:
        return (range(length),)
    check_length(length, cp)
    size = length // (2 * cp)
    return tuple(range(number * size, (number + 1) * size) for number in (rank, 2 * cp - 1 - rank))


def contiguous_chunks(length: int, cp: int, rank: int) -> tuple[range, ...]:
    """The positions in the rank's part of ``length``, if each rank held one part in order of ranks: for comparison
    (``balance``). Raises UsageError as ``head_tail_chunks`` does."""
    check_length(length, cp)
    size = length // cp
    return (range(rank * size, (rank + 1) * size),)


def padded_length(length: int, cp: int) -> int:
    """The smallest number of tokens, ``length`` or more, that can be cut into 2 * cp chunks.

    >>> padded_length(1000, 3)
    1002
    """
    return length if cp == 1 else max(1, -(-length // (2 * cp))) * 2 * cp


def check_length(length: int, cp: int) -> None:
    """Raises UsageError if ``length`` tokens cannot be cut into 2 * cp equal chunks, or ``cp`` is not 1 or more."""
    check_ranks(cp)
    padded = padded_length(length, cp)
    if length != padded or length < 1:
        raise UsageError(
            f"a sequence of {length} tokens cannot be cut into 2 * {cp} = {2 * cp} chunks of one length on {cp} ranks: "
            f"pad it to {padded} tokens, and let the padding be a document of its own in the mask and count for "
            "nothing in the loss"
        )


def check_ranks(cp: int) -> None:
    """Raises UsageError if ``cp`` is no number of ranks."""
    if cp < 1:
        raise UsageError(f"{cp} ranks cannot hold a sequence: give the number of ranks of the group, 1 or more")


# ---- how much work and how many bytes each rank has ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ContextBalance:
    """Query-key pairs of each rank, in order of ranks: ``head_tail`` as chunks are held here, ``contiguous`` if each
    rank held one part of the sequence."""

    head_tail: tuple[int, ...]
    contiguous: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """The pairs of the rank with the most, by the mean, for ``head_tail``: 1 is perfect."""
        return max(self.head_tail) * len(self.head_tail) / sum(self.head_tail)


def balance(mask: DocumentMask, cp: int) -> ContextBalance:
    """The query-key pairs of each of ``cp`` ranks, summed over the rows of the mask.

    >>> balance(DocumentMask.from_lengths([3, 3, 8, 2]), 2)
    ContextBalance(head_tail=(25, 26), contiguous=(15, 36))

    Raises UsageError if the length is not a multiple of 2 * cp, or ``cp`` is not 1 or more.
    """
    check_ranks(cp)

    def of(chunks: Callable[[int, int, int], tuple[range, ...]]) -> tuple[int, ...]:
        return tuple(_pairs(mask, chunks(mask.length, cp, rank)) for rank in range(cp))

    return ContextBalance(of(head_tail_chunks), of(contiguous_chunks))


def _pairs(mask: DocumentMask, chunks: tuple[range, ...]) -> int:
    return sum(_pairs_of_chunk(mask, lengths, chunk) for lengths in mask.lengths for chunk in chunks)


def _pairs_of_chunk(mask: DocumentMask, lengths: tuple[int, ...], chunk: range) -> int:
    farthest = mask.length if mask.window is None else mask.window - 1
    pairs = 0
    for queries, keys in spans_of(mask, lengths, chunk):
        pairs += len(queries) + _sum_of_smaller(queries.start - keys.start, len(queries), farthest)
        if not mask.is_causal:
            pairs += _sum_of_smaller(keys.stop - queries.stop, len(queries), farthest)
    return pairs


def _sum_of_smaller(first: int, count: int, most: int) -> int:
    """min(first, most) + min(first + 1, most) + … of ``count`` terms."""
    below = min(count, max(0, most - first))
    return below * first + below * (below - 1) // 2 + (count - below) * most


def gathered_bytes(length: int, cp: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes of keys and values that a rank receives in one forward pass of ``attention``, for one row of the batch:
    2 * S * h_kv * d * e * (cp - 1) / cp. The gradients that it sends in the backward pass are as many.

    >>> gathered_bytes(8192, 4, 8, 128, 2) / 2**20  # bfloat16
    24.0

    Raises UsageError if ``cp`` is not 1 or more.
    """
    check_ranks(cp)
    return 2 * length * kv_heads * head_dim * itemsize * (cp - 1) // cp
