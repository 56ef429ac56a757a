"""Large messages on their way to many members: compressed once, and sent to each as these bytes.

An epoch's table of all members goes to all of them, so its bytes grow with the square of their number. Names of hosts
and addresses are alike: compressed, they take a tenth. And the scheduler copies bytes to each member, instead of
building and serializing thousands of objects again for each. Pure.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict

from google.protobuf.message import DecodeError

from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb

#: Smaller messages are sent as they are.
LEAST_BYTES = 16 << 10
#: No message is larger once it is unpacked: a table of a million members is smaller.
MOST_BYTES = 256 << 20
#: Messages of which the bytes are kept: those that go to many members do so one after the other.
_KEPT = 8


class LargeMessages:
    """Packs large messages of the scheduler, each once.

    >>> messages, small = LargeMessages(), pb.SchedulerMessage(release=pb.Release(sequence=1))
    >>> messages.pack(small)
    b''
    """

    def __init__(self) -> None:
        # By identity; the message is kept so that no other one can have its identity.
        self._packed: OrderedDict[int, tuple[pb.SchedulerMessage, bytes]] = OrderedDict()

    def pack(self, message: pb.SchedulerMessage) -> bytes:
        """The bytes that ``unpack`` makes ``message`` of; empty if it is small. It must not change afterwards."""
        known = self._packed.get(id(message))
        if known is None:
            data = zlib.compress(message.SerializeToString(), 1) if message.ByteSize() >= LEAST_BYTES else b""
            known = self._packed[id(message)] = message, data
            if len(self._packed) > _KEPT:
                self._packed.popitem(last=False)
        return known[1]


def unpack(message: pb.SchedulerMessage, most_bytes: int = MOST_BYTES) -> pb.SchedulerMessage:
    """The message that was packed in ``message``, with its number and confirmation; ``message`` if none was.

    Raises ProtocolError for bytes that no correct scheduler sends.
    """
    if not message.packed:
        return message
    decompressor = zlib.decompressobj()
    try:
        data = decompressor.decompress(message.packed, most_bytes)
        unpacked = pb.SchedulerMessage.FromString(data) if decompressor.eof else pb.SchedulerMessage()
    except (zlib.error, DecodeError) as error:
        raise ProtocolError(f"a packed message of the scheduler is damaged: {error}") from None
    if unpacked.WhichOneof("body") is None or unpacked.packed:
        raise ProtocolError(f"a packed message of the scheduler, of {len(message.packed)} bytes, has no body")
    unpacked.number, unpacked.received = message.number, message.received
    return unpacked
