"""How the two ends of a new connection prove to each other that they know the cluster secret, and agree on keys. Pure.

    CS ──HELLO      protection, its fresh public key ────────────────────────────────────────────► listener
       ◄─CHALLENGE  a fresh nonce, the listener's public key, proof that the listener knows the secret ───
       ──PROOF      proof that the CS knows it ───────────────────────────────────────────────────►
       ◄═WELCOME    sealed, as is all that follows, each way under a key of this connection alone (seal.py) ═

A CS sends nothing else until it is welcome: an unauthenticated process may send only little
(unauthenticated_connections.py), and a busy listener reads the proof late.

Proofs are HMACs with a key made from the secret. They cover all messages of the handshake and what it binds: the job,
the listener's address, the machine that connects and its group of ranks (see listener.py), and the protection (so that
no attacker can lower it). An overheard handshake is of no use on another connection. The keys come from an exchange of
X25519 keys that live in memory only: an attacker that learns the secret later can't decrypt recorded messages. With a
local secret (loopback only, made by bpslaunch) the proofs are the same, but messages are not sealed. Without a secret
the proofs prove nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from byteps_py.config.settings import Settings
from byteps_py.dataplane.seal import (
    KEY_BYTES,
    Data,
    Digester,
    Protection,
    Seal,
    StreamSeal,
    new_digest_check,
    new_digester,
    new_seal,
    new_stream_seal,
)
from byteps_py.errors import ProtocolError
from byteps_py.security import auth
from byteps_py.wire.data_link import VERSION

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

_POINT_BYTES = 32
_NONCE_BYTES = 32
_PROOF_BYTES = 32
HELLO_BYTES = 1 + _POINT_BYTES
CHALLENGE_BYTES = _NONCE_BYTES + _POINT_BYTES + _PROOF_BYTES

WRONG = "its proof of membership is wrong: do job and secret agree?"


_LISTENER, _CALLER = b"listener", b"communication service"


def protection_of(settings: Settings) -> Protection:
    """The protection that every connection of this process must have."""
    if not settings.secret:
        return Protection.OPEN
    return Protection.ENCRYPTED if settings.encrypt else Protection.SIGNED


@lru_cache(maxsize=4)
def _proof_key(membership_key: bytes) -> bytes:
    return hmac.digest(membership_key, b"byteps_py data plane: proofs", "sha256")


def _derive(salt: bytes, material: bytes, what_for: bytes) -> bytes:
    """HKDF-SHA256, one block."""
    extracted = hmac.digest(salt, material, "sha256")
    return hmac.digest(extracted, b"byteps_py data plane: " + what_for + b"\x01", "sha256")[:KEY_BYTES]


def _digest_key(membership_key: bytes, listener_public: bytes) -> bytes:
    """The key of one listener's Digester. Each process has its own, because its public key is fresh."""
    return _derive(listener_public, _proof_key(membership_key), b"digests")


def payload_digests(settings: Settings, salt: bytes) -> tuple[Digester, Callable[[bytes, Data], bool]]:
    """Two functions: one makes digests of payloads that other members read by RDMA, and one checks them. ``salt``:
    fresh, of the process that makes them: its key is its own."""
    protection, key = protection_of(settings), b""
    if protection is not Protection.OPEN:
        key = _derive(salt, _proof_key(auth.membership_key(settings)), b"placed payloads")
    return new_digester(protection, key), new_digest_check(protection, key)


def bound_to(address: str, rail: int) -> str:
    """A text that both proofs cover beside the secret: a proof for one rail is worth nothing as another."""
    return f"{address} rail {rail}" if rail else address


class KeyPair:
    """A key pair for one exchange, or for all exchanges of one process. The private key is never stored or sent."""

    def __init__(self, protection: Protection) -> None:
        self._private: X25519PrivateKey | None = None
        if protection is Protection.OPEN:
            self.public = os.urandom(_POINT_BYTES)
            return
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def shared(self, other: bytes) -> bytes:
        """The shared secret with the other end's public key. Raises ProtocolError for an invalid key."""
        if self._private is None:
            return b""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError:
            raise ProtocolError("its public key is invalid") from None


@dataclass(frozen=True, repr=False)
class _Transcript:
    """Everything that the proofs cover. If it differs between the ends, the proofs are wrong."""

    membership_key: bytes  # auth.py
    job: str
    address: str
    machine: int
    group: int
    protection: Protection
    public: bytes  # of the CS
    nonce: bytes
    listener_public: bytes

    @cached_property
    def _bytes(self) -> bytes:
        texts = (self.job.encode(), self.address.encode())
        parts = [len(text).to_bytes(4, "little") + text for text in texts]
        whose = b"".join(number.to_bytes(4, "little") for number in (self.machine, self.group))
        return b"".join(
            (*parts, whose, bytes((VERSION, self.protection)), self.public, self.nonce, self.listener_public)
        )

    def proof(self, of_whom: bytes) -> bytes:
        return hmac.digest(_proof_key(self.membership_key), of_whom + self._bytes, "sha256")

    def key(self, shared: bytes, direction: bytes) -> bytes:
        return _derive(hashlib.sha256(self._bytes).digest(), shared + _proof_key(self.membership_key), direction)

    def stream_seals(self, shared: bytes) -> tuple[StreamSeal, StreamSeal]:
        """The seals of both directions of a byte stream: (caller to listener, listener to caller)."""
        up, down = (new_stream_seal(self.protection, self.key(shared, b"stream " + way)) for way in (b"up", b"down"))
        return up, down

    def seals(self, shared: bytes) -> tuple[Seal, Seal]:
        """The seals of both directions: (CS to listener, listener to CS)."""
        digest_key = _digest_key(self.membership_key, self.listener_public)
        up, down = (new_seal(self.protection, self.key(shared, way), digest_key) for way in (b"up", b"down"))
        return up, down


