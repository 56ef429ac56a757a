"""When a machine whose ranks are done may end: not while another lacks a result that takes what this one gave.

Owned by the loop's thread. The scheduler collects who lacks what (scheduler/farewell.py) and says when it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from byteps_py.loop import EventLoop
from byteps_py.proto import control_pb2 as pb

#: At most: others may be slow to notice that a server is gone.
LIMIT_S = 10.0


class Farewell:
    """``lacks``: something is given and not answered of what these ranks take part in; ``stop`` ends the service."""

    def __init__(self, loop: EventLoop, send: Callable[[pb.MemberMessage], None], stop: Callable[[], None]) -> None:
        self.lacks: Callable[[set[int]], bool] = lambda ranks: False
        self._loop = loop
        self._send = send
        self._stop = stop
        self._departed: list[set[int]] = []  # ranks of other machines, which have given to what lacks here
        self._is_dismissed = False
        self._is_going = False

    def go(self) -> None:
        """All ranks of this machine are gone: end as soon as nobody needs what they gave."""
        if self._is_dismissed:
            self._stop()
        elif not self._is_going:
            self._is_going = True
            self._loop.call_later(LIMIT_S, self._stop)

    def dismissed(self) -> None:
        """Nobody does."""
        self._is_dismissed = True
        if self._is_going:
            self._stop()

    def departed(self, ranks: Iterable[int]) -> None:
        """These ranks of another machine are gone, which waits to hear that this one lacks nothing of theirs."""
        self._departed.append(set(ranks))
        self.settle()

    def settle(self) -> None:
        """Say so where it is true by now; to be called from time to time."""
        lacking = []
        for ranks in self._departed:
            if self.lacks(ranks):
                lacking.append(ranks)
            else:
                self._send(pb.MemberMessage(settled=pb.Gone(ranks=sorted(ranks))))
        self._departed = lacking
