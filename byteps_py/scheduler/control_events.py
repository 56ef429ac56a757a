"""Whom a member's link to the scheduler calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from byteps_py.errors import BytePSError
from byteps_py.proto import control_pb2 as pb


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
