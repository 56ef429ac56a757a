"""`bps plan calibrate` and `predict`: steps of which the formulas and the fit are known, vTrain's measured ones, and
tables with holes."""

from __future__ import annotations

import csv
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from byteps_py.cli.__main__ import main
from byteps_py.errors import UsageError
from byteps_py.tools.plan.calibration import (
    ONE_MACHINE,
    SEVERAL_MACHINES,
    calibrate,
    choose_rows,
    fit_constants,
    prediction_error,
    read_model,
    write_model,
)
from byteps_py.tools.plan.step_table import COLUMNS, MEASURED, StepLayout, StepLayouts, StepRow, read_steps
from byteps_py.tools.plan.step_time import Hardware, constants, step_ms, step_parts

HARDWARE = Hardware()
VTRAIN = [folder / "shared" / "data" / "vtrain" for folder in Path(__file__).parents]
EXPECTED = np.log([one.expected for one in constants(HARDWARE)])


def layout(tp: int = 2, dp: int = 2, pp: int = 2, **changed: int) -> StepLayout:
    sizes = {"batch": 16, "micro_batch": 2, "hidden": 1024, "heads": 16, "layers": 24, "sequence": 1024, **changed}
    return StepLayout(tp * dp * pp, tp=tp, dp=dp, pp=pp, **sizes)


def grid(machines: int = 1) -> list[StepLayout]:
    return [
        layout(tp, dp * machines, pp, hidden=hidden, layers=layers, micro_batch=micro_batch, batch=32 * machines)
        for tp, dp, pp in [(1, 2, 1), (2, 1, 1), (2, 2, 2), (1, 4, 2), (4, 2, 1), (1, 2, 4)]
        for hidden, layers, micro_batch in itertools.product((1024, 2048), (12, 24), (1, 2, 4))
    ]


def measured(layouts: list[StepLayout], logarithms: np.ndarray) -> list[StepRow]:
    times = step_ms(logarithms, HARDWARE, StepLayouts.of(layouts))
    return [StepRow(line, each, float(time)) for line, (each, time) in enumerate(zip(layouts, times, strict=True), 2)]


def other_hardware(seed: int) -> np.ndarray:
    """Constants that are off by as much as is to be expected."""
    spread = np.array([one.spread for one in constants(HARDWARE)])
    return EXPECTED + np.clip(np.random.default_rng(seed).normal(size=len(spread)), -2, 2) * spread


def error(rows: list[StepRow], count: int) -> float:
    """Over the rows that are not seen."""
    model = calibrate(rows, count, HARDWARE)
    lines = {line for fit in model.fits.values() for line in fit.lines}
    left = [row for row in rows if row.line not in lines]
    return prediction_error(
        model.predict([row.layout for row in left if row.layout]), [row.measured_ms or 0.0 for row in left]
    ).mean


@pytest.mark.parametrize("seed", range(4))
def test_steps_of_unknown_constants_are_predicted(seed: int) -> None:
    assert error(measured(grid(), other_hardware(seed)), 30) < 0.02


def test_both_kinds_of_jobs_in_one_table() -> None:
    rows = measured(grid() + grid(machines=4), other_hardware(7))
    rows = [StepRow(line, row.layout, row.measured_ms) for line, row in enumerate(rows, 2)]
    model = calibrate(rows, 60, HARDWARE)
    assert set(model.fits) == {ONE_MACHINE, SEVERAL_MACHINES}
    assert sum(len(fit.lines) for fit in model.fits.values()) == 60
    assert error(rows, 60) < 0.03


def test_what_the_formulas_do_not_know_is_learned_near_rows_and_forgotten_far_away() -> None:
    layouts = grid()
    slow = [math.sin(math.log2(each.hidden * each.micro_batch)) / 8 for each in layouts]
    rows = [
        StepRow(row.line, row.layout, (row.measured_ms or 0) * math.exp(more))
        for row, more in zip(measured(layouts, EXPECTED), slow, strict=True)
    ]
    assert error(rows, 40) < 0.02
    far = layout(8, 1, 1, hidden=65536, heads=512, layers=12)
    fit = calibrate(rows, 40, HARDWARE).fits[ONE_MACHINE]
    computed = float(step_ms(fit.logarithms, HARDWARE, StepLayouts.of([far]))[0])
    assert calibrate(rows, 40, HARDWARE).predict([far])[0] == pytest.approx(computed, rel=0.01)


