"""Servers join, leave and die while the job runs: the next epoch's membership, and which member hears of it when."""

from __future__ import annotations

import pytest
from support.scheduler_core import CPU, GPU, Cluster, running, server

from byteps_py.errors import UsageError
from byteps_py.placement.shares import Optimum
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import job as states
from byteps_py.scheduler.core import ScaleRequested
from byteps_py.scheduler.membership import SUCCESSOR_S


def weights(message: pb.SchedulerMessage) -> dict[str, int]:
    """Of the servers of a membership, by address."""
    return {member.address: member.weight for member in message.membership.servers}


def apply(cluster: Cluster, workers: list[int], epoch: int) -> None:
    for worker in workers:
        cluster.say(worker, applied=pb.Applied(epoch=epoch))


@pytest.mark.parametrize("in_order", [True, False])
def test_the_keys_of_a_server_that_goes_are_shared_by_the_others(in_order: bool) -> None:
    cluster, workers, servers = running(n=3, k=2)
    before = [cluster.last(worker).membership for worker in workers]
    if in_order:
        cluster.say(servers[0], leave=pb.Leave(reason="SIGTERM"))
    cluster.drop(servers[0])
    assert cluster.core.state == states.RUNNING
    for worker, old in zip(workers, before, strict=True):
        new = cluster.last(worker).membership
        assert (old.epoch, new.epoch, new.workers_since) == (1, 2, 1)
        assert list(new.workers) == list(old.workers)
        assert ("has shut down: SIGTERM" if in_order else "its connection ended") in new.reason
        assert "server tcp://cpu0:1 (host h0, pid 200)" in new.reason
    assert list(weights(cluster.last(workers[0])).values()) == list(Optimum(3, 1).weights)  # bytes follow the formula
    assert cluster.last(servers[1]).membership.epoch == 2


def test_an_idle_server_is_not_missed() -> None:
    cluster, workers, servers = running(n=3, k=4)
    told = len(cluster.told[workers[0]])
    cluster.drop(servers[3])
    assert (cluster.core.state, len(cluster.told[workers[0]])) == (states.RUNNING, told)


@pytest.mark.parametrize("comes", [True, False])
def test_after_the_last_server_another_one_may_register(comes: bool) -> None:
    cluster, workers, servers = running(n=2, k=0)
    cluster.drop(servers[0])
    assert weights(cluster.last(workers[0])) == {"tcp://gpu1:1": 2}
    cluster.drop(servers[1])
    text = (
        "lost the summation service of GPU machine 1 (host h1, pid 201, tcp://gpu1:1): its connection ended; see its "
        "log for why; no summation service is left"
    )
    assert cluster.core.reason == f"{text}: waiting up to 20 s for one"
    assert cluster.last(workers[0]).slow.message == cluster.core.reason
    cluster.tick(SUCCESSOR_S - 1, tuple(workers))
    told = cluster.bodies(workers[0])
    assert (cluster.core.state, told.count("slow")) == (states.RUNNING, 1)
    late = cluster.join(server(0, GPU, n=2, k=0))
    cluster.tick(0.5, (*workers, late))
    if comes:
        cluster.say(late, ready=pb.Ready())
        assert weights(cluster.last(workers[0])) == {"tcp://gpu0:1": 2}
    cluster.tick(0.5, (*workers, late))
    assert cluster.core.state == (states.RUNNING if comes else states.FAILED)
    if not comes:
        assert cluster.last(workers[0]).failure.message == f"{text}, and none registered within 20 s"


def test_a_server_that_joins_later_gets_its_share_and_the_membership() -> None:
    cluster, workers, _ = running(n=3, k=1)
    late = cluster.join(server(7, CPU, n=3, k=5))  # it was told of more servers than the job began with
    assert cluster.bodies(late) == ["welcome", "membership"]
    cluster.say(late, ready=pb.Ready())
    assert cluster.bodies(late) == ["welcome", "membership", "membership"]
    cluster.say(late, ready=pb.Ready())  # after the scheduler was started again, perhaps
    assert [m.membership.epoch for m in cluster.told[late][1:]] == [1, 2]
    assert list(weights(cluster.last(workers[0])).values()) == list(Optimum(3, 2).weights)
    assert {member.link_mbit for member in cluster.last(late).membership.servers} == {1000.0}


