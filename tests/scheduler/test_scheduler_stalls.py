"""The scheduler's state machine: ranks that keep others waiting, and the sentences about them."""

from __future__ import annotations

from support.scheduler_core import ballot, declare, running, spec

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.health import GroupWatch
from byteps_py.tensors import FIRST_STEP


def wait_for(name: str, ready: list[int], age_s: float, round_: int = 0) -> dict[str, pb.Heartbeat]:
    return {"heartbeat": pb.Heartbeat(waiting=[pb.Waiting(name=name, round=round_, ready_ranks=ready, age_s=age_s)])}


def test_a_stall_names_the_missing_ranks_and_is_repeated_only_after_a_while() -> None:
    cluster, (a, b, c), _ = running(n=3, stall_warn_s=5.0)
    for first, connection in ((0, a), (2, b), (4, c)):
        cluster.say(connection, **declare(ballot([first, first + 1])))
    assert cluster.say(a, **wait_for("w", [0, 1], 1.0)) == []  # not long enough
    assert cluster.say(b, **wait_for("w", [3], 0.5)) == []
    cluster.now += 0.25
    out = cluster.say(a, **wait_for("w", [0, 1], 5.0))
    assert {m.stalled.message for _, m in out} == {
        "tensor 'w' has waited 5 s for ranks 2, 4-5, which have not handed it over "
        "(worker 1 (ranks 2-3, host gpu1, pid 101); worker 2 (ranks 4-5, host gpu2, pid 102)): "
        "slow, stuck, or on another path of the program"
    }
    assert len(out) == len(cluster.told)
    assert list(cluster.core.status(cluster.now).stalled) == [out[0][1].stalled.message]
    cluster.now += 4.5
    assert cluster.say(a, **wait_for("w", [0, 1], 9.5)) == []
    cluster.now += 0.5
    assert cluster.say(a, **wait_for("w", [0, 1], 10.0)) != []
    cluster.say(a, heartbeat=pb.Heartbeat())
    cluster.say(b, heartbeat=pb.Heartbeat())
    assert list(cluster.core.status(cluster.now).stalled) == []


def test_tensors_that_wait_for_the_same_ranks_share_a_sentence() -> None:
    cluster, (a, _), _ = running(stall_warn_s=5.0)
    cluster.say(a, **declare(*(ballot([0, 1], name=f"t{i}") for i in range(6))))
    waiting = [pb.Waiting(name=f"t{i}", ready_ranks=[0, 1], age_s=5 + i) for i in range(6)]
    out = cluster.say(a, heartbeat=pb.Heartbeat(waiting=waiting))
    (text,) = {m.stalled.message for _, m in out}
    assert text.startswith("tensors 't0', 't1', 't2', 't3' and 2 more have waited 10 s for ranks 2-3, which have not ")
    assert "not declared them" in text


def test_the_first_step_of_an_optimizer_that_some_ranks_have_not_made() -> None:
    cluster, (a, _), _ = running(stall_warn_s=5.0)
    name = f"gradients to combine{FIRST_STEP}2.plan"
    cluster.say(a, **declare(ballot([0, 1], name=name)))
    ((_, told), *_) = cluster.say(a, **wait_for(name, [0, 1], 5.0))
    assert told.stalled.message == (
        "tensor 'gradients to combine, first step of optimizer 2.plan' has waited 5 s for ranks 2-3, which have not "
        "declared it (worker 1 (ranks 2-3, host gpu1, pid 101)): slow, stuck, or on another path of the program; every "
        "rank needs the same optimizers, unless those of some ranks have a process_set"
    )


def test_a_barrier_that_waits_is_reported_apart_from_tensors() -> None:
    cluster, (a, _), _ = running(stall_warn_s=5.0)
    waiting = [pb.Waiting(name="w", ready_ranks=[0, 1], age_s=6), pb.Waiting(ready_ranks=[0, 1], age_s=6.25)]
    out = cluster.say(a, heartbeat=pb.Heartbeat(waiting=waiting))
    texts = {m.stalled.message for _, m in out}
    why = "(worker 1 (ranks 2-3, host gpu1, pid 101)): slow, stuck, or on another path of the program"
    assert texts == {
        f"tensor 'w' has waited 6 s for ranks 2-3, which have not handed it over {why}",
        f"a barrier has waited 6.2 s for ranks 2-3, which have not reached it {why}",
    }


