"""The frames that one rank has sent to another and received from it (``ResumableStream``), which outlive the
connections beneath; and a check whether a connection still carries bytes (``LinkWatch``). Pure.

Frames are numbered from 0 in each direction. A frame is kept until the other end has reported it, so a new connection
goes on where the last one has ended, after a break or after a damaged frame. Where there are several connections at a
time, each carries some of the frames; those that arrive before it is their turn are kept until it is. Not locked:
PeerConnection calls with its lock held, except for ``check``, ``damaged`` and ``next_early``, which one thread at a
time calls as it receives.

    added ──take──► sent ──confirm──► forgotten          rewind: a new connection; what is not confirmed is sent again
"""

from __future__ import annotations

import enum
from collections import deque

from byteps_py.dataplane.seal import Data, FrameHeader, StreamFrameKind
from byteps_py.errors import ProtocolError

#: A receiver reports the frames that it has received after so many bytes or frames, unless a frame that it sends anyway
#: does so before.
REPORT_BYTES = 1 << 20
REPORT_FRAMES = 64
#: A link of several connections sends so many frames that the other end has not reported: it has to keep them if the
#: first is late. 64 MB: 5 Gbit/s with a round trip of 100 ms.
MOST_UNREPORTED_FRAMES = 256
_LAST_KIND = max(StreamFrameKind)


class ResumableStream:
    """One rank's end, a part of PeerConnection, which calls a method for each step of a frame's way.

    ``given``: frames to be sent so far. ``confirmed``: the number that the other end has
    reported.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[Data, object]] = deque()  # from ``confirmed`` on: bodies, and their owners
        self._next = 0  # number of the next frame to be sent
        self.given = 0
        self.confirmed = 0
        self._owned = 0  # frames up to here are in memory of their own
        #: The number of the next frame to arrive.
        self.expected = 0
        #: Bytes that have arrived and that were not reported.
        self.unreported_bytes = 0
        self._early: dict[int, bytes] = {}  # frames that have arrived before their turn
        self._reported = 0
        self._damaged_at = -1

    # ---- sending ---------------------------------------------------------------------------------------

    @property
    def has_unsent(self) -> bool:
        """True if ``take`` has a frame."""
        return self._next < self.given

    @property
    def is_far_ahead(self) -> bool:
        """True if a link of several connections has to wait for a report before it sends the next frame."""
        return self._next - self.confirmed >= MOST_UNREPORTED_FRAMES

    @property
    def sent(self) -> int:
        """The number of frames that ``take`` has given, since ``rewind`` from ``confirmed`` on."""
        return self._next

    def add(self, body: Data, owner: object) -> None:
        """A frame to be sent. ``owner`` keeps its memory, which does not change until it is released."""
        self._kept.append((body, owner))
        self.given += 1

    def take(self) -> tuple[FrameHeader, Data]:
        """The next frame to be sent."""
        body, _ = self._kept[self._next - self.confirmed]
        header = self._header(len(body), StreamFrameKind.DATA)
        self._next += 1
        return header, body

    def control(self, kind: StreamFrameKind) -> FrameHeader:
        """The header of a frame without a body."""
        return self._header(0, kind)

    def _header(self, nbytes: int, kind: StreamFrameKind) -> FrameHeader:
        self.unreported_bytes, self._reported = 0, self.expected
        return FrameHeader(nbytes, self._next, self.expected, kind)

    def confirm(self, expected: int) -> None:
        """The other end has received all frames before ``expected``. Raises ProtocolError if they were not sent."""
        if expected > self._next:
            raise ProtocolError(f"frame {expected - 1} of a stream was confirmed, which has sent {self._next}")
        while self.confirmed < expected:
            self._kept.popleft()
            self.confirmed += 1

    def rewind(self) -> None:
        """There is a new connection: send all frames again that are not confirmed."""
        self._next = self.confirmed

    def forget_early(self) -> None:
        """There is a new connection: frames that came before their turn come again."""
        self._early.clear()

    def bytes_to_copy(self, end: int) -> int:
        """The number of bytes that ``release`` would copy."""
        return sum(len(self._kept[at][0]) for at in self._shared(end) if self._kept[at][1] is not None)

    def release(self, end: int) -> None:
        """Keep copies of the frames before ``end`` from now on, so that their memory may change."""
        for at in self._shared(end):
            body, owner = self._kept[at]
            self._kept[at] = (bytes(body), None) if owner is not None else (body, None)
        self._owned = max(self._owned, end)

    def _shared(self, end: int) -> range:
        """The places of kept frames before ``end`` whose memory belongs to the caller."""
        return range(max(self.confirmed, self._owned) - self.confirmed, end - self.confirmed)

    # ---- receiving -------------------------------------------------------------------------------------

    def check(self, header: FrameHeader) -> None:
        """Raises ProtocolError if the frame of ``header`` has arrived before, or has a body that it must not have."""
        if header.kind == StreamFrameKind.DATA:
            if header.number < self.expected or header.number in self._early:
                raise ProtocolError(f"frame {header.number} of a stream came twice; the next one is {self.expected}")
        elif header.kind > _LAST_KIND or header.nbytes:
            raise ProtocolError(f"a frame of a stream has kind {header.kind} and a body of {header.nbytes} bytes")

    def is_next(self, header: FrameHeader) -> bool:
        """True unless other frames come before this one."""
        return header.number == self.expected or header.kind != StreamFrameKind.DATA

    def on_frame(self, header: FrameHeader, early: bytes = b"") -> None:
        """The frame of ``header`` has arrived undamaged. ``early``: its body, unless it is the next one. Raises
        ProtocolError."""
        if header.kind == StreamFrameKind.DATA:
            if header.number == self.expected:
                self.expected += 1
                self.unreported_bytes += header.nbytes
            else:
                self._early[header.number] = early
        self.confirm(header.expected)

    def next_early(self) -> bytes | None:
        """The next frame, if it has arrived before its turn; now it is."""
        body = self._early.pop(self.expected, None) if self._early else None
        if body is not None:
            self.expected += 1
            self.unreported_bytes += len(body)
        return body

    def damaged(self) -> bool:
        """The next frame arrived damaged. Returns True if that has happened before."""
        was_before, self._damaged_at = self._damaged_at == self.expected, self.expected
        return was_before

    @property
    def is_report_due(self) -> bool:
        """True if so much has arrived that a report is due."""
        return self.unreported_bytes >= REPORT_BYTES or self.expected - self._reported >= REPORT_FRAMES


class LinkDue(enum.Enum):
    """The next step of a link's owner."""

    NOTHING = enum.auto()
    PING = enum.auto()
    BREAK = enum.auto()  # nothing comes any more: end the connection, and make another one
    GIVE_UP = enum.auto()