class CallerHandshake:
    """The CS's end. One per connection. ``machine``: its index in ``group``."""

    def __init__(self, settings: Settings, machine: int, address: str, group: int = 0) -> None:
        self._settings, self._machine, self._group, self._address = settings, machine, group, address
        self._protection = protection_of(settings)
        self._keys = KeyPair(self._protection)

    @property
    def hello(self) -> bytes:
        """The payload of the HELLO."""
        return bytes((self._protection,)) + self._keys.public

    def answer(self, challenge: bytes) -> tuple[bytes, Seal, Seal]:
        """The PROOF to send, and the seals: for sending, for receiving. Raises ProtocolError if the listener does not
        know the secret."""
        said, shared = self._hear(challenge)
        return said.proof(_CALLER), *said.seals(shared)

    def answer_for_stream(self, challenge: bytes) -> tuple[bytes, StreamSeal, StreamSeal]:
        """``answer`` for a connection that carries a byte stream."""
        said, shared = self._hear(challenge)
        return said.proof(_CALLER), *said.stream_seals(shared)

    def _hear(self, challenge: bytes) -> tuple[_Transcript, bytes]:
        if len(challenge) != CHALLENGE_BYTES:
            raise ProtocolError(f"a CHALLENGE has {CHALLENGE_BYTES} bytes, got {len(challenge)}")
        nonce, public = challenge[:_NONCE_BYTES], challenge[_NONCE_BYTES:-_PROOF_BYTES]
        settings = self._settings
        said = _Transcript(
            auth.membership_key(settings), settings.job, self._address, self._machine, self._group, self._protection,
            self._keys.public, nonce, public,
        )  # fmt: skip
        if not hmac.compare_digest(challenge[-_PROOF_BYTES:], said.proof(_LISTENER)):
            raise ProtocolError(WRONG)
        return said, self._keys.shared(public)


class ListenerHandshake:
    """The listener's end of all connections."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.protection = protection_of(settings)
        self._keys = KeyPair(self.protection)
        self._membership_key = auth.membership_key(settings)
        self.digest: Digester = new_digester(self.protection, _digest_key(self._membership_key, self._keys.public))

    def challenge(self, hello: bytes, machine: int, address: str, group: int = 0) -> tuple[bytes, Challenge]:
        """The CHALLENGE to send, and the object to keep until its answer arrives. ``address``: the listener's, as
        others know it.

        Raises ProtocolError if the HELLO is malformed, or has another protection.
        """
        if len(hello) != HELLO_BYTES:
            raise ProtocolError(f"a HELLO has a payload of {HELLO_BYTES} bytes, got {len(hello)}")
        if hello[0] != self.protection:
            theirs = Protection(hello[0]).name.lower() if hello[0] in list(Protection) else "unknown"
            raise ProtocolError(
                f"its messages would be {theirs}, here they are {self.protection.name.lower()}: set BYTEPS_SECRET "
                "and BYTEPS_ENCRYPT to the same values everywhere"
            )
        nonce = os.urandom(_NONCE_BYTES)
        said = _Transcript(
            self._membership_key, self._settings.job, address, machine, group, self.protection, hello[1:], nonce,
            self._keys.public,
        )  # fmt: skip
        return nonce + self._keys.public + said.proof(_LISTENER), Challenge(said, self._keys)


class Challenge:
    """A connection that has been sent a CHALLENGE. ``machine``, ``group``: what its HELLO claims."""

    def __init__(self, said: _Transcript, keys: KeyPair) -> None:
        self._said, self._keys = said, keys
        self.machine, self.group = said.machine, said.group

    def accept(self, proof: bytes) -> tuple[Seal, Seal]:
        """The seals: for receiving, for sending. Raises ProtocolError if the proof is wrong."""
        return self._said.seals(self._check(proof))

    def accept_for_stream(self, proof: bytes) -> tuple[StreamSeal, StreamSeal]:
        """``accept`` for a connection that carries a byte stream."""
        return self._said.stream_seals(self._check(proof))

    def _check(self, proof: bytes) -> bytes:
        if not hmac.compare_digest(proof, self._said.proof(_CALLER)):
            raise ProtocolError(WRONG)
        return self._keys.shared(self._said.public)
