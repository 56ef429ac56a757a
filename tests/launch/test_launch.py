"""bpslaunch with real processes: exit codes, signals, output, and that nothing outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import launched, supervised
from support.processes import children, command_line, family, kill, wait_gone

from byteps_py.launch.supervision_policy import REPEAT_IGNORED_S

WAIT = "import signal; print('ready'); signal.pause()"
#: Tells who it is, starts a process in a session of its own, tells that one's number, waits.
WITH_DAEMON = """
import os, subprocess, sys, signal
child = subprocess.Popen([sys.executable, '-S', '-c', 'import signal; signal.pause()'], start_new_session=True)
print(child.pid)
"""
#: Tells who it is, and fails.
FAILS = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.write(1, b'ready\\n')
signal.sigwait([signal.SIGUSR1])
print(os.getpid(), file=open(link, 'w'))
raise SystemExit(3)
"""
#: Fails when the other has ended. Who waits for less, for a connection's end, may itself end before it: the system
#: ends a process in steps.
OUTLIVES = """
import contextlib, os, select, signal, sys
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
os.write(1, b'ready\\n')
with contextlib.suppress(ProcessLookupError):
    select.select([os.pidfd_open(int(open(link).read()))], [], [])
sys.exit('rank 1 is gone')
"""


def run(code: str) -> int:
    """The exit status of a Python program."""
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, timeout=60).returncode


def guard_of(launcher: int) -> int:
    """The child that runs no program of its own."""
    (guard,) = [pid for pid in children(launcher) if command_line(pid) == command_line(launcher)]
    return guard


class TestExitCodes:
    def test_all_good(self) -> None:
        with supervised("print('a')", "pass") as job:
            assert job.finish() == (0, "a\n", "")

    @pytest.mark.parametrize(
        ("code", "status", "words"),
        [
            ("raise SystemExit(3)", 3, "rank 1 exited with status 3"),
            ("import os; os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL (signal 9)"),
        ],
    )
    def test_first_failing_rank(self, code: str, status: int, words: str) -> None:
        with supervised(WAIT, code, own_error_s=0.1) as job:
            told = f"{words}; the other rank has 0.1 s to end with an error of its own"
            late = "rank 0 went on for 0.1 s without it; stopping"
            assert job.finish()[::2] == (status, f"bpslaunch: {told}\nbpslaunch: {late}\n")

    def test_ranks_say_themselves_that_one_has_failed(self, tmp_path: Path) -> None:
        """The launcher passes the signal on when it watches both: before, it might see both end at once."""
        os.mkfifo(link := tmp_path / "link")
        with supervised(f"link = {str(link)!r}{OUTLIVES}", f"link = {str(link)!r}{FAILS}") as job:
            assert [job.line(), job.line()] == ["ready", "ready"]
            job.process.send_signal(signal.SIGUSR1)
            status, _, err = job.finish()
        assert status == 3
        assert "rank 1 is gone" in err
        assert "stopping" not in err

    def test_rank_that_ignores_sigterm_is_killed(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "ready")
        deaf = (
            f"import signal; signal.signal(15, signal.SIG_IGN); open({str(tmp_path / 'ready')!r}, 'w'); signal.pause()"
        )
        fail = f"open({str(tmp_path / 'ready')!r}); raise SystemExit(4)"
        with supervised(deaf, fail, grace_s=0.1, own_error_s=0.1) as job:
            status, _, err = job.finish()
        assert status == 4
        assert "rank 0 did not end within 0.1 s; killing" in err

    def test_program_that_can_not_start_takes_the_others_down(self) -> None:
        broken = "print('x')\0"
        with supervised(WAIT, broken, own_error_s=0.1) as job:
            status, _, err = job.finish()
        assert status == 1
        assert "embedded null byte" in err


