"""The flight recorder's memory: what is kept, read by others, and refused."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from byteps_py.config.settings import Settings
from byteps_py.errors import UsageError
from byteps_py.system.flight_dump import aligned, dump_folder, open_flight_dump, to_torch, write_dump
from byteps_py.system.flight_recorder import (
    OPERATIONS,
    FlightRecorder,
    copy_recording,
    parse_recording,
)

SUM, SEND = OPERATIONS.index("all_reduce"), OPERATIONS.index("send")


@pytest.fixture
def recorder():
    made = FlightRecorder(8, {"rank": 3, "size": 16})
    yield made
    made.close()


def test_a_ring_keeps_the_latest(recorder: FlightRecorder) -> None:
    group = recorder.group("g", "mesh_dp", (1, 3))
    numbers = [recorder.begin(group, SUM, 4 * at, (1, (at,)), (1, (at,))) for at in range(20)]
    recorder.start(numbers[-1])
    recorder.end(numbers[0])  # overwritten: without effect
    recorder.end(numbers[-2])
    found = recorder.read()
    assert [span.sequence for span in found.spans] == list(range(13, 21))
    assert [span.state for span in found.spans[-2:]] == ["completed", "started"]
    assert {span.state for span in found.spans[:-2]} == {"scheduled"}
    assert found.lost == 12
    assert (found.about["rank"], found.about["size"], found.about["pid"]) == (3, 16, os.getpid())
    span = found.spans[0]
    assert (span.input_shape, span.nbytes, span.group.ranks, span.group.dimension) == ((12,), 48, (1, 3), "dp")


def test_shapes_of_any_size(recorder: FlightRecorder) -> None:
    group = recorder.group("g", "", (0, 1))
    for shape in ((), (2, 3, 4, 5), (2, 3, 4, 5, 6), (1 << 33,), None):
        recorder.begin(group, SUM, 0, (1, shape), (2, shape))
    found = [span.input_shape for span in recorder.read().spans]
    assert found == [(), (2, 3, 4, 5), (6, 4, 5, 6), (2, 0), None]


READER = """
import sys
from byteps_py.system.flight_recorder import read_recording

for _ in range(30):
    found = read_recording(int(sys.argv[1]))
    assert len(found.spans) <= 8
    for span in found.spans:
        assert (span.input_shape, span.output_shape, span.group.name, span.nbytes) == ((4, 4), (4, 4), "g", 64), span
