"""Identifies this machine, gives the names and addresses under which others reach its processes, and says which user
listens at one of its ports.

Reads settings and asks the system; opens no connection that lasts. Any thread.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ipaddress
import os
import socket
from pathlib import Path

from byteps_py.config.addresses import bare_host, is_ipv6, is_link_local, is_loopback, is_numeric, place_of
from byteps_py.config.settings import Settings
from byteps_py.config.tuning import LOOPBACK_MBIT
from byteps_py.config.variables import MOST_RAILS
from byteps_py.errors import ConfigurationError
from byteps_py.system import network_interfaces
from byteps_py.system.network_interfaces import NetworkCards

#: Each of these says which address a process offers to others.
ADDRESS_VARIABLES = ("DMLC_NODE_HOST", "DMLC_INTERFACE", "BYTEPS_INTERFACES")


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

    It is DMLC_NODE_HOST, else the address of DMLC_INTERFACE, else that of the first one of BYTEPS_INTERFACES, else the
    address from which this machine reaches the scheduler. Raises ConfigurationError for an address beyond loopback
    without a cluster secret, and for one that means another machine on each link.
    """
    if settings.node_host:
        host = settings.node_host
    elif settings.interface:
        host = interface_address(settings.interface, "DMLC_INTERFACE", settings)
    elif settings.interfaces:
        host = _listed_hosts(settings)[0]
    elif settings.scheduler_host:
        host = _source_address(settings.scheduler_host)
    else:
        host = "127.0.0.1"
    require_routable(host, "DMLC_NODE_HOST" if settings.node_host else "DMLC_PS_ROOT_URI")
    require_secret(host, settings)
    return host


def bindable_host(settings: Settings) -> str:
    """``offered_host`` as a host name or address, where that is the name of a network interface. Raises
    ConfigurationError."""
    host = offered_host(settings)
    return interface_address(host, "DMLC_NODE_HOST", settings) if host in network_interfaces.names() else host


def rails(settings: Settings) -> tuple[str, ...]:
    """The addresses of the interfaces that carry tensors between machines at the same time, the offered one first;
    empty if BYTEPS_INTERFACES names none. Raises ConfigurationError. What they were at first they are for this process:
    one that loses its address meanwhile must not end the job."""
    return _rails(settings) if settings.interfaces else ()


def network_cards(settings: Settings) -> NetworkCards:
    """``rails``, with their networks."""
    return _network_cards(rails(settings))


@functools.lru_cache(64)
def _network_cards(hosts: tuple[str, ...]) -> NetworkCards:
    networks = ("" if is_loopback(host) else network_interfaces.network_of(host) for host in hosts)
    return NetworkCards(hosts, tuple(networks))


@functools.lru_cache(64)
def _rails(settings: Settings) -> tuple[str, ...]:
    listed, first = _listed_hosts(settings), resolved(bindable_host(settings))
    if first not in listed:
        variable = "DMLC_NODE_HOST" if settings.node_host else "DMLC_INTERFACE"
        raise ConfigurationError(
            f"{variable} gives this process the address {first}, which none of the interfaces in BYTEPS_INTERFACES="
            f"{settings.interfaces} has ({', '.join(listed)}): name the interface of that address there as well, or "
            f"unset {variable}"
        )
    for host in listed:
        require_routable(host, "BYTEPS_INTERFACES")
        require_secret(host, settings)
    return (first, *(host for host in listed if host != first))


def _listed_hosts(settings: Settings) -> list[str]:
    """An address of each interface that BYTEPS_INTERFACES names, in that order. Raises ConfigurationError."""
    found: dict[str, None] = {}
    known = {name: network_interfaces.addresses_of(name) for name in network_interfaces.names()}
    entries = network_interfaces.chosen(settings.interfaces, known)
    if not entries:
        raise ConfigurationError(
            f"BYTEPS_INTERFACES={settings.interfaces} leaves no interface that has an address; those here: "
            f"{', '.join(known)}"
        )
    for entry in entries:
        host = bare_host(entry)
        if not is_numeric(host):
            host = interface_address(entry, "BYTEPS_INTERFACES", settings)
        elif why := _unusable(host):
            raise ConfigurationError(
                f"BYTEPS_INTERFACES={settings.interfaces}: {host} is not an address of this machine ({why})"
            )
        found[host] = None
    if len(found) > MOST_RAILS:
        raise ConfigurationError(
            f"BYTEPS_INTERFACES={settings.interfaces} means {len(found)} interfaces here; at most {MOST_RAILS} are used"
        )
    return list(found)


