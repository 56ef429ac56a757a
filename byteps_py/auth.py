"""Proof that a peer is a member of the job: what is made from the cluster secret, and how it is checked. Any thread.

Without any secret (a service started by hand on loopback) every token is empty, and equal.
"""

from __future__ import annotations

import functools
import hashlib
import hmac

from byteps_py.settings import Settings

# A stranger who connects sees proofs, and can try secrets on them at home. Each try costs 16 MB for some 50 ms.
_SCRYPT_N, _SCRYPT_R = 1 << 14, 8
_SALT = b"byteps_py cluster secret"
KEY_BYTES = 32


@functools.lru_cache(maxsize=4)
def _stretch(secret: str) -> bytes:
    return hashlib.scrypt(secret.encode(), salt=_SALT, n=_SCRYPT_N, r=_SCRYPT_R, p=1, dklen=KEY_BYTES)


def membership_key(settings: Settings) -> bytes:
    """The key that all members of this job have, and nobody else; empty without a secret.

    The cluster secret is stretched, once in a process: scrypt (RFC 7914). ``local_secret`` is random and long.
    """
    return _stretch(settings.secret) if settings.secret else settings.local_secret.encode()


def token(settings: Settings, *parts: str) -> str:
    """What a member of ``settings.job`` shows, bound to ``parts`` (purpose, who)."""
    key = membership_key(settings)
    if not key:
        return ""
    message = "\0".join((parts[0], settings.job, *parts[1:])).encode(errors="surrogatepass")
    return hmac.new(key, message, hashlib.sha256).hexdigest()


def is_valid(shown: str, settings: Settings, *parts: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(shown.encode(errors="replace"), token(settings, *parts).encode())
