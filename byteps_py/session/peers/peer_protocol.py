"""What ranks of one machine say to each other. Pure; any thread.

Every message is one packed record; INLINE has the bytes of its parcel after it, SEGMENT a descriptor with it.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from byteps_py.errors import ProtocolError


class PeerMessageKind(enum.IntEnum):
    """First byte of a message."""

    INLINE = 1  # a parcel, whole
    LAID = 2  # a parcel lies in the sender's memory (segment, offset), or begins to: the first ``ready`` bytes do
    MORE = 3  # of parcel ``id`` there are ``ready`` bytes by now
    TAKEN = 4  # parcel ``id``, of the one this is said to, is not needed any more
    SEGMENT = 5  # memory of the sender: its number (``segment``), its size (``total``), and its descriptor
    JOINED = 6  # the sender has no more data: nothing of this era comes after this
    LOOK = 7  # the sender has laid something for which the one this is said to sleeps (ring.py)


class PeerMessage(NamedTuple):
    """``source``: the local rank that says it. ``era``: how often all ranks have joined. ``stream``: the key of one.
    ``number``: of a parcel among those that the stream brings from there to here. ``total``: its bytes. ``id``: what
    the sender calls it; 0 if the sender need not know when it is taken. ``due``: bytes that the sender of a parcel
    expects in turn from the one it is for; -1: it does not say; REFUSED: there is no parcel, since the local rank
    ``offset`` has joined."""

    kind: int
    source: int
    era: int
    segment: int = 0
    stream: int = 0
    number: int = 0
    total: int = 0
    ready: int = 0
    id: int = 0
    offset: int = 0
    due: int = -1


_RECORD = struct.Struct("<HHIQQQQQQQq")
RECORD_BYTES = _RECORD.size
REFUSED = -2
pack = _RECORD.pack  # its arguments are the fields, in order: this is the hot path
_KINDS = frozenset(map(int, PeerMessageKind))


def unpack(data: memoryview, nbytes: int) -> PeerMessage:
    """The record at the beginning of ``data``, a message of ``nbytes``. Raises ProtocolError."""
    if nbytes < RECORD_BYTES:
        raise ProtocolError(f"a message of {nbytes} bytes from a rank of this machine; records have {RECORD_BYTES}")
    message = PeerMessage._make(_RECORD.unpack_from(data))
    is_inline = message.kind == PeerMessageKind.INLINE
    extra = message.total if is_inline else 0
    is_wrong = message.ready > message.total or (is_inline and message.ready < message.total)
    if message.kind not in _KINDS or nbytes != RECORD_BYTES + extra or is_wrong:
        raise ProtocolError(f"a malformed message of {nbytes} bytes from a rank of this machine: {message}")
    return message
