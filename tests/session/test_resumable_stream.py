"""Two ends of a link between ranks in virtual time: connections break, and frames come damaged, as a seed decides. A
link may have several connections at a time, each of which delivers in order, but not all of them."""

from __future__ import annotations

import random
from collections import deque

import pytest

from byteps_py.dataplane.seal import FrameHeader, StreamFrameKind
from byteps_py.errors import ProtocolError
from byteps_py.session.peers.resumable_stream import (
    MOST_UNREPORTED_FRAMES,
    REPORT_FRAMES,
    LinkDue,
    LinkWatch,
    ResumableStream,
)


class BrokenRuleError(AssertionError):
    """An invariant does not hold."""


class End:
    """One end; what it sends are numbers. ``wires``: connections to the other end."""

    def __init__(self, stream: ResumableStream, order: random.Random, connections: int) -> None:
        self.stream = stream
        self.order = order
        self.wires: list[deque[tuple[FrameHeader, bytes]]] = [deque() for _ in range(connections)]
        self.given = self.got = 0
        self.may_send = True
        self.memory: dict[int, bytearray] = {}  # of what may not change yet

    def give(self) -> None:
        body = self.memory[self.given] = bytearray(self.given.to_bytes(4, "little"))
        self.stream.add(memoryview(body), body)
        self.given += 1

    def say(self) -> None:
        if self.may_send and self.stream.has_unsent and not self.stream.is_far_ahead:
            header, body = self.stream.take()
            self.order.choice(self.wires).append((header, bytes(body)))
        elif self.stream.is_report_due:
            self.report()

    def report(self) -> None:
        self.order.choice(self.wires).append((self.stream.control(StreamFrameKind.REPORT), b""))

    def reuse(self, order: random.Random) -> None:
        """Memory of frames that have left is let go, and is overwritten at once."""
        end = order.randint(0, self.stream.given - int(self.stream.has_unsent))
        if not self.stream.has_unsent or not self.may_send:
            end = min(end, self.stream.confirmed)
        self.stream.release(end)
        for number in [each for each in self.memory if each < end]:
            self.memory.pop(number)[:] = b"\xff" * 4

    def hear(self, header: FrameHeader, body: bytes) -> None:
        self.stream.check(header)
        is_next = self.stream.is_next(header)
        self.stream.on_frame(header, b"" if is_next else body)
        if header.kind == StreamFrameKind.DATA:
            early = [body] if is_next else []
            while early or (after := self.stream.next_early()) is not None:
                number = int.from_bytes(early.pop() if early else after, "little")
                if number != self.got:
                    raise BrokenRuleError(f"{number} came instead of {self.got}")
                self.got += 1
        elif not self.may_send:
            self.stream.rewind()
            self.may_send = True


def run(seed: int, kind: type[ResumableStream] = ResumableStream, frames: int = 300, at_a_time: int = 1) -> int:
    """Returns how often the connections were made, ``at_a_time``. Raises what breaks a rule."""
    order, connections = random.Random(seed), 1
    ends = [End(kind(), order, at_a_time) for _ in range(2)]
    for step in range(200_000):
        mine, other = order.sample(ends, 2)
        deed = order.random()
        if deed < 0.2 and mine.given < frames:
            mine.give()
        elif deed < 0.5:
            mine.say()
        elif deed < 0.55:
            mine.reuse(order)
        elif deed < 0.97 and (wires := [wire for wire in mine.wires if wire]):
            other.hear(*order.choice(wires).popleft())
        elif deed > 0.995 and step < 100_000:  # it breaks, or what comes next is damaged
            other.stream.damaged()
            connections += 1
            for end in ends:
                for wire in end.wires:
                    wire.clear()
                end.may_send = False
                end.stream.forget_early()
            for end in ends:
                end.report()
        if len(mine.stream._kept) > mine.given - other.got + 3 * REPORT_FRAMES + sum(map(len, other.wires)):
            raise BrokenRuleError("frames that have come are kept for ever")
        if all(end.got == frames for end in ends):
            return connections
    raise BrokenRuleError(f"only {[end.got for end in ends]} have come")


@pytest.mark.parametrize("at_a_time", [1, 5])
def test_all_comes_once_and_in_order_whatever_breaks(at_a_time: int) -> None:
    assert sum(run(seed, at_a_time=at_a_time) for seed in range(60)) > 200


