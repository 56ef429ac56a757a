"""Texts for places in the network: a host, and a host with a port.

A *host* is a name, or a numeric address without brackets. An *address* is ``host:port``, with brackets around an
address of IPv6, whose colons would otherwise look like the one before the port. Pure; any thread.
"""

from __future__ import annotations

import ipaddress

from byteps_py.errors import ConfigurationError

_BRACKETS = "[]"


def bare_host(text: str) -> str:
    """``text`` without the brackets of an IPv6 address, which gets the one form that programs print. Two processes
    that compare hosts as texts then agree.

    >>> bare_host("[FD00:0:0::1]"), bare_host("10.0.0.1"), bare_host("gpu1"), bare_host("fe80::1%eth0")
    ('fd00::1', '10.0.0.1', 'gpu1', 'fe80::1%eth0')
    """
    host = text.strip(_BRACKETS) if text.startswith("[") else text
    return str(ipaddress.IPv6Address(host)) if is_ipv6(host) else text


def joined(host: str, port: int) -> str:
    """The address of ``port`` on ``host``.

    >>> joined("gpu1", 9000), joined("fd00::1", 9000)
    ('gpu1:9000', '[fd00::1]:9000')
    """
    return f"{bracketed(host)}:{port}"


def bracketed(host: str) -> str:
    """``host`` as it stands before a port, or in a URL.

    >>> bracketed("10.0.0.1"), bracketed("fd00::1")
    ('10.0.0.1', '[fd00::1]')
    """
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def place_of(address: str) -> tuple[str, int]:
    """Host and port of ``address``. Raises ValueError, also for an IPv6 address without brackets: it might have no
    port.

    >>> place_of("gpu1:9000"), place_of("[fd00::1]:9000")
    (('gpu1', 9000), ('fd00::1', 9000))
    """
    host, _, port = address.rpartition(":")
    if not host or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        raise ValueError(f"{address[:80]!r} is not HOST:PORT, or [HOST]:PORT with an address of IPv6")
    if not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
        raise ValueError(f"{address[:80]!r} has no port from 1 to 65535")
    return bare_host(host), int(port)


def place_given(option: str, address: str) -> tuple[str, int]:
    """``place_of``, of what a user gave ``option``. Raises ConfigurationError."""
    try:
        return place_of(address)
    except ValueError:
        raise ConfigurationError(
            f"{option}={address[:80]!r} is not HOST:PORT, or [HOST]:PORT with an address of IPv6"
        ) from None


def is_ipv6(host: str) -> bool:
    """True for a numeric address of IPv6, without brackets.

    >>> is_ipv6("::1"), is_ipv6("10.0.0.1"), is_ipv6("gpu1")
    (True, False, False)
    """
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def is_numeric(host: str) -> bool:
    """True for an address of IPv4 or IPv6.

    >>> is_numeric("10.0.0.1"), is_numeric("fd00::1"), is_numeric("eth0")
    (True, True, False)
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_link_local(host: str) -> bool:
    """True for an address that means another machine on each link: fe80::1, with or without an interface.

    >>> is_link_local("fe80::1%eth0"), is_link_local("fd00::1"), is_link_local("gpu1")
    (True, False, False)
    """
    return is_ipv6(host) and ipaddress.IPv6Address(host).is_link_local


def is_loopback(host: str) -> bool:
    """True if only processes of the same machine can reach ``host``.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("10.0.0.1"), is_loopback("::ffff:127.0.0.1")
    (True, True, False, True)
    """
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip(_BRACKETS))
    except ValueError:
        return host.startswith("127.")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
