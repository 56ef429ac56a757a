"""One communication service: its life from start to end, and what makes it end.

Owns the loop. It ends well when its ranks have left (unless it is to ``stay`` for ranks that come back, under
a launcher that ends it), when the scheduler says so, or by SIGTERM; with an error when the job fails.
"""

from __future__ import annotations

import functools
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from byteps_py import tuning
from byteps_py.channel import Listener
from byteps_py.errors import BytePSError, PeerLostError, RendezvousError, StallError, from_name
from byteps_py.kernels.engine import Engine, default_threads
from byteps_py.kernels.readiness import Readiness
from byteps_py.log import logger
from byteps_py.loop import EventLoop
from byteps_py.machine import local_socket
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.client import ControlLink, connect
from byteps_py.scheduler.declarations import to_spec
from byteps_py.settings import Settings
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.worker.actions import AskSum
from byteps_py.worker.agreement import Agreement
from byteps_py.worker.credit import PATIENCE_S, PushQueue
from byteps_py.worker.desk import Desk
from byteps_py.worker.direct import Direct
from byteps_py.worker.epochs import Epochs
from byteps_py.worker.executor import Executor
from byteps_py.worker.joining import Joining
from byteps_py.worker.memory import Memory
from byteps_py.worker.network import Network
from byteps_py.worker.peers import PeerMachines
from byteps_py.worker.pieces import Request, Transfer, due
from byteps_py.worker.pipeline import Pipeline
from byteps_py.worker.placing import LOCAL_PIECE_BYTES, Placing
from byteps_py.worker.probe import Probe
from byteps_py.worker.requests import Requests, describe_waiting
from byteps_py.worker.scatter import Scatter
from byteps_py.worker.sights import Sights
from byteps_py.worker.tensor import Part, SumRequest, Tensor
from byteps_py.worker.topology import Topology
from byteps_py.worker.waits import Waits

_TICK_S = 0.25
_STALLS_KEPT = 20
_WORD_OF_SCHEDULER_S = 1.0
_FAREWELL_S = 10.0  # at most: a scheduler that was restarted knows nothing of who waits to go
_HEADLESS_S = 10.0  # for so long a lost server waits for a lost scheduler to come back
#: Start-up makes their kernels ready, beside rendezvous; others become so when a tensor is declared.
_LIKELY = tuple((Op.SUM, dtype) for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16))


