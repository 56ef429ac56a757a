"""Which gradients travel together. Pure; knows no torch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def plan_buckets(
    sizes_bytes: Sequence[int], kinds: Sequence[Hashable], fusion_bytes: int, together: Sequence[Sequence[int]] = ()
) -> list[list[int]]:
    """Group gradients into buckets of at most ``fusion_bytes``, given by index in order of the forward pass.

    Gradients become ready roughly from last to first, so buckets are filled in that order. A bucket holds one
    kind (what can lie in one tensor); a gradient of ``fusion_bytes`` or more travels alone. What is named in
    ``together`` shares a bucket whatever the sizes, as far as it is of one kind.

    >>> plan_buckets([10, 30, 10, 10], ["a", "a", "a", "b"], 25)
    [[3], [2, 0], [1]]
    >>> plan_buckets([10, 30, 10, 10], ["a", "a", "a", "b"], 25, [[0, 1, 3]])
    [[3], [2], [1, 0]]
    """
    buckets: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}  # kind → (bucket, bytes)
    wish = {index: number for number, indices in enumerate(together) for index in indices}
    wished: dict[Hashable, list[int]] = {}
    for index in reversed(range(len(sizes_bytes))):
        if index in wish:
            key = wish[index], kinds[index]
            if key not in wished:
                wished[key] = []
                buckets.append(wished[key])
            wished[key].append(index)
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
