"""The simulated scheduler: the real core, and links to it that stand for byteps_py.scheduler.client."""

from __future__ import annotations

from collections.abc import Callable

from byteps_py.errors import BytePSError, PeerLostError, from_name
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.client import complete
from byteps_py.scheduler.cluster import ClusterConfig
from byteps_py.scheduler.core import SchedulerCore
from byteps_py.scheduler.member import Presence
from byteps_py.scheduler.outgoing import Outgoing
from byteps_py.settings import Settings

from .local import Loop
from .world import InvariantError, Process, Wire, World

_TICK_S = 0.25


class Scheduler(Process):
    def __init__(self, world: World, config: ClusterConfig) -> None:
        super().__init__(world, "scheduler")
        self._core = SchedulerCore(config)
        self._links: dict[int, ControlLink] = {}
        self._tick()

    def _tick(self) -> None:
        self.deliver(self._core.on_tick(self.world.now_s))
        self.world.after(_TICK_S, self, None, self._tick)

    @property
    def state(self) -> pb.StatusReply.State:
        return self._core.state

    def server_addresses(self) -> set[str]:
        """Of summation services that are members."""
        return {member.facts.address for member in self._core._roster.present() if not member.is_worker}

    def lost_addresses(self) -> set[str]:
        """Of summation services that were members once, or never."""
        return {m.facts.address for m in self._core._roster.everyone if m.presence is Presence.LOST}

    def check(self) -> None:
        finish = self._core.finished(self.world.now_s)
        if finish is not None:
            self.exit_code = finish.exit_status
            self.die()

    def connect(self, link: ControlLink) -> int:
        number = len(self._links) + 1
        self._links[number] = link
        self.on_end.append(link.lose)
        self._core.on_connected(number, self.world.now_s)
        return number

    def handle(self, number: int, message: pb.MemberMessage) -> None:
        self.deliver(self._core.handle(number, message, self.world.now_s))

    def disconnected(self, number: int) -> None:
        self.deliver(self._core.on_disconnected(number, self.world.now_s))

    def deliver(self, outgoing: Outgoing) -> None:
        for number, message in outgoing:
            self._links[number].receive(message)


def _describe(message: pb.MemberMessage | pb.SchedulerMessage) -> str:
    names: list[str] = []
    if isinstance(message, pb.MemberMessage):
        names = [f"{ballot.name}/{ballot.generation}" for ballot in message.declare.ballots]
    elif message.HasField("reopen"):
        names = [f"{message.reopen.name}/{message.reopen.generation}"]
    else:
        names = [f"{v.name}/{v.generation}{' void' if v.error else ''}" for v in message.verdicts.verdicts]
    return " ".join([message.WhichOneof("body") or "", *names])


class ControlLink:
    """Stands for what ``client.connect`` returns."""

    def __init__(
        self,
        scheduler: Scheduler,
        settings: Settings,
        register: pb.Register,
        loop: Loop,
        on_message: Callable[[pb.SchedulerMessage], None],
        on_lost: Callable[[BytePSError], None],
        heartbeat: Callable[[], pb.Heartbeat],
    ) -> None:
        self._scheduler = scheduler
        self._interval_s = settings.heartbeat_interval_s
        self._process = loop.process
        self._loop = loop
        self._on_message = on_message
        self._on_lost = on_lost
        self._heartbeat = heartbeat
        self._up, self._down = Wire(), Wire()
        self._number = scheduler.connect(self)
        self._is_closed = False
        self._epoch = 0
        self._process.on_end.append(self._hang_up)
        register.host, register.pid = "host", self._process.pid
        self.send(pb.MemberMessage(register=complete(register, settings)))

    def send(self, message: pb.MemberMessage) -> None:
        if self._is_closed:
            return
        copy = pb.MemberMessage()
        copy.CopyFrom(message)
        label = None if copy.HasField("heartbeat") else f"{_describe(copy)} from {self._process.name}"
        scheduler = self._scheduler
        scheduler.world.carry(self._up, scheduler, label, lambda: scheduler.handle(self._number, copy))

    def receive(self, message: pb.SchedulerMessage) -> None:
        """The scheduler sends this."""
        if message.HasField("membership"):
            if message.membership.epoch < self._epoch:
                raise InvariantError(f"epoch {message.membership.epoch} comes after epoch {self._epoch}")
            self._epoch = message.membership.epoch
        label = None if message.HasField("stalled") else _describe(message)
        self._scheduler.world.carry(self._down, self._process, label, lambda: self._take(message))

    def _take(self, message: pb.SchedulerMessage) -> None:
        if self._is_closed:
            return
        self._on_message(message)
        if message.HasField("welcome"):
            self._beat()
        elif message.HasField("refused"):
            self._on_lost(from_name(message.refused.error, message.refused.message))

    def lose(self) -> None:
        """The scheduler is gone."""
        world = self._scheduler.world
        error = PeerLostError("the scheduler is gone")
        if not self._is_closed and self._scheduler.exit_code is None:
            world.after(world.delay(), self._process, "loses the scheduler", lambda: self._on_lost(error))

    def _beat(self) -> None:
        if not self._is_closed:
            self.send(pb.MemberMessage(heartbeat=self._heartbeat()))
            self._loop.call_later(self._interval_s, self._beat)

    def close(self, reason: str = "") -> None:
        self.send(pb.MemberMessage(leave=pb.Leave(reason=reason)))
        self._hang_up()

    def _hang_up(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            scheduler, number = self._scheduler, self._number
            scheduler.world.carry(self._up, scheduler, "a link ends", lambda: scheduler.disconnected(number))
