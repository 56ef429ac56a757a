"""Clusters for the scheduler's state machine: who registers, what is declared, and the clock moved by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import job as states
from byteps_py.scheduler.core import ConnectionClosed, ConnectionOpened, MessageReceived, SchedulerCore
from byteps_py.scheduler.job import Outgoing
from byteps_py.scheduler.roster import PROTOCOL_VERSION, ClusterConfig
from byteps_py.tensors import DType, Op
from byteps_py.wire.rank_link import SpecFields
from byteps_py.wire.record_codec import RecordCodec

GPU, CPU = pb.MACHINE_KIND_GPU, pb.MACHINE_KIND_CPU
PARTITION = 4 << 20


def worker(index: int, local_size: int = 2, n: int = 2, k: int = 1, **changes: object) -> pb.Register:
    facts: dict[str, object] = {
        "protocol": PROTOCOL_VERSION,
        "job": "j",
        "role": pb.ROLE_COMMUNICATION,
        "kind": GPU,
        "machine_id": f"m{index}",
        "machine_index": index,
        "local_size": local_size,
        "num_workers": n,
        "num_servers": k,
        "partition_bytes": PARTITION,
        "link_mbit": 1000.0,
        "host": f"gpu{index}",
        "pid": 100 + index,
    }
    return pb.Register(**{**facts, **changes})


def server(index: int, kind: pb.MachineKind = CPU, n: int = 2, k: int = 1, **changes: object) -> pb.Register:
    place = {"machine_index": -1 if kind == CPU else index, "machine_id": f"{'c' if kind == CPU else 'm'}{index}"}
    address = f"tcp://{'cpu' if kind == CPU else 'gpu'}{index}:1"
    role = {"role": pb.ROLE_SUMMATION, "kind": kind, "local_size": 0, "address": address, "host": f"h{index}"}
    return worker(0, n=n, k=k, **{**role, **place, "pid": 200 + index, **changes})


class Cluster:
    """A core and its connections; keeps what each connection was told. Connections are numbered as they come."""

    def __init__(self, **config: object) -> None:
        self.core = SchedulerCore(ClusterConfig(**{"num_workers": 2, "num_servers": 1, "job": "j", **config}))
        self.now = 0.0
        self.told: dict[int, list[pb.SchedulerMessage]] = {}

    def take(self, outgoing: Outgoing) -> Outgoing:
        for connection, message in outgoing:
            self.told[connection].append(message)
        return outgoing

    def join(self, register: pb.Register) -> int:
        connection = len(self.told) + 1
        self.told[connection] = []
        self.take(self.core.handle(ConnectionOpened(connection), self.now))
        self.say(connection, register=register)
        return connection

    def say(self, connection: int, **body: object) -> Outgoing:
        return self.take(self.core.handle(MessageReceived(connection, pb.MemberMessage(**body)), self.now))

    def drop(self, connection: int) -> Outgoing:
        return self.take(self.core.handle(ConnectionClosed(connection), self.now))

    def tick(self, by_s: float, beating: tuple[int, ...] = ()) -> Outgoing:
        """Move the clock in steps, as a timer would, the members ``beating`` sending heartbeats."""
        out: Outgoing = []
        for _ in range(max(1, round(by_s / 0.5))):
            self.now += min(by_s, 0.5)
            for connection in beating:
                self.say(connection, heartbeat=pb.Heartbeat())
            out += self.take(self.core.tick(self.now))
        return out

    def last(self, connection: int) -> pb.SchedulerMessage:
        return self.told[connection][-1]

    def bodies(self, connection: int) -> list[str]:
        return [m.WhichOneof("body") for m in self.told[connection]]


def running(
    n: int = 2, k: int = 0, local_size: int = 2, *, measured: Sequence[float] = (), **config: object
) -> tuple[Cluster, list[int], list[int]]:
    """A complete cluster, with its workers' and its servers' connections. ``measured``: what its members find their
    links to carry, CPU machines first; empty: they say 1,000 Mbit/s."""
    cluster = Cluster(num_workers=n, num_servers=k, **config)
    told = {"link_mbit": 0.0} if measured else {}
    workers = [cluster.join(worker(i, local_size, n, k, **told)) for i in range(n)]
    servers = [cluster.join(server(i, CPU, n, k, **told)) for i in range(k)]
    if n > 1 and k < n:
        servers += [cluster.join(server(i, GPU, n, k, **told)) for i in range(n)]
    if measured:
        _measure(cluster, workers, measured, k)
    for each in (*workers, *servers):
        cluster.say(each, ready=pb.Ready())
    assert cluster.core.state == states.RUNNING
    return cluster, workers, servers


def _measure(cluster: Cluster, workers: Sequence[int], rates: Sequence[float], k: int) -> None:
    """Each worker answers what it is asked to measure: the slower one of two links."""
    answered = dict.fromkeys(workers, 0)
    while cluster.core.state != states.RUNNING and any(len(cluster.told[each]) > answered[each] for each in workers):
        for index, each in enumerate(workers):
            for message in cluster.told[each][answered[each] :]:
                if message.WhichOneof("body") == "measure":
                    kind, number = re.match(r"tcp://(cpu|gpu)(\d+):", message.measure.address).groups()
                    other = int(number) + (k if kind == "gpu" else 0)
                    found = pb.Measured(turn=message.measure.turn, mbit=min(rates[k + index], rates[other]))
                    cluster.say(each, measured=found)
                answered[each] += 1


def spec(shape: tuple[int, ...] = (3,), dtype: DType = DType.FLOAT32, op: Op = Op.SUM, **changes: Any) -> bytes:
    fields = SpecFields(dtype, op, 0, False, False, False, False, -1, 0, 0, 0, 0, 0.0, 0, "", shape, (), "", "", "")
    return RecordCodec(SpecFields).pack_one(replace(fields, **changes))


def ballot(ranks: list[int], what: bytes | None = None, name: str = "w", generation: int = 1) -> pb.Ballot:
    return pb.Ballot(name=name, generation=generation, votes=[pb.Vote(ranks=ranks, spec=what or spec())])


def declare(*ballots: pb.Ballot) -> dict[str, pb.Declare]:
    return {"declare": pb.Declare(ballots=ballots)}
