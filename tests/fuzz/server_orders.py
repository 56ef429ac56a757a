"""What the scheduler says to a summation server."""

from __future__ import annotations

import zmq
from google.protobuf.message import DecodeError
from support.data_plane import HandLink, header_for

from byteps_py.config.settings import Settings
from byteps_py.dataplane.listener import Peer
from byteps_py.errors import BytePSError
from byteps_py.proto import control_pb2 as pb
from byteps_py.runtime import Runtime
from byteps_py.server.reducer import Arrival
from byteps_py.server.service import SummationService
from byteps_py.wire.data_link import Header

from .base import Target

_SETTINGS = Settings(job_id="fuzz", scheduler_host="127.0.0.1", scheduler_port=1, node_host="127.0.0.1")


def _membership(epoch: int, machines: int, since: int, partition_bytes: int) -> pb.SchedulerMessage:
    workers = [pb.Member(member_id=i, machine_index=i, local_size=2) for i in range(machines)]
    return pb.SchedulerMessage(
        membership=pb.Membership(epoch=epoch, workers=workers, workers_since=since, partition_bytes=partition_bytes)
    )


_SAID = (
    *[_membership(epoch, n, since, 4096) for epoch in (1, 2, 3) for n, since in ((2, 1), (2, epoch), (0, 1), (3, 9))],
    _membership(1, 2, 1, 1 << 40),
    pb.SchedulerMessage(welcome=pb.Welcome(member_id=3)),
    pb.SchedulerMessage(failure=pb.Failure(error="PeerLostError", message="a rank died")),
    pb.SchedulerMessage(stop=pb.Stop(reason="done")),
    pb.SchedulerMessage(refused=pb.Refused(error="RendezvousError", message="no")),
    pb.SchedulerMessage(measure=pb.Measure(turn=1, address="tcp://a:1")),
)


class _Member(Peer):
    """Whose contributions lack their payload: they are refused, sooner or later."""

    def answer(self, header: Header, result: zmq.Frame | None, digest: bytes = b"") -> None:
        raise AssertionError("a contribution without a payload was taken")

    def tell(self, header: Header, payload: bytes = b"") -> None:
        raise AssertionError("nobody had its result, and nobody waits for it")

    def refuse(self, header: Header, reason: str) -> None:
        reason.encode()


class ServerOrders(Target):
    """Nothing is raised: the server goes on, or ends by a status or an error of ours. Epochs never go back."""

    cost = 20
    seeds = tuple(message.SerializeToString() for message in _SAID)

    def __init__(self) -> None:
        self._turn = self._ends = 0
        self._begin()

    def _begin(self) -> None:
        self._service = SummationService(_SETTINGS, pb.MACHINE_KIND_CPU, HandLink().connect, Runtime())
        self._epoch = 0

    def feed(self, data: bytes) -> None:
        self._turn += 1
        try:
            message = pb.SchedulerMessage.FromString(data)
        except DecodeError:
            return
        service = self._service
        if message.HasField("membership") and self._turn % 4:
            message.membership.servers.add(address=service.address, weight=1)
        service._on_message(message)
        rounds = service._rounds
        assert rounds.epoch >= self._epoch
        if rounds.epoch > self._epoch:
            assert (rounds.epoch, rounds.num_machines) == (message.membership.epoch, len(message.membership.workers))
        self._epoch = rounds.epoch
        header = header_for(self._turn % 3, bytes(64), epoch=self._turn % 4, round=self._turn % 5)
        service._on_arrival(Arrival(header, _Member(), 0))
        service._report().SerializeToString()
        if service._loop._stopped:
            assert service._error is None or isinstance(service._error, BytePSError)
            self._ends += 1
            service._close()
            self._begin()
        elif self._turn % 500 == 0:
            service._close()
            self._begin()

    def end(self) -> None:
        assert self._ends

    def close(self) -> None:
        self._service._close()