print("good")
"""


def test_another_process_reads_it_while_it_is_written(recorder: FlightRecorder) -> None:
    ending = threading.Event()

    def write() -> None:
        group = recorder.group("g", "", (0, 1))
        while not ending.is_set():
            recorder.end(recorder.begin(group, SUM, 64, (1, (4, 4)), (1, (4, 4))))

    threads = [threading.Thread(target=write) for _ in range(2)]
    for each in threads:
        each.start()
    reader = [sys.executable, "-c", READER, str(recorder.fd)]
    try:
        done = subprocess.run(reader, pass_fds=(recorder.fd,), capture_output=True, text=True, timeout=60, check=False)
    finally:
        ending.set()
        for each in threads:
            each.join()
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr


def test_a_withdrawn_operation_leaves_no_gap(recorder: FlightRecorder) -> None:
    group = recorder.group("name", "by name", (0, 1), "name")
    recorder.withdraw(recorder.begin(group, SUM), group)
    recorder.end(recorder.begin(group, SUM), has_failed=True)
    (span,) = recorder.read().spans
    assert (span.sequence, span.state) == (1, "failed")
    (entry,) = to_torch(recorder.read())["entries"]
    assert (entry["state"], entry["retired"], entry["error"]) == ("started", True, True)


def test_more_groups_than_there_is_room_for(recorder: FlightRecorder) -> None:
    ranks = tuple(range(0, 400_000, 2))
    made = [recorder.group(str(at), "", ranks) for at in range(10)]
    assert made[0].id == 1
    assert made[-1].id == 0
    for group in (made[0], made[-1]):
        recorder.begin(group, SUM)
    first, last = recorder.read().spans
    assert first.group.ranks == ranks
    assert last.group.name == "unknown"


@pytest.mark.parametrize(
    "data",
    [b"", b"x" * 5000, pickle.dumps({}), b"BPSFLT01" + b"\xff" * 5000],
    ids=["empty", "other", "pickle", "huge"],
)
def test_what_is_no_recording(data: bytes) -> None:
    with pytest.raises(UsageError, match="no recording of a flight recorder"):
        parse_recording(data)


def test_a_recording_that_is_cut_off(recorder: FlightRecorder) -> None:
    recorder.begin(recorder.group("g", "", (0, 1)), SUM)
    data = os.pread(recorder.fd, 1 << 20, 0)
    assert len(parse_recording(data[: 4096 + 8 * 128 + 100]).spans) == 1  # zeros are missing
    for nbytes in (3, 20, 50, 4200, 4096 + 8 * 128 + 2):
        with pytest.raises(UsageError):
            parse_recording(data[:nbytes])


def test_nothing_is_recorded_after_the_end(recorder: FlightRecorder) -> None:
    group = recorder.group("g", "", (0, 1))
    number = recorder.begin(group, SUM)
    recorder.close()
    recorder.end(number)
    recorder.begin(group, SUM)
    assert recorder.group("h", "", (0, 1)).id == 0
    with pytest.raises(UsageError, match="closed"):
        recorder.read()


def test_messages_have_the_places_in_their_pair(recorder: FlightRecorder, tmp_path: Path) -> None:
    recorder.begin(recorder.group("0:7->3 tag 2", "pp", (3, 7), "pair"), SEND)
    path = write_dump(recorder.read(), tmp_path / "new" / "job")
    assert path.name == "rank_3"
    (entry,) = pickle.loads(path.read_bytes())["entries"]
    assert (entry["profiling_name"], entry["is_p2p"], entry["p2p_seq_id"]) == ("gloo:send 1->0", True, 1)
    assert [each.name for each in path.parent.iterdir()] == ["rank_3"]


def test_only_the_first_error_is_dumped(tmp_path: Path) -> None:
    settings = Settings(job_id="a/job", flight_recorder_dir=str(tmp_path), flight_recorder_size=4)
    assert dump_folder(settings) == tmp_path / "a_job"
    found = open_flight_dump(settings, {"rank": 0})
    assert found is not None
    try:
        found.dump_at(ValueError("first"), is_end=False)
        (tmp_path / "a_job" / "rank_0").unlink()
        found.dump_at(ValueError("second"))
        assert not (tmp_path / "a_job" / "rank_0").exists()
    finally:
        found.close()
    assert open_flight_dump(Settings(flight_recorder_size=0), {}) is None


def test_a_folder_that_cant_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    found = open_flight_dump(Settings(flight_recorder_dir=str(tmp_path / "file"), job_id="j"), {"rank": 0})
    assert found is not None
    try:
        found.dump_at(ValueError("of the rank"))
    finally:
        found.close()
    assert "could not be written" in caplog.text


def test_the_default_folder_keeps_those_of_some_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for at in range(25):
        found = open_flight_dump(Settings(job_id=f"job{at:02}"), {"rank": 0})
        assert found is not None
        try:
            found.dump_at(ValueError())
        finally:
            found.close()
    kept = sorted(each.name for each in (tmp_path / "byteps" / "flight-recorder").iterdir())
    assert len(kept) == 20
    assert kept[-1] == "job24"


def test_dumps_of_several_ranks_begin_with_the_same_operation() -> None:
    """A rank with more operations has overwritten more of those that it has in common with others."""
    busy, calm = FlightRecorder(8, {"rank": 0}), FlightRecorder(8, {"rank": 1})
    try:
        for _ in range(6):
            for recorder in (busy, calm):
                recorder.end(recorder.begin(recorder.group("both", "", (0, 1)), SUM))
            busy.end(busy.begin(busy.group("other", "", (0, 2)), SUM))
        calm.begin(calm.group("alone", "", (1, 3)), SUM)
        found = aligned([parse_recording(copy_recording(each.fd)) for each in (busy, calm)])
    finally:
        busy.close()
        calm.close()
    common = [[span.sequence for span in each.spans if span.group.name == "both"] for each in found]
    assert common == [[3, 4, 5, 6], [3, 4, 5, 6]]
    assert [span.sequence for span in found[1].spans if span.group.name == "alone"] == [1]
    assert to_torch(found[1], first_id=0)["entries"][0]["record_id"] == 0
