"""A link over several network cards at once: one connection, a *rail*, for each.

      this machine             the other one
    eth0 ══════ rail 0 ══════ its first address       everything that is no answer to a request; the others' addresses
    eth1 ══════ rail 1 ══════ its second address      come with rail 0's WELCOME
    eth2 ══════ rail 2 ══════ its first address       the machine with more cards decides how many there are

A request goes over the rail that has the fewest bytes without an answer, so that a faster card gets more of them; its
answer comes back over the same rail. Messages about one partition whose order matters all take one rail: those about
copies of states, and contributions to what is not summed in rounds.

If one rail breaks, all are made again, rail 0 first, and then what has no answer is sent again. Else the other end
might read what was sent over the old rail after what was sent again over another one, and answer where nobody listens.
While a rail can't be made, the others carry all. Owned by the loop's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from byteps_py.system import machine
from byteps_py.system.log import logger
from byteps_py.system.network_interfaces import Rail
from byteps_py.tensors import Op
from byteps_py.wire.data_link import Header, Kind
from byteps_py.worker.io.server_links import (
    SHADOW_KINDS,
    LinkEvents,
    LinkOrigin,
    LinkTarget,
    PendingRequest,
    ServerLink,
    TcpLink,
)

_ORDERED = SHADOW_KINDS | {Kind.CLOCK, Kind.ORDER}


class RailedLink(TcpLink):
    """Rail 0, which has the others. Without several network cards, at this end or the other, it is the only one."""

    def __init__(self, origin: LinkOrigin, target: LinkTarget, events: LinkEvents) -> None:
        self._cards = machine.network_cards(origin.settings)
        self._others: list[TcpLink] = []  # from rail 1 on
        self._chosen: dict[tuple[int, int], TcpLink] = {}  # by key and index of a partition
        self._ordered: set[tuple[int, int]] = set()  # partitions of which copies are kept
        target = replace(target, source=self._cards.rails_to([target.address])[0].own)

        def new_rail(rail: Rail) -> TcpLink:
            there = replace(target, address=rail.there, is_late=True, rail=rail.number, source=rail.own)
            called = LinkEvents(events.on_answer, self._dialer.reconnect, lambda why: self._lost(rail.number, why))
            made = TcpLink(origin, there, called)
            made.share_damage(self)  # what comes damaged twice is an error, also on two rails
            return made

        self._new_rail = new_rail
        self._told: set[int] = set()  # rails that can't be reached, as the log says
        super().__init__(origin, target, events)

    @property
    def rails(self) -> Sequence[ServerLink]:
        return (self, *self._others)

    def on_addresses(self, addresses: Sequence[str]) -> None:
        self._add_rails((self.address, *addresses))

    def on_open(self) -> None:
        self._add_rails((self.address,))  # the other end has one card, and this one may have more
        self._told.clear()
        super().on_open()

    def on_broken(self) -> None:
        self._drop_rails()
        super().on_broken()

    def _drop_rails(self) -> None:
        """They are made again once rail 0 is open."""
        for rail in self._others:
            self.bytes_sent += rail.bytes_sent
            self.bytes_received += rail.bytes_received
            rail.close()
        self._others.clear()
        self._chosen.clear()

    def _add_rails(self, addresses: Sequence[str]) -> None:
        for rail in self._cards.rails_to(addresses)[len(self._others) + 1 :]:
            self._others.append(self._new_rail(rail))

    def _begin(self, request: PendingRequest) -> None:
        rail = self._rail_for(request.header) if self._others and self.is_open else self
        if rail is self:
            super()._begin(request)
        else:
            rail._begin(request)

    def _rail_for(self, header: Header) -> TcpLink:
        rails: list[TcpLink] = [self, *(rail for rail in self._others if rail.is_open)]
        place = header.key, header.index
        if header.kind in SHADOW_KINDS:
            self._ordered.add(place)
        if header.kind in _ORDERED or header.op is Op.ACCUMULATE or place in self._ordered:
            if (rail := self._chosen.get(place)) is None or not rail.is_open:
                rail = self._chosen[place] = rails[sum(place) % len(rails)]
            return rail
        if header.kind is Kind.WITHDRAW:  # after what it withdraws
            return next((rail for rail in rails if rail.has_asked(header)), rails[0])
        return min(rails, key=lambda rail: rail.waiting_bytes)

    def _lost(self, number: int, why: str) -> None:
        if number not in self._told and not self._is_closed:
            self._told.add(number)
            logger.warning("%s, over network card %d of BYTEPS_INTERFACES: the others carry all meanwhile", why, number)

    def close(self) -> None:
        self._drop_rails()
        super().close()
