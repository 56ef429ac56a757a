"""The servers of an epoch and the way to each. Owned by the loop's thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import zmq

from byteps_py.arrivals import Order, Place, Turn
from byteps_py.config.settings import Settings
from byteps_py.dataplane.link_usage import UsageMeter, counters_of_reads
from byteps_py.dataplane.long_links import round_trip_of
from byteps_py.errors import (
    ProtocolError,
    UsageError,
)
from byteps_py.proto import control_pb2 as pb
from byteps_py.runtime import Runtime
from byteps_py.system.shm import Block
from byteps_py.tensors import Op
from byteps_py.wire.data_link import (
    CODED,
    NO_RESULT,
    RESENT,
    SUPPLY,
    Header,
    Kind,
    pack_clock,
    pack_order,
)
from byteps_py.worker.core.pace import ServerPace
from byteps_py.worker.core.tensor import AccumulatedPart, Part
from byteps_py.worker.core.topology import Topology
from byteps_py.worker.io.nonfinite_guard import NonFiniteGuard
from byteps_py.worker.io.railed_link import RailedLink
from byteps_py.worker.io.server_links import LinkEvents, LinkOrigin, LinkTarget, LocalLink, ServerLink, TcpLink
from byteps_py.worker.io.slot_memory import SlotMemory


@dataclass(slots=True)
class _Bytes:
    """Of links that are gone."""

    sent: int = 0
    received: int = 0
    local: int = 0


class Network:
    """``on_answer(header, frame, server)``: server, by member id, has sent a message. ``on_reconnected(server)``: the
    connection to it was made anew, and what was not answered on the one before is lost. ``on_lost(sentence, server,
    has_ended)``: it can't be reached, or its process has ended, as only that of this machine's own server shows."""

    tcp_link_class: type[TcpLink] = RailedLink
    local_link_class: type[LocalLink] = LocalLink

    def __init__(
        self,
        runtime: Runtime,
        settings: Settings,
        topology: Topology,
        memory: SlotMemory,
        on_answer: Callable[[Header, zmq.Frame | None, int], None],
        on_reconnected: Callable[[int], None],
        on_lost: Callable[[str, int, bool], None],
    ) -> None:
        self._runtime = runtime
        self._settings = settings
        self._me = topology.machine_index
        self._memory = memory
        self._guard = NonFiniteGuard(topology.first_rank, topology.size)
        #: Of a replay: when contributions to ACCUMULATEs are added and answered.
        self.orders: Mapping[Place, Mapping[Turn, Order]] = {}
        self._on_answer = on_answer
        self._on_reconnected = on_reconnected
        self._on_lost = on_lost
        self._context = runtime.zmq_context()
        self._links: dict[int, ServerLink] = {}
        self._closed = _Bytes()
        self._usage = UsageMeter()
        self._rate = runtime.link_rate_meter(settings, runtime.loop)
        #: By which payloads travel to and from other machines, their communication services too; None: over TCP.
        self.rdma = runtime.rdma_lane(settings, runtime.loop)
        if self.rdma is not None:
            for arena in memory.arenas:
                self.rdma.watch(arena)
        self._gone: set[int] = set()  # services of this machine that have ended: they write no answers any more
        self.change(topology)

    def change(self, topology: Topology) -> None:
        """Go over to the servers of a new epoch."""
        self.epoch = topology.epoch
        servers = {server.member_id: server for server in topology.servers}
        mine = [number for number, server in servers.items() if _is_here(server, topology)]
        self.pace = ServerPace({number: server.link_mbit for number, server in servers.items()}, mine)
        for member_id in [known for known in self._links if known not in servers]:
            link = self._links.pop(member_id)
            if link.is_local:
                self._closed.local += link.bytes_sent
            else:
                self._closed.sent += sum(each.bytes_sent for each in link.rails)
                self._closed.received += sum(each.bytes_received for each in link.rails)
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
            LinkOrigin(self._context, self._runtime, self._me, self._settings, self._memory.view, self.rdma),
            LinkTarget(
                server.address,
                group=topology.group,
                is_late=topology.epoch > topology.group,
                link_mbit=min(server.link_mbit, topology.me.link_mbit),
            ),
            LinkEvents(on_answer, lambda: self._on_reconnected(number), on_lost),
        )

    def push(self, part: Part, round_: int) -> None:
        """Send the machine's contribution to the partition's server, or ask for a broadcast's result."""
        tensor = part.tensor
        link = self._links.get(part.server)
        if link is None:
            raise ProtocolError(f"tensor {tensor.name!r} is placed on server {part.server}, which is no member")
        header = self._header(part, round_, part.contributes)
        header.flags = (RESENT if part.is_resent else 0) | (NO_RESULT if part.is_acknowledged else 0)
        if isinstance(part, AccumulatedPart) and part.contributes and part.codes_change(round_):
            header.flags |= CODED
            is_present = part.copied_round == round_ - 1 and part.copied_epoch == self.epoch
            header.drawn = sum(part.clock) if is_present and not link.is_local else 0
        answer = self._memory.give_answer_block(part) if link.is_local and part.wants_result else None
        self.pace.pushed(part, self._runtime.loop.time())
        if isinstance(part, AccumulatedPart) and part.contributes and self.orders:
            place = tensor.name, tensor.generation, part.index
            if (order := self.orders.get(place, {}).get((self._me, round_))) is None:
                raise UsageError(
                    f"tensor {tensor.name!r}: the run that is replayed has no round {round_} of partition {part.index} "
                    f"on machine {self._me}: replay the same program, with the same BYTEPS_PARTITION_BYTES"
                )
            link.tell(replace(header, kind=Kind.ORDER), pack_order(order.added_at, order.answered_at))
        block, offset = part.contribution if part.contributes else (None, part.offset)
        link.push(header, block, offset, answer)

    def supply(self, part: Part, round_: int, server: int) -> None:
        """Give what was given to a round once more, for others; its answer is not wanted."""
        if link := self._links.get(server):
            block, offset = part.given(round_) or (None, part.offset)
            header = self._header(part, round_, block is not None)
            header.flags = RESENT | SUPPLY
            link.push(header, block, offset, None)

    def withdraw(self, part: Part, round_: int, server: int) -> None:
        """The contribution to a round goes to another server. To a server that is gone nothing needs to be said."""
        if server in self._gone:
            self._memory.take_answer_block(part)
            return
        if link := self._links.get(server):
            header = self._header(part, round_, False)
            header.kind = Kind.WITHDRAW
            header.flags = NO_RESULT if part.server != server else 0
            link.push(header, None, 0, None)
            if link.is_local:
                self._memory.abandon_answer_block(part, server)
        part.answer = None  # it may yet be written, if its server is only frozen: never used again

    def tell_clock(self, part: AccumulatedPart) -> None:
        """Tell the partition's server what this machine's copy of the values contains."""
        if link := self._links.get(part.server):
            header = self._header(part, part.copied_round, True)
            header.kind = Kind.CLOCK
            link.tell(header, pack_clock(part.clock))

    def tell(self, server: int, header: Header, payload: Block | zmq.Frame | bytes | memoryview, offset: int) -> None:
        """Send a message that is about no contribution to a server of another machine. A payload stays untouched until
        the server says that it has it. ``offset``: of ``header.length`` bytes in a block."""
        link = self._links.get(server)
        if not isinstance(link, self.tcp_link_class):
            return  # it is a member no more, or not yet
        header.sender, header.epoch = self._me, self.epoch
        if isinstance(payload, Block):
            link.push(header, payload, offset, None)
        else:
            link.bytes_sent += len(payload)
            link.ask(header, payload)

    def _header(self, part: Part, round_: int, contributes: bool) -> Header:
        tensor = part.tensor
        is_pull = tensor.spec.op is Op.BROADCAST
        is_guarded = contributes and tensor.spec.is_guarded
        codec = None if is_pull else tensor.codec  # servers hand parameters on, whatever the bytes mean
        return Header(
            Kind.PUSH if contributes else Kind.PULL if is_pull else Kind.PASS,
            self._me,
            self.epoch,
            tensor.spec.dtype,
            tensor.spec.op,
            part.root_machine,
            tensor.key,
            tensor.generation,
            part.index,
            round_,
            part.offset,
            part.dense_length if isinstance(part, AccumulatedPart) else part.length,
            machines=tensor.machines,
            nonfinite_ranks=self._guard.of_push(part, round_) if is_guarded else 0,
            codec=codec.on_wire.code if codec is not None else 0,
            staleness=tensor.spec.staleness,
            quorum=tensor.spec.quorum,
            drawn=codec.drawn if codec is not None else 0,
        )

    @property
    def machine_index(self) -> int:
        """Of this machine."""
        return self._me

    def link_usage(self) -> list[pb.LinkUsage]:
        """The bytes sent to each server of another machine since the last call: see UsageMeter. With RDMA: those that
        were read."""
        links = [(server, each) for server, link in self._links.items() for each in link.rails if each.is_open]
        connections = [(server, each.descriptor) for server, each in links]
        if self.rdma is None:
            return self._usage.report(connections)
        found = {each.descriptor: counters for _, each in links if (counters := each.read_counters) is not None}
        return self._usage.report(connections, counters_of_reads(found))

    def link_rates(self) -> pb.InterfaceRates | None:
        """The rates of the machine's link since the last call, if they are known: see LinkRateMeter."""
        return self._rate.report() if self._rate is not None else None

    @property
    def round_trip_s(self) -> float:
        """Of the server that is farthest away, in seconds; 0: it is not known."""
        return max((round_trip_of(link.descriptor) for link in self._links.values()), default=0.0)

    @property
    def bytes_sent(self) -> int:
        links = [each for link in self._links.values() if not link.is_local for each in link.rails]
        return self._closed.sent + sum(each.bytes_sent for each in links)

    @property
    def bytes_received(self) -> int:
        links = [each for link in self._links.values() if not link.is_local for each in link.rails]
        return self._closed.received + sum(each.bytes_received for each in links)

    @property
    def bytes_local(self) -> int:
        return self._closed.local + sum(link.bytes_sent for link in self._links.values() if link.is_local)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        if self.rdma is not None:
            self.rdma.close()
        if self._rate is not None:
            self._rate.close()
        self._context.term()


def _is_here(server: pb.Member, topology: Topology) -> bool:
    """It maps this machine's shared memory."""
    return server.machine_id == topology.me.machine_id and bool(server.local_address)
