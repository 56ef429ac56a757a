"""The price of slow workers: traces whose price is known, published ones, and traces that are damaged."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.clusters import ROOT
from support.documents import Page, commands_of

from byteps_py.cli.__main__ import main
from byteps_py.errors import UsageError
from byteps_py.tools.what_if import COLUMNS, Operation, read_trace, what_if

#: Traces of two real jobs with what a published analysis has found (of bytedance-seed, Apache-2.0).
PUBLISHED = ROOT.parent / "shared" / "data" / "straggler"
FORWARD_S, BACKWARD_S, SENT_S, SUM_S = 1.0, 2.0, 0.25, 0.5


def trace(steps: int = 3, slow: dict[tuple[int, int], float] | None = None) -> list[Operation]:
    """Two copies of two stages, two micro-batches in a step: all forward passes, then all backward passes. Each step
    ends with a sum over the copies of each stage. ``slow``: factors of workers' passes. Each worker's clock has an
    origin of its own for its copy."""
    slow = slow or {}
    found: list[Operation] = []
    for step in range(steps):
        ends: dict[int, list[float]] = {0: [], 1: []}
        for dp in range(2):
            first, last = (slow.get((dp, stage), 1.0) for stage in range(2))
            rows: list[tuple[int, str, float, float, int]] = []
            sent = [FORWARD_S * first * (number + 1) for number in range(2)]
            free = 0.0  # the last stage
            for number in range(2):
                rows.append((0, "forward-compute", sent[number] - FORWARD_S * first, FORWARD_S * first, number))
                come = max(sent[number], free) + SENT_S
                rows.append((0, "forward-send", sent[number], come - sent[number], number))
                rows.append((1, "forward-recv", free, come - free, number))
                rows.append((1, "forward-compute", come, FORWARD_S * last, number))
                free = come + FORWARD_S * last
            back = sent[1]  # the first stage is free
            for number in range(2):
                rows.append((1, "backward-compute", free, BACKWARD_S * last, number))
                free += BACKWARD_S * last
                come = max(free, back) + SENT_S
                rows.append((1, "backward-send", free, come - free, number))
                rows.append((0, "backward-recv", back, come - back, number))
                rows.append((0, "backward-compute", come, BACKWARD_S * first, number))
                back = come + BACKWARD_S * first
            ends[0].append(back)
            ends[1].append(free)
            found += [
                Operation((dp, stage), step, kind, start, took, number, 0, stage)
                for stage, kind, start, took, number in rows
            ]
        for stage in range(2):
            until = max(ends[stage]) + SUM_S
            for dp in range(2):
                start = ends[stage][dp]
                found.append(Operation((dp, stage), step, "grads-reduce-scatter", start, until - start, 0, 0, -1))
    return found


def test_a_job_without_slow_workers_loses_nothing() -> None:
    found = what_if(trace())
    assert found.slowdown == pytest.approx(1.0)
    assert found.step_s == pytest.approx(10.0)  # 1 + .25 + 1 + 1 (or the message) + 2 + .25 + 2 + 2 + .5
    assert (found.steps, found.left_out) == (3, {})


def test_the_slow_worker_is_named_and_what_it_costs() -> None:
    found = what_if(trace(slow={(1, 0): 2.0}))
    assert found.worst_workers[0][0] == (1, 0)
    # Passes of 1.25 and 2.5 s are usual: 16 s instead of 12.25. Without the slow one, 11.5.
    assert (found.step_s, found.ideal_s) == pytest.approx((16.0, 12.25))
    assert found.m_w == pytest.approx((16.0 - 11.5) / (16.0 - 12.25))
    assert found.by_copy[1] == pytest.approx(found.slowdown, rel=0.05)
    assert found.by_copy[0] <= 1.0, "usual times are means, so the others are faster than that"
    assert found.by_operation["backward-compute"] > found.by_operation["forward-pp-comm"]


def test_waiting_is_no_slowness() -> None:
    """The slow one's partner waits in its sum and for its messages, and is not blamed."""
    found = what_if(trace(slow={(1, 1): 3.0}))
    assert found.worst_workers[0][0] == (1, 1)
    costs = dict(found.worst_workers)
    assert costs[1, 1] > 1.3
    assert max(costs[0, 0], costs[1, 0], costs[0, 1]) < 1.1
    assert found.by_operation["grads-reduce-scatter"] == pytest.approx(1.0, abs=0.01)


