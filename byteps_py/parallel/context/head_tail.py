"""The tokens of a sequence that each rank of a context-parallel group holds (Llama 3, section 4).

A sequence is cut into 2 * cp chunks of one length, cp being the number of ranks. Rank i holds the chunks i and
2 * cp - 1 - i: one early, one late chunk, so that all ranks have equal work under a causal mask.

Pure; any thread.
"""

from __future__ import annotations

from byteps_py.errors import UsageError


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
    (balance.py). Raises UsageError as ``head_tail_chunks`` does."""
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
