"""Declarations on their way to the scheduler: one message for those that follow one another closely."""

from __future__ import annotations

from collections.abc import Callable

from byteps_py.proto import control_pb2 as pb
from byteps_py.system.loop import EventLoop
from byteps_py.worker.scheduler_messages import INTERVAL_S, BatchingLink


class Loop(EventLoop):
    """Timers of which end when the test says so."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.timers.append((delay_s, callback))

    def expire(self) -> None:
        for _, callback in self.timers[:]:
            del self.timers[0]
            callback()


class Link:
    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self, message: pb.MemberMessage) -> None:
        names = ",".join(ballot.name for ballot in message.declare.ballots)
        self.sent.append(names or str(message.WhichOneof("body")))

    def close(self, reason: str = "") -> None:
        self.sent.append(f"close {reason}")


def declare(*names: str) -> pb.MemberMessage:
    return pb.MemberMessage(declare=pb.Declare(ballots=[pb.Ballot(name=name) for name in names]))


def verdicts(*names: str) -> pb.SchedulerMessage:
    return pb.SchedulerMessage(verdicts=pb.Verdicts(verdicts=[pb.Verdict(name=name) for name in names]))


def linked() -> tuple[BatchingLink, Link, Loop]:
    link, loop = Link(), Loop()
    return BatchingLink(link, loop), link, loop


def test_a_declaration_with_none_before_it_goes_at_once() -> None:
    batching, link, loop = linked()
    batching.send(declare("a", "b"))
    batching.on_message(verdicts("a", "b"))
    batching.send(declare("c"))
    assert link.sent == ["a,b", "c"]
    assert loop.timers == []


def test_those_that_follow_wait_for_its_verdict_and_go_together() -> None:
    batching, link, _ = linked()
    for name in "abcd":
        batching.send(declare(name))
    assert link.sent == ["a"]
    batching.on_message(verdicts("a"))
    assert link.sent == ["a", "b,c,d"]
    batching.send(declare("e"))
    batching.on_message(verdicts("b", "d"))  # c is not decided
    assert link.sent == ["a", "b,c,d"]
    batching.on_message(verdicts("c"))
    assert link.sent == ["a", "b,c,d", "e"]


def test_they_do_not_wait_long_for_a_verdict_that_needs_others() -> None:
    batching, link, loop = linked()
    for name in "abc":
        batching.send(declare(name))
    assert [delay_s for delay_s, _ in loop.timers] == [INTERVAL_S]
    loop.expire()
    assert link.sent == ["a", "b,c"]
    batching.send(declare("d"))
    loop.expire()
    assert link.sent == ["a", "b,c", "d"]
    batching.on_message(verdicts("a", "b", "c", "d"))
    loop.expire()
    assert link.sent == ["a", "b,c", "d"]


def test_what_is_sent_later_does_not_overtake_them() -> None:
    batching, link, _ = linked()
    for name in "ab":
        batching.send(declare(name))
    batching.send(pb.MemberMessage(join=pb.Join(rank=1)))
    batching.send(declare("c"))
    batching.close("done")
    assert link.sent == ["a", "b", "join", "c", "close done"]


def test_a_group_that_is_over_declares_nothing() -> None:
    batching, link, loop = linked()
    for name in "ab":
        batching.send(declare(name))
    batching.forget()
    loop.expire()
    batching.send(declare("c"))
    assert link.sent == ["a", "c"]
