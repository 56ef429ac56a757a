"""The tokens that each token attends to: ``DocumentMask``. A mask is an argument of each call: no groups, no state.

A rank's tokens see *spans* of keys (Llama 3, section 4). The keys of a causal span end with its last query, so that the
mask inside a span is aligned at the lower right: the form that kernels for sequences of different lengths take.
Positions count from the beginning of the sequence. Pure; any thread.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from byteps_py.errors import UsageError


@dataclass(frozen=True, slots=True)
class DocumentMask:
    """A token attends to the tokens of its own document: to itself and those before it, or to all of them.

        mask = DocumentMask.from_tokens(tokens, eos_id=2)  # one row of documents for each row of the batch
        mask = DocumentMask.from_lengths([3, 3, 8, 2])  # the same documents in all rows
        mask = DocumentMask.causal(8192)  # one document in each row
        mask = DocumentMask.causal(8192, window=1024)

    A model may use several masks. Documents need not fit to chunks or ranks.

    Args:
        lengths: for each row of the batch, the number of tokens of each document. One row stands for all rows.
        is_causal: a token sees no later token. Otherwise it sees its whole document.
        window: a token sees at most this many tokens backwards, itself included. Without ``is_causal``, it sees as
            many forwards.

    Raises UsageError if a document is empty, rows differ in their sums, or the window is less than 1.
    """

    lengths: tuple[tuple[int, ...], ...]
    is_causal: bool = True
    window: int | None = None

    def __post_init__(self) -> None:
        if not self.lengths or not self.length:
            raise UsageError("a mask without tokens leaves nothing to attend to: give the lengths of documents")
        for row, lengths in enumerate(self.lengths):
            for number, length in enumerate(lengths):
                if length < 1:
                    raise UsageError(
                        f"document {number} of row {row} has {length} tokens: leave it out; each has at least 1"
                    )
            if sum(lengths) != self.length:
                raise UsageError(
                    f"the documents of row {row} have {sum(lengths)} tokens, those of row 0 {self.length}: pad the "
                    "shorter row, with a document for the padding"
                )
        if self.window is not None and _as_integer(self.window, "window") < 1:
            raise UsageError(
                f"a window of {self.window} tokens leaves each query without a key: give at least 1 (the token "
                "itself), or None for no window"
            )

    @classmethod
    def causal(cls, length: int, window: int | None = None) -> DocumentMask:
        """One document of ``length`` tokens in each row; a token sees itself and those before it."""
        return cls.from_lengths([length], window=window)

    @classmethod
    def full(cls, length: int, window: int | None = None) -> DocumentMask:
        """One document of ``length`` tokens in each row; a token sees all of them."""
        return cls.from_lengths([length], is_causal=False, window=window)

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int] | Sequence[Sequence[int]], *, is_causal: bool = True, window: int | None = None
    ) -> DocumentMask:
        """Documents of these lengths, in order: one row for the whole batch, or a row for each row of it.

        >>> DocumentMask.from_lengths([[3, 3, 8, 2], [16]]).length
        16
        """
        try:
            given: list[Any] = list(lengths)
            rows = [given] if all(_is_number(each) for each in given) else [list(row) for row in given]
        except TypeError as error:
            raise UsageError(
                f"the lengths of documents are {lengths!r}: give a list, or a list for each row of the batch"
            ) from error
        exact = tuple(tuple(_as_integer(each, "the length of a document") for each in row) for row in rows)
        return cls(exact, is_causal, window)

    @classmethod
    def from_tokens(
        cls, tokens: Any, eos_id: int, *, is_causal: bool = True, window: int | None = None
    ) -> DocumentMask:
        """Documents that end with ``eos_id``, which is part of them. The last one may lack it.

        Args:
            tokens: token ids of whole sequences, before they are sharded: a tensor, array or list of integers, of the
                shape (S,) or (batch, S). The mask is made on the CPU: give tokens that are there, and make one mask for
                all layers.
            eos_id: the token that ends a document.

        >>> DocumentMask.from_tokens([5, 6, 2, 7, 2, 8], eos_id=2).lengths
        ((3, 2, 1),)

        Raises UsageError if the ids are not integers, or not one or two dimensions of them.
        """
        eos = _as_integer(eos_id, "eos_id")
        if hasattr(tokens, "detach"):
            tokens = tokens.detach().cpu()
        try:
            ids = np.asarray(tokens)
        except (TypeError, ValueError) as error:
            raise UsageError(f"token ids are integers in rows of one length: {error}") from error
        if ids.size and ids.dtype.kind not in "iu":
            raise UsageError(f"token ids are of the dtype {getattr(tokens, 'dtype', ids.dtype)}: give integers")
        if ids.ndim not in (1, 2):
            raise UsageError(f"token ids have the shape {ids.shape}: give (S,) or (batch, S)")
        rows = []
        for row in np.atleast_2d(ids):
            ends = (np.flatnonzero(row == eos) + 1).tolist()
            if not ends or ends[-1] != row.size:
                ends.append(row.size)
            rows.append(tuple(end - start for start, end in pairwise([0, *ends])))
        return cls(tuple(rows), is_causal, window)

    @property
    def length(self) -> int:
        """The number of tokens of a row, S."""
        return sum(self.lengths[0])

    def check(self, batch: int, length: int) -> None:
        """Raises UsageError if this is not a mask for ``batch`` rows of ``length`` tokens."""
        if self.length != length:
            raise UsageError(
                f"the documents of the mask have {self.length} tokens, the sequence has {length} on all ranks "
                "together: make the mask from the whole sequence, padding included"
            )
        if len(self.lengths) not in (1, batch):
            raise UsageError(
                f"the mask has {len(self.lengths)} rows, the batch has {batch}: give one row for all, or one for each"
            )

    def rows(self) -> Iterator[tuple[slice, tuple[int, ...]]]:
        """(rows of the batch, lengths of their documents), for rows that follow each other and are alike."""
        if len(self.lengths) == 1:
            yield slice(None), self.lengths[0]
            return
        first = 0
        for lengths, alike in groupby(self.lengths):
            end = first + len(list(alike))
            yield slice(first, end), lengths
            first = end

    def keys_of(self, queries: range, keys: range) -> range:
        """The ``keys``, positions in the document of ``queries``, that any of the queries sees."""
        start, stop = keys.start, keys.stop
        if self.is_causal:
            stop = min(stop, queries.stop)
        if self.window is not None:
            start = max(start, queries.start - self.window + 1)
            stop = min(stop, queries.stop + self.window - 1)
        return range(start, max(start, stop))

    def queries_of(self, keys: range, queries: range) -> range:
        """The ``queries``, positions in the document of ``keys``, that see any of the keys."""
        start, stop = queries.start, queries.stop
        if self.is_causal:
            start = max(start, keys.start)
        if self.window is not None:
            start = max(start, keys.start - self.window + 1)
            stop = min(stop, keys.stop + self.window - 1)
        return range(start, max(start, stop))

    def hides_none(self, queries: range, keys: range) -> bool:
        """True if each of the queries sees each of the keys of its document."""
        latest, earliest = keys.stop - 1 - queries.start, keys.start - (queries.stop - 1)
        if self.is_causal and latest > 0:
            return False
        return self.window is None or (latest < self.window and -earliest < self.window)


def _is_number(value: Any) -> bool:
    return not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0


def _as_integer(value: Any, what: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError("a truth value is no number of tokens")
        return operator.index(value)
    except TypeError as error:
        raise UsageError(f"{what} is {value!r}: give an integer") from error


# ---- spans: the queries of one document in one chunk, and the keys that they see -----------------------------------


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
    """Like ``tiles_of``, with at most ``size`` keys, too. Each query of a square sees one of its keys."""
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
