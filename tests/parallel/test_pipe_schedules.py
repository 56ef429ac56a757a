"""The pipeline schedules: the papers' figures and formulas, against the simulator."""

from __future__ import annotations

import itertools
import json
from typing import Any, NamedTuple

import pytest
from support import paper_formulas as formulas

from byteps_py.cli.__main__ import main as bps
from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.program import ActionKind, Program, WeightRule
from byteps_py.parallel.pipe.schedules import (
    More,
    WarmUp,
    chimera,
    dapple,
    gems,
    gpipe,
    interleaved,
    make,
    pipedream,
    pipedream_2bw,
)
from byteps_py.parallel.pipe.simulator import Durations, SyncMode, reductions, simulate

SLOTS = Durations(forward=1, backward=1)

# ---- the table of the papers' figures --------------------------------------------------------------------------


class Row(NamedTuple):
    """None: the papers give no figure."""

    name: str
    p: int
    m: int
    makespan: float | None
    in_flight: list[int] | None = None
    idle: float | None = None  # of each worker
    bubble: float | None = None
    warmup: list[int] | None = None
    versions: list[int] | None = None
    options: dict[str, Any] = {}  # noqa: RUF012  nobody changes it
    durations: Durations = Durations()

    def __str__(self) -> str:
        options = "".join(f" {name}={value}" for name, value in self.options.items())
        times = "" if self.durations == Durations() else f" {self.durations.backward:g} {self.durations.p2p:g}"
        return f"{self.name} {self.p} {self.m}{options}{times}"


def chunks(consecutive: int, count: int = 2) -> dict[str, int]:
    return {"chunks": count, "consecutive": consecutive}


HALF, ONE = Durations(p2p=0.5), Durations(p2p=1)
A, B = {"warmup": "A"}, {"warmup": "B"}

