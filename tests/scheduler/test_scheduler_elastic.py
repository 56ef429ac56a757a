"""How the next group of an elastic job is formed: the decisions one by one, and whole jobs with faults at random."""

from __future__ import annotations

import random

import pytest
from support.scheduler_core import Cluster, ballot, declare, running, server, worker

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import job as states
from byteps_py.scheduler.core import NewcomersAdmitted
from byteps_py.scheduler.elastic import (
    PLANNED_S,
    SHUT_DOWN_S,
    Break,
    Candidate,
    GiveUp,
    KeepWaiting,
    Open,
    Reforming,
    Waiting,
)

A, B, C = Candidate(1, 0), Candidate(2, 1), Candidate(3, 2)
NEW = Candidate(9, -1)


def reforming(min_ranks: int = 1, max_ranks: int = 0, reset_limit: int = 0) -> Reforming:
    return Reforming(min_ranks, max_ranks, 100.0, reset_limit)


def broken(**limits: int) -> Reforming:
    made = reforming(**limits)
    assert made.begin("lost b", planned=False, now_s=0.0)
    return made


# ---- decisions -------------------------------------------------------------------------------------------------------


def test_the_remaining_machines_form_the_next_group_once_all_are_back() -> None:
    group = broken()
    group.ready(C.id, Waiting(2))
    waiting = group.decide([A, C], 1.0)
    assert isinstance(waiting, KeepWaiting)
    assert "lost b; waiting for 1 machine to come back" in waiting.sentence
    group.ready(A.id, Waiting(1))
    assert group.decide([A, C], 1.0) == Open(((1, 1), (3, 2)), (), is_continued=False)


def test_a_machine_that_does_not_come_back_is_left_behind_at_the_deadline() -> None:
    group = broken()
    group.ready(A.id, Waiting(1))
    assert isinstance(group.decide([A, C], 99.0), KeepWaiting)
    assert group.decide([A, C], 100.0) == Open(((1, 1),), (3,), is_continued=False)


def test_newcomers_come_after_the_others_and_are_not_waited_for() -> None:
    group = broken()
    group.ready(NEW.id, Waiting(4))
    group.ready(C.id, Waiting(1))
    assert group.decide([NEW, C, Candidate(4, -1)], 0.0) == Open(((3, 1), (9, 4)), (), is_continued=False)


def test_the_machine_with_the_latest_state_comes_first() -> None:
    """B's rank joined late and got it, A's was in the group and never got it; C's is from a group before that."""
    group = broken()
    group.ready(A.id, Waiting(1))
    group.ready(B.id, Waiting(2, synced_in=7))
    group.ready(C.id, Waiting(1, synced_in=5))
    group.ready(NEW.id, Waiting(4))
    assert group.decide([A, B, C, NEW], 0.0) == Open(((2, 2), (3, 1), (1, 1), (9, 4)), (), False, is_under_way=True)


def test_the_maximum_keeps_newcomers_out_whatever_state_they_have() -> None:
    group = broken(max_ranks=3)
    group.ready(NEW.id, Waiting(2, synced_in=3))
    group.ready(A.id, Waiting(2, synced_in=4))
    assert group.decide([NEW, A], 0.0) == Open(((1, 2),), (), False, is_under_way=True)


def test_newcomers_beyond_the_maximum_wait() -> None:
    group = broken(max_ranks=3)
    group.ready(NEW.id, Waiting(2))
    group.ready(8, Waiting(1))
    group.ready(A.id, Waiting(2))
    assert group.decide([A, Candidate(8, -1), NEW], 0.0) == Open(((1, 2), (8, 1)), (), is_continued=False)
    group.opened([1, 8])
    assert group.waiting_ranks(NEW.id) == 2
    assert not group.has_room(3, 2)


