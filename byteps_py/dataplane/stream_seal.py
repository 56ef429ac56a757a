"""Protection of one direction of a byte stream, frame by frame. Pure; one thread at a time.

    frame := length of the body (4 bytes) | body | tag (16 bytes)

AES-GCM authenticates the length and the body of each frame, and its number, which is not sent: a frame that is
repeated, changed or left out can't be opened. SIGNED: the body travels in the clear. ENCRYPTED: it is encrypted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from byteps_py.dataplane.seal import Protection
from byteps_py.errors import ProtocolError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

#: The most bytes in the body of a frame.
FRAME_BYTES = 256 << 10
_LENGTH = struct.Struct("<I")
LENGTH_BYTES, TAG_BYTES = _LENGTH.size, 16
_NONCE_BYTES = 12


class StreamSeal:
    """``key``: of this direction of this connection alone, and for nothing else."""

    def __init__(self, protection: Protection, key: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher: AESGCM = AESGCM(key)
        self._invalid = InvalidTag
        self._encrypts = protection is Protection.ENCRYPTED
        self._number = 0

    def seal(self, data: memoryview) -> Iterator[bytes | memoryview]:
        """The parts of frames, in order, that carry ``data``. A part may be a view of ``data``."""
        for first in range(0, len(data), FRAME_BYTES):
            body = data[first : first + FRAME_BYTES]
            length = _LENGTH.pack(len(body))
            if self._encrypts:
                yield length
                yield self._cipher.encrypt(self._nonce(), body, length)
            else:
                # The length is part of the nonce, so that the body can be authenticated where it is.
                yield length
                yield body
                yield self._cipher.encrypt(self._nonce(len(body)), b"", body)

    @staticmethod
    def length_of(data: memoryview) -> int:
        """The length of the frame that begins with ``data``, all parts included. Raises ProtocolError."""
        (nbytes,) = _LENGTH.unpack_from(data)
        if nbytes > FRAME_BYTES:
            raise ProtocolError(f"a frame of {nbytes} bytes; at most {FRAME_BYTES} are allowed")
        return LENGTH_BYTES + int(nbytes) + TAG_BYTES

    def open(self, frame: memoryview) -> bytes | memoryview:
        """The body of a whole frame, perhaps a view of it. Raises ProtocolError if it was not sealed at the other end
        as the next one."""
        body, tag = frame[LENGTH_BYTES:-TAG_BYTES], frame[-TAG_BYTES:]
        try:
            if self._encrypts:
                return self._cipher.decrypt(self._nonce(), frame[LENGTH_BYTES:], frame[:LENGTH_BYTES])
            self._cipher.decrypt(self._nonce(len(body)), tag, body)
        except self._invalid:
            raise ProtocolError(f"frame {self._number - 1} of its connection came damaged") from None
        return body

    def _nonce(self, nbytes: int = 0) -> bytes:
        """Never the same twice with one key."""
        number = self._number
        self._number = number + 1
        return number.to_bytes(_NONCE_BYTES - LENGTH_BYTES, "little") + _LENGTH.pack(nbytes)


def new_stream_seal(protection: Protection, key: bytes) -> StreamSeal | None:
    """The seal of one direction; None without protection (loopback only)."""
    return None if protection is Protection.OPEN else StreamSeal(protection, key)
