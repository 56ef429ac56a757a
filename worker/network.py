"""The servers of an epoch and the way to each. Owned by the loop's thread."""

from __future__ import annotations

import time

import zmq

from byteps_py.errors import ProtocolError
from byteps_py.loop import EventLoop
from byteps_py.settings import Settings
from byteps_py.wire import Header, Kind
from byteps_py.worker.guard import Guard
from byteps_py.worker.links import LocalLink, OnAnswer, OnLost, ServerLink, TcpLink
from byteps_py.worker.memory import Memory
from byteps_py.worker.pace import ServerPace
from byteps_py.worker.tensor import Part
from byteps_py.worker.topology import Topology


class Network:
    """``on_lost``: called when a server's connection is found broken."""

    def __init__(
        self,
        loop: EventLoop,
        settings: Settings,
        topology: Topology,
        memory: Memory,
        on_answer: OnAnswer,
        on_lost: OnLost,
    ) -> None:
        self._epoch = topology.epoch
        self._me = topology.machine_index
        self._memory = memory
        self._guard = Guard(topology.first_rank, topology.size)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links: dict[int, ServerLink] = {}
        here = None
        for server in topology.servers:
            link: ServerLink
            if server.machine_id == topology.me.machine_id and server.local_address:
                here = server.member_id
                link = LocalLink(loop, server.local_address, self._me, settings, memory.machine, on_answer, on_lost)
            else:
                link = TcpLink(self._context, loop, server.address, self._me, settings, memory.view, on_answer, on_lost)
            self._links[server.member_id] = link
        self.pace = ServerPace({server.member_id: server.link_mbit for server in topology.servers}, here)

    def push(self, part: Part, round_: int) -> None:
        """Send the machine's contribution to the partition's server, or ask for a broadcast's result."""
        tensor = part.tensor
        link = self._links.get(part.server)
        if link is None:
            raise ProtocolError(f"tensor {tensor.name!r} is placed on server {part.server}, which is no member")
        contributes = tensor.contributes
        kind = Kind.PUSH if contributes else Kind.PULL if tensor.slots else Kind.PASS
        header = Header(
            kind,
            self._me,
            self._epoch,
            tensor.spec.dtype,
            tensor.spec.op,
            tensor.root_machine,
            tensor.key,
            tensor.generation,
            part.index,
            round_,
            part.offset,
            part.length,
            machines=tensor.machines,
            blame=self._guard.of_push(part) if kind is Kind.PUSH and tensor.spec.is_guarded else 0,
        )
        answer = None
        if isinstance(link, LocalLink) and tensor.local_root is None and tensor.slots:
            answer = self._memory.give_answer_block(part)
        self.pace.pushed(part, time.monotonic())
        link.push(header, tensor.contribution if contributes else None, part.offset, answer)

    @property
    def bytes_sent(self) -> int:
        return sum(link.bytes_sent for link in self._links.values() if isinstance(link, TcpLink))

    @property
    def bytes_received(self) -> int:
        return sum(link.bytes_received for link in self._links.values() if isinstance(link, TcpLink))

    @property
    def bytes_local(self) -> int:
        return sum(link.bytes_sent for link in self._links.values() if isinstance(link, LocalLink))

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._context.term()
