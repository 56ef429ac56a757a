"""Which members of a group receive which pieces, so that each piece comes to each machine once. Pure; any thread."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class GatherPlan:
    """``machines``: the machine of each member of a group, by position. Members of a machine need not be adjacent, and
    machines may have different numbers of them. ``position``: of this process.

    The pieces of a machine's members are dealt out in turn to the members of each other machine. So with as many
    members on each machine, each member receives one piece from each other machine.

    >>> plan = GatherPlan((0, 0, 1, 1), position=1)
    >>> plan.sends({0, 1, 2, 3})  # this member's piece goes to one member of machine 1
    [3]
    >>> plan.receives({0, 1, 2, 3})
    [3]
    """

    machines: tuple[int, ...]
    position: int

    @cached_property
    def members(self) -> dict[int, list[int]]:
        """The positions on each machine."""
        found: dict[int, list[int]] = {}
        for position, machine in enumerate(self.machines):
            found.setdefault(machine, []).append(position)
        return found

    def receiver(self, owner: int, machine: int) -> int:
        """The position on ``machine``, another one than the owner's, that receives the piece of ``owner``."""
        others = self.members[machine]
        return others[self.members[self.machines[owner]].index(owner) % len(others)]

    def sends(self, owners: Collection[int]) -> Sequence[int]:
        """The positions to which this member sends its piece, if the pieces of ``owners`` are to travel."""
        if self.position not in owners:
            return []
        own = self.machines[self.position]
        return [self.receiver(self.position, machine) for machine in self.members if machine != own]

    def receives(self, owners: Collection[int]) -> Sequence[int]:
        """Those of ``owners`` whose pieces this member receives."""
        own = self.machines[self.position]
        return [
            owner
            for owner, machine in enumerate(self.machines)
            if owner in owners and machine != own and self.receiver(owner, own) == self.position
        ]
