"""Whatever happens to connections and schedulers, every message counts once, in order, and epochs rise."""

from __future__ import annotations

import pytest
from support.control_plane import Member, Plane
from support.scheduler_core import ballot, declare, server, worker

from byteps_py.cli.job import to_text
from byteps_py.errors import JournalError, ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.proto.journal_pb2 import JournalRecord
from byteps_py.scheduler import job as states
from byteps_py.scheduler.core import LinksChanged, StopRequested
from byteps_py.scheduler.member_links.journal import replay
from byteps_py.scheduler.member_links.links import STRANGERS_WAIT, MemberLinks

SHAPE = {"num_workers": 2, "num_servers": 1, "servers_only": True}


def complete() -> tuple[Plane, Member, Member, Member]:
    plane = Plane(**SHAPE)
    one, two = plane.add(worker(0)), plane.add(worker(1))
    third = plane.add(server(0))
    plane.settle()
    assert all(member.bodies() == ["welcome", "membership"] for member in plane.members)
    return plane, one, two, third


def running(plane: Plane) -> MemberLinks:
    assert plane.links is not None
    return plane.links


def test_a_member_that_comes_back_misses_nothing_and_repeats_nothing() -> None:
    plane, one, two, _ = complete()
    one.say(**declare(ballot([0, 1])))
    two.say(**declare(ballot([2, 3])))
    plane.carry_up(one)
    plane.carry_up(two)
    plane.cut(one)  # with the verdict on its way
    one.say(arrive=pb.Arrive(sequence=1))
    two.say(arrive=pb.Arrive(sequence=1))
    plane.settle()
    for member in (one, two):
        assert member.bodies()[2:] == ["verdicts", "release"]
        assert member.end.unconfirmed == 0


def test_the_answer_to_a_heartbeat_confirms_messages() -> None:
    plane, one, *_ = complete()
    one.say(arrive=pb.Arrive(sequence=1))
    plane.settle()
    assert one.end.unconfirmed == 1
    one.say(heartbeat=pb.Heartbeat(bare=True))
    plane.settle()
    assert one.end.unconfirmed == 0
    one.say(heartbeat=pb.Heartbeat(bare=True))
    plane.carry_up(one)
    plane.flush()
    assert not one.down


def test_a_message_that_arrives_twice_counts_once() -> None:
    plane, one, two, _ = complete()
    one.say(arrive=pb.Arrive(sequence=1))
    plane.carry_up(one)
    plane.flush()
    plane.cut(one)  # it does not know that this has come: it says it again
    two.say(arrive=pb.Arrive(sequence=1))
    plane.settle()
    assert one.bodies()[2:] == two.bodies()[2:] == ["release"]
    assert running(plane).core.state == states.RUNNING


def test_a_broken_connection_is_forgiven_for_half_a_second() -> None:
    plane, one, two, _ = complete()
    plane.cut(one)
    plane.tick(0.4)
    (doubt,) = {member.doubt for member in running(plane).status(plane.now).members} - {""}
    assert doubt == "disconnected for 0.4 s"
    assert f"  {doubt}  " in to_text(running(plane).status(plane.now))
    plane.settle()
    plane.tick(0.2)
    assert running(plane).core.state == states.RUNNING
    plane.cut(one)
    plane.tick(0.5)
    plane.settle()
    assert running(plane).core.state == states.FAILED
    assert "lost worker 0 (ranks 0-1, host gpu0, pid 100): its connection ended" in two.heard[-1].failure.message


def test_a_new_connection_takes_the_place_of_one_whose_end_was_not_seen() -> None:
    plane, one, two, _ = complete()
    plane.forget(one)
    for member in (one, two):
        member.say(arrive=pb.Arrive(sequence=1))
    plane.settle()
    assert one.bodies()[-1] == "release"
    assert running(plane).core.state == states.RUNNING


def test_a_stranger_can_not_take_a_members_place() -> None:
    plane, one, _, _ = complete()
    plane.cut(one)
    thief = plane.add(worker(0))
    thief.end.accept(pb.SchedulerMessage(welcome=pb.Welcome(member_id=1)))
    plane.settle()
    assert "complete already" in thief.heard[-1].refused.message
    assert one.is_welcome


def test_a_process_in_the_place_of_an_absent_member_waits() -> None:
    plane = Plane(num_workers=2, num_servers=2, servers_only=True)
    for register in (worker(0, k=2), worker(1, k=2), server(0, k=2), server(1, k=2)):
        plane.add(register)
    plane.settle()
    plane.cut(plane.members.pop())
    heir = plane.add(server(1, k=2))
    plane.connect(heir)
    plane.carry_up(heir)
    plane.flush()
    plane.carry_down(heir)
    assert heir.heard[-1].refused.later
    plane.carry_down(heir)
    plane.wait(0.6)
    plane.settle()
    assert heir.bodies()[1:3] == ["welcome", "membership"]


