"""The classes that simulated processes are made of. A test that breaks one on purpose names another: see mutations.py.

class CountADuplicate(Parts):
    class rounds(Rounds): ...
"""

from __future__ import annotations

import functools
from typing import Any

from byteps_py.placement.placement_table import PlacementTable
from byteps_py.scheduler.member_links.links import MemberLinks
from byteps_py.server.reducer import Arrival
from byteps_py.server.rounds import Rounds
from byteps_py.server.service import SummationService
from byteps_py.server.shadow import ShadowStore
from byteps_py.tensors import Op
from byteps_py.worker.core.agreement import Agreement
from byteps_py.worker.core.deadlines import FailureSuspicions
from byteps_py.worker.core.hosted_steps import HostedSteps
from byteps_py.worker.core.piece_exchange import PieceExchange
from byteps_py.worker.core.placement_view import PlacementView
from byteps_py.worker.core.round_pipeline import RoundPipeline
from byteps_py.worker.core.scatter import Scatter
from byteps_py.worker.core.shadowing import Shadowing
from byteps_py.worker.core.topology import Topology
from byteps_py.worker.group import Group
from byteps_py.worker.io.executor import Executor
from byteps_py.worker.io.peers import PeerMachines
from byteps_py.worker.io.piece_executor import PieceExecutor
from byteps_py.worker.io.slot_memory import SlotMemory
from byteps_py.worker.ranks.hosting import Hosting
from byteps_py.worker.ranks.join_handler import JoinHandler
from byteps_py.worker.ranks.rank_server import RankServer
from byteps_py.worker.ranks.request_handler import RequestHandler
from byteps_py.worker.ranks.shadows import Shadows
from byteps_py.worker.ranks.stall_monitor import StallMonitor
from byteps_py.worker.scheduler_messages import BatchingLink, Rejoining
from byteps_py.worker.service import CommunicationService

from .ledger import LedgerNetwork, Queue
from .network import Probe

#: Of ranks and services: what stands for PACED_BYTES of byteps_py/wire/rank_link.py.
PACED_BYTES = 100


class Parts:
    """Of the scheduler (``member_links``), of summation services (``rounds``, ``shadow_store``), and of communication
    services."""

    member_links: type[MemberLinks] = MemberLinks
    rounds: type[Rounds[Arrival]] = Rounds
    shadow_store: type[ShadowStore] = ShadowStore

    service: type[CommunicationService] = CommunicationService
    rank_server: type[RankServer] = RankServer
    peers: type[PeerMachines] = PeerMachines
    rejoining: type[Rejoining] = Rejoining
    suspicions: type[FailureSuspicions] = FailureSuspicions
    link: Any = BatchingLink

    group: type[Group] = Group
    topology: type[Topology] = Topology
    memory: type[SlotMemory] = SlotMemory
    queue: type[Queue] = Queue
    scatter: type[Scatter] = Scatter
    pipeline: type[RoundPipeline] = RoundPipeline
    hosted_steps: type[HostedSteps] = HostedSteps
    agreement: type[Agreement] = Agreement
    placing: type[PlacementView] = PlacementView
    direct: type[PieceExchange] = PieceExchange
    executor: type[Executor] = Executor
    piece_executor: type[PieceExecutor] = PieceExecutor
    network: type[LedgerNetwork] = LedgerNetwork
    joining: type[JoinHandler] = JoinHandler
    requests: type[RequestHandler] = RequestHandler
    hosting: type[Hosting] = Hosting
    shadows: type[Shadows] = Shadows
    shadowing: type[Shadowing[Any]] = Shadowing
    waits: type[StallMonitor] = StallMonitor

    held_op: Op = Op.MIN  # of ranks, on the step that is held for all


@functools.cache
def communication_service(parts: type[Parts], table: type[PlacementTable]) -> type[CommunicationService]:
    of_group = {
        f"{name}_class": getattr(parts, name)
        for name in (
            "topology", "memory", "queue", "scatter", "pipeline", "hosted_steps", "agreement", "direct", "network",
            "joining", "waits",
        )
    }  # fmt: skip
    of_group["placement_view_class"] = type("PlacementView", (parts.placing,), {"table_class": table})
    of_shadows = {"shadowing_class": parts.shadowing, "paced_bytes": PACED_BYTES}
    shadows = type("Shadows", (parts.shadows,), of_shadows)
    hosting = type("Hosting", (parts.hosting,), {"shadows_class": shadows})
    of_group["requests_class"] = type("Requests", (parts.requests,), {"hosting_class": hosting})
    of_group["executor_class"] = type("Executor", (parts.executor,), {"piece_executor_class": parts.piece_executor})
    of_service = {
        f"{name}_class": getattr(parts, name) for name in ("rank_server", "peers", "rejoining", "suspicions", "link")
    }
    group = type("Group", (parts.group,), of_group)
    return type("Service", (parts.service,), {**of_service, "group_class": group, "probe_class": Probe})


@functools.cache
def summation_service(parts: type[Parts]) -> type[SummationService]:
    return type("Service", (SummationService,), {"rounds_class": parts.rounds, "store_class": parts.shadow_store})