def test_a_bad_row_does_not_spoil_the_others() -> None:
    rows = measured(grid(), EXPECTED)
    rows[5] = StepRow(rows[5].line, rows[5].layout, 20 * (rows[5].measured_ms or 0))
    fit = calibrate(rows, len(rows), HARDWARE).fits[ONE_MACHINE]
    good = rows[:5] + rows[6:]
    times = step_ms(fit.logarithms, HARDWARE, StepLayouts.of([row.layout for row in good if row.layout]))
    assert prediction_error(times.tolist(), [row.measured_ms or 0 for row in good]).mean < 0.03


def test_rows_are_chosen_by_shapes_alone_spread_out_and_always_the_same() -> None:
    layouts = grid() * 2
    chosen = choose_rows(layouts, 20)
    assert len(set(chosen)) == 20
    assert chosen == choose_rows(layouts, 20)
    assert chosen[:10] == choose_rows(layouts, 10)  # more rows: the same ones first
    picked = [layouts[place] for place in chosen]
    for attribute in ("tp", "pp", "hidden", "layers", "micro_batch"):
        values = {getattr(each, attribute) for each in layouts}
        assert {getattr(each, attribute) for each in picked} == values
    assert len(set(picked)) == 20  # none twice, though each is there twice
    assert sorted(choose_rows(layouts, 10_000)) == list(range(len(layouts)))


def test_parts_add_up_and_belong_to_their_cause() -> None:
    jobs = StepLayouts.of([layout(1, 1, 1), layout(4, 1, 1), layout(1, 4, 1), layout(1, 1, 4, batch=8)])
    parts = step_parts(EXPECTED, HARDWARE, jobs)
    assert sum(parts.values()) == pytest.approx(step_ms(EXPECTED, HARDWARE, jobs))
    assert [list(parts[name] > 0) for name in ("tensor parallelism", "pipeline bubble", "pipeline hops")] == [
        [False, True, False, False],
        [False, False, False, True],
        [False, False, False, True],
    ]
    assert list(parts["gradients"] > 0) == [False, False, True, True]  # a pipeline's ends share the embedding


def test_chunks_shorten_the_bubble_and_recomputation_costs_a_third() -> None:
    plain, chunked = layout(1, 1, 4, hidden=8192, heads=64), layout(1, 1, 4, hidden=8192, heads=64, chunks=3)
    full = replace(plain, recomputed="full")
    parts = step_parts(EXPECTED, HARDWARE, StepLayouts.of([plain, chunked, full]))
    assert parts["pipeline bubble"][1] == pytest.approx(parts["pipeline bubble"][0] / 3)
    assert 1.25 < parts["computing"][2] / parts["computing"][0] < 4 / 3


# ---- files ---------------------------------------------------------------------------------------------------------


def write_table(path: Path, rows: list[StepRow], with_times: bool = True) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*COLUMNS, MEASURED][: None if with_times else -1])
        for row in rows:
            cells = [getattr(row.layout, attribute) for attribute in COLUMNS.values()]
            writer.writerow([*cells, row.measured_ms] if with_times else cells)


