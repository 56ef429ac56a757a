"""How messages of one connection are protected on their way: so that none is changed, repeated, left out or made up.

Pure; one thread per connection. Each end numbers what it sends, from 0, and the number is part of the proof, though
it does not travel: a repeated or missing message can't be opened. What can't be opened is counted all the same, so one
damaged message does not spoil the next.

    OPEN     no secret (loopback only): a checksum (xxh3) finds what memory, cards and switches change
    SIGNED   AES-GCM authenticates header and payload, and hides the header; the payload travels in the clear
    ENCRYPTED  AES-GCM hides the payload, too

Measured on one core: 64, 22 and 11 GB/s for 4 MB; 0.3 to 2.3 µs for a message of 1 KB.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import xxhash
import zmq

from byteps_py.errors import ProtocolError
from byteps_py.wire import HEADER_BYTES

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Data = bytes | bytearray | memoryview

KEY_BYTES = 16
_TAG_BYTES = 16
_CHECKSUM_BYTES = 8
_FOLLOWS = b"a payload follows"  # so that nobody can leave it out
_LARGE_BYTES = 16 << 10  # from here on a buffer of our own is cheaper than one that the library makes


class Protection(enum.IntEnum):
    """The values are wire codes and never change."""

    OPEN = 0
    SIGNED = 1
    ENCRYPTED = 2


class DamagedError(ProtocolError):
    """A message can't be opened. ``number``: which one of its connection, in this direction."""

    def __init__(self, number: int) -> None:
        super().__init__(f"message {number} of its connection came damaged")
        self.number = number


class Seal(ABC):
    """One direction of one connection: only ``seal`` is called at one end, only ``open`` at the other."""

    def __init__(self) -> None:
        self.number = 0  # of the next message

    @abstractmethod
    def seal(self, header: bytes, payload: Data) -> tuple[bytes, Data]:
        """The two frames to send. The second is ``payload`` itself unless it is encrypted."""

    @abstractmethod
    def open(self, header: bytes, payload: zmq.Frame) -> tuple[bytes, zmq.Frame]:
        """What was sealed. Raises DamagedError."""


class _Open(Seal):
    def seal(self, header: bytes, payload: Data) -> tuple[bytes, Data]:
        number = self.number
        self.number = number + 1
        return header + self._checksum(header, payload, number), payload

    def open(self, header: bytes, payload: zmq.Frame) -> tuple[bytes, zmq.Frame]:
        number = self.number
        self.number = number + 1
        plain = header[:HEADER_BYTES]
        if header[HEADER_BYTES:] != self._checksum(plain, payload.buffer, number):
            raise DamagedError(number)
        return plain, payload

    @staticmethod
    def _checksum(header: bytes, payload: Data, number: int) -> bytes:
        of_payload: int = xxhash.xxh3_64_intdigest(payload, seed=number)
        whole: bytes = xxhash.xxh3_64_digest(header, seed=of_payload)
        return whole


class _Signed(Seal):
    def __init__(self, cipher: AESGCM, invalid: type[Exception]) -> None:
        super().__init__()
        self._cipher = cipher
        self._invalid = invalid  # what the cipher raises

    def _nonce(self) -> bytes:
        """Never the same twice with one key."""
        number = self.number
        self.number = number + 1
        return number.to_bytes(12, "little")

    def seal(self, header: bytes, payload: Data) -> tuple[bytes, Data]:
        return self._cipher.encrypt(self._nonce(), header, payload), payload

    def open(self, header: bytes, payload: zmq.Frame) -> tuple[bytes, zmq.Frame]:
        try:
            return self._cipher.decrypt(self._nonce(), header, payload.buffer), payload
        except self._invalid:
            raise DamagedError(self.number - 1) from None


class _Encrypted(_Signed):
    def seal(self, header: bytes, payload: Data) -> tuple[bytes, Data]:
        nonce = self._nonce()
        size = len(payload)
        sealed = self._cipher.encrypt(nonce, header, _FOLLOWS if size else None)
        if not size:
            return sealed, payload
        if size < _LARGE_BYTES:
            return sealed, self._cipher.encrypt(_of_payload(nonce), bytes(payload), header)
        hidden = np.empty(size + _TAG_BYTES, np.uint8)  # not cleared first, as a bytearray would be
        self._cipher.encrypt_into(_of_payload(nonce), payload, header, hidden.data)
        return sealed, hidden.data

    def open(self, header: bytes, payload: zmq.Frame) -> tuple[bytes, zmq.Frame]:
        nonce = self._nonce()
        size = len(payload) - _TAG_BYTES
        try:
            plain = self._cipher.decrypt(nonce, header, _FOLLOWS if len(payload) else None)
            if not len(payload):
                return plain, payload
            if size < _LARGE_BYTES:
                return plain, zmq.Frame(self._cipher.decrypt(_of_payload(nonce), payload.bytes, plain))
            shown = np.empty(size, np.uint8)
            self._cipher.decrypt_into(_of_payload(nonce), payload.buffer, plain, shown.data)
        except self._invalid:
            raise DamagedError(self.number - 1) from None
        return plain, zmq.Frame(shown.data)


def _of_payload(nonce: bytes) -> bytes:
    return nonce[:-1] + b"\x01"


def new_seal(protection: Protection, key: bytes) -> Seal:
    """For one direction; ``key``: its own, of KEY_BYTES."""
    if protection is Protection.OPEN:
        return _Open()
    # Loopback jobs do without the library.
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    kind = _Signed if protection is Protection.SIGNED else _Encrypted
    return kind(AESGCM(key), InvalidTag)