def test_fewer_than_the_minimum_wait_and_then_give_up() -> None:
    group = broken(min_ranks=2)
    group.ready(A.id, Waiting(1))
    waiting = group.decide([A], 50.0)
    assert isinstance(waiting, KeepWaiting)
    assert "1 rank left, but the job needs at least 2 (BYTEPS_MIN_NP): waiting for others to join" in waiting.sentence
    over = group.decide([A], 100.0)
    assert isinstance(over, GiveUp)
    assert over.sentence == (
        "lost b; 1 rank left, but the job needs at least 2 (BYTEPS_MIN_NP); no others joined within 100 s"
    )
    group.ready(NEW.id, Waiting(1))
    assert group.decide([A, NEW], 50.0) == Open(((1, 1), (9, 1)), (), is_continued=False)


def test_so_many_groups_and_no_more() -> None:
    group = broken(reset_limit=1)
    group.ready(A.id, Waiting(1))
    assert isinstance(group.decide([A], 0.0), Open)
    group.opened([A.id])
    group.begin("lost c", planned=False, now_s=1.0)
    group.ready(A.id, Waiting(1))
    over = group.decide([A], 1.0)
    assert isinstance(over, GiveUp)
    assert over.sentence == "lost c; the group was already re-formed 1 time, the limit (BYTEPS_RESET_LIMIT)"


def test_a_job_that_keeps_its_ranks_waits_for_all_and_gives_them_the_same_numbers() -> None:
    """Machine 0 was lost, and comes back as another member; machine 1 has the state."""
    group = Reforming(2, 2, 100.0, 0, keeps_ranks=True)
    assert group.begin("lost a", planned=False, now_s=0.0)
    b, back = Candidate(2, 1, number=1), Candidate(9, -1, number=0)
    group.ready(b.id, Waiting(1, synced_in=3))
    waiting = group.decide([b], 1.0)
    assert isinstance(waiting, KeepWaiting)
    assert "1 rank left, but the job needs at least 2 (BYTEPS_MAX_RESTARTS: it keeps their number)" in waiting.sentence
    group.ready(back.id, Waiting(1, has_newcomers=True))
    assert group.decide([b, back], 2.0) == Open(((9, 1), (2, 1)), (), False, is_under_way=True)


def test_the_loss_of_the_last_machine_does_not_end_a_job_that_waits_for_all() -> None:
    cluster = Cluster(num_workers=1, num_servers=1, elastic=True, max_restarts=3)
    first = cluster.join(worker(0, 2, 1, 1, elastic=True))
    cpu = cluster.join(server(0, n=1, k=1, elastic=True))
    for each in (first, cpu):
        cluster.say(each, ready=pb.Ready())
    cluster.drop(first)
    cluster.tick(5.0, beating=(cpu,))
    assert cluster.core.state == states.RUNNING
    again = cluster.join(worker(0, 2, 1, 1, elastic=True))
    cluster.say(again, gathered=pb.Gathered(ranks=2, newcomers=True))
    membership = cluster.last(again).membership
    assert [(each.machine_index, each.local_size) for each in membership.workers] == [(0, 2)]
    assert not membership.under_way


def test_a_service_that_leaves_while_all_machines_are_waited_for_does_not_end_the_job() -> None:
    cluster = Cluster(num_workers=1, num_servers=2, elastic=True, max_restarts=3)
    first = cluster.join(worker(0, 2, 1, 2, elastic=True))
    leaving, staying = (cluster.join(server(index, n=1, k=2, elastic=True)) for index in range(2))
    for each in (first, leaving, staying):
        cluster.say(each, ready=pb.Ready())
    cluster.drop(first)
    cluster.say(leaving, leave=pb.Leave(reason="SIGTERM"))
    assert cluster.core.state == states.RUNNING, cluster.core.reason
    again = cluster.join(worker(0, 2, 1, 2, elastic=True))
    cluster.say(again, gathered=pb.Gathered(ranks=2, newcomers=True))
    membership = cluster.last(again).membership
    assert [each.local_size for each in membership.workers] == [2]
    assert len(membership.servers) == 1


