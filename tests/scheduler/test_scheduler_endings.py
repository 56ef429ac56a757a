"""The scheduler's state machine: how members leave and die, and how a job ends."""

from __future__ import annotations

import pytest
from support.scheduler_core import CPU, running, server, worker

from byteps_py.cli.job import to_text
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import job as states
from byteps_py.scheduler.core import StopRequested
from byteps_py.scheduler.job import END_LINGER_S, FAILED_LINGER_S


def test_a_job_ends_when_its_workers_leave_one_after_another() -> None:
    cluster, (a, b), servers = running(k=1)
    out = cluster.say(a, leave=pb.Leave(reason=""))
    assert [(connection, m.failure.error, m.failure.orderly) for connection, m in out] == [(b, "PeerLostError", True)]
    assert out[0][1].failure.message == "worker 0 (ranks 0-1, host gpu0, pid 100) has shut down"
    assert cluster.core.state == states.RUNNING
    cluster.drop(a)
    out = cluster.say(b, leave=pb.Leave(reason=""))
    assert [(connection, m.WhichOneof("body")) for connection, m in out] == [(s, "stop") for s in servers]
    assert cluster.core.state == states.ENDED
    cluster.drop(b)
    assert cluster.core.finished(cluster.now) is None
    for s in servers:
        assert cluster.say(s, leave=pb.Leave(reason="told so")) == []
        assert cluster.drop(s) == []
    finish = cluster.core.finished(cluster.now)
    assert finish is not None
    assert (finish.exit_status, finish.reason) == (0, "all workers have left")


def test_ranks_that_ended_are_reported_like_a_worker_that_left() -> None:
    cluster, (a, b), (s, _) = running()
    out = cluster.say(a, ranks_shut_down=pb.RanksShutDown(ranks=[0, 1]))
    assert [(connection, m.failure.orderly) for connection, m in out] == [(b, True)]
    text = "worker 0 (ranks 0-1, host gpu0, pid 100) has shut down: its ranks have ended"
    assert cluster.last(b).failure.message == text
    assert cluster.core.state == states.RUNNING
    cluster.say(s, ranks_shut_down=pb.RanksShutDown(ranks=[0, 1]))
    assert "only a communication service" in cluster.last(s).refused.message


@pytest.mark.parametrize("say", [(), (0,), (1,), (0, 1)])
def test_states_are_kept_unless_all_ranks_have_finished(say: tuple[int, ...]) -> None:
    cluster, workers, _ = running(k=1)
    for number in say:
        assert cluster.say(workers[number], keep_states=pb.KeepStates(epoch=1)) == []
    cluster.say(workers[0], leave=pb.Leave())
    out = cluster.say(workers[1], leave=pb.Leave())
    assert {m.stop.keep_states for _, m in out} == {bool(say)}


def test_only_a_communication_service_speaks_of_states() -> None:
    cluster, _, (server, *_) = running(k=1)
    cluster.say(server, keep_states=pb.KeepStates(epoch=1))
    assert "only a communication service" in cluster.last(server).refused.message


def test_a_worker_that_returns_before_the_others_have_left_may_try_again() -> None:
    cluster, (a, b), servers = running()
    cluster.say(a, leave=pb.Leave())
    early = cluster.join(worker(0, k=0))
    assert cluster.last(early).refused.later
    stranger = cluster.join(worker(1, k=0))  # the first worker 1 is still here
    assert not cluster.last(stranger).refused.later
    cluster.say(b, leave=pb.Leave())
    assert cluster.last(cluster.join(worker(1, k=0))).refused.later
    for connection in (a, b, early, stranger, *servers):
        cluster.drop(connection)


def test_after_a_stop_or_a_failure_a_worker_may_not_try_again() -> None:
    stopped, _, _ = running()
    stopped.take(stopped.core.handle(StopRequested("enough"), stopped.now))
    failed, (a, _), _ = running()
    failed.drop(a)
    for cluster in (stopped, failed):
        refused = cluster.last(cluster.join(worker(0, k=0))).refused
        assert "this job is over" in refused.message
        assert not refused.later