class TestSignals:
    @pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_passed_on(self, signum: signal.Signals) -> None:
        code = (
            f"import signal, sys; signal.signal({int(signum)}, lambda *_: sys.exit(9)); print('ready'); signal.pause()"
        )
        with supervised(code) as job:
            assert job.line() == "ready"
            job.process.send_signal(signum)
            status, _, err = job.finish()
        assert status == 9
        assert err == f"bpslaunch: received {signum.name}; passing it on and ending\n"

    def test_rank_that_dies_by_the_signal(self) -> None:
        with supervised(WAIT) as job:
            assert job.line() == "ready"
            job.process.send_signal(signal.SIGTERM)
            assert job.finish()[0] == 128 + signal.SIGTERM

    @pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_changes_nothing_once_the_job_is_over(self, signum: signal.Signals) -> None:
        main = "import os, sys; from byteps_py.launch.__main__ import main; "
        ending = f"code = main(['-np', '1', 'sh', '-c', 'exit 7']); os.kill(os.getpid(), {int(signum)}); sys.exit(code)"
        # From a shell's background, or under nohup, this test has such signals ignored.
        taken = f"import signal; signal.signal({int(signum)}, signal.SIG_DFL); "
        assert run(taken + main + ending) == 7

    def test_before_there_are_processes_ends_with_its_code(self) -> None:
        code = "import signal; signal.signal(15, signal.SIG_DFL); import byteps_py.launch.__main__ as program; "
        code += "program._run = lambda *_: signal.raise_signal(15); program.main([])"
        assert run(code) == 128 + signal.SIGTERM

    def test_second_ctrl_c_kills(self) -> None:
        code = "import signal; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; print('ready'); signal.pause()"
        with supervised(code, grace_s=1000) as job:
            assert job.line() == "ready"
            job.process.send_signal(signal.SIGINT)
            assert job.process.stderr is not None
            assert job.process.stderr.readline() == "bpslaunch: received SIGINT; passing it on and ending\n"
            with pytest.raises(subprocess.TimeoutExpired):
                job.process.wait(1.2 * REPEAT_IGNORED_S)  # what comes earlier counts as the same key press
            job.process.send_signal(signal.SIGINT)
            status, _, err = job.finish()
        assert status == 128 + signal.SIGINT
        assert "received SIGINT again; killing everything" in err

    def test_user_signals_are_passed_on(self) -> None:
        # Blocked and waited for: a handler could run between the print and the wait.
        code = "from signal import *; pthread_sigmask(SIG_BLOCK, [10]); print('ready'); sigwait([10]); print('usr1')"
        with supervised(code) as job:
            assert job.line() == "ready"
            job.process.send_signal(signal.SIGUSR1)
            assert job.finish() == (0, "usr1\n", "")


class TestNothingStays:
    def test_launcher_killed(self) -> None:
        with supervised(WITH_DAEMON + "signal.pause()", services=("import signal; signal.pause()",)) as job:
            daemon = int(job.line())
            members = family(job.process.pid)
            assert daemon in members
            assert len(members) == 5  # launcher, guard, rank, service, daemon
            job.process.kill()
            job.process.wait()
            try:
                assert all(wait_gone(pid) for pid in members)
            finally:
                for pid in members - {job.process.pid}:
                    kill(pid)

    def test_launcher_killed_after_its_guard(self) -> None:
        """The process that sees to it is missed, and another takes its place."""
        with supervised(WITH_DAEMON + "signal.pause()") as job:
            daemon = int(job.line())
            assert job.process.stderr is not None
            for _ in range(2):
                kill(guard_of(job.process.pid))
                said = job.process.stderr.readline()
                assert "killed by SIGKILL (signal 9); it is started again" in said
            members = family(job.process.pid)
            assert len(members) == 4  # launcher, guard, rank, daemon
            job.process.kill()
            job.process.wait()
            try:
                assert all(wait_gone(pid) for pid in members | {daemon})
            finally:
                for pid in members - {job.process.pid}:
                    kill(pid)

    @pytest.mark.parametrize(("code", "status"), [("", 0), ("sys.exit(6)", 6)])
    def test_processes_that_a_rank_left_behind(self, code: str, status: int) -> None:
        with supervised(WITH_DAEMON + code) as job:
            daemon = int(job.line())
            assert job.finish()[0] == status
            assert wait_gone(daemon, 0)


