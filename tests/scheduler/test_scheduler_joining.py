"""The scheduler's state machine: ranks that have no more data."""

from __future__ import annotations

from support.scheduler_core import Cluster, ballot, declare, running, spec

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import job as states
from byteps_py.tensors import Op


def join(cluster: Cluster, connection: int, rank: int) -> list[str]:
    """The messages that all workers get."""
    out = cluster.say(connection, join=pb.Join(rank=rank))
    return [str(m.WhichOneof("body")) for to, m in out if to == connection]


def test_all_hear_of_a_rank_that_joins_and_where_it_took_part_last() -> None:
    cluster, (a, b), _ = running()
    said = pb.Join(rank=1, last=[pb.LastRound(name="w", generation=1, round=7)])
    out = cluster.say(a, join=said)
    assert [(connection, m.joined) for connection, m in out] == [(a, said), (b, said)]


def test_a_vote_that_waits_only_for_ranks_that_join_is_over() -> None:
    cluster, (a, b), _ = running()
    cluster.say(a, **declare(ballot([0, 1])))
    assert join(cluster, b, 3) == ["joined"]
    assert join(cluster, b, 2) == ["joined", "verdicts"]
    (verdict,) = cluster.last(a).verdicts.verdicts
    assert not verdict.error


def test_a_ballot_lacks_those_who_have_joined_unless_they_voted_before() -> None:
    cluster, (a, b), _ = running()
    join(cluster, b, 3)
    cluster.say(b, **declare(ballot([2])))
    cluster.say(b, **declare(ballot([2, 3], name="v")))
    cluster.say(a, **declare(ballot([0, 1]), ballot([0, 1], name="v")))
    assert [v.name for v in cluster.last(b).verdicts.verdicts] == ["w", "v"]


def test_operations_that_need_every_rank_are_rejected_by_name() -> None:
    cluster, (a, b), _ = running()
    cast = spec(op=Op.BROADCAST, root=0)
    join(cluster, b, 3)
    cluster.say(b, **declare(ballot([2], cast)))
    cluster.say(a, **declare(ballot([0, 1], cast)))
    (verdict,) = cluster.last(a).verdicts.verdicts
    assert verdict.unsupported
    text = "tensor 'w': broadcast of float32[3] from rank 0 is not supported while rank 3 has joined"
    assert verdict.error == text


def test_it_is_over_when_all_have_joined_and_nothing_is_under_way() -> None:
    cluster, (a, b), _ = running()
    cluster.say(a, **declare(ballot([0, 1])))
    cluster.say(b, **declare(ballot([2, 3])))
    for connection, rank in ((a, 1), (b, 2), (b, 3), (a, 0)):
        join(cluster, connection, rank)
    assert cluster.say(b, idle=pb.Idle()) == []
    out = cluster.say(a, idle=pb.Idle())
    assert [(connection, m.all_joined.last) for connection, m in out] == [(a, 0), (b, 0)]
    assert cluster.core.status(cluster.now).tensors == 0
    # Generations go on; nobody is excused any more; it can all be done again.
    cluster.say(a, **declare(ballot([0, 1], generation=2)))
    cluster.say(b, **declare(ballot([2, 3], generation=2)))
    assert cluster.last(a).verdicts.verdicts[0].generation == 2
    assert cluster.say(a, arrive=pb.Arrive(sequence=1)) == []
    assert join(cluster, a, 0) == ["joined"]


def test_barriers_do_without_machines_whose_ranks_have_all_joined() -> None:
    cluster, (a, b), _ = running()
    cluster.say(a, arrive=pb.Arrive(sequence=1))
    assert join(cluster, b, 2) == ["joined"]
    assert join(cluster, b, 3) == ["joined", "release"]
    assert cluster.say(a, arrive=pb.Arrive(sequence=2)) != []


def test_ranks_that_have_joined_are_not_missing() -> None:
    cluster, (a, b), _ = running(stall_warn_s=5.0)
    join(cluster, b, 3)
    out = cluster.say(a, heartbeat=pb.Heartbeat(waiting=[pb.Waiting(name="w", ready_ranks=[0, 1], age_s=6)]))
    assert "for rank 2, which" in out[0][1].stalled.message


def test_messages_that_no_correct_machine_sends() -> None:
    for body in ({"join": pb.Join(rank=2)}, {"idle": pb.Idle()}):
        cluster, (a, _), _ = running()
        cluster.say(a, **body)
        assert cluster.core.state == states.FAILED