def test_a_frozen_member_holds_up_nobodys_end() -> None:
    cluster, (_, b), servers = running(k=2, heartbeat_timeout_s=5.0)
    cluster.tick(5.5, (b, *servers))  # nothing was heard of a, whose connection stands
    assert cluster.core.state == states.FAILED
    for connection in (b, *servers):
        cluster.say(connection, leave=pb.Leave())
        assert cluster.core.finished(cluster.now) is None
        cluster.drop(connection)
    finish = cluster.core.finished(cluster.now)
    assert finish is not None
    assert finish.exit_status == 1


def test_a_server_that_ignores_the_end_is_not_waited_for_forever() -> None:
    cluster, (a,), (s,) = running(n=1, k=1)
    cluster.say(a, leave=pb.Leave())
    cluster.drop(a)
    cluster.tick(END_LINGER_S - 0.5, (s,))
    assert cluster.core.finished(cluster.now) is None
    cluster.tick(0.5, (s,))
    finish = cluster.core.finished(cluster.now)
    assert finish is not None
    assert finish.exit_status == 0
    assert "still connected: server tcp://cpu0:1 (host h0, pid 200)" in finish.reason


def test_a_dead_worker_fails_the_job_for_everyone_else_once() -> None:
    cluster, (a, b), servers = running(k=1)
    out = cluster.drop(b)
    assert sorted(connection for connection, _ in out) == sorted([a, *servers])
    for _, message in out:
        assert (message.failure.error, message.failure.orderly) == ("PeerLostError", False)
        assert message.failure.message.startswith("lost worker 1 (ranks 2-3, host gpu1, pid 101): its connection ended")
    status = cluster.core.status(cluster.now)
    assert status.state == states.FAILED
    assert status.reason == out[0][1].failure.message
    assert [m.alive for m in status.members] == [True, False, *(True for _ in servers)]
    # the last worker to go takes the servers with it, and the first failure stays the reason
    out = cluster.drop(a)
    assert [(connection, m.WhichOneof("body")) for connection, m in out] == [(s, "stop") for s in servers]
    for s in servers:
        cluster.drop(s)
    finish = cluster.core.finished(cluster.now)
    assert finish is not None
    assert (finish.exit_status, finish.reason) == (1, status.reason)


def test_silence_is_death_and_a_late_scheduler_proves_nothing() -> None:
    cluster, (a, b), servers = running(k=2, heartbeat_timeout_s=10.0)
    assert cluster.tick(9.5, (a, *servers)) == []
    cluster.now += 60.0  # the scheduler itself was suspended
    assert cluster.take(cluster.core.tick(cluster.now)) == []
    assert cluster.tick(9.5, (a, *servers)) == []
    cluster.tick(0.5, (a, *servers))
    assert "lost worker 1 (ranks 2-3, host gpu1, pid 101): nothing was heard of it for 19.5 s" in (
        cluster.last(a).failure.message
    )
    assert cluster.last(b).failure == cluster.last(a).failure  # should it wake up, it knows


def test_a_frozen_worker_of_a_machine_that_lives_is_found_by_a_busy_scheduler() -> None:
    """Short pauses of the scheduler, again and again, do not reset a silence."""
    cluster, (a, b), servers = running(n=2, k=0, heartbeat_timeout_s=1.0)
    beside_b = servers[1]
    for _ in range(4):
        assert "failure" not in cluster.bodies(a)
        cluster.tick(2.0, (a, *servers))
        cluster.now += 0.7
        for connection in (a, *servers):
            cluster.say(connection, heartbeat=pb.Heartbeat())
        cluster.take(cluster.core.tick(cluster.now))
    assert "failure" not in cluster.bodies(a)
    cluster.tick(3.0, (a, *servers))
    assert cluster.last(a).failure.message.startswith(
        "lost worker 1 (ranks 2-3, host gpu1, pid 101): nothing was heard"
    )
    assert (cluster.last(b).failure, cluster.bodies(beside_b)[-1]) == (cluster.last(a).failure, "failure")