def test_gpu_machines_take_over_when_all_cpu_machines_have_left() -> None:
    cluster, workers, servers = running(n=2, k=2)
    standby = [cluster.join(server(i, GPU, n=2, k=2)) for i in range(2)]
    for late in standby:
        cluster.say(late, ready=pb.Ready())
    assert cluster.last(workers[0]).membership.epoch == 1  # they hold nothing yet
    for gone in servers:
        cluster.drop(gone)
    assert weights(cluster.last(workers[0])) == {"tcp://gpu0:1": 2, "tcp://gpu1:1": 2}
    cluster.drop(standby[0])
    back = cluster.join(server(0, GPU, n=2, k=2))  # its launcher started it once more
    cluster.say(back, ready=pb.Ready())
    assert weights(cluster.last(back)) == {"tcp://gpu0:1": 2, "tcp://gpu1:1": 2}


def test_a_draining_server_stays_until_every_machine_has_applied_the_epoch() -> None:
    cluster, workers, servers = running(n=2, k=1)
    cluster.say(servers[0], drain=pb.Drain(reason="SIGTERM"))
    assert weights(cluster.last(workers[0])) == {"tcp://gpu0:1": 2, "tcp://gpu1:1": 2}
    apply(cluster, workers[:1], 2)
    assert cluster.last(servers[0]).HasField("membership")
    apply(cluster, workers[1:], 2)
    assert cluster.last(servers[0]).stop.reason == "its keys have moved"
    cluster.say(servers[0], leave=pb.Leave())
    cluster.drop(servers[0])
    assert (cluster.core.state, cluster.last(workers[0]).membership.epoch) == (states.RUNNING, 2)


def test_an_idle_server_drains_at_once() -> None:
    cluster, workers, servers = running(n=2, k=3)
    apply(cluster, workers, 1)
    cluster.say(servers[2], drain=pb.Drain())
    assert cluster.last(servers[2]).HasField("stop")


def test_a_server_that_a_worker_can_not_reach_is_no_member_any_more() -> None:
    cluster, workers, servers = running(n=2, k=1)
    (member,) = (m for m in cluster.last(workers[0]).membership.servers if m.kind == CPU)
    lost = pb.Unreachable(member_id=member.member_id, reason="no route")
    asked = cluster.say(workers[1], unreachable=lost)  # else who is cut off would take all servers away
    assert [(to, message.still.member_id) for to, message in asked] == [(workers[1], member.member_id)]
    assert cluster.last(workers[0]).membership.epoch == 1
    lost.is_sure = True
    cluster.say(workers[1], unreachable=lost)
    assert (
        "worker 1 (ranks 2-3, host gpu1, pid 101) can't reach it: no route"
        in cluster.last(workers[0]).membership.reason
    )
    assert cluster.last(servers[0]).HasField("refused")  # should it live, it ends
    for lost.is_sure in (False, True):
        assert cluster.say(workers[0], unreachable=lost) == []
    assert cluster.last(workers[0]).membership.epoch == 2


def test_only_servers_drain_and_only_workers_go_over() -> None:
    for body in ({"drain": pb.Drain()}, {"applied": pb.Applied(epoch=1)}):
        cluster, workers, servers = running(n=2, k=1)
        cluster.say(workers[0] if "drain" in body else servers[0], **body)
        assert cluster.core.state == states.FAILED


def test_scale_removes_the_latest_cpu_machines() -> None:
    cluster, workers, servers = running(n=2, k=3)
    cluster.take(cluster.core.handle(ScaleRequested(1, []), cluster.now))
    assert len(cluster.core.job.roster.cpu_servers()) == 1
    apply(cluster, workers, cluster.last(workers[0]).membership.epoch)
    assert [cluster.last(s).HasField("stop") for s in servers] == [False, True, True]


def test_scale_removes_named_servers() -> None:
    cluster, workers, _ = running(n=2, k=2, servers_only=True)
    for addresses, text in [(["cpu9:1"], "servers: cpu0:1, cpu1:1"), (["cpu0:1", "cpu1:1"], "one summation service")]:
        with pytest.raises(UsageError, match=text):
            cluster.core.handle(ScaleRequested(-1, addresses), cluster.now)
    cluster.take(cluster.core.handle(ScaleRequested(-1, ["cpu0:1"]), cluster.now))
    assert list(weights(cluster.last(workers[0]))) == ["tcp://cpu1:1"]
    with pytest.raises(UsageError, match="the job is not running: 0 of 2 workers"):
        Cluster(num_servers=0).core.handle(ScaleRequested(0, []), 0.0)


def test_the_job_goes_on_without_a_server_that_fails() -> None:
    cluster, workers, servers = running(n=2, k=1)
    cluster.say(servers[0], report=pb.Report(error="CommunicationError", message="failed: MemoryError()"))
    membership = cluster.last(workers[0]).membership
    assert (cluster.core.state, membership.epoch) == (states.RUNNING, 2)
    assert membership.reason == "lost server tcp://cpu0:1 (host h0, pid 200): failed: MemoryError()"
