"""Chooses the route of an operation among a group of ranks, and says why. Pure; any thread.

    ONE_SHOT       a small sum: each rank sends its tensor to all others, and adds all of them
    SHARED_MEMORY  a large sum on one machine: each rank adds a share, and gives all others the result
    DIRECT         a large sum of machines with one rank each: the same over connections
    HIERARCHICAL   a large sum of machines with several ranks each: on each machine, then over connections
    LOCAL_GROUPS   a large sum on GPUs: groups of a machine's GPUs add slices, the services the groups' sums
    PEERS          other operations: messages between ranks
    SERVICE        the communication service, and the summation servers behind it

All but SERVICE need a group whose members are all on this machine, or a connection between each two machines' members.
Members must choose alike without asking each other, so a choice depends only on facts that all of them know: the
operation, sizes, the number of ranks, the machine. It also depends on where a member's tensors lie (host or device), so
all members of a group must use the same kind of device.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from byteps_py.session import Session
from byteps_py.tensors import Op

#: The cores of the machine, not only those of this process.
CORES = os.sysconf("SC_NPROCESSORS_ONLN")
#: With more members, polling the others' steps takes longer than the copies.
_MOST_MEMBERS = 32
#: Where ranks share cores, smaller tensors are as fast or faster through the service: messages to all others wake more
#: ranks (3 ranks on 2 cores by name, 64 and 256 KB: 398 and 623 µs instead of 313 and 418; 1 and 16 MB: 814 and 5,981
#: instead of 845 and 9,396).
_LEAST_BYTES_ON_SHARED_CORES = 1 << 20
_MOST_PER_CORE = 2  # 8 ranks on 2 cores, 16 MB: 33 ms instead of 27

#: Sums of a process group: the most bytes that a member receives in messages from all others together. With 2 ranks on
#: 2 cores 16 KB take 62 µs this way and 59 in shared memory, 32 KB 65 and 62, 64 KB 82 and 67, 128 KB 91 and 70; a
#: kind's first sum in shared memory needs an agreement.
GROUP_MESSAGE_BYTES = 32 << 10
#: The same for sums by name, which a message precedes in any case: in shared memory, 48 and 64 KB take 1.2 times as
#: long with 2 ranks on 2 cores, 128 KB as long.
NAMED_MESSAGE_BYTES = 128 << 10

#: The most members of a group on several machines that connect: a rank has a connection to each member of another
#: machine, which costs a descriptor and memory of the system.
MOST_CONNECTED = 128
#: The most bytes that a member receives in messages, as above, for members on several machines: with shares, without
#: them, and by name.
CONNECTION_BYTES = 128 << 10
MOST_CONNECTION_BYTES = 1 << 20
NAMED_CONNECTION_BYTES = 64 << 10
#: Smaller sums of GPUs go through the services whole: copying them takes less than the steps of two process groups.
LEAST_LOCAL_BYTES = 256 << 10
#: A gather that sends the same bytes to each member of another machine goes through the services if all members of a
#: machine receive more than this. 2 x 2 ranks, 256 KB, 1 MB and 4 MB of each: 2.7, 7.6 and 29 ms directly, 6.2, 10.4
#: and 29.5 ms through the services.
_MOST_GATHERED_BYTES = 8 << 20
#: The same for a broadcast, which sends the same bytes from one machine to several.
_MOST_COPIED_BYTES = 256 << 10


class ConnectedMachines(NamedTuple):
    """The machines of a group whose members are connected. ``positions``: of the members on each machine.
    ``has_spare``: other machines sum, too. ``can_share_memory``: all members can add in shared memory."""

    positions: tuple[tuple[int, ...], ...]
    has_spare: bool
    can_share_memory: bool

    @property
    def are_even(self) -> bool:
        """True if as many members are on each machine."""
        return len(set(map(len, self.positions))) == 1

    @property
    def can_share(self) -> bool:
        """True if the members add large sums in shares."""
        if self.has_spare or not self.are_even:
            return False
        return self.can_share_memory or len(self.positions[0]) == 1

    def of(self, ranks: Sequence[int]) -> ConnectedMachines:
        """The machines of some ``ranks``, and their positions among these. Positions of this object are ranks."""
        found = (tuple(ranks.index(rank) for rank in some if rank in ranks) for some in self.positions)
        return self._replace(positions=tuple(some for some in found if some))


class Reach(enum.Enum):
    """The way in which the members of a group reach each other."""

    MEMORY = "all are ranks of this machine"
    CONNECTIONS = "they are on several machines, and connected"
    SERVICE = "through the communication service only"


class Route(enum.Enum):
    """See the module's docstring. The values are phrases for logs."""

    ONE_SHOT = "one-shot all-reduce"
    SHARED_MEMORY = "all-reduce in shared memory"
    DIRECT = "direct all-reduce over connections"
    HIERARCHICAL = "hierarchical all-reduce"
    LOCAL_GROUPS = "sums between GPUs"
    PEERS = "messages between ranks"
    SERVICE = "communication service"


