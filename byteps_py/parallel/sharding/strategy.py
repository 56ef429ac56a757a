"""The settings of sharding, with the names of Paddle's ``sharding_configs``; and its rules: which rank owns which
parameter, and which parameters are broadcast together.

Parameters stay whole, so an optimizer that needs whole parameters (LAMB, Adafactor) works as it is. Pure: it needs
neither torch nor process groups. Any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from byteps_py.errors import UsageError

_DEGREES = ("mp_degree", "sharding_degree", "pp_degree", "dp_degree")
MEGABYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Strategy:
    """The division of parameters, gradients and states among ranks. Names and defaults are Paddle's, so
    ``Strategy(**sharding_configs)`` reads its dictionary.

    Raises UsageError for a value that makes no sense.

    >>> Strategy(sharding_degree=2, dp_degree=2).check_world_size(8)
    Traceback (most recent call last):
    ...
    byteps_py.errors.UsageError: mp_degree 1 · sharding_degree 2 · pp_degree 1 · dp_degree 2 = 4, but there are 8 ranks
    """

    #: Ranks that share the states of one copy of the model. 1: parameters are not sharded.
    sharding_degree: int = 8
    #: Copies of a sharding group: hybrid data parallelism. Broadcasts stay inside a sharding group, and an owner sums
    #: its gradients with the owners of the other copies.
    dp_degree: int = 1
    #: Tensor-parallel ranks (Megatron's model parallelism).
    mp_degree: int = 1
    #: Workers of a pipeline.
    pp_degree: int = 1
    #: Backward passes of a step. Their gradients are averaged.
    gradient_merge_acc_step: int = 1
    #: Keep the optimizer's states (moments) in host memory between steps: prefetch, compute, offload, by segments.
    optimize_offload: bool = False
    #: A segment closes once it has so many MB (2^20 bytes) of parameters.
    segment_broadcast_MB: float = 32.0  # noqa: N815  Paddle's name
    #: The rule that cuts segments: their size, or ``segment_anchors``.
    sharding_segment_strategy: Literal["segment_broadcast_MB", "segment_anchors"] = "segment_broadcast_MB"
    #: Names of modules or parameters with which segments begin.
    segment_anchors: Sequence[str] = ()
    #: Sum over copies (dp) once, when the optimizer steps, instead of in every backward pass.
    pp_allreduce_in_optimize: bool = False

    def __post_init__(self) -> None:
        for name in (*_DEGREES, "gradient_merge_acc_step"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UsageError(f"{name}={value!r}: use a whole number of at least 1")
        for name in ("optimize_offload", "pp_allreduce_in_optimize"):
            if type(getattr(self, name)) is not bool:
                raise UsageError(f"{name}={getattr(self, name)!r}: use True or False")
        size = self.segment_broadcast_MB
        if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size < float("inf"):
            raise UsageError(f"segment_broadcast_MB={size!r}: use a number of megabytes above 0")
        if self.sharding_segment_strategy not in ("segment_broadcast_MB", "segment_anchors"):
            raise UsageError(
                f"sharding_segment_strategy={self.sharding_segment_strategy!r}: use 'segment_broadcast_MB' or "
                "'segment_anchors'"
            )
        if isinstance(self.segment_anchors, str):
            raise UsageError(f"segment_anchors={self.segment_anchors!r}: use a list of names")
        if self.segment_anchors and self.sharding_segment_strategy != "segment_anchors":
            raise UsageError("segment_anchors are given: set sharding_segment_strategy='segment_anchors', too")
        if not self.segment_anchors and self.sharding_segment_strategy == "segment_anchors":
            raise UsageError("sharding_segment_strategy='segment_anchors' needs segment_anchors: names of modules")
        object.__setattr__(self, "segment_anchors", tuple(self.segment_anchors))

    @property
    def world_size(self) -> int:
        """The product of the degrees."""
        return self.mp_degree * self.sharding_degree * self.pp_degree * self.dp_degree

    def check_world_size(self, ranks: int) -> None:
        """Raise UsageError if the degrees do not multiply to ``ranks``."""
        if self.world_size != ranks:
            product = " · ".join(f"{name} {getattr(self, name)}" for name in _DEGREES)
            raise UsageError(f"{product} = {self.world_size}, but there are {ranks} ranks")

    def segments(self, names: Sequence[str], sizes_bytes: Sequence[int]) -> list[tuple[int, int]]:
        """The segments of parameters with these names and sizes. Raises UsageError."""
        if self.sharding_segment_strategy == "segment_anchors":
            return cut_by_anchors(names, self.segment_anchors)
        return cut_by_size(sizes_bytes, self.segment_broadcast_MB * MEGABYTE)


# ---- owners and segments -------------------------------------------------------------------------------------------


def assign_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The owner of each parameter: an index in its sharding group.

    Paddle's rule (``fleet`` sharding, ``Shard._split_params``): go through the parameters in order and sum up the
    elements that have been given away; when that is more than the next share of the total, go on to the next rank. So
    owners never decrease, and a rank may own nothing.

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
