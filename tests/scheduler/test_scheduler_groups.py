"""The scheduler's state machine: votes on tensors of some of the ranks, and disagreement about which ranks these
are."""

from __future__ import annotations

import pytest
from support.scheduler_core import ballot, declare, running, spec

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import job as states
from byteps_py.wire.rank_link import unpack_spec


def verdicts(cluster: object, connection: int) -> list[pb.Verdict]:
    return [v for m in cluster.told[connection] if m.HasField("verdicts") for v in m.verdicts.verdicts]  # type: ignore[attr-defined]


def test_a_vote_is_over_when_all_of_the_group_have_voted_and_all_machines_hear_of_it() -> None:
    cluster, (a, b, c), _ = running(n=3)
    among = spec(group=(1, 2))
    assert cluster.say(a, **declare(ballot([1], among))) == []
    out = cluster.say(b, **declare(ballot([2], among)))
    assert [connection for connection, _ in out] == [a, b, c]
    (verdict,) = verdicts(cluster, c)
    assert (verdict.spec, verdict.error) == (among, "")


def test_a_group_of_one_machine_is_agreed_by_that() -> None:
    cluster, (a, b), _ = running()
    cluster.say(a, **declare(ballot([0, 1], spec(group=(0, 1)))))
    assert unpack_spec("w", verdicts(cluster, b)[0].spec).group == (0, 1)


# (ballots in the order in which they come, who is late, what is said)
DISPUTES = [
    (
        [(0, [0, 1], [0, 1, 2]), (1, [2], [1, 2])],
        [],
        "ranks 0-1 gave sum of float32[3] among ranks 0, 1, 2, rank 2 gave sum of float32[3] among ranks 1, 2;",
    ),
    ([(0, [0], [0, 2]), (1, [2, 3], [])], [1], "rank 0 gave sum of float32[3] among ranks 0, 2, ranks 2-3 gave sum"),
    ([(1, [2], [0, 2]), (0, [1], [1, 3])], [0, 3], "rank 1 gave sum of float32[3] among ranks 1, 3, rank 2 gave"),
]


@pytest.mark.parametrize(("ballots", "late", "text"), DISPUTES)
def test_two_groups_are_a_disagreement_at_once(
    ballots: list[tuple[int, list[int], list[int]]], late: list[int], text: str
) -> None:
    cluster, workers, _ = running()
    for machine, ranks, group in ballots:
        cluster.say(workers[machine], **declare(ballot(ranks, spec(group=group))))
    for connection in workers:
        (verdict,) = verdicts(cluster, connection)
        assert text in verdict.error
        remedy = "name the same group on all ranks of it, and use another tensor name in each group"
        assert verdict.error.endswith(remedy)
        assert list(verdict.late) == late
    assert cluster.core.state == states.RUNNING


def test_ranks_of_one_machine_may_disagree_about_the_group_before_all_have_voted() -> None:
    cluster, (a,), _ = running(n=1, local_size=4)
    votes = [pb.Vote(ranks=[0], spec=spec(group=(0, 1, 2))), pb.Vote(ranks=[1], spec=spec(group=(0, 1, 3)))]
    cluster.say(a, declare=pb.Declare(ballots=[pb.Ballot(name="w", generation=1, votes=votes)]))
    (verdict,) = verdicts(cluster, a)
    assert list(verdict.late) == [2, 3]


def test_a_vote_that_crosses_the_verdict_changes_nothing() -> None:
    """Its machine knows what becomes of it."""
    cluster, (a, b, c), _ = running(n=3)
    cluster.say(a, **declare(ballot([0, 1])))
    cluster.say(b, **declare(ballot([2], spec(group=(2,)))))
    assert cluster.say(c, **declare(ballot([4, 5]))) == []
    assert cluster.core.state == states.RUNNING


def test_the_verdict_has_the_rounds_that_are_still_to_be_delivered() -> None:
    cluster, (a, b), _ = running()
    cluster.say(a, **declare(ballot([0, 1])))
    cluster.say(b, **declare(ballot([2, 3])))
    anew = ballot([0, 1], spec(group=(0, 1)), generation=2)
    anew.rounds = 5
    cluster.say(a, **declare(anew))
    assert verdicts(cluster, b)[-1].rounds == 5
    assert "reopen" not in cluster.bodies(b)  # it is decided already


IMPOSSIBLE = [
    ([0], [0, 1], "rank"),  # rank 1 is in the group, and has not voted
    ([0, 1], [0], "ranks 0-1 voted for sum of float32[3] among ranks 0"),
    ([0, 1], [0, 1, 9], "among ranks 0, 1, 9, but the last rank is 3"),
    ([0, 2], [0, 2], "the machine of ranks 0-1 sent votes of ranks 0, 2"),
]


@pytest.mark.parametrize(("ranks", "group", "text"), IMPOSSIBLE)
def test_ballots_that_no_correct_machine_sends(ranks: list[int], group: list[int], text: str) -> None:
    cluster, (a, _), _ = running()
    cluster.say(a, **declare(ballot(ranks, spec(group=group))))
    assert cluster.core.state == states.FAILED
    assert text in cluster.core.reason


def test_a_stall_names_the_missing_ranks_of_the_group() -> None:
    cluster, (a, b), _ = running(stall_warn_s=5.0)
    waiting = [pb.Waiting(name="w", ready_ranks=[0], age_s=6, group=(0, 3))]
    out = cluster.say(a, heartbeat=pb.Heartbeat(waiting=waiting))
    assert out[0][1].stalled.message.startswith("tensor 'w' has waited 6 s for rank 3, which has not handed it over")
    # While they disagree about the group: all that are named.
    waiting = [pb.Waiting(name="v", ready_ranks=[1], age_s=6, group=(0, 1))]
    cluster.say(a, heartbeat=pb.Heartbeat(waiting=waiting))
    waiting = [pb.Waiting(name="v", ready_ranks=[2], age_s=6, group=(1, 2, 3))]
    cluster.say(b, heartbeat=pb.Heartbeat(waiting=waiting))
    assert "for ranks 0, 3, which" in "".join(cluster.core.status(cluster.now).stalled)


def test_a_worker_that_leaves_says_which_ranks_have_left() -> None:
    cluster, (a, b), _ = running()
    out = cluster.say(a, leave=pb.Leave())
    (failure,) = [m.failure for connection, m in out if connection == b]
    assert (failure.orderly, list(failure.ranks)) == (True, [0, 1])
