"""One communication service: its life from start to end, and what makes it end.

Owns the event loop, whose thread runs all of it; only ``stop`` may be called by another thread. It ends well when its
ranks have left (unless it is to ``stay`` for ranks that come back, under a launcher that ends it), when the scheduler
says so, or by SIGTERM; with an error when the job fails. It knows nothing of tensors and rounds: those are a group's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from byteps_py.config.settings import Settings
from byteps_py.dataplane.link_burst import LinkBursts
from byteps_py.errors import BytePSError, PeerLostError, RendezvousError, StallError, from_name
from byteps_py.kernels.readiness import Readiness
from byteps_py.kernels.thread_pool import default_threads
from byteps_py.proto import control_pb2 as pb
from byteps_py.runtime import Runtime
from byteps_py.system import log
from byteps_py.system.log import logger
from byteps_py.system.machine import local_socket
from byteps_py.tensors import DType, Op
from byteps_py.wire.control_link import Connect, ControlEvents, send_last, send_recordings
from byteps_py.wire.launch_protocol import Blame, send_notice
from byteps_py.wording import STOPPED
from byteps_py.worker.core.deadlines import FailureSuspicions, StallDeadline, Starting
from byteps_py.worker.core.pieces import PieceRequest, Receipt
from byteps_py.worker.core.tensor import SumRequest
from byteps_py.worker.group import Group, GroupServices
from byteps_py.worker.io.peers import PeerMachines
from byteps_py.worker.io.probe import Probe
from byteps_py.worker.io.server_links import silence_s
from byteps_py.worker.ranks.rank_server import RankServer
from byteps_py.worker.scheduler_messages import BatchingLink, Rejoining, heartbeat
from byteps_py.worker.shutdown_drain import ShutdownDrain

_TICK_S = 0.25
_PUMP_S = 0.01, 0.05  # while something waits for its turn, and else
_WORD_OF_SCHEDULER_S = 1.0
_WARN_AGAIN_S = 60.0
_UNHEARD_TIMEOUTS = 2
_SLOW_REPORT_S = 1.0
_HEADLESS_S = 10.0  # for so long a lost server waits for a lost scheduler to come back
#: Start-up makes their kernels ready, beside rendezvous; others become so when a tensor is declared.
_LIKELY = tuple((Op.SUM, dtype) for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16))


class CommunicationService:
    """``run`` returns the process's exit code. The classes are those that it makes; a subclass may name others."""

    readiness_class: type[Readiness] = Readiness
    rank_server_class: type[RankServer] = RankServer
    peers_class: type[PeerMachines] = PeerMachines
    rejoining_class: type[Rejoining] = Rejoining
    suspicions_class: type[FailureSuspicions] = FailureSuspicions
    group_class: type[Group] = Group
    probe_class: type[Probe] = Probe
    link_class: type[BatchingLink] = BatchingLink

    def __init__(self, settings: Settings, stay: bool, connect: Connect, runtime: Runtime) -> None:
        self._settings = settings
        self._stay = stay
        self._exit_code = 0
        self._is_traced = settings.trace_on  # and the trace is not written yet
        self._runtime = runtime
        self._loop = runtime.loop
        self._listener = runtime.local_listener(local_socket(settings, "cs"))
        self._pool = runtime.thread_pool(default_threads(settings.worker_threads), "byteps-worker")
        self._prefaulter = runtime.thread_pool(1, "byteps-prefault")
        self._ready = self.readiness_class(
            runtime.kernels.prepare, self._pool, self._loop, self._kernel_failed, runtime.codecs.prepare
        )
        self._rejoining: Rejoining | None = None
        self._rank_server = self._open_rank_server(settings)
        self._group: Group | None = None
        self._peers: PeerMachines | None = None
        if settings.num_workers > 1 or settings.elastic:
            self._peers = self.peers_class(runtime, settings, self._requested, self._machine_gone)
        self._probe: Probe | None = None
        self._bursts = LinkBursts(runtime.loop, settings)
        self._stall_deadline = StallDeadline(settings.stall_limit_s)
        self._member_id = 0
        self._past = pb.Statistics()  # of groups that are over
        self._told_left: set[int] = set()  # local ranks that have left, as the scheduler knows
        self._is_settling = self._looks_for_vain_waits = False  # timers run
        self._unfinished_since = 0  # the epoch of the group in which a rank has not finished, as the scheduler knows
        self._since = 0  # the epoch of the latest group
        self._reported_s = -_SLOW_REPORT_S
        self._starting = Starting(settings.local_size, lambda: self._send(pb.MemberMessage(ready=pb.Ready())))
        self._suspicions = self.suspicions_class()
        self._warned_s: dict[int, float] = {}  # of servers that can't be reached: when, by member id
        events = ControlEvents(
            self._on_message, self._scheduler_lost, self._report, self._scheduler_away, self._scheduler_back
        )
        link = connect(settings, self._registration(), self._loop, events)
        self._link = self.link_class(link, self._loop)
        self._shutdown_drain = self._new_shutdown_drain()

    def _open_rank_server(self, settings: Settings) -> RankServer:
        if not settings.elastic:
            return self.rank_server_class(
                self._runtime, self._listener, settings.local_size, self._rank_died, self._ranks_changed
            )
        rank_server = self.rank_server_class(
            self._runtime, self._listener, settings.local_size, self._rank_died, self._ranks_changed, self._wants_group,
            settings.start_timeout_s,
        )  # fmt: skip
        rank_server.ranks.keep_numbers = settings.max_restarts > 0
        self._rejoining = self.rejoining_class(rank_server, self._send)
        return rank_server

    def _send(self, message: pb.MemberMessage) -> None:
        self._link.send(message)

    def begin(self) -> None:
        """Start the work beside the loop. (``run`` calls it.)"""
        self._ready.expect(_LIKELY)
        self._ready.when_done(self._starting.loaded)
        self._loop.call_later(_TICK_S, self._tick)
        self._loop.call_later(_PUMP_S[1], self._pump)
        if not self._stay:
            self._loop.call_later(self._settings.start_timeout_s, self._expect_rank)

    def run(self) -> int:
        self.begin()
        try:
            self._loop.run()
        except BytePSError as error:  # a server broke the protocol, say: all must know
            text = f"byteps_py worker {self._settings.worker_id}: {error}"
            if not send_notice(Blame.SERVICE, str(error), text):
                logger.error("%s", error)
            self._fail(error)
        finally:
            self._close()
        return self._exit_code

    def stop(self) -> None:
        """End; in order, unless ranks are still at work. Any thread, also a signal handler."""
        self._loop.post(self._told_to_end)

    def _told_to_end(self) -> None:
        staying = self._rank_server.receive_all()
        if self._rejoining is not None and self._rejoining.leave():
            return
        if staying and self._group is not None:
            ranks = self._group.topology.describe_ranks(staying)
            why = f"the communication service of {ranks} was told to end while they needed it"
            self._group_lost(PeerLostError(why))
        self._go()

    def _go(self) -> None:
        """End, once no other machine lacks a result that takes what this one gave: when they have said so or, where
        ranks have gone to let the group go on without them, when the next one begins."""
        if self._group is None or self._group.network is None or self._rank_server.failure is not None:
            self._loop.stop()
            return
        is_leaving = self._rejoining is not None and self._rejoining.is_leaving
        if not is_leaving and len(self._rank_server.ranks.left) < self._group.topology.local_size:
            self._loop.stop()
            return
        self._shutdown_drain.go()
        if self._is_headless:  # no scheduler says so; a machine whose connection is not back by then asks for nothing
            unheard_s = _UNHEARD_TIMEOUTS * self._settings.heartbeat_timeout_s
            self._loop.call_later(unheard_s, lambda: self._shutdown_drain.dismissed() if self._is_headless else None)

    def _close(self) -> None:
        if self._group is not None:
            self._group.close_logs()
            if self._is_traced:
                send_last(self._group.recorders(), self._link.send)
            if self._group.executor.stages is not None:
                self._group.executor.stages.close()
            self._group.requests.close()
        self._reported_s = -_SLOW_REPORT_S  # the last report is whole
        self._link.close("the communication service ends")
        self._rank_server.close()
        try:
            self._pool.close()
            self._prefaulter.close()
        except StallError as error:
            # As in a server: a machine too busy to end a kernel's work in time must not fail a job that is done.
            logger.warning("%s", error)
            return
        if self._probe is not None:
            self._probe.close()
        self._bursts.close()
        if self._peers is not None:
            self._peers.close()
        if self._group is not None and self._group.network is not None:
            self._group.network.close()
        self._loop.close()

    # ---- the scheduler ---------------------------------------------------------------------------------

    def _registration(self) -> pb.Register:
        settings = self._settings
        return pb.Register(
            role=pb.ROLE_COMMUNICATION,
            kind=pb.MACHINE_KIND_GPU,
            machine_index=settings.worker_id,
            local_size=settings.local_size,
            memory_bytes=int(min(self._runtime.available_memory(), 1 << 62)),
            address=self._peers.address if self._peers is not None else "",
        )

    def _on_message(self, message: pb.SchedulerMessage) -> None:
        body = message.WhichOneof("body")
        if body == "welcome":
            self._member_id = message.welcome.member_id
        elif body == "membership":
            if self._rejoining is not None and self._rejoining.is_new(message.membership):
                if self._group is not None and self._group.executor.ranks:  # no correct scheduler
                    self._rejoining.dissolve(PeerLostError("the scheduler has begun another group without a word"))
                self._end_group()
            if self._group is None:
                self._begin(message.membership)
            else:
                self._group.change(message.membership)
        elif body == "hosts" and self._rejoining is not None:
            self._rejoining.tell_hosts(message.hosts)
        elif body == "measure":
            # Not while kernels keep the processor busy.
            self._ready.when_done(functools.partial(self._measure, message.measure))
        elif body == "probe":
            self._bursts.begin(message.probe, self._link.send)
        elif body == "still":
            valid_s = 2 * silence_s(self._settings, self._loop)
            self._suspicions.asked(message.still.member_id, self._loop.time(), valid_s)
        elif body == "stalled":
            self._stall_deadline.explained(message.stalled.message)
            logger.warning("%s", message.stalled.message, extra=log.about(tensor=message.stalled.tensor))
            if self._group is not None:
                self._group.sample_stacks(message.stalled.missing)
        elif body == "ask":
            self._is_traced = self._is_traced and not message.ask.ends_trace
            recorders = self._group.recorders() if self._group is not None else []
            send_recordings(message.ask, recorders, self._link.send, self._loop.post)
        elif body == "slow":
            logger.warning("%s", message.slow.message)
            if self._group is not None and message.slow.unserved:
                self._group.waits.is_unserved = True
        elif body == "stack_report":
            logger.warning("rank %d, which is waited for: %s", message.stack_report.rank, message.stack_report.text)
        elif body in ("refused", "failure"):
            answer = message.refused if body == "refused" else message.failure
            error = from_name(answer.error, answer.message)
            if body == "failure" and message.failure.group_only and self._rejoining is not None:
                self._rejoining.dissolve(error)
                self._end_group()
            elif body == "failure" and message.failure.orderly and self._group is not None:
                self._group.waits.departed(self._loop.time(), answer.message, set(message.failure.ranks))
                self._shutdown_drain.departed(message.failure.ranks)
                self._settle()
                self._look_for_vain_waits()
            else:
                self._fail(error, report=False)
        elif body == "dismissed":
            self._shutdown_drain.dismissed()
        elif body == "stop":
            logger.info("the scheduler ends the job: %s", message.stop.reason)
            self._stopped(message.stop.reason)
        elif self._group is not None:
            self._group.on_message(message)
            self._link.on_message(message)

    def _stopped(self, reason: str) -> None:
        """The scheduler ends the job. Ranks that are at work, or wait for a group of an elastic job, hear why."""
        was_stopped = reason.startswith(STOPPED)
        text = f"the job was {reason}" if was_stopped else f"the job is over: {reason}"
        if self._group is None:
            self._rank_server.fail(RendezvousError(text))
        elif was_stopped and self._rank_server.failure is None:
            self._rank_server.fail(PeerLostError(text))
        self._loop.stop()

    def _measure(self, measure: pb.Measure) -> None:
        """Find out about a link, as the scheduler asked."""

        def done(mbit: float) -> None:
            self._link.send(pb.MemberMessage(measured=pb.Measured(turn=measure.turn, mbit=mbit)))

        self._probe = self.probe_class(self._runtime, self._settings, self._settings.worker_id, measure.address, done)

    def _begin(self, membership: pb.Membership) -> None:
        """The cluster, or an elastic job's next group, is complete."""
        ids = [worker.member_id for worker in membership.workers]
        if self._member_id not in ids:
            return  # an elastic job goes on without this machine
        services = GroupServices(
            self._runtime, self._settings, self._stay, self._ready, self._rank_server, self._peers, self._send,
            self._fail, self._prefault, self._server_lost, self._machine_lost,
        )  # fmt: skip
        self._since = membership.workers_since
        self._group = self.group_class(services, membership, ids.index(self._member_id))
        self._shutdown_drain.open(membership.workers_since, self._group.lacks, self._group.owes)
        self._group.open()

    def _end_group(self) -> None:
        """The ranks are a group no more. Another may follow, with nothing of this one."""
        if self._group is None:
            return
        self._group.count(self._past)
        if self._is_traced:  # in a thread: the next group waits for this service
            send_recordings(pb.Ask(recordings=True), self._group.recorders(), self._link.send, self._loop.post)
        self._group.end()
        self._group = None
        self._link.forget()
        if self._shutdown_drain.is_going:
            self._loop.stop()  # no machine wants any more what it stays for
        self._told_left.clear()
        self._shutdown_drain.end()
        self._shutdown_drain = self._new_shutdown_drain()

    def _new_shutdown_drain(self) -> ShutdownDrain:
        return ShutdownDrain(self._loop, self._link.send, self._loop.stop, self._settings)

    def _scheduler_lost(self, error: BytePSError) -> None:
        if self._group is None:
            self._fail(error, report=False)
        elif self._rank_server.failure is None:
            self._group.joining.scheduler_lost(error)
            self._scheduler_away(error)

    def _scheduler_away(self, error: BytePSError) -> None:
        self._stall_deadline.away(self._loop.time())
        # Reductions of agreed tensors need no scheduler; a rank that needs one runs into the stall limit.
        if self._group is not None and self._rank_server.failure is None:
            logger.warning("%s; agreed tensors are still reduced, new ones and barriers wait", error)

    def _scheduler_back(self) -> None:
        self._stall_deadline.away_since_s = None

    @property
    def _is_headless(self) -> bool:
        return self._stall_deadline.away_since_s is not None

    @property
    def machine_index(self) -> int:
        """The number of this machine, which an elastic job may change. The loop's thread."""
        return self._settings.worker_id if self._group is None else self._group.topology.machine_index

    def heartbeat(self) -> pb.Heartbeat:
        """What the service and its ranks do. The loop's thread."""
        return heartbeat(self._past, self._group, self._peers, self._waiting(min(1.0, self._settings.stall_warn_s / 2)))

    def _report(self) -> pb.Heartbeat:
        """The same for the scheduler, with what was sent since the last such report. Where links are slow, most
        heartbeats only say that the process lives."""
        now_s = self._loop.time()
        if self._group is not None and self._group.has_slow_links and now_s - self._reported_s < _SLOW_REPORT_S:
            return pb.Heartbeat(bare=True)
        self._reported_s = now_s
        told = self.heartbeat()
        if self._group is not None:
            told.spans.extend(self._group.requests.report_spans())
        if self._group is not None:
            told.pairs.extend(self._group.pair_usage())
        if self._group is not None and self._group.network is not None:
            told.links.extend(self._group.network.link_usage())
            if (rates := self._group.network.link_rates()) is not None:
                told.rates.CopyFrom(rates)
            self._group.widen_for_long_links()
        return told

    # ---- waiting too long ------------------------------------------------------------------------------

    def _waiting(self, age_s: float) -> list[pb.Waiting]:
        return self._group.waiting(age_s) if self._group is not None else []

    def _look_for_vain_waits(self) -> None:
        """Once ranks have shut down, again and again."""
        group = self._group
        if group is None or self._looks_for_vain_waits or not group.waits.may_be_vain:
            return

        def look() -> None:
            self._looks_for_vain_waits = False
            if self._group is group:
                why, is_news = group.waits.vain(self._loop.time())
                if why:
                    self._group_lost(PeerLostError(why), report=is_news)
            self._look_for_vain_waits()

        self._looks_for_vain_waits = True
        self._loop.call_later(_TICK_S, look)

    def _tick(self) -> None:
        self._loop.call_later(_TICK_S, self._tick)
        limit = self._stall_deadline.limit_s
        is_alone = self._is_headless and self._stall_deadline.is_alone(self._loop.time())
        if is_alone and self._group is not None:
            self._group.joining.scheduler_lost(PeerLostError(f"it has been away for {limit:g} s"))
        if limit and (waiting := self._waiting(limit)):
            self._fail(self._stall_deadline.wait(waiting[0]))
        if is_alone and self._group is not None and self._group.joining.here:
            self._fail(self._stall_deadline.join())

    def _expect_rank(self) -> None:
        if not self._starting.has_had_ranks:
            logger.error("no rank came within %g s", self._settings.start_timeout_s)
            self._exit_code = 1
            self._loop.stop()

    def _pump(self) -> None:
        waits = self._group is not None and self._group.pump()
        self._loop.call_later(_PUMP_S[0] if waits else _PUMP_S[1], self._pump)

    # ---- failing and ending ----------------------------------------------------------------------------

    def _rank_died(self, sentence: str) -> None:
        self._group_lost(PeerLostError(sentence))

    def _wants_group(self, reason: str, planned: bool) -> None:
        self._send(pb.MemberMessage(reform=pb.Reform(reason=reason, planned=planned)))

    def _group_lost(self, error: BytePSError, report: bool = True) -> None:
        """The job can't go on with the ranks it has; an elastic one does with others."""
        if self._rejoining is None:
            self._fail(error, report)
        else:
            self._wants_group(str(error), False)

    def _server_lost(self, sentence: str, member_id: int, has_ended: bool) -> None:
        """Other servers can do its work, once the scheduler says which: not later than the stall limit allows."""
        self._warn_of(member_id, sentence, has_ended)
        is_sure = has_ended or self._suspicions.is_sure(member_id, self._loop.time())
        lost = pb.Unreachable(member_id=member_id, reason=sentence, is_sure=is_sure)
        self._link.send(pb.MemberMessage(unreachable=lost))
        if self._is_headless:
            error = PeerLostError(f"{sentence}; the scheduler, which would give its work to others, is lost too")
            since = self._stall_deadline.away_since_s  # another absence of the scheduler has a time of its own

            def give_up() -> None:
                if self._stall_deadline.away_since_s == since:
                    self._group_lost(error)

            self._loop.call_later(_HEADLESS_S, give_up)

    def _warn_of(self, member_id: int, sentence: str, has_ended: bool) -> None:
        """Log a server that can't be reached: once a minute, and not when the job has failed. If its process has ended,
        the scheduler says why."""
        now = self._loop.time()
        is_news = now >= self._warned_s.get(member_id, -_WARN_AGAIN_S) + _WARN_AGAIN_S
        if has_ended or self._rank_server.failure is not None or not is_news:
            logger.info("%s", sentence)
            return
        self._warned_s[member_id] = now
        logger.warning("%s", sentence)

    def _machine_lost(self, sentence: str, machine: int) -> None:
        if self._group is not None and self._shutdown_drain.are_gone(self._group.topology.ranks_of(machine)):
            return  # its ranks were done
        group, error = self._group, PeerLostError(sentence)  # another group may take its place meanwhile
        # It may have died, or ended because the job has failed: then the scheduler will say so.
        delay_s = 0.0 if self._is_headless else _WORD_OF_SCHEDULER_S
        self._loop.call_later(delay_s, lambda: self._group_lost(error) if self._group is group else None)

    def _requested(self, request: PieceRequest | SumRequest | Receipt) -> None:
        if self._group is not None:  # not before its machine knows of the group
            self._group.requested(request)
            if isinstance(request, Receipt):
                if self._shutdown_drain.is_waiting:
                    self._shutdown_drain.drain()
                if self._is_settling:
                    self._settle()

    def _settle(self) -> None:
        """Tell ranks that nothing of theirs is needed here any more, as far as is known; while some wait to hear it,
        again and again."""
        waits = self._group is not None and self._group.drain(self._shutdown_drain.gone)
        if waits and not self._is_settling:
            self._is_settling = True
            self._loop.call_later(_TICK_S, self._drain_again)

    def _drain_again(self) -> None:
        self._is_settling = False
        self._settle()

    def _machine_gone(self, machine: int) -> None:
        if self._group is not None:
            self._group.machine_gone(machine)

    def _prefault(self, work: Callable[[], None]) -> None:
        # Not on the loop's thread, which has heartbeats to send, nor before kernels, for which answers wait in memory.
        self._prefaulter.submit(0, work, self._prefaulted)

    def _prefaulted(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, BytePSError):  # a BytePSError: the thread pool was closed first
            self._loop.post(lambda: self._fail(BytePSError(f"shared memory can't be had: {error}")))

    def _kernel_failed(self, error: BaseException) -> None:
        self._fail(RendezvousError(f"a summing kernel can't be compiled: {error!r}"))

    def _fail(self, error: BytePSError, report: bool = True) -> None:
        """The job can't go on: tell the local ranks and, unless they know, all others."""
        if self._rank_server.failure is not None:
            return
        self._exit_code = 1
        logger.info("the job fails: %s", error)
        if report:
            self._link.send(pb.MemberMessage(report=pb.Report(error=type(error).__name__, message=str(error))))
        self._rank_server.fail(error)
        self._ranks_changed()

    def _ranks_changed(self) -> None:
        if self._rejoining is not None:
            self._rejoining.check()
        self._settle()
        self._look_for_vain_waits()
        if self._rank_server.has_unfinished and self._unfinished_since != self._since:
            self._unfinished_since = self._since
            self._send(pb.MemberMessage(keep_states=pb.KeepStates(epoch=self._since)))
        here = self._rank_server.ranks_here
        self._starting.ranks_here(here)
        left = self._rank_server.ranks.gone if self._stay else self._rank_server.ranks.left
        if (
            self._group is not None
            and self._rank_server.failure is None
            and (news := sorted(set(left) - self._told_left))
        ):
            self._told_left.update(news)
            topology = self._group.topology
            shut_down = pb.RanksShutDown(ranks=[topology.first_rank + rank for rank in news], epoch=topology.group)
            self._link.send(pb.MemberMessage(ranks_shut_down=shut_down))
        if here or self._stay:
            if not here and self._rejoining is not None and self._rejoining.is_leaving:
                self._go()
            return
        all_have_come = self._group is None or len(self._rank_server.ranks.left) >= self._settings.local_size
        if self._rank_server.failure is not None or (self._starting.has_had_ranks and all_have_come):
            self._go()
