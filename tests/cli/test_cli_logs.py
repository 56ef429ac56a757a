"""`bps logs`: the output that launchers have kept, of a whole cluster and of single roles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.clusters import clean_environment
from support.launching import launched

from byteps_py.cli.__main__ import main as bps
from byteps_py.launch.__main__ import log_folder
from byteps_py.launch.command_line import parse


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in list(os.environ):
        if name.startswith(("DMLC_", "BYTEPS_")):
            monkeypatch.delenv(name)


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    for member, stream, text in (
        ("worker-0/rank.0.0", "stdout", "step 1\nstep 2\n"),
        ("worker-0/rank.0.0", "stderr", "careful\n"),
        ("worker-1/rank.1.0", "stdout", "step 1\nhalf a li"),
        ("scheduler/scheduler", "stderr", ""),
    ):
        (tmp_path / "logs" / member).mkdir(parents=True, exist_ok=True)
        (tmp_path / "logs" / member / stream).write_text(text)
    (tmp_path / "logs" / "stdout").write_text("not of a process")
    return tmp_path / "logs"


def test_all_lines_have_their_process(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bps(["logs", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "[worker-0/rank.0.0 stderr] careful",
        "[worker-0/rank.0.0] step 1",
        "[worker-0/rank.0.0] step 2",
        "[worker-1/rank.1.0] step 1",
        "[worker-1/rank.1.0] half a li",
    ]


def test_a_part_of_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bps(["logs", str(folder), "--member", "worker-*", "-n", "1", "--json"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["stream"], each["line"]) for each in said] == [
        ("stderr", "careful"), ("stdout", "step 2"), ("stdout", "half a li"),
    ]  # fmt: skip
    assert bps(["logs", str(folder), "--stderr", "-n", "0"]) == 0
    assert capsys.readouterr().out == ""
    assert bps(["logs", str(folder), "--member", "rank.7"]) == 1
    assert "matches --member='rank.7': scheduler/scheduler, worker-0/rank.0.0, worker-1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere is no folder: name that of bpslaunch --log-dir"),
        ([], "no job of yours on this machine keeps its output. Start it with bpslaunch --log-dir DIR"),
        (["-n", "-1"], "--lines=-1: give a number of lines from 0"),
    ],
)
def test_what_can_not_be_read(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bps(["logs", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_lines_are_followed_also_into_a_new_file(folder: Path) -> None:
    command = [sys.executable, "-m", "byteps_py.cli", "logs", str(folder), "-f", "-n", "1", "--member", "*rank*"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[-1] == "[worker-1/rank.1.0] step 1\n"  # "half a li" has no end yet
        with (folder / "worker-1/rank.1.0/stdout").open("a") as file:
            file.write("ne\n")
        assert process.stdout.readline() == "[worker-1/rank.1.0] half a line\n"
        (folder / "worker-2/rank.2.0").mkdir(parents=True)
        (folder / "worker-2/rank.2.0/stdout").write_text("joined\n")
        assert process.stdout.readline() == "[worker-2/rank.2.0] joined\n"
    finally:
        process.kill()
        process.communicate()


# ---- what bpslaunch writes -------------------------------------------------------------------------------------


def test_the_output_of_a_job_that_runs_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = "import time; from byteps_py.session import open_session\n"
    program += "session = open_session(); print('there', flush=True); time.sleep(90)"
    with launched(
        "-np", "1", "--machines", "2", "--log-dir", str(tmp_path / "kept"), sys.executable, "-c", program,
        XDG_RUNTIME_DIR=str(tmp_path),
    ) as job:  # fmt: skip
        assert sorted((job.line(), job.line())) == ["[0] there", "[1] there"]
        assert bps(["logs", "--member", "rank.*"]) == 0
        assert capsys.readouterr().out == "[rank.0] there\n[rank.1] there\n"
        job.process.terminate()
        job.finish()


def test_roles_that_share_a_folder_have_folders_of_their_own(tmp_path: Path) -> None:
    own = {
        role: log_folder(tmp_path, {"DMLC_ROLE": role, "DMLC_WORKER_ID": "1"}, False).name
        for role in ("scheduler", "worker", "joint", "server")
    }
    assert own.pop("server").startswith("server-")
    assert own == {"scheduler": "scheduler", "worker": "worker-1", "joint": "joint-1"}
    assert log_folder(tmp_path, {}, True) == tmp_path


def test_the_variable_and_the_options_say_where() -> None:
    command = ["-np", "1", "true"]
    given = parse(command, {"BYTEPS_LOG_DIR": "/kept"})
    assert (given.log_dir, given.how.folder) == (Path("/kept"), None)
    assert given.variables["BYTEPS_LOG_DIR"] == "/kept"
    given = parse(["--output-filename", "/out", *command], {"BYTEPS_LOG_DIR": "/kept"})
    assert (given.log_dir, given.how.folder, given.variables["BYTEPS_LOG_DIR"]) == (None, Path("/out"), "/out")
    command = [sys.executable, "-m", "byteps_py.launch", "--log-dir", "a", "--output-filename", "b", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean_environment())
    assert done.returncode == 2
    assert "--log-dir and --output-filename both say where output is kept" in done.stderr