def test_when_all_ranks_have_handed_over_no_rank_is_missing() -> None:
    cluster, (a, b), _ = running(stall_warn_s=5.0)
    cluster.say(a, **wait_for("w", [0, 1], 4.0, round_=8))
    assert cluster.say(b, **wait_for("w", [2, 3], 5.0, round_=7)) == []  # it has just been looked at
    cluster.now += 0.25
    out = cluster.say(b, **wait_for("w", [2, 3], 5.0, round_=7))
    assert "although all ranks have handed over their part" in out[0][1].stalled.message


def test_status_carries_the_counters() -> None:
    cluster, (a, *_), (s, *_) = running()
    counters = pb.Statistics(bytes_received=1, bytes_sent=2, bytes_summed=3, cpu_s=0.5, resident_bytes=4)
    cluster.say(s, heartbeat=pb.Heartbeat(statistics=counters))
    cluster.now += 2.0
    members = {m.member.member_id: m for m in cluster.core.status(cluster.now).members}
    assert members[s].statistics == counters
    assert (members[a].heartbeat_age_s, members[a].member.host, members[a].alive) == (2.0, "gpu0", True)


def test_a_rank_whose_result_is_late_is_not_at_another_unnamed_operation() -> None:
    """The others have theirs, and wait for it in their next call."""
    cluster, (a, b), _ = running()
    one, other = "sum.noname.0", "sum.noname.1"
    for name in (one, other):
        for connection, first in ((a, 0), (b, 2)):
            cluster.say(connection, **declare(ballot([first, first + 1], spec((2,)), name=name)))
    cluster.say(a, **wait_for(one, [0, 1], 9.0, round_=8))
    for rounds, is_error in ((8, False), (7, True)):
        heartbeat = wait_for(other, [2, 3], 9.0, round_=7)["heartbeat"]
        heartbeat.calls.extend(pb.UnnamedCall(name=one, rank=rank, rounds=rounds) for rank in (2, 3))
        cluster.say(b, heartbeat=heartbeat)
        assert bool(cluster.take(cluster.core.tick(cluster.now))) == is_error, rounds


def test_calls_of_ranks_of_others_are_refused() -> None:
    cluster, (a, _), _ = running()
    out = cluster.say(a, heartbeat=pb.Heartbeat(calls=[pb.UnnamedCall(name="sum.noname.0", rank=2, rounds=1)]))
    assert any("the calls of ranks that are not its own" in message.failure.message for _, message in out)


def test_ranks_at_different_unnamed_operations_get_an_error() -> None:
    cluster, (a, b), _ = running()
    one, other = "sum.noname.0", "sum.noname.1"
    for name, shape in ((one, (2,)), (other, (3,))):
        for connection, first in ((a, 0), (b, 2)):
            ballots = [ballot([first, first + 1], spec(shape), name=name)]
            cluster.say(connection, **declare(*ballots))
    cluster.say(a, **wait_for(one, [0, 1], 9.0))
    for ranks_wait in (
        wait_for(other, [2], 3.0),  # perhaps it has been said too early
        wait_for("sum.named", [2, 3], 9.0),  # in any order
        wait_for(one, [3], 9.0),  # rank 2 is late
    ):
        cluster.say(b, **ranks_wait)
        assert cluster.take(cluster.core.tick(cluster.now)) == []
    cluster.say(b, **wait_for(other, [2, 3], 4.0))
    out = cluster.take(cluster.core.tick(cluster.now))
    (text,) = {m.failure.message for _, m in out}
    assert {m.failure.error for _, m in out} == {"MismatchError"}
    assert text == (
        "Mismatched unnamed operations: ranks 0-1 gave sum of float32[2] ('sum.noname.0'), ranks 2-3 gave sum of "
        "float32[3] ('sum.noname.1') as the same call; make the same calls in the same order on every rank, or name "
        "the operations"
    )


class Counted(GroupWatch):
    """``reports``: how many have been passed on."""

    reports = 0

    def _report(self, member_id: int, heartbeat: pb.Heartbeat, now_s: float) -> None:
        self.reports += 1
        super()._report(member_id, heartbeat, now_s)


def test_heartbeats_that_report_no_wait_change_nothing() -> None:
    cluster, (a, _), _ = running(stall_warn_s=5.0)
    core = cluster.core
    watch = core._watch = Counted(core.job, core._group)
    core._set_handlers()
    cluster.say(a, heartbeat=pb.Heartbeat())
    assert watch.reports == 0
    cluster.say(a, **wait_for("w", [0, 1], 5.0))
    assert watch.stalled()
    cluster.say(a, heartbeat=pb.Heartbeat())
    assert not watch.stalled()
    assert watch.reports == 2
    cluster.say(a, heartbeat=pb.Heartbeat())
    assert watch.reports == 2
