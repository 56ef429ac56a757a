"""The control plane's certificates, derived from the cluster secret: a process that knows the secret is a member.

The secret determines the key of a certificate authority, and every process issues a certificate for a new key of its
own. Both ends of a connection present and check certificates (mutual TLS). Nothing is written to disk. Any thread.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

#: The name in every certificate: certificates prove membership, not addresses.
SERVER_NAME = "byteps"
_CURVE = ec.SECP256R1()
_CURVE_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
# Clocks may be off by years, so certificates do not expire. A new secret makes the old certificates worthless.
_VALID_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_VALID_TO = datetime.datetime(2999, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """Certificates in PEM format: the authority's certificate, and this process's certificate and private key."""

    authority: bytes
    certificate: bytes
    private_key: bytes


def credentials(key: bytes) -> Credentials:
    """New credentials for a member of the cluster whose ``auth.membership_key`` is ``key``."""
    seed = HKDF(hashes.SHA256(), 48, salt=None, info=b"byteps_py control plane authority").derive(key)
    authority_key = ec.derive_private_key(int.from_bytes(seed) % (_CURVE_ORDER - 1) + 1, _CURVE)
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "byteps cluster")])
    root = _builder(authority, authority, authority_key.public_key(), is_authority=True)
    own_key = ec.generate_private_key(_CURVE)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    leaf = _builder(subject, authority, own_key.public_key(), is_authority=False).add_extension(
        x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False
    )
    return Credentials(
        root.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
        leaf.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
        own_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, is_authority: bool
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_VALID_FROM)
        .not_valid_after(_VALID_TO)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
