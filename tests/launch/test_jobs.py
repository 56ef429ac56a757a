"""`bps status` without a word of where the scheduler is: the jobs of this machine, and only those that live."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launching import launched
from support.schedulers import TIMEOUT_S, Scheduler

from byteps_py import __version__
from byteps_py.cli.__main__ import main as bps
from byteps_py.config.settings import Settings
from byteps_py.launch.command_line import parse
from byteps_py.system import jobs

HOLDS = "import sys; from byteps_py.system import jobs; from byteps_py.config.settings import Settings\n"
HOLDS += "with jobs.announced(Settings(job_id='held')): print('there', flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in list(os.environ):
        if name.startswith(("DMLC_", "BYTEPS_", "PS_")):
            monkeypatch.delenv(name)
    return tmp_path / "byteps"


@contextlib.contextmanager
def scheduler(**changes: object) -> Iterator[Scheduler]:
    running = Scheduler(**changes)
    try:
        yield running.wait_listening()
    finally:
        running.close()


def notes(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def test_a_note_is_there_while_its_job_is(folder: Path) -> None:
    settings = Settings(scheduler_host="127.0.0.1", scheduler_port=9123, job_id="a", secret="is never written")
    assert jobs.find() == []
    with jobs.announced(settings), jobs.announced(settings):
        assert len(notes(folder)) == 2
        (job,) = jobs.find()
        assert (job.address, job.job_id, job.pid) == ("127.0.0.1:9123", "a", os.getpid())
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for path in notes(folder):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert "never written" not in path.read_text()
    assert not folder.exists()


def test_the_note_of_a_killed_process_is_taken_away(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        assert [job.job_id for job in jobs.find()] == ["held"]
        process.kill()
        process.wait(TIMEOUT_S)
        assert len(notes(folder)) == 1
        assert jobs.find() == []
    assert not folder.exists()


def test_files_that_are_not_notes_are_left_out(folder: Path) -> None:
    with jobs.announced(Settings(job_id="mine")):
        (path,) = notes(folder)
        for number, text in enumerate(("", "[]", '{"pid": 1}', "\0")):
            (folder / f"{number}.job").write_text(text)
        (folder / "4.job").symlink_to(path)
        path.with_name("5.txt").write_text("not ours")
        assert [job.job_id for job in jobs.find()] == ["mine"]


def test_a_folder_that_others_can_change_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder.parent))
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with jobs.announced(Settings(job_id="mine")):
        assert notes(folder) == []
        assert [job.job_id for job in jobs.find()] == ["mine"]
    assert "can be accessed by others (mode 0777; chmod 700 makes it private)" in caplog.text


def test_the_only_job_is_found(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    with scheduler(num_workers=2, job_id="j") as only:
        assert bps(["status"]) == 0
        assert "0 of 2 workers" in capsys.readouterr().out
        assert bps(["status", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["state"] == "forming"
        assert bps(["stop"]) == 0
        assert f"the scheduler at {only.settings.scheduler_address} has told" in capsys.readouterr().out
        assert only.ended()[0] == 0
    assert not folder.exists()
    assert bps(["status"]) == 1
    assert "no job of yours runs on this machine" in capsys.readouterr().err


def test_a_secret_is_read_where_the_job_reads_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    with scheduler(num_workers=1, job_id="j", secret_file=str(secret)) as running:
        for arguments in ([], ["--scheduler", running.settings.scheduler_address]):
            assert bps(["status", *arguments]) == 0, capsys.readouterr()


def test_of_several_jobs_all_are_shown_and_one_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with scheduler(num_workers=2, job_id="one") as one, scheduler(num_workers=3) as other:
        assert bps(["status"]) == 0
        shown = capsys.readouterr().out
        assert f"── the job of the scheduler at {one.settings.scheduler_address} (BYTEPS_JOB_ID=one)\n" in shown
        assert f"── the job of the scheduler at {other.settings.scheduler_address}\n" in shown
        assert "0 of 2 workers" in shown
        assert "0 of 3 workers" in shown
        for command in (["stop"], ["status", "--json"]):
            assert bps(command) == 2
            asked = capsys.readouterr().err
            assert "which job? Choose one with --scheduler HOST:PORT:\n  the job of the scheduler at 127.0" in asked
            assert re.search(rf"process \d+, started \d+ s ago in {os.getcwd()} \(this folder\)", asked), asked
        assert bps(["stop", "--scheduler", one.settings.scheduler_address]) == 0
        assert one.ended()[0] == 0
        capsys.readouterr()
        assert bps(["status"]) == 0
        assert capsys.readouterr().out.startswith("forming: 0 of 3 workers")
        other.kill()
        assert bps(["status"]) == 1


@pytest.mark.slow
def test_a_job_is_named_by_its_launcher_and_shown_with_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    program = "import byteps_py as bps; bps.init(); print('there', flush=True); import time; time.sleep(90)"
    with launched("-np", "1", "--servers", "1", "--machines", "2", sys.executable, "-c", program) as job:
        lines = [job.line(), job.line()]
        assert all(line.endswith("there") for line in lines)
        [note] = jobs.find()
        assert bps(["status"]) == 0
        capsys.readouterr()
        with jobs.announced(Settings(scheduler_host="127.0.0.1", scheduler_port=9)):
            assert bps(["status", "--timeout", "1"]) == 1
        shown = capsys.readouterr().out
        assert f"── the job of the scheduler at {note.address} (" in shown
        assert "bpslaunch -np 1 --servers 1 --machines 2 " in shown
        assert "it can't be reached from here, and may run in another network namespace" in shown
        job.process.terminate()
        _, _, err = job.finish()
    assert f"bpslaunch: job at {note.address}\n" in err


def test_a_job_without_a_scheduler_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with jobs.announced(dataclasses.replace(Settings(), local_size=2)):
        assert bps(["status"]) == 2
        said = capsys.readouterr().err
    assert f"a job of 2 ranks on this machine alone, process {os.getpid()} has no scheduler" in said


@pytest.mark.parametrize("program", [bps, lambda arguments: parse(arguments, {})])
def test_versions(program: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program(["--version"])  # type: ignore[operator]
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"byteps_py {__version__}\n"


@pytest.mark.parametrize("has_torch", [True, False])
def test_check_build(has_torch: bool) -> None:
    hide = "import importlib.metadata as m; real = m.version\n"
    hide += "def version(name):\n    if name == 'torch': raise m.PackageNotFoundError(name)\n    return real(name)\n"
    program = f"{'' if has_torch else hide + 'm.version = version'}\nimport sys\n"
    program += "from byteps_py.launch.__main__ import main\n"
    program += "try: main(['--check-build'])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"byteps_py {__version__}, Python ")
    assert ("    [X] PyTorch 2." in done.stdout) == has_torch
    assert ("    [ ] PyTorch: pip install '.[torch]'" in done.stdout) == (not has_torch)
    rdma = re.search(r"    \[X\] TCP, between machines\n    \[(.)\] RDMA(.*)\n", done.stdout)
    assert rdma is not None
    assert rdma[2] == ": pip install '.[rdma]'" if rdma[1] == " " else rdma[2].endswith(": DMLC_ENABLE_RDMA=1")
    assert done.stdout.endswith("\nFalse\n")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, with the runtime folder in it, as on a machine without a login session."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def _take(folder: Path, how: str, target: Path) -> None:
    """What another user makes of the runtime folder's name before its owner comes."""
    if how == "FIFO":
        os.mkfifo(folder)
    elif how == "link":
        folder.symlink_to(target)
    elif how == "dangling":
        folder.symlink_to(target / "nothing")
    elif how == "file":
        folder.write_text("")
    else:
        folder.mkdir()
        os.mkfifo(folder / "a.job")
        (folder / "mine.job").symlink_to(target / "mine.job")
        folder.chmod(0o755)


