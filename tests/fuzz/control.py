"""The control plane: protobuf bytes, the scheduler's state machines behind them, and the journal's file."""

from __future__ import annotations

import contextlib

from google.protobuf.message import DecodeError
from support.scheduler_core import Cluster, ballot, running, server, spec, worker

from byteps_py.errors import JournalError, UsageError
from byteps_py.proto import control_pb2 as pb
from byteps_py.proto.journal_pb2 import JournalFrame, JournalHeader, JournalRecord
from byteps_py.scheduler import job as states
from byteps_py.scheduler.core import ClockTicked, ConnectionOpened, MessageReceived, ScaleRequested
from byteps_py.scheduler.member_links import journal
from byteps_py.scheduler.member_links.links import MemberLinks, StreamClosed, StreamMessage, StreamOpened
from byteps_py.scheduler.roster import ClusterConfig
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
        pb.MemberMessage(stack_report=pb.StackReport(rank=1, text="stack")),
        pb.MemberMessage(ranks_shut_down=pb.RanksShutDown(ranks=[0])),
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
        self._cluster.take(self._cluster.core.handle(ConnectionOpened(stranger), self._cluster.now))
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
        outgoing = cluster.core.handle(MessageReceived(connection, message), cluster.now)
        if self._turn % 16 == 0:
            cluster.now += 0.05
            outgoing = [*outgoing, *cluster.core.tick(cluster.now)]
        for _, answer in outgoing:
            answer.SerializeToString()
        status = cluster.core.status(cluster.now)
        assert status.epoch >= self._epoch
        self._epoch = status.epoch
        if cluster.core.state != states.RUNNING or self._turn % 500 == 0:
            self._begin()


class Streams(Target):
    """The same to the links that stand before the core. What is written down leads to the same state again."""

    cost = 10

    seeds = (
        *[message.SerializeToString() for message in _messages()],
        *[pb.MemberMessage(register=worker(i, token=b"token %d" % i)).SerializeToString() for i in range(2)],
        pb.MemberMessage(heartbeat=pb.Heartbeat(), number=1, received=2).SerializeToString(),
        pb.ScaleRequest(servers=0).SerializeToString(),
    )

    def __init__(self) -> None:
        self._config = ClusterConfig(num_workers=2, num_servers=1, job="j")
        self._turn = 0
        self._now = 0.0
        self._begin()

    def _begin(self) -> None:
        self._records: list[JournalRecord] = []
        self._links = MemberLinks(self._config, self._write)
        registrations = [*(worker(i, token=b"token %d" % i) for i in range(2)), server(0, token=b"token 2")]
        registrations += [server(i, pb.MACHINE_KIND_GPU, token=b"token %d" % (3 + i)) for i in range(2)]
        for stream, register in enumerate(registrations):
            self._links.handle(StreamOpened(stream), self._now)
            self._links.handle(StreamMessage(stream, pb.MemberMessage(register=register)), self._now)
        self._links.handle(StreamOpened(len(registrations)), self._now)
        self._streams = len(registrations) + 1
        self._numbers = [0] * self._streams
        assert self._links.core.state == states.RUNNING, self._links.core.reason

    def _write(self, record: JournalRecord) -> None:
        copy = JournalRecord()
        copy.CopyFrom(record)
        self._records.append(copy)

    def feed(self, data: bytes) -> None:
        self._turn += 1
        self._now += 0.01
        stream = self._turn % self._streams
        links = self._links
        try:
            message = pb.MemberMessage.FromString(data)
        except DecodeError:
            return
        if message.number < 1000:
            message.number = self._numbers[stream] = self._numbers[stream] + 1
        sent = links.handle(StreamMessage(stream, message), self._now)
        if self._turn % 32 == 0:
            sent += links.handle(ClockTicked(), self._now)
        if self._turn % 100 == 0:
            sent += links.handle(StreamClosed(stream), self._now)
            sent += links.handle(StreamOpened(stream), self._now)
            self._numbers[stream] = 0
        if self._turn % 50 == 0:
            with contextlib.suppress(DecodeError, UsageError):
                request = pb.ScaleRequest.FromString(data[:20])
                sent += links.handle(ScaleRequested(request.servers, request.addresses), self._now)
        for each in sent:
            each.stamped().SerializeToString()
        if links.core.state != states.RUNNING or self._turn % 300 == 0:
            self.end()
            self._begin()

    def end(self) -> None:
        again = MemberLinks(self._config)
        journal.replay(again, self._records)
        assert (again.core.state, again.core.reason) == (self._links.core.state, self._links.core.reason)


class JournalFile(Target):
    """A damaged file is an error that says so, or the end of it is dropped; what is read is what was written."""

    _frames = (
        JournalFrame(header=JournalHeader(version=1, config="{}")),
        JournalFrame(records=[JournalRecord(at_s=1.0, link=2, lost="away"), JournalRecord(tick=True)]),
        JournalFrame(records=[JournalRecord(at_s=2.0, register=worker(0))]),
    )
    _file = journal._MAGIC + b"".join(map(journal.encode, _frames))
    seeds = (_file, journal._MAGIC, _file + bytes(100))

    def feed(self, data: bytes) -> None:
        try:
            frames, good = journal.decode(data)
        except JournalError:
            return
        assert good <= len(data)
        assert journal.decode(data[:good])[0] == frames
