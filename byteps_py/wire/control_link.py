"""A member's link to the scheduler, as services see it. How it is made: scheduler/client.py.

Over it a member also answers an Ask for what flight recorders hold (scheduler/recording_collector.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError, UsageError
from byteps_py.proto import control_pb2 as pb
from byteps_py.system.flight_recorder import copy_recording
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


_MOST_BYTES = 28 << 20  # of a recording, so that its message is below gRPC's limit


@dataclass(frozen=True, slots=True)
class RecorderMemory:
    """``who``: "rank 3". ``fd``: of its memory; below 0: it has none."""

    who: str
    fd: int


def send_recordings(
    ask: pb.Ask,
    recorders: Sequence[RecorderMemory],
    send: Callable[[pb.MemberMessage], None],
    post: Callable[[Callable[[], None]], None],
) -> None:
    """Answer ``ask``. ``send`` is called in this thread, or, where a recording has to be packed first, through
    ``post``. The descriptors may be closed after this call."""
    received_ns = time.monotonic_ns()
    if not ask.recordings or not recorders:
        send(pb.MemberMessage(answer=_stamped(pb.Answer(request=ask.request, is_last=True), received_ns)))
        return
    copies = [RecorderMemory(each.who, os.dup(each.fd) if each.fd >= 0 else -1) for each in recorders]

    def pack() -> None:
        for at, each in enumerate(copies):
            found = pb.Answer(request=ask.request, who=each.who, is_last=at + 1 == len(copies))
            try:
                found.recording = _packed(each)
            except (UsageError, OSError) as error:
                found.error = str(error)
            finally:
                if each.fd >= 0:
                    os.close(each.fd)
            message = pb.MemberMessage(answer=_stamped(found, received_ns))
            post(lambda message=message: send(message))  # type: ignore[misc]

    threading.Thread(target=pack, name="byteps-recordings", daemon=True).start()


def send_last(recorders: Sequence[RecorderMemory], send: Callable[[pb.MemberMessage], None]) -> None:
    """Send what there is, unasked: this member leaves, and a trace is to be written."""
    for each in recorders:
        if each.fd >= 0:
            with contextlib.suppress(UsageError, OSError):
                send(pb.MemberMessage(answer=pb.Answer(who=each.who, recording=_packed(each))))


def _packed(recorder: RecorderMemory) -> bytes:
    if recorder.fd < 0:
        raise UsageError("it records nothing: it has not come yet, has left, or has BYTEPS_FLIGHT_RECORDER_SIZE=0")
    packed = zlib.compress(copy_recording(recorder.fd), 1)
    if len(packed) > _MOST_BYTES:
        raise UsageError(f"its recording has {len(packed) >> 20} MB: set BYTEPS_FLIGHT_RECORDER_SIZE to less")
    return packed


def _stamped(found: pb.Answer, received_ns: int) -> pb.Answer:
    found.received_ns, found.sent_ns = received_ns, time.monotonic_ns()
    return found
