"""What ranks do between operations, by a real flight recorder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from byteps_py.errors import UsageError
from byteps_py.system.flight_recorder import OPERATIONS, FlightGroup, FlightRecorder, FlightSpan, RecordingTail
from byteps_py.system.shm import Segment
from byteps_py.tensors import DType, TensorSpec
from byteps_py.worker.core.pace import FIRST_OPERATION, DeliveredResult, OwnTimes

ALL_REDUCE = OPERATIONS.index("all_reduce")
GROUP = FlightGroup(1, "g", "mesh_dp", (0, 1))
MS = 1_000_000


@pytest.fixture
def recorder() -> Iterator[FlightRecorder]:
    recorder = FlightRecorder(64, {"rank": 0})
    yield recorder
    recorder.close()


def span(number: int, step: int, begin_ms: int, end_ms: int, group: FlightGroup = GROUP) -> FlightSpan:
    return FlightSpan(
        number, group, number, "all_reduce", 4, step, begin_ms * MS, begin_ms * MS, end_ms * MS, "completed", (), (),
        "Float", "Float",
    )  # fmt: skip


def test_a_tail_gives_each_operation_once_after_it_has_ended(recorder: FlightRecorder) -> None:
    tail = RecordingTail(recorder.fd)
    group = recorder.group("g", "mesh_dp", (0, 1))
    first, second = recorder.begin(group, ALL_REDUCE), recorder.begin(group, ALL_REDUCE)
    recorder.end(second)
    assert tail.read() == []
    recorder.end(first)
    assert [each.number for each in tail.read()] == [first, second]
    assert tail.read() == []


def test_a_tail_skips_what_was_overwritten_and_what_never_ends(recorder: FlightRecorder) -> None:
    tail = RecordingTail(recorder.fd)
    group = recorder.group("g", "mesh_dp", (0, 1))
    for _ in range(200):
        recorder.end(recorder.begin(group, ALL_REDUCE))
    read = [each.number for each in tail.read()]
    assert read == sorted(read)
    assert read[-1] == 200
    assert 30 <= len(read) <= 64
    recorder.begin(group, ALL_REDUCE)  # hangs
    for _ in range(20):
        recorder.end(recorder.begin(group, ALL_REDUCE))
    assert next(each.number for each in tail.read()) == 202


def test_a_tail_of_something_else_is_an_error() -> None:
    segment = Segment.create(8192)
    with pytest.raises(UsageError, match="no recording"):
        RecordingTail(segment.fd)
    segment.close_descriptor()


def test_own_time_lies_between_operations() -> None:
    own = OwnTimes(1, warm_up_s=0)
    assert own.report() is None
    own.add([span(1, 0, 0, 10), span(2, 0, 30, 40), span(3, 1, 100, 110), span(4, 1, 105, 130)])
    report = own.report()
    assert report is not None
    assert (report.rank, report.stage) == (1, 0)
    assert report.elapsed_s == pytest.approx(0.12)
    # 20 before the second, 60 before the first of the next step; the fourth began while the third went on.
    assert report.own_s == pytest.approx(0.085)
    parts = {part.kind: part for part in report.parts}
    assert parts[FIRST_OPERATION].count == 1
    assert parts[FIRST_OPERATION].own_s == pytest.approx(0.06)
    assert own.report() is None


def test_time_counts_once_while_a_long_operation_goes_on() -> None:
    own = OwnTimes(1, warm_up_s=0)
    own.add([span(1, 0, 0, 10), span(2, 0, 20, 100), *(span(3 + n, 0, 30 + 10 * n, 31 + 10 * n) for n in range(5))])
    report = own.report()
    assert report is not None
    assert report.elapsed_s == pytest.approx(0.09)
    assert report.own_s == pytest.approx(0.06)  # 10 before the second, 50 until the last one began


def test_the_stage_is_the_place_in_the_pipelines_group() -> None:
    own = OwnTimes(1, warm_up_s=0)
    own.add([span(1, 0, 0, 10), span(2, 0, 20, 30, FlightGroup(2, "p", "mesh_pp", (0, 1)))])
    report = own.report()
    assert report is not None
    assert report.stage == 1


def test_the_first_seconds_do_not_count() -> None:
    own = OwnTimes(1, warm_up_s=0.1)
    own.add([span(1, 0, 0, 10), span(2, 0, 90, 95), span(3, 1, 120, 130)])
    assert own.report() is None  # what began before the warm-up was over is compared with nothing
    own.add([span(4, 2, 150, 160)])
    report = own.report()
    assert report is not None
    assert report.elapsed_s == pytest.approx(0.03)
    assert report.own_s == pytest.approx(0.02)


def test_a_rank_that_takes_a_delivered_result_late_has_held_itself_up() -> None:
    gradient = FlightGroup(2, "gradient", "by name", (0, 1), "name")
    other = FlightGroup(3, "gradient of ranks 0-1", "by name", (0, 1), "name")
    spec = TensorSpec("gradient", DType.FLOAT32, (1,))
    own = OwnTimes(0, warm_up_s=0)
    own.add_deliveries([DeliveredResult(spec, 0.013), DeliveredResult(spec, 0.035)])
    # Of 300 ms it was suspended for 260, from before its second result was there.
    own.add([span(1, 0, 0, 14, gradient), span(2, 0, 24, 300, gradient), span(3, 0, 305, 310, gradient)])
    report = own.report()
    assert report is not None
    assert report.own_s == pytest.approx(0.011 + 0.270)
    assert report.elapsed_s == pytest.approx(0.310 - 0.013)
    own.add_deliveries([DeliveredResult(spec, 0.312)])
    # Operations of other groups, and those between ranks, end when the rank says so.
    own.add([span(4, 0, 311, 330, other), span(5, 0, 332, 340)])
    report = own.report()
    assert report is not None
    assert report.own_s == pytest.approx(0.001 + 0.002)
