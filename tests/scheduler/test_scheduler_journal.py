"""The journal's file: what a crash may leave of it, what is damage, and whose it is."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import stat
from pathlib import Path

import pytest

from byteps_py.config.settings import Settings
from byteps_py.errors import JournalError
from byteps_py.proto.journal_pb2 import JournalFrame, JournalHeader, JournalRecord
from byteps_py.scheduler.core import EpochSeen
from byteps_py.scheduler.member_links import journal as files
from byteps_py.scheduler.member_links.journal import Journal, begin, compact, journal_path, restore, thaw
from byteps_py.scheduler.roster import ClusterConfig


def written(path: Path, frames: int = 3) -> bytes:
    journal = Journal(path)
    journal.begin(JournalFrame(header=JournalHeader(version=1, config="{}")))
    for number in range(frames):
        for _ in range(number + 1):
            journal.append(JournalRecord(at_s=number, stop="x" * 50))
        assert journal.unwritten
        journal.flush()
    journal.close()
    return path.read_bytes()


def times(path: Path) -> list[float]:
    journal = Journal(path)
    journal.close()
    return [record.at_s for frame in journal.frames for record in frame.records]


def test_records_that_are_written_are_read(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path)
    assert times(path) == [0, 1, 1, 2, 2, 2]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_frame_cut_off_anywhere_is_dropped_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "j"
    data = written(path)
    sizes = {len(data)}
    for length in range(len(data)):
        path.write_bytes(data[:length])
        found = times(path)
        assert found in ([], [0], [0, 1, 1])
        sizes.add(path.stat().st_size)
    assert len(sizes) == 6  # nothing, the magic line, and each frame: nothing is left of what was dropped
    path.write_bytes(data[:-1])
    journal = Journal(path)
    journal.append(JournalRecord(at_s=7))
    journal.flush()
    journal.close()
    assert times(path) == [0, 1, 1, 7]


def test_a_file_that_grew_before_its_content_was_there_ends_where_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "j"
    data = written(path)
    path.write_bytes(data + bytes(4096))
    assert times(path) == [0, 1, 1, 2, 2, 2]


def test_damage_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "j"
    data = written(path)
    last = data.rindex(b"x" * 50) - 3 * 62
    rng = random.Random(3)
    for _ in range(200):
        at = rng.randrange(last)
        broken = bytearray(data)
        broken[at] ^= 1 << rng.randrange(8)
        path.write_bytes(broken)
        in_length = any(start <= at < start + 4 for start in _frame_starts(data))
        with contextlib.suppress(JournalError) if in_length else pytest.raises(JournalError, match=str(path)):
            # A length that reaches beyond the end of the file looks like a frame that was cut off.
            assert times(path) in ([], [0], [0, 1, 1])


def _frame_starts(data: bytes) -> list[int]:
    starts, at = [], len(b"byteps journal 1\n")
    while at < len(data):
        starts.append(at)
        at += 8 + int.from_bytes(data[at : at + 4], "little")
    return starts


def test_random_bytes_are_no_journal() -> None:
    rng = random.Random(5)
    for _ in range(2000):
        data = rng.randbytes(rng.randrange(200))
        if data:
            with pytest.raises(JournalError):
                files.decode(data)
        frames, good = files.decode(b"byteps journal 1\n" + rng.randbytes(rng.randrange(12)))
        assert (frames, good) == ([], 17)


def test_two_schedulers_can_not_have_one_journal(tmp_path: Path) -> None:
    first = Journal(tmp_path / "j")
    with pytest.raises(JournalError, match=r"is in use: another scheduler of this job runs"):
        Journal(tmp_path / "j")
    first.close()
    Journal(tmp_path / "j").close()


def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(b"")
    path.chmod(0o644)
    with pytest.raises(JournalError, match=r"must be a file that only its owner can read"):
        Journal(path)
    path.unlink()
    path.symlink_to(tmp_path / "other")
    with pytest.raises(JournalError, match="can't be used"):
        Journal(path)


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(scheduler_host="h", scheduler_port=9000, job_id="../a b", journal_dir=str(tmp_path / "own"))
    path = journal_path(settings)
    assert path is not None
    assert path.parent == tmp_path / "own"
    assert path.name.startswith(".._a_b-9000-")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    usual = journal_path(Settings(scheduler_host="h", scheduler_port=9000))
    assert usual is not None
    assert usual.parent == tmp_path / "state" / "byteps"
    assert stat.S_IMODE(usual.parent.stat().st_mode) == 0o700
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    other = journal_path(Settings(scheduler_host="h", scheduler_port=9001))
    assert other is not None
    assert other.parent == tmp_path / f"byteps-{os.getuid()}"
    other.parent.chmod(0o777)
    assert journal_path(Settings(scheduler_host="h", scheduler_port=9001)) is None
    with pytest.raises(JournalError, match="can't be used: Not a directory"):
        journal_path(Settings(journal_dir=str(tmp_path / "file" / "below")))
    assert journal_path(Settings(journal_dir="none")) is None


def test_journals_of_killed_jobs_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "byteps"
    folder.mkdir(mode=0o700)
    used = Journal(folder / "used.journal")
    for name in ("old.journal", "new.journal", "other.txt"):
        (folder / name).write_bytes(b"")
    for name in ("old.journal", "used.journal", "other.txt"):
        os.utime(folder / name, (1e9, 1e9))
    journal_path(Settings(scheduler_host="h", scheduler_port=9000))
    assert {path.name for path in folder.iterdir()} == {"used.journal", "new.journal", "other.txt"}
    used.close()


def test_the_journal_of_a_job_that_was_configured_otherwise_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path)
    restored = begin(ClusterConfig(num_workers=2, job="j"), journal, 3, 1.0)
    assert restored.links.core.job.roster.latest_epoch == 3
    journal.flush()
    journal.close()
    journal = Journal(path)
    restored = restore(ClusterConfig(num_workers=2, job="j", heartbeat_timeout_s=9.0), journal)
    assert (restored.links.restarts, restored.links.core.job.roster.latest_epoch, restored.at_s) == (1, 3, 1.0)
    journal.close()
    journal = Journal(path)
    restored = restore(ClusterConfig(num_workers=3, job="j"), journal)
    assert (restored.links.restarts, restored.links.core.job.roster.latest_epoch) == (0, 0)
    journal.delete()
    journal.close()
    assert not path.exists()


def test_a_long_journal_is_replaced_by_a_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "j"
    config = ClusterConfig(num_workers=2, job="j")
    journal = Journal(path, compact_bytes=300)
    links = begin(config, journal, 3, 1.0).links
    while not journal.is_long:
        links.handle(EpochSeen(4), 2.0)
        journal.flush()
    inode = path.stat().st_ino
    (tmp_path / "j.new").write_bytes(b"of a crash")
    compact(config, journal, links, 5.0)
    assert path.stat().st_ino != inode
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not journal.is_long
    with pytest.raises(JournalError, match="in use"):
        Journal(path)
    links.handle(EpochSeen(6), 7.0)
    journal.flush()
    journal.close()
    journal = Journal(path)
    restored = restore(config, journal)
    assert (restored.links.core.job.roster.latest_epoch, restored.at_s, restored.records) == (6, 7.0, 1)
    journal.close()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("wanted", [os.system, pytest.raises, files.journal_path, JournalError])
def test_a_snapshot_names_only_allowed_classes(wanted: object) -> None:
    with pytest.raises(JournalError):
        thaw(pickle.dumps({"version": wanted}))
    with pytest.raises(JournalError):
        thaw(random.Random(1).randbytes(50))
    with pytest.raises(JournalError, match=r"byteps_py 0\.0 wrote"):
        thaw(pickle.dumps({"version": "0.0"}))
