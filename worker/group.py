"""All that a communication service has for one group of ranks: from the membership that made it one to its end.

An elastic job's service has one group after another; any other has one. Owned by the loop's thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from byteps_py.arrivals import ArrivalLog, orders_of, read
from byteps_py.config import tuning
from byteps_py.config.settings import Settings
from byteps_py.dataplane.long_links import LONG_S
from byteps_py.errors import BytePSError, ConfigurationError, ProtocolError, UsageError, from_name
from byteps_py.kernels.readiness import Readiness
from byteps_py.proto import control_pb2 as pb
from byteps_py.runtime import Runtime
from byteps_py.system.log import logger
from byteps_py.system.stage_recorder import stage_recorder
from byteps_py.tensors import TensorSpec
from byteps_py.wire.control_link import RecorderMemory
from byteps_py.wire.rank_link import RelayedRank, unpack_spec
from byteps_py.wording import count_text
from byteps_py.worker.core import credit, pieces
from byteps_py.worker.core.agreement import Agreement
from byteps_py.worker.core.credit import PushQueue
from byteps_py.worker.core.events import (
    AgreementEvent,
    MachineLost,
    NameAccepted,
    NameRejected,
    NameReopened,
    TimePassed,
    VerdictApplied,
)
from byteps_py.worker.core.hosted_steps import HostedSteps
from byteps_py.worker.core.owners import OwnedPiece
from byteps_py.worker.core.piece_exchange import PieceExchange
from byteps_py.worker.core.pieces import PieceRequest, Receipt, Transfer, due
from byteps_py.worker.core.placement_view import PlacementView
from byteps_py.worker.core.round_pipeline import RoundPipeline
from byteps_py.worker.core.scatter import Scatter
from byteps_py.worker.core.tensor import AskSum, Part, SumRequest, Tensor
from byteps_py.worker.core.topology import Topology, turn_starts
from byteps_py.worker.io.executor import Executor
from byteps_py.worker.io.network import Network
from byteps_py.worker.io.peers import PeerMachines
from byteps_py.worker.io.piece_executor import Cores
from byteps_py.worker.io.server_links import silence_s
from byteps_py.worker.io.slot_memory import SlotMemory
from byteps_py.worker.ranks.join_handler import JoinHandler
from byteps_py.worker.ranks.rank_server import RankServer
from byteps_py.worker.ranks.request_handler import RequestHandler
from byteps_py.worker.ranks.stall_monitor import StackSampler, StallMonitor


@dataclass(frozen=True, slots=True)
class GroupServices:
    """The parts of the communication service that a group uses.

    ``stay``: the service waits for ranks that come back. ``prefault``: does its argument on another thread.
    ``server_lost(sentence, member id, whether its process has ended)``, ``machine_lost(sentence, index)``: it can't be
    reached.
    """

    runtime: Runtime
    settings: Settings
    stay: bool
    ready: Readiness
    rank_server: RankServer
    peers: PeerMachines | None
    send: Callable[[pb.MemberMessage], None]
    fail: Callable[[BytePSError], None]
    prefault: Callable[[Callable[[], None]], None]
    server_lost: Callable[[str, int, bool], None]
    machine_lost: Callable[[str, int], None]


class Group:
    """``membership``: of the group's first epoch; ``place``: of this machine among its workers. Raises ProtocolError if
    there can't be one like that. The classes are those that a group makes; a subclass may name others."""

    topology_class: type[Topology] = Topology
    memory_class: type[SlotMemory] = SlotMemory
    queue_class: type[PushQueue[Part]] = PushQueue
    scatter_class: type[Scatter] = Scatter
    pipeline_class: type[RoundPipeline] = RoundPipeline
    hosted_steps_class: type[HostedSteps] = HostedSteps
    agreement_class: type[Agreement] = Agreement
    placement_view_class: type[PlacementView] = PlacementView
    direct_class: type[PieceExchange] = PieceExchange
    executor_class: type[Executor] = Executor
    network_class: type[Network] = Network
    joining_class: type[JoinHandler] = JoinHandler
    requests_class: type[RequestHandler] = RequestHandler
    waits_class: type[StallMonitor] = StallMonitor

    def __init__(self, services: GroupServices, membership: pb.Membership, place: int) -> None:
        settings, send, fail = services.settings, services.send, services.fail
        runtime, thresholds = services.runtime, services.runtime.thresholds
        self._services = services
        self._loop = runtime.loop
        topology = self.topology = self.topology_class.of(membership, place, settings.shadow_copies)
        topology.check()
        self._epoch = topology  # the present one; ``topology`` is the first
        ranks = (topology.first_rank, topology.size)
        memory = self.memory_class(runtime, topology.machines, topology.local_size, services.prefault, ranks)
        machine_of = [worker.machine_index for worker in topology.workers for _ in range(worker.local_size)]
        self.queue = self.queue_class()
        self._fetches: PushQueue[Transfer | AskSum] = PushQueue()
        self._limit(topology)
        self._scatter = scatter = self.scatter_class(
            topology.machine_index, machine_of, self._fetches, thresholds.chunk
        )
        hosted = self.hosted_steps_class(topology.first_rank, topology.local_size, machine_of)
        self._pipeline = pipeline = self.pipeline_class(topology.size, self.queue, scatter, hosted)
        self.agreement = self.agreement_class(topology.local_size, topology.first_rank)
        self._placing = self.placement_view_class(topology, thresholds.local_sum_piece, thresholds.chunk)
        self._direct = direct = self.direct_class(
            topology.machine_index, machine_of, topology.partition_bytes, thresholds.local_copy_piece, self._fetches,
            thresholds.joint_copy,
        )  # fmt: skip
        cores = Cores(self.agreement, pipeline, direct, scatter)
        executor = self.executor = self.executor_class(
            runtime, services.ready, memory, cores, topology.first_rank, send, fail
        )
        executor.stages = stage_recorder(settings, f"worker {topology.machine_index}", topology.group)
        executor.on_begin = self._begin
        executor.piece_executor.peers = services.peers
        if services.peers is not None:
            memory.when_left = services.peers.when_left
        self.network: Network | None = None
        if topology.machines > 1 or topology.cpu_servers:  # these can keep copies of a machine's states
            self.network = executor.network = self.network_class(
                runtime, settings, topology, memory, executor.answered, executor.on_reconnected, services.server_lost
            )
        self._record_or_replay(settings, topology)
        self.joining = self.joining_class(topology, self.agreement, direct, executor, send, fail)
        self.requests = self.requests_class(topology, memory, self.agreement, pipeline, direct, executor, self.joining)
        self.waits = self.waits_class(
            self.requests, self.agreement, direct, self.network, services.rank_server, services.stay,
            lambda: silence_s(settings, runtime.loop),
        )  # fmt: skip
        self._stack_sampler = StackSampler(
            runtime.loop, executor.ranks, self.requests.describe, memory.name_of, self._on_stack_sample
        )

    def _record_or_replay(self, settings: Settings, topology: Topology) -> None:
        """Of asynchronous training, log the order of its changes, or repeat it. Raises ConfigurationError."""
        if self.network is None:
            return
        try:
            if settings.record_arrivals:
                self.executor.arrivals = ArrivalLog(Path(settings.record_arrivals), topology.machine_index)
            elif settings.replay_arrivals:
                self.network.orders = orders_of(read(Path(settings.replay_arrivals), topology.machines)).by_place
        except (OSError, UsageError) as error:
            raise ConfigurationError(f"the order of an asynchronous run: {error}") from None

    def open(self) -> None:
        """Let its ranks in, and other machines ask. The caller knows this group by now."""
        topology, peers = self.topology, self._services.peers
        if peers is not None:  # now that they can be answered: other machines may have asked already
            rdma = self.network.rdma if self.network is not None else None
            peers.open(topology, self._services.machine_lost, rdma)
        self._services.rank_server.open(self.requests)
        logger.info(
            "epoch %d: %d machines, %d ranks; partitions of at most %d bytes, %d bytes in flight; links of %s Mbit/s",
            topology.epoch, topology.machines, topology.size, topology.partition_bytes, self.queue.credit_bytes,
            ", ".join(f"{member.link_mbit:.0f}" for member in (*topology.servers, *topology.workers)),
        )  # fmt: skip

    def _limit(self, topology: Topology) -> None:
        """How much may be in flight at once, and for how long it counts."""
        configured = self._services.settings.credit_bytes
        is_shared = topology.gpu_machines_sum
        usual = tuning.credit_bytes(topology.partition_bytes, topology.machines, is_shared)
        self.queue.credit_bytes = usual if configured is None else configured
        answer_s = tuning.answer_s(self.queue.credit_bytes, topology.slowest_mbit, is_shared)
        self.queue.patience_s = max(credit.PATIENCE_S, answer_s)
        self.queue.set_weights(topology.weights, turn_starts(topology, self.queue.credit_bytes))
        self._fetches.credit_bytes = self.queue.credit_bytes
        self._fetches.patience_s = max(pieces.PATIENCE_S, answer_s)

    def widen_for_long_links(self) -> None:
        """Let more be in flight where it is on its way for long, unless the settings say how much. Called again and
        again, as connections are made."""
        if self.network is None or self._services.settings.credit_bytes is not None:
            return
        topology, round_trip_s = self._epoch, self.network.round_trip_s
        if round_trip_s > LONG_S:
            usual = tuning.credit_bytes(topology.partition_bytes, topology.machines, topology.gpu_machines_sum)
            wider = usual + tuning.on_their_way_bytes(topology.slowest_mbit, round_trip_s)
            self.queue.credit_bytes = max(self.queue.credit_bytes, wider)

    @property
    def has_slow_links(self) -> bool:
        """Of any machine."""
        return tuning.is_slow(self._epoch.slowest_mbit)

    def end(self) -> None:
        """The ranks are a group no more. Another may follow, with nothing of this one."""
        self.executor.abandon()
        if self.executor.stages is not None:
            self.executor.stages.close()
        self.close_logs()
        self.requests.close()
        self.requests.memory.release()
        if self._services.peers is not None:
            self._services.peers.leave()
        if self.network is not None:
            self.network.close()

    def close_logs(self) -> None:
        """Write what is left of them."""
        if self.executor.arrivals is not None:
            self.executor.arrivals.close()

    def change(self, membership: pb.Membership) -> None:
        """Other servers, the same ranks, in the middle of rounds. Raises ProtocolError for servers that can't be.

        The scheduler's word comes to every machine at the same place in the order of verdicts, so all have the same
        table after it. What was given to a server that has lost a partition, and is not answered, is given to the one
        that has it now, RESENT: that one asks the other machines for their parts if they have the result already. So
        machines need not go over at the same moment, and none waits for another.
        """
        self.waits.is_unserved = False
        if membership.epoch <= self._epoch.epoch or self.network is None:
            return
        servers = tuple(membership.servers)
        topology = self._epoch = dataclasses.replace(self._epoch, epoch=membership.epoch, servers=servers)
        topology.check()
        self._placing.change(topology)
        self.network.change(topology)
        self.queue.set_weights(topology.weights, turn_starts(topology, self.queue.credit_bytes))
        moved = self.executor.move(self._placing.server_of)
        self.requests.hosting.shadows.change(topology)
        self._services.send(pb.MemberMessage(applied=pb.Applied(epoch=membership.epoch, moved=moved)))
        logger.warning(
            "epoch %d: moved %s to %s: %s",
            membership.epoch, count_text(moved, "partition"), count_text(len(topology.servers), "summation service"),
            membership.reason,
        )  # fmt: skip

    # ---- what the scheduler has decided ------------------------------------------------------------------

    def on_message(self, message: pb.SchedulerMessage) -> None:
        match message.WhichOneof("body"):
            case "verdicts":
                self._decide(message.verdicts)
            case "reopen":  # a name is voted on again
                reopen = message.reopen
                self._agree(NameReopened(reopen.name, reopen.generation, reopen.rounds))
            case "release":
                self.requests.release_barrier(message.release.sequence)
            case "relays":
                self._set_relays(message.relays)
            case "joined":
                self.joining.on_join(message.joined)
            case "all_joined":
                self.joining.all_joined(message.all_joined.last, message.all_joined.direct_round)

    def _set_relays(self, relays: pb.Relays) -> None:
        """Tell the ranks whom they reach through a third machine."""
        here, found = self.topology.machine_index, []
        for relay in relays.relays:
            pair = {relay.first_machine, relay.second_machine}
            if here in pair and len(pair) == 2 and max(pair) < self.topology.machines:
                (there,) = pair - {here}
                found += [RelayedRank(rank, relay.address) for rank in self.topology.ranks_of(there)]
        self._services.rank_server.set_relays(tuple(found))

    def _decide(self, verdicts: pb.Verdicts) -> None:
        """Names become tensors, all together, or void."""
        accepted: dict[str, TensorSpec] = {
            verdict.name: unpack_spec(verdict.name, verdict.spec) for verdict in verdicts.verdicts if not verdict.error
        }
        self._placing.add(accepted.values())
        for verdict in verdicts.verdicts:
            name, generation, rounds = verdict.name, verdict.generation, verdict.rounds
            if verdict.error:
                error = from_name("JoinedError" if verdict.unsupported else "MismatchError", verdict.error)
                self._agree(NameRejected(name, generation, error, verdict.late, rounds))
            else:
                self._agree(NameAccepted(name, generation, accepted[name], rounds))
            self._agree(VerdictApplied(name))

    def _agree(self, event: AgreementEvent) -> None:
        self.executor.run(self.agreement.handle(event))

    def _begin(self, tensor: Tensor) -> None:
        pieces = self._placing.pieces(tensor.spec)
        here = self.topology.ranks_of(self.topology.machine_index)
        owned = sum(each.length for each in pieces if isinstance(each, OwnedPiece) and each.owner in here)
        self.requests.memory.equip(tensor, self.topology, owned)
        self.executor.start(tensor, pieces)
        self.joining.agreed(tensor)
        if tensor.spec.ownership:
            self.requests.hosting.agreed()

    # ---- other machines ----------------------------------------------------------------------------------

    def requested(self, request: PieceRequest | SumRequest | Receipt) -> None:
        """Another machine asks for what a rank here gives, or has got it."""
        if isinstance(request, SumRequest):
            self.executor.run(self._scatter.requested(request))
        else:
            self.executor.run(self._direct.handle(request, self._loop.time()))

    def machine_gone(self, machine: int) -> None:
        self._direct.handle(MachineLost(machine), self._loop.time())

    def owes(self, gone: set[int]) -> bool:
        """See PieceExchange."""
        return self._direct.owes(gone)

    def drain(self, gone: set[int]) -> bool:
        """Tell local ranks that wait for it that others, but for those that are ``gone``, have what these gave. True if
        some wait on."""
        rank_server, waits = self._services.rank_server, False
        for local_rank in rank_server.draining():
            if self._direct.owes(gone, local_rank):
                waits = True
            else:
                rank_server.drained(local_rank)
        return waits

    def lacks(self, gone: set[int]) -> bool:
        """Something of rounds that these ranks, which have shut down, took part in is not over here: a result, or their
        word that they have got what is theirs."""
        return self.executor.lacks(gone) or self._direct.keeps_for(gone)

    def pump(self) -> bool:
        """Send what may be sent by now. True if something waits for its turn."""
        now = self._loop.time()
        if len(self.queue):
            self.executor.handle(TimePassed())
        if len(self._fetches):
            self.executor.run(due(self._fetches, now))
        return bool(len(self.queue) or len(self._fetches))

    # ---- what is to be seen ------------------------------------------------------------------------------

    def waiting(self, age_s: float) -> list[pb.Waiting]:
        """What local ranks have waited for longer than ``age_s``. Mostly nothing, as is seen at a glance."""
        now = self._loop.time()
        ranks = self.executor.ranks.values()
        if (
            self.requests.barrier_since is None
            and not self.executor.pace.is_pending_since(now - age_s)
            and not any(rank.direct_waits for rank in ranks)
        ):
            return []
        return self.waits.longer_than(age_s, now)

    def count(self, statistics: pb.Statistics) -> None:
        """Add what it has done."""
        statistics.rounds += self.executor.rounds
        if self.network is not None:
            statistics.bytes_sent += self.network.bytes_sent
            statistics.bytes_received += self.network.bytes_received
            statistics.bytes_local += self.network.bytes_local

    def pair_usage(self) -> list[pb.PairUsage]:
        """What its ranks sent to those of each other machine since this was called before, as far as they have told."""
        found: dict[int, pb.PairUsage] = {}
        for rank in self.executor.ranks.values():
            for used in rank.take_link_reports():
                machine = self.topology.machine_of(used.rank) if used.rank < self.topology.size else -1
                if machine in (-1, self.topology.machine_index):
                    raise ProtocolError(f"local rank {rank.local_rank} tells of a link to rank {used.rank}")
                pair = found.setdefault(machine, pb.PairUsage(machine_index=machine))
                pair.bytes += used.nbytes
                pair.relayed_bytes += used.relayed_bytes
                pair.busy_s = max(pair.busy_s, used.busy_s)
                pair.unread_s = max(pair.unread_s, used.unread_s)
                pair.relayed_busy_s = max(pair.relayed_busy_s, used.relayed_busy_s)
        return list(found.values())

    def recorders(self) -> list[RecorderMemory]:
        """The flight recorders of the local ranks, also of those that have left, and of the stages here."""
        first, given = self.topology.first_rank, self.requests.flight_recorders
        found = [
            RecorderMemory(f"rank {first + local}", given.get(local, -1)) for local in range(self.topology.local_size)
        ]
        if self.executor.stages is not None:
            found.append(RecorderMemory(self.executor.stages.who, self.executor.stages.recorder.fd))
        return found

    def sample_stacks(self, ranks: Iterable[int]) -> None:
        """Others wait for these ranks: what are those of this machine doing?"""
        found = (self.topology.local_rank_of(rank) for rank in ranks)
        self._stack_sampler.sample(local_rank for local_rank in found if local_rank is not None)

    def _on_stack_sample(self, local_rank: int, text: str) -> None:
        rank = self.topology.first_rank + local_rank
        self._services.send(pb.MemberMessage(stack_report=pb.StackReport(rank=rank, text=text)))