def test_a_link_of_several_connections_is_not_far_ahead_of_reports() -> None:
    """What comes before its turn is kept by the receiver, which has room for so much."""
    stream = ResumableStream()
    for _ in range(MOST_UNREPORTED_FRAMES + 1):
        stream.add(b"", None)
    while not stream.is_far_ahead:
        stream.take()
    assert stream.sent == MOST_UNREPORTED_FRAMES
    stream.confirm(1)
    assert not stream.is_far_ahead


def test_a_frame_that_comes_twice_breaks_a_rule() -> None:
    stream = ResumableStream()
    for number in (0, 2):
        stream.on_frame(FrameHeader(1, number, 0, StreamFrameKind.DATA), b"x")
    for number in (0, 2):
        with pytest.raises(ProtocolError, match=f"frame {number} of a stream came twice; the next one is 1"):
            stream.check(FrameHeader(1, number, 0, StreamFrameKind.DATA))


class ForgetWhatIsSent(ResumableStream):
    def take(self) -> tuple[FrameHeader, object]:  # type: ignore[override]
        taken = super().take()
        self.confirm(self._next)
        return taken


class GoOnWithoutWhatWasLost(ResumableStream):
    def rewind(self) -> None:
        pass


class CountReportsAsFrames(ResumableStream):
    def on_frame(self, header: FrameHeader, early: bytes = b"") -> None:
        super().on_frame(header, early)
        self.expected += header.kind != StreamFrameKind.DATA


class ReportWhatIsToCome(ResumableStream):
    def _header(self, nbytes: int, kind: StreamFrameKind) -> FrameHeader:
        header = super()._header(nbytes, kind)
        return header._replace(expected=header.expected + (self.expected > 5))


class LetGoWithoutACopy(ResumableStream):
    def release(self, end: int) -> None:
        pass


class NeverReport(ResumableStream):
    is_report_due = property(lambda self: False)  # type: ignore[assignment]

    def confirm(self, expected: int) -> None:
        pass


class TakeFramesAsTheyCome(ResumableStream):
    def is_next(self, header: FrameHeader) -> bool:
        return True


class KeepWhatCameBeforeABreak(ResumableStream):
    def forget_early(self) -> None:
        pass


class ReportWhatCameEarly(ResumableStream):
    def _header(self, nbytes: int, kind: StreamFrameKind) -> FrameHeader:
        return super()._header(nbytes, kind)._replace(expected=max(self._early, default=self.expected - 1) + 1)


@pytest.mark.parametrize("mutation", [TakeFramesAsTheyCome, KeepWhatCameBeforeABreak, ReportWhatCameEarly])
def test_a_stream_over_several_connections_that_breaks_a_rule_is_found_out(mutation: type[ResumableStream]) -> None:
    for seed in range(30):
        try:
            run(seed, mutation, at_a_time=3)
        except (BrokenRuleError, ProtocolError, IndexError):
            return
    pytest.fail("no seed has found it")


@pytest.mark.parametrize(
    "mutation",
    [
        ForgetWhatIsSent, GoOnWithoutWhatWasLost, CountReportsAsFrames, ReportWhatIsToCome, LetGoWithoutACopy,
        NeverReport,
    ],
)  # fmt: skip
def test_a_stream_that_breaks_a_rule_is_found_out(mutation: type[ResumableStream]) -> None:
    for seed in range(30):
        try:
            run(seed, mutation)
        except (BrokenRuleError, ProtocolError, IndexError):
            return
    pytest.fail("no seed has found it")


def test_damage_at_one_place_is_told_from_damage_at_another() -> None:
    stream = ResumableStream()
    assert not stream.damaged()
    stream.on_frame(FrameHeader(3, 0, 0, StreamFrameKind.DATA))
    assert not stream.damaged()
    assert stream.damaged()


def test_a_silent_link_is_asked_then_broken_then_given_up() -> None:
    watch = LinkWatch(10.0, 100.0)
    assert watch.due(102.4) is LinkDue.NOTHING
    assert watch.due(102.5) is LinkDue.PING
    assert watch.due(109.9) is LinkDue.NOTHING
    assert watch.due(110.0) is LinkDue.BREAK
    watch.broke(110.0)
    assert watch.due(129.9) is LinkDue.NOTHING
    assert watch.due(130.0) is LinkDue.GIVE_UP
    watch.resumed(131.0)
    assert watch.due(133.0) is LinkDue.NOTHING
    # A process that did not run for a while hears first.
    assert watch.due(500.0) is LinkDue.PING
    watch.on_receive(500.1)
    assert watch.due(501.0) is LinkDue.NOTHING
