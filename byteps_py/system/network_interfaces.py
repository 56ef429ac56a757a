"""The network interfaces of this machine, as its kernel has them: names and addresses. And *rails*: the connections
between two machines of which one has several network cards.

Opens no connection. Any thread.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path
from typing import NamedTuple

from byteps_py.config.addresses import place_of

_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
_TABLE_V6 = Path("/proc/net/if_inet6")
#: Of linux/if_addr.h: an address that is not usable yet or never will be; and those that soon are no more.
_UNUSABLE, _PASSING = 0x40 | 0x08, 0x20 | 0x01
_SCOPE_LINK = 0x20


@dataclass(frozen=True, slots=True)
class _AddressV6:
    interface: str
    host: str
    is_passing: bool


def names() -> list[str]:
    """In the kernel's order; loopback is the first."""
    return [name for _, name in socket.if_nameindex()]


def addresses_of(name: str) -> list[str]:
    """The addresses under which others can reach the interface ``name``: that of IPv4, then those of IPv6, without
    those that only have a meaning on its own link. Empty if there are none, or no such interface.

    >>> addresses_of("lo")[0], addresses_of("nosuch0")
    ('127.0.0.1', [])
    """
    return [*_ask_v4(name, _SIOCGIFADDR), *usable_v6(_table_v6(), name)]


def _table_v6() -> str:
    try:
        return _TABLE_V6.read_text()
    except OSError:  # a kernel without IPv6
        return ""


def _ask_v4(name: str, what: int) -> Iterable[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        yield socket.inet_ntoa(ioctl(sock, what, struct.pack("256s", name.encode()[:15]))[20:24])


def network_of(host: str) -> str:
    """The network of an interface's address, as its kernel sends to it; empty if it is not known.

    >>> network_of("127.0.0.1"), network_of("192.0.2.77")
    ('127.0.0.0/8', '')
    """
    for line in _table_v6().splitlines():
        digits, _, prefix, *_ = line.split()
        if str(ipaddress.IPv6Address(bytes.fromhex(digits))) == host:
            return str(ipaddress.ip_network(f"{host}/{int(prefix, 16)}", strict=False))
    for mask in _ask_v4(interface_of(host), _SIOCGIFNETMASK):
        return str(ipaddress.ip_network(f"{host}/{mask}", strict=False))
    return ""


def usable_v6(table: str, name: str) -> list[str]:
    """The addresses of ``name`` in the kernel's ``table``; those that will soon be given up come last.

    >>> usable_v6("fd000000000000000000000000000002 04 40 00 80     eth0\\n", "eth0")
    ['fd00::2']
    """
    found = []
    for line in table.splitlines():
        digits, _, _, scope, flags, interface = line.split()
        if int(scope, 16) == _SCOPE_LINK or int(flags, 16) & _UNUSABLE:
            continue
        host = str(ipaddress.IPv6Address(bytes.fromhex(digits)))
        found.append(_AddressV6(interface, host, bool(int(flags, 16) & _PASSING)))
    own = [each for each in found if each.interface == name]
    return [each.host for each in sorted(own, key=lambda each: each.is_passing)]


def chosen(text: str, known: Mapping[str, Sequence[str]]) -> list[str]:
    """The names and addresses that BYTEPS_INTERFACES=``text`` means, in its order. ``known``: the addresses of each
    interface. As for NCCL_SOCKET_IFNAME, the first letters of names will do, ``=`` before the list asks for whole
    names, and ``^`` for all others; but a whole name is preferred to longer ones, and an address may stand for it.

    >>> here = {"lo": ["127.0.0.1"], "eth10": ["10.1.0.1"], "eth1": ["10.0.0.1"], "eth2": [], "br0": ["172.17.0.1"]}
    >>> [chosen(text, here) for text in ("eth1", "eth", "^br", "=eth", "10.1.0.1")]
    [['eth1'], ['eth1', 'eth10'], ['eth1', 'eth10'], ['eth'], ['10.1.0.1']]
    """
    # In the same order on all machines, which the kernel's may not be: eth2 before eth10.
    usable = [name for name, hosts in known.items() if hosts and name != "lo"]
    usable.sort(key=lambda name: (len(name), name))
    entries = [entry.strip() for entry in text.lstrip("=^").split(",")]
    if text.startswith("^"):
        return [name for name in usable if not name.startswith(tuple(entries))]
    found: list[str] = []
    for entry in entries:
        begins = [] if text.startswith("=") or entry in known else [name for name in usable if name.startswith(entry)]
        found += begins or [entry]
    return found


def interface_of(host: str) -> str:
    """The interface that has ``host``, a numeric address; empty if none has."""
    return next((name for name in names() if host in addresses_of(name)), "")


class Rail(NamedTuple):
    """``number``: from 0, for the machine that calls. ``own``: the address that it comes from; empty: the system's
    choice. ``there``: the other end's."""

    number: int
    own: str
    there: str


class NetworkCards(NamedTuple):
    """Those of this machine that carry tensors at the same time: their addresses, none if no list names them, and the
    network of each; empty if it is not known."""

    hosts: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()

    def rails_to(self, there: Sequence[str]) -> list[Rail]:
        """All rails to a machine that offers ``there``: hosts, or ``tcp://host:port``. The one with more cards decides
        how many. Each address is called from the card in the same network; where no card is, the first one is called
        from the first card, the second from the second, and so on. Rail 0 is the same, however few are known.

        >>> cards = NetworkCards(("10.0.0.1", "10.1.0.1"), ("10.0.0.0/24", "10.1.0.0/24"))
        >>> [rail.own + "-" + rail.there for rail in cards.rails_to(["10.1.0.2", "10.0.0.2"])]
        ['10.1.0.1-10.1.0.2', '10.0.0.1-10.0.0.2']
        >>> [rail.own + "-" + rail.there for rail in cards.rails_to(["192.0.2.1"])]
        ['10.0.0.1-192.0.2.1', '10.1.0.1-192.0.2.1']
        >>> [rail.own + "-" + rail.there for rail in NetworkCards().rails_to(["10.1.0.2", "10.0.0.2"])]
        ['-10.1.0.2', '-10.0.0.2']
        """
        count = max(len(self.hosts), len(there))
        free, own = [*self.hosts], dict[int, str]()
        for number in range(count):
            near = next((host for host in free if self._reaches(host, there[number % len(there)])), "")
            if near or (free and not number):
                own[number] = near or free[0]
                free.remove(own[number])
        for number in range(count):
            if number not in own:
                again = self.hosts[number % len(self.hosts)] if self.hosts else ""
                own[number] = free.pop(0) if free else again
        return [Rail(number, own[number], there[number % len(there)]) for number in range(count)]

    def _reaches(self, host: str, other: str) -> bool:
        network = self.networks[self.hosts.index(host)]
        try:
            return bool(network) and ipaddress.ip_address(_host_of(other)) in ipaddress.ip_network(network)
        except ValueError:  # it is a name
            return False


def _host_of(place: str) -> str:
    try:
        return place_of(place.removeprefix("tcp://"))[0]
    except ValueError:  # it is a host
        return place