class TestServices:
    def test_rank_reports_a_dead_service_itself(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "link")
        service = f"link = open({str(tmp_path / 'link')!r}, 'w'); import os; os.kill(os.getpid(), 9)"
        rank = f"open({str(tmp_path / 'link')!r}).read(); import sys; sys.exit('my service is gone')"
        with supervised(rank, services=(service,)) as job:
            status, _, err = job.finish()
        assert status == 1
        assert "my service is gone" in err  # the line end is a write of its own: the launcher's may come between
        assert "bpslaunch: service 0 was killed by SIGKILL (signal 9)" in err  # seen before the rank's end, or after

    def test_ranks_that_do_not_notice_are_stopped(self) -> None:
        with supervised(WAIT, services=("raise SystemExit(5)",), own_error_s=0.1) as job:
            status, _, err = job.finish()
        assert status == 5
        assert "rank 0 went on for 0.1 s without it; stopping" in err

    def test_services_leave_by_themselves(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "link")
        rank = f"open({str(tmp_path / 'link')!r}, 'w')"
        service = f"open({str(tmp_path / 'link')!r}).read(); print('bye')"
        with supervised(rank, services=(service,)) as job:
            assert job.finish() == (0, "bye\n", "")

    def test_services_that_stay_are_stopped(self) -> None:
        with supervised("", services=("import signal; signal.pause()",), grace_s=0.1, drain_s=0.1) as job:
            status, _, err = job.finish()
        assert status == 0
        # It may take as long again until the signal has ended it; that is said, too.
        assert err.startswith("bpslaunch: all ranks have ended; stopping service 0, which takes longer. ")


class TestOutput:
    def test_tagged_lines(self) -> None:
        code = "import sys; print('one'); print('two', end=''); print('err', file=sys.stderr)"
        with supervised(code, code, tag_output=True) as job:
            status, out, err = job.finish()
        assert status == 0
        assert sorted(out.splitlines()) == ["[0] one", "[0] two", "[1] one", "[1] two"]
        assert sorted(err.splitlines()) == ["[0] err", "[1] err"]

    def test_files(self, tmp_path: Path) -> None:
        with supervised("print('a\\rb')", "import sys; sys.exit('bad')", folder=str(tmp_path / "log")) as job:
            status, out, _ = job.finish()
        assert status == 1
        assert out in ("a\nb\n", "")  # rank 0 may be stopped before it speaks
        assert (tmp_path / "log/rank.1/stderr").read_text() == "bad\n"

    def test_the_output_of_a_dead_process_comes_before_the_launchers(self) -> None:
        with supervised("import sys; sys.exit('x' * 5000)", tag_output=True) as job:
            err = job.finish()[2]
        assert err == "[0] " + "x" * 5000 + "\nbpslaunch: rank 0 exited with status 1\n"

    def test_only_rank_0_reads_input(self) -> None:
        with supervised("print(input())", "import sys; print(repr(sys.stdin.read()))", tag_output=True) as job:
            status, out, _ = job.finish("hello\n")
        assert status == 0
        assert sorted(out.splitlines()) == ["[0] hello", "[1] ''"]


class TestProgram:
    def test_a_lone_rank_runs_by_itself(self) -> None:
        code = "import os; print(os.environ['BYTEPS_LOCAL_RANK'], os.environ['BYTEPS_LOCAL_SIZE']); os._exit(3)"
        with launched("-np", "1", "python", "-S", "-u", "-c", code) as job:
            assert job.finish() == (3, "0 1\n", "bpslaunch: rank 0 exited with status 3\n")

    def test_by_hand(self) -> None:
        command = ("python", "-S", "-c", "import os; print(os.environ['DMLC_WORKER_ID'])")
        with launched(*command, DMLC_ROLE="worker", DMLC_NUM_WORKER="1") as job:
            assert job.finish() == (0, "0\n", "")

    def test_missing_environment(self) -> None:
        with launched("python", "train.py", DMLC_ROLE="worker", DMLC_NUM_WORKER="2") as job:
            status, out, err = job.finish()
        assert (status, out) == (2, "")
        for name in ("DMLC_NUM_SERVER", "DMLC_WORKER_ID", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"):
            assert f"  {name}" in err

    def test_command_not_found(self) -> None:
        with launched("-np", "2", "no-such-program") as job:
            assert job.finish() == (127, "", "bpslaunch: no-such-program: command not found\n")

    def test_help(self) -> None:
        with launched("--help") as job:
            status, out, _ = job.finish()
        assert status == 0
        assert "examples:" in out

    def test_nothing_heavy_is_imported(self) -> None:
        code = (
            "import sys, byteps_py.launch.__main__; print({'torch', 'numpy', 'numba', 'grpc', 'zmq'} & {*sys.modules})"
        )
        assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
