"""The scheduler's state machine: all workers hear once of slow members, and the status names them."""

from __future__ import annotations

from support.scheduler_core import running

from byteps_py.cli.job import to_text
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import job as states


def pace(rank: int, step_s: float, wait_s: float) -> pb.RankPace:
    return pb.RankPace(rank=rank, step_s=step_s, wait_s=wait_s, pid=1000 + rank)


def beat(*ranks: pb.RankPace, servers: tuple[pb.ServerPace, ...] = ()) -> dict[str, pb.Heartbeat]:
    return {"heartbeat": pb.Heartbeat(ranks=ranks, servers=servers)}


def test_the_first_worker_hears_once_of_a_slow_rank_and_a_slow_server() -> None:
    cluster, (a, b), _ = running(k=2)
    slow, quick = (m.member_id for m in cluster.last(a).membership.servers)
    answers = (
        pb.ServerPace(member_id=slow, answer_s=0.4, ratio=20.0),
        pb.ServerPace(member_id=quick, answer_s=0.03, ratio=1.5),
    )
    assert cluster.say(a, **beat(pace(0, 0.2, 1.9), pace(1, 0.21, 1.9))) == []
    both = beat(pace(2, 0.2, 1.9), pace(3, 2.1, 0.0), servers=answers)
    assert cluster.say(b, **both) == []  # they have just been compared
    cluster.now += 0.5
    told = cluster.say(b, **both)
    assert [(to, message.slow.message) for to, message in told] == [
        (a, sentence)
        for sentence in (
            "rank 3 (process 1003; worker 1 (ranks 2-3, host gpu1, pid 101)) takes 2.1 s from step to step, 10 times "
            "the 200 ms of the others: 3 ranks wait for it",
            "server tcp://cpu0:1 (host h0, pid 200) answers after 400 ms, the others after 30 ms: relative to "
            "the bytes in flight, it takes 13 times as long; the service, its machine or the network to it is slow",
        )
    ]
    said = [message.slow.message for _, message in told]
    status = cluster.core.status(cluster.now)
    assert list(status.slow) == said
    assert all(f"slow: {sentence}" in to_text(status) for sentence in said)
    cluster.now += 1.0
    assert cluster.say(b, **beat(pace(2, 0.2, 1.9), pace(3, 2.1, 0.0), servers=answers)) == []
    cluster.now += 60.0
    assert len(cluster.say(b, **beat(pace(2, 0.2, 1.9), pace(3, 2.1, 0.0), servers=answers))) == 2
    cluster.say(b, **beat(pace(2, 0.2, 0.0), pace(3, 0.2, 0.0)))
    assert list(cluster.core.status(cluster.now).slow) == []


def test_no_machine_speaks_for_the_ranks_of_others() -> None:
    cluster, (a, _), _ = running()
    cluster.say(a, **beat(pace(2, 9.0, 0.0)))
    assert cluster.core.state == states.FAILED
    assert "broke the protocol: its heartbeat has the pace of ranks that are not its own" in cluster.core.reason
