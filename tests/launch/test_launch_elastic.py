"""What the launcher of an elastic job decides: a rank that ends is no reason to end the others."""

from __future__ import annotations

import signal

from test_launch_policy import sends, words

from byteps_py.launch import command_line
from byteps_py.launch.process_plan import ProcessKind, ProcessSpec
from byteps_py.launch.supervision_policy import Phase, SupervisionPolicy


def policy_of(ranks: int = 2, is_part: bool = True) -> SupervisionPolicy:
    specs = [
        ProcessSpec("cs", ProcessKind.SERVICE, "cs", ("x",), {}, is_dismissed=True),
        ProcessSpec("ss", ProcessKind.SERVICE, "ss", ("x",), {}, is_replaceable=True),
        *(ProcessSpec(f"rank {r}", ProcessKind.MAIN, str(r), ("x",), {}) for r in range(ranks)),
    ]
    return SupervisionPolicy(specs, grace_s=5, own_error_s=10, elastic=True, is_part=is_part)


def test_a_rank_that_is_killed_stops_no_other() -> None:
    policy = policy_of()
    actions = policy.exited("rank 1", -9, 1)
    assert words(actions) == "rank 1 was killed by SIGKILL (signal 9); the others go on without it"
    assert sends(actions) == []
    assert sends(policy.exited("rank 0", 0, 2)) == [(("cs",), signal.SIGTERM)]
    assert (policy.phase, policy.code) == (Phase.DRAINING, 0)


def test_a_job_whose_ranks_all_fail_has_failed() -> None:
    policy = policy_of()
    policy.exited("rank 1", -9, 1)
    policy.exited("rank 0", 3, 2)
    assert policy.code == 137


def test_a_part_of_a_job_leaves_at_sigterm() -> None:
    policy = policy_of()
    actions = policy.signalled(signal.SIGTERM, 0)
    assert words(actions) == "received SIGTERM; the ranks leave at their next commit, within 5 s"
    assert sends(actions) == [(("cs",), signal.SIGTERM)]
    assert policy.phase is Phase.LEAVING
    assert policy.exited("rank 1", 0, 1) == []
    assert sends(policy.exited("rank 0", 0, 1)) == [(("cs", "ss"), signal.SIGTERM)]  # the job is not over
    assert (policy.phase, policy.code, policy.deadline) == (Phase.DRAINING, 0, 6)  # others may want the machine soon


def test_ranks_that_reach_no_commit_are_stopped() -> None:
    policy = policy_of()
    policy.exited("rank 1", -9, 0)
    policy.signalled(signal.SIGTERM, 0)
    actions = policy.ticked(5)
    assert words(actions) == "rank 0 reached no commit within 5 s; stopping"
    assert sends(actions) == [(("rank 0",), signal.SIGTERM)]
    policy.exited("rank 0", -15, 6)
    assert policy.code == 0


def test_the_other_signals_and_a_whole_cluster_end_as_ever() -> None:
    policy = policy_of()
    assert sends(policy.signalled(signal.SIGINT, 0)) == [(("rank 0", "rank 1"), signal.SIGINT)]
    policy = policy_of(is_part=False)
    assert sends(policy.signalled(signal.SIGTERM, 0)) == [(("rank 0", "rank 1"), signal.SIGTERM)]


def test_a_machine_of_a_whole_cluster_may_lose_its_service() -> None:
    policy = policy_of(is_part=False)
    actions = policy.exited("cs", -9, 1)
    assert words(actions) == "cs was killed by SIGKILL (signal 9); the job goes on without the ranks of its machine"
    assert policy.phase is Phase.RUNNING


def test_options_of_elastic_jobs() -> None:
    given = command_line.parse(["-np", "2", "--min-np", "1", "--reset-limit", "3", "x"], {})
    assert given.how.elastic
    assert not given.how.is_part
    assert given.variables == {"BYTEPS_ELASTIC": "1", "BYTEPS_MIN_NP": "1", "BYTEPS_RESET_LIMIT": "3"}
    given = command_line.parse(["x"], {"DMLC_ROLE": "worker", "HOROVOD_ELASTIC": "1"})
    assert given.how.elastic
    assert given.how.is_part
    assert not command_line.parse(["x"], {"DMLC_ROLE": "worker", "BYTEPS_ELASTIC": "0"}).how.elastic
