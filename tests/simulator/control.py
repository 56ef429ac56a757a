"""The simulated scheduler: the real links and core, a disk that outlives it, and links to it that stand for
byteps_py.scheduler.client. Connections break, and a killed scheduler is started again from what the disk has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from byteps_py.config.settings import Settings
from byteps_py.errors import PeerLostError, RendezvousError, from_name
from byteps_py.proto import control_pb2 as pb
from byteps_py.proto.journal_pb2 import JournalRecord
from byteps_py.scheduler.client import complete
from byteps_py.scheduler.core import RUNNING, ClockTicked, EpochSeen, LinksChanged
from byteps_py.scheduler.member_links.journal import replay
from byteps_py.scheduler.member_links.links import (
    MemberLinks,
    Restarted,
    Sent,
    StreamClosed,
    StreamMessage,
    StreamOpened,
)
from byteps_py.scheduler.member_links.protocol import MemberEnd
from byteps_py.scheduler.roster import ClusterConfig, Presence
from byteps_py.server.service import _ORPHAN_S
from byteps_py.wire.control_link import ControlEvents

from .local import Loop
from .world import InvariantError, Process, Wire, World

_TICK_S = 0.25
_RETRY_S = 0.1
_SHORT_S = 0.5
_LEAST_PACKED_BYTES = 200
_CLOSE_S = 4.0  # somewhat longer than the real one, so that who leaves while the scheduler is started again can say so


class Place:
    """The scheduler's address: whoever is there, and the journal. ``epoch``: the highest that anybody can know of."""

    def __init__(self, world: World, config: ClusterConfig, kind: type[MemberLinks]) -> None:
        self.world = world
        # Small jobs, too, have epochs that are sent as changes.
        self.kind = type(kind.__name__, (kind,), {"least_packed_bytes": _LEAST_PACKED_BYTES})
        self.config = config
        self.disk: list[bytes] = []
        self.epoch = 0
        self.streams: list[Stream] = []
        self.links: list[ControlLink] = []
        self.scheduler = Scheduler(self)

    def link(self, *given: Any) -> ControlLink:
        self.links.append(ControlLink(self, *given))
        return self.links[-1]

    def start_again(self) -> None:
        self.scheduler = Scheduler(self)
        self.world.note(self.scheduler.name, f"goes on, by {len(self.disk)} records")


