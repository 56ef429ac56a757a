"""`bps plan layout`, as a user runs it; the arguments that it writes train a model (programs/planned_layouts.py)."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from support.breaking import command
from support.clusters import ROOT

from byteps_py.cli.__main__ import main
from byteps_py.cli.plan_divisions import program_of
from byteps_py.tools.plan.calibration import StepTimeModel
from byteps_py.tools.plan.cluster import Cluster
from byteps_py.tools.plan.layout_cost import JobLayout, PlanJob
from byteps_py.tools.plan.layout_plan import mesh_of, plan_layouts
from byteps_py.tools.plan.sizing_job import ModelShape

PROGRAM = str(ROOT / "tests" / "programs" / "planned_layouts.py")
JOB = ["plan", "layout", "--cluster", "h100", "--machines", "2", "--model", "llama3-8b"]
BATCH = ["--batch-tokens", "1M", "--sequence", "8K"]
#: Four ranks on one machine, and the model of planned_layouts.py.
CORES = Cluster(1, 4, 4, 0.1, 20, 5)
SMALL = PlanJob(ModelShape(4, 32, 4, 2, 48, 64), CORES, 16, 16)


def test_json_and_text_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, *BATCH, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["best", "reasons", "fitting", "does_not_fit", "calibrated"]
    assert len(found["best"]) == 5
    assert found["calibrated"] is False
    best = found["best"][0]
    assert best["memory_gb"]["states"] + best["memory_gb"]["activations"] <= 80
    assert main([*JOB, *BATCH, "--count", "1"]) == 0
    text = capsys.readouterr().out
    assert f"{best['step_ms'] / 1e3:.3f} s" in text
    assert max(map(len, text.splitlines())) <= 100 + 20  # a layout is one line
    said = " ".join(text.split())
    assert all(f"- {reason}" in said for reason in found["reasons"])


def test_a_calibrated_model_changes_the_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, model = tmp_path / "steps.csv", tmp_path / "model.json"
    table.write_text(
        "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,"
        "data parallelism,pipeline parallelism,iteration time (ms)\n16,32,1,4096,32,32,8192,2,2,4,30000\n"
    )
    assert main(["plan", "calibrate", str(table), "--peak-tflops", "989", "--out", str(model)]) == 0
    capsys.readouterr()
    found = []
    for more in ([], ["--calibrated", str(model)]):
        assert main([*JOB, *BATCH, "--json", *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [one["calibrated"] for one in found] == [False, True]
    assert found[1]["best"][0]["step_ms"] > 1.1 * found[0]["best"][0]["step_ms"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "b200", *JOB[4:], *BATCH], "unknown machine 'b200'"),
        ([*JOB[2:], "--batch-tokens", "1000", "--sequence", "8K"], "is no whole number of sequences"),
        ([*JOB[2:], *BATCH, "--machines", "0"], "--machines=0"),
        ([*JOB[2:], *BATCH, "--count", "0"], "--count=0"),
        ([*JOB[2:], *BATCH, "--shadow", "2"], "shadow=2: other machines of this cluster can keep up to 1 copies"),
        ([*JOB[2:], *BATCH, "--emit", "/nowhere/plan.py"], "--emit=/nowhere/plan.py: No such file"),
        ([*JOB[2:], *BATCH, "--model", "llama3-405b"], "the model does not fit"),
        ([*JOB[2:], *BATCH, "--calibrated", "none.json"], "none.json can't be read"),
    ],
)
def test_wrong_input(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["plan", "layout", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_what_is_written_is_the_first_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "planned.py"
    assert main([*JOB, *BATCH, "--json", "--emit", str(path)]) == 0
    best = json.loads(capsys.readouterr().out)["best"][0]
    emitted = runpy.run_path(str(path))
    assert emitted["MESH"] == best["mesh"]
    assert emitted["OPTIONS"] == best["options"]


def test_shadows_are_emitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "planned.py"
    assert main([*JOB, *BATCH, "--shadow", "--count", "1", "--emit", str(path)]) == 0
    options = runpy.run_path(str(path))["OPTIONS"]
    assert (options["data"], options["shadow"]) == ("ddp", True)
    assert ", shadow" in capsys.readouterr().out.splitlines()[1]


def test_a_layout_with_late_weights_has_the_arguments_of_a_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "planned.py"
    path.write_text(program_of(JobLayout(1, 1, 4, 2, 1, 8, schedule="pipedream-2bw")))
    assert runpy.run_path(str(path))["OPTIONS"] == {"schedule": "pipedream-2bw", "micro_batches": 8}
    assert "pipe = Pipeline(model, mesh=mesh, **OPTIONS)" in path.read_text()
    assert "ParallelOptions" not in path.read_text()


def layouts_to_run() -> list[JobLayout]:
    """The fastest one of each combination of options, and the fastest one of each mesh."""
    found: dict[object, JobLayout] = {}
    for each in plan_layouts(SMALL, StepTimeModel(CORES.hardware, {})).fitting:
        layout = each.layout
        found.setdefault((layout.schedule, layout.data, layout.recompute, layout.hosted), layout)
        found.setdefault(tuple(mesh_of(layout).values()), layout)
    return list(dict.fromkeys(found.values()))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_planned_layouts_train_as_one_process_does(tmp_path: Path) -> None:
    layouts = layouts_to_run()[::3]
    files = [tmp_path / f"{number}.py" for number, _ in enumerate(layouts)]
    for file, layout in zip(files, layouts, strict=True):
        file.write_text(program_of(layout))
    words = [sys.executable, "-m", "byteps_py.launch", "-np", "4", sys.executable, PROGRAM, *map(str, files)]
    with command(*words, OMP_NUM_THREADS="1") as job:
        assert job.end() == 0, job.text
    assert job.text.count(": right") == 4 * len(files), job.text
