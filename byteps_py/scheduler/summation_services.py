"""The summation services of a running job: they join, leave and die, and the others take over their keys. Pure.

registers (late) ──ready──► holds keys ──drain──► holds none ──all machines have applied a later epoch──► may exit
                                 └──dies──► the others take over its keys; if there are none, the job waits for one
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from byteps_py.errors import UsageError
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.elastic import Elastic, GroupState
from byteps_py.scheduler.job import Job, MessageHandler, Outgoing, ranks_of, to_each
from byteps_py.scheduler.roster import MemberRecord
from byteps_py.wording import count_text

#: How long the job waits for a service: one that is started again needs seconds, many on a busy machine.
SUCCESSOR_S = 20.0


class SummationServices:
    """``membership``: that of the latest epoch."""

    def __init__(self, job: Job, elastic: Elastic | None) -> None:
        self._job, self._elastic = job, elastic
        self._roster = job.roster
        self._none_since_s: float | None = None
        self._why_none = ""
        self.membership = pb.Membership()

    def opened(self, membership: pb.Membership) -> None:
        """An epoch is open, with these services."""
        self.membership, self._none_since_s = membership, None

    def reassign(self, why: str, now_s: float) -> Outgoing:
        """The services have changed: open an epoch in which the present ones share the keys."""
        if self._elastic is not None and self._elastic.state is GroupState.BROKEN:
            return []  # the next group begins with the services of that moment
        if not self._roster.has_services():
            return self.await_one(why, now_s)
        membership = self._roster.reassign(why)
        if membership is None:
            return []
        self.opened(membership)
        count = count_text(len(membership.servers), "summation service")
        self._job.reason = f"epoch {membership.epoch}, {count}: {why}"
        return to_each(self._roster.present(), pb.SchedulerMessage(membership=membership))

    def await_one(self, why: str, now_s: float) -> Outgoing:
        """The ranks need a service and none is left: wait for one that is started again, then fail."""
        if self._none_since_s is None:
            self._none_since_s, self._why_none = now_s, f"{why}; no summation service is left"
            self._job.reason = f"{self._why_none}: waiting up to {SUCCESSOR_S:g} s for one"
            slow = pb.SchedulerMessage(slow=pb.Slow(message=self._job.reason, unserved=True))
            return to_each(self._roster.workers(), slow)
        if now_s - self._none_since_s < SUCCESSOR_S:
            return []
        return self._job.fail("PeerLostError", f"{self._why_none}, and none registered within {SUCCESSOR_S:g} s", now_s)

    def on_deadlines(self, now_s: float) -> Outgoing:
        """Fail the job if no summation service has registered in time."""
        return [] if self._none_since_s is None else self.await_one(self._why_none, now_s)

    def ready(self, member: MemberRecord, now_s: float) -> Outgoing:
        """The member has started. A service that registered while the job runs can sum from now on."""
        member.is_ready = True
        if not member.is_late:
            return []
        member.is_late = False
        return self.reassign(f"{member.describe()} has joined", now_s)

    def drain(self, member: MemberRecord, reason: str, now_s: float) -> Outgoing:
        """A service is to leave, once its keys have moved. The last one stays: the ranks need it."""
        if not self._job.is_running:
            return to_each([member], pb.SchedulerMessage(stop=pb.Stop(reason="it holds no keys")))
        if not self._roster.has_services(without=member):
            return []
        member.is_draining = True
        out = self.reassign(f"{member.describe()} leaves: {reason or 'no reason given'}", now_s)
        return out + self.let_go()

    def scale(self, count: int, addresses: Iterable[str], now_s: float) -> Outgoing:
        """Drain the servers at these addresses, and then the latest of all CPU machines until at most ``count`` are
        left (-1: any number).

        Raises UsageError, and drains none, if no server has one of the addresses, if no server would be left, or if the
        job does not run.
        """
        if not self._job.is_running:
            raise UsageError(f"the job is not running: {self._job.reason}")
        servers = self._roster.cpu_servers()
        by_address = {member.facts.address.removeprefix("tcp://"): member for member in servers}
        if unknown := [address for address in addresses if address.removeprefix("tcp://") not in by_address]:
            known = ", ".join(by_address) or "none"
            raise UsageError(f"no server of a CPU machine has the address {', '.join(unknown)}; servers: {known}")
        chosen = [by_address[address.removeprefix("tcp://")] for address in addresses]
        rest = sorted((m for m in servers if m not in chosen), key=lambda m: m.id)
        chosen += rest[count:] if count >= 0 else []
        if len(chosen) == len(servers) and len(self._roster.workers()) > 1 and not self._roster.gpu_servers():
            raise UsageError("one summation service must stay: GPU machines run none (BYTEPS_PLACEMENT=servers-only)")
        return [message for member in chosen for message in self.drain(member, "bps scale", now_s)]

    def message_handlers(self) -> Mapping[str, MessageHandler]:
        """By kind, for what a communication service says of its servers."""
        return {"applied": self._applied}

    def _applied(self, member: MemberRecord, applied: pb.Applied, now_s: float) -> Outgoing:
        """A machine has applied the placement of an epoch."""
        ranks_of(member)
        member.epoch = max(member.epoch, applied.epoch)
        return self.let_go() if self._job.is_running else []

    def let_go(self) -> Outgoing:
        """Let drained services exit, once all machines have applied an epoch without them."""
        if any(worker.epoch < self._roster.epoch for worker in self._roster.workers()):
            return []
        servers = (member for member in self._roster.present() if not member.is_worker)
        drained = [server for server in servers if server.is_draining and not server.holds_keys]
        return to_each(drained, pb.SchedulerMessage(stop=pb.Stop(reason="its keys have moved")))

    def accused(self, member: MemberRecord, unreachable: pb.Unreachable) -> tuple[MemberRecord | None, Outgoing]:
        """A machine can't reach a service. Returns the service if that is sure and the service is a member; else what
        to ask the machine, which may be cut off itself."""
        ranks_of(member)
        servers = (m for m in self._roster.present() if not m.is_worker and m.id == unreachable.member_id)
        server = next(servers, None) if self._job.is_running else None
        if server is None or unreachable.is_sure:
            return server, []
        return None, to_each([member], pb.SchedulerMessage(still=pb.Still(member_id=server.id)))
