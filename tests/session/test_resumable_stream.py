"""Two ends of a link between ranks in virtual time: connections break, and frames come damaged, as a seed decides."""

from __future__ import annotations

import random
from collections import deque

import pytest

from byteps_py.dataplane.stream_seal import FrameHeader, StreamFrameKind
from byteps_py.errors import ProtocolError
from byteps_py.session.peers.resumable_stream import REPORT_FRAMES, LinkDue, LinkWatch, ResumableStream


class BrokenRuleError(AssertionError):
    """An invariant does not hold."""


class End:
    """One end; what it sends are numbers. ``wire``: to the other end."""

    def __init__(self, stream: ResumableStream) -> None:
        self.stream = stream
        self.wire: deque[tuple[FrameHeader, bytes]] = deque()
        self.given = self.got = 0
        self.may_send = True
        self.memory: dict[int, bytearray] = {}  # of what may not change yet

    def give(self) -> None:
        body = self.memory[self.given] = bytearray(self.given.to_bytes(4, "little"))
        self.stream.add(memoryview(body), body)
        self.given += 1

    def say(self) -> None:
        if self.may_send and self.stream.has_unsent:
            header, body = self.stream.take()
            self.wire.append((header, bytes(body)))
        elif self.stream.is_report_due:
            self.report()

    def report(self) -> None:
        self.wire.append((self.stream.control(StreamFrameKind.REPORT), b""))

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
        self.stream.on_frame(header)
        if header.kind == StreamFrameKind.DATA:
            if int.from_bytes(body, "little") != self.got:
                raise BrokenRuleError(f"{int.from_bytes(body, 'little')} came instead of {self.got}")
            self.got += 1
        elif not self.may_send:
            self.stream.rewind()
            self.may_send = True


def run(seed: int, kind: type[ResumableStream] = ResumableStream, frames: int = 300) -> int:
    """Returns how often the connection was made. Raises what breaks a rule."""
    order, ends, connections = random.Random(seed), [End(kind()), End(kind())], 1
    for step in range(200_000):
        mine, other = order.sample(ends, 2)
        deed = order.random()
        if deed < 0.2 and mine.given < frames:
            mine.give()
        elif deed < 0.5:
            mine.say()
        elif deed < 0.55:
            mine.reuse(order)
        elif deed < 0.97 and mine.wire:
            other.hear(*mine.wire.popleft())
        elif deed > 0.995 and step < 100_000:  # it breaks, or what comes next is damaged
            other.stream.damaged()
            connections += 1
            for end in ends:
                end.wire.clear()
                end.may_send = False
            for end in ends:
                end.report()
        if len(mine.stream._kept) > mine.given - other.got + 3 * REPORT_FRAMES + len(other.wire):
            raise BrokenRuleError("frames that have come are kept for ever")
        if all(end.got == frames for end in ends):
            return connections
    raise BrokenRuleError(f"only {[end.got for end in ends]} have come")


def test_all_comes_once_and_in_order_whatever_breaks() -> None:
    assert sum(run(seed) for seed in range(60)) > 200


class ForgetWhatIsSent(ResumableStream):
    def take(self) -> tuple[FrameHeader, object]:  # type: ignore[override]
        taken = super().take()
        self.confirm(self._next)
        return taken


class GoOnWithoutWhatWasLost(ResumableStream):
    def rewind(self) -> None:
        pass


class CountReportsAsFrames(ResumableStream):
    def on_frame(self, header: FrameHeader) -> None:
        super().on_frame(header)
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
