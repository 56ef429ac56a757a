"""A scheduler's links and its members' ends of them, with connections that a test, or a seed, breaks at any moment.

Pure: messages lie in lists until they are carried on. A crash of the scheduler loses all that is not in ``disk``.
"""

from __future__ import annotations

import itertools
import random
from collections import deque

from byteps_py.proto import control_pb2 as pb
from byteps_py.proto.journal_pb2 import JournalRecord
from byteps_py.scheduler.core import ClockTicked
from byteps_py.scheduler.member_links.journal import freeze, replay
from byteps_py.scheduler.member_links.links import (
    LinkEvent,
    MemberLinks,
    Restarted,
    Sent,
    StreamClosed,
    StreamMessage,
    StreamOpened,
)
from byteps_py.scheduler.member_links.protocol import MemberEnd
from byteps_py.scheduler.roster import ClusterConfig

_tokens = itertools.count(1)


class Member:
    """``heard``: what its service was told, in order."""

    def __init__(self, register: pb.Register) -> None:
        self.end = MemberEnd(register, lambda: next(_tokens).to_bytes(8, "little"))
        self.stream: int | None = None
        self.is_welcome = False  # on this stream
        self.up: deque[pb.MemberMessage] = deque()
        self.down: deque[pb.SchedulerMessage | None] = deque()
        self.heard: list[pb.SchedulerMessage] = []
        self.is_refused = False

    def say(self, **body: object) -> None:
        stamped = self.end.stamp(pb.MemberMessage(**body))  # type: ignore[arg-type]
        if self.is_welcome:
            self.up.append(stamped)

    def hear(self, message: pb.SchedulerMessage) -> None:
        is_news = self.end.accept(message)
        if message.HasField("welcome"):
            is_news = not self.end.is_member
            self.up.extend(self.end.welcomed(message))
            self.is_welcome = True
        if is_news:
            self.heard.append(message)
        self.is_refused = message.HasField("refused") and not message.refused.later

    def bodies(self) -> list[str]:
        return [message.WhichOneof("body") or "" for message in self.heard]


class Plane:
    """``disk``: what a scheduler finds when it is started. ``flush``: writes are safe and what was held is sent."""

    def __init__(self, **config: object) -> None:
        self.config = ClusterConfig(**{"job": "j", **config})  # type: ignore[arg-type]
        self.now = 0.0
        self.disk: list[JournalRecord] = []
        self.snapshot = b""
        self._unsafe: list[JournalRecord] = []
        self._held: list[Sent] = []
        self._streams: dict[int, Member] = {}
        self._numbers = itertools.count(1)
        self.members: list[Member] = []
        self.links: MemberLinks | None = MemberLinks(self.config, self._unsafe.append)

    # ---- the scheduler's life ----------------------------------------------------------------------------

    def crash(self) -> None:
        for member in list(self._streams.values()):
            self.cut(member)
        self._unsafe.clear()
        self._held.clear()
        self.links = None

    def start(self) -> None:
        records = [JournalRecord.FromString(record.SerializeToString()) for record in self.disk]
        self.links = MemberLinks(self.config)
        self.now = replay(self.links, records, self.snapshot)
        self.links.write = self._unsafe.append
        self.links.handle(Restarted(), self.now)
        self.flush()

    def flush(self) -> None:
        self.disk += self._unsafe
        self._unsafe.clear()
        held, self._held = self._held, []
        for sent in held:
            if (member := self._streams.get(sent.stream)) is not None:
                member.down.append(None if sent.message is None else sent.stamped())

    def compact(self) -> None:
        """As the service does it: after everything is written, and before what follows is sent."""
        if self.links is not None:
            self.disk += self._unsafe
            self._unsafe.clear()
            self.snapshot = freeze(self.links.state(self.now))
            self.disk.clear()

    def tick(self, by_s: float = 0.0) -> None:
        self.now += by_s
        if self.links is not None:
            self.do(ClockTicked())

    def do(self, event: LinkEvent) -> None:
        """Something of the scheduler's own."""
        assert self.links is not None
        self._held += self.links.handle(event, self.now)

    def wait(self, for_s: float) -> None:
        """Time passes, and who is connected lives."""
        for _ in range(round(for_s / 0.1)):
            for member in self.members:
                if member.is_welcome:
                    member.say(heartbeat=pb.Heartbeat(bare=True))
                while member.up:
                    self.carry_up(member)
            self.tick(0.1)
            self.flush()
            for member in self.members:
                while member.down:
                    self.carry_down(member)

    # ---- connections -------------------------------------------------------------------------------------

    def add(self, register: pb.Register) -> Member:
        member = Member(register)
        self.members.append(member)
        return member

    def connect(self, member: Member) -> None:
        if self.links is not None and member.stream is None and not member.is_refused:
            member.stream = next(self._numbers)
            self._streams[member.stream] = member
            self._held += self.links.handle(StreamOpened(member.stream), self.now)
            member.up.append(member.end.register())

    def cut(self, member: Member) -> None:
        """What is on its way is lost, both ways."""
        if member.stream is None:
            return
        stream, member.stream, member.is_welcome = member.stream, None, False
        del self._streams[stream]
        member.up.clear()
        member.down.clear()
        if self.links is not None:
            self._held += self.links.handle(StreamClosed(stream), self.now)

    def forget(self, member: Member) -> None:
        """The connection breaks, and only the member knows."""
        if member.stream is not None:
            del self._streams[member.stream]
            member.stream, member.is_welcome = None, False
            member.up.clear()
            member.down.clear()

    def carry_up(self, member: Member) -> None:
        if member.up and member.stream is not None and self.links is not None:
            message = pb.MemberMessage.FromString(member.up.popleft().SerializeToString())
            self._held += self.links.handle(StreamMessage(member.stream, message), self.now)

    def carry_down(self, member: Member) -> None:
        if not member.down:
            return
        message = member.down.popleft()
        if message is None:
            self.cut(member)
        else:
            member.hear(message)

    def settle(self) -> None:
        """Everybody connects, and everything arrives."""
        for _ in range(1000):
            for member in self.members:
                self.connect(member)
            busy = [member for member in self.members if member.up or member.down]
            if not busy and not self._held and not self._unsafe:
                return
            for member in busy:
                while member.up:
                    self.carry_up(member)
            self.flush()
            for member in busy:
                while member.down:
                    self.carry_down(member)
        raise AssertionError("it does not settle")

    def happen(self, rng: random.Random) -> None:
        """One thing that may happen at any time."""
        member = rng.choice(self.members)
        what = rng.random()
        if what < 0.32:
            self.carry_up(member)
        elif what < 0.6:
            self.carry_down(member)
        elif what < 0.8:
            self.flush()
        elif what < 0.92:
            self.connect(member)
        elif what < 0.925:
            self.compact()
        elif what < 0.95:
            self.cut(member)
        elif what < 0.965:
            self.forget(member)
        elif self.links is None:
            self.start()
        elif what > 0.985:
            self.crash()
        else:
            member.say(heartbeat=pb.Heartbeat(bare=True))