def test_machines_that_were_put_off_have_all_of_their_time_afterwards() -> None:
    """The scheduler was started again, and waited for the members of its job before it admitted others."""
    cluster = Cluster(num_workers=1, num_servers=1, elastic=True, max_restarts=3, elastic_timeout_s=15.0)
    first = cluster.join(worker(0, 2, 1, 1, elastic=True))
    cpu = cluster.join(server(0, n=1, k=1, elastic=True))
    for each in (first, cpu):
        cluster.say(each, ready=pb.Ready())
    cluster.drop(first)
    cluster.tick(14.0, beating=(cpu,))
    cluster.take(cluster.core.handle(NewcomersAdmitted(), cluster.now))
    cluster.tick(14.0, beating=(cpu,))
    assert cluster.core.state == states.RUNNING, cluster.core.reason
    cluster.tick(2.0, beating=(cpu,))
    assert cluster.core.state == states.FAILED


def test_ranks_that_leave_of_one_mind_go_on_as_they_are() -> None:
    group = reforming()
    assert not group.begin("new hosts", planned=True, now_s=0.0)
    group.ready(A.id, Waiting(1))
    assert isinstance(group.decide([A, B], 1.0), KeepWaiting)
    group.ready(B.id, Waiting(0))  # told to leave
    assert group.decide([A, Candidate(2, 1, is_leaving=True)], 1.0) == Open(((1, 1),), (), is_continued=True)
    group.ready(NEW.id, Waiting(1))
    assert group.decide([A, B, NEW], 1.0) == Open(((1, 1), (9, 1)), (), is_continued=False)


def test_a_rank_that_starts_late_is_not_equal_to_the_others() -> None:
    """Its machine was in the group, and no other joins."""
    group = reforming()
    group.begin("hosts leave", planned=True, now_s=0.0)
    group.ready(A.id, Waiting(2, has_newcomers=True))
    group.ready(B.id, Waiting(1))
    assert group.decide([A, B], 1.0) == Open(((1, 2), (2, 1)), (), is_continued=False)
    group.opened([A.id, B.id])
    group.begin("hosts leave", planned=True, now_s=2.0)
    group.ready(A.id, Waiting(2))
    group.ready(B.id, Waiting(1))
    assert group.decide([A, B], 3.0) == Open(((1, 2), (2, 1)), (), is_continued=True)


def test_ranks_that_have_shut_down_may_come_back_soon() -> None:
    """All ranks shut down and initialize again, or are done: that is not known before."""
    group = reforming()
    group.begin("ranks come back", planned=True, now_s=5.0)
    group.ready(A.id, Waiting(1, has_newcomers=True))
    group.ready(B.id, Waiting(0, shut_down=1))
    waiting = group.decide([A, B], 5.0 + SHUT_DOWN_S - 0.1)
    assert waiting == KeepWaiting("ranks come back; waiting for 1 rank to come back after shutdown()")
    assert group.decide([A, B], 5.0 + SHUT_DOWN_S) == Open(((1, 1),), (), is_continued=False)
    group.ready(B.id, Waiting(1, has_newcomers=True))
    assert group.decide([A, B], 6.0) == Open(((1, 1), (2, 1)), (), is_continued=False)


def test_a_machine_that_does_not_follow_the_others_breaks_the_group() -> None:
    group = reforming()
    group.begin("new hosts", planned=True, now_s=5.0)
    group.ready(A.id, Waiting(1))
    assert isinstance(group.decide([A, B], 5.0 + PLANNED_S - 0.1), KeepWaiting)
    decided = group.decide([A, B], 5.0 + PLANNED_S)
    assert decided == Break("new hosts; 1 machine did not follow within 10 s")
    assert group.begin(decided.sentence, planned=False, now_s=15.0)
    assert not group.begin("lost c", planned=False, now_s=16.0)
    assert group.reason == decided.sentence


# ---- the whole scheduler ---------------------------------------------------------------------------------------------


def elastic(n: int = 3, **config: object) -> tuple[Cluster, list[int]]:
    """A running job of machines of two ranks, and the workers' connections."""
    cluster = Cluster(num_workers=n, num_servers=0, elastic=True, **config)
    workers = [cluster.join(worker(i, 2, n, 0, elastic=True)) for i in range(n)]
    for i in range(n):
        cluster.join(server(i, n=n, k=0, kind=pb.MACHINE_KIND_GPU, elastic=True))
    assert cluster.core.state == states.RUNNING
    return cluster, workers


