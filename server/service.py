"""The summation service: sockets, threads and control link around the pure rounds.

Owns the process's life: it registers, serves, and decides when and how the process ends. Everything runs in the loop's
thread; any thread, and a signal handler, may call ``stop``. What ends a server, so that none outlives its job, and the
exit status:

    Stop from the scheduler: the job is over                          0
    ``stop``: SIGTERM, SIGINT                                         0, after Leave; if it may hold keys, once they
                                                                      have moved, or after ``DRAIN_LIMIT_S``; sooner
                                                                      if the scheduler is away and stays away
    Failure from the scheduler: the job can't go on                   1
    Refused by the scheduler, which had counted it as dead            75: it may be started again
    Refused by the scheduler, which has begun a new job               0, unless it joins that one (persistent_server.py)
    Refused, or the scheduler lost before the cluster was complete    the error is raised
    the scheduler away later, and no worker connected any more        0; until then it goes on summing
    (the launcher that started it died: the kernel's parent-death signal, set by the launcher)
"""

from __future__ import annotations

import dataclasses
import logging
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from byteps_py.config.addresses import place_of
from byteps_py.config.settings import Settings
from byteps_py.config.tuning import needs_turns
from byteps_py.dataplane.link_burst import LinkBursts
from byteps_py.dataplane.listener import Peer
from byteps_py.dataplane.traffic import Traffic
from byteps_py.errors import (
    BytePSError,
    CommunicationError,
    ConfigurationError,
    PeerLostError,
    ProtocolError,
    StallError,
    from_name,
)
from byteps_py.proto import control_pb2 as pb
from byteps_py.runtime import Runtime
from byteps_py.server.checkpoint_starter import CheckpointStarter
from byteps_py.server.contribution_listeners import ABOUT_COPIES, ContributionListener, LocalListener
from byteps_py.server.reducer import (
    Arrival,
    FrameMemory,
    KernelCall,
    OwnMemory,
    PayloadMemory,
    Reducer,
    copy_to_moved,
    plan,
    plan_merge,
)
from byteps_py.server.round_state import (
    AWAITED_AFTER_S,
    Action,
    Answer,
    Counters,
    Load,
    Merge,
    Reduce,
    RefuseContributions,
    Round,
    SendCopy,
    Want,
)
from byteps_py.server.rounds import Rounds
from byteps_py.server.shadow import ShadowStore
from byteps_py.server.shadow_keeper import ShadowKeeper, new_store
from byteps_py.system import machine
from byteps_py.system.log import logger
from byteps_py.system.stage_recorder import SUM, WAIT_FOR_MACHINES, stage_recorder
from byteps_py.tensors import Op
from byteps_py.wire.control_link import Connect, ControlEvents, ControlLink, RecorderMemory, send_last, send_recordings
from byteps_py.wire.data_link import (
    CODED,
    MAX_WAITED_US,
    READER_KINDS,
    Header,
    Kind,
    pack_changes,
    pack_clock,
    pack_names,
    unpack_clock,
    unpack_order,
)
from byteps_py.wire.launch_protocol import GIVEN_UP_STATUS, Blame, send_notice

T = TypeVar("T")

_ORPHAN_CHECK_S = 0.5
DRAIN_LIMIT_S = 30.0  # how long it goes on after SIGTERM if no other server takes its keys
_ORPHAN_S = 10.0  # how long it waits without scheduler and workers; these come back sooner, if at all

#: The same if another scheduler is there, whose job may need this server.
_REPLACED_S = 1.0


