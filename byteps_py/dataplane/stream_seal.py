"""Protection of one direction of one connection that carries a stream of frames. Pure; one thread at a time.

    frame  := header (28 bytes) | body | tag
    header := length of the body, the frame's number, number of the frame that the sender expects next, kind, checksum

The header has a checksum of its own, so that a damaged length is found before anything is read by it. The tag covers
header and body.

    OPEN       no secret (loopback only): a checksum (xxh3) finds what memory, network cards and switches damage
    SIGNED     AES-GCM authenticates header and body; both travel in the clear
    ENCRYPTED  AES-GCM authenticates the header and encrypts the body

With a key, each frame of a connection is sealed with its position on it, which is not sent: a frame that is repeated,
changed or left out can't be opened.
"""

from __future__ import annotations

import enum
import hmac
import struct
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from byteps_py.dataplane.seal import Data, Protection
from byteps_py.errors import ProtocolError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

#: The most bytes in the body of a frame.
FRAME_BYTES = 256 << 10
_FIELDS = struct.Struct("<IQQI")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECK.size
_NONCE_BYTES = 12


class StreamFrameKind(enum.IntEnum):
    """The kind of a frame. Only DATA has a body and uses up a number."""

    DATA = 0
    REPORT = 1  # its header says which frame is expected next
    PING = 2  # the other end is to send something, a REPORT at least
    BYE = 3  # the other end closes the stream: nothing follows


class FrameHeader(NamedTuple):
    """``nbytes``: of the body. ``number``: of this frame, or the next one. ``expected``: the number of the frame that
    the sender of this one expects next: it has got all before."""

    nbytes: int
    number: int
    expected: int
    kind: int


class DamagedFrameError(ProtocolError):
    """A frame is not what the other end has sealed as the next one."""

    def __init__(self) -> None:
        super().__init__("a frame came damaged")


class StreamSeal(ABC):
    """Only ``seal`` is called at one end, only ``open`` at the other. ``tag_bytes``: of the tag."""

    tag_bytes: int
    #: The body travels as it is, and may be received where it belongs before it is opened.
    is_readable = True

    def seal(self, header: FrameHeader, body: Data) -> tuple[bytes, Data, Data]:
        """The three parts of a frame. The second one is ``body`` itself unless it is encrypted."""
        fields = _FIELDS.pack(*header)
        packed = fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields) & 0xFFFFFFFF)
        return packed, *self._seal(packed, body)

    @staticmethod
    def header_of(data: Data, at: int = 0) -> FrameHeader:
        """The header at ``at`` of ``data``. Raises DamagedFrameError."""
        end = at + _FIELDS.size
        check = xxhash.xxh3_64_intdigest(memoryview(data)[at:end]) & 0xFFFFFFFF
        header = FrameHeader._make(_FIELDS.unpack_from(data, at))
        if _CHECK.unpack_from(data, end)[0] != check or header.nbytes > FRAME_BYTES:
            raise DamagedFrameError
        return header

    @abstractmethod
    def _seal(self, packed: bytes, body: Data) -> tuple[Data, Data]:
        """The body as it is sent, and the tag."""

    @abstractmethod
    def open(self, packed: bytes, body: memoryview, tag: bytes) -> Data:
        """The body that was sealed, perhaps ``body`` itself. ``packed``: the header. Raises DamagedFrameError."""


class _OpenStream(StreamSeal):
    tag_bytes = 8

    def _seal(self, packed: bytes, body: Data) -> tuple[Data, Data]:
        return body, xxhash.xxh3_64_digest(body, seed=_CHECK.unpack_from(packed, _FIELDS.size)[0])

    def open(self, packed: bytes, body: memoryview, tag: bytes) -> Data:
        if self._seal(packed, body)[1] != tag:
            raise DamagedFrameError
        return body


class _SignedStream(StreamSeal):
    tag_bytes = 16

    def __init__(self, cipher: AESGCM, invalid: type[Exception]) -> None:
        self._cipher = cipher
        self._invalid = invalid  # the exception of the cipher
        self._position = 0

    def _nonce(self) -> bytes:
        """Never the same twice with one key."""
        position = self._position
        self._position = position + 1
        return position.to_bytes(_NONCE_BYTES, "little")

    def _seal(self, packed: bytes, body: Data) -> tuple[Data, Data]:
        return body, self._cipher.encrypt(self._nonce(), packed, body)[-self.tag_bytes :]

    def open(self, packed: bytes, body: memoryview, tag: bytes) -> Data:
        if not hmac.compare_digest(self._seal(packed, body)[1], tag):
            raise DamagedFrameError
        return body


class _EncryptedStream(_SignedStream):
    is_readable = False

    def _seal(self, packed: bytes, body: Data) -> tuple[Data, Data]:
        sealed = memoryview(self._cipher.encrypt(self._nonce(), body, packed))
        return sealed[: -self.tag_bytes], sealed[-self.tag_bytes :]

    def open(self, packed: bytes, body: memoryview, tag: bytes) -> Data:
        try:
            return self._cipher.decrypt(self._nonce(), bytes(body) + tag, packed)
        except self._invalid:
            raise DamagedFrameError from None


def new_stream_seal(protection: Protection, key: bytes) -> StreamSeal:
    """The seal of one direction. ``key``: of this direction of this connection alone, and for nothing else."""
    if protection is Protection.OPEN:
        return _OpenStream()
    # Imported here: jobs on loopback do not need the library.
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return (_SignedStream if protection is Protection.SIGNED else _EncryptedStream)(AESGCM(key), InvalidTag)
