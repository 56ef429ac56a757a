"""What one rank has sent to another and has got from it, whatever becomes of the connections beneath. Pure.

Frames are numbered from 0 in each direction. A frame is kept until the other end has reported that it came, so a new
connection goes on where the last one has ended, after a break or after a damaged frame. Not locked: PeerConnection
calls with its lock held, except for ``check`` and ``damaged``, of what comes, which one thread at a time receives.

    added ──take──► sent ──confirm──► forgotten          rewind: a new connection; what is not confirmed is sent again
"""

from __future__ import annotations

from collections import deque

from byteps_py.dataplane.seal import Data
from byteps_py.dataplane.stream_seal import FrameHeader, StreamFrameKind
from byteps_py.errors import ProtocolError

#: A receiver reports what it has got after so many bytes or frames, unless a frame that it sends anyway does so before.
REPORT_BYTES = 1 << 20
REPORT_FRAMES = 64
_LAST_KIND = max(StreamFrameKind)


class ResumableStream:
    """One rank's end. ``given``: frames to be sent so far. ``confirmed``: those of them that have come."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Data, object]] = deque()  # from ``confirmed`` on: bodies, and what keeps their memory
        self._next = 0  # number of the next frame to be sent
        self.given = 0
        self.confirmed = 0
        self._owned = 0  # frames up to here are in memory of their own
        #: The number of the frame that comes next.
        self.expected = 0
        #: Bytes that have come and that the other end does not know of.
        self.unreported_bytes = 0
        self._reported = 0
        self._damaged_at = -1

    # ---- sending ---------------------------------------------------------------------------------------

    @property
    def has_unsent(self) -> bool:
        """True if ``take`` has a frame."""
        return self._next < self.given

    def add(self, body: Data, owner: object) -> None:
        """A frame to be sent. ``owner`` keeps its memory, which does not change until it is let go."""
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
        """The other end has got all frames before ``expected``. Raises ProtocolError if they were not sent."""
        if expected > self._next:
            raise ProtocolError(f"frame {expected - 1} of a stream was confirmed, which has sent {self._next}")
        while self.confirmed < expected:
            self._kept.popleft()
            self.confirmed += 1

    def rewind(self) -> None:
        """There is a new connection: all that is not confirmed is sent again."""
        self._next = self.confirmed

    def bytes_to_copy(self, end: int) -> int:
        """How many bytes ``let_go`` would copy."""
        return sum(len(self._kept[at][0]) for at in self._shared(end) if self._kept[at][1] is not None)

    def let_go(self, end: int) -> None:
        """Keep copies of the frames before ``end`` from now on, so that their memory may change."""
        for at in self._shared(end):
            body, owner = self._kept[at]
            self._kept[at] = (bytes(body), None) if owner is not None else (body, None)
        self._owned = max(self._owned, end)

    def _shared(self, end: int) -> range:
        """Where frames before ``end`` are kept that are not in memory of their own."""
        return range(max(self.confirmed, self._owned) - self.confirmed, end - self.confirmed)

    # ---- receiving -------------------------------------------------------------------------------------

    def check(self, header: FrameHeader) -> None:
        """Raises ProtocolError unless the frame of ``header`` is the next one, or has no body."""
        is_data = header.kind == StreamFrameKind.DATA
        if header.kind > _LAST_KIND or (header.number != self.expected if is_data else header.nbytes):
            raise ProtocolError(f"frame {header.number} of a stream came instead of frame {self.expected}")

    def came(self, header: FrameHeader) -> None:
        """The frame of ``header`` has come, as it was sent. Raises ProtocolError."""
        if header.kind == StreamFrameKind.DATA:
            self.expected += 1
            self.unreported_bytes += header.nbytes
        self.confirm(header.expected)

    def damaged(self) -> bool:
        """The next frame came damaged. True if it did so before."""
        was_before, self._damaged_at = self._damaged_at == self.expected, self.expected
        return was_before

    @property
    def is_report_due(self) -> bool:
        """True if so much came that the other end should know."""
        return self.unreported_bytes >= REPORT_BYTES or self.expected - self._reported >= REPORT_FRAMES
