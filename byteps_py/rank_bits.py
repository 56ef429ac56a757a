"""The ranks that made a sum NaN or infinite, as 64 bits that fit in a header and a record. Pure; any thread.

Each of the first 63 bits stands for one rank, or for several neighbouring ranks in a job of more than 63. ``|`` joins
the bits of several partitions. The last bit means overflow: the sum is not finite although all contributions are.
"""

from __future__ import annotations

from byteps_py.wording import ranks_text

_BITS = 63
OVERFLOW = 1 << _BITS


def of_rank(rank: int, size: int) -> int:
    """The bit of ``rank`` in a job of ``size`` ranks."""
    return 1 << (rank if size <= _BITS else rank * _BITS // size)


def ranks_of(bits: int, size: int) -> list[int]:
    """The ranks that ``bits`` may mean, ascending.

    >>> ranks_of(of_rank(1, 4) | of_rank(3, 4) | OVERFLOW, 4)
    [1, 3]
    """
    return [rank for rank in range(size) if bits & of_rank(rank, size)]


def text(bits: int, size: int) -> str:
    """``bits`` in words, for messages.

    >>> text(of_rank(1, 4), 4), text(OVERFLOW, 4)
    ('rank 1', 'no rank alone: their values are finite, and their sum is not')
    >>> text(of_rank(64, 128), 128)
    'one or more of ranks 63-65'
    """
    ranks = ranks_of(bits, size)
    if not ranks:
        return "no rank alone: their values are finite, and their sum is not"
    return f"one or more of {ranks_text(ranks)}" if size > _BITS else ranks_text(ranks)
