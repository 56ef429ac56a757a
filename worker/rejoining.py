"""What the communication service of an elastic job tells the scheduler about its ranks, and what becomes of them.

Owned by the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from byteps_py.errors import BytePSError
from byteps_py.log import logger
from byteps_py.proto import control_pb2 as pb
from byteps_py.worker.local_ranks import IN_GROUP, RankState
from byteps_py.worker.rank_server import RankServer


class Rejoining:
    def __init__(self, rank_server: RankServer, send: Callable[[pb.MemberMessage], None]) -> None:
        self._rank_server = rank_server
        self._send = send
        self._epoch = 0  # since which the last group that this machine was in was the same
        self._told: pb.Gathered | None = None  # since then

    def is_new(self, membership: pb.Membership) -> bool:
        """True if its workers are another group than the last one."""
        if membership.workers_since == self._epoch:
            return False
        self._epoch, self._told = membership.workers_since, None
        return True

    def check(self) -> None:
        """Ranks have come or gone: tell how many wait, once all that are to come have come."""
        ranks = self._rank_server.ranks
        if not ranks.is_whole:
            return
        waiting = ranks.waiting
        is_at_work = bool(ranks.in_state(*IN_GROUP))
        ready = pb.Gathered(
            ranks=len(waiting),
            others=is_at_work,
            epoch=self._epoch,
            newcomers=not all(rank.is_back for rank in waiting),
            synced_in=max((rank.synced_in for rank in waiting), default=0),
            shut_down=len(ranks.in_state(RankState.LEFT)),
        )
        if ready != self._told and not (self._told is None and is_at_work and not waiting):
            self._told = ready
            self._send(pb.MemberMessage(gathered=ready))

    def dissolve(self, error: BytePSError) -> None:
        """The scheduler says that the group can't go on."""
        logger.warning("elastic: the group is to be formed anew: %s", error)
        self._told = None
        self._rank_server.dissolve(error)
        self.check()

    def tell_hosts(self, hosts: pb.Hosts) -> None:
        """Ranks wait to join, or are about to leave."""
        self._rank_server.tell_hosts(hosts.added, hosts.removed)

    @property
    def is_leaving(self) -> bool:
        """The job goes on without this machine's ranks."""
        return self._rank_server.is_dismissed

    def leave(self) -> bool:
        """The service was told to end: its ranks leave the job at their next commit. False if it has none."""
        if self._rank_server.is_dismissed or not self._rank_server.ranks_here:
            return False
        self._send(pb.MemberMessage(drain=pb.Drain(reason="the machine was told to leave")))
        self._rank_server.dismiss()
        return True
