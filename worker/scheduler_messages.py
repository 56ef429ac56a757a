"""What a communication service says to the scheduler beside ballots and barriers, and when.

``BatchingLink``: declarations that follow one another closely travel in one message. ``heartbeat``: what the service
has cost and done, in all of its groups. ``Rejoining``: in an elastic job, how many ranks of this machine wait for the
next group.

Owned by the loop's thread.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from pathlib import Path

from byteps_py.errors import BytePSError
from byteps_py.proto import control_pb2 as pb
from byteps_py.system.log import logger
from byteps_py.system.loop import EventLoop
from byteps_py.tensors import UNNAMED
from byteps_py.wire.control_link import ControlLink
from byteps_py.worker.core.local_ranks import IN_GROUP, RankState
from byteps_py.worker.group import Group
from byteps_py.worker.io.peers import PeerMachines
from byteps_py.worker.ranks.rank_server import RankServer

INTERVAL_S = 0.005


class BatchingLink:
    """A ControlLink in front of ``link``. Messages keep their order.

    A message costs both sides about a millisecond, whatever it declares. So while the ballots sent last are undecided,
    later ones wait for one another, as small writes do under Nagle's algorithm, but no longer than ``INTERVAL_S``: the
    verdict may need a machine that has yet to come. A ballot that follows decided ones goes at once.
    """

    def __init__(self, link: ControlLink, loop: EventLoop) -> None:
        self._link = link
        self._loop = loop
        self._waiting: list[pb.Ballot] = []
        self._undecided: set[str] = set()  # names of ballots that were sent
        self._is_timed = False

    def send(self, message: pb.MemberMessage) -> None:
        if not message.HasField("declare"):
            self._flush()
            self._link.send(message)
            return
        self._waiting += message.declare.ballots
        if not self._undecided:
            self._flush()
        elif not self._is_timed:
            self._is_timed = True
            self._loop.call_later(INTERVAL_S, self._expire)

    def on_message(self, message: pb.SchedulerMessage) -> None:
        """The scheduler said this; to be called once it has been acted on."""
        if message.HasField("verdicts"):
            self._undecided.difference_update(verdict.name for verdict in message.verdicts.verdicts)
            if not self._undecided:
                self._flush()

    def forget(self) -> None:
        """The group is over, and with it what it declared."""
        self._waiting.clear()
        self._undecided.clear()

    def close(self, reason: str = "") -> None:
        self._flush()
        self._link.close(reason)

    def _expire(self) -> None:
        self._is_timed = False
        self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._undecided.update(ballot.name for ballot in self._waiting)
            self._link.send(pb.MemberMessage(declare=pb.Declare(ballots=self._waiting)))
            self._waiting = []


def statistics(past: pb.Statistics, group: Group | None, peers: PeerMachines | None) -> pb.Statistics:
    """``past``: of groups that are over."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    counted = pb.Statistics(
        cpu_s=usage.ru_utime + usage.ru_stime,
        resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
    )
    counted.MergeFrom(past)
    if group is not None:
        group.count(counted)
        counted.bytes_in_flight = group.queue.in_flight_bytes
        counted.credit_bytes, counted.queued = group.queue.credit_bytes, len(group.queue)
    if peers is not None:
        counted.bytes_sent += peers.traffic.bytes_sent
        counted.bytes_received += peers.bytes_received
    return counted


def heartbeat(
    past: pb.Statistics, group: Group | None, peers: PeerMachines | None, waiting: Sequence[pb.Waiting]
) -> pb.Heartbeat:
    """``waiting``: what local ranks have waited for long enough to be told."""
    network = group.network if group is not None else None
    hosting = group.requests.hosting if group is not None else None
    return pb.Heartbeat(
        statistics=statistics(past, group, peers),
        waiting=waiting,
        ranks=group.executor.pace.report(group.executor.ranks) if group is not None else (),
        servers=network.pace.report() if network is not None else (),
        shadow=hosting.shadows.protection if hosting is not None and hosting.has_shadows else None,
        steps=_steps(group) if group is not None and waiting else (),
        calls=_calls(group) if group is not None and any(UNNAMED in each.name for each in waiting) else (),
        progress=_progress(group) if group is not None else (),
    )


def _progress(group: Group) -> list[pb.RankProgress]:
    found = []
    for rank in group.executor.ranks.values():
        if rank.progress is not None:
            rank.progress.rank = group.topology.first_rank + rank.local_rank
            found.append(rank.progress)
    return found


def _steps(group: Group) -> list[pb.RankSteps]:
    found = []
    for rank in group.executor.ranks.values():
        for told in rank.steps:
            steps = pb.RankSteps(rank=group.topology.first_rank + rank.local_rank)
            steps.MergeFrom(told)
            found.append(steps)
    return found


def _calls(group: Group) -> list[pb.UnnamedCall]:
    first_rank = group.topology.first_rank
    return [
        pb.UnnamedCall(name=tensor.name, rank=first_rank + slot.local_rank, rounds=slot.begun)
        for tensor in group.agreement.tensors()
        if UNNAMED in tensor.name
        for slot in tensor.slots
    ]


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
            if self._told is not None and self._told.ranks and not self._told.others:
                self._tell(pb.Gathered(epoch=self._epoch))  # of those that waited, one has ended
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
            self._tell(ready)

    def _tell(self, ready: pb.Gathered) -> None:
        self._told = ready
        self._rank_server.ranks.are_counted |= ready.ranks > 0  # what was said before may be heard only now
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