class Scheduler(Process):
    def __init__(self, place: Place) -> None:
        super().__init__(place.world, "scheduler")
        self._place = place
        self._streams: dict[int, Stream] = {}
        self._unsafe: list[JournalRecord] = []
        self._held: list[Sent] = []
        self._is_flushing = False
        if place.disk:
            self.links = place.kind(place.config)
            at_s = replay(self.links, [JournalRecord.FromString(record) for record in place.disk])
            self._clock_s = at_s - self.world.now_s
            self.links.write = self._unsafe.append
            self.links.handle(Restarted(), at_s)
        else:
            self.links = place.kind(place.config, self._unsafe.append)
            self._clock_s = -self.world.now_s
        self.on_end.append(self._cut_all)
        self._tick()

    @property
    def start_timeout_s(self) -> float:
        return self._place.config.start_timeout_s

    @property
    def state(self) -> pb.StatusReply.State:
        return self.links.core.state

    def server_addresses(self) -> set[str]:
        """Of summation services that are members, and ready for keys."""
        present = self.links.core.job.roster.present()
        return {member.facts.address for member in present if not (member.is_worker or member.is_late)}

    def addresses_left(self) -> set[str]:
        """Of members that have left in order, neither lost nor refused."""
        return {m.facts.address for m in self.links.core.job.roster.everyone if m.presence is Presence.LEFT}

    def change_a_link(self, times: float) -> str:
        """The link of a random machine has ``times`` its rate. Returns which, empty if the job does not run."""
        owners = self.links.core.job.roster.link_owners() if self.state == RUNNING else []
        if not owners:
            return ""
        owner = self.world.random.choice(owners)
        event = LinksChanged({owner.id: times * (owner.link_mbit or 1000.0)}, "a link has another rate")
        self._deliver(self.links.handle(event, self._now_s()))
        return owner.describe()

    def _now_s(self) -> float:
        return self._clock_s + self.world.now_s

    def _tick(self) -> None:
        self._deliver(self.links.handle(ClockTicked(), self._now_s()))
        if self.links.is_abandoned:
            self._begin_new_job()
        self.world.after(_TICK_S, self, None, self._tick)

    def _begin_new_job(self) -> None:
        """As the service does it."""
        self.world.note(self.name, "begins a new job")
        old, self._held = self.links, []
        for stream in list(self._streams.values()):
            stream.end_down()
        self._streams.clear()
        self._unsafe.clear()
        self._place.disk.clear()
        self.links = self._place.kind(self._place.config, self._unsafe.append)
        self.links.handle(EpochSeen(old.core.job.roster.latest_epoch), self._now_s())
        self.links.take_place_of(old)

    def check(self) -> None:
        if not self.is_alive:
            return
        epoch = self.links.core.job.roster.latest_epoch
        if epoch < self._place.epoch:
            raise InvariantError(f"epoch {epoch} comes after epoch {self._place.epoch}")
        finish = self.links.finished(self._now_s())
        if finish is not None:
            self.exit_code = finish.exit_status
            self._flush()
            self.die()

    def received(self, stream: Stream, message: pb.MemberMessage) -> None:
        if stream.number not in self._streams:
            self._streams[stream.number] = stream
            self._deliver(self.links.handle(StreamOpened(stream.number), self._now_s()))
        self._deliver(self.links.handle(StreamMessage(stream.number, message), self._now_s()))

    def closed(self, stream: Stream) -> None:
        if self._streams.pop(stream.number, None) is not None:
            self._deliver(self.links.handle(StreamClosed(stream.number), self._now_s()))

    def _deliver(self, sent: list[Sent]) -> None:
        self._held += sent
        if (self._held or self._unsafe) and not self._is_flushing:
            self._is_flushing = True
            self.world.after(self.world.delay(), self, None, self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        self._place.disk += [record.SerializeToString() for record in self._unsafe]
        self._unsafe.clear()
        self._place.epoch = max(self._place.epoch, self.links.core.job.roster.latest_epoch)
        held, self._held = self._held, []
        for sent in held:
            stream = self._streams.get(sent.stream)
            if stream is None:
                continue
            if sent.message is None:
                stream.end_down()
            else:
                stream.send_down(sent.stamped())

    def _cut_all(self) -> None:
        for stream in self._place.streams:
            if stream.scheduler is self and stream.is_open:
                stream.end_down() if self.exit_code is not None else stream.break_(by_scheduler=True)


def _describe(message: pb.MemberMessage | pb.SchedulerMessage) -> str:
    names: list[str] = []
    if isinstance(message, pb.MemberMessage):
        names = [f"{ballot.name}/{ballot.generation}" for ballot in message.declare.ballots]
    elif message.HasField("reopen"):
        names = [f"{message.reopen.name}/{message.reopen.generation}"]
    else:
        names = [f"{v.name}/{v.generation}{' void' if v.error else ''}" for v in message.verdicts.verdicts]
    return " ".join([message.WhichOneof("body") or "", *names])


class Stream:
    """One connection. What is on its way when it breaks is lost."""

    def __init__(self, link: ControlLink, scheduler: Scheduler, number: int) -> None:
        self.link = link
        self.scheduler = scheduler
        self.number = number
        self.is_open = True
        self._is_heard = True  # what the scheduler has said arrives yet
        self.is_welcome = False
        self._up, self._down = Wire((link.host, scheduler.host)), Wire((scheduler.host, link.host))
        self.way = self._up.way
        self._world = scheduler.world

    def send_up(self, message: pb.MemberMessage) -> None:
        copy = pb.MemberMessage()
        copy.CopyFrom(message)
        label = None if copy.HasField("heartbeat") else f"{_describe(copy)} from {self.link.name}"
        self._carry_up(label, lambda: self.scheduler.received(self, copy))

    def end(self) -> None:
        """The member has said all."""

        def over() -> None:
            self.link.is_over = True
            self.scheduler.closed(self)

        self._carry_up("a link ends", over)

    def _carry_up(self, label: str | None, act: Callable[[], None]) -> None:
        self._world.carry(self._up, self.scheduler, label, lambda: act() if self.is_open else None)

    def send_down(self, message: pb.SchedulerMessage) -> None:
        is_news = message.WhichOneof("body") not in (None, "stalled", "slow", "welcome")
        label = _describe(message) if is_news else None
        self._world.carry(
            self._down, self.link.process, label, lambda: self.link.take(self, message) if self._is_heard else None
        )

    def end_down(self) -> None:
        """The scheduler has said all."""
        self.is_open = False
        self.scheduler.closed(self)
        self._world.carry(
            self._down, self.link.process, "its link ends", lambda: self.link.broken(self) if self._is_heard else None
        )

    def break_(self, by_scheduler: bool = False) -> None:
        """Whoever breaks it knows at once; each other side notices at any later moment."""
        self.is_open = self._is_heard = False
        if not self.is_welcome:  # perhaps nobody will ever know of it, and then the deadline for the start decides
            self._world.expect_quiet(self.scheduler.start_timeout_s)
        if by_scheduler:
            self.scheduler.closed(self)
        else:
            self._world.after(self._world.delay(), self.scheduler, "a link breaks", lambda: self.scheduler.closed(self))
        self._world.after(self._world.delay(), self.link.process, "its link breaks", lambda: self.link.broken(self))


class ControlLink:
    """Stands for what ``client.connect`` returns."""

    def __init__(
        self,
        place: Place,
        settings: Settings,
        register: pb.Register,
        loop: Loop,
        events: ControlEvents,
    ) -> None:
        self._place = place
        self._world = place.world
        self._interval_s = settings.heartbeat_interval_s
        self._patience_s = settings.start_timeout_s
        self.process: Process | None = loop.process
        self.name, self.host = loop.process.name, loop.process.host
        self._loop = loop
        self._on_message = events.on_message
        self._on_lost = events.on_lost
        self._on_away = events.on_away
        self._on_back = events.on_back
        self._heartbeat = events.heartbeat
        self._is_closed = False
        self.is_over = False
        self._is_dismissed = False
        self._is_orphan = False
        self._away_since_s = -1.0
        self._is_told = False
        self._stream: Stream | None = None
        loop.process.on_end.append(self._process_ends)
        register.host, register.pid = "host", loop.process.pid
        token = self._world.random.randbytes(8)
        self._end = MemberEnd(complete(register, settings), lambda: token)
        self._world.after(self._patience_s, self.process, None, self._expire)
        self._connect()

    # ---- connections -------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self.is_over or self._stream is not None:
            return
        scheduler = self._place.scheduler
        if scheduler.is_gone:
            if scheduler.exit_code is not None and not self._is_orphan:
                self._is_orphan = True
                # A server that has slept finds that all is over; one that knew of nobody yet waits for a scheduler.
                self._world.expect_quiet(_ORPHAN_S + 2.0 if self._end.epoch else self._patience_s)
            self._world.after(_RETRY_S, None if self._is_closed else self.process, None, self._connect)
            return
        stream = self._stream = Stream(self, scheduler, len(self._place.streams) + 1)
        self._place.streams.append(stream)
        stream.send_up(self._end.register())

    def broken(self, stream: Stream) -> None:
        if self._stream is not stream:
            return
        self._stream = None
        if self._is_dismissed:
            self.is_over = True
        elif not self.is_over:
            if self._away_since_s < 0:
                since_s = self._away_since_s = self._world.now_s
                self._world.after(_SHORT_S, self.process, None, lambda: self._tell(since_s))
                if not self._end.epoch:
                    self._world.after(self._patience_s, self.process, None, lambda: self._despair(since_s))
            self._connect()

    def _expire(self) -> None:
        if not self._end.is_member and not self.is_over and not self._is_closed:
            self.is_over = True
            self._on_lost(RendezvousError("no scheduler wants it"))

    def _despair(self, since_s: float) -> None:
        """The cluster never came together, as far as is known here."""
        if self._away_since_s == since_s and not self._is_closed:
            self.is_over = True
            self._on_lost(PeerLostError("the scheduler is gone"))

    def _tell(self, since_s: float) -> None:
        if self._away_since_s == since_s and not self._is_closed:
            self._is_told = True
            self._on_away(PeerLostError("the scheduler is away"))

    def _welcome(self, stream: Stream, message: pb.SchedulerMessage) -> None:
        for kept in self._end.welcomed(message):
            stream.send_up(kept)
        stream.is_welcome = True
        self._away_since_s, told = -1.0, self._is_told
        self._is_told = False
        if self._is_closed:
            stream.end()
        elif told:
            self._on_back()

    @property
    def can_break(self) -> bool:
        """Both ends would know of it."""
        stream = self._stream
        is_open = stream is not None and stream.is_open and not self._is_closed
        return is_open and not self._world.is_interrupted(stream.way)

    @property
    def is_heard(self) -> bool:
        """The scheduler knows it on this connection."""
        return self.can_break and self._stream is not None and self._stream.is_welcome

    def break_(self) -> None:
        if self._stream is not None:
            self._stream.break_()

    # ---- messages ----------------------------------------------------------------------------------------

    def send(self, message: pb.MemberMessage) -> None:
        if self._is_closed or self.is_over:
            return
        stamped = self._end.stamp(message)
        if self._stream is not None and self._stream.is_welcome:
            self._stream.send_up(stamped)

    def take(self, stream: Stream, message: pb.SchedulerMessage) -> None:
        if message.HasField("refused"):
            self._refused(message)
            return
        if self._is_closed and not message.HasField("welcome"):
            return  # its process, which would have got it, is gone here
        message = self._end.read(message)
        is_news = self._end.accept(message)
        if message.HasField("welcome"):
            is_news = not self._end.is_member
            self._welcome(stream, message)
            if is_news:
                self._beat()
        self._is_dismissed = self._is_dismissed or message.HasField("stop")
        if is_news and not self._is_closed:
            self._on_message(message)

    def _refused(self, message: pb.SchedulerMessage) -> None:
        # The end of the stream follows, and the next attempt.
        if message.refused.later or self._end.doubts(message):
            self._world.expect_quiet(self._patience_s)
            return
        self.is_over = True
        if not self._is_closed:
            self._on_message(message)
            self._on_lost(from_name(message.refused.error, message.refused.message))

    def _beat(self) -> None:
        if not self._is_closed and not self.is_over:
            self.send(pb.MemberMessage(heartbeat=self._heartbeat()))
            self._loop.call_later(self._interval_s, self._beat)

    # ---- the end -----------------------------------------------------------------------------------------

    def close(self, reason: str = "") -> None:
        if self._is_closed:
            return
        self.send(pb.MemberMessage(leave=pb.Leave(reason=reason)))
        self._is_closed = True
        # The process waits for this in truth; here it is gone at once, and its link goes on by itself.
        self.process = None
        if self._stream is not None and self._stream.is_open and self._stream.is_welcome:
            self._stream.end()
        if not self._end.is_member:
            self.is_over = True
            self.break_()
        elif self._stream is None or not self._stream.is_open:
            self._stream = None
            self._connect()
        elif not self._stream.is_welcome:  # the welcome may be on its way to the process, which is gone here
            self._stream.break_()
        self._world.after(_CLOSE_S, None, None, self._give_up)

    def _give_up(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.break_()

    def _process_ends(self) -> None:
        if not self._is_closed:
            self.is_over = True
            self.break_()