# fmt: off
TABLE = [
    #    name         p   m  makespan, in flight      idle  bubble     warm-up         versions
    Row("gpipe",      4,  4,  21, [4, 4, 4, 4],          9,  3 / 7,    [4, 4, 4, 4],   [1, 1, 1, 1]),
    Row("dapple",     4,  4,  21, [4, 3, 2, 1],          9,  3 / 7,    [4, 3, 2, 1],   [1, 1, 1, 1]),
    Row("chimera",    4,  4,  16, [3, 4, 4, 3],          4,  1 / 4,    [3, 4, 4, 3],   [1, 1, 1, 1]),
    Row("chimera",    4,  4,  10, [3, 4, 4, 3],          2,  1 / 5,    durations=SLOTS),
    Row("chimera",    8,  8,  36, [5, 6, 7, 8, 8, 7, 6, 5], 12, 1 / 3),
    Row("dapple",     4,  8,  33, [4, 3, 2, 1],          9,  3 / 11,   [4, 3, 2, 1]),
    Row("chimera",    4,  8,  30, [3, 4, 4, 3],          6,  1 / 5,    options={"more": "direct"}),
    Row("chimera",    4,  8,  28, [7, 8, 8, 7],          4,  1 / 7,    options={"more": "doubling"}),
    Row("chimera",    4,  8,  26, [4, 4, 4, 4],          2,  1 / 13,   options={"more": "halving"}),
    Row("chimera",    4,  8,  24, [4, 4, 4, 4],          0,  0,        options={"pipes": 4}),  # the ideal
    Row("chimera",    4, 12,  44, [3, 4, 4, 3],          8,  2 / 11),
    Row("dapple",     4,  8,  41, [4, 3, 2, 1],  options=A, durations=HALF),
    Row("dapple",     4,  8,  36, [7, 5, 3, 1],  options=B, durations=HALF, warmup=[7, 5, 3, 1]),
    Row("dapple",     4,  8,  49, [4, 3, 2, 1],  options=A, durations=ONE),
    Row("dapple",     4,  8,  39, [7, 5, 3, 1],  options=B, durations=ONE),
    Row("gems",       4,  2,  21, [1, 1, 1, 1],         15,  5 / 7,    [1, 1, 1, 1],   [1, 1, 1, 1]),
    Row("gems",       4,  4,  39, [1, 1, 1, 1],         27,  9 / 13),
    Row("interleaved", 4, 8,  57, [11, 9, 7, 5],         9,  3 / 16,   [10, 8, 6, 4],  options=chunks(4)),
    Row("interleaved", 4, 8,  57, [15, 13, 11, 9],       9,  3 / 16,   [14, 12, 10, 8], options=chunks(8)),
    Row("interleaved", 4, 8,  62, [13, 11, 9, 7],       14,  14 / 48,  [12, 10, 8, 6], options=chunks(6)),
    Row("interleaved", 4, 9,  74, [11, 9, 7, 5],        20,  20 / 54,  options=chunks(4)),
    Row("interleaved", 4, 8,  64, options=chunks(4), durations=HALF),
    Row("interleaved", 4, 8,  60, options=chunks(8), durations=HALF),
    Row("interleaved", 4, 6,  45, [12] * 4,              9,  1 / 4,    [12] * 4,       options=chunks(3)),
    Row("interleaved", 4, 3,  30, [6] * 4,              12,  2 / 3,    [6] * 4),
    Row("interleaved", 16, 32, None, bubble=15 / 256, options=chunks(16, 8)),  # Llama 3: 5.86 %
    Row("interleaved", 16, 16, None, bubble=15 / 128, options=chunks(16, 8)),  # 11.7 %
    Row("pipedream",  4,  8,  33, [4, 3, 2, 1],  versions=[4, 3, 2, 1], warmup=[4, 3, 2, 1]),
    Row("pipedream-2bw", 4, 8, 33, [4, 3, 2, 1], versions=[2, 2, 2, 2], warmup=[4, 3, 2, 1]),
]
# fmt: on


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_figures_are_those_of_the_papers(row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    times = {name: getattr(row.durations, name) for name in ("forward", "backward", "p2p")}
    options = {"p": row.p, "m": row.m, **row.options, **times}
    arguments = [f"-{name}{value}" if len(name) == 1 else f"--{name}={value}" for name, value in options.items()]
    assert bps(["schedule", row.name, *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = {
        "makespan": row.makespan,
        "peak_in_flight": row.in_flight,
        "idle": None if row.idle is None else [row.idle] * row.p,
        "bubble_ratio": None if row.bubble is None else pytest.approx(row.bubble),
        "warmup": row.warmup,
        "weight_versions": row.versions,
    }
    for figure, value in expected.items():
        assert value is None or found[figure] == value, figure


# ---- formulas --------------------------------------------------------------------------------------------------

MOST = 32


def workers(step: int) -> list[Any]:
    """2, 2 + ``step`` and so on; those above 16, whose schedules take longest, are slow."""
    return [pytest.param(p, marks=[pytest.mark.slow] * (p > 16)) for p in range(2, MOST + 1, step)]


WORKERS = workers(1)
EVEN = workers(2)


def bubble(program: Program, durations: Durations | None = None) -> float:
    return simulate(program, durations).bubble_ratio


@pytest.mark.parametrize("p", WORKERS)
def test_bubbles_of_gpipe_and_dapple(p: int) -> None:
    for m in {1, 2, p - 1, p, 2 * p + 1}:
        expected = pytest.approx(formulas.gpipe_bubble_ratio(p, m))
        assert bubble(gpipe(p, m)) == expected
        assert bubble(make("dapple", p, m, warmup="A")) == expected
        assert bubble(make("dapple", p, m, warmup="B")) == expected


@pytest.mark.parametrize("p", WORKERS)
def test_activations_of_gpipe_and_dapple(p: int) -> None:
    for m in (1, p - 1, p, 2 * p):
        assert gpipe(p, m).peak_in_flight() == [m] * p
        assert dapple(p, m).peak_in_flight() == [min(p - worker, m) for worker in range(p)]
        more = [min(2 * (p - worker) - 1, m) for worker in range(p)]
        assert make("dapple", p, m, warmup="B").peak_in_flight() == more


@pytest.mark.parametrize("p", WORKERS)
def test_gems_has_one_micro_batch_at_a_time(p: int) -> None:
    """A pair of micro-batches takes 4 p + 2, of which a worker computes 6: a bubble of (p - 1) / (p + 1/2)."""
    for m in (2, 4):
        timeline = simulate(gems(p, m))
        assert timeline.makespan == (4 * p + 2) * m / 2 + p - 1
        assert timeline.program.peak_in_flight() == [1] * p
    assert 1 - 6 / (4 * p + 2) == pytest.approx((p - 1) / (p + 0.5))


def pipes_of(p: int) -> list[int]:
    return [2 * f for f in range(1, p // 2 + 1) if p // 2 % f == 0]


@pytest.mark.parametrize("p", EVEN)
def test_a_unit_of_chimera(p: int) -> None:
    for pipes in pipes_of(p):
        program = chimera(p, p, pipes)
        assert bubble(program, SLOTS) == pytest.approx(formulas.chimera_bubble_ratio(p, p, pipes))
        peaks = program.peak_in_flight()
        assert (min(peaks), max(peaks)) == (p - p // pipes + 1, p)
        assert peaks == peaks[::-1]
        assert [len(program.stages_of(worker)) for worker in range(p)] == [pipes] * p


@pytest.mark.parametrize("p", EVEN)
def test_units_of_chimera_follow_the_critical_path(p: int) -> None:
    for units in (1, 3):
        for forward, backward in ((1, 1), (1, 1.5), (1, 2)):
            time = formulas.chimera_time(p, units, forward, backward, p2p=0)
            assert simulate(chimera(p, units * p), Durations(forward, backward)).makespan == time


@pytest.mark.parametrize("p", EVEN)
def test_the_critical_path_bounds_the_time_with_transfers(p: int) -> None:
    """Some of its actions follow each other on one worker, without a transfer."""
    most = formulas.chimera_time(p, 2, 1, 2, p2p=0.25)
    without = formulas.chimera_time(p, 2, 1, 2, p2p=0)
    assert without < simulate(chimera(p, 2 * p), Durations(p2p=0.25)).makespan <= most


@pytest.mark.parametrize("p", EVEN)
def test_chimera_without_bubbles_between_units(p: int) -> None:
    for units in (2, 4):
        m = units * p
        for more, slot in ((More.DOUBLING, 2), (More.HALVING, 1)):
            timeline = simulate(chimera(p, m, more=more))
            assert timeline.makespan == formulas.chimera_doubled_time(p, m, slot)
            assert timeline.idle == [(p - 2) * slot] * p


@pytest.mark.parametrize("p", workers(3))
def test_interleaved_is_ideal_where_llama_3_says_so(p: int) -> None:
    """Elsewhere the last round is too short; spread over the others, it would be ideal, too."""
    v = 2 if p > 8 else 3
    for k, last in ((p, 0), (p, 1), (p, p - 1), (p + 2, 0), (p + 2, p - 1), (p + 2, p), (p + 2, p + 1)):
        m = 2 * k + last
        ideal = bubble(interleaved(p, m, v, k)) == pytest.approx(formulas.interleaved_bubble_ratio(p, m, v))
        is_spread = 0 < last < 2 * (p - 1) - k and (v, last) != (2, 1)
        assert ideal == (formulas.is_ideal(p, m, k) or is_spread), (k, m)


def test_interleaved_goes_through_any_number_of_micro_batches(caplog: pytest.LogCaptureFixture) -> None:
    for p in range(1, 6):
        for v in (1, 2, 3):
            for m in range(1, 2 * p + 4):
                for k in range(1, m + 1):
                    assert simulate(interleaved(p, m, v, k)).makespan >= 3 * m * v


def test_a_last_round_that_would_deadlock_is_spread() -> None:
    """9 micro-batches in rounds of 4, with three chunks: 5 and 4, not 4, 4 and 1."""
    program = interleaved(4, 9, 3, 4)
    assert bubble(program) == pytest.approx(formulas.interleaved_bubble_ratio(4, 9, 3))
    first = [action.parts[0] for action in program.workers[0] if action.kind is ActionKind.FORWARD][:15]
    assert first == [0, 1, 2, 3, 4] * 3


@pytest.mark.parametrize("p", range(2, 33, 2))
def test_more_consecutive_micro_batches_cost_activations(p: int) -> None:
    least = interleaved(p, 2 * p, 2, p).peak_in_flight()
    most = interleaved(p, 2 * p, 2, 2 * p).peak_in_flight()
    assert [more - fewer for more, fewer in zip(most, least, strict=True)] == [p] * p


@pytest.mark.parametrize("p", WORKERS)
def test_fewer_consecutive_micro_batches_than_workers(p: int, caplog: pytest.LogCaptureFixture) -> None:
    for m in {1, p - 1, p, p + 1}:
        for v in (1, 2, 3) if p < 9 else (2,):
            caplog.clear()
            k = min(p - 1, m)
            assert simulate(interleaved(p, m, v, k)).makespan == formulas.all_forward_all_backward_time(p, m, v)
            (record,) = caplog.records
            assert record.getMessage() == (
                f"interleaved schedule: {k} consecutive micro-batches are fewer than {p} workers, so all forward "
                "passes come before all backward passes"
            )


def test_formulas_without_a_simulation() -> None:
    assert formulas.chimera_critical_path(6, 1) == (6, 10)
    assert formulas.rabenseifner_time(8, 1e6, 5, 1e-3) == 1780
    assert formulas.ring_time(8, 1e6, 5, 1e-3) == 1820
    assert formulas.chimera_time(4, 1, 1, 2, 0, exposed_all_reduce=3) == 19
    assert round(100 * formulas.interleaved_bubble_ratio(16, 32, 8), 2) == 5.86
    assert round(100 * formulas.interleaved_bubble_ratio(16, 16, 8), 1) == 11.7
    # ZeRO-1; ZeRO-2, one forward and one backward in turn; ZeRO-2, all forward passes first
    counts = [
        formulas.reduce_scatters(10, 2, 4, stage, alternates)
        for stage, alternates in ((1, True), (2, True), (2, False))
    ]
    assert counts == [2, 6, 2]


# ---- stale weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", WORKERS)
def test_weight_versions_of_stale_schedules(p: int) -> None:
    for m in (1, p, 2 * p):
        stashed, buffered = pipedream(p, m), pipedream_2bw(p, m)
        assert list(stashed.weight_versions) == stashed.peak_in_flight() == [min(p - worker, m) for worker in range(p)]
        assert buffered.weight_versions == (2,) * p
        assert (stashed.rule, buffered.rule) == (WeightRule.STASHED, WeightRule.DOUBLE_BUFFERED)
        assert stashed.workers == buffered.workers == dapple(p, m).workers


@pytest.mark.parametrize("name", ["gpipe", "dapple", "interleaved", "chimera", "gems"])
def test_synchronous_schedules_have_one_version(name: str) -> None:
    program = make(name, 4, 4)
    assert program.rule is WeightRule.SYNCHRONOUS
    assert program.weight_versions == (1, 1, 1, 1)


# ---- where stages are ------------------------------------------------------------------------------------------


def test_pipes_of_chimera_go_in_both_directions() -> None:
    down, shifted, up, up_shifted = chimera(8, 8, pipes=4).holders
    assert down == (0, 1, 2, 3, 4, 5, 6, 7)
    assert shifted == (4, 5, 6, 7, 0, 1, 2, 3)
    assert (up, up_shifted) == (down[::-1], shifted[::-1])


def test_chunks_of_the_interleaved_schedule_go_round() -> None:
    assert interleaved(3, 3, chunks=2).holders == ((0, 1, 2, 0, 1, 2),)
    assert interleaved(3, 3, chunks=2).stages_of(1) == [(0, 1), (0, 4)]


def test_a_worker_alone_computes_without_a_pause() -> None:
    for program in (gpipe(1, 3), dapple(1, 3), interleaved(1, 3), gems(1, 3), pipedream(1, 3), pipedream_2bw(1, 3)):
        assert bubble(program) == 0


# ---- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "p", "m", "options", "message"),
    [
        ("chimera", 5, 4, {}, "an even number of workers, not 5"),
        ("chimera", 4, 3, {}, "a multiple of 2 micro-batches, not 3"),
        ("chimera", 8, 8, {"pipes": 6}, "8 workers can't have 6 pipes: their number is 2f, and f divides 4"),
        ("chimera", 8, 8, {"pipes": 3}, "8 workers can't have 3 pipes"),
        ("chimera", 4, 6, {"more": "doubling"}, r"2 pipes \(doubling\) needs a multiple of 4 micro-batches, not 6"),
        (
            "chimera",
            4,
            4,
            {"more": "sideways"},
            "'sideways' is not possible; it is one of 'direct', 'doubling', 'halving'",
        ),
        ("dapple", 4, 4, {"warmup": "C"}, "'C' is not possible; it is one of 'A', 'B'"),
        ("gpipe", 0, 4, {}, "workers: 0 is not possible; at least 1"),
        ("gpipe", 4, -1, {}, "micro-batches: -1 is not possible; at least 1"),
        ("interleaved", 4, 4, {"chunks": 0}, "chunks: 0 is not possible"),
        ("interleaved", 4, 4, {"consecutive": 5}, "5 consecutive micro-batches are not possible: a step has 4"),
        ("gpipe", 4, 4, {"pipes": 2}, "the schedule gpipe has no option pipes; its options: none"),
        ("chimera", 4, 4, {"chunks": 2}, "the schedule chimera has no option chunks; its options: pipes, more"),
        ("waterfall", 4, 4, {}, "there is no schedule 'waterfall'; there are gpipe, dapple .also called 1f1b."),
        ("waterfall", 4, 4, {}, "and in a Pipeline torch's zero-bubble, zb-v, dualpipev"),
        ("zb-v", 4, 4, {}, "zb-v is one of torch's schedules.*Pipeline takes it, and `bps schedule` does not draw it"),
    ],
)
def test_schedules_that_do_not_exist(name: str, p: int, m: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(name, p, m, **options)


def test_1f1b_is_dapple() -> None:
    assert make("1f1b", 4, 8, warmup="B") == make("1F1B", 4, 8, warmup="B") == dapple(4, 8, WarmUp.B)


# ---- when gradients are summed ---------------------------------------------------------------------------------

#: Of Chimera with p = m = 4: after which action of which worker the stages (pipe, stage) may be reduced.
CHIMERA_4 = {
    SyncMode.AT_END: [
        [(7, (0, 0)), (7, (1, 3))],
        [(7, (0, 1)), (7, (1, 2))],
        [(7, (0, 2)), (7, (1, 1))],
        [(7, (0, 3)), (7, (1, 0))],
    ],
    SyncMode.EAGER: [
        [(5, (1, 3)), (7, (0, 0))],
        [(6, (1, 2)), (7, (0, 1))],
        [(6, (0, 2)), (7, (1, 1))],
        [(5, (0, 3)), (7, (1, 0))],
    ],
    SyncMode.EAGER_OPT: [  # workers 1 and 2 compute without a pause to the end
        [(5, (1, 3)), (7, (0, 0))],
        [(7, (0, 1)), (7, (1, 2))],
        [(7, (0, 2)), (7, (1, 1))],
        [(5, (0, 3)), (7, (1, 0))],
    ],
}


@pytest.mark.parametrize("durations", [None, SLOTS], ids=["1 and 2", "equal slots"])
@pytest.mark.parametrize("mode", SyncMode)
def test_reductions_of_chimera(mode: SyncMode, durations: Durations | None) -> None:
    assert reductions(chimera(4, 4), durations, mode) == CHIMERA_4[mode]


REDUCED = [
    gpipe(4, 4),
    dapple(4, 8),
    interleaved(4, 8),
    interleaved(3, 2, chunks=3),
    gems(4, 1),
    gems(4, 3),
    chimera(6, 12),
    chimera(8, 8, pipes=4),
    chimera(8, 16, pipes=8, more=More.DOUBLING),
    chimera(4, 8, more=More.HALVING),
]


@pytest.mark.parametrize("mode", SyncMode)
@pytest.mark.parametrize("program", REDUCED, ids=lambda program: f"{program.name} {len(program.workers)}")
def test_each_stage_is_reduced_once_and_after_its_gradients(program: Program, mode: SyncMode) -> None:
    spans = simulate(program).spans
    for worker, found in enumerate(reductions(program, None, mode)):
        actions = program.workers[worker]
        assert sorted(stage for _, stage in found) == sorted(program.stages_of(worker))
        assert found == sorted(found)
        for position, stage in found:
            last = max((at for at, action in enumerate(actions) if (action.pipe, action.stage) == stage), default=None)
            if position < len(actions) - 1:
                assert mode is not SyncMode.AT_END
                assert position == last
            if mode is SyncMode.EAGER and last is not None:
                assert position == last
            if mode is SyncMode.EAGER_OPT and last is not None:
                after = spans[worker][last:]
                is_idle = any(left.end < right.start for left, right in itertools.pairwise(after))
                assert position == (last if is_idle else len(actions) - 1)