def check_offered_host(settings: Settings) -> None:
    """Check the address before a GPU machine's services start, so that the launcher can report the error.

    Raises ConfigurationError that names the variable.
    """
    listens = settings.num_workers > 1 or settings.elastic
    if not listens and settings.link_mbit:
        return  # the services will not need the address
    host = offered_host(settings)
    rails(settings)
    if listens and host == settings.node_host and (why := _unusable(host)):
        raise ConfigurationError(
            f"DMLC_NODE_HOST={host} is not an address of this machine ({why}): set it to the address under which the "
            "other machines reach this one, or set DMLC_INTERFACE to its network interface instead"
        )


def _unusable(host: str) -> str:
    """Why no socket can listen at ``host``; empty if one can."""
    if host in network_interfaces.names():
        return ""
    why = ""
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
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


def require_routable(host: str, variable: str) -> None:
    """Raise ConfigurationError for an address that means another machine on each link; ``variable`` has led to it."""
    if is_link_local(host):
        raise ConfigurationError(
            f"{variable} leads to the link-local address {host}, which means another machine on each link, so that the "
            "machines of a job can't tell it to each other: give their interfaces addresses of a prefix of their own "
            "(fd00::/8, say), and use these"
        )


def interface_address(name: str, variable: str, settings: Settings) -> str:
    """The address of the interface ``name``: of IPv6 if the scheduler's is, else of IPv4 if it has one. Raises
    ConfigurationError that names ``variable``."""
    known = network_interfaces.names()
    if name not in known:
        raise ConfigurationError(f"{variable}={name} is no interface of this machine; those here: {', '.join(known)}")
    found = network_interfaces.addresses_of(name)
    if not found:
        raise ConfigurationError(
            f"{variable}={name} has no address that other machines can reach: give it one, of IPv4 or of IPv6 (a "
            f"link-local one, fe80::, is none); interfaces here: {', '.join(known)}"
        )
    wants_v6 = bool(settings.scheduler_host) and is_ipv6(resolved(settings.scheduler_host))
    return next((host for host in found if is_ipv6(host) == wants_v6), found[0])


def resolved(host: str) -> str:
    """The numeric address of ``host``, of IPv4 if it has one; ``host`` itself if nothing is known about it."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return host
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def interface_of(host: str) -> str:
    """The network interface with this address or host name; empty if there is none, or if it is loopback."""
    address = resolved(host)
    return "" if is_loopback(address) else network_interfaces.interface_of(address)


def _source_address(target: str) -> str:
    """The address from which this machine reaches ``target``, by IPv4 if it can."""
    try:
        found = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigurationError(f"DMLC_PS_ROOT_URI={target} can't be reached: {error}") from error
    why: OSError | None = None
    for family, kind, _, _, address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        try:
            with socket.socket(family, kind) as sock:
                sock.connect(address)  # for a datagram socket, this chooses a route and sends nothing
                return bare_host(str(sock.getsockname()[0]))
        except OSError as error:
            why = why or error
    raise ConfigurationError(f"DMLC_PS_ROOT_URI={target} can't be reached: {why}") from why


_LISTENS = "0A"
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def belongs_to_this_user(address: str) -> bool:
    """True if processes of this user listen at ``address``, ``host:port`` of this machine, and nobody else does.

    >>> with socket.create_server(("127.0.0.1", 0)) as server:
    ...     belongs_to_this_user(f"127.0.0.1:{server.getsockname()[1]}"), belongs_to_this_user("127.0.0.1:1")
    (True, False)
    """
    try:
        host, port = place_of(address)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return False
    return {owner for entry in found for owner, _ in _owners(str(entry[4][0]), port)} == {os.getuid()}


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
