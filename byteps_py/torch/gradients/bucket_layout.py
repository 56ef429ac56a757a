"""Decides which gradients travel together. Pure; knows no torch. Any thread."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def plan_buckets(
    sizes_bytes: Sequence[int], kinds: Sequence[Hashable], fusion_bytes: int, together: Sequence[Sequence[int]] = ()
) -> list[list[int]]:
    """Group gradients into buckets of at most ``fusion_bytes``. Returns the indices in each bucket.

    Index 0 is the first gradient in the order of the forward pass. Backward passes compute gradients roughly from last
    to first, so buckets are filled in that order. The gradients of a bucket are of one kind, which one tensor can hold.
    A gradient of ``fusion_bytes`` or more travels alone. Indices in one list of ``together`` share a bucket of any size
    if they are of one kind.

    >>> plan_buckets([10, 30, 10, 10], ["a", "a", "a", "b"], 25)
    [[3], [2, 0], [1]]
    >>> plan_buckets([10, 30, 10, 10], ["a", "a", "a", "b"], 25, [[0, 1, 3]])
    [[3], [2], [1, 0]]
    """
    buckets: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}  # kind → (bucket, bytes)
    group_of = {index: number for number, indices in enumerate(together) for index in indices}
    grouped: dict[Hashable, list[int]] = {}
    for index in reversed(range(len(sizes_bytes))):
        if index in group_of:
            key = group_of[index], kinds[index]
            if key not in grouped:
                grouped[key] = []
                buckets.append(grouped[key])
            grouped[key].append(index)
            continue
        size, kind = sizes_bytes[index], kinds[index]
        bucket, used = filling.get(kind, ([], fusion_bytes))
        if size >= fusion_bytes:
            bucket = [index]
            buckets.append(bucket)
            continue
        if used + size > fusion_bytes or not bucket:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(index)
        filling[kind] = (bucket, used + size)
    return buckets