def test_a_member_that_confirms_nothing_is_lost() -> None:
    plane, one, two, _ = complete()
    running(plane).most_unconfirmed = 100
    for sequence in range(1, 102):
        for member in (one, two):
            member.say(arrive=pb.Arrive(sequence=sequence))
            plane.carry_up(member)
        plane.flush()
        while two.down:
            plane.carry_down(two)
    plane.tick()
    assert "lost worker 0 (ranks 0-1, host gpu0, pid 100): it has confirmed none of 101" in running(plane).core.reason


def test_a_gap_is_no_way_to_go_on() -> None:
    plane, one, two, _ = complete()
    one.say(arrive=pb.Arrive(sequence=1))
    one.up.clear()
    one.say(arrive=pb.Arrive(sequence=2))
    plane.settle()
    assert "its message 2 arrived after message 0" in two.heard[-1].failure.message
    end = one.end
    with pytest.raises(ProtocolError, match="message 9 of the scheduler arrived after message 2"):
        end.accept(pb.SchedulerMessage(number=9, release=pb.Release(sequence=1)))
    with pytest.raises(ProtocolError, match="opened epoch 1 after epoch 1"):
        end.accept(pb.SchedulerMessage(number=3, membership=pb.Membership(epoch=1)))


def test_a_lost_member_learns_that_it_is_lost() -> None:
    plane, one, _, _ = complete()
    plane.cut(one)
    plane.tick(0.5)
    plane.settle()
    assert one.heard[-1].refused.error == "PeerLostError"
    assert "worker 0 (host gpu0, pid 100) can't come back: its connection ended" in one.heard[-1].refused.message


def test_news_have_no_number_and_are_not_written_down() -> None:
    plane, one, two, _ = complete()
    written = len(plane.disk)
    waiting = [pb.Waiting(name="w", ready_ranks=[0, 1], age_s=99)]
    one.say(heartbeat=pb.Heartbeat(waiting=waiting))
    two.say(stack_report=pb.StackReport(rank=2, text="it sleeps"))
    plane.settle()
    assert one.bodies()[2:] == ["stalled", "stack_report"]
    assert all(message.number == 0 for message in one.heard[2:])
    assert len(plane.disk) == written


def test_a_scheduler_that_has_had_links_probed_can_be_started_again() -> None:
    """When a probe is due follows from heartbeats, which are not written down."""
    plane = Plane(num_workers=2, num_servers=2, rebalance_links=True)
    one, *_ = [plane.add(each) for place in (0, 1) for each in (worker(place, k=2), server(place, k=2))]
    plane.settle()
    for member in plane.members:
        member.say(ready=pb.Ready())
    plane.settle()
    slow = min(running(plane).core.job.roster.workers(), key=lambda each: each.connection).id
    plane.do(LinksChanged({slow: 100.0}, "it is slow"))
    for _ in range(20):
        plane.tick(0.5)
        for member in plane.members:
            member.say(heartbeat=pb.Heartbeat())
        plane.settle()
    assert "probe" in one.bodies()
    plane.crash()
    plane.start()


def test_no_token_is_written_down() -> None:
    plane, *_ = complete()
    for record in plane.disk:
        for number in range(1, 10_000):
            assert record.register.token != number.to_bytes(8, "little")
    assert len({record.register.token for record in plane.disk if record.HasField("register")}) == 3


# ---- schedulers that are started again ---------------------------------------------------------------------------


def test_a_restarted_scheduler_takes_its_members_back_and_waits_for_the_others() -> None:
    plane, one, two, _ = complete()
    one.say(arrive=pb.Arrive(sequence=1))
    plane.settle()
    plane.crash()
    two.say(arrive=pb.Arrive(sequence=1))
    plane.start()
    plane.settle()
    assert one.bodies()[2:] == two.bodies()[2:] == ["release"]
    assert (running(plane).restarts, running(plane).core.job.roster.latest_epoch) == (1, 1)
    assert "the scheduler was started again once" in to_text(running(plane).status(plane.now))
    plane.crash()
    plane.start()
    plane.members.remove(two)
    plane.settle()
    plane.wait(4.9)
    assert running(plane).core.state == states.RUNNING
    plane.wait(0.2)
    assert running(plane).core.reason.endswith("it did not come back within 5 s after the scheduler was started again")


