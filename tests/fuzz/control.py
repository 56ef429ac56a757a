"""The control plane: protobuf bytes, and the scheduler's state machine behind them."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from support.scheduler_core import Cluster, ballot, running, server, spec, worker

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import core as states
from byteps_py.tensors import DType, Op

from .base import Target


def _messages() -> list[pb.MemberMessage]:
    votes = [ballot([0, 1]), ballot([2, 3]), ballot([0], spec((4, 4), DType.BFLOAT16, average=True), "other")]
    votes.append(ballot([0, 1], spec(op=Op.BROADCAST, root=1), "third"))
    return [
        *[pb.MemberMessage(declare=pb.Declare(ballots=[vote])) for vote in votes],
        pb.MemberMessage(register=worker(0)),
        pb.MemberMessage(register=server(0)),
        pb.MemberMessage(
            heartbeat=pb.Heartbeat(statistics=pb.Statistics(bytes_sent=5), waiting=[pb.Waiting(name="w")])
        ),
        pb.MemberMessage(arrive=pb.Arrive(sequence=1)),
        pb.MemberMessage(leave=pb.Leave(reason="done")),
        pb.MemberMessage(report=pb.Report(error="PeerLostError", message="a rank died")),
        pb.MemberMessage(sight=pb.Sight(rank=1, text="stack")),
        pb.MemberMessage(gone=pb.Gone(ranks=[0])),
        pb.MemberMessage(join=pb.Join(rank=0, last=[pb.LastRound(name="w", generation=1, round=2)])),
        pb.MemberMessage(idle=pb.Idle(direct_round=3)),
        pb.MemberMessage(measured=pb.Measured(turn=1, mbit=100.0)),
    ]


class Control(Target):
    """Members, and strangers, that say what they like to a scheduler: it never raises, and what it says can be sent."""

    seeds = tuple(message.SerializeToString() for message in _messages())

    def __init__(self) -> None:
        self._cluster: Cluster
        self._connections: list[int] = []
        self._turn = 0
        self._begin()

    def _begin(self) -> None:
        self._cluster, workers, servers = running(n=2, k=1)
        stranger = len(self._cluster.told) + 1
        self._cluster.told[stranger] = []
        self._cluster.take(self._cluster.core.on_connected(stranger, self._cluster.now))
        self._connections = [*workers, *servers, stranger]
        self._epoch = 0

    def feed(self, data: bytes) -> None:
        try:
            message = pb.MemberMessage.FromString(data)
        except DecodeError:
            return
        self._turn += 1
        cluster = self._cluster
        connection = self._connections[self._turn % len(self._connections)]
        outgoing = cluster.core.handle(connection, message, cluster.now)
        if self._turn % 16 == 0:
            cluster.now += 0.05
            outgoing = [*outgoing, *cluster.core.on_tick(cluster.now)]
        for _, answer in outgoing:
            answer.SerializeToString()
        status = cluster.core.status(cluster.now)
        assert status.epoch >= self._epoch
        self._epoch = status.epoch
        if cluster.core.state != states.RUNNING or self._turn % 500 == 0:
            self._begin()