class Service:
    """``run`` returns the process's exit code."""

    def __init__(self, settings: Settings, stay: bool) -> None:
        self._settings = settings
        self._stay = stay
        self._exit_code = 0
        self._started = time.monotonic()
        self._loop = EventLoop()
        self._listener = Listener(local_socket(settings, "cs"))
        self._engine = Engine(default_threads(settings.worker_threads), "byteps-worker")
        self._prefaulter = Engine(1, "byteps-prefault")
        self._ready = Readiness(self._engine, self._loop, self._kernel_failed)
        self._desk = Desk(self._loop, self._listener, settings.local_size, self._rank_died, self._ranks_changed)
        self._queue: PushQueue[Part] = PushQueue()
        self._fetches: PushQueue[Transfer | AskSum] = PushQueue()
        self._agreement = Agreement(settings.local_size)
        self._placing: Placing | None = None
        self._requests: Requests | None = None
        self._sights: Sights | None = None
        self._executor: Executor | None = None
        self._network: Network | None = None
        self._epochs: Epochs | None = None
        self._peers: PeerMachines | None = None
        if settings.num_workers > 1:
            self._peers = PeerMachines(self._loop, settings, self._requested, self._machine_gone)
        self._probe: Probe | None = None
        self._pipeline: Pipeline | None = None
        self._direct: Direct | None = None
        self._scatter: Scatter | None = None
        self._waits: Waits | None = None
        self._stalled: list[str] = []  # what the scheduler said about stalls, the latest first
        self._told_left: set[int] = set()  # local ranks that have left, as the scheduler knows
        self._had_ranks = False
        # Ranks of other machines that are gone, and have given to what lacks here.
        self._departed: list[set[int]] = []
        self._is_dismissed = False  # nobody needs what its ranks gave, which are gone
        self._is_leaving = False
        self._is_headless = False  # the scheduler is away
        self._headless_since = 0.0
        self._link: ControlLink = connect(
            settings, self._registration(), self._loop, self._on_message, self._scheduler_lost, self._heartbeat,
            self._scheduler_away, self._scheduler_back,
        )  # fmt: skip

    def run(self) -> int:
        self._ready.expect(_LIKELY)
        self._loop.call_later(_TICK_S, self._tick)
        self._loop.call_later(PATIENCE_S, self._pump)
        try:
            self._loop.run()
        except BytePSError as error:  # a server broke the protocol, say: all must know
            logger.error("%s", error)
            self._fail(error)
        finally:
            self._close()
        return self._exit_code

    def stop(self) -> None:
        """End; in order, unless ranks are still at work. Any thread, also a signal handler."""
        self._loop.post(self._told_to_end)

    def _told_to_end(self) -> None:
        staying = self._desk.settle()
        if staying and self._requests is not None:
            ranks = self._requests.topology.describe_ranks(staying)
            self._fail(PeerLostError(f"the communication service of {ranks} was told to end while they needed it"))
        self._go()

    def _go(self) -> None:
        """End, once no other machine lacks a result that takes what this one gave."""
        ends_at_once = self._network is None or self._is_headless or self._desk.failure is not None
        have_left = len(self._desk.left) >= self._settings.local_size
        if ends_at_once or self._is_dismissed or not have_left:
            self._loop.stop()
        elif not self._is_leaving:
            self._is_leaving = True
            self._loop.call_later(_FAREWELL_S, self._loop.stop)

    def _settle(self) -> None:
        """Machines whose ranks are gone wait to hear that nothing of theirs is needed."""
        if self._executor is None:
            return
        lacking = []
        for ranks in self._departed:
            if self._executor.lacks(ranks):
                lacking.append(ranks)
            else:
                self._link.send(pb.MemberMessage(settled=pb.Gone(ranks=sorted(ranks))))
        self._departed = lacking

    def _close(self) -> None:
        self._link.close("the communication service ends")
        self._desk.close()
        self._engine.close()
        self._prefaulter.close()
        if self._probe is not None:
            self._probe.close()
        if self._network is not None:
            self._network.close()
        if self._peers is not None:
            self._peers.close()
        self._loop.close()

    # ---- the scheduler ---------------------------------------------------------------------------------

    def _registration(self) -> pb.Register:
        settings = self._settings
        return pb.Register(
            role=pb.ROLE_COMMUNICATION,
            kind=pb.MACHINE_KIND_GPU,
            machine_index=settings.worker_id,
            local_size=settings.local_size,
            address=self._peers.address if self._peers is not None else "",
        )

    def _on_message(self, message: pb.SchedulerMessage) -> None:
        body = message.WhichOneof("body")
        if body == "membership":
            if self._epochs is None:
                self._begin(message.membership)
            else:
                self._epochs.change(message.membership)
        elif body == "verdicts":
            self._decide(message.verdicts)
        elif body == "measure":
            # Not while kernels keep the processor busy.
            self._ready.when_done(functools.partial(self._measure, message.measure))
        elif body == "reopen" and self._executor is not None:
            reopen = message.reopen
            self._executor.run(self._agreement.reopened(reopen.name, reopen.generation, reopen.rounds))
        elif body == "release" and self._requests is not None:
            self._requests.release_barrier(message.release.sequence)
        elif body == "joined" and self._requests is not None:
            self._requests.joining.told(message.joined)
        elif body == "all_joined" and self._requests is not None:
            self._requests.joining.all_joined(message.all_joined.last, message.all_joined.direct_round)
        elif body == "stalled":
            self._stalled = [message.stalled.message, *self._stalled[:_STALLS_KEPT]]
            logger.warning("%s", message.stalled.message)
            self._look_at(message.stalled.missing)
        elif body == "slow":
            logger.warning("%s", message.slow.message)
        elif body == "sight":
            logger.warning("rank %d, which is waited for: %s", message.sight.rank, message.sight.text)
        elif body in ("refused", "failure"):
            answer = message.refused if body == "refused" else message.failure
            error = from_name(answer.error, answer.message)
            if body == "failure" and message.failure.orderly and self._waits is not None:
                self._waits.departed(time.monotonic(), answer.message, set(message.failure.ranks))
                self._departed.append(set(message.failure.ranks))
                self._settle()
            else:
                self._fail(error, report=False)
        elif body == "dismissed":
            self._is_dismissed = True
            if self._is_leaving:
                self._loop.stop()
        elif body == "stop":
            logger.info("the scheduler ends the job: %s", message.stop.reason)
            self._loop.stop()

    def _look_at(self, ranks: Iterable[int]) -> None:
        """Others wait for these ranks: what are those of this machine doing?"""
        if self._requests is not None and self._sights is not None:
            found = (self._requests.topology.local_rank_of(rank) for rank in ranks)
            self._sights.look(local_rank for local_rank in found if local_rank is not None)

    def _saw(self, topology: Topology, local_rank: int, text: str) -> None:
        self._link.send(pb.MemberMessage(sight=pb.Sight(rank=topology.first_rank + local_rank, text=text)))

    def _measure(self, measure: pb.Measure) -> None:
        """Find out about a link, as the scheduler asked."""

        def done(mbit: float) -> None:
            self._link.send(pb.MemberMessage(measured=pb.Measured(turn=measure.turn, mbit=mbit)))

        self._probe = Probe(self._loop, self._settings, self._settings.worker_id, measure.address, done)

    def _begin(self, membership: pb.Membership) -> None:
        """The cluster is complete."""
        topology = Topology.of(membership, self._settings.worker_id)
        ranks = (topology.first_rank, topology.size)
        memory = Memory(topology.machines, topology.local_size, self._prefault, ranks)
        machine_of = [worker.machine_index for worker in topology.workers for _ in range(worker.local_size)]
        scatter = self._scatter = Scatter(topology.machine_index, machine_of, self._fetches)
        pipeline = Pipeline(topology.size, self._queue, scatter)
        self._agreement.first_rank = topology.first_rank
        self._placing = Placing(topology)
        self._pipeline = pipeline
        credit = self._settings.credit_bytes
        usual = tuning.credit_bytes(topology.partition_bytes, topology.machines)
        self._queue.credit_bytes = usual if credit is None else credit
        slowest_mbit = min(member.link_mbit for member in (*topology.servers, *topology.workers))
        self._queue.patience_s = max(PATIENCE_S, tuning.answer_s(self._queue.credit_bytes, slowest_mbit))
        self._queue.set_weights({server.member_id: server.weight for server in topology.servers})
        self._fetches.credit_bytes, self._fetches.patience_s = self._queue.credit_bytes, self._queue.patience_s
        direct = self._direct = Direct(
            topology.machine_index,
            machine_of,
            topology.partition_bytes,
            LOCAL_PIECE_BYTES,
            self._fetches,
        )
        executor = self._executor = Executor(
            self._loop, self._ready, memory, pipeline, direct, scatter, topology.first_rank, self._link.send, self._fail
        )
        executor.on_end = self._end_tensor
        if self._peers is not None:
            self._peers.open(topology, self._machine_lost)
            executor.courier.peers = self._peers
        if topology.machines > 1:
            self._network = executor.network = Network(
                self._loop, self._settings, topology, memory, executor.answered, executor.again, self._server_lost
            )
        self._epochs = Epochs(topology, self._placing, self._network, executor, self._queue, self._link.send)
        joining = Joining(topology, self._agreement, pipeline, direct, executor, self._link.send, self._fail)
        self._requests = Requests(
            topology, memory, self._agreement, pipeline, direct, executor, joining, self._link.send
        )
        self._waits = Waits(
            self._requests, self._agreement, direct, self._desk, self._stay, self._settings.heartbeat_timeout_s
        )
        self._sights = Sights(
            self._loop, executor.ranks, self._requests.describe, memory.name_of, functools.partial(self._saw, topology)
        )
        self._desk.open(self._requests)
        logger.info(
            "epoch %d: %d machines, %d ranks; partitions of at most %d bytes, %d bytes in flight; links of %s Mbit/s",
            topology.epoch, topology.machines, topology.size, topology.partition_bytes, self._queue.credit_bytes,
            ", ".join(f"{member.link_mbit:.0f}" for member in (*topology.servers, *topology.workers)),
        )  # fmt: skip

    def _decide(self, verdicts: pb.Verdicts) -> None:
        """Names become tensors, all together, or void."""
        executor, placing, requests = self._executor, self._placing, self._requests
        if executor is None or placing is None or requests is None:
            return
        accepted: dict[str, TensorSpec] = {
            verdict.name: to_spec(verdict.name, verdict.spec) for verdict in verdicts.verdicts if not verdict.error
        }
        placing.add(accepted.values())
        for verdict in verdicts.verdicts:
            if verdict.error:
                error = from_name("JoinedError" if verdict.unsupported else "MismatchError", verdict.error)
                actions, old = self._agreement.rejected(
                    verdict.name, verdict.generation, error, verdict.late, verdict.rounds
                )
                executor.run(actions)
            else:
                spec = accepted[verdict.name]
                tensor, old, actions = self._agreement.accepted(verdict.name, verdict.generation, spec, verdict.rounds)
                executor.run(actions)
                if tensor is not None:
                    requests.memory.equip(tensor, requests.topology)
                    executor.start(tensor, placing.pieces(spec))
                    requests.joining.agreed(tensor)
            if old is not None:
                executor.retire(old)
            executor.run(self._agreement.decided(verdict.name))

    def _end_tensor(self, tensor: Tensor) -> None:
        """Its name is void, or other ranks', since a while, and now nothing of it is under way."""
        if self._executor is not None:
            self._executor.run(self._agreement.ended(tensor))
            self._executor.retire(tensor)

    def _scheduler_lost(self, error: BytePSError) -> None:
        if self._requests is None:
            self._fail(error, report=False)
        elif self._desk.failure is None:
            self._requests.joining.scheduler_lost(error)
            self._scheduler_away(error)

    def _scheduler_away(self, error: BytePSError) -> None:
        if not self._is_headless:
            self._headless_since = time.monotonic()
        self._is_headless = True
        self._headless_since = time.monotonic()
        # Reductions of agreed tensors need no scheduler; whoever needs one runs into the stall limit.
        if self._requests is not None and self._desk.failure is None:
            logger.warning("%s; agreed tensors are still reduced, new ones and barriers wait", error)

    def _scheduler_back(self) -> None:
        self._is_headless = False

    def _heartbeat(self) -> pb.Heartbeat:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        statistics = pb.Statistics(
            rounds=self._executor.rounds if self._executor else 0,
            cpu_s=usage.ru_utime + usage.ru_stime,
            resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
            bytes_in_flight=self._queue.in_flight_bytes,
        )
        if self._network is not None:
            statistics.bytes_sent = self._network.bytes_sent + (self._peers.bytes_sent if self._peers else 0)
            statistics.bytes_received = self._network.bytes_received
            statistics.bytes_received += self._peers.bytes_received if self._peers else 0
            statistics.bytes_local = self._network.bytes_local
        waiting = self._waiting(min(1.0, self._settings.stall_warn_s / 2))
        ranks = self._executor.pace.report(self._executor.ranks) if self._executor is not None else ()
        servers = self._network.pace.report() if self._network is not None else ()
        return pb.Heartbeat(statistics=statistics, waiting=waiting, ranks=ranks, servers=servers)

    # ---- waiting too long ------------------------------------------------------------------------------

    def _waiting(self, age_s: float) -> list[pb.Waiting]:
        return self._waits.longer_than(age_s, time.monotonic()) if self._waits is not None else []

    def _tick(self) -> None:
        self._loop.call_later(_TICK_S, self._tick)
        self._settle()
        now = time.monotonic()
        why, is_news = self._waits.vain(now) if self._waits is not None else ("", False)
        if why:
            self._fail(PeerLostError(why), report=is_news)
        limit = self._settings.stall_limit_s
        if limit and self._is_headless and now - self._headless_since > limit and self._requests is not None:
            self._requests.joining.scheduler_lost(PeerLostError(f"it has been away for {limit:g} s"))
        if limit and (waiting := self._waiting(limit)):
            # The scheduler knows whom they wait for: the last that it said about it.
            name = repr(waiting[0].name) if waiting[0].name else "a barrier"
            why = next((f": {sentence}" for sentence in self._stalled if name in sentence), "")
            if self._is_headless:
                why = "; the scheduler is away, and new tensors and barriers need it"
            self._fail(
                StallError(f"{describe_waiting(waiting[0])} longer than BYTEPS_STALL_LIMIT_S={limit:g} allows{why}")
            )
        if limit and self._is_headless and now - self._headless_since > limit and self._joined_here:
            text = f"join(): the scheduler is away for longer than BYTEPS_STALL_LIMIT_S={limit:g}, and only it knows"
            self._fail(StallError(f"{text} when all have joined"))
        if not self._stay and not self._had_ranks and now - self._started > self._settings.start_timeout_s:
            logger.error("no rank came within %g s", self._settings.start_timeout_s)
            self._exit_code = 1
            self._loop.stop()

    @property
    def _joined_here(self) -> bool:
        """Local ranks wait for all to join."""
        return self._requests is not None and bool(self._requests.joining.here)

    def _pump(self) -> None:
        now = time.monotonic()
        if len(self._queue) and self._executor is not None and self._pipeline is not None:
            self._executor.run(self._pipeline.pump(now))
        if len(self._fetches) and self._executor is not None:
            self._executor.run(due(self._fetches, now))
        waits = len(self._queue) or len(self._fetches)
        self._loop.call_later(PATIENCE_S / 5 if waits else PATIENCE_S, self._pump)

    # ---- failing and ending ----------------------------------------------------------------------------

    def _rank_died(self, sentence: str) -> None:
        self._fail(PeerLostError(sentence))

    def _server_lost(self, sentence: str, member_id: int) -> None:
        """Others can do its work, once the scheduler says which. Not later than the stall limit allows."""
        logger.warning("%s", sentence)
        self._link.send(pb.MemberMessage(unreachable=pb.Unreachable(member_id=member_id, reason=sentence)))
        if self._is_headless:
            error = PeerLostError(f"{sentence}; the scheduler, which would give its work to others, is lost too")
            self._loop.call_later(_HEADLESS_S, lambda: self._fail(error) if self._is_headless else None)

    def _machine_lost(self, sentence: str) -> None:
        error = PeerLostError(sentence)
        # It may have died, or ended because the job has failed: then the scheduler will say so.
        self._loop.call_later(0.0 if self._is_headless else _WORD_OF_SCHEDULER_S, lambda: self._fail(error))

    def _requested(self, request: Request | SumRequest) -> None:
        if self._executor is None or self._direct is None or self._scatter is None:
            return  # not before ``open``
        if isinstance(request, SumRequest):
            self._executor.run(self._scatter.requested(request))
        else:
            self._executor.run(self._direct.requested(request))

    def _machine_gone(self, machine: int) -> None:
        if self._direct is not None:
            self._direct.gone(machine)

    def _prefault(self, work: Callable[[], None]) -> None:
        # Not on the loop's thread, which has heartbeats to send, nor before kernels, for which answers wait in memory.
        self._prefaulter.submit(0, work, self._prefaulted)

    def _prefaulted(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, BytePSError):  # a BytePSError: the engine was closed first
            self._loop.post(lambda: self._fail(BytePSError(f"shared memory can't be had: {error}")))

    def _kernel_failed(self, error: BaseException) -> None:
        self._fail(RendezvousError(f"a summing kernel can't be compiled: {error!r}"))

    def _fail(self, error: BytePSError, report: bool = True) -> None:
        """The job can't go on: tell the local ranks and, unless they know, all others."""
        if self._desk.failure is not None:
            return
        self._exit_code = 1
        logger.info("the job fails: %s", error)
        if report:
            self._link.send(pb.MemberMessage(report=pb.Report(error=type(error).__name__, message=str(error))))
        self._desk.fail(error)
        self._ranks_changed()

    def _ranks_changed(self) -> None:
        here = self._desk.ranks_here
        self._had_ranks = self._had_ranks or here > 0
        left = self._desk.gone if self._stay else self._desk.left
        if self._requests is not None and self._desk.failure is None and (news := sorted(set(left) - self._told_left)):
            self._told_left.update(news)
            first_rank = self._requests.topology.first_rank
            self._link.send(pb.MemberMessage(gone=pb.Gone(ranks=[first_rank + rank for rank in news])))
        all_have_come = self._requests is None or len(self._desk.left) >= self._settings.local_size
        if here or self._stay:
            return
        if self._desk.failure is not None or (self._had_ranks and all_have_come):
            self._go()