def test_the_last_stage_may_be_too_long() -> None:
    found = what_if(trace(slow={(0, 1): 2.0, (1, 1): 2.0}))
    assert found.m_s > 0.9 > found.m_w


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published traces are not here")
@pytest.mark.parametrize(
    ("name", "slowdown", "m_w", "m_s", "worst"),
    [
        pytest.param("AR", 1.9730, 1.0017, -0.0012, {"dp_rank": 0, "stage": 0}, marks=pytest.mark.slow),
        ("ST", 1.1787, 0.0314, 1.2194, {"dp_rank": 1, "stage": 3}),
    ],
)
def test_published_results(
    name: str, slowdown: float, m_w: float, m_s: float, worst: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow", reason="pip install 'byteps-py[trace]'")
    assert main(["trace", "what-if", str(PUBLISHED / f"trace-{name}.parquet"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["slowdown"], found["m_w"], found["m_s"]) == pytest.approx((slowdown, m_w, m_s), abs=1e-3)
    assert worst.items() <= found["worst_workers"][0].items()
    published = json.loads((PUBLISHED / f"result-{name}.json").read_text())
    for ours, theirs in (("by_operation", "optype"), ("by_stage", "stage"), ("by_dp_rank", "dp_rank")):
        assert found[ours] == pytest.approx(published[f"blocking_decompose_by_{theirs}"], abs=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published traces are not here")
def test_the_page_has_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow", reason="pip install 'byteps-py[trace]'")
    page = Page(ROOT / "docs" / "howto" / "find-the-slow-rank.md")
    [(line, shown)] = commands_of(page.blocks_after("price of slow workers")[0])
    _, *words, path = line.split()
    assert path == "trace.parquet"
    assert main([*words, str(PUBLISHED / "trace-AR.parquet")]) == 0
    assert capsys.readouterr().out == shown


# ---- traces that are damaged ---------------------------------------------------------------------------------


def write(path: Path, operations: Sequence[Operation]) -> Path:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        rows.writerows((*each.worker, *each[1:]) for each in operations)
    return path


def test_a_file_is_read_as_it_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "trace.csv", trace(slow={(1, 0): 2.0}))
    assert read_trace(path) == trace(slow={(1, 0): 2.0})
    assert main(["trace", "what-if", str(path)]) == 0
    assert "dp 1, stage 0" in capsys.readouterr().out


def _lose_a_worker(rows: list[Operation]) -> list[Operation]:
    return [each for each in rows if not (each.step == 1 and each.worker == (0, 1))]


def _set_a_clock(rows: list[Operation]) -> list[Operation]:
    return [each._replace(duration_s=-1.0) if each.step == 1 else each for each in rows]


def _lose_a_message(rows: list[Operation]) -> list[Operation]:
    return [each._replace(number=7) if each[1:3] == (1, "forward-send") and each.number else each for each in rows]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_lose_a_worker, "the operations of worker (0, 1) are missing"),
        (lambda rows: rows[:-3], "it has 33 operations, others 36: the trace is cut off"),
        (lambda rows: [*rows, rows[-1]], "an operation is there twice"),
        (_set_a_clock, "ends before it begins"),
        (_lose_a_message, "messages have one end only"),
    ],
    ids=["a worker is missing", "cut off", "started again", "a clock was set", "a message is lost"],
)
def test_steps_that_are_damaged_are_left_out_by_name(damage: object, reason: str) -> None:
    assert callable(damage)
    found = what_if(damage(trace(slow={(1, 0): 2.0})))
    assert found.steps == 2
    ((step, why),) = found.left_out.items()
    assert step in (1, 2)
    assert reason in why
    assert found.slowdown == pytest.approx(what_if(trace(slow={(1, 0): 2.0})).slowdown)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read: No such file"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="lacks the columns dp_rank, stage"):
        read_trace(tmp_path / "other.csv")
    bad = write(tmp_path / "bad.csv", trace(1))
    bad.write_text(bad.read_text().replace("forward-send,1.0", "forward-send,soon", 1))
    with pytest.raises(UsageError, match="a row that is none"):
        read_trace(bad)
    with pytest.raises(UsageError, match="no whole step"):
        what_if([])
    with pytest.raises(UsageError, match=r"no whole step: step 0: .*twice"):
        what_if([*trace(1), trace(1)[0]])
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UsageError, match=r"pyarrow|cut off"):
        read_trace(tmp_path / "cut.parquet")
