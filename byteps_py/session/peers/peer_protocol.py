"""The messages between ranks. Pure; any thread.

Every message is one packed record. The bytes of the payload follow the record of INLINE, and others those of MEMORY and
PLACED; a descriptor goes with that of SEGMENT.
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
    WAKE = 7  # the sender has published a step for which the receiver of this message sleeps (shared_slots.py)
    # RDMA, between machines (placed_payloads.py):
    MEMORY = 8  # what the receiver may read there follows, ``total`` bytes; none: the sender is without RDMA
    PLACED = 9  # a payload that the receiver is to read at address ``offset``; its digest of ``ready`` bytes follows
    PLACED_READ = 10  # what the receiver has placed under the number ``segment`` is read


class PeerMessage(NamedTuple):
    """The fields of a record.

    ``source``: the sender's rank. ``era``: how often all ranks have joined. ``stream``: its key. ``number``: of
    the payload in its stream, between this sender and this receiver. ``total``: bytes of the payload. ``ready``: bytes
    written so far. ``id``: the sender's number of the payload, for the acknowledgement; 0: none is needed. ``due``:
    bytes that the sender expects from the receiver in return; -1: it does not say; REFUSED: there is no payload because
    rank ``offset`` has joined.
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


_RECORD = struct.Struct("<HxxIIQQQQQQQq")
RECORD_BYTES = _RECORD.size
REFUSED = -2
pack = _RECORD.pack  # takes the fields in order; a function would cost too much on the hot path
_KINDS, _INLINE = frozenset(map(int, PeerMessageKind)), int(PeerMessageKind.INLINE)
_MEMORY, _PLACED = int(PeerMessageKind.MEMORY), int(PeerMessageKind.PLACED)


def unpack(data: memoryview, nbytes: int) -> PeerMessage:
    """The record at the beginning of ``data``, of a message of ``nbytes`` bytes. Raises ProtocolError."""
    if nbytes < RECORD_BYTES:
        raise ProtocolError(f"a message of {nbytes} bytes from a rank of this machine; records have {RECORD_BYTES}")
    message = unpack_from(data, 0)
    if nbytes != RECORD_BYTES + (message.total if message.kind == _INLINE else 0):
        raise ProtocolError(f"a malformed message of {nbytes} bytes from a rank of this machine: {message}")
    return message


def body_nbytes(message: PeerMessage) -> int:
    """How many bytes follow the record of a message from another machine."""
    if message.kind in (_INLINE, _MEMORY):
        return message.total
    return message.ready if message.kind == _PLACED else 0


def unpack_from(data: memoryview, at: int) -> PeerMessage:
    """The record at ``at``. Raises ProtocolError."""
    message = PeerMessage._make(_RECORD.unpack_from(data, at))
    is_whole = message.kind in (_INLINE, _MEMORY)
    is_wrong = message.ready > message.total or (is_whole and message.ready < message.total)
    if message.kind not in _KINDS or is_wrong:
        raise ProtocolError(f"a malformed message from another rank: {message}")
    return message
