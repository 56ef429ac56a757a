"""What the scheduler says to a communication service, whole: with a group of ranks, before it, and after."""

from __future__ import annotations

import gc
import os
import socket
from typing import Any, cast

from google.protobuf.message import DecodeError

from byteps_py.config.settings import Settings
from byteps_py.dataplane.traffic import Traffic
from byteps_py.errors import BytePSError, PeerLostError
from byteps_py.proto import control_pb2 as pb
from byteps_py.runtime import Runtime
from byteps_py.system.channel import Channel
from byteps_py.system.shm import Block
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.wire import rank_link as protocol
from byteps_py.wire.data_link import Header
from byteps_py.worker.core.local_ranks import IN_GROUP, RankState
from byteps_py.worker.core.placement_view import PlacementView
from byteps_py.worker.group import Group
from byteps_py.worker.io.network import Network
from byteps_py.worker.service import CommunicationService

from .base import Target
from .machine import RANKS, Door, Kernels, Loop, Machine

_ME = 5  # the member id
_SPECS = (
    TensorSpec("sum", DType.FLOAT32, (3, 4)),
    TensorSpec("large", DType.BFLOAT16, (50_000,), average=True),
    TensorSpec("broadcast", DType.INT64, (7,), Op.BROADCAST, root=1),
    TensorSpec("received", DType.INT64, (70,), Op.BROADCAST, root=2),
    TensorSpec("scattered", DType.FLOAT32, (5, 3), scatters=True),
)
_ELSEWHERE = (
    TensorSpec("sum", DType.FLOAT32, (3, 4), group=(0, 3)),
    TensorSpec("others'", DType.FLOAT64, (9,), group=(2, 3)),
    TensorSpec("nobody's", DType.FLOAT64, (9,), group=(77, 78)),
    TensorSpec("vast", DType.FLOAT32, (1 << 46,)),
)


def _membership(epoch: int, since: int, machines: int = 2, servers: int = 2, weight: int = 1) -> pb.Membership:
    return pb.Membership(
        epoch=epoch,
        workers=[
            pb.Member(
                member_id=_ME + i, machine_id=f"node{i}", machine_index=i, local_size=RANKS, first_rank=i * RANKS,
                address=f"tcp://node{i}:7000", host=f"node{i}", link_mbit=1000.0,
            )
            for i in range(machines)
        ],
        servers=[
            pb.Member(
                member_id=20 + i + epoch % 2, machine_id=f"node{i}", address=f"tcp://node{i}:9000", weight=weight,
                local_address=f"ss{i}", link_mbit=500.0,
            )
            for i in range(servers)
        ],
        partition_bytes=4096,
        workers_since=since,
        reason="because",
    )  # fmt: skip


def _group() -> list[pb.SchedulerMessage]:
    """What a group decides."""
    verdicts = [
        pb.SchedulerMessage(verdicts=pb.Verdicts(verdicts=[pb.Verdict(
            name=spec.name, generation=1, spec=protocol.pack_spec(spec), error=error
        )]))
        for spec in (*_SPECS, *_SPECS, *_ELSEWHERE) for error in ("", "", "they differ")
    ]  # fmt: skip
    return [
        *verdicts,
        *[pb.SchedulerMessage(reopen=pb.Reopen(name=spec.name, generation=2, rounds=1)) for spec in _SPECS],
        pb.SchedulerMessage(release=pb.Release(sequence=1)),
        *[pb.SchedulerMessage(joined=pb.Join(rank=rank)) for rank in range(2 * RANKS)],
        pb.SchedulerMessage(all_joined=pb.AllJoined(last=1, direct_round=3)),
    ]