def test_a_restarted_scheduler_does_not_wait_for_the_connections_of_those_who_had_left() -> None:
    plane, *members = complete()
    for member in members:
        member.say(leave=pb.Leave())
        plane.carry_up(member)
    plane.flush()
    plane.crash()  # before it has seen a connection's end
    plane.members.clear()
    plane.start()
    plane.tick(STRANGERS_WAIT * plane.config.heartbeat_timeout_s)  # another job's processes might come
    finish = running(plane).finished(plane.now)
    assert finish is not None
    assert finish.exit_status == 0


@pytest.mark.parametrize("asked", [False, True])
def test_a_journal_without_living_members_is_given_up(asked: bool) -> None:
    plane, *members = complete()
    plane.crash()
    plane.start()
    plane.members.clear()
    if asked:
        newcomer = plane.add(worker(0))
        plane.connect(newcomer)
        plane.carry_up(newcomer)
        plane.flush()
        plane.carry_down(newcomer)
        assert newcomer.heard[-1].refused.later
        assert "waits for members of its job to come back: worker 0 (host gpu0" in newcomer.heard[-1].refused.message
    plane.tick(1.9 if asked else 4.9)
    assert not running(plane).is_abandoned
    plane.tick(0.2)
    assert running(plane).is_abandoned
    assert running(plane).finished(plane.now) is None
    assert members[0].end.epoch == 1


def asks(plane: Plane, member: Member) -> pb.Refused:
    """It asks to become a member, and is turned away."""
    plane.connect(member)
    while member.up:
        plane.carry_up(member)
    plane.flush()
    plane.carry_down(member)
    plane.carry_down(member)
    return member.heard[-1].refused


def restarted_with(*survivors: int) -> tuple[Plane, list[Member]]:
    """The scheduler was killed, and of two workers and a server only these have come back."""
    plane, *members = complete()
    plane.crash()
    plane.members = [members[index] for index in survivors]
    plane.start()
    plane.settle()
    return plane, members


@pytest.mark.parametrize("survivors", [(), (2,)])
def test_workers_that_are_started_again_begin_a_new_job_at_once(survivors: tuple[int, ...]) -> None:
    plane, _ = restarted_with(*survivors)
    assert asks(plane, plane.add(worker(0))).later
    assert not running(plane).is_abandoned, "worker 1 may live"
    assert asks(plane, plane.add(worker(1))).later
    assert running(plane).is_abandoned
    assert running(plane).finished(plane.now) is None


def test_an_elastic_job_begins_anew_where_all_its_workers_were_killed() -> None:
    plane = Plane(num_workers=2, num_servers=1, servers_only=True, elastic=True)
    for register in (worker(0, elastic=True), worker(1, elastic=True), server(0, elastic=True)):
        plane.add(register)
    plane.settle()
    plane.crash()
    plane.members = plane.members[2:]
    plane.start()
    plane.settle()
    for index in (0, 1):
        assert not running(plane).is_abandoned
        assert asks(plane, plane.add(worker(index, elastic=True))).later
    assert running(plane).is_abandoned


def test_heirs_on_other_machines_wait_for_two_timeouts() -> None:
    plane, _ = restarted_with(2)
    for index in (0, 1):
        assert asks(plane, plane.add(worker(index, machine_id=f"new {index}"))).later
    plane.wait(1.9)
    assert not running(plane).is_abandoned
    plane.wait(0.2)
    assert running(plane).is_abandoned


def test_a_new_server_ends_no_wait_for_workers_beside_a_server_that_is_back() -> None:
    plane, (one, two, _) = restarted_with(2)
    assert asks(plane, plane.add(server(1))).later
    plane.wait(2.5)
    assert not running(plane).is_abandoned
    plane.members += [one, two]
    plane.settle()
    plane.wait(5.0)
    assert running(plane).core.state == states.RUNNING


def test_a_job_whose_servers_alone_come_back_fails_if_nobody_asks() -> None:
    plane, members = restarted_with(2)
    plane.wait(5.3)
    assert not running(plane).is_abandoned
    assert "did not come back within 5 s" in next(m.failure.message for m in members[2].heard if m.HasField("failure"))


def test_a_worker_that_is_back_keeps_its_job() -> None:
    plane, _ = restarted_with(0, 2)
    for index in (0, 1):
        assert asks(plane, plane.add(worker(index))).later
    plane.wait(2.5)
    assert not running(plane).is_abandoned


