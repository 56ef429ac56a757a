"""A rank whose Python fails: the others are told at once, with its traceback. Real processes."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.breaking import ERROR_STATUS, command, launch
from support.clusters import ROOT

from byteps_py.errors import StallError
from byteps_py.session import failure_reports

SPAWNED = ROOT / "tests" / "programs" / "spawned.py"


@pytest.mark.slow  # its threads keep the rank that failed until it is stopped, after 15 s
def test_an_exception_is_told_to_all_with_its_traceback() -> None:
    with launch("-np 1 --machines 2", "crashes", "0", BYTEPS_STALL_WARN_S="0.5", PS_HEARTBEAT_TIMEOUT="30") as job:
        # The process goes on without its thread; who waits for it is told that it does.
        job.until("was ended by an exception: KeyError: 'no such batch'")
        job.until("in feed", "in crashes")
        # The other rank ends before the one that failed, whose threads keep it: that one is stopped.
        assert job.end() == ERROR_STATUS
        sentence = r"rank 0 \(process \d+ on .*\) was ended by an exception: ValueError: the data of batch 7 is bad.*\n"
        trace = r"Traceback \(most recent call last\):\n(.*\n)+? .*, in load\n(.*\n)+?ValueError: the data of batch 7"
        assert re.search(f"^1: PeerLostError: {sentence}{trace}", job.text, re.MULTILINE), job.text
        assert "the data of batch 7 is bad (reported by worker 0 (rank 0, " in job.text


@pytest.mark.slow
def test_processes_of_multiprocessing_say_it_too(tmp_path: Path) -> None:
    """torch's spawn goes about it in the same way: what the program raises becomes a SystemExit."""
    with command(sys.executable, str(SPAWNED), BYTEPS_JOB_ID=f"spawned-{tmp_path}", PS_HEARTBEAT_TIMEOUT="30") as job:
        assert job.end() == 0
    said = [line for line in job.said if line.startswith(("0: ", "1: "))]
    assert sorted(said) == ["0: all have left", "1: all have left"], job.text  # the first time nobody fails
    assert re.search(
        r"^PeerLostError: rank 1 \(process \d+ on .*\) was ended by an exception: ValueError: the data is bad"
        r"; tensor 'w', round \d: no result\n"
        r"Traceback \(most recent call last\):\n(.*\n)+?ValueError: the data is bad",
        job.text,
        re.MULTILINE,
    ), job.text


def test_an_exit_status_is_the_launchers_to_tell() -> None:
    with launch("-np 2", "exits", PS_HEARTBEAT_TIMEOUT="30") as job:
        job.until("rank 1 exited with status 5")
        assert job.end() == 5  # which tells rank 0 to end


class _Speaker:
    def __init__(self) -> None:
        self.said: list[str] = []

    def report_failure(self, error: BaseException) -> None:
        self.said.append("failure")

    def report_note(self, text: str) -> None:
        self.said.append(text)

    def close(self) -> None:
        self.said.append("closed")


@pytest.fixture
def speaker() -> Iterator[_Speaker]:
    speaker = _Speaker()
    failure_reports.register(speaker)
    yield speaker
    failure_reports.unregister(speaker)


def test_hooks_of_others_are_called_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: called.append(error))
    monkeypatch.setattr(threading, "excepthook", lambda args: called.append(args.exc_value))
    before = sys.excepthook, threading.excepthook
    speakers = [_Speaker(), _Speaker()]
    for speaker in speakers:
        failure_reports.register(speaker)
    error = ValueError("x")
    sys.excepthook(ValueError, error, None)  # by a program, which goes on
    assert speakers[0].said == []
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    sys.excepthook(ValueError, error, None)  # by the interpreter

    def fail() -> None:
        raise error

    thread = threading.Thread(target=fail, name="loader")
    thread.start()
    thread.join()
    for speaker in speakers:
        assert speaker.said[0] == "failure"
        assert speaker.said[1].startswith("its thread 'loader' was ended by an exception: ValueError: x\nTraceback")
    assert called == [error] * 3
    for speaker in speakers:
        failure_reports.unregister(speaker)
    assert (sys.excepthook, threading.excepthook) == before