class RouteChoice(NamedTuple):
    """``reason``: a clause for logs, such as "members are on several machines"."""

    route: Route
    reason: str

    def __str__(self) -> str:
        return f"{self.route.value}: {self.reason}"


@dataclass(frozen=True, slots=True)
class SumFacts:
    """A sum as the router sees it. ``nbytes``: of a contribution. ``from_others``: bytes that a member receives from
    all others if it adds itself. ``is_exact``: ranks can add with the precision of the service's kernels.
    ``is_on_host``: the tensors are in the host's memory."""

    op: Op
    nbytes: int
    from_others: int
    is_exact: bool
    is_on_host: bool
    scatters: bool = False


@dataclass(frozen=True, slots=True)
class Router:
    """``members``: of the group. ``ranks_on_cores``: how many ranks share the machine's cores while an operation runs.
    ``message_bytes``: see GROUP_MESSAGE_BYTES. ``can_share``: whether large sums can be added in shares: the
    instructions are compiled, on all machines if members are on several; then each machine has as many members, and no
    spare machine sums. ``most_on_machine``: the largest number of members on one machine, if they are on several.
    ``has_local_groups``: GPUs of a machine sum among themselves, see all_reduce/local_groups.py."""

    members: int
    reach: Reach
    ranks_on_cores: int
    message_bytes: int
    can_share: Callable[[], bool]
    most_on_machine: int = 1
    has_local_groups: bool = False

    @classmethod
    def for_names(
        cls,
        session: Session,
        ranks: Sequence[int],
        can_share: Callable[[], bool],
        machines: ConnectedMachines | None = None,
    ) -> Self:
        """The router for operations by name, those of Horovod and BytePS, for which any rank may be late.
        ``machines``: those of all ranks of the job, if they are on several ones and connected. ``can_share``: whether
        the ranks of one machine can add in shares."""
        first = session.rank - session.local_rank
        are_local = len(ranks) > 1 and first <= ranks[0] and ranks[-1] < first + session.local_size
        are_reachable = are_local and may_share(session.local_size) and session.peers is not None
        if not are_local and len(ranks) > 1 and machines is not None:
            among = machines.of(ranks)
            most = max(map(len, among.positions))
            limit = NAMED_CONNECTION_BYTES
            return cls(len(ranks), Reach.CONNECTIONS, session.local_size, limit, lambda: among.can_share, most)
        reach = Reach.MEMORY if are_reachable else Reach.SERVICE
        return cls(len(ranks), reach, session.local_size, NAMED_MESSAGE_BYTES, can_share)

    def sum(self, facts: SumFacts) -> RouteChoice:
        """The route of a reduction."""
        if self.has_local_groups and not facts.is_on_host and facts.nbytes >= LEAST_LOCAL_BYTES and not facts.scatters:
            return _NOT_ADDED if facts.op is not Op.SUM or not facts.is_exact else _LOCAL_GROUPS
        if self.reach is Reach.SERVICE:
            return _ACROSS
        if not facts.is_on_host:
            return _ON_DEVICE
        if facts.op is not Op.SUM or not facts.is_exact or not facts.from_others:
            return _NOT_ADDED
        if self.reach is Reach.CONNECTIONS:
            if facts.from_others <= min(self.message_bytes, CONNECTION_BYTES):
                return _SMALL
            if self.can_share():
                return _HIERARCHICAL if self.most_on_machine > 1 else _DIRECT
            return _SMALL if facts.from_others <= self.message_bytes else _LARGE_ACROSS
        if facts.from_others <= self.message_bytes:
            return _SMALL if has_cores(self.ranks_on_cores) else _SMALL_ON_SHARED_CORES
        if not may_share(self.ranks_on_cores, facts.nbytes):
            return _TOO_MANY
        return _LARGE if self.can_share() else _NOT_COMPILED

    def move(self, op: Op, nbytes: int, is_on_host: bool) -> RouteChoice:
        """The route of a GATHER, a BROADCAST or an EXCHANGE, which stands for every operation that sends each byte to
        one member only. ``nbytes``: that a member receives, the same on all."""
        if self.reach is Reach.SERVICE:
            return _ACROSS
        if not is_on_host:
            return _ON_DEVICE
        if self.reach is Reach.CONNECTIONS:
            on_machine = self.most_on_machine
            if op is Op.GATHER and on_machine > 1 and nbytes * on_machine > _MOST_GATHERED_BYTES:
                return _COPIED
            if op is Op.BROADCAST and self.members > 2 and nbytes > _MOST_COPIED_BYTES:
                return _COPIED
        return _TO_PEERS