def memberships(cluster: Cluster, connection: int) -> list[pb.Membership]:
    return [m.membership for m in cluster.told[connection] if m.HasField("membership")]


def back(cluster: Cluster, connection: int, ranks: int = 2) -> None:
    epoch = memberships(cluster, connection)[-1].workers_since if memberships(cluster, connection) else 0
    cluster.say(connection, gathered=pb.Gathered(ranks=ranks, epoch=epoch))


def test_the_job_goes_on_without_a_lost_machine() -> None:
    cluster, (a, b, c) = elastic()
    cluster.say(a, declare=declare_of([0, 1]))
    cluster.drop(b)
    for connection in (a, c):
        told = cluster.last(connection).failure
        assert told.group_only
        assert told.message.startswith("lost worker 1 (ranks 2-3, host gpu1, pid 101)")
    assert cluster.say(c, declare=declare_of([4, 5])) == []  # said to a group that is no more
    back(cluster, a)
    back(cluster, c)
    membership = memberships(cluster, c)[-1]
    assert [(w.machine_index, w.first_rank, w.host) for w in membership.workers] == [(0, 0, "gpu0"), (1, 2, "gpu2")]
    assert membership.workers_since == membership.epoch
    assert not membership.continued
    assert {s.machine_index: s.host for s in membership.servers}[1] == "h2"
    cluster.say(c, declare=declare_of([2, 3]))
    cluster.say(a, declare=declare_of([0, 1]))
    assert cluster.last(a).HasField("verdicts")
    assert not cluster.last(a).verdicts.verdicts[0].error


def declare_of(ranks: list[int]) -> pb.Declare:
    return declare(ballot(ranks))["declare"]  # type: ignore[return-value]


def test_one_machine_alone_needs_no_server_and_others_may_join_it() -> None:
    cluster, (a, b) = elastic(2)
    cluster.drop(b)
    back(cluster, a, 1)
    membership = memberships(cluster, a)[-1]
    assert (len(membership.workers), membership.workers[0].local_size, len(membership.servers)) == (1, 1, 0)
    late = cluster.join(worker(7, 2, 9, 0, elastic=True))
    cluster.say(cluster.join(server(7, n=9, k=0, kind=pb.MACHINE_KIND_GPU, elastic=True)), ready=pb.Ready())
    assert cluster.bodies(late) == ["welcome"]
    back(cluster, late, 2)
    assert cluster.last(a).hosts == pb.Hosts(added=True)
    cluster.say(a, reform=pb.Reform(reason="new hosts", planned=True))
    back(cluster, a, 1)
    membership = memberships(cluster, a)[-1]
    assert [(w.local_size, w.first_rank) for w in membership.workers] == [(1, 0), (2, 1)]
    assert [s.machine_index for s in membership.servers] == [0, 1]
    assert memberships(cluster, late) == [membership]


def test_a_draining_machine_is_left_out() -> None:
    cluster, (a, b, c) = elastic()
    cluster.say(b, drain=pb.Drain(reason="SIGTERM"))
    assert cluster.last(a).hosts == pb.Hosts(removed=True)
    for connection, ranks in ((a, 2), (b, 0), (c, 2)):
        cluster.say(connection, reform=pb.Reform(reason="hosts", planned=True))
        back(cluster, connection, ranks)
    membership = memberships(cluster, a)[-1]
    assert [w.host for w in membership.workers] == ["gpu0", "gpu2"]
    assert membership.continued
    assert cluster.say(b, leave=pb.Leave(reason="done")) == []
    assert cluster.core.state == states.RUNNING


def test_a_machine_that_leaves_between_groups_ends_no_other() -> None:
    cluster, (a, b, c) = elastic()
    cluster.drop(b)
    assert cluster.say(c, leave=pb.Leave(reason="told to")) == []
    assert cluster.last(a).failure.group_only
    back(cluster, a)
    assert [w.host for w in memberships(cluster, a)[-1].workers] == ["gpu0"]
    assert cluster.core.state == states.RUNNING