def test_a_job_that_had_failed_gives_way_to_who_asks() -> None:
    plane, one, _, third = complete()
    plane.cut(one)
    plane.tick(0.6)
    plane.flush()
    assert running(plane).core.state == states.FAILED
    plane.crash()
    plane.start()
    plane.members = [third]
    plane.settle()
    assert third.heard[-1].HasField("failure")
    asks(plane, plane.add(worker(0)))
    assert running(plane).is_abandoned


def test_what_is_left_of_a_job_hears_that_another_has_taken_its_place() -> None:
    plane, (_, _, third) = restarted_with(2)
    successor = MemberLinks(plane.config)
    successor.take_place_of(running(plane))
    plane.cut(third)
    plane.links = successor
    refused = asks(plane, third)
    assert refused.replaced
    assert not third.end.doubts(third.heard[-1])
    assert "the job of server tcp://cpu0:1 (host h0, pid 200) is over" in refused.message


def test_an_older_journal_can_not_give_up_who_knows_more() -> None:
    plane, one, two, _ = complete()
    old = len(plane.disk)
    for member in (one, two):
        member.say(arrive=pb.Arrive(sequence=1))
    plane.settle()
    plane.crash()
    del plane.disk[old:]
    plane.start()
    plane.members = []
    plane.wait(11.0)
    assert asks(plane, one).unknown


def test_a_journal_that_lacks_what_it_confirmed_is_doubted() -> None:
    plane, one, two, _ = complete()
    old = len(plane.disk)
    one.say(arrive=pb.Arrive(sequence=1))
    one.say(heartbeat=pb.Heartbeat(bare=True))
    plane.settle()
    assert one.end.unconfirmed == 0
    plane.crash()
    del plane.disk[old:]
    plane.start()
    plane.members = [two]
    plane.settle()
    plane.wait(6.0)
    assert "can't come back" in asks(plane, one).message
    assert one.end.doubts(one.heard[-1])


@pytest.mark.parametrize("everybody_left", [False, True])
def test_a_job_that_was_over_is_over(everybody_left: bool) -> None:
    plane, one, two, third = complete()
    for member in (one, two, third) if everybody_left else (one, two):
        member.say(leave=pb.Leave())
        plane.carry_up(member)
        if everybody_left:
            plane.cut(member)
    plane.flush()
    plane.crash()
    plane.start()
    plane.tick(0.1)
    assert running(plane).finished(plane.now) is None
    for _ in range(2):
        plane.tick(5.0)
    finish = running(plane).finished(plane.now)
    assert finish is not None
    assert finish.exit_status == 0
    assert not running(plane).is_abandoned


def test_an_unknown_member_is_refused_and_later_epochs_follow_its_own() -> None:
    plane, one, *_ = complete()
    plane.crash()
    plane.disk.clear()
    plane.start()
    plane.members = [one]
    plane.connect(one)
    plane.carry_up(one)
    plane.flush()
    plane.carry_down(one)
    assert one.heard[-1].refused.unknown
    assert "this scheduler does not know worker 0 (host gpu0, pid 100), which was member 1" in (
        one.heard[-1].refused.message
    )
    plane.crash()  # it does not forget that either
    plane.start()
    plane.members = [plane.add(worker(0)), plane.add(worker(1)), plane.add(server(0))]
    plane.settle()
    assert plane.members[0].heard[-1].membership.epoch == 2


def test_a_journal_older_than_its_members_is_refused() -> None:
    plane, one, two, _ = complete()
    old = len(plane.disk)
    for member in (one, two):
        member.say(arrive=pb.Arrive(sequence=1))
    plane.settle()
    plane.crash()
    del plane.disk[old:]
    plane.start()
    plane.connect(one)
    plane.carry_up(one)
    plane.flush()
    plane.carry_down(one)
    assert one.heard[-1].refused.unknown
    assert "has received 2 messages, but the scheduler knows only of 1" in one.heard[-1].refused.message


def test_a_journal_that_leads_elsewhere_is_an_error() -> None:
    plane, *_ = complete()
    plane.disk[0].register.local_size = 7
    plane.disk[0].register.partition_bytes = 1
    with pytest.raises(JournalError, match="gives other messages than when it was written"):
        replay(MemberLinks(plane.config), plane.disk)


def test_times_of_records_are_those_of_the_schedulers_clock() -> None:
    plane, *_ = complete()
    plane.wait(7.0)
    record = JournalRecord(at_s=plane.now, stop="enough")
    running(plane).handle(StopRequested("enough"), plane.now)
    plane.flush()
    assert plane.disk[-1].at_s == record.at_s
    plane.crash()
    plane.start()
    assert plane.now == record.at_s
    assert running(plane).core.reason == "stopped: enough"
