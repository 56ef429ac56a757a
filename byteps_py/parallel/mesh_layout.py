"""The place of each rank in a mesh: sizes, coordinates, groups, and the machines that groups span.

A pure core: it needs neither torch nor process groups. Any thread.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from byteps_py.errors import UsageError
from byteps_py.wording import count_text, ranks_text

#: From inner to outer: communication gets rarer and easier to hide outwards (Llama 3, section 5.2).
LLAMA_ORDER = ("tp", "cp", "pp", "dp")
#: Paddle's, with its names mp, sep, sharding, pp, dp.
PADDLE_ORDER = ("tp", "cp", "sharding", "pp", "dp")
NAMED_ORDERS = {"llama": LLAMA_ORDER, "paddle": PADDLE_ORDER}
#: The dimensions whose ranks have copies of the same parameters: gradients are summed over them.
REPLICATED = ("cp", "sharding", "dp")

_PAGE_WIDTH = 96
_MOST_ROWS = 32


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """``order``: the names of dimensions from inner to outer; ``sizes``: of each. Ranks are counted along the innermost
    dimension first.

    >>> layout = MeshLayout(("tp", "cp", "pp", "dp"), (2, 1, 2, 2))
    >>> layout.coordinates(5)
    {'tp': 1, 'cp': 0, 'pp': 0, 'dp': 1}
    >>> layout.ranks(5, ("tp",)), layout.ranks(5, ("dp", "cp"))
    ((4, 5), (1, 5))
    """

    order: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(
        cls, world_size: int, sizes: Mapping[str, int | None], order: str | Sequence[str] = LLAMA_ORDER
    ) -> MeshLayout:
        """The layout of ``world_size`` ranks; one of the sizes may be -1: the rest. None: the rest, or 1 if another
        size is -1. Raises UsageError."""
        unsaid = 1 if -1 in sizes.values() else -1
        known = {name: unsaid if size is None else size for name, size in sizes.items()}
        names = _checked_order(order, [name for name, size in known.items() if name != "sharding" or size != 1])
        return cls(names, _resolved(world_size, {name: known.get(name, 1) for name in names}))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    def size(self, name: str) -> int:
        """The size of a dimension; 1 for "sharding" in an order without it. Raises UsageError for another name."""
        return self.sizes[self.order.index(name)] if self._has(name) else 1

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank, from inner to outer. Raises UsageError for a rank that is not in the mesh."""
        if not 0 <= rank < self.world_size:
            raise UsageError(f"rank {rank} is not in a mesh of ranks 0 to {self.world_size - 1}")
        found = {}
        for name, size in zip(self.order, self.sizes, strict=True):
            rank, found[name] = divmod(rank, size)
        return found

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """The rank with these coordinates; those that are left out are 0."""
        rank = 0
        for name, size in zip(reversed(self.order), reversed(self.sizes), strict=True):
            rank = rank * size + coordinates.get(name, 0)
        return rank

    def ranks(self, rank: int, names: Sequence[str]) -> tuple[int, ...]:
        """The group of ``rank`` along some dimensions, in ascending order: those that differ from it in these
        coordinates only. Raises UsageError."""
        own = self.coordinates(rank)
        along = [name for name in self.order if name in self.checked(names)]
        places = itertools.product(*(range(self.size(name)) for name in along))
        return tuple(sorted(self.rank_at(own | dict(zip(along, place, strict=True))) for place in places))

    def groups(self, names: Sequence[str]) -> list[tuple[int, ...]]:
        """All groups along some dimensions, by their first ranks: in the same order on all ranks. Raises UsageError."""
        return sorted({self.ranks(rank, names) for rank in range(self.world_size)})

    def checked(self, names: Sequence[str]) -> tuple[str, ...]:
        """``names`` of dimensions, from outer to inner, without "sharding" where the order has none. Raises UsageError
        if nothing is left, or a name is unknown or there twice."""
        found = tuple(name for name in reversed(self.order) if name in [each for each in names if self._has(each)])
        if not found or len(set(names)) < len(names):
            raise UsageError(f"({', '.join(names)}): give each dimension once, of {', '.join(self.order)}")
        return found

    def spanning(self, name: str, machines: Sequence[int]) -> tuple[int, ...]:
        """The first group along a dimension whose ranks are on several machines; empty if there is none. ``machines``:
        the machine of each rank."""
        for group in self.groups((name,)) if self.size(name) > 1 else ():
            if len({machines[rank] for rank in group}) > 1:
                return group
        return ()

    def picture(self, machines: Sequence[int] = ()) -> str:
        """A table of the ranks: columns for inner dimensions, rows for the others. A large mesh is cut. ``machines``:
        the machine of each rank.

        >>> print(MeshLayout(("tp", "cp", "pp", "dp"), (2, 2, 2, 2)).picture([0] * 8 + [1] * 8))
        16 ranks: tp 2, cp 2, pp 2, dp 2, from inner to outer
                   cp 0        cp 1
                   tp 0  tp 1  tp 0  tp 1
        dp 0 pp 0     0     1     2     3   machine 0
        dp 0 pp 1     4     5     6     7   machine 0
        dp 1 pp 0     8     9    10    11   machine 1
        dp 1 pp 1    12    13    14    15   machine 1
        """
        digits = max(len(str(self.world_size - 1)), *(len(f"{name} {self.size(name) - 1}") for name in self.order[:2]))
        width = digits + 2
        most = _PAGE_WIDTH // width
        inner = self.order[:2] if self.sizes[0] * self.sizes[1] <= most else self.order[:1]
        outer = self.order[len(inner) :]
        columns = math.prod(self.sizes[: len(inner)])
        shown = min(columns, most)
        rows = self.world_size // columns
        label_width = max(len(self._label(outer, row * columns)) for row in range(rows))
        lines = [f"{count_text(self.world_size, 'rank')}: {self}, from inner to outer"]
        for level in reversed(range(len(inner))):
            each = math.prod(self.sizes[:level])
            cells = [
                f"{inner[level]} {column // each % self.sizes[level]}" if column % each == 0 else ""
                for column in range(shown)
            ]
            lines.append((" " * (label_width + 2) + "".join(f"{cell:<{width}}" for cell in cells)).rstrip())
        for row in range(min(rows, _MOST_ROWS)):
            first = row * columns
            numbers = "".join(f"{rank:>{width - 2}}  " for rank in range(first, first + shown))
            cut = "…  " if shown < columns else ""
            on = _machines_text(machines[first : first + columns])
            lines.append(f"{self._label(outer, first):<{label_width}}  {numbers}{cut} {on}".rstrip())
        if rows > _MOST_ROWS:
            lines.append(f"… and {rows - _MOST_ROWS} more rows")
        return "\n".join(lines)

    def __str__(self) -> str:
        return ", ".join(f"{name} {size}" for name, size in zip(self.order, self.sizes, strict=True))

    def _has(self, name: str) -> bool:
        if name in self.order:
            return True
        if name == "sharding":
            return False
        raise UsageError(f"the mesh has no dimension {name!r}: it has {', '.join(self.order)}")

    def _label(self, names: Sequence[str], rank: int) -> str:
        own = self.coordinates(rank)
        return " ".join(f"{name} {own[name]:<{len(str(self.size(name) - 1))}}" for name in reversed(names))


