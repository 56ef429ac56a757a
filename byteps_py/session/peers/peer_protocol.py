"""The messages between ranks of one machine. Pure; any thread.

Every message is one packed record. The bytes of the payload follow the record of INLINE; a descriptor goes with that of
SEGMENT.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from byteps_py.errors import ProtocolError


class PeerMessageKind(enum.IntEnum):
    """The first field of a message."""

    INLINE = 1  # a whole payload
    SHARED = 2  # a payload lies in the sender's memory (``segment``, ``offset``): its first ``ready`` bytes so far
    MORE = 3  # ``ready`` bytes of payload ``id`` are written by now
    TAKEN = 4  # payload ``id``, sent by the receiver of this message, is not needed any more
    SEGMENT = 5  # memory of the sender: its number (``segment``), its size (``total``), and its descriptor
    JOINED = 6  # the sender has no more data: this is its last message of this era
    WAKE = 7  # the sender has published a step for which the receiver of this message sleeps (ring.py)


class PeerMessage(NamedTuple):
    """The fields of a record.

    ``source``: the sender's local rank. ``era``: how often all ranks have joined. ``stream``: its key. ``number``: of
    the payload in its stream, between this sender and this receiver. ``total``: bytes of the payload. ``ready``: bytes
    written so far. ``id``: the sender's number of the payload, for the acknowledgement; 0: none is needed. ``due``:
    bytes that the sender expects from the receiver in return; -1: it does not say; REFUSED: there is no payload because
    the local rank ``offset`` has joined.
    """

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
pack = _RECORD.pack  # takes the fields in order; a function would cost too much on the hot path
_KINDS = frozenset(map(int, PeerMessageKind))


def unpack(data: memoryview, nbytes: int) -> PeerMessage:
    """The record at the beginning of ``data``, of a message of ``nbytes`` bytes. Raises ProtocolError."""
    if nbytes < RECORD_BYTES:
        raise ProtocolError(f"a message of {nbytes} bytes from a rank of this machine; records have {RECORD_BYTES}")
    message = PeerMessage._make(_RECORD.unpack_from(data))
    is_inline = message.kind == PeerMessageKind.INLINE
    extra = message.total if is_inline else 0
    is_wrong = message.ready > message.total or (is_inline and message.ready < message.total)
    if message.kind not in _KINDS or nbytes != RECORD_BYTES + extra or is_wrong:
        raise ProtocolError(f"a malformed message of {nbytes} bytes from a rank of this machine: {message}")
    return message
