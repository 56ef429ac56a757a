"""A member's link to the scheduler, as services see it. How it is made: scheduler/client.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from byteps_py.errors import BytePSError
from byteps_py.loop import EventLoop
from byteps_py.proto import control_pb2 as pb
from byteps_py.settings import Settings


@dataclass(frozen=True, slots=True)
class ControlEvents:
    """All are called in the event loop's thread, and never after the link's ``close``.

    ``on_lost`` is called at most once, at the end: RendezvousError (no scheduler by ``Settings.start_timeout_s``, or
        not with this secret; or one that has forgotten this process), PeerLostError (it went away before the cluster
        was complete, for as long), the error of a refusal (after ``on_message`` got it).
    ``heartbeat`` makes the next one.
    ``on_away`` is called with a PeerLostError when the scheduler has been away for a while (not after it said Stop),
        ``on_back`` when it is there again.
    """

    on_message: Callable[[pb.SchedulerMessage], None]
    on_lost: Callable[[BytePSError], None]
    heartbeat: Callable[[], pb.Heartbeat]
    on_away: Callable[[BytePSError], None] = lambda error: None
    on_back: Callable[[], None] = lambda: None


class ControlLink(Protocol):
    """One member's link. ``send`` may be called by any thread, ``close`` by the loop's or once that has ended."""

    def send(self, message: pb.MemberMessage) -> None:
        """Send soon, in order, also while the scheduler is away. Dropped when the link is closed or lost for good."""

    def close(self, reason: str = "") -> None:
        """Leave the cluster and end the link; returns within seconds, whatever the scheduler does."""


class Connect(Protocol):
    """``connect``, as services are given it."""

    def __call__(
        self,
        settings: Settings,
        register: pb.Register,
        loop: EventLoop,
        events: ControlEvents,
    ) -> ControlLink: ...
