"""`bps plan model`, and `bps plan layout --module`, as a user runs them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.clusters import ROOT

from byteps_py.cli.__main__ import main

LLAMA = f"{ROOT}/examples/llama_model.py:llama(LlamaOptions(320, 128, 8, 8, 4, 384), Groups())"
TRACED = ["--module", LLAMA, "--input", "1x64:int64"]


def test_text_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model", *TRACED, "--stages", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["blocks"] == [{"first": 1, "count": 8}]
    assert [stage[1] - stage[0] for stage in found["stages"]] == [5, 5]
    assert main(["plan", "model", *TRACED, "--stages", "2"]) == 0
    text = capsys.readouterr().out
    assert "8 x TransformerBlock, 1 to 8, each" in text
    assert f"{found['parameters']:,}" in text
    said = " ".join(text.split())
    assert all(remark in said for remark in found["remarks"])
    assert "- Stage 1: 5 to 9, 5" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_module_is_planned_as_its_shapes_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = tmp_path / "model.json"
    shape.write_text('{"layers":8,"hidden":128,"heads":8,"kv_heads":4,"ffn":384,"vocabulary":320}')
    found = []
    for model in (TRACED, ["--model", str(shape)]):
        words = ["plan", "layout", "--cluster", "h100", "--batch-tokens", "4K", "--sequence", "64", *model]
        assert main([*words, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0].pop("model") == json.loads(shape.read_text())
    assert found[0] == found[1]


def test_what_is_planned_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "layout", "--cluster", "h100", "--batch-tokens", "4K", "--sequence", "64", *TRACED]
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert '- Planned as {"layers": 8, "hidden": 128, "heads": 8, "kv_heads": 4, "ffn": 384, "vocabulary": 320}' in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model", *TRACED[:2]], "--input is missing: give the sizes"),
        (["model", *TRACED, "--dtype", "int64"], "--dtype=int64: a floating-point type"),
        (["model", *TRACED, "--stages", "11"], "11 stages: this model can be cut into 1 to 10"),
        (["model", *TRACED[:2], "--input", "4x4"], "the forward pass fails in layer '0.token'"),
        (["layout", "--cluster", "h100", "--batch-tokens", "4K", "--sequence", "64"], "--model --module is required"),
        (
            ["layout", "--cluster", "h100", "--batch-tokens", "4K", "--sequence", "64", "--model", "llama3-8b",
             "--input", "4x4"],
            "--input and --dtype say how a --module is traced",
        ),
    ],
)  # fmt: skip
def test_wrong_input(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    try:
        code = main(["plan", *words])
    except SystemExit as error:  # argparse
        code = int(error.code or 0)
    assert code == 2
    assert message in capsys.readouterr().err


def test_modules_of_the_current_folder_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan_model_of_a_test.py").write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Linear(4, 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["plan", "model", "--module", "plan_model_of_a_test:build", "--input", "3x4"]) == 0
    assert "No blocks repeat" in capsys.readouterr().out
