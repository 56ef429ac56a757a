"""What the launcher decides when processes end, signals arrive and time passes: tables of events, a hand-moved
clock."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest

from byteps_py.launch.process_plan import ProcessKind, ProcessSpec
from byteps_py.launch.supervision_policy import Action, Phase, Say, Send, Start, SupervisionPolicy


def policy_of(ranks: int = 2, services: tuple[str, ...] = ("cs", "ss")) -> SupervisionPolicy:
    specs = [ProcessSpec(name, ProcessKind.SERVICE, name, ("x",), {}) for name in services]
    specs.append(ProcessSpec("scheduler", ProcessKind.SERVICE, "scheduler", ("x",), {}, is_vital=False, retry_status=2))
    specs += [ProcessSpec(f"rank {r}", ProcessKind.MAIN, str(r), ("x",), {}, False) for r in range(ranks)]
    return SupervisionPolicy(specs, grace_s=5, own_error_s=10)


SERVICES = ("cs", "ss", "scheduler")


def sends(actions: Sequence[Action]) -> list[tuple[tuple[str, ...], int]]:
    return [(a.names, a.signum) for a in actions if isinstance(a, Send)]


def words(actions: Sequence[Action]) -> str:
    return "\n".join(a.text for a in actions if isinstance(a, Say))


class TestPolicy:
    def test_a_job_that_cannot_begin_is_not_started_over(self) -> None:
        spec = ProcessSpec(
            "scheduler", ProcessKind.SERVICE, "x", ("x",), {}, is_vital=False, retry_status=2, hopeless_status=78
        )
        policy = SupervisionPolicy(
            [spec, ProcessSpec("rank 0", ProcessKind.MAIN, "0", ("x",), {})], grace_s=5, own_error_s=10
        )
        actions = policy.exited("scheduler", 78, 1)
        assert words(actions) == "scheduler can't begin; its own message is above"
        assert sends(actions) == [(("rank 0",), signal.SIGKILL)]
        policy.exited("rank 0", -9, 2)
        assert (policy.retry, policy.never_began, policy.code, policy.finished) == (False, True, 2, True)

    def test_after_a_signal_an_exception_of_a_rank_is_no_failure_of_its_own(self) -> None:
        policy = policy_of()
        policy.signalled(signal.SIGINT, 0)
        policy.exited("rank 1", 1, 1)  # it heard that rank 0 was ended
        policy.exited("rank 0", -2, 1)
        assert policy.code == 130

    def test_good_run(self) -> None:
        policy = policy_of()
        assert policy.exited("rank 1", 0, 1) == []
        assert policy.exited("cs", 0, 1) == []  # it left in order; a rank may go on without it
        assert policy.exited("rank 0", 0, 2) == []
        assert (policy.phase, policy.deadline) == (Phase.DRAINING, 7)
        assert policy.exited("ss", 0, 3) == policy.exited("scheduler", 0, 3) == []
        assert policy.finished
        assert policy.code == 0

    def test_services_that_stay_are_stopped_then_killed(self) -> None:
        policy = policy_of(ranks=1)
        policy.exited("rank 0", 0, 0)
        assert policy.ticked(4.9) == []
        assert sends(policy.ticked(5)) == [(SERVICES, signal.SIGTERM)]
        policy.exited("cs", -15, 6)
        policy.exited("ss", 0, 6)
        killing = policy.ticked(10)
        assert sends(killing) == [(("scheduler",), signal.SIGKILL)]
        assert words(killing) == (
            "all ranks have ended well; scheduler still does after 5 s, and is ended now. "
            "This changes nothing of the results; it is usual on a busy machine"
        )
        policy.exited("scheduler", -9, 10)
        assert policy.finished
        assert policy.code == 0

    def test_services_of_a_part_of_a_job_wait_for_ranks_of_other_machines(self) -> None:
        specs = [
            ProcessSpec("cs", ProcessKind.SERVICE, "cs", ("x",), {}),
            ProcessSpec("rank 0", ProcessKind.MAIN, "0", ("x",), {}),
        ]
        policy = SupervisionPolicy(specs, grace_s=5, own_error_s=10, drain_s=30, is_part=True)
        policy.exited("rank 0", 0, 1)
        assert (policy.phase, policy.deadline) == (Phase.DRAINING, 31)
        assert "all ranks have ended; stopping cs, which takes longer. This changes nothing" in words(policy.ticked(31))
        assert (policy.phase, policy.deadline) == (Phase.ENDING, 36)

    def test_a_scheduler_that_is_killed_is_started_again_but_not_for_ever(self) -> None:
        spec = ProcessSpec(
            "scheduler", ProcessKind.SERVICE, "x", ("x",), {}, is_vital=False, restarts=2, retry_status=2
        )
        policy = SupervisionPolicy(
            [spec, ProcessSpec("rank 0", ProcessKind.MAIN, "0", ("x",), {})], grace_s=5, own_error_s=10
        )
        for count in (1, 2):
            actions = policy.exited("scheduler", -9, 1)
            text = f"scheduler was killed by SIGKILL (signal 9); starting it again ({count} of at most 2 times)"
            assert actions == [Say(text), Start("scheduler")]
        assert "new ones and barriers have to wait" in words(policy.exited("scheduler", -9, 1))
        policy.exited("rank 0", 0, 2)
        assert (policy.finished, policy.code) == (True, 0)

    @pytest.mark.parametrize("status", [1, 3, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV])
    def test_a_rank_that_fails_is_started_again_so_many_times(self, status: int) -> None:
        ranks = [
            ProcessSpec(f"rank {i}", ProcessKind.MAIN, str(i), ("x",), {}, restarts=2, is_restarted_on_failure=True)
            for i in range(2)
        ]
        policy = SupervisionPolicy(ranks, grace_s=5, own_error_s=10)
        for count in (1, 2):
            said, started = policy.exited("rank 0", status, 1)
            assert started == Start("rank 0")
            assert isinstance(said, Say)
            assert said.text.endswith(f"; starting it again ({count} of at most 2 times)")
        assert "the other rank has 10 s to end" in words(policy.exited("rank 0", status, 1))
        assert policy.phase is Phase.LOSING

    def test_a_rank_that_is_done_or_was_told_to_end_is_not_started_again(self) -> None:
        ranks = [
            ProcessSpec(
                f"rank {i}", ProcessKind.MAIN, f"{i}", (), {}, is_rank=True, restarts=2, is_restarted_on_failure=True
            )
            for i in range(2)
        ]
        policy = SupervisionPolicy(ranks, grace_s=5, own_error_s=10)
        assert policy.exited("rank 0", 0, 1) == []
        assert not any(isinstance(action, Start) for action in policy.exited("rank 1", -signal.SIGKILL, 1))
        assert (policy.finished, policy.code) == (True, 137)
        policy = SupervisionPolicy(ranks, grace_s=5, own_error_s=10)
        policy.signalled(signal.SIGTERM, 2)
        for rank in ("rank 0", "rank 1"):
            assert not any(isinstance(action, Start) for action in policy.exited(rank, -signal.SIGTERM, 3))
        assert policy.finished

    @pytest.mark.parametrize("status", [1, 2, -signal.SIGTERM])
    def test_only_a_scheduler_that_is_killed_is_started_again(self, status: int) -> None:
        spec = ProcessSpec("scheduler", ProcessKind.MAIN, "x", ("x",), {}, restarts=2)
        policy = SupervisionPolicy([spec], grace_s=5, own_error_s=10)
        assert policy.exited("scheduler", -9, 1)[1:] == [Start("scheduler")]
        assert not any(isinstance(action, Start) for action in policy.exited("scheduler", status, 1))
        assert policy.finished

    def test_a_scheduler_whose_address_is_taken_is_started_again_until_the_limit(self) -> None:
        spec = ProcessSpec("scheduler", ProcessKind.MAIN, "x", ("x",), {}, restarts=4, waits_for_address=True)
        policy = SupervisionPolicy([spec], grace_s=5, own_error_s=10)
        assert policy.exited("scheduler", -9, 1)[1:] == [Start("scheduler")]
        assert "starting it again every 1 s (2 of at most 4 times)" in words(policy.exited("scheduler", 2, 10))
        for now in (11.0, 12.0):
            assert policy.deadline == now
            assert policy.ticked(now - 0.1) == []
            assert policy.ticked(now) == [Start("scheduler")]
            assert policy.exited("scheduler", 2, now) == []
        assert policy.ticked(13) == [Start("scheduler")]
        policy.exited("scheduler", 2, 13)
        assert (policy.finished, policy.code) == (True, 2)

    def test_a_signal_ends_the_wait_for_an_address(self) -> None:
        spec = ProcessSpec("scheduler", ProcessKind.MAIN, "x", ("x",), {}, restarts=4, waits_for_address=True)
        policy = SupervisionPolicy([spec], grace_s=5, own_error_s=10)
        policy.exited("scheduler", -9, 1)
        policy.exited("scheduler", 2, 2)
        assert sends(policy.signalled(signal.SIGTERM, 2.5)) == []
        assert (policy.finished, policy.code) == (True, 143)

    def test_a_scheduler_that_can_not_begin_at_all_is_not_started_again(self) -> None:
        spec = ProcessSpec("scheduler", ProcessKind.MAIN, "x", ("x",), {}, restarts=4, waits_for_address=True)
        policy = SupervisionPolicy([spec], grace_s=5, own_error_s=10)
        policy.exited("scheduler", 2, 1)
        assert (policy.finished, policy.code) == (True, 2)

    def test_a_scheduler_that_can_not_begin_again_does_not_start_the_job_over(self) -> None:
        spec = ProcessSpec(
            "scheduler", ProcessKind.SERVICE, "x", ("x",), {}, is_vital=False, restarts=2, retry_status=2
        )
        policy = SupervisionPolicy(
            [spec, ProcessSpec("rank 0", ProcessKind.MAIN, "0", ("x",), {})], grace_s=5, own_error_s=10
        )
        policy.exited("scheduler", -9, 1)
        policy.exited("scheduler", 2, 1)
        assert not policy.retry

    @pytest.mark.parametrize(("status", "code"), [(3, 3), (-9, 137), (-11, 139), (-15, 143)])
    def test_first_failing_rank_decides(self, status: int, code: int) -> None:
        policy = policy_of(ranks=3)
        first = policy.exited("rank 1", status, 0)
        assert sends(first) == []
        assert "rank 1 " in words(first)
        assert "the other 2 ranks have 10 s to end with an error of their own" in words(first)
        assert words(policy.exited("cs", 1, 0)) == ""  # to it this is a failure of the job
        assert policy.exited("rank 0", 7, 1) == [Say("rank 0 exited with status 7")]
        assert policy.ticked(9.9) == []
        late = policy.ticked(10)
        assert sends(late) == [(("rank 2",), signal.SIGTERM)]
        assert words(late) == "rank 2 went on for 10 s without it; stopping"
        late = policy.ticked(15)
        assert sends(late) == [(("rank 2",), signal.SIGKILL)]
        assert words(late) == "rank 2 did not end within 5 s; killing"
        assert sends(policy.exited("rank 2", -9, 16)) == [(("ss", "scheduler"), signal.SIGTERM)]
        assert policy.code == code

    def test_words_for_a_status(self) -> None:
        assert words(policy_of(1).exited("rank 0", 3, 0)) == "rank 0 exited with status 3"
        assert words(policy_of(1).exited("rank 0", -11, 0)) == "rank 0 was killed by SIGSEGV (signal 11)"

    def test_dead_service_leaves_the_ranks_their_own_error(self) -> None:
        policy = policy_of()
        lost = policy.exited("cs", -9, 0)
        assert sends(lost) == []
        assert "cs was killed by SIGKILL (signal 9) while ranks needed it" in words(lost)
        assert sends(policy.exited("rank 0", 1, 1)) == []
        assert sends(policy.exited("rank 1", 1, 2)) == [(("ss", "scheduler"), signal.SIGTERM)]
        assert policy.code == 1

    def test_dead_service_and_ranks_that_go_on(self) -> None:
        policy = policy_of()
        policy.exited("ss", 4, 0)
        stop = policy.ticked(10)
        assert sends(stop) == [(("rank 0", "rank 1"), signal.SIGTERM)]
        policy.exited("rank 0", 0, 11)  # obeyed, but its training was cut short
        policy.exited("rank 1", -15, 11)
        assert policy.code == 4

    def test_dead_scheduler_stops_no_rank(self) -> None:
        policy = policy_of(ranks=1)
        dead = policy.exited("scheduler", -9, 0)
        assert sends(dead) == []
        assert words(dead) == (
            "scheduler was killed by SIGKILL (signal 9); agreed tensors are still reduced, new ones and barriers have "
            "to wait"
        )
        assert (policy.phase, policy.deadline) == (Phase.RUNNING, None)
        assert sends(policy.exited("rank 0", 0, 100)) == [(("cs", "ss"), signal.SIGTERM)]  # nobody else would
        assert policy.code == 0

    def test_dead_service_and_ranks_that_had_done_all(self) -> None:
        policy = policy_of(ranks=1)
        policy.exited("ss", 4, 0)
        policy.exited("rank 0", 0, 1)
        assert policy.phase is Phase.DRAINING
        assert policy.code == 0

    def test_crash_that_is_seen_after_the_ranks_it_broke(self) -> None:
        policy = policy_of(ranks=1)
        policy.exited("rank 0", 1, 0)
        assert words(policy.exited("cs", -11, 0)) == "cs was killed by SIGSEGV (signal 11)"
        assert words(policy.exited("ss", -15, 0)) == ""
        assert words(policy.exited("scheduler", 1, 0)) == ""
        assert policy.ticked(9) == []

    def test_taken_port_means_starting_over(self) -> None:
        policy = policy_of()
        actions = policy.exited("scheduler", 2, 0)
        assert sends(actions) == [(("rank 0", "rank 1", "cs", "ss"), signal.SIGKILL)]
        for name in ("rank 0", "rank 1", "cs", "ss"):
            policy.exited(name, -9, 0)
        assert policy.finished
        assert policy.retry
        assert policy.code == 2

    def test_no_starting_over_once_a_rank_has_ended(self) -> None:
        policy = policy_of()
        policy.exited("rank 0", 0, 0)
        policy.exited("scheduler", 2, 1)
        assert not policy.retry

    @pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_signals_are_passed_on(self, signum: signal.Signals) -> None:
        policy = policy_of()
        assert sends(policy.signalled(signum, 0)) == [(("rank 0", "rank 1"), signum)]
        policy.exited("rank 0", -signum, 1)
        assert sends(policy.ticked(5)) == [(("rank 1",), signal.SIGKILL)]
        assert sends(policy.exited("rank 1", -9, 5)) == [(SERVICES, signal.SIGTERM)]
        assert policy.code == 128 + signum

    def test_ranks_that_end_well_on_a_signal(self) -> None:
        policy = policy_of()
        policy.signalled(signal.SIGTERM, 0)
        policy.exited("rank 0", 0, 1)
        policy.exited("rank 1", 0, 1)
        assert policy.code == 0

    def test_a_ranks_own_status_after_a_signal(self) -> None:
        policy = policy_of()
        policy.signalled(signal.SIGINT, 0)
        policy.exited("rank 0", 9, 1)
        assert policy.code == 9

    def test_second_ctrl_c_kills(self) -> None:
        policy = policy_of()
        policy.signalled(signal.SIGINT, 0)
        assert policy.signalled(signal.SIGINT, 0.1) == []  # one key press, forwarded by a wrapper
        assert policy.signalled(signal.SIGHUP, 1) == []
        assert sends(policy.signalled(signal.SIGINT, 1)) == [(("rank 0", "rank 1", *SERVICES), signal.SIGKILL)]

    def test_signal_while_services_leave(self) -> None:
        policy = policy_of(ranks=1)
        policy.exited("rank 0", 0, 0)
        assert sends(policy.signalled(signal.SIGTERM, 1)) == [(SERVICES, signal.SIGTERM)]
        assert policy.code == 0

    def test_user_signals_change_nothing(self) -> None:
        policy = policy_of()
        assert sends(policy.signalled(signal.SIGUSR1, 0)) == [(("rank 0", "rank 1"), signal.SIGUSR1)]
        assert policy.phase is Phase.RUNNING

    def test_processes_that_survive_sigkill_are_named_and_left(self) -> None:
        policy = policy_of(ranks=1)
        policy.signalled(signal.SIGTERM, 0)
        policy.ticked(5)
        assert "rank 0 could not be killed" in words(policy.ticked(10))
        assert policy.finished
        assert policy.code