_SAID = (
    *_group(),
    *[
        pb.SchedulerMessage(membership=_membership(*each))
        for each in (
            *((epoch, since) for epoch in (1, 2, 3) for since in (1, 1, epoch)),
            (2, 1, 2, 1), (3, 1, 2, 3), (2, 1, 2, 0), (2, 2, 1), (2, 2, 3), (2, 2, 0), (2, 1, 2, 2, 0), (2, 2, 2, 2, 0),
        )
    ],
    *[pb.SchedulerMessage(welcome=pb.Welcome(member_id=member)) for member in (_ME, _ME + 1, 9)],
    pb.SchedulerMessage(hosts=pb.Hosts(added=True)),
    pb.SchedulerMessage(measure=pb.Measure(turn=1, address="tcp://node1:9000")),
    pb.SchedulerMessage(still=pb.Still(member_id=20)),
    *[pb.SchedulerMessage(stalled=pb.Stalled(message="slow", missing=[rank, 1, 9])) for rank in (0, 2)],
    *[pb.SchedulerMessage(slow=pb.Slow(message="slow", unserved=unserved)) for unserved in (False, True)],
    pb.SchedulerMessage(stack_report=pb.StackReport(rank=1, text="asleep")),
    pb.SchedulerMessage(refused=pb.Refused(error="RendezvousError", message="no")),
    *[
        pb.SchedulerMessage(failure=pb.Failure(error="PeerLostError", message="died", ranks=[2, 3], **how))
        for how in ({}, {"group_only": True}, {"orderly": True})
    ],
    pb.SchedulerMessage(dismissed=pb.Dismissed()),
    pb.SchedulerMessage(stop=pb.Stop(reason="done")),
)  # fmt: skip


class _Link:
    """The way to a server, or to the scheduler; or other machines, or a probe. All that is sent can be sent."""

    is_open, is_local, address = True, False, "tcp://node0:7000"
    bytes_sent = bytes_received = 0
    traffic = Traffic()

    descriptor = -1

    def __init__(self, *_: object, **__: object) -> None:
        self.traffic = Traffic()
        self.rails = (self,)

    def push(self, header: Header, payload: Block | None, offset: int, answer: Block | None) -> None:
        header.pack()
        assert payload is None or offset + header.length <= payload.nbytes

    def send(self, message: pb.MemberMessage) -> None:
        message.SerializeToString()

    def submit(self, *_: object) -> None: ...
    def fetch(self, *_: object) -> None: ...
    def open(self, *_: object) -> None: ...
    def leave(self) -> None: ...
    def close(self, *_: object) -> None: ...

    @staticmethod
    def when_left(then: Any) -> None:
        then()


class _LocalLink(_Link):
    is_local = True


class _Network(Network):
    tcp_link_class, local_link_class = cast(Any, _Link), cast(Any, _LocalLink)


class _FewPartitions(PlacementView):
    """Servers change often here, and each change goes through all partitions."""

    max_partitions = 1 << 16


class _Group(Group):
    network_class = _Network
    placement_view_class = _FewPartitions


