"""The messages between a trainer and the process that reads states for it, over pipes: one byte for the kind, eight for
the length, then the payload. Any thread, one at a time for each pipe.
"""

from __future__ import annotations

import enum
import os
import select
import struct
import time

from byteps_py.errors import PeerLostError, ProtocolError, StallError

_HEAD = struct.Struct("<BQ")
#: The longest frame: a description of all partitions of a server.
MOST_BYTES = 64 << 20


class FrameKind(enum.IntEnum):
    """The kind of a frame's payload."""

    SETTINGS = 1  # to the subprocess, first: JSON
    DESCRIBE = 2  # to it: JSON of the seconds for which steps are held back, and of the deadline
    READ = 3  # to it: JSON of the server, the deadline and the fields of a ShadowRead
    SERVER = 4  # from it: JSON of address and error
    DESCRIPTION = 5  # from it, after SERVER: a ShadowDescription
    DATA = 6  # from it: bytes of states, or of an attachment
    END = 7  # from it: all has been said
    ERROR = 8  # from it: the error's type, a line break, a sentence
    READ_ATTACHED = 9  # to it: JSON of the server, the deadline and the fields of an AttachedRead


def write_frame(fd: int, kind: FrameKind, payload: bytes = b"") -> None:
    """Write a frame to a blocking pipe. Raises PeerLostError if nobody reads it."""
    left = memoryview(_HEAD.pack(kind, len(payload)) + payload)
    try:
        while left:
            left = left[os.write(fd, left) :]
    except OSError as error:
        raise PeerLostError(f"the process that reads shadowed states, or its trainer, has ended: {error}") from error


def read_frame(fd: int, until_s: float | None = None) -> tuple[FrameKind, bytes]:
    """The next frame. Raises StallError at ``until_s`` on the monotonic clock, PeerLostError at the pipe's end,
    ProtocolError for bytes that are no frame."""
    kind, nbytes = _HEAD.unpack(_exactly(fd, _HEAD.size, until_s))
    if nbytes > MOST_BYTES or kind not in frozenset(FrameKind):
        raise ProtocolError(f"a frame of kind {kind} with {nbytes} bytes")
    return FrameKind(kind), _exactly(fd, nbytes, until_s)


def _exactly(fd: int, nbytes: int, until_s: float | None) -> bytes:
    parts, left = [], nbytes
    while left:
        if until_s is not None and not select.select([fd], [], [], max(0.0, until_s - time.monotonic()))[0]:
            raise StallError("the process that reads shadowed states gives no answer in time")
        part = os.read(fd, min(left, 1 << 20))
        if not part:
            raise PeerLostError("the process that reads shadowed states, or its trainer, has ended")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
