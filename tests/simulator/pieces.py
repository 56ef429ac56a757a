"""Who gives whom how many bytes in a round of a gather or an exchange, who disagrees about that, and what comes out.

By position in the group. A gather has one column: what a rank gives, it gives to all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from byteps_py.tensors import DType, Layout, Op, Sizes, TensorSpec

_BYTES = (0, 0, 1, 3, 8, 20, 70)
_FEW_BYTES = (0, 0, 0, 0, 0, 3, 70)  # for many ranks
_MANY = 6


@dataclass(frozen=True, slots=True)
class Pieces:
    """``sent``: by source, in each column; ``due``: by target, from each source. ``gap``: bytes between two pieces.
    ``slack``: more room than is needed."""

    op: Op
    sent: tuple[tuple[int, ...], ...]
    due: tuple[tuple[int, ...], ...]
    sizes: Sizes
    gap: int
    slack: int
    wrong: frozenset[tuple[int, int]] = field(default_factory=frozenset)  # (source, target) that disagree

    @classmethod
    def make(cls, rng: random.Random, op: Op, members: int, has_absent: bool) -> Pieces:
        """``has_absent``: ranks that have joined are in the group, so that everybody must look at every size: else
        who expects nothing of them would not miss them."""
        choices = _FEW_BYTES if members > _MANY else _BYTES
        columns = 1 if op is Op.GATHER else members
        sent = tuple(tuple(rng.choice(choices) for _ in range(columns)) for _ in range(members))
        kinds = (Sizes.CHECKED, Sizes.TOGETHER) if has_absent else (Sizes.PLAIN, Sizes.CHECKED, Sizes.TOGETHER)
        sizes = rng.choice(kinds)
        due = [[row[0 if op is Op.GATHER else target] for row in sent] for target in range(members)]
        if sizes is not Sizes.PLAIN and not has_absent and rng.random() < 0.15:
            for _ in range(rng.choice((1, 1, members))):
                due[rng.randrange(members)][rng.randrange(members)] = rng.choice((0, 1, 2, 9))
        if op is Op.GATHER:
            for rank in range(members):
                if rng.random() < 0.3:
                    due[rank][rank] = 0
        wrong = {
            (source, target)
            for target, row in enumerate(due)
            for source, nbytes in enumerate(row)
            if nbytes != sent[source][0 if op is Op.GATHER else target]
            and not (op is Op.GATHER and source == target and not nbytes)  # it has what it gives
        }
        return cls(
            op, sent, tuple(map(tuple, due)), sizes, rng.choice((0, 0, 1, 8)), rng.choice((0, 0, 30)), frozenset(wrong)
        )

    def layout(self, position: int) -> Layout:
        sends, _ = _ranges(self.sent[position], self.gap)
        receives, _ = _ranges(self.due[position], self.gap)
        return Layout(sends, receives, self.sizes)

    def spec(self, name: str, group: tuple[int, ...], position: int) -> TensorSpec:
        rooms = [_ranges(row[position], self.gap)[1] + self.slack for row in (self.sent, self.due)]
        return TensorSpec(name, DType.UINT8, (rooms[0], rooms[1]), self.op, group=group)

    def must_fail(self, position: int) -> bool:
        is_source = self.sizes is Sizes.TOGETHER and self.op is Op.EXCHANGE
        return any(position == target or (is_source and position == source) for source, target in self.wrong)

    def may_fail(self, position: int) -> bool:
        """Who gives what is not expected may learn it, or be done before; so may others that gather it."""
        return any(self.op is Op.GATHER or position in pair for pair in self.wrong)

    def result(self, position: int, given: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """(offset, bytes) that the member at ``position`` gets, if it does. ``given``: by source, its whole input."""
        column = 0 if self.op is Op.GATHER else position
        found = []
        for source, (offset, nbytes) in enumerate(self.layout(position).receives):
            start = self.layout(source).sends[column][0]
            found.append((offset, given[source][start : start + nbytes]))
        return found


def _ranges(sizes: Sequence[int], gap: int) -> tuple[tuple[tuple[int, int], ...], int]:
    """(offset, bytes) of pieces of these sizes, one after the other; and the bytes that they take."""
    ranges, at = [], 0
    for nbytes in sizes:
        ranges.append((at, nbytes))
        at += nbytes + gap
    return tuple(ranges), at