def test_a_server_of_a_machine_outside_the_group_is_not_counted_on() -> None:
    cluster, (a, b) = elastic(2)
    servers = [connection for connection in cluster.told if connection not in (a, b)]
    cluster.join(worker(7, 2, 2, 0, elastic=True))
    cluster.say(cluster.join(server(7, n=2, k=0, kind=pb.MACHINE_KIND_GPU, elastic=True)), ready=pb.Ready())
    for connection in servers:
        cluster.drop(connection)
    assert memberships(cluster, a)[-1].servers
    assert cluster.last(a).slow.unserved
    assert cluster.last(b).slow.unserved


def test_a_job_that_is_not_elastic_has_no_place_for_others() -> None:
    cluster, _, _ = running(2, 1)
    late = cluster.join(worker(0))
    assert "unless the job is elastic" in cluster.last(late).refused.message
    late = cluster.join(worker(0, elastic=True))
    assert "BYTEPS_ELASTIC is set for this process and is not set for the scheduler" in (
        cluster.last(late).refused.message
    )


def test_all_that_are_left_may_end_the_job() -> None:
    cluster, (a, b) = elastic(2)
    cluster.drop(b)
    back(cluster, a)
    cluster.say(a, leave=pb.Leave())
    assert cluster.core.state == states.ENDED


def test_messages_about_a_group_that_is_over_are_ignored() -> None:
    """A rank that had shut down ends when its machine is in the next group, with another rank, already."""
    cluster, (a, b) = elastic(2)
    old = memberships(cluster, b)[-1].workers_since
    cluster.say(a, reform=pb.Reform(reason="ranks come back", planned=True))
    back(cluster, a)
    back(cluster, b, 1)
    assert len(memberships(cluster, b)) == 2
    assert cluster.say(b, ranks_shut_down=pb.RanksShutDown(ranks=[3], epoch=old)) == []
    assert cluster.say(a, shutdown_confirmed=pb.RanksShutDown(ranks=[3], epoch=old)) == []
    assert cluster.core.state == states.RUNNING
    new = memberships(cluster, b)[-1].workers_since
    assert cluster.say(b, ranks_shut_down=pb.RanksShutDown(ranks=[2], epoch=new)) != []


def test_a_job_whose_ranks_have_all_ended_is_over_though_others_wait() -> None:
    cluster, (a, b) = elastic(2)
    late = cluster.join(worker(7, 2, 9, 0, elastic=True))
    back(cluster, late)
    back(cluster, a, 0)
    cluster.say(b, gathered=pb.Gathered(ranks=0, shut_down=1, epoch=memberships(cluster, b)[-1].workers_since))
    assert cluster.core.state == states.RUNNING
    back(cluster, b, 0)
    assert cluster.core.state == states.ENDED
    reason = "all ranks of the group have left, before others joined it"
    assert [cluster.last(connection).stop.reason for connection in (a, b, late)] == [reason] * 3


def test_processes_in_the_place_of_ranks_that_ended_between_shutdown_and_init_are_a_group() -> None:
    cluster, (a, b) = elastic(2, max_restarts=1)
    for connection, ranks in ((a, [0, 1]), (b, [2, 3])):
        epoch = memberships(cluster, connection)[-1].workers_since
        cluster.say(connection, gathered=pb.Gathered(ranks=0, shut_down=2, epoch=epoch))
        cluster.say(connection, keep_states=pb.KeepStates(epoch=epoch))  # killed, and had not said that it was done
        cluster.say(connection, gathered=pb.Gathered(ranks=0, epoch=epoch))
        cluster.say(connection, ranks_shut_down=pb.RanksShutDown(ranks=ranks, epoch=epoch))
    for connection in (a, b):  # their launcher has started them again
        assert len(memberships(cluster, connection)) == 1
        epoch = memberships(cluster, connection)[-1].workers_since
        cluster.say(connection, gathered=pb.Gathered(ranks=2, newcomers=True, epoch=epoch))
    assert [len(memberships(cluster, connection)) for connection in (a, b)] == [2, 2]
    assert cluster.core.state == states.RUNNING
    assert [w.local_size for w in memberships(cluster, a)[-1].workers] == [2, 2]