class ServiceHears(Target):
    """It goes on, or ends in order, by an error of ours; memory is taken for what is there."""

    cost = 4
    seeds = tuple(message.SerializeToString() for message in _SAID)

    def __init__(self) -> None:
        self._turn = self._lives = self._ends = self._groups = 0
        self._descriptors = len(os.listdir("/proc/self/fd"))
        self._begin()

    def _begin(self) -> None:
        self._lives += 1
        self._begun = self._turn
        self._loop, self._door, self._kernels = Loop(), Door(), Kernels()
        settings = Settings(
            job_id="fuzz", num_workers=2, local_size=RANKS, elastic=self._lives % 2 == 0, scheduler_host="127.0.0.1",
            scheduler_port=1, node_host="127.0.0.1",
        )  # fmt: skip
        runtime = Runtime(
            loop=cast(Any, self._loop), thread_pool=cast(Any, _Link), local_listener=cast(Any, lambda name: self._door)
        )
        kernels = self._kernels

        class Alone(CommunicationService):
            readiness_class = cast(Any, staticmethod(lambda *_: kernels))
            peers_class = probe_class = cast(Any, _Link)
            group_class = _Group

        self._service = Alone(settings, self._lives % 4 > 1, cast(Any, _Link), runtime)
        self._service._member_id = _ME
        self._ranks: list[Channel] = []
        if self._lives % 8:  # else the group is what comes
            self._hear(pb.SchedulerMessage(membership=_membership(1, 1)))
            self._come()

    def _come(self) -> None:
        """Ranks come, and declare."""
        self._ranks += [self._knock(protocol.encode(protocol.Hello.of(rank, RANKS, 1, 0))) for rank in range(RANKS)]
        for rank, channel in enumerate(self._ranks[-RANKS:]):
            specs = [spec for spec in _SPECS if rank in spec.members(2 * RANKS)]
            channel.send(protocol.encode(protocol.Declare.of(1, specs)))
        self._read()

    def _knock(self, hello: bytes) -> Channel:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel, accepted = Channel(mine), Channel(theirs)
        self._door.coming.append(accepted)
        self._loop.readers[self._door.fileno()]()
        channel.send(hello)
        self._loop.readers[accepted.fileno()]()
        return channel

    def _read(self) -> None:
        """What ranks have said, and what they are told."""
        service = self._service
        ranks = service._rank_server.ranks.connections(*IN_GROUP, RankState.RETURNING, RankState.LEFT)
        apart = {self._door.fileno(), *(rank.pidfd for rank in ranks)}
        for fd in [fd for fd in self._loop.readers if fd not in apart]:
            if reader := self._loop.readers.get(fd):
                reader()
        self._loop.run_posted()
        for channel in self._ranks:
            Machine.heard(channel)

    def feed(self, data: bytes) -> None:
        self._turn += 1
        try:
            message = pb.SchedulerMessage.FromString(data)
        except DecodeError:
            return
        self._hear(message)
        if self._turn % 8 == 0 and not self._loop.is_stopped:
            self._go_on()
        service = self._service
        if self._loop.is_stopped or service._rank_server.failure is not None or self._turn - self._begun > 60:
            self._ends += self._loop.is_stopped or service._rank_server.failure is not None
            self._finish()
            self._begin()

    def _hear(self, message: pb.SchedulerMessage) -> None:
        """As the loop does, and ``run``."""
        service = self._service
        try:
            service._on_message(message)
            if (group := service._group) is not None:
                self._kernels.group = group
            self._read()
            service._report().SerializeToString()
        except BytePSError as error:
            str(error).encode()
            service._fail(error)

    def _go_on(self) -> None:
        """Ranks hand over, or come anew; time passes."""
        service = self._service
        group = service._group
        try:
            if group is not None and len(group.executor.ranks) < RANKS and len(self._ranks) < 10 * RANKS:
                self._come()
            for slot in list(group.requests.memory.slots.values()) if group is not None else ():
                rank = group.executor.ranks.get(slot.local_rank)
                if slot.ready_bytes < 0 and rank is not None:
                    ready = protocol.Ready(((slot.id, slot.round + 1, slot.spec.nbytes),))
                    self._ranks[-RANKS + slot.local_rank].send(protocol.encode(ready))
                    self._groups += slot.tensor is not None
            self._read()
            service._tick()
            service._settle()
            if group is not None:
                group.waits.vain(service._loop.time())
            service._pump()
        except PeerLostError:
            pass  # a rank's end, here
        except BytePSError as error:
            service._fail(error)

    def _finish(self) -> None:
        service = self._service
        for channel in self._ranks:
            channel.close()
        service._close()
        if service._group is not None:
            service._group.end()

    def end(self) -> None:
        assert self._ends
        assert self._groups
        self._finish()
        del self._service, self._kernels, self._loop
        gc.collect()
        left = len(os.listdir("/proc/self/fd"))
        self._begin()
        assert left <= self._descriptors, left

    def close(self) -> None:
        self._finish()
