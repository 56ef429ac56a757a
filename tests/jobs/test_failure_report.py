"""What is shown of a job that failed: the cause, once, and nothing after it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import warm
from support.clusters import clean_environment

from byteps_py import errors
from byteps_py.launch import command_line
from byteps_py.launch.process_output import OutputStream
from byteps_py.session import failure_reports
from byteps_py.wire.launch_protocol import (
    NOTICE_VARIABLE,
    Blame,
    FailureNotice,
    FailureReport,
    NoticePipe,
    has_launcher,
    send_notice,
)

PROGRAM = Path(__file__).parents[1] / "programs" / "fails.py"


def heard(*said: tuple[str, Blame, str]) -> FailureReport:
    report = FailureReport()
    for at_s, (label, blame, error) in enumerate(said):
        report.add(label, FailureNotice(blame, error, f"{error} of {label}"), at_s)
    return report


def test_the_cause_is_shown_and_not_its_consequences() -> None:
    report = heard(("0", Blame.OTHERS, "lost"), ("cs", Blame.SERVICE, "failed"), ("1", Blame.OWN, "bad"))
    assert report.take() == [("1", "bad of 1")]
    report.add("2", FailureNotice(Blame.OTHERS, "lost", "lost of 2"), 9.0)  # it took its time
    assert report.take() == []


def test_equal_errors_are_shown_once_and_the_first_error_last() -> None:
    report = heard(("2", Blame.OWN, "x"), ("0", Blame.OWN, "y"), ("1", Blame.OWN, "x"), ("4", Blame.OWN, "x"))
    assert report.take() == [("0", "y of 0"), ("1-2,4", "x of 2")]


def test_the_text_with_the_cause_is_shown_of_equal_errors() -> None:
    report = FailureReport()
    for rank, text in enumerate(("PipelineError", "ValueError, the direct cause of PipelineError", "PipelineError")):
        report.add(f"{rank}", FailureNotice(Blame.OWN, "PipelineError", text), rank)
    assert report.take() == [("0-2", "ValueError, the direct cause of PipelineError")]


def test_a_cause_in_the_user_s_code_keeps_the_frames_of_the_user_s_code() -> None:
    def fail() -> None:
        raise ValueError("bad stage")

    names = {"__name__": "byteps_py.inside", "fail": fail}
    exec("def call():\n    fail()", names)
    try:
        try:
            names["call"]()
        except ValueError as cause:
            raise errors.PipelineError("rank 1: ValueError: bad stage") from cause
    except errors.PipelineError as error:
        text = failure_reports.traceback_of(error)
    assert "in fail" in text
    assert "in call" not in text
    assert text.endswith("PipelineError: rank 1: ValueError: bad stage")


def test_without_a_cause_of_its_own_one_consequence_is_shown() -> None:
    said = [("scheduler", Blame.SERVICE, "failed"), ("3", Blame.OTHERS, "rank 9 died"), ("2", Blame.OTHERS, "gone")]
    assert heard(*said).take() == [("3", "rank 9 died of 3")]
    assert heard(said[0]).take() == [("scheduler", "failed of scheduler")]
    assert heard(*said).take(was_asked_to_end=True) == []
    assert heard(("0", Blame.NOBODY, "KeyboardInterrupt")).take() == []


def test_many_different_errors_are_counted() -> None:
    blocks = heard(*((str(i), Blame.OWN, f"e{i}") for i in range(7))).take()
    assert [labels for labels, _ in blocks] == ["", "3", "2", "1", "0"]
    assert blocks[0][1] == "… and 3 other errors of other ranks, which came later"


def test_words_of_a_process_that_does_not_end_are_due() -> None:
    assert heard(("0", Blame.OTHERS, "lost")).due_s is None
    assert heard(("0", Blame.OTHERS, "lost"), ("1", Blame.OWN, "bad")).due_s == 16.0


def test_words_go_through_the_pipe_of_this_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = NoticePipe()
    try:
        assert not send_notice(Blame.OWN, "E", "without a launcher")
        monkeypatch.setenv(NOTICE_VARIABLE, pipe.name)
        assert send_notice(Blame.OWN, "E: ä", "line 1\nline 2")
        assert send_notice(Blame.OTHERS, "F", "x" * 100_000)
        first, second = pipe.read()
        assert first == FailureNotice(Blame.OWN, "E: ä", "line 1\nline 2")
        assert len(second.text) == 30_001
        os.write(pipe.writer, b'{"blame": "own"}\nrubbish\n[]\n')
        assert pipe.read() == []
        descriptor, _, inode = pipe.name.partition(":")
        for name in (f"{descriptor}:{int(inode) + 1}", "x:1", "999999:1", ""):  # another file has that descriptor now
            monkeypatch.setenv(NOTICE_VARIABLE, name)
            assert not has_launcher()
    finally:
        os.close(pipe.writer)
        assert pipe.read() == []
        assert pipe.is_over
        pipe.close()


@pytest.mark.parametrize("prefix", ["", "[1] "])
def test_an_interrupted_process_leaves_no_traceback(prefix: str, tmp_path: Path) -> None:
    """Other tracebacks stay, and the file has everything."""
    trace = b"Traceback (most recent call last):\n  File ...\n%s\n"
    for last, is_shown in ((b"KeyboardInterrupt", False), (b"ValueError: x", True)):
        reader, writer = os.pipe()
        shown_r, shown_w = os.pipe()
        with contextlib.ExitStack() as stack:
            for fd in (shown_r, shown_w):
                stack.callback(os.close, fd)
            stream = OutputStream(reader, 2, prefix, tmp_path / "err", False)
            stream._terminal = shown_w
            os.write(writer, b"before\n")
            stream.pump()
            stream.expect_interrupt()
            os.write(writer, b"saving\n" + trace % last)
            os.close(writer)
            stream.close()
            expected = f"{prefix}before\n{prefix}saving\n"
            expected += "".join(f"{prefix}{line}\n" for line in (trace % last).decode().splitlines()) * is_shown
            assert os.read(shown_r, 1 << 16).decode() == expected
        assert (tmp_path / "err").read_bytes() == b"before\nsaving\n" + trace % last


def test_a_traceback_ends_where_the_program_ends() -> None:
    """Of an error of ours; what is inside says nothing that the message does not."""
    try:
        failure_reports.check_ranks(None, 0, 0)  # type: ignore[arg-type]
    except AttributeError as error:
        inside = error.__traceback__
    assert inside is not None
    assert inside.tb_next is not None
    outside = failure_reports.without_inside(inside)
    assert outside is not None
    assert (outside.tb_frame, outside.tb_next) == (inside.tb_frame, None)
    assert failure_reports.without_inside(inside.tb_next) is inside.tb_next  # nothing else would be left
    assert failure_reports.blame_for(KeyboardInterrupt()) is Blame.NOBODY
    assert failure_reports.blame_for(errors.PeerLostError("x")) is Blame.OTHERS
    assert failure_reports.blame_for(errors.MismatchError("x")) is Blame.OWN
    assert (
        failure_reports.cause(errors.PeerLostError("rank 1 died; tensor 'w', round 2: no result"))
        == "PeerLostError: rank 1 died"
    )


def test_prefixes_are_the_default_and_can_be_switched_off() -> None:
    command = ["-np", "2", "python", "x.py"]
    assert command_line.parse(command, {}).how.tag_output is None
    assert command_line.parse(command, {"BYTEPS_TAG_OUTPUT": "0"}).how.tag_output is False
    assert command_line.parse(["--tag-output", *command], {"BYTEPS_TAG_OUTPUT": "0"}).how.tag_output is True
    assert command_line.parse(["--no-tag-output", *command], {}).how.tag_output is False
    with pytest.raises(errors.ConfigurationError, match="BYTEPS_TAG_OUTPUT='x' is not valid"):
        command_line.parse(command, {"BYTEPS_TAG_OUTPUT": "x"})


# ---- whole jobs -----------------------------------------------------------------------------------------------

CLUSTER = "--grace-period 60 -np 2 --machines 2 --servers 1"


def job(how: str, layout: str) -> subprocess.Popen[str]:
    environ = clean_environment()
    del environ["BYTEPS_TAG_OUTPUT"]
    command = [sys.executable, "-m", "byteps_py.launch", "-v", *layout.split(), sys.executable, str(PROGRAM), how]
    return warm.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lines_of(process: subprocess.Popen[str]) -> list[str]:
    """Without what ``-v`` says of the start."""
    out, _ = process.communicate(timeout=100)
    return [line for line in out.splitlines() if " -m byteps_py." not in line and f"{PROGRAM} " not in line]


@pytest.mark.parametrize(("layout", "ranks"), [("-np 2", "0-1"), (CLUSTER, "0-3")])
def test_a_mismatch_is_shown_once_in_a_few_lines(layout: str, ranks: str) -> None:
    lines = lines_of(process := job("mismatch", layout))
    assert process.returncode == 1
    assert len(lines) < 20, lines
    text = "MismatchError: tensor 'w': rank 0 gave average of float32[3], rank 1 gave average of float32[4]"
    assert lines[-1].startswith(f"[{ranks}] byteps_py.errors.{text}"), lines
    assert sum("MismatchError" in line for line in lines) == 1, lines


@pytest.mark.parametrize("layout", ["-np 2", CLUSTER])
def test_an_exception_is_shown_once_and_last(layout: str) -> None:
    lines = lines_of(process := job("raises", layout))
    assert process.returncode == 1
    assert lines[-1] == "[1] ValueError: bad batch", lines
    assert sum("bad batch" in line for line in lines) == 2, lines  # its source line, and the error
    assert sum("Traceback" in line for line in lines) == 1, lines
    assert not any("PeerLostError" in line or "ERROR" in line or "WARNING" in line for line in lines), lines


def start(process: subprocess.Popen[str], ranks: int) -> dict[str, str]:
    """Wait until all are at work. The variables of the job."""
    assert process.stdout is not None
    seen, variables, up = "", dict[str, str](), set[str]()
    while len(up) < ranks:
        line = process.stdout.readline()
        seen += line
        assert line, seen
        if found := re.match(r"\[(\d+)\] up$", line):
            up.add(found[1])
        variables.update(re.findall(r"(DMLC_PS_ROOT_\w+|BYTEPS_JOB_ID)=(\S+)", line))
    return variables


@pytest.mark.parametrize("layout", ["-np 2", CLUSTER])
def test_ctrl_c_leaves_no_traceback(layout: str) -> None:
    process = job("trains", layout)
    start(process, 4 if layout is CLUSTER else 2)
    process.send_signal(signal.SIGINT)
    lines = lines_of(process)
    assert process.returncode == 130
    assert lines == ["bpslaunch: received SIGINT; passing it on and ending"]


@pytest.mark.parametrize(("layout", "ranks"), [("-np 2", "0-1"), (CLUSTER, "0-3")])
def test_ranks_of_a_job_that_is_stopped_say_why(layout: str, ranks: str) -> None:
    process = job("trains", layout)
    variables = start(process, 4 if layout is CLUSTER else 2)
    stop = [sys.executable, "-m", "byteps_py.cli", "stop", "--reason", "because"]
    warm.run(stop, 60, env=clean_environment(**variables)).check_returncode()
    lines = lines_of(process)
    assert process.returncode == 1
    assert lines[-1].startswith(f"[{ranks}] byteps_py.errors.PeerLostError: the job was stopped: because"), lines
    assert not any("BrokenPipe" in line or "lost" in line for line in lines[:-1]), lines


def test_a_journal_that_can_not_be_kept_is_no_taken_port(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "byteps_py.launch", "-np", "2", sys.executable, str(PROGRAM), "trains"]
    environ = clean_environment(BYTEPS_JOURNAL_DIR=str(tmp_path / "file" / "journal"))
    done = warm.run(command, 60, env=environ)
    assert done.returncode == 2
    assert done.stderr.count("the scheduler's journal") == 1, done.stderr
    assert "starting over" not in done.stderr
    assert done.stderr.endswith("bpslaunch: the scheduler can't begin; its own message is above\n")


FAILS = """
import atexit, sys, threading
from byteps_py.errors import PeerLostError
from byteps_py.session import failure_reports
failure_reports.shorten_tracebacks()
failure_reports.ends_at_once = sys.argv[2] == "at once"

class Kept:
    def __del__(self):
        print("taken apart")

kept = Kept()
kept.itself = kept
file = open(sys.argv[1], "w")
file.write("written")
atexit.register(lambda: print("at exit"))
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
print("said")
raise PeerLostError("rank 3 died")
"""


@pytest.mark.parametrize("way", ["at once", "as usual"])
def test_a_process_that_will_be_started_again_ends_at_once_and_in_order(way: str, tmp_path: Path) -> None:
    """``kept`` stands for all that an interpreter takes apart."""
    pipe, file = NoticePipe(), tmp_path / "file"
    ran = subprocess.run(
        [sys.executable, "-c", FAILS, str(file), way],
        env=clean_environment(**{NOTICE_VARIABLE: pipe.name}), pass_fds=(pipe.writer,), timeout=60, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    os.close(pipe.writer)
    (notice,) = pipe.read()
    pipe.close()
    assert (ran.returncode, ran.stderr, file.read_text()) == (1, "", "written")
    assert "PeerLostError: rank 3 died" in notice.text
    assert ran.stdout.splitlines() == ["said", "thread", "at exit", *(["taken apart"] if way == "as usual" else [])]