def test_a_model_is_the_same_after_it_was_written(tmp_path: Path) -> None:
    rows = measured(grid(), other_hardware(1))
    model = calibrate(rows, 20, HARDWARE)
    path = tmp_path / "model.json"
    write_model(str(path), model)
    layouts = [row.layout for row in rows if row.layout]
    assert read_model(str(path)).predict(layouts) == pytest.approx(model.predict(layouts), rel=1e-9)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured(grid(), other_hardware(2))
    table, blind, model = tmp_path / "steps.csv", tmp_path / "blind.csv", tmp_path / "model.json"
    write_table(table, rows)
    write_table(blind, rows, with_times=False)
    assert main(["plan", "calibrate", str(table), "--rows", "30", "--out", str(model)]) == 0
    said = capsys.readouterr().out
    assert "fitted to 30 rows of jobs on one machine" in said
    assert "predictions of the 42 other rows are off by" in said
    assert main(["plan", "predict", str(model), str(table), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [entry["measured_ms"] for entry in found] == [row.measured_ms for row in rows]
    assert all(entry["predicted_ms"] == pytest.approx(entry["measured_ms"], rel=0.1) for entry in found)
    assert main(["plan", "predict", str(model), str(blind), "--json"]) == 0
    times = [entry["predicted_ms"] for entry in json.loads(capsys.readouterr().out)]
    assert times == [entry["predicted_ms"] for entry in found]
    assert main(["plan", "predict", str(model), str(table)]) == 0
    assert "over 72 measured rows" in capsys.readouterr().out


def test_rows_with_holes_are_named_and_the_others_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured(grid(), EXPECTED)
    table, model = tmp_path / "steps.csv", tmp_path / "model.json"
    write_table(table, rows)
    lines = table.read_text().splitlines()
    holes = {
        3: (3, "", "no value for 'hidden size'"),
        4: (2, "many", "'micro batch' is 'many': a whole number"),
        5: (0, "5", "tp 1 · dp 2 · pp 1 is not 5"),
        6: (1, "33", "a batch of 33 is no whole number of micro-batches"),
        7: (10, "-1", "'iteration time (ms)' is '-1'"),
    }
    for line, (place, cell, _) in holes.items():
        cells = lines[line - 1].split(",")
        cells[place] = cell
        lines[line - 1] = ",".join(cells)
    lines[7] = lines[7].rpartition(",")[0] + ","  # not measured
    table.write_text("\n".join(lines))
    assert main(["plan", "calibrate", str(table), "--out", str(model)]) == 0
    assert "5 rows left out" in capsys.readouterr().out
    assert main(["plan", "predict", str(model), str(table), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == len(rows)
    for line, (_, _, problem) in holes.items():
        entry = found[line - 2]
        assert (entry["predicted_ms"] is None) is (line < 6)  # 6: of a batch near it; 7: of what was not measured well
        assert entry["problem"].startswith(f"line {line}: ")
        assert problem in entry["problem"]
    assert found[6]["measured_ms"] is None
    assert found[6]["predicted_ms"] == pytest.approx(rows[6].measured_ms, rel=0.05)
    assert "problem" not in found[6]


def test_a_kind_of_job_that_was_not_measured_is_a_guess_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, model, far = tmp_path / "steps.csv", tmp_path / "model.json", tmp_path / "far.csv"
    write_table(table, measured(grid(), EXPECTED))
    write_table(far, measured(grid(machines=4), EXPECTED))
    main(["plan", "calibrate", str(table), "--out", str(model)])
    capsys.readouterr()
    assert main(["plan", "predict", str(model), str(far), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    several = [entry for entry, each in zip(found, grid(machines=4), strict=True) if each.gpus > 8]
    assert all("no row of a job on several machines was measured" in entry["problem"] for entry in several)
    assert all(entry["predicted_ms"] == pytest.approx(entry["measured_ms"], rel=0.05) for entry in several)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lacks the columns '# GPUs', "),
        ("a,b\n1,2\n", "lacks the columns '# GPUs', "),
        (",".join(COLUMNS) + "\n", "has a header and no rows"),
        (",".join([*COLUMNS, "# GPUs"]) + "\n1\n", "has the column '# GPUs' twice"),
        (",".join(COLUMNS) + "\n" + ",".join("1" * 10) + "\n", "no row has a measured time"),
        (",".join([*COLUMNS, MEASURED]) + "\n1,,,\n", "line 2: no value for 'global batch'"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        calibrate(read_steps(str(path)), 100, HARDWARE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is no model of step times"),
        ('{"format": "byteps_py step times 1"}', "is a damaged model"),
        ('{"format": "byteps_py step times 1", "hardware": {}, "fits": {}}', "is a damaged model"),
    ],
)
def test_models_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_model(str(path))


def test_a_damaged_number_of_a_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    write_model(str(path), calibrate(measured(grid(), EXPECTED), 5, HARDWARE))
    found = json.loads(path.read_text())
    found["fits"][ONE_MACHINE]["residual"]["weights"][0] = math.nan
    path.write_text(json.dumps(found))
    with pytest.raises(UsageError, match="is a damaged model of step times"):
        read_model(str(path))


def test_wrong_options(tmp_path: Path) -> None:
    table = tmp_path / "steps.csv"
    write_table(table, measured(grid(), EXPECTED))
    out = str(tmp_path / "model.json")
    assert main(["plan", "calibrate", str(table), "--rows", "0", "--out", out]) == 2
    assert main(["plan", "calibrate", str(table), "--peak-tflops", "nan", "--out", out]) == 2
    assert main(["plan", "calibrate", str(table), "--out", str(tmp_path)]) == 2
    assert main(["plan", "calibrate", str(tmp_path / "none.csv"), "--out", out]) == 2


# ---- public truth --------------------------------------------------------------------------------------------------


@pytest.fixture
def vtrain() -> Path:
    for folder in VTRAIN:
        if folder.is_dir():
            return folder
    pytest.skip("put single_node.csv and multi_node.csv of VIA-Research/vTrain into ../shared/data/vtrain")


@pytest.mark.slow
def test_vtrains_rows_on_one_machine(vtrain: Path) -> None:
    assert error(read_steps(str(vtrain / "single_node.csv")), 100) < 0.015


@pytest.mark.parametrize("hidden", [6144, 8192, 12288])
def test_a_model_on_several_machines_from_two_others(vtrain: Path, hidden: int) -> None:
    rows = read_steps(str(vtrain / "multi_node.csv"))
    left_out = [row for row in rows if row.layout and row.layout.hidden == hidden]
    model = calibrate([row for row in rows if row not in left_out], 100, HARDWARE)
    times = model.predict([row.layout for row in left_out if row.layout])
    assert prediction_error(times, [row.measured_ms or 0 for row in left_out]).mean < 0.1


#: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, table 5: GPUs and batch,
#: micro-batch, hidden size, heads, layers, workers, chunks; seconds of a step with recomputation of whole layers, and
#: with that of scores and sequence parallelism. tp 8, sequences of 2,048 tokens, no data parallelism.
NVIDIA = [
    ((8, 4, 4, 6144, 64, 48, 1, 1), 1.42, 1.10),
    ((64, 64, 1, 12288, 96, 96, 8, 3), 18.13, 13.75),
    ((280, 280, 1, 20480, 128, 105, 35, 3), 49.05, 37.83),
    ((512, 512, 1, 25600, 160, 128, 64, 1), 94.42, 71.49),
]


def nvidia_rows() -> list[tuple[StepLayout, float]]:
    """Those with recomputation of whole layers first."""
    rows = []
    for is_full in (True, False):
        for (gpus, batch, micro_batch, hidden, heads, layers, pp, chunks), full_s, selective_s in NVIDIA:
            sizes = StepLayout(gpus, batch, micro_batch, hidden, heads, layers, 2048, tp=8, dp=1, pp=pp, chunks=chunks)
            mode = replace(sizes, recomputed="full" if is_full else "selective", sequence_parallel=not is_full)
            rows.append((mode, 1e3 * (full_s if is_full else selective_s)))
    return rows


def nvidia_error(seen: list[int], predicted: list[int]) -> float:
    """By the constants alone, from the rows ``seen``: what remains of them is not learned."""
    rows = nvidia_rows()

    def jobs(places: list[int]) -> StepLayouts:
        return StepLayouts.of([rows[place][0] for place in places])

    found = fit_constants(jobs(seen), np.log([rows[place][1] for place in seen]), HARDWARE)
    times = step_ms(found, HARDWARE, jobs(predicted)).tolist()
    return prediction_error(times, [rows[place][1] for place in predicted]).mean


def test_one_set_of_constants_suits_all_eight_steps_of_nvidia() -> None:
    assert nvidia_error(list(range(8)), list(range(8))) < 0.015


def test_each_step_of_nvidia_from_the_seven_others() -> None:
    errors = [nvidia_error([other for other in range(8) if other != place], [place]) for place in range(8)]
    assert sum(errors) / 8 < 0.02  # Calculon: 3.65 %, by constants that its authors chose


def test_steps_with_little_recomputation_from_those_with_all_of_it() -> None:
    assert nvidia_error([0, 1, 2, 3], [4, 5, 6, 7]) < 0.025