def test_a_slow_worker_of_a_machine_that_lives_is_given_time_and_a_silent_server_is_not() -> None:
    cluster, (a, b), (s, t) = running(heartbeat_timeout_s=1.0)
    assert cluster.tick(9.5, (a, s, t)) == []  # the server of the second machine is heard
    doubts = {member.member.pid: member.doubt for member in cluster.core.status(cluster.now).members}
    assert doubts == {100: "", 101: "silent for 9.5 s", 200: "", 201: ""}
    cluster.tick(0.5, (a, s, t))
    assert "lost worker 1 (ranks 2-3, host gpu1, pid 101): nothing was heard of it for 10.0 s" in (
        cluster.last(a).failure.message
    )
    cluster, (a, b), (s, t) = running(heartbeat_timeout_s=1.0)
    cluster.tick(1.0, (a, b, s))
    assert "lost the summation service of GPU machine 1" in cluster.last(a).membership.reason


def test_no_member_of_a_starting_machine_is_lost_for_a_short_silence() -> None:
    cluster, (a, b), (s, _) = running(heartbeat_timeout_s=1.0)
    late = cluster.join(server(0, CPU, n=2, machine_id="m1"))
    assert cluster.tick(9.5, (a, b, s, late)) == []  # the other server is silent
    cluster.say(late, ready=pb.Ready())
    cluster.tick(0.25, (a, b, s, late))  # silent for less than ten timeouts, but for more than one
    assert "lost the summation service of GPU machine 1" in cluster.last(a).membership.reason


def test_one_late_heartbeat_is_no_reason_for_doubt() -> None:
    cluster, _, _ = running()
    cluster.tick(0.5)
    assert not any(member.doubt for member in cluster.core.status(cluster.now).members)


def test_a_report_fails_the_others_with_its_own_type() -> None:
    cluster, (a, b), servers = running()
    out = cluster.say(a, report=pb.Report(error="StallError", message="rank 1 gave up"))
    assert sorted(connection for connection, _ in out) == sorted([b, *servers])
    assert cluster.last(b).failure.error == "StallError"
    assert cluster.last(b).failure.message.startswith("rank 1 gave up (reported by worker 0")
    assert cluster.say(b, report=pb.Report(error="SystemExit", message="and I")) == []
    assert cluster.core.reason.startswith("rank 1 gave up")


def test_a_failed_job_lets_go_after_a_while() -> None:
    cluster, (a, _), _ = running()
    cluster.drop(a)
    cluster.tick(FAILED_LINGER_S - 0.5)
    assert cluster.core.finished(cluster.now) is None
    cluster.tick(0.5)
    finish = cluster.core.finished(cluster.now)
    assert finish is not None
    assert finish.exit_status == 1


def test_stop_tells_everyone_to_leave_and_is_no_failure() -> None:
    cluster, workers, servers = running()
    cluster.take(cluster.core.handle(StopRequested("enough"), cluster.now))
    for connection in (*workers, *servers):
        assert cluster.last(connection).stop.reason == "stopped: enough"
        cluster.drop(connection)
    finish = cluster.core.finished(cluster.now)
    assert finish is not None
    assert (finish.exit_status, finish.reason) == (0, "stopped: enough")


def test_status_says_what_a_shadow_survives() -> None:
    cluster, (a, b), _ = running(k=1)
    assert "shadow" not in to_text(cluster.core.status(cluster.now))
    survives = "the loss of all GPU machines"
    for worker_, step in ((a, 12), (b, 11)):
        shadow = pb.ShadowProtection(step=step, survives=survives)
        cluster.say(worker_, heartbeat=pb.Heartbeat(shadow=shadow))
    assert f"shadow: step 11 held, survives {survives}" in to_text(cluster.core.status(cluster.now))
    cluster.say(a, heartbeat=pb.Heartbeat(shadow=pb.ShadowProtection(survives="nothing")))
    text = "shadow: no step held: states are being copied, survives nothing"
    assert text in to_text(cluster.core.status(cluster.now))
