"""The gathered parameters of one process group on this machine: where they lie, and how changed pieces come there.

All members of the group call ``exchange`` in the same order, as FSDP2 orders its all-gathers. The calling thread does
everything; one thread at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
import torch.distributed as dist

from byteps_py.errors import MismatchError
from byteps_py.parallel.collectives import all_gather_single
from byteps_py.system.shm import PAGE
from byteps_py.torch.process_group.byteps_process_group import BytePSProcessGroup


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
        """The ``owners`` whose pieces this member receives."""
        own = self.machines[self.position]
        return [
            owner
            for owner, machine in enumerate(self.machines)
            if owner in owners and machine != own and self.receiver(owner, own) == self.position
        ]


_libc = ctypes.CDLL(None)  # its calls release the GIL
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
#: A member's message about its piece.
SAME, CHANGED, NOTHING_KEPT = 0, 1, 2


def are_same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two contiguous tensors in the host's memory, of as many bytes, have the same bits: NaN is like NaN, and 0
    is unlike -0."""
    return not _libc.memcmp(one.data_ptr(), other.data_ptr(), one.nbytes)


class GatheredMemory:
    """``capacity_bytes``: how much of it there is for all layers of ``group``. Creating it is a collective.

    Raises MismatchError, on all members, if they give different capacities, and the errors of ``share_memory``.
    """

    def __init__(self, group: BytePSProcessGroup, capacity_bytes: int) -> None:
        self._group = cast(dist.ProcessGroup, group)
        count = group.size()
        self._flags = torch.zeros(count, dtype=torch.uint8, device="cpu")
        self._own_flag = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        stated = torch.empty(count, 2, dtype=torch.int64, device="cpu")
        own = torch.tensor([[group.machine_index, capacity_bytes]], dtype=torch.int64, device="cpu")
        all_gather_single(stated, own, self._group)
        machines, capacities = stated.T.tolist()
        if len(set(capacities)) > 1:
            raise MismatchError(
                f"cache_parameters: the ranks of a process group would keep {capacities} bytes; give the same model "
                "and max_bytes on every rank"
            )
        self._plan = GatherPlan(tuple(machines), group.rank())
        self._memory = group.share_memory(max(PAGE, capacity_bytes))
        self._capacity_bytes = capacity_bytes
        self.used_bytes = 0

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Memory for ``nbytes`` of a layer, uint8; None if there is not as much left. All members call it alike."""
        rounded = -(-nbytes // PAGE) * PAGE
        first = self.used_bytes
        if first + rounded > self._capacity_bytes:
            return None
        self.used_bytes += rounded
        return self._memory.octets[first : first + nbytes]

    def check(self) -> None:
        """Raises the error that has ended the group or the session."""
        self._memory.check()

    def agree(self, flag: int) -> list[int]:
        """The members whose pieces have to travel: those that say CHANGED, or all if one says NOTHING_KEPT. When it
        returns, all members have called it, so none reads the parameters that were gathered before."""
        self._own_flag.fill_(flag)
        all_gather_single(self._flags, self._own_flag, self._group)
        flags = self._flags.tolist()
        if NOTHING_KEPT in flags:
            return list(range(len(flags)))
        return [position for position, each in enumerate(flags) if each == CHANGED]

    def exchange(self, place: torch.Tensor, piece: torch.Tensor, owners: Collection[int]) -> None:
        """Bring the pieces of ``owners`` to their parts of ``place``, which was taken for this layer. ``piece``: this
        member's, uint8. Each piece comes to each other machine once. When it returns, all of ``place`` may be read."""
        plan, count = self._plan, self._group.size()
        parts = place.chunk(count)
        if self._group.rank() in owners:
            parts[plan.position].copy_(piece)
        if len(plan.members) > 1:
            sends, receives = [self._nothing] * count, [self._nothing] * count
            for target in plan.sends(owners):
                sends[target] = piece
            for source in plan.receives(owners):
                receives[source] = parts[source]
            dist.all_to_all(receives, sends, group=self._group)
        self._memory.wait_for_others()

    def close(self, is_collective: bool) -> None:
        """Give the memory back. ``is_collective``: all members on this machine call it, and wait for each other before;
        otherwise it is given back when all of them have closed the session."""
        if is_collective:
            self._memory.wait_for_others()
            self._memory.forget()
        self.used_bytes = 0
