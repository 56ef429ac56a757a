"""Slow ranks: the specification's example, injected causes over random meshes, and quiet windows."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from support.simulated_spans import CAUSES, Cause, Training, random_training, simulate, step_s

from byteps_py.errors import UsageError
from byteps_py.tools.slow_rank import COMPUTES, LATE, LINK, LINK_IN, PAUSES, find_slow_ranks, sentences, top_down
from byteps_py.tools.spans import SpanGroup, Spans, dimension_of, select

MESH = (4, 4, 2, 4)
#: Of the first stage (21 is not: others than the first wait for data of the first).
RANK = 35


def context_then_tensor(own_s: dict[int, float], usual_s: float = 8.0) -> Spans:
    """cp 2, tp 4: each rank computes, then has a collective of 1 with its context group, then with its tensor group."""
    came = {rank: own_s.get(rank, usual_s) for rank in range(8)}
    groups = [SpanGroup(f"cp{i}", "cp", (i, i + 4)) for i in range(4)]
    groups += [SpanGroup("tp0", "tp", (0, 1, 2, 3)), SpanGroup("tp1", "tp", (4, 5, 6, 7))]
    rows = []
    for number, group in enumerate(groups):
        until = max(came[rank] for rank in group.ranks) + 1
        for rank in group.ranks:
            rows.append((0, number, rank, 0, 0, 1, came[rank], came[rank], until))
            came[rank] = until
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    return Spans(groups, ["all_reduce"], *columns)


def test_only_the_search_from_the_outermost_dimension_finds_the_slow_rank() -> None:
    """The example of the specification."""
    spans = context_then_tensor({6: 10.0})
    assert [(turn.dimension, turn.rank, turn.spread_s) for turn in top_down(spans)] == [("cp", 6, 2), ("tp", 6, 2)]
    inner = np.array([group.dimension == "tp" for group in spans.groups])[spans.group]
    took = (spans.ended_s - spans.started_s)[inner]
    blamed = {int(rank) for rank, s in zip(spans.rank[inner], took, strict=True) if s == took.min()}
    assert blamed == {2, 6}


def test_without_own_times_the_search_alone_names_the_rank() -> None:
    found = find_slow_ranks(replace(context_then_tensor({6: 10.0}), has_own_times=False))
    assert [(each.rank, each.reason) for each in found.slow] == [(6, LATE)]
    assert not find_slow_ranks(replace(context_then_tensor({}), has_own_times=False)).slow


@pytest.mark.parametrize("reason", CAUSES)
def test_each_cause_is_named_with_its_price(reason: str) -> None:
    training = Training(MESH, seed=3, causes=(Cause(reason, RANK, factor=4.0, share=0.6),))
    spans = simulate(training)
    found = find_slow_ranks(spans)
    assert [(each.rank, each.host, each.reason) for each in found.slow] == [(RANK, "host8", reason)]
    price = 1 - step_s(simulate(replace(training, causes=()))) / step_s(spans)
    assert found.slow[0].price == pytest.approx(price, abs=0.03)
    assert found.step_s == pytest.approx(step_s(spans), rel=0.03)
    text = "\n".join(sentences(found))
    assert f"rank {RANK} on host8" in text
    assert f"{found.slow[0].price:.0%} of the step" in text


def test_two_slow_ranks_are_both_named() -> None:
    causes = (Cause(COMPUTES, 40, factor=2.0), Cause(LINK, 48, factor=10.0))
    found = find_slow_ranks(simulate(Training(MESH, causes=causes)))
    assert {(each.rank, each.reason) for each in found.slow} == {(40, COMPUTES), (48, LINK)}


def test_data_that_differ_name_nobody() -> None:
    found = find_slow_ranks(simulate(Training(MESH, steps=20, uneven=0.4)))
    assert not found.slow
    assert found.uneven > 0.2
    assert "belong to no rank" in "\n".join(sentences(found))


def test_one_group_does_not_tell_whose_link_is_slow() -> None:
    found = find_slow_ranks(simulate(Training((8, 1, 1, 2), causes=(Cause(LINK, 5, factor=10.0),))))
    assert not found.slow
    assert any("can't be told from these groups" in note for note in found.notes)


def wrong(seed: int, count: int, reasons: tuple[str | None, ...], uneven: float) -> list[str]:
    """Trainings whose cause was not named, or wrongly."""
    random = np.random.default_rng(seed)
    failed = []
    for number in range(count):
        reason = reasons[number % len(reasons)]
        training, _ = random_training(random, reason, uneven)
        named = [(each.rank, each.reason) for each in find_slow_ranks(simulate(training)).slow]
        if named != [(cause.rank, cause.reason) for cause in training.causes]:
            failed.append(f"{training}: {named}")
    return failed


def test_causes_of_random_trainings_are_named() -> None:
    assert not wrong(1, len(CAUSES), CAUSES, 0.15)


def test_quiet_trainings_name_nobody() -> None:
    assert not wrong(2, 6, (None,), 0.5)


@pytest.mark.long
def test_99_of_100_causes_are_named() -> None:
    failed = wrong(3, 200, CAUSES, 0.15)
    assert len(failed) <= 2, "\n".join(failed)


@pytest.mark.slow
def test_16384_ranks_take_seconds() -> None:
    cause = Cause(COMPUTES, 4321, factor=2.0)
    spans = simulate(Training((32, 8, 8, 8), steps=6, causes=(cause,)))
    before_s = time.process_time()
    found = find_slow_ranks(spans)
    assert time.process_time() - before_s < 60  # 3 s; a quadratic search takes hours
    assert [(each.rank, each.reason) for each in found.slow] == [(4321, COMPUTES)]


# ---- what is wrong with a trace ------------------------------------------------------------------------------


def slow(spans: Spans) -> tuple[list[tuple[int, str]], str]:
    found = find_slow_ranks(spans)
    return [(each.rank, each.reason) for each in found.slow], "; ".join(found.notes)


@pytest.fixture(scope="module")
def spans() -> Spans:
    return simulate(Training(MESH, causes=(Cause(COMPUTES, RANK, factor=2.0),)))


def test_missing_ranks_are_named_and_the_rest_is_compared(spans: Spans) -> None:
    named, notes = slow(select(spans, ~np.isin(spans.rank, (7, 90))))
    assert named == [(RANK, COMPUTES)]
    assert "ranks 7, 90: no spans" in notes


def test_operations_that_did_not_end_are_left_out(spans: Spans) -> None:
    ended_s = spans.ended_s.copy()
    ended_s[np.flatnonzero(spans.rank == 9)[-1]] = np.nan
    named, notes = slow(replace(spans, ended_s=ended_s))
    assert named == [(RANK, COMPUTES)]
    assert "1 operation of rank 9 left out" in notes


def test_a_clock_that_was_set_is_no_long_step(spans: Spans) -> None:
    """An hour forward: one gap, or one operation, of an hour."""
    later = (spans.rank == 12) & (spans.step >= 5)
    jumped = replace(spans, **{name: getattr(spans, name) + 3600 * later for name in ("started_s", "ended_s")})
    assert slow(jumped)[0] == [(RANK, COMPUTES)]


def test_a_clock_that_was_set_back_is_said(spans: Spans) -> None:
    later = (spans.rank == 12) & (spans.step >= 5)
    back = replace(spans, **{name: getattr(spans, name) - 40 * later for name in ("started_s", "ended_s")})
    named, notes = slow(back)
    assert named == [(RANK, COMPUTES)]
    assert "rank 12" in notes
    assert "clock was set" in notes


def test_after_a_restart_numbers_begin_anew(spans: Spans) -> None:
    """All ranks were started again after the fourth step."""
    again = spans.step >= 4
    first = {key: int(spans.sequence[again & (spans.group == key)].min()) for key in range(len(spans.groups))}
    sequence = spans.sequence - again * np.array([first[int(key)] for key in spans.group])
    named, notes = slow(replace(spans, sequence=sequence))
    assert named == [(RANK, COMPUTES)]
    assert "begin anew" in notes


def test_nothing_to_compare_is_an_error(spans: Spans) -> None:
    with pytest.raises(UsageError, match="no communication"):
        find_slow_ranks(select(spans, spans.rank < 0))
    with pytest.raises(UsageError, match="more ranks"):
        find_slow_ranks(select(spans, spans.rank == 0))


def test_one_step_is_compared_by_waits(spans: Spans) -> None:
    _, notes = slow(select(spans, spans.step == 3))
    assert "one step only" in notes


def test_pauses_are_told_from_slow_computing() -> None:
    training = Training((4, 2, 2, 2), steps=16, causes=(Cause(PAUSES, 9, share=0.6, often=0.4),))
    assert slow(simulate(training))[0] == [(9, PAUSES)]


def test_direction_of_a_link() -> None:
    training = Training((4, 4, 1, 2), causes=(Cause(LINK_IN, 12, factor=6.0),))
    assert slow(simulate(training))[0] == [(12, LINK_IN)]


@pytest.mark.parametrize(
    ("description", "dimension"),
    [("mesh_dp", "dp"), ("mesh_dp_shard", "dp"), ("TENSOR_MODEL_PARALLEL_GROUP", "tp"), ("PIPELINE_PARALLEL", "pp"),
     ("CONTEXT_PARALLEL_GROUP", "cp"), ("default_pg", ""), ("undefined", "")],
)  # fmt: skip
def test_dimensions_by_the_names_of_groups(description: str, dimension: str) -> None:
    assert dimension_of(description) == dimension