def in_group(cluster: Cluster, alive: list[int]) -> list[int]:
    """Those of the workers that the newest group has."""
    newest = max((memberships(cluster, c)[-1] for c in alive if memberships(cluster, c)), key=lambda m: m.epoch)
    ids = {w.member_id for w in newest.workers}
    return [c for c in alive if cluster.told[c][0].welcome.member_id in ids]


@pytest.mark.parametrize("seed", range(40))
def test_after_any_faults_a_group_is_what_its_members_said(seed: int) -> None:
    """Machines are lost, join, leave, and return in any order, in a job that goes on to its end."""
    rng = random.Random(seed)
    cluster, alive = elastic(4)
    ranks = dict.fromkeys(alive, 2)
    index = 4
    seen = dict.fromkeys(alive, 1)  # memberships looked at
    returning: set[int] = set()
    for _ in range(120):
        for connection in alive:  # what a communication service does with what it is told
            told = cluster.told[connection]
            groups = memberships(cluster, connection)
            if len(groups) > seen.get(connection, 0):
                seen[connection] = len(groups)
                returning.discard(connection)
            after = [m for m in told if m.HasField("membership") or m.failure.group_only or m.HasField("hosts")]
            if after and (after[-1].failure.group_only or after[-1].HasField("hosts")):
                returning.add(connection)
        event = rng.choice(["back", "back", "back", "back", "lose", "rank", "join", "tick"])
        group = in_group(cluster, alive)
        if event == "lose" and len(group) > 1:  # with the last one goes what was learned
            alive.remove(lost := rng.choice(group))
            returning.discard(lost)
            cluster.drop(lost)
        elif event == "join" and len(alive) < 6:
            late = cluster.join(worker(index, 2, 4, 0, elastic=True))
            beside = cluster.join(server(index, n=4, k=0, kind=pb.MACHINE_KIND_GPU, elastic=True))
            cluster.say(beside, ready=pb.Ready())
            index += 1
            alive.append(late)
            ranks[late] = rng.randint(1, 3)
            back(cluster, late, ranks[late])
        elif event == "rank":
            one = rng.choice(alive)
            if one not in returning and memberships(cluster, one):
                ranks[one] = rng.randint(1, 3)
                cluster.say(one, reform=pb.Reform(reason="a rank died"))
        elif event == "tick":
            cluster.tick(0.5, tuple(cluster.told))
        elif returning:
            one = rng.choice(sorted(returning))
            cluster.say(one, reform=pb.Reform(reason="new hosts", planned=True))
            back(cluster, one, ranks[one])
        assert cluster.core.state == states.RUNNING, cluster.core.reason
        newest = max((memberships(cluster, c)[-1] for c in alive if memberships(cluster, c)), key=lambda m: m.epoch)
        firsts = [w.first_rank for w in newest.workers]
        assert firsts == [sum(w.local_size for w in newest.workers[:i]) for i in range(len(firsts))]
        assert [w.machine_index for w in newest.workers] == list(range(len(newest.workers)))
        assert len({w.member_id for w in newest.workers}) == len(newest.workers)
        for connection in alive:
            epochs = [m.epoch for m in memberships(cluster, connection)]
            assert epochs == sorted(set(epochs))
    for _ in range(10):  # all come back: there is a group of all
        cluster.tick(0.5, tuple(cluster.told))
        for connection in alive:
            after = [m for m in cluster.told[connection] if m.HasField("membership") or m.failure.group_only]
            if after and after[-1].failure.group_only:
                back(cluster, connection, ranks[connection])
    newest = max((memberships(cluster, c)[-1] for c in alive if memberships(cluster, c)), key=lambda m: m.epoch)
    assert sum(w.local_size for w in newest.workers) > 0