class LinkWatch:
    """Watches whether a connection between two ranks still carries bytes, and for how long a broken one may be made
    again.

        up ──nothing came for a while──► a PING ──nothing came for ``silence_s``──► broken ──``give_up_s``──► lost
         ▲                                                                            │
         └────────────────────────────── a new connection ────────────────────────────┘

    ``silence_s``: a connection over which nothing comes for so many seconds, not even answers, is broken. It may be
    made again within twice that time: the caller, too, may be that late to notice. All times are of one monotonic
    clock, in seconds.
    """

    def __init__(self, silence_s: float, now_s: float) -> None:
        self.silence_s = silence_s
        self.give_up_s = 2 * silence_s
        self._heard_s = now_s
        self._pinged_s: float | None = None  # the first PING since something came
        self._broken_s: float | None = None

    @property
    def interval_s(self) -> float:
        """The time between two calls of ``due``."""
        return min(1.0, self.silence_s / 4)

    def on_receive(self, now_s: float) -> None:
        """Bytes have arrived, or a new connection was made."""
        self._heard_s, self._pinged_s = now_s, None

    def broke(self, now_s: float) -> None:
        """The connection has ended."""
        if self._broken_s is None:
            self._broken_s = now_s

    def resumed(self, now_s: float) -> None:
        """There is a new connection."""
        self._broken_s = None
        self.on_receive(now_s)

    def due(self, now_s: float) -> LinkDue:
        """The action that is due now."""
        if self._broken_s is not None:
            return LinkDue.GIVE_UP if now_s - self._broken_s >= self.give_up_s else LinkDue.NOTHING
        if now_s - self._heard_s < self.silence_s / 4:
            return LinkDue.NOTHING
        if self._pinged_s is None:
            self._pinged_s = now_s
            return LinkDue.PING
        # From the PING on: before, the other end had nothing to send.
        return LinkDue.BREAK if now_s - self._pinged_s >= 0.75 * self.silence_s else LinkDue.NOTHING
