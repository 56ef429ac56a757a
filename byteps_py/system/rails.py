"""The connections between two machines of which one has several network cards: its *rails*. Pure; any thread."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import NamedTuple

from byteps_py.config.addresses import place_of


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
