"""Tables of all members travel as what has changed, and come out as they were."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from support.scheduler_core import server, worker

from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.proto.journal_pb2 import JournalRecord
from byteps_py.scheduler.core import ClockTicked, LinksChanged
from byteps_py.scheduler.member_links.links import (
    MemberLinks,
    Restarted,
    Sent,
    StreamClosed,
    StreamMessage,
    StreamOpened,
)
from byteps_py.scheduler.member_links.membership_change import change_between, changed
from byteps_py.scheduler.member_links.protocol import MemberEnd
from byteps_py.scheduler.roster import ClusterConfig


def member(number: int, weight: int = 1, link_mbit: float = 100.0, host: str = "h") -> pb.Member:
    return pb.Member(member_id=number, weight=weight, link_mbit=link_mbit, host=host)


def of(epoch: int, *servers: pb.Member) -> pb.Membership:
    return pb.Membership(epoch=epoch, servers=servers, partition_bytes=7, reason=f"why {epoch}", continued=epoch % 2)


@pytest.mark.parametrize(
    "after",
    [
        of(2, member(1), member(3)),
        of(2, member(1, 5), member(2, 6), member(3, 7)),
        of(2, member(1), member(2, link_mbit=50.0), member(3), member(9)),
        of(2, member(8), member(3), member(2), member(1)),
        of(2, member(1, host="elsewhere"), member(2), member(3)),
        of(2, member(4), member(5)),
        of(2),
    ],
    ids=["one left", "shares", "a rate and a newcomer", "another order", "another host", "all others", "nobody"],
)
def test_a_change_makes_the_table_that_it_was_made_of(after: pb.Membership) -> None:
    before = of(1, member(1), member(2), member(3))
    change = pb.MembershipChange.FromString(change_between(before, after).SerializeToString())
    assert changed(before, change) == after


def test_random_changes_one_after_the_other() -> None:
    chance, here, there = random.Random(5), of(1, *map(member, range(30))), of(1, *map(member, range(30)))
    for epoch in range(2, 200):
        servers = [each for each in here.servers if chance.random() > 0.1]
        servers += [member(1000 * epoch + number) for number in range(chance.randrange(5))]
        if chance.random() < 0.3:
            chance.shuffle(servers)
        weight = chance.randrange(3)
        here = of(epoch, *(member(each.member_id, each.weight + weight) for each in servers))
        there = changed(there, change_between(there, here))
        assert there == here


def test_the_loss_of_one_among_many_takes_few_bytes() -> None:
    before = of(1, *(member(number, 3, host=f"machine {number}") for number in range(5000)))
    after = of(2, *(each for each in before.servers if each.member_id != 17))
    assert change_between(before, after).ByteSize() < 100 < before.ByteSize() / 1000


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (pb.MembershipChange(since=3), "a change of epoch 3; this process has 1"),
        (
            pb.MembershipChange(since=1, servers=pb.MemberChanges(runs=[pb.MemberRun(first=1, count=2)])),
            "member 3 of 2",
        ),
        (
            pb.MembershipChange(since=1, servers=pb.MemberChanges(runs=[pb.MemberRun(count=1)], weights=[1, 2])),
            "2 values of 1 members",
        ),
        (
            pb.MembershipChange(since=1, workers=pb.MemberChanges(runs=[pb.MemberRun(count=1 << 31)])),
            "more members than can be",
        ),
    ],
)
def test_what_no_scheduler_sends_is_an_error(change: pb.MembershipChange, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        changed(of(1, member(1), member(2)), change)


class EagerlyPackedLinks(MemberLinks):
    least_packed_bytes = 100


class TabledMembers:
    """Members with a server each, whose ends read what the scheduler sends them. ``tables``: as each has them."""

    def __init__(self, machines: int, write: Callable[[JournalRecord], None] | None = None) -> None:
        self.config = ClusterConfig(num_workers=machines, num_servers=machines, job="j")
        self.links = EagerlyPackedLinks(self.config, write)
        registers = [worker(i, 2, machines, machines) for i in range(machines)]
        registers += [server(i, n=machines, k=machines) for i in range(machines)]
        self.ends = [MemberEnd(register, f"token {i}".encode) for i, register in enumerate(registers)]
        self.streams = {place: place for place in range(len(self.ends))}  # to the member's place
        self.tables: dict[int, pb.Membership] = {}
        self.sent: list[Sent] = []
        self.now_s = 0.0
        for place in list(self.streams):
            self.connect(place, place)
        for place in self.streams:
            ready = self.ends[place].stamp(pb.MemberMessage(ready=pb.Ready()))
            self.take(self.links.handle(StreamMessage(place, ready), self.now_s))

    def connect(self, place: int, stream: int) -> None:
        self.streams[stream] = place
        self.links.handle(StreamOpened(stream), self.now_s)
        self.take(self.links.handle(StreamMessage(stream, self.ends[place].register()), self.now_s))

    def take(self, sent: list[Sent]) -> None:
        for each in sent:
            if each.message is None:
                continue
            self.sent.append(each)
            end = self.ends[self.streams[each.stream]]
            message = end.read(pb.SchedulerMessage.FromString(each.stamped().SerializeToString()))
            if message.HasField("welcome"):
                end.welcomed(message)
            elif end.accept(message) and message.HasField("membership"):
                self.tables[self.streams[each.stream]] = message.membership

    def lose(self, stream: int) -> None:
        """Its connection ends for good."""
        place, epoch = self.streams.pop(stream), self.links.core.job.roster.epoch
        self.tables.pop(place, None)
        self.links.handle(StreamClosed(stream), self.now_s)
        for _ in range(50):
            if self.links.core.job.roster.epoch > epoch:
                return
            self.now_s += 0.2
            for each in self.streams:
                self.links.handle(StreamMessage(each, pb.MemberMessage(heartbeat=pb.Heartbeat(bare=True))), self.now_s)
            self.take(self.links.handle(ClockTicked(), self.now_s))
        raise AssertionError(self.links.core.reason)

    @property
    def is_agreed(self) -> bool:
        return all(table == self.links.core._services.membership for table in self.tables.values())


def test_members_get_changes_and_one_that_comes_back_what_it_lacks() -> None:
    job = TabledMembers(4)
    assert job.is_agreed
    job.sent.clear()
    job.lose(4)
    changes = [each for each in job.sent if each.packed]
    assert len(changes) == len(job.tables) == 7
    assert len({each.packed for each in changes}) == 1
    whole = len(changes[0].message.SerializeToString()) if changes[0].message else 0
    assert len(changes[0].packed) < whole / 3
    assert job.is_agreed
    # One that was away in two epochs gets the first as a change of its own table, and the second of that one.
    job.links.handle(StreamClosed(0), job.now_s)
    away = job.streams.pop(0)
    left = job.links.core._services.membership.servers[0].member_id
    for mbit in (50.0, 20.0):
        job.take(job.links.handle(LinksChanged({left: mbit}, "it is slow"), job.now_s))
    assert {table.epoch for table in job.tables.values()} == {2, 4}
    job.sent.clear()
    job.connect(away, 100)
    packed = [len(each.packed) for each in job.sent if each.message is not None and each.message.HasField("membership")]
    assert len(packed) == 2
    assert max(packed) < whole / 3
    assert job.is_agreed


def test_a_restarted_scheduler_sends_changes_of_the_tables_that_it_knows() -> None:
    records: list[bytes] = []
    job = TabledMembers(3, lambda record: records.append(record.SerializeToString()))
    before = job.links
    job.links = EagerlyPackedLinks(job.config)
    for record in records:
        job.links.replay(JournalRecord.FromString(record))
    job.links.handle(Restarted(), 1.0)
    job.now_s = 1.0
    for place in list(job.streams):
        job.connect(place, 100 + job.streams.pop(place))
    job.sent.clear()
    first = before.core._services.membership.servers[0].member_id
    job.take(job.links.handle(LinksChanged({first: 10.0}, "it is slow"), job.now_s))
    assert [each.message.membership.epoch for each in job.sent if each.message is not None] == [2] * 6
    assert all(0 < len(each.packed) < 200 for each in job.sent)
    assert job.is_agreed
