"""Proof that a peer is a member of the job: the key and the tokens that are derived from the cluster secret.

Without any secret (a service started by hand on loopback) every token is empty, so all tokens are equal. Any thread.
"""

from __future__ import annotations

import functools
import hashlib
import hmac

from byteps_py.config.settings import Settings

# A stranger that connects sees proofs, and can guess secrets offline. Each guess costs 16 MB for some 50 ms, and it is
# about one job's secret only: the job's name is in the salt, so there can be no table of guesses for all jobs.
_SCRYPT_N, _SCRYPT_R = 1 << 14, 8
KEY_BYTES = 32


@functools.lru_cache(maxsize=4)
def _stretch(secret: str, job: str) -> bytes:
    salt = b"byteps_py cluster secret\0" + job.encode(errors="surrogatepass")
    return hashlib.scrypt(secret.encode(), salt=salt, n=_SCRYPT_N, r=_SCRYPT_R, p=1, dklen=KEY_BYTES)


def membership_key(settings: Settings) -> bytes:
    """The key that only members of this job have; empty without a secret.

    The cluster secret goes through scrypt (RFC 7914), once per process, with the job's name as the salt.
    ``local_secret`` is random and long, and is used as it is.
    """
    return _stretch(settings.secret, settings.job) if settings.secret else settings.local_secret.encode()


def token(settings: Settings, *parts: str) -> str:
    """The token, in hexadecimal, that a member of ``settings.job`` shows. It is valid for ``parts`` only: the purpose,
    and the identity of the member. Empty without a secret."""
    key = membership_key(settings)
    if not key:
        return ""
    message = "\0".join((parts[0], settings.job, *parts[1:])).encode(errors="surrogatepass")
    return hmac.new(key, message, hashlib.sha256).hexdigest()


def is_valid(shown: str, settings: Settings, *parts: str) -> bool:
    """True if ``shown`` is ``token(settings, *parts)``. Takes the same time for any wrong token.

    >>> settings = Settings(secret="a secret of 16 bytes or more")
    >>> is_valid(token(settings, "worker", "0"), settings, "worker", "0")
    True
    >>> is_valid(token(settings, "worker", "0"), settings, "worker", "1")
    False
    """
    return hmac.compare_digest(shown.encode(errors="replace"), token(settings, *parts).encode())
