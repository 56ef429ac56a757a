"""Contributions that come over TCP. Loop thread only."""

from __future__ import annotations

from collections.abc import Callable

import zmq

from byteps_py.dataplane.listener import DataListener
from byteps_py.dataplane.peer import Peer
from byteps_py.dataplane.traffic import Traffic
from byteps_py.server.arrival import Arrival, FrameMemory
from byteps_py.settings import Settings
from byteps_py.wire import Header, Kind


class ContributionListener(DataListener):
    """``on_arrival``: a contribution came; ``on_gone``: a peer went away; ``on_withdraw``: one takes a
    contribution back."""

    def __init__(
        self,
        host: str,
        settings: Settings,
        traffic: Traffic,
        on_arrival: Callable[[Arrival], None],
        on_gone: Callable[[Peer], None],
        on_withdraw: Callable[[Header], None],
    ) -> None:
        def on_message(header: Header, peer: Peer, frame: zmq.Frame) -> None:
            if header.kind is Kind.WITHDRAW:
                on_withdraw(header)
                return
            payload = FrameMemory(frame)
            on_arrival(Arrival(header, peer, payload.nbytes, payload if payload.nbytes else None))

        kinds = frozenset((Kind.PUSH, Kind.PULL, Kind.PASS, Kind.WITHDRAW))
        super().__init__(host, settings, traffic, kinds, on_message, on_gone)
