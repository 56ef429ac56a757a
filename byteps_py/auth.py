"""Proof that a peer knows the cluster secret. Pure; any thread.

Without a secret (loopback only) every token is empty, and equal.
"""

from __future__ import annotations

import hashlib
import hmac


def token(secret: str, *parts: str) -> str:
    """What a member shows to prove that it knows ``secret``, bound to ``parts`` (purpose, job, who)."""
    if not secret:
        return ""
    message = "\0".join(parts).encode()
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


def is_valid(shown: str, secret: str, *parts: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(shown.encode(errors="replace"), token(secret, *parts).encode())