_ACROSS = RouteChoice(Route.SERVICE, "members are on several machines and not connected, or alone")
_LARGE_ACROSS = RouteChoice(Route.SERVICE, "the sum is large: all machines, spare ones too, share in it")
_ON_DEVICE = RouteChoice(Route.SERVICE, "the tensors are on a device")
_NOT_ADDED = RouteChoice(
    Route.SERVICE, "ranks add only exact sums themselves, not minima, maxima, products or integer averages"
)
# 3 and 4 ranks on 2 cores, 4 bytes: 340 to 366 through the service instead of 447 to 459 µs, and 441 to 463 instead of
# 562 to 738: in the service no rank waits for the last one at every step.
_SMALL_ON_SHARED_CORES = RouteChoice(
    Route.SERVICE, "the sum is small and ranks share cores: the service wakes fewer of them"
)
_TOO_MANY = RouteChoice(Route.SERVICE, "too many ranks share a core for a tensor of this size")
_NOT_COMPILED = RouteChoice(Route.SERVICE, "the instructions for shared memory could not be compiled here")
_SMALL = RouteChoice(Route.ONE_SHOT, "the sum is small: one message from each member is faster than steps")
_LARGE = RouteChoice(Route.SHARED_MEMORY, "the sum is large: each member adds a share of it")
_DIRECT = RouteChoice(Route.DIRECT, "the sum is large: each member adds a share of it")
_HIERARCHICAL = RouteChoice(Route.HIERARCHICAL, "the sum is large: each member adds a share of it")
_LOCAL_GROUPS = RouteChoice(Route.LOCAL_GROUPS, "GPUs of a machine sum among themselves first (BYTEPS_LOCAL_SUM)")
_COPIED = RouteChoice(Route.SERVICE, "the same bytes are for several members: the services send them once")
_TO_PEERS = RouteChoice(Route.PEERS, "members reach each other directly")
#: The choice for sums with a codec.
CODED = RouteChoice(Route.SERVICE, "the sum is compressed between machines, by their services")
#: The choice of GroupCollectives before members have agreed on a kind of operation.
FIRST_OF_ITS_KIND = RouteChoice(Route.SERVICE, "the first of its kind: the service compares what members call")


def has_cores(ranks: int) -> bool:
    """True if this many ranks have a core each."""
    return 1 < ranks <= min(CORES, _MOST_MEMBERS)


def may_share(ranks: int, nbytes: int | None = None) -> bool:
    """True if this many ranks should add large tensors, or one of ``nbytes`` bytes, in shared memory."""
    if has_cores(ranks):
        return True
    is_large = nbytes is None or nbytes >= _LEAST_BYTES_ON_SHARED_CORES
    return is_large and 1 < ranks <= min(_MOST_PER_CORE * CORES, _MOST_MEMBERS)
