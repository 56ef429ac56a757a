"""Spans: the queries of one document in one chunk, and the keys that they see (Llama 3, section 4).

The keys of a causal span end with its last query, so that the mask inside a span is aligned at the lower right: the
form that kernels for sequences of different lengths take. Positions count from the beginning of the sequence.

Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from byteps_py.parallel.context.document_mask import DocumentMask


class AttentionSpan(NamedTuple):
    """Positions of queries of one document, and of the keys that any of them sees."""

    queries: range
    keys: range


def spans_of(mask: DocumentMask, lengths: Sequence[int], chunk: range) -> list[AttentionSpan]:
    """The spans of a chunk, for a row with documents of these lengths.

    >>> lengths = [3, 3, 8, 2]
    >>> for span in spans_of(DocumentMask.from_lengths(lengths), lengths, range(12, 16)):
    ...     print(span.queries, span.keys)
    range(12, 14) range(6, 14)
    range(14, 16) range(14, 16)
    """
    spans, start = [], 0
    for length in lengths:
        document = range(start, start + length)
        start = document.stop
        queries = overlap(document, chunk)
        if queries:
            spans.append(AttentionSpan(queries, mask.keys_of(queries, document)))
    return spans


def overlap(one: range, other: range) -> range:
    """The positions in both."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def tiles_of(mask: DocumentMask, span: AttentionSpan, size: int) -> list[AttentionSpan]:
    """The span in spans of at most ``size`` queries: their masks are small, and their keys no more than they see."""
    return [AttentionSpan(queries, mask.keys_of(queries, span.keys)) for queries in _pieces(span.queries, size)]


def squares_of(mask: DocumentMask, span: AttentionSpan, size: int) -> list[AttentionSpan]:
    """As ``tiles_of``, with at most ``size`` keys, too. Each query of a square sees one of its keys."""
    parts = [seen_in(mask, tile, keys) for tile in tiles_of(mask, span, size) for keys in _pieces(tile.keys, size)]
    return [part for part in parts if part is not None]


def _pieces(indices: range, size: int) -> list[range]:
    return [range(start, min(start + size, indices.stop)) for start in range(indices.start, indices.stop, size)]


def seen_in(mask: DocumentMask, span: AttentionSpan, keys: range) -> AttentionSpan | None:
    """The part of a span with its keys among ``keys``; None if there is none. Each of its queries sees a key."""
    some = overlap(span.keys, keys)
    queries = mask.queries_of(some, span.queries)
    return AttentionSpan(queries, mask.keys_of(queries, some)) if some and queries else None


def cumulative_lengths(spans: Sequence[AttentionSpan]) -> tuple[list[int], list[int]]:
    """(cu_q, cu_k): where the queries and the keys of each span begin, if all follow each other, and the whole numbers.

    >>> lengths = [3, 3, 8, 2]
    >>> cumulative_lengths(spans_of(DocumentMask.from_lengths(lengths), lengths, range(12, 16)))
    ([0, 2, 4], [0, 8, 10])
    """
    queries = accumulate((len(span.queries) for span in spans), initial=0)
    return list(queries), list(accumulate((len(span.keys) for span in spans), initial=0))
