"""`bps plan size`, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from byteps_py.cli.__main__ import main

LLAMA = ["plan", "size", "--gpus", "16384", "--batch-tokens", "16M", "--model", "llama3-405b"]


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize(("sequence", "sizes"), [("8192", [8, 1, 16, 128]), ("128K", [8, 16, 16, 8])])
def test_json(capsys: pytest.CaptureFixture[str], sequence: str, sizes: list[int]) -> None:
    found = json.loads(output(capsys, *LLAMA, "--sequence", sequence, "--json"))
    assert list(found) == ["tp", "cp", "pp", "dp", "reasons"]
    assert [found[name] for name in ("tp", "cp", "pp", "dp")] == sizes
    assert len(found["reasons"]) == 6
    assert all(isinstance(reason, str) for reason in found["reasons"])


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, *LLAMA, "--sequence", "8K")
    lines = text.splitlines()
    assert lines[:2] == ["tp 8, cp 1, pp 16, dp 128", ""]
    assert max(map(len, lines)) <= 100
    reasons = json.loads(output(capsys, *LLAMA, "--sequence", "8K", "--json"))["reasons"]
    assert " ".join(text.partition("\n\n")[2].split()) == " ".join(f"- {reason}" for reason in reasons)


def test_options_change_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*LLAMA, "--sequence", "8K", "--memory-gb", "160", "--gpus-per-machine", "16", "--json"]
    found = json.loads(output(capsys, *arguments))
    assert (found["tp"], found["pp"] < 16) == (8, True)
    assert "16 GPUs" not in found["reasons"][0]


def test_a_model_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    shape = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 256, "vocabulary": 100}
    path.write_text(json.dumps(shape))
    arguments = ["plan", "size", "--gpus", "1", "--batch-tokens", "1K", "--sequence", "128", "--model", str(path)]
    assert output(capsys, *arguments).startswith("tp 1, cp 1, pp 1, dp 1\n")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (["--model", "llama4"], "unknown model 'llama4': known models are llama3-8b"),
        (["--sequence", "131K"], "no whole number of sequences of 134144"),
        (["--gpus", "16380"], "16380 GPUs are no multiple of the 8 of a machine"),
        (["--gpus", "64"], "nothing fits on 64 GPUs of 80.0 GB"),
        (["--batch-tokens", "lots"], "--batch-tokens: 'lots' is no whole number"),
        (["--memory-gb", "nan"], "--memory-gb=nan"),
        (["--gpus-per-machine", "0"], "gpus_per_machine=0"),
    ],
    ids=str,
)
def test_errors(capsys: pytest.CaptureFixture[str], changed: list[str], text: str) -> None:
    assert main([*LLAMA, "--sequence", "8K", *changed]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("bps: ")
    assert text in captured.err


def test_a_plan_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan"])
    assert caught.value.code == 2
    assert "PLAN" in capsys.readouterr().err


def test_it_needs_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None\nfrom byteps_py.cli.__main__ import main\nsys.exit(main())"
    command = [sys.executable, "-c", program, *LLAMA, "--sequence", "131072"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("tp 8, cp 16, pp 16, dp 8\n")
