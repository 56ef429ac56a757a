"""The user that listens at a port of this machine, as the kernel says. Any thread; needs only the standard library."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from pathlib import Path

_LISTENS = "0A"
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def belongs_to_this_user(address: str) -> bool:
    """True if processes of this user listen at ``address``, ``host:port`` of this machine, and nobody else does.

    >>> with socket.create_server(("127.0.0.1", 0)) as server:
    ...     belongs_to_this_user(f"127.0.0.1:{server.getsockname()[1]}"), belongs_to_this_user("127.0.0.1:1")
    (True, False)
    """
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return False
    return {owner for entry in found for owner in _owners(str(entry[4][0]), int(port))} == {os.getuid()}


def _owners(host: str, port: int) -> set[int]:
    """The user ids of the sockets that get the connections to ``host`` and ``port``."""
    wanted = _unmapped(ipaddress.ip_address(host))
    owners = set()
    for table in _TABLES:
        with contextlib.suppress(FileNotFoundError):  # a machine without IPv6
            for line in table.read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, uid, *_ = line.split()
                own, _, own_port = local.partition(":")
                if state == _LISTENS and int(own_port, 16) == port:
                    here = _unmapped(_address(own))
                    if here == wanted or here.is_unspecified:
                        owners.add(int(uid))
    return owners


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The kernel prints words of 32 bits in the machine's order, which is little-endian here."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words))


def _unmapped(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address
