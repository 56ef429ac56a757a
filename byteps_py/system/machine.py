"""Identifies this machine, gives the names and addresses under which others reach its processes, and says which user
listens at one of its ports.

Reads settings and asks the system; opens no connection that lasts. Any thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import socket
import struct
from fcntl import ioctl
from pathlib import Path

from byteps_py.config.settings import Settings
from byteps_py.config.tuning import LOOPBACK_MBIT
from byteps_py.errors import ConfigurationError

_SIOCGIFADDR = 0x8915


def machine_id(settings: Settings) -> str:
    """Equal in two processes exactly if they may share memory: boot id and network namespace, or BYTEPS_MACHINE_ID."""
    if settings.machine_id:
        return settings.machine_id
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"


def local_socket(settings: Settings, part: str) -> str:
    """The name of the local socket of this machine's CS (``part`` "cs") or SS ("ss") in this job."""
    if part == "cs" and settings.socket_name:
        return settings.socket_name
    seed = f"{os.getuid()}/{settings.job}/{machine_id(settings)}/{settings.worker_id if part == 'cs' else ''}"
    return f"byteps-{hashlib.blake2b(seed.encode(), digest_size=8).hexdigest()}-{part}"


def offered_host(settings: Settings) -> str:
    """The host name or address that this process offers to others.

    It is DMLC_NODE_HOST, else the address of DMLC_INTERFACE, else the address from which this machine reaches the
    scheduler. Raises ConfigurationError for an address beyond loopback without a cluster secret.
    """
    if settings.node_host:
        host = settings.node_host
    elif settings.interface:
        host = _interface_address(settings.interface)
    elif settings.scheduler_host:
        host = _source_address(settings.scheduler_host)
    else:
        host = "127.0.0.1"
    require_secret(host, settings)
    return host


def bindable_host(settings: Settings) -> str:
    """``offered_host`` as a host name or address, where that is the name of a network interface. Raises
    ConfigurationError."""
    host = offered_host(settings)
    if host in (name for _, name in socket.if_nameindex()):
        return _interface_address(host)
    return host.strip("[]")


def check_offered_host(settings: Settings) -> None:
    """Check the address before a GPU machine's services start, so that the launcher can report the error.

    Raises ConfigurationError that names the variable.
    """
    listens = settings.num_workers > 1 or settings.elastic
    if not listens and settings.link_mbit:
        return  # the services will not need the address
    host = offered_host(settings)
    if listens and host == settings.node_host and (why := _unusable(host)):
        raise ConfigurationError(
            f"DMLC_NODE_HOST={host} is not an address of this machine ({why}): set it to the address under which the "
            "other machines reach this one, or set DMLC_INTERFACE to its network interface instead"
        )


def _unusable(host: str) -> str:
    """Why no socket can listen at ``host``; empty if one can."""
    if host in (name for _, name in socket.if_nameindex()):
        return ""  # ZeroMQ accepts the name of an interface
    why = ""
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM):
            try:
                with socket.socket(family, kind) as sock:
                    sock.bind(address)
                return ""
            except OSError as error:
                why = error.strerror or str(error)
    except OSError as error:
        why = error.strerror or str(error)
    return why


def link_mbit(settings: Settings) -> float:
    """The rate of this machine's link in each direction, in Mbit/s; 0 if it is unknown and will be measured."""
    if settings.link_mbit:
        return settings.link_mbit
    return LOOPBACK_MBIT if is_loopback(offered_host(settings)) else 0.0


def require_secret(host: str, settings: Settings) -> None:
    """Raise ConfigurationError if other machines can reach ``host`` and there is no cluster secret."""
    if is_loopback(host) or settings.secret:
        return
    raise ConfigurationError(
        f"listening on {host} lets other machines connect; set BYTEPS_SECRET or BYTEPS_SECRET_FILE to the same "
        "value on every machine, or use 127.0.0.1 (DMLC_PS_ROOT_URI, DMLC_NODE_HOST)"
    )


def is_loopback(host: str) -> bool:
    """True if only processes of this machine can reach ``host``.

    >>> is_loopback("127.0.0.1"), is_loopback("10.0.0.1")
    (True, False)
    """
    return host in ("localhost", "::1") or host.startswith("127.")


def _interface_address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            known = ", ".join(n for _, n in socket.if_nameindex())
            raise ConfigurationError(
                f"DMLC_INTERFACE={name} has no IPv4 address ({error.strerror}); interfaces here: {known}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def interface_of(host: str) -> str:
    """The network interface with this IPv4 address or host name; empty if there is none, or if it is loopback."""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(host)
        for _, name in [] if is_loopback(address) else socket.if_nameindex():
            with contextlib.suppress(ConfigurationError):
                if _interface_address(name) == address:
                    return name
    return ""


def _source_address(target: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((target, 9))  # for a datagram socket, this chooses a route and sends nothing
        except OSError as error:
            raise ConfigurationError(f"DMLC_PS_ROOT_URI={target} can't be reached: {error}") from error
        return str(sock.getsockname()[0])


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
    return {owner for entry in found for owner, _ in _owners(str(entry[4][0]), int(port))} == {os.getuid()}


def process_at(host: str, port: int) -> str:
    """The process that listens at this numeric address of this machine, in words; empty if nothing can be found out.

    >>> with socket.create_server(("127.0.0.1", 0)) as server:
    ...     process_at("127.0.0.1", server.getsockname()[1]).startswith(f"process {os.getpid()} has it: ")
    True
    """
    try:
        owners = _owners(host, port)
    except (OSError, ValueError):
        return ""
    sockets = {f"socket:[{inode}]" for _, inode in owners}
    for process in Path("/proc").glob("[0-9]*") if owners else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if any(os.readlink(fd) in sockets for fd in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"process {process.name} has it: {command[:_SHOWN_COMMAND]}"
    users = sorted({uid for uid, _ in owners} - {os.getuid()})
    return f"a process of user {', '.join(map(str, users))} has it" if users else ""


_SHOWN_COMMAND = 100


def _owners(host: str, port: int) -> set[tuple[int, int]]:
    """(user id, inode) of the sockets that get the connections to ``host`` and ``port``."""
    wanted = _unmapped(ipaddress.ip_address(host))
    owners = set()
    for table in _TABLES:
        with contextlib.suppress(FileNotFoundError):  # a machine without IPv6
            for line in table.read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, uid, _, inode, *_ = line.split()
                own, _, own_port = local.partition(":")
                if state == _LISTENS and int(own_port, 16) == port:
                    here = _unmapped(_address(own))
                    if here == wanted or here.is_unspecified:
                        owners.add((int(uid), int(inode)))
    return owners


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The kernel prints words of 32 bits in the machine's order, which is little-endian here."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words))


def _unmapped(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address