def test_hooks_that_keep_ours_and_are_kept_by_ours_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after ``init_process_group``, ``destroy_process_group`` and ``init_process_group`` again: torch's hook is
    between two of ours. An exception is told once, and printed once."""
    printed: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: printed.append(error))
    monkeypatch.setattr(threading, "excepthook", lambda args: printed.append(args.exc_value))
    error = ValueError("x")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    speakers = [_Speaker() for _ in range(3)]
    passed: list[str] = []
    for speaker in speakers:
        failure_reports.register(speaker)
        beneath, beneath_in_threads = sys.excepthook, threading.excepthook

        def others(*args: Any, kept: Any = beneath) -> None:
            passed.append("main")
            kept(*args)

        def others_in_threads(args: Any, kept: Any = beneath_in_threads) -> None:
            passed.append("thread")
            kept(args)

        monkeypatch.setattr(sys, "excepthook", others)
        monkeypatch.setattr(threading, "excepthook", others_in_threads)
        if speaker is not speakers[-1]:
            failure_reports.unregister(speaker)

    def fail() -> None:
        raise error

    thread = threading.Thread(target=fail, name="loader")
    thread.start()
    thread.join()
    sys.excepthook(ValueError, error, None)
    assert printed == [error, error]
    assert passed == ["thread"] * 3 + ["main"] * 3
    assert [len(speaker.said) for speaker in speakers] == [0, 0, 2]
    failure_reports.unregister(speakers[-1])
    sys.excepthook(ValueError, error, None)  # ours are still beneath the others', and only pass it on
    assert printed == [error] * 3
    assert speakers[-1].said[1:] == ["failure"]


def test_an_interactive_interpreter_goes_on(speaker: _Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError("x")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    sys.excepthook(ValueError, error, None)
    assert speaker.said == []


def test_long_tracebacks_are_cut_at_the_front() -> None:
    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        raise ValueError("y" * 100)

    try:
        deep(200)
    except ValueError as error:
        error.add_note("z" * 20_000)
        text = failure_reports.traceback_of(error)
    assert len(text) < 8_100
    assert text.endswith("z" * 100)
    assert failure_reports.leave_message_for(None) is None


ENDS = {
    "before init": ("bps.rank()", "NotInitializedError"),
    "in a backward pass": (
        "m = torch.nn.Linear(2, 2)\nbps.init()\n"
        "o = bps.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), m.named_parameters())\n"
        "for _ in range(2): m(torch.ones(1, 2)).sum().backward()",
        "GradientOrderError",
    ),
    "after shutdown": ("bps.init()\ntry: bps.push_pull([1])\nfinally: bps.shutdown()", "UsageError"),
}


@pytest.mark.parametrize(
    "case", ["before init", *(pytest.param(each, marks=pytest.mark.slow) for each in ENDS if each != "before init")]
)
def test_the_traceback_of_a_single_process_ends_at_the_programs_line(case: str, tmp_path: Path) -> None:
    lines, error = ENDS[case]
    program = tmp_path / "program.py"
    program.write_text(f"import torch\nimport byteps_py as bps\n{lines}\n")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert f"byteps_py.errors.{error}: " in done.stderr
    assert done.stderr.count("  File ") == done.stderr.count(f'File "{program}"') == 1, done.stderr


def test_an_error_before_init_is_shown_once_for_all_ranks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import byteps_py as bps\nbps.rank()\n")
    with launch("-np 2", program=program) as job:
        assert job.end() == 1
    assert job.text.count("NotInitializedError") == 1


def test_an_error_that_says_the_same_as_the_one_before_it_is_shown_once() -> None:
    def wait() -> None:
        try:
            raise StallError("tensor 'w': no result")
        except StallError as error:
            raise StallError(f"{error}; and why") from error

    with pytest.raises(StallError) as caught:
        wait()
    assert failure_reports.traceback_of(caught.value).count("Traceback") == 1
