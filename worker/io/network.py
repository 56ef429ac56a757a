"""The servers of an epoch and the way to each. Owned by the loop's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import zmq

from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.runtime import Runtime
from byteps_py.settings import Settings
from byteps_py.tensors import Op
from byteps_py.wire import RESENT, SUPPLY, Header, Kind
from byteps_py.worker.core.pace import ServerPace
from byteps_py.worker.core.tensor import Part
from byteps_py.worker.core.topology import Topology
from byteps_py.worker.io.links import LinkEvents, LinkTarget, LocalLink, ServerLink, TcpLink
from byteps_py.worker.io.memory import Memory
from byteps_py.worker.io.nonfinite_guard import NonFiniteGuard


@dataclass(slots=True)
class _Bytes:
    """Of links that are gone."""

    sent: int = 0
    received: int = 0
    local: int = 0


class Network:
    """``on_answer(header, frame, server)``: server, by member id, has sent a message. ``on_again(server)``: the
    connection to it was made anew, and what was not answered on the one before is lost. ``on_lost(sentence, server,
    has_ended)``: it can't be reached, or its process has ended, as only that of this machine's own server shows."""

    tcp_link_class: type[TcpLink] = TcpLink
    local_link_class: type[LocalLink] = LocalLink

    def __init__(
        self,
        runtime: Runtime,
        settings: Settings,
        topology: Topology,
        memory: Memory,
        on_answer: Callable[[Header, zmq.Frame | None, int], None],
        on_again: Callable[[int], None],
        on_lost: Callable[[str, int, bool], None],
    ) -> None:
        self._runtime = runtime
        self._settings = settings
        self._me = topology.machine_index
        self._memory = memory
        self._guard = NonFiniteGuard(topology.first_rank, topology.size)
        self._on_answer = on_answer
        self._on_again = on_again
        self._on_lost = on_lost
        self._context = runtime.zmq_context()
        self._links: dict[int, ServerLink] = {}
        self._closed = _Bytes()
        self._gone: set[int] = set()  # services of this machine that have ended: they write no answers any more
        self.change(topology)

    def change(self, topology: Topology) -> None:
        """Go over to the servers of a new epoch."""
        self._epoch = topology.epoch
        servers = {server.member_id: server for server in topology.servers}
        mine = [number for number, server in servers.items() if _is_here(server, topology)]
        self.pace = ServerPace({number: server.link_mbit for number, server in servers.items()}, mine)
        for member_id in [known for known in self._links if known not in servers]:
            link = self._links.pop(member_id)
            if link.is_local:
                self._closed.local += link.bytes_sent
            else:
                self._closed.sent += link.bytes_sent
                self._closed.received += link.bytes_received
            link.close()
        for member_id, server in servers.items():
            if member_id not in self._links:
                self._links[member_id] = self._open(server, topology)

    @property
    def is_whole(self) -> bool:
        """All servers can be reached, as far as is known."""
        return all(link.is_open for link in self._links.values())

    def _open(self, server: pb.Member, topology: Topology) -> ServerLink:
        number = server.member_id

        def on_answer(header: Header, frame: zmq.Frame | None) -> None:
            if header.epoch >= topology.group:  # else it speaks of a group that is over: of other machines' rounds
                self._on_answer(header, frame, number)

        def on_lost(sentence: str) -> None:
            self._on_lost(sentence, number, False)

        def on_gone(sentence: str) -> None:
            self._gone.add(number)
            self._memory.free_abandoned(number)
            self._on_lost(sentence, number, True)

        if _is_here(server, topology):
            name, arena = server.local_address, self._memory.machine
            return self.local_link_class(self._runtime, name, self._me, self._settings, arena, on_answer, on_gone)
        return self.tcp_link_class(
            self._context,
            self._runtime,
            LinkTarget(server.address, group=topology.group, is_late=topology.epoch > topology.group),
            self._me,
            self._settings,
            self._memory.view,
            LinkEvents(on_answer, lambda: self._on_again(number), on_lost),
        )

    def push(self, part: Part, round_: int) -> None:
        """Send the machine's contribution to the partition's server, or ask for a broadcast's result."""
        tensor = part.tensor
        link = self._links.get(part.server)
        if link is None:
            raise ProtocolError(f"tensor {tensor.name!r} is placed on server {part.server}, which is no member")
        header = self._header(part, round_, tensor.contributes)
        header.flags = RESENT if part.is_resent else 0
        answer = None
        if link.is_local and tensor.root_slot is None and tensor.slots:
            answer = self._memory.give_answer_block(part)
        self.pace.pushed(part, self._runtime.loop.time())
        link.push(header, tensor.contribution if tensor.contributes else None, part.offset, answer)

    def supply(self, part: Part, round_: int, server: int) -> None:
        """Give what was given to a round once more, for others; its answer is not wanted."""
        if link := self._links.get(server):
            block = part.tensor.given(round_)
            header = self._header(part, round_, block is not None)
            header.flags = RESENT | SUPPLY
            link.push(header, block, part.offset, None)

    def withdraw(self, part: Part, round_: int, server: int) -> None:
        """What was given to a round goes elsewhere. To a server that is gone nothing needs to be said."""
        if server in self._gone:
            self._memory.take_answer_block(part)
            return
        if link := self._links.get(server):
            header = self._header(part, round_, False)
            header.kind = Kind.WITHDRAW
            link.push(header, None, 0, None)
            if link.is_local:
                self._memory.abandon_answer_block(part, server)
        part.answer = None  # it may yet be written, if its server is only frozen: never used again

    def _header(self, part: Part, round_: int, contributes: bool) -> Header:
        tensor = part.tensor
        is_pull = tensor.spec.op is Op.BROADCAST
        is_guarded = contributes and tensor.spec.is_guarded
        return Header(
            Kind.PUSH if contributes else Kind.PULL if is_pull else Kind.PASS,
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
            blame=self._guard.of_push(part, round_) if is_guarded else 0,
        )

    @property
    def bytes_sent(self) -> int:
        return self._closed.sent + sum(link.bytes_sent for link in self._links.values() if not link.is_local)

    @property
    def bytes_received(self) -> int:
        links = [link for link in self._links.values() if not link.is_local]
        return self._closed.received + sum(link.bytes_received for link in links)

    @property
    def bytes_local(self) -> int:
        return self._closed.local + sum(link.bytes_sent for link in self._links.values() if link.is_local)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._context.term()


def _is_here(server: pb.Member, topology: Topology) -> bool:
    """It maps this machine's shared memory."""
    return server.machine_id == topology.me.machine_id and bool(server.local_address)
