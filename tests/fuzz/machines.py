"""What servers and other machines say to a communication service of three that has tensors under way."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

import zmq

from byteps_py.dataplane.listener import RemotePeer
from byteps_py.errors import BytePSError, ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.system.shm import Block
from byteps_py.tensors import DType, Layout, NonFinite, Op, TensorSpec, key_of
from byteps_py.wire import rank_link as protocol
from byteps_py.wire.data_link import HEADER_BYTES, Fetch, Header, Kind, pack_names
from byteps_py.worker.group import Group, GroupServices
from byteps_py.worker.io import network
from byteps_py.worker.io.peers import PeerMachines
from byteps_py.worker.io.server_links import LinkEvents, LinkTarget

from .base import Target
from .machine import _SETTINGS, RANKS, Machine

_MACHINES, _ME = 3, 1
_SIZE = _MACHINES * RANKS
_FIRST = _ME * RANKS  # global rank
_HERE, _OTHER = 21, 20  # servers: of this machine, and of another
_SPECS = (
    TensorSpec("sum", DType.FLOAT32, (3, 4)),
    TensorSpec("guarded", DType.FLOAT32, (4000,), average=True, nonfinite=NonFinite.RAISE),
    TensorSpec("broadcast", DType.INT64, (700,), Op.BROADCAST, root=_FIRST),
    TensorSpec("received", DType.INT64, (700,), Op.BROADCAST, root=0),
    TensorSpec("scattered", DType.FLOAT32, (12, 3), scatters=True),
    TensorSpec("some", DType.FLOAT32, (50,), group=(0, _FIRST)),
    TensorSpec("gather", DType.UINT8, (64, 64 * _SIZE), Op.GATHER),
    TensorSpec("exchange", DType.UINT8, (64 * _SIZE, 64 * _SIZE), Op.EXCHANGE),
)
_ALL = tuple((i * 64, 64) for i in range(_SIZE))
_LAYOUTS = {Op.GATHER: Layout(((0, 64),), _ALL), Op.EXCHANGE: Layout(_ALL, _ALL)}
_SERVER, _BESIDE, _ANSWER, _REQUEST = range(4)


def _all_said() -> list[bytes]:
    found = []
    for spec in _SPECS:
        key, n = key_of(spec.name), min(spec.nbytes, 4096)
        for who in (_SERVER, _BESIDE):
            for kind, payload in (
                (Kind.ANSWER, bytes(n) if who == _SERVER else b""), (Kind.ANSWER, b""), (Kind.WANT, b""),
                (Kind.AWAITED, pack_names([(key, 1, 0, 1), (key, 1, 1, 2)])),
                (Kind.REFUSED, b"MismatchError\nthey differ"),
            ):  # fmt: skip
                header = Header(kind, 0, 1, spec.dtype, spec.op, key=key, generation=1, round=1, length=n)
                found.append(bytes((who, 0)) + header.pack() + payload)
        for machine, round_ in ((0, 1), (2, 1), (2, 2)):
            for source in (_FIRST, _FIRST + 1):
                header = Header(Kind.FETCH, machine, 1, key=key, round=round_, length=64)
                target = 0xFFFFFFFF if spec.op is Op.GATHER else machine * RANKS
                for kind in (Kind.FETCH, Kind.TAKEN):
                    header.kind = kind
                    fetch = Fetch(source, target, 64, taken=round_ * (kind is Kind.TAKEN))
                    found.append(bytes((_REQUEST, machine)) + header.pack() + fetch.pack())
            header = Header(Kind.FETCH_SUM, machine, 1, key=key, generation=1, round=round_, length=24)
            for header.offset in range(6):
                found.append(bytes((_REQUEST, machine)) + header.pack())
    for machine in (0, 2):
        for nbytes in (64, 24, 72):
            found += [bytes((_ANSWER, machine)) + Header(Kind.ANSWER, machine, 1).pack() + bytes(nbytes)] * 8
        for reason in (b"MismatchError\nno", b"ProtocolError\nno", b"\xff"):
            found.append(bytes((_ANSWER, machine)) + Header(Kind.REFUSED, machine, 1).pack() + reason)
    return found


class _Link:
    """The way to a server, or to another machine."""

    is_open, is_local = True, False
    bytes_sent = bytes_received = 0

    def __init__(self, on_answer: Callable[[Header, zmq.Frame | None], None]) -> None:
        self.on_answer = on_answer
        self.rails = (self,)
        self.sent: list[Header] = []  # the last ones

    def push(self, header: Header, payload: Block | None, offset: int, answer: Block | None) -> None:
        assert payload is None or offset + header.length <= payload.nbytes
        assert answer is None or header.length <= answer.nbytes
        self.ask(header, b"")

    def ask(self, header: Header, body: bytes) -> None:
        header.pack()
        self.sent = [*self.sent[-20:], header]

    def close(self) -> None: ...


class _Listener:
    address = "tcp://node1:7000"

    def __init__(self, *_: object) -> None: ...
    def attach(self, loop: object) -> None: ...
    def detach(self, loop: object) -> None: ...
    def close(self) -> None: ...


class _Peer(RemotePeer):
    def __init__(self, machine: int) -> None:
        self.machine = machine
        self.given = 0

    def give(self, header: Header, payload: zmq.Frame) -> bool:
        assert len(payload) == header.length or header.kind is Kind.FETCH_SUM
        self.given += 1
        return True

    def refuse(self, header: Header, reason: str) -> None:
        reason.encode()


class Cluster(Machine):
    """This machine is the second of three; the others, and servers, say what they are told to."""

    def begin(self) -> None:
        self.frames: list[zmq.Frame] = []  # the last ones
        self.links: dict[int, _Link] = {}  # by member id, machines by minus their index minus 1

        links = self.links

        class ToServer(_Link):
            def __init__(self, origin: object, target: LinkTarget, events: LinkEvents) -> None:
                super().__init__(events.on_answer)
                links[_OTHER] = self

        class Beside(_Link):
            is_local = True

            def __init__(self, loop: object, name: str, sender: object, *rest: Any) -> None:
                super().__init__(rest[2])
                links[_HERE] = self

        class ToMachine(_Link):
            def __init__(self, origin: object, target: LinkTarget, events: LinkEvents) -> None:
                super().__init__(events.on_answer)
                links[-1 - int(target.address)] = self

        class Links(network.Network):
            tcp_link_class = cast(Any, ToServer)
            local_link_class = cast(Any, Beside)

        class Others(PeerMachines):
            link_class = cast(Any, ToMachine)

        class Linked(Group):
            network_class = Links

        workers = [
            pb.Member(
                member_id=1 + i, machine_index=i, local_size=RANKS, first_rank=i * RANKS, machine_id=f"node{i}",
                address=str(i), host=f"node{i}", link_mbit=1000.0,
            )
            for i in range(_MACHINES)
        ]  # fmt: skip
        servers = [
            pb.Member(member_id=_OTHER, machine_id="node0", address="tcp", weight=1),
            pb.Member(member_id=_HERE, machine_id="node1", local_address="ss", address="tcp", weight=1),
        ]
        membership = self.membership = pb.Membership(
            epoch=1, workers=workers, servers=servers, partition_bytes=4096, workers_since=1
        )
        runtime = replace(self.runtime, data_listener=cast(Any, _Listener))
        self.peers = Others(runtime, _SETTINGS, self._requested, lambda machine: None)
        services = GroupServices(
            runtime, _SETTINGS, False, cast(Any, self._kernels), self.rank_server, self.peers, self._send,
            self._failed, lambda work: None, self._lost, self._lost,
        )  # fmt: skip
        self.group = self._kernels.group = Linked(services, membership, _ME)
        self.others = {machine: _Peer(machine) for machine in (0, 2)}
        self.group.open()
        self.ranks = [self.knock(protocol.Hello.of(rank, RANKS, 1, 0)) for rank in range(RANKS)]
        self._kernels.check = self.check  # type: ignore[method-assign]

    def check(self, address: int, nbytes: int) -> None:
        memory = self.group.requests.memory
        places = [(s.address, s.nbytes) for arena in (*memory._ranks, memory.machine) for s in arena.segments]
        places += [(ctypes.addressof(ctypes.c_char.from_buffer(f.buffer)), len(f)) for f in self.frames if len(f)]
        assert any(start <= address <= address + nbytes <= start + length for start, length in places)

    def _requested(self, request: Any) -> None:
        self.group.requested(request)

    def _answers(self, message: pb.MemberMessage) -> Iterable[pb.SchedulerMessage]:
        """All others agree."""
        verdicts = [
            pb.Verdict(name=ballot.name, generation=ballot.generation, spec=ballot.votes[0].spec)
            for ballot in message.declare.ballots
        ]
        yield pb.SchedulerMessage(verdicts=pb.Verdicts(verdicts=verdicts))

    def close(self) -> None:
        super().close()
        if self.group.network is not None:
            self.group.network.close()
        self.peers.close()


class Machines(Target):
    """A server or a machine that breaks the protocol ends the job by an error of ours, and nothing else does; what is
    written and read lies in memory of this machine, or in the message, and is as long as it should be."""

    cost = 5
    seeds = tuple(_all_said())

    def __init__(self) -> None:
        self._turn = self._ended = self._computed = self._served = 0
        self._begin()

    def _begin(self) -> None:
        self._begun = self._turn
        self._cluster = Cluster(is_elastic=False)
        for rank in range(RANKS):
            mine = [spec for spec in _SPECS if _FIRST + rank in spec.members(_SIZE)]
            self._cluster.say(rank, protocol.Declare.of(1, mine))
        self._go_on()
        assert not self._cluster.deaths, self._cluster.deaths

    def _go_on(self) -> None:
        """Ranks hand over what they can; some wait for others of their machine."""
        cluster = self._cluster
        cluster.go_on()
        for slot in list(cluster.group.requests.memory.slots.values()):
            if slot.ready_bytes < 0 and (slot.id + self._turn) % 3:
                if slot.spec.op.bypasses_servers:
                    cluster.say(slot.local_rank, protocol.SetLayout.of(slot.id, _LAYOUTS[slot.spec.op]))
                ready = protocol.Ready(((slot.id, slot.round + 1, slot.spec.nbytes),))
                cluster.say(slot.local_rank, ready)
        cluster.go_on()
        cluster.group.pump()
        for channel in cluster.ranks:
            cluster.heard(channel)

    def feed(self, data: bytes) -> None:
        self._turn += 1
        if len(data) < 2 + HEADER_BYTES:
            return
        cluster = self._cluster
        who, other = data[0] % 4, data[1] % 2 * 2
        try:
            header = Header.unpack(data[2 : 2 + HEADER_BYTES])
        except ProtocolError:
            return
        try:
            self._say(who, other, header, data[2 + HEADER_BYTES :])
            cluster.loop.run_posted()
            if self._turn % 16 == 0:
                self._go_on()
            if self._turn % 64 == 0:
                self._move()
        except BytePSError as error:
            str(error).encode()
            self._ended += isinstance(error, ProtocolError)
            self._again()
            return
        if cluster.deaths or self._turn - self._begun > 1000:
            self._again()

    def _move(self) -> None:
        """Another epoch: each server in turn has all, or both have their share."""
        membership = self._cluster.membership
        membership.epoch += 1
        servers = [self._servers[i] for i in ((0, 1), (0,), (1,))[membership.epoch % 3]]
        del membership.servers[:]
        membership.servers.extend(servers)
        self._cluster.group.change(membership)

    _servers = (
        pb.Member(member_id=_OTHER, machine_id="node0", address="tcp", weight=1),
        pb.Member(member_id=_HERE, machine_id="node1", local_address="ss", address="tcp", weight=1),
    )

    def _say(self, who: int, other: int, header: Header, payload: bytes) -> None:
        cluster = self._cluster
        if who == _REQUEST:
            if header.kind in (Kind.FETCH, Kind.FETCH_SUM, Kind.TAKEN):
                cluster.peers._requested(header, cluster.others[other], zmq.Frame(payload))
            return
        link = cluster.links.get({_SERVER: _OTHER, _BESIDE: _HERE, _ANSWER: -1 - other}[who])
        if link is None:
            return
        if link.sent and self._turn % 8:  # about what it was asked
            asked = link.sent[self._turn % len(link.sent)]
            header.key, header.index = asked.key, asked.index
            header.generation, header.round = asked.generation, asked.round
            if self._turn % 4 and header.kind is Kind.ANSWER and who != _BESIDE:
                payload = payload[:1] * asked.length
        frame = zmq.Frame(bytearray(payload), copy=False)
        cluster.frames = [*cluster.frames[-200:], frame]
        link.on_answer(header, None if who == _BESIDE and not payload else frame)

    def _again(self) -> None:
        self._computed += self._cluster.computed
        self._served += sum(peer.given for peer in self._cluster.others.values())
        self._cluster.close()
        self._begin()

    def end(self) -> None:
        self._again()
        assert self._ended
        assert self._computed
        assert self._served

    def close(self) -> None:
        self._cluster.close()
