"""Declarations that follow one another closely travel to the scheduler in one message. Owned by the loop's thread.

A message costs both sides about a millisecond, whatever it declares. So while the ballots sent last are undecided,
later ones wait for one another, as small writes do under Nagle's algorithm, but no longer than ``INTERVAL_S``: the
verdict may need a machine that has yet to come. A ballot that follows decided ones goes at once.
"""

from __future__ import annotations

from byteps_py.control_link import ControlLink
from byteps_py.loop import EventLoop
from byteps_py.proto import control_pb2 as pb

INTERVAL_S = 0.005


class BatchingLink:
    """A ControlLink in front of ``link``. Messages keep their order."""

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

    def heard(self, message: pb.SchedulerMessage) -> None:
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