@pytest.mark.parametrize("how", ["FIFO", "link", "dangling", "file", "folder"])
def test_the_runtime_folder_of_another_user_costs_one_warning(how: str, temporary: Path) -> None:
    target = temporary / "work"
    target.mkdir(mode=0o700)
    mine = target / "mine.job"
    mine.write_text("a batch job's script")
    _take(temporary / f"byteps-{os.getuid()}", how, target)
    look = "import sys; from byteps_py.system import jobs; print([job.job_id for job in jobs.find()])"
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdin=-1, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        (instead,) = temporary.glob(f"byteps-{os.getuid()}-*")
        assert stat.S_IMODE(instead.stat().st_mode) == 0o700
        found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=TIMEOUT_S)
        assert (found.stdout, found.stderr) == ("['held']\n", "")
        _, said = process.communicate("", TIMEOUT_S)
    assert said.count("\n") == 1, said
    assert f"the notes by which `bps` finds this job are in {instead}" in said
    assert mine.read_text() == "a batch job's script"
    assert not instead.exists()
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert found.stdout == "[]\n"
    assert found.stderr.count("\n") == 1, found.stderr
    assert "notes of jobs are not looked for there" in found.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_that_belongs_to_another_user(temporary: Path, caplog: pytest.LogCaptureFixture) -> None:
    taken = temporary / "byteps-0"
    taken.mkdir(mode=0o700)
    os.chown(taken, 12345, -1)
    false = temporary / "byteps-0-friendly"  # looks like a folder that was made instead
    false.mkdir(mode=0o700)
    os.chown(false, 12345, -1)
    with jobs.announced(Settings(job_id="mine")):
        assert [job.job_id for job in jobs.find()] == ["mine"]
        assert notes(taken) == notes(false) == []
    assert "belongs to another user (uid 12345)" in caplog.text


def test_files_in_the_runtime_folder_that_are_not_notes_are_not_waited_for(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / "a.job")
    (folder / "b.job").mkdir()
    with jobs.announced(Settings(job_id="mine")):
        assert [job.job_id for job in jobs.find()] == ["mine"]
    assert len(notes(folder)) == 2


@pytest.mark.slow
def test_a_launcher_warns_for_its_services(temporary: Path, tmp_path: Path) -> None:
    os.mkfifo(temporary / f"byteps-{os.getuid()}")
    program = [sys.executable, "-m", "byteps_py.launch", "-np", "1", "--servers", "1", sys.executable, "-c"]
    script = "import byteps_py as bps; bps.init(); print(bps.size()); bps.shutdown()"
    done = subprocess.run([*program, script], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"
    assert done.stderr.count("finds this job") == 1, done.stderr
