"""The classes that simulated processes are made of. A test that breaks one on purpose names another: see mutations.py.

class CountADuplicate(Parts):
    class rounds(Rounds): ...
"""

from __future__ import annotations

import functools
from typing import Any

from byteps_py.placement.table import PlacementTable
from byteps_py.scheduler.sessions import Sessions
from byteps_py.server.arrival import Arrival
from byteps_py.server.rounds import Rounds
from byteps_py.server.service import Service as ServerService
from byteps_py.worker.accusations import Accusations
from byteps_py.worker.agreement import Agreement
from byteps_py.worker.batching import BatchingLink
from byteps_py.worker.courier import Courier
from byteps_py.worker.desk import Desk
from byteps_py.worker.direct import Direct
from byteps_py.worker.elastic_desk import ElasticDesk
from byteps_py.worker.executor import Executor
from byteps_py.worker.group import Group
from byteps_py.worker.joining import Joining
from byteps_py.worker.memory import Memory
from byteps_py.worker.peers import PeerMachines
from byteps_py.worker.pipeline import Pipeline
from byteps_py.worker.placing import Placing
from byteps_py.worker.rejoining import Rejoining
from byteps_py.worker.requests import Requests
from byteps_py.worker.scatter import Scatter
from byteps_py.worker.service import Service
from byteps_py.worker.topology import Topology
from byteps_py.worker.waits import Waits

from .ledger import LedgerNetwork, Queue
from .network import Probe


class Parts:
    """Of the scheduler (``sessions``), of summation services (``rounds``), and of communication services."""

    sessions: type[Sessions] = Sessions
    rounds: type[Rounds[Arrival]] = Rounds

    service: type[Service] = Service
    desk: type[Desk] = Desk
    elastic_desk: type[ElasticDesk] = ElasticDesk
    peers: type[PeerMachines] = PeerMachines
    rejoining: type[Rejoining] = Rejoining
    accusations: type[Accusations] = Accusations
    link: Any = BatchingLink

    group: type[Group] = Group
    topology: type[Topology] = Topology
    memory: type[Memory] = Memory
    queue: type[Queue] = Queue
    scatter: type[Scatter] = Scatter
    pipeline: type[Pipeline] = Pipeline
    agreement: type[Agreement] = Agreement
    placing: type[Placing] = Placing
    direct: type[Direct] = Direct
    executor: type[Executor] = Executor
    courier: type[Courier] = Courier
    network: type[LedgerNetwork] = LedgerNetwork
    joining: type[Joining] = Joining
    requests: type[Requests] = Requests
    waits: type[Waits] = Waits


@functools.cache
def communication_service(parts: type[Parts], table: type[PlacementTable]) -> type[Service]:
    of_group = {
        f"{name}_class": getattr(parts, name)
        for name in (
            "topology", "memory", "queue", "scatter", "pipeline", "agreement", "direct", "network", "joining",
            "requests", "waits",
        )
    }  # fmt: skip
    of_group["placing_class"] = type("Placing", (parts.placing,), {"table_class": table})
    of_group["executor_class"] = type("Executor", (parts.executor,), {"courier_class": parts.courier})
    of_service = {
        f"{name}_class": getattr(parts, name)
        for name in ("desk", "elastic_desk", "peers", "rejoining", "accusations", "link")
    }
    group = type("Group", (parts.group,), of_group)
    return type("Service", (parts.service,), {**of_service, "group_class": group, "probe_class": Probe})


@functools.cache
def summation_service(parts: type[Parts]) -> type[ServerService]:
    return type("Service", (ServerService,), {"rounds_class": parts.rounds})
