"""Which rank owns which parameter, and which parameters are broadcast together: the rules of Paddle's sharding.

Parameters stay whole, so an optimizer that needs whole parameters (LAMB, Adafactor) works as it is. A pure core: it
needs neither torch nor process groups. Any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from byteps_py.errors import UsageError


def assign_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The owner of each parameter: an index in its sharding group.

    Paddle's rule (``fleet`` sharding, ``Shard._split_params``): go through the parameters in order and sum up what has
    been given away; when that is more than the next share of the total, go on to the next rank. So owners never
    decrease, and a rank may own nothing.

    Args:
        sizes: of the parameters, in elements or bytes.
        ranks: of the sharding group.

    Raises UsageError if ``ranks`` or a size is not positive (a size may be 0).

    >>> assign_owners([1, 2, 3, 4], 2), assign_owners([4, 4, 4, 4], 4)
    ([0, 0, 0, 1], [0, 0, 1, 2])
    """
    if ranks < 1:
        raise UsageError(f"{ranks} ranks can't own parameters: a sharding group has at least one")
    if any(size < 0 for size in sizes):
        raise UsageError(f"a parameter of {min(sizes)} elements can't be owned")
    total, given, owner = sum(sizes), 0, 0
    owners = []
    for size in sizes:
        if given * ranks > total * (owner + 1):  # whole numbers: the same on every machine
            owner += 1
        owners.append(owner)
        given += size
    return owners


def cut_by_size(sizes: Sequence[int], broadcast_size: float) -> list[tuple[int, int]]:
    """The segments, as (first, one behind the last) in the order of the parameters.

    Cut from the back, as Paddle does: a segment closes once it holds at least ``broadcast_size``. The first segment may
    hold less. Raises UsageError if ``broadcast_size`` is not positive.

    >>> sizes = [10, 20, 30, 8, 8, 40, 4, 4]
    >>> [sizes[first:stop] for first, stop in cut_by_size(sizes, 32)]
    [[10, 20], [30, 8, 8], [40, 4, 4]]
    """
    if not broadcast_size > 0:
        raise UsageError(f"segments can't be cut at {broadcast_size}: use a number above 0")
    segments = []
    stop, held = len(sizes), 0
    for place in reversed(range(len(sizes))):
        held += sizes[place]
        if held >= broadcast_size:
            segments.append((place, stop))
            stop, held = place, 0
    if stop:
        segments.append((0, stop))
    return segments[::-1]


def cut_by_anchors(names: Sequence[str], anchors: Sequence[str]) -> list[tuple[int, int]]:
    """The segments, each of which begins with the first parameter of an anchor: the name of a parameter or of a module.

    Raises UsageError if there are no anchors, or if one names nothing or begins nothing of its own.

    >>> cut_by_anchors(["0.weight", "0.bias", "1.weight", "2.weight"], ["1", "2.weight"])
    [(0, 2), (2, 3), (3, 4)]
    """
    if not anchors:
        raise UsageError('sharding_segment_strategy="segment_anchors" needs segment_anchors: names of modules')
    starts: dict[int, str] = {}
    for anchor in anchors:
        places = [place for place, name in enumerate(names) if name == anchor or name.startswith(f"{anchor}.")]
        if not places:
            raise UsageError(f"the anchor {anchor!r} names no parameter and no module with parameters")
        if places[0] in starts:
            raise UsageError(f"the anchors {starts[places[0]]!r} and {anchor!r} begin at the same parameter")
        starts[places[0]] = anchor
    edges = sorted({0, *starts, len(names)})
    return list(pairwise(edges))


def sharding_groups(sharding: int, dp: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """(sharding groups, data-parallel groups) of sharding · dp ranks: neighbours share states.

    >>> sharding_groups(2, 2)
    ([(0, 1), (2, 3)], [(0, 2), (1, 3)])
    """
    shards = [tuple(range(copy * sharding, (copy + 1) * sharding)) for copy in range(dp)]
    copies = [tuple(range(place, sharding * dp, sharding)) for place in range(sharding)]
    return shards, copies
