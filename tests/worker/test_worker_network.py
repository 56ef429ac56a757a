"""What summation servers say to a communication service, and what of it is heard."""

from __future__ import annotations

from typing import Any, cast

import pytest
import zmq

from byteps_py.config.settings import Settings
from byteps_py.proto import control_pb2 as pb
from byteps_py.runtime import Runtime
from byteps_py.wire.data_link import Header, Kind
from byteps_py.worker.core.topology import Topology
from byteps_py.worker.io.network import Network
from byteps_py.worker.io.server_links import OnAnswer
from byteps_py.worker.io.slot_memory import SlotMemory

GROUP = 5  # the epoch with which it began


class Link:
    """A connection to a server, whose other end is the test."""

    is_open, is_local = True, False
    bytes_sent = bytes_received = 0

    def __init__(self, on_answer: OnAnswer) -> None:
        self.say = on_answer

    def close(self) -> None: ...


def topology(epoch: int) -> Topology:
    workers = [pb.Member(member_id=i, machine_index=i, local_size=1, first_rank=i, machine_id=f"m{i}") for i in (0, 1)]
    server = pb.Member(member_id=7, address="tcp://a:1", weight=1, machine_id="m7")
    return Topology.of(pb.Membership(epoch=epoch, workers=workers, servers=[server], workers_since=GROUP), 0)


@pytest.mark.parametrize("kind", [Kind.ANSWER, Kind.REFUSED, Kind.WANT, Kind.AWAITED])
def test_a_server_that_wakes_in_an_older_group_is_not_heard(kind: Kind) -> None:
    """Names, and so keys, generations and rounds may be the same: the epoch tells them apart."""
    links: list[Link] = []

    def link(*arguments: Any, **options: Any) -> Link:
        links.append(Link(arguments[2].on_answer))
        return links[-1]

    class Heard(Network):
        tcp_link_class = staticmethod(link)

    heard: list[tuple[int, int]] = []
    runtime = Runtime(loop=cast(Any, None))
    net = Heard(
        runtime, Settings(), topology(GROUP), SlotMemory(runtime, 2, 1, lambda work: None, (0, 2)),
        lambda header, frame, server: heard.append((header.epoch, server)), lambda server: None,
        lambda sentence, server: None,
    )  # fmt: skip
    net.change(topology(GROUP + 2))  # other servers, the same ranks: what was asked in the epoch before is due
    (server,) = links
    for epoch in range(GROUP + 3):
        server.say(Header(kind, 0, epoch, key=1, generation=1, round=1), zmq.Frame(b""))
    assert heard == [(epoch, 7) for epoch in (GROUP, GROUP + 1, GROUP + 2)]
    net.close()
