"""A member's link to the scheduler, as services see it. How it is made: scheduler/client.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError
from byteps_py.proto import control_pb2 as pb
from byteps_py.system.loop import EventLoop


@dataclass(frozen=True, slots=True)
class ControlEvents:
    """Callbacks of a link. The event loop's thread calls them, and never after the link's ``close``.

    ``on_message``: a message of the scheduler has arrived.
    ``on_lost``: the link is lost for good; called at most once, last. RendezvousError: no scheduler within
        ``Settings.start_timeout_s``, or one with another secret. PeerLostError: the scheduler was away for that long
        before the cluster was complete. Or the error of a refusal, after ``on_message`` got it.
    ``heartbeat``: makes the next heartbeat.
    ``on_away``: the scheduler has been away for a while, with a PeerLostError; not after Stop. Or, with the error of
        its refusal, a scheduler is at its address that does not know this process: it has another journal.
    ``on_back``: it is connected again, after an ``on_away``. A short absence calls neither.
    """

    on_message: Callable[[pb.SchedulerMessage], None]
    on_lost: Callable[[BytePSError], None]
    heartbeat: Callable[[], pb.Heartbeat]
    on_away: Callable[[BytePSError], None] = lambda error: None
    on_back: Callable[[], None] = lambda: None


class ControlLink(Protocol):
    """One member's link. Any thread may call ``send``. The loop's thread calls ``close``, or any thread once the loop
    has ended."""

    def send(self, message: pb.MemberMessage) -> None:
        """Send a message soon and in order. While the scheduler is away, it waits; once the link is closed or lost for
        good, it is dropped."""

    def close(self, reason: str = "") -> None:
        """Leave the cluster and end the link. Returns within seconds, even if the scheduler does not answer."""


class Connect(Protocol):
    """The type of ``scheduler.client.connect``, which services get as an argument."""

    def __call__(
        self,
        settings: Settings,
        register: pb.Register,
        loop: EventLoop,
        events: ControlEvents,
    ) -> ControlLink: ...