def span_warning(group: Sequence[int], machines: Sequence[int]) -> str:
    """The text for a tensor-parallel group that spans machines: the cost, and the remedy. ``machines``: the machine of
    each rank of the job."""
    t = len(group)
    count = len({machines[rank] for rank in group})
    return (
        f"the tensor-parallel group of {ranks_text(group)} spans {count} machines: for each layer and micro-batch, "
        f"each rank exchanges 8·b·s·h·(t-1)/t = {8 * (t - 1) / t:g}·b·s·h words with the others, over the network (b "
        "sequences of s tokens with h hidden values). Use a tp that divides a machine's ranks, as the innermost "
        "dimension, and more of cp, pp or dp instead"
    )


def _checked_order(order: str | Sequence[str], given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(order, str):
        if order not in NAMED_ORDERS:
            raise UsageError(
                f"order={order!r}: use {' or '.join(map(repr, NAMED_ORDERS))}, or the names from inner to outer"
            )
        names = NAMED_ORDERS[order]
    else:
        names = tuple(order)
    if sorted(names) not in (sorted(LLAMA_ORDER), sorted(PADDLE_ORDER)):
        raise UsageError(
            f"order={names}: each of {', '.join(LLAMA_ORDER)} must be there once, from inner to outer; sharding may be"
        )
    if missing := [name for name in given if name not in names]:
        raise UsageError(f"order={names} has no {missing[0]!r}, which has a size: use order='paddle', or name it there")
    return names


def _resolved(world_size: int, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The sizes without -1. Raises UsageError."""
    for name, size in sizes.items():
        if type(size) is not int or (size < 1 and size != -1):
            raise UsageError(f"{name}={size!r}: a size is a whole number of at least 1; one may be -1, the rest")
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise UsageError(f"{'=-1, '.join(free)}=-1: only one size may be -1, the rest of {world_size} ranks")
    product = math.prod(size for size in sizes.values() if size != -1)
    factors = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    text = " · ".join(factors) + (f" = {product}" if len(factors) > 1 else "")
    if free and world_size % product == 0:
        return tuple(world_size // product if size == -1 else size for size in sizes.values())
    if not free and product == world_size:
        return tuple(sizes.values())
    fitting = []
    for name, size in sizes.items():
        others = product // max(1, size)
        if size != -1 and world_size % others == 0:
            whole = world_size // others
            fits = [each for each in range(1, whole + 1) if whole % each == 0] if free else [whole]
            fitting.append(f"{name}={' or '.join(map(str, fits[:8]))}")
    remedy = f"one of these would fit: {'; '.join(fitting)}" if fitting else "change two sizes or more"
    if free:
        raise UsageError(
            f"{text} does not divide the {world_size} ranks, so {free[0]}=-1 has no size: {remedy}; or start a "
            f"multiple of {product} ranks"
        )
    raise UsageError(
        f"{text or 'a mesh of size 1'}, but there are {count_text(world_size, 'rank')}: {remedy}; or start "
        f"{count_text(product, 'rank')}"
    )


def _machines_text(machines: Sequence[int]) -> str:
    if not machines:
        return ""
    low, high = min(machines), max(machines)
    return f"machine {low}" if low == high else f"machines {low}-{high}"
