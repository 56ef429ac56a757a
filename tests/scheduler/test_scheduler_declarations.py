"""The scheduler's state machine: declarations, and the barrier."""

from __future__ import annotations

import pytest
from support.scheduler_core import ballot, declare, running, spec

from byteps_py.cli.job import to_text
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import job as states
from byteps_py.tensors import DType, Op
from byteps_py.wire.rank_link import unpack_spec

# ---- declarations ------------------------------------------------------------------------------------------


def test_verdicts_go_to_all_workers_and_to_no_server() -> None:
    cluster, (a, b), servers = running()
    assert cluster.say(a, **declare(ballot([0, 1], spec(priority=7)))) == []
    cluster.say(b, **declare(ballot([2, 3], spec(priority=1))))
    for connection in (a, b):
        (verdict,) = cluster.last(connection).verdicts.verdicts
        assert (verdict.name, verdict.generation, verdict.error) == ("w", 1, "")
        assert verdict.spec == spec(priority=7)
    assert all(cluster.bodies(s) == ["welcome", "membership"] for s in servers)
    status = cluster.core.status(cluster.now)
    assert (status.tensors, status.tensor_bytes) == (1, 12)


def test_status_says_where_the_states_of_hosted_optimizers_are() -> None:
    cluster, (a, b), _ = running()
    assert "hosted" not in to_text(cluster.core.status(cluster.now))
    one = spec((500_000,), ownership="w", is_replicated=True, remark="machine: links are slow")
    parameters = spec((500_000,), op=Op.BROADCAST, ownership="w", is_replicated=True)
    for member, ranks in ((a, [0, 1]), (b, [2, 3])):
        cluster.say(member, **declare(ballot(ranks, one), ballot(ranks, parameters, name="w.parameters")))
        cluster.say(member, **declare(ballot(ranks, spec((250_000,), ownership="v"), name="v")))
    lines = to_text(cluster.core.status(cluster.now)).splitlines()
    assert [line for line in lines if "hosted" in line] == [
        "hosted optimizers: states on each machine, of 2.0 MB of gradients",
        "hosted optimizers: states sharded over all ranks, of 1.0 MB of gradients",
        "hosted=True has chosen: machine: links are slow",
    ]


DISAGREEMENTS = [
    (spec((3,)), spec((4,)), "ranks 0-1 gave sum of float32[3], ranks 2-3 gave sum of float32[4]"),
    (spec(), spec(dtype=DType.FLOAT16), "ranks 2-3 gave sum of float16[3]"),
    (spec(), spec(op=Op.MAX), "ranks 2-3 gave max of float32[3]"),
    (spec(), spec(codec=1), "compressed to int8; use the same compression, and the same BYTEPS_MIN_COMPRESS_BYTES, on"),
    (spec(), spec(average=True), "ranks 2-3 gave average of float32[3]"),
    (spec(op=Op.BROADCAST, root=0), spec(op=Op.BROADCAST, root=1), "broadcast of float32[3] from rank 1"),
    (spec(op=Op.BROADCAST, root=9), spec(op=Op.BROADCAST, root=9), "rank 9 is to broadcast it, but the last rank is 3"),
]


@pytest.mark.parametrize(("one", "other", "text"), DISAGREEMENTS, ids=[text for _, _, text in DISAGREEMENTS])
def test_disagreement_names_tensor_ranks_and_difference(one: bytes, other: bytes, text: str) -> None:
    cluster, (a, b), _ = running()
    cluster.say(a, **declare(ballot([0, 1], one)))
    cluster.say(b, **declare(ballot([2, 3], other)))
    for connection in (a, b):
        (verdict,) = cluster.last(connection).verdicts.verdicts
        assert verdict.error.startswith("tensor 'w': ")
        assert text in verdict.error
        assert not verdict.spec
    assert cluster.core.state == states.RUNNING
    assert cluster.core.status(cluster.now).tensors == 0


def test_ranks_of_one_machine_may_disagree_too() -> None:
    cluster, (a,), _ = running(n=1, local_size=3)
    votes = [pb.Vote(ranks=[0, 2], spec=spec((2,))), pb.Vote(ranks=[1], spec=spec((2, 1)))]
    cluster.say(a, declare=pb.Declare(ballots=[pb.Ballot(name="w", generation=1, votes=votes)]))
    error = cluster.last(a).verdicts.verdicts[0].error
    assert "ranks 0, 2 gave sum of float32[2], rank 1 gave sum of float32[2, 1]" in error


def test_after_a_mismatch_the_next_generation_needs_no_reopening() -> None:
    cluster, (a, b), _ = running()
    cluster.say(a, **declare(ballot([0, 1], spec((3,)))))
    cluster.say(b, **declare(ballot([2, 3], spec((4,)))))
    assert cluster.say(b, **declare(ballot([2, 3], generation=2))) == []
    cluster.say(a, **declare(ballot([0, 1], generation=2)))
    (verdict,) = cluster.last(b).verdicts.verdicts
    assert (verdict.generation, verdict.error) == (2, "")


def test_a_new_generation_of_an_accepted_name_is_reopened_on_the_others() -> None:
    cluster, (a, b, c), _ = running(n=3, local_size=1)
    for rank, connection in enumerate((a, b, c)):
        cluster.say(connection, **declare(ballot([rank])))
    before = cluster.bodies(b)
    out = cluster.say(b, **declare(ballot([1], spec((5,)), generation=2)))
    assert [(connection, m.reopen) for connection, m in out] == [
        (a, pb.Reopen(name="w", generation=2)),
        (c, pb.Reopen(name="w", generation=2)),
    ]
    assert cluster.bodies(b) == before
    # c declares the same on its own; its ballot crosses the Reopen and must not open a third vote
    assert cluster.say(c, **declare(ballot([2], spec((5,)), generation=2))) == []
    assert cluster.say(c, **declare(ballot([2], generation=1))) == []  # of the old generation: ignored
    cluster.say(a, **declare(ballot([0], spec((5,)), generation=2)))
    (verdict,) = cluster.last(c).verdicts.verdicts
    assert (verdict.generation, unpack_spec("w", verdict.spec).shape) == (2, (5,))
    assert cluster.core.status(cluster.now).tensor_bytes == 20


def test_verdicts_that_one_message_completes_go_out_as_one_batch() -> None:
    cluster, (a, b), _ = running()
    names = ["z", "a", "m"]
    cluster.say(a, **declare(*(ballot([0, 1], name=name) for name in ["a", "m", "z", "later"])))
    cluster.say(b, **declare(*(ballot([2, 3], name=name) for name in names)))
    cluster.say(b, **declare(ballot([2, 3], name="later")))
    for connection in (a, b):
        batches = [[v.name for v in m.verdicts.verdicts] for m in cluster.told[connection] if m.HasField("verdicts")]
        assert batches == [names, ["later"]]


# ---- barrier -----------------------------------------------------------------------------------------------


def test_a_barrier_opens_when_all_machines_are_there() -> None:
    cluster, (a, b), servers = running()
    for sequence in (0, 1):
        assert cluster.say(b, arrive=pb.Arrive(sequence=sequence)) == []
        out = cluster.say(a, arrive=pb.Arrive(sequence=sequence))
        assert [(connection, m.release.sequence) for connection, m in out] == [(a, sequence), (b, sequence)]
    assert all("release" not in cluster.bodies(s) for s in servers)