class SummationService:
    """One summation server on a machine of this ``kind``. ``run`` serves until the job ends.

    ``rounds_class``, ``network_class``: the classes of its parts; tests name others in a subclass.
    """

    rounds_class: type[Rounds[Arrival]] = Rounds
    network_class: type[ContributionListener] = ContributionListener

    def __init__(
        self,
        settings: Settings,
        kind: pb.MachineKind,
        connect: Connect,
        runtime: Runtime,
        shadows: ShadowStore | None = None,
        checkpoints: CheckpointStarter | None = None,
    ) -> None:
        """Binds its sockets. ``shadows``: what was kept for an earlier job. ``checkpoints``: has it written to disk.
        Raises ConfigurationError or RendezvousError."""
        if not settings.scheduler_address:
            raise ConfigurationError(
                "a summation server needs the scheduler's address: set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"
            )
        self._settings = settings
        self._kind = kind
        self._connect = connect
        self._rounds = self.rounds_class(settings.max_partition_bytes)
        self._traffic = Traffic()
        self._status = 0
        self._has_ended = False
        self._is_abandoned = False  # the job has ended without this server's
        self._has_closed = False
        self._is_unknown = False  # a scheduler is there that does not know this server
        self._is_replaced = False  # the scheduler has begun a new job
        self._error: BytePSError | None = None
        self._reason = "the server is done"
        self._is_headless = False  # the scheduler is away
        self._orphaned_since_s = 0.0
        self._has_tick = False
        self._is_draining = False
        self._is_prepared = False
        self._link: ControlLink | None = None
        self._stages = stage_recorder(self._settings, "server")
        self._is_traced = self._stages is not None  # and the trace is not written yet
        self._traced_group = 0  # the epoch that brought it
        host = machine.bindable_host(settings)
        self._runtime = runtime
        self._loop = runtime.loop
        self._network = self.network_class(
            host, settings, self._traffic, self._on_arrival, self._on_gone, self._rounds.withdraw, self._on_shadow
        )
        self._rdma = runtime.rdma_lane(settings, runtime.loop)
        if self._rdma is not None:
            self._network.use_rdma(self._rdma)
        self._network.attach(self._loop)
        self._relay = runtime.relay(settings)
        # On a GPU machine, the communication service has one.
        self._rate = runtime.link_rate_meter(settings, self._loop) if kind == pb.MACHINE_KIND_CPU else None
        self._bursts = LinkBursts(runtime.loop, settings)
        self._local: LocalListener | None = None
        if kind == pb.MACHINE_KIND_GPU:
            # The name has the process id, too: machines with different indices may share one host.
            name = f"{machine.local_socket(settings, 'ss')}-{self._runtime.getpid()}"
            self._local = LocalListener(
                name, settings, runtime, self._traffic, self._on_arrival, self._on_gone, self._rounds.withdraw
            )
        # On a GPU machine the communication service logs the same error already.
        self._bad_news = logging.INFO if self._local is not None else logging.ERROR
        self._reducer = Reducer(runtime, settings.server_threads, self._network.digest, self._prepared)
        self.shadows = ShadowKeeper(shadows or new_store(settings, runtime), runtime, self._reducer)
        self.shadows.stages = self._stages
        #: Gets the sums that are taken here: none, until states are kept that are stepped with them.
        self._take_sum: Callable[[Header, PayloadMemory | None], None] | None = None
        self._checkpoints = checkpoints

    @property
    def address(self) -> str:
        """The data plane's endpoint, ``tcp://host:port``."""
        return self._network.address

    def post(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` soon in the loop's thread. Any thread."""
        self._loop.post(callback)

    def run(self) -> int:
        """Serve until the job ends. Returns the exit status. Raises the error that kept the cluster from forming."""
        try:
            self._link = self._connect(self._settings, self._registration(), self._loop, self.control_events())
            if self._is_prepared:
                self._link.send(pb.MemberMessage(ready=pb.Ready()))
            logger.info("summation server at %s", self.address)
            self._loop.call_later(self._settings.stall_warn_s, self._warn_of_stalls)
            self.shadows.start()
            if self._checkpoints is not None:
                self._checkpoints.begin(lambda: self.shadows.store.durable() is not None)
            self._loop.run()
        except Exception as error:
            if self._link is not None:
                text = f"summation server at {self.address} (pid {self._runtime.getpid()}) failed: {error!r}"
                self._link.send(pb.MemberMessage(report=pb.Report(error=CommunicationError.__name__, message=text)))
                self._reason = text
            raise
        finally:
            self._close()
        if self._error is not None:
            raise self._error
        return self._status

    @property
    def has_closed(self) -> bool:
        """``run`` has ended all that it began: what this server keeps can be handed to another service."""
        return self._has_closed

    @property
    def is_abandoned(self) -> bool:
        """After ``run``: the job has failed or is gone, and was not ended in order."""
        return self._is_abandoned and self._has_closed

    @property
    def is_replaced(self) -> bool:
        """After ``run``: its job is over, because the scheduler has begun a new one in its place."""
        return self._is_replaced and self._has_closed

    @property
    def was_member(self) -> bool:
        """The cluster was complete with this server."""
        return self._rounds.epoch > 0

    @property
    def reason(self) -> str:
        """Why ``run`` has ended."""
        return self._reason

    def _prepared(self) -> None:
        """The kernels are loaded."""
        self._is_prepared = True
        self._network.open_echo()
        if self._link is not None:
            self._link.send(pb.MemberMessage(ready=pb.Ready()))

    def stop(self, reason: str) -> None:
        """Leave the job, so that ``run`` returns 0: once its keys have moved to others, or at once at the second call.
        Any thread, or a signal handler, may call it."""
        self._loop.post(lambda: self._drain(reason))

    def _drain(self, reason: str) -> None:
        self._reason = reason
        if self._is_draining or self._rounds.epoch == 0 or self._link is None:
            self._loop.stop()
            return
        self._is_draining = True
        # If the scheduler is away, the next one gets this. Leaving now would leave the keys without a server.
        self._link.send(pb.MemberMessage(drain=pb.Drain(reason=reason)))
        self._loop.call_later(_ORPHAN_S, lambda: self._loop.stop() if self._is_headless else None)
        self._loop.call_later(DRAIN_LIMIT_S, self._loop.stop)

    def _close(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()
        if self._link is not None:
            if self._is_traced:
                send_last(self._recorders(), self._link.send)
            self._link.close(self._reason)
        if self._stages is not None:
            self._stages.close()
        # Before the loop, because its threads post there. Before the connections: a local CS whose connection ends
        # relies on it that nobody writes into its memory any more.
        try:
            self._reducer.close()
        except StallError as error:
            # The machine is too busy to compile a kernel, or to sum a partition, in that time. The process ends with
            # its own status or error, which this one must not replace; its threads end before its connections.
            logger.warning("%s", error)
            return
        self.shadows.close()
        if self._relay is not None:
            self._relay.close()
        if self._rate is not None:
            self._rate.close()
        self._bursts.close()
        self._network.close()
        if self._rdma is not None:
            self._rdma.close()
        if self._local is not None:
            self._local.close()
        self._loop.close()
        self._has_closed = True

    # ---- data plane --------------------------------------------------------------------------------------

    def _on_arrival(self, arrival: Arrival) -> None:
        arrival.arrived_s = self._loop.time()
        if arrival.header.kind in ABOUT_COPIES:
            self._on_message_about_copies(arrival)
        else:
            self._perform(self._rounds.contribution(arrival, arrival.arrived_s), None)
        self._tick_while_needed()

    def _on_message_about_copies(self, arrival: Arrival) -> None:
        """A CLOCK or an ORDER."""
        try:
            if arrival.header.kind is Kind.ORDER:
                self._rounds.accumulators.order(arrival.header, *unpack_order(arrival.text))
                return
            clock, _ = unpack_clock(arrival.text)
            actions = self._rounds.accumulators.clock(arrival.header, clock, arrival.arrived_s)
        except ProtocolError as error:
            self._traffic.note("refused a message of machine", [arrival.header.sender], error)
            arrival.origin.refuse(arrival.header, f"{ProtocolError.__name__}\n{error}")
            return
        self._perform(actions, None)

    def _on_shadow(self, header: Header, peer: Peer, payload: FrameMemory) -> None:
        if header.kind not in READER_KINDS:
            self._take_sum = self.shadows.summed  # from the first SHADOW_BEGIN on
        self.shadows.on_message(header, peer, payload)

    def _tick_while_needed(self) -> None:
        if not self._has_tick and (self._rounds.is_wanting or self._rounds.awaited):
            self._has_tick = True
            self._loop.call_later(AWAITED_AFTER_S, self._tick)

    def _tick(self) -> None:
        """Ask machines for contributions that others wait for, or that are needed once more."""
        self._has_tick = False
        now = self._loop.time()
        self._perform(self._rounds.tick(now), None)
        for index, names in self._rounds.awaited.due(now, self._rounds.num_machines).items():
            self._tell(index, Header(Kind.AWAITED, index, self._rounds.epoch), pack_names(names))
        self._tick_while_needed()

    def _tell(self, index: int, header: Header, payload: bytes = b"") -> None:
        peer = self._network.peer_of(index)
        if peer is None and self._local is not None:
            peer = self._local.peer_of(index)
        if peer is not None:  # else WANT is repeated later, and AWAITED is not needed: it connects when it contributes
            peer.tell(header, payload)

    def _on_gone(self, peer: Peer) -> None:
        self._rounds.on_origin_lost(peer)

    def _perform(
        self, actions: list[Action[Arrival]], result: PayloadMemory | None, blame: int = 0, complete_s: float = 0.0
    ) -> None:
        """``blame``: the machines through which ``result`` is not finite; ``complete_s``: when the last contribution
        arrived."""
        for action in actions:
            match action:
                case Reduce(round_):
                    self._reduce(round_)
                case Want(header, machines):
                    for index in machines:
                        self._tell(index, dataclasses.replace(header, kind=Kind.WANT))
                case Answer(contributions):
                    message, digest = (result.message(), result.digest) if result is not None else (None, b"")
                    for arrival in in_turn(contributions, contributions[0].header.index if contributions else 0):
                        # A local machine has the result in its memory, and a broadcast's root always had it.
                        header = arrival.header
                        is_needed = arrival.answer is None and header.wants_result
                        waited_s = max(0.0, complete_s - arrival.arrived_s)
                        header.nonfinite_ranks, header.waited_us = blame, min(int(waited_s * 1e6), MAX_WAITED_US)
                        arrival.origin.answer(header, message if is_needed else None, digest)
                case Load():
                    self._load(action)
                case Merge():
                    self._merge(action)
                case SendCopy(arrival, clock, added_at, changes):
                    self._send_copy(arrival, pack_clock(clock, added_at), changes)
                case RefuseContributions(contributions, error, text):
                    self._traffic.note("refused a message of machine", [c.header.sender for c in contributions], text)
                    for arrival in contributions:
                        arrival.origin.refuse(arrival.header, f"{error.__name__}\n{text}")

    def _reduce(self, round_: Round[Arrival]) -> None:
        arrivals = round_.in_order()
        header = arrivals[0].header
        todo = plan(header.op, arrivals)
        complete_s = self._loop.time()
        if self._stages is not None:
            at, first_s = (f"{header.key:#018x}", header.index), min(each.arrived_s for each in arrivals)
            self._stages.begin(WAIT_FOR_MACHINES, *at, header.round, header.length, first_s)
            self._stages.end(WAIT_FOR_MACHINES, *at)
            self._stages.begin(SUM, *at, header.round, header.length)

        def done(error: BaseException | None, blame: int) -> None:
            if self._stages is not None:
                self._stages.end(SUM, f"{header.key:#018x}", header.index)
            actions = self._rounds.reduced(round_, error)
            for answer in actions:
                if isinstance(answer, Answer):
                    if self._take_sum is not None and header.op is Op.SUM:
                        self._take_sum(header, todo.result)
                    copy_to_moved(self._runtime, arrivals, answer.contributions, todo.result)
            self._perform(actions, todo.result, blame, complete_s)

        self._reducer.start(header.op, header.dtype, header.length, todo, done)

    def _load(self, load: Load[Arrival]) -> None:
        header, payload = load.contribution.header, load.contribution.payload
        if payload is None:
            raise ProtocolError(f"a copy of {load.accumulator} came without its bytes")
        values = OwnMemory(self._runtime.new_buffer(header.length))

        def done(error: BaseException | None, blame: int) -> None:
            self._perform(self._rounds.accumulators.loaded(load.accumulator, values, error, self._loop.time()), None)
            self._tick_while_needed()

        todo = KernelCall((payload.address,), (values.address,), None)
        self._reducer.start(Op.BROADCAST, header.dtype, header.length, todo, done)

    def _merge(self, merge: Merge[Arrival]) -> None:
        header = merge.contribution.header
        op = Op.SUM if merge.adds else Op.BROADCAST
        if self._stages is not None:
            self._stages.begin(SUM, f"{header.key:#018x}", header.index, header.round, header.length)

        def done(error: BaseException | None, blame: int) -> None:
            if self._stages is not None:
                self._stages.end(SUM, f"{header.key:#018x}", header.index)
            self._perform(self._rounds.accumulators.merged(merge, error, self._loop.time()), None)
            self._tick_while_needed()  # in a newer epoch, it waited for the kernel before it asked for clocks

        self._reducer.start(op, header.dtype, header.length, plan_merge(merge, self._runtime), done)

    def _send_copy(self, arrival: Arrival, clock: bytes, changes: list[Arrival] | None) -> None:
        header, payload = arrival.header, arrival.values or arrival.payload
        waited_s = max(0.0, self._loop.time() - arrival.arrived_s)
        header.waited_us = min(int(waited_s * 1e6), MAX_WAITED_US)
        arrival.origin.tell(dataclasses.replace(header, kind=Kind.CLOCK), clock)
        header.flags &= ~CODED
        arrival.values = None  # a coded change is kept
        if changes is not None:
            header.flags |= CODED
            others = [each for each in changes if each.header.sender != header.sender]
            codes = [each.payload.message().buffer for each in others if each.payload is not None]
            message = pack_changes([each.header.sender for each in changes], codes)
            buffer = self._runtime.new_buffer(len(message))
            buffer[:] = np.frombuffer(message, np.uint8)
            arrival.origin.answer(header, OwnMemory(buffer).message())
        elif arrival.answer is not None or payload is None:  # a local machine has it in its memory
            arrival.origin.answer(header, None)
        else:
            arrival.origin.answer(header, payload.message(), payload.digest)

    def _recorders(self) -> list[RecorderMemory]:
        """What it records for a trace."""
        stages = self._stages
        if stages is None:
            return []
        return [RecorderMemory(f"{stages.who} at {self._network.address.removeprefix('tcp://')}", stages.recorder.fd)]

    def _warn_of_stalls(self) -> None:
        if stalls := self._rounds.stalled(self._loop.time(), self._settings.stall_warn_s):
            missing = sorted({machine for stall in stalls for machine in stall.missing})
            first = stalls[0]
            some = "some of " if any(stall.machines < self._rounds.num_machines for stall in stalls) else ""
            logger.warning(
                "%d partitions wait for %smachines %s, the longest (key %#018x, round %d) for %.0f s",
                len(stalls), some, missing, first.key, first.round, first.age_s,
            )  # fmt: skip
        self._loop.call_later(self._settings.stall_warn_s, self._warn_of_stalls)

    # ---- control plane -----------------------------------------------------------------------------------

    def control_events(self) -> ControlEvents:
        """The callbacks of its link to the scheduler."""
        return ControlEvents(self._on_message, self._on_lost, self._report, self._on_away, self._on_back)

    def _registration(self) -> pb.Register:
        is_gpu = self._kind == pb.MACHINE_KIND_GPU
        return pb.Register(  # the link fills in the fields that are the same for all members
            role=pb.ROLE_SUMMATION,
            kind=self._kind,
            machine_index=self._settings.worker_id if is_gpu else -1,
            address=self._network.address,
            local_address=self._local.name if self._local is not None else "",
            relay_address=self._relay.address if self._relay is not None else "",
        )

    def heartbeat(self) -> pb.Heartbeat:
        """What the service has done. The loop's thread."""
        counted = statistics(self._traffic, self._rounds.counters)
        store = self.shadows.store
        counted.bytes_relayed = self._relay.bytes_moved if self._relay is not None else 0
        counted.shadow_steps, counted.shadow_waiting_bytes = store.applied_steps, store.waiting_bytes
        return pb.Heartbeat(statistics=counted)

    def _report(self) -> pb.Heartbeat:
        """The same for the scheduler, with what was sent since the last such report."""
        told = self.heartbeat()
        told.links.extend(self._network.link_usage())
        if self._rate is not None:
            told.rates.CopyFrom(self._rate.report())
        return told

    def _on_message(self, message: pb.SchedulerMessage) -> None:
        match message.WhichOneof("body"):
            case "membership":
                self._on_membership(message.membership)
            case "failure":
                text = f"the job has failed: {message.failure.error}: {message.failure.message}"
                # What a launcher is told it shows last of all, when the restarted job may long have ended well.
                goes_on = self._local is None and self._settings.shadow_keep_s > 0
                goes_on = goes_on and self.shadows.store.durable() is not None
                notice = Blame.SERVICE, message.failure.message, f"byteps_py server: {text}"
                if goes_on or not send_notice(*notice):
                    logger.log(self._bad_news, "%s", text)
                self._abandon(1, "the job has failed")
            case "ask" if self._link is not None:
                self._is_traced = self._is_traced and not message.ask.ends_trace
                send_recordings(message.ask, self._recorders(), self._link.send, self._loop.post)
            case "probe" if self._link is not None:
                self._bursts.begin(message.probe, self._link.send)
            case "stop":
                logger.info("the job is over: %s", message.stop.reason)
                if message.stop.keep_states:
                    self._abandon(0, "the job is over, and not all ranks called shutdown() at the end of training")
                else:
                    self._end(0, "the job is over")
            case "refused" if message.refused.replaced:
                logger.info("%s", message.refused.message)
                self._is_replaced = True
                self._abandon(0, "a new job has begun")
            case "refused" if self._rounds.epoch:
                logger.warning("%s", message.refused.message)
                self._abandon(GIVEN_UP_STATUS, "the scheduler has given this server up")
            case "refused":
                self._error = from_name(message.refused.error, message.refused.message)
                self._end(1, "refused by the scheduler")
            case _:  # Welcome, and news for workers
                pass

    def _on_membership(self, membership: pb.Membership) -> None:
        if membership.partition_bytes > self._settings.max_partition_bytes:
            self._error = ProtocolError(
                f"the scheduler's partitions have {membership.partition_bytes} bytes, but this server was started for "
                f"at most {self._settings.max_partition_bytes}: set BYTEPS_PARTITION_BYTES to the same value everywhere"
            )
            self._end(1, "the partition size differs")
            return
        logger.info("epoch %d: %d machines", membership.epoch, len(membership.workers))
        count, since = len(membership.workers), membership.workers_since
        self._trace_group(since)
        if self._relay is not None:
            self._relay.allow(frozenset(_host_of(worker.address) for worker in membership.workers))
        has_share = any(server.address == self.address for server in membership.servers)
        self._perform(self._rounds.membership(membership.epoch, count, self._loop.time(), since, has_share), None)
        self._tick_while_needed()  # contributions that waited for this epoch may be RESENT
        if self._checkpoints is not None:
            self._checkpoints.membership(self.address, membership.servers)

    def _trace_group(self, since: int) -> None:
        """A recording is of one group of ranks."""
        if not self._is_traced or since == self._traced_group or self._link is None:
            return
        if self._traced_group:
            send_recordings(pb.Ask(recordings=True), self._recorders(), self._link.send, self._loop.post)
        if self._stages is not None:
            self._stages.close()
        self._traced_group = since
        self._stages = self.shadows.stages = stage_recorder(self._settings, "server", since)

    def _on_lost(self, error: BytePSError) -> None:
        if self._rounds.epoch == 0:
            self._error = error
            self._end(1, "the scheduler is lost")
            return
        self._is_unknown = True
        self._on_away(error)

    def _on_away(self, error: BytePSError) -> None:
        self._is_unknown = self._is_unknown or not isinstance(error, PeerLostError)
        if self._rounds.epoch == 0:
            return  # no worker depends on this server yet, and the link fails if the scheduler does not return
        logger.log(self._bad_news, "%s; sums go on until the last worker has disconnected", error)
        self._orphaned_since_s = self._loop.time()
        if not self._is_headless:
            self._is_headless = True
            self._end_if_orphaned()

    def _on_back(self) -> None:
        self._is_headless = self._is_unknown = False

    def _end_if_orphaned(self) -> None:
        """Without a scheduler no Stop arrives. So the server ends when no worker has been connected for a while."""
        if not self._is_headless:
            return
        now = self._loop.time()
        if self._network.connections or (self._local is not None and self._local.connections):
            self._orphaned_since_s = now
        elif self._is_draining or now - self._orphaned_since_s >= orphan_patience_s(self._settings, self._is_unknown):
            self._is_replaced = self._is_unknown
            if self._is_replaced:
                self._abandon(0, "the scheduler has begun a new job, and no worker of this one is left")
                return
            logger.warning("no scheduler and no worker is connected any more: this server ends")
            self._abandon(0, "no scheduler and no worker is left")
            return
        self._loop.call_later(_ORPHAN_CHECK_S, self._end_if_orphaned)

    def _abandon(self, status: int, reason: str) -> None:
        self._is_abandoned = not self._has_ended and not self._is_draining
        self._end(status, reason)

    def _end(self, status: int, reason: str) -> None:
        """End ``run``. Only the first call counts: Stop also follows a Failure, before this loop has ended."""
        if self._has_ended:
            return
        self._has_ended = True
        self._status, self._reason = status, reason
        self._loop.stop()


def orphan_patience_s(settings: Settings, is_unknown: bool) -> float:
    """For how long a server waits without scheduler and workers. ``is_unknown``: a scheduler is there, of another job.

    Where ranks are started again, they leave their group after a loss, and a scheduler that is lost at the same time
    may take long to come back. The server may have the only copies of the optimizer's states."""
    if is_unknown:
        return _REPLACED_S
    return settings.elastic_timeout_s if settings.max_restarts else min(_ORPHAN_S, settings.patience_s)


def in_turn(arrivals: Sequence[T], index: int) -> list[T]:
    """The contributions to partition ``index`` in the order in which they are answered: those of many machines from
    another one on for each partition. If all servers answered machine 0 first, its link would have to take an answer of
    each at once.

    >>> ["".join(in_turn("abcdefghi", index)) for index in (0, 1, 2, 9)]
    ['abcdefghi', 'bcdefghia', 'cdefghiab', 'abcdefghi']
    >>> "".join(in_turn("abcd", 1))
    'abcd'
    """
    first = index % len(arrivals) if needs_turns(len(arrivals)) else 0
    return [*arrivals[first:], *arrivals[:first]]


def _host_of(endpoint: str) -> str:
    """Of ``tcp://host:port``."""
    return place_of(endpoint.removeprefix("tcp://"))[0] if endpoint else ""


def statistics(traffic: Traffic, counters: Counters) -> pb.Statistics:
    """The counters that a heartbeat brings to the scheduler."""
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pb.Statistics(
        bytes_received=traffic.bytes_received,
        bytes_sent=traffic.bytes_sent,
        bytes_local=traffic.bytes_local,
        rounds=counters.rounds,
        bytes_summed=counters.bytes_summed,
        cpu_s=time.process_time(),
        resident_bytes=resident_pages * resource.getpagesize(),
        bytes_in_flight=counters.bytes_in_flight,
        repetitions=counters.duplicates + counters.wanted,
    )
