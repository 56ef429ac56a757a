"""When a machine whose ranks are done may end: not while another lacks a result that takes what this one gave, or its
word that it has got what it was given.

Owned by the loop's thread. The scheduler collects which machine lacks what (scheduler/rank_group.py), and says
when it is over. What others have not asked for yet, only this machine knows: pieces of gathers and exchanges that lie
here for ranks that have not come to the round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from byteps_py.config.settings import Settings
from byteps_py.proto import control_pb2 as pb
from byteps_py.system.loop import EventLoop

#: At most: others may be slow to notice that a server is gone, and so may a scheduler that was started again.
LIMIT_S = 10.0
_LIMIT_TIMEOUTS = 6
#: Time for what was asked for last to leave.
_LEAVING_S = 0.5
#: Time between two looks whether something is still lacking or owed.
_AGAIN_S = 0.25


class ShutdownDrain:
    """``lacks``: something of rounds that these ranks took part in is not over here, a result or their receipt;
    ``owes``: other ranks than these have yet to ask for what they are given; ``stop`` ends the service. What
    no machine asks for is kept until the stall limit."""

    def __init__(
        self,
        loop: EventLoop,
        send: Callable[[pb.MemberMessage], None],
        stop: Callable[[], None],
        settings: Settings,
    ) -> None:
        self.lacks: Callable[[set[int]], bool] = lambda ranks: False
        self.owes: Callable[[set[int]], bool] = lambda ranks: False
        self._loop = loop
        self._send = send
        self._stop = stop
        self._owed_s = settings.stall_limit_s
        self._limit_s = max(LIMIT_S, _LIMIT_TIMEOUTS * settings.heartbeat_timeout_s)
        self.group = 0  # the epoch with which it began
        self.gone: set[int] = set()  # ranks of other machines that have shut down
        self._departed: list[set[int]] = []  # ranks of other machines, which have given to what lacks here
        self._is_dismissed = False
        self.is_going = False
        #: Something lacks here, or is owed to others: it looks again and again.
        self.is_waiting = False
        self._has_owed = False

    def open(self, group: int, lacks: Callable[[set[int]], bool], owes: Callable[[set[int]], bool]) -> None:
        """The group has begun."""
        self.group, self.lacks, self.owes = group, lacks, owes

    def go(self) -> None:
        """All ranks of this machine are gone: end as soon as no other machine needs what they gave."""
        if not self.is_going:
            self.is_going = True
            self._loop.call_later(self._limit_s, self.dismissed)
            if self._owed_s:
                self._loop.call_later(max(self._limit_s, self._owed_s), self._stop)
        self._end()

    def dismissed(self) -> None:
        """No machine lacks anything that it has asked for."""
        self._is_dismissed = True
        self._end()

    def _end(self) -> None:
        if not (self.is_going and self._is_dismissed):
            return
        if self.owes(self.gone):
            self._has_owed = True
            self._look_later()
        elif self._has_owed:
            self._has_owed = False  # from now on only this timer asks
            self._loop.call_later(_LEAVING_S, self._end)
        else:
            self._stop()

    def are_gone(self, ranks: Iterable[int]) -> bool:
        """They have all shut down."""
        return self.gone.issuperset(ranks)

    def departed(self, ranks: Iterable[int]) -> None:
        """These ranks of another machine are gone, which waits to hear that this one lacks nothing of theirs."""
        self._departed.append(set(ranks))
        self.gone.update(ranks)
        self.drain()

    def end(self) -> None:
        """The group is over: nobody waits to hear anything."""
        self._departed.clear()
        self._has_owed = False

    def _look_later(self) -> None:
        if not self.is_waiting and (self._departed or self._has_owed):
            self.is_waiting = True
            self._loop.call_later(_AGAIN_S, self._check_again)

    def _check_again(self) -> None:
        self.is_waiting = False
        self.drain()

    def drain(self) -> None:
        """Say so where it is true by now."""
        lacking = []
        for ranks in self._departed:
            if self.lacks(ranks):
                lacking.append(ranks)
            else:
                self._send(pb.MemberMessage(shutdown_confirmed=pb.RanksShutDown(ranks=sorted(ranks), epoch=self.group)))
        self._departed = lacking
        if self._has_owed:
            self._end()
        self._look_later()
