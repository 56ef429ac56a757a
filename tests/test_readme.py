"""The README, followed word for word: its program, its commands, their output."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.clusters import ROOT, clean_environment
from support.open_mpi import OPEN_MPI_ANYWHERE, require_open_mpi

from byteps_py.cli.__main__ import main as bps

README = (ROOT / "README.md").read_text()
TIMEOUT_S = 90


def blocks_after(marker: str) -> list[str]:
    """The fenced blocks that follow ``<!-- test: marker -->``, up to the next prose."""
    _, _, rest = README.partition(f"<!-- test: {marker} -->\n")
    assert rest, f"README.md has no marker {marker!r}"
    found = []
    while match := re.match(r"\s*```\w+\n(.*?)```\n", rest, re.DOTALL):
        found.append(match[1])
        rest = rest[match.end() :]
    assert found
    return found


def commands_of(block: str) -> list[tuple[str, str]]:
    """(command, the output the README shows for it)"""
    steps: list[tuple[str, str]] = []
    for line in block.splitlines(keepends=True):
        if line.startswith("$ "):
            steps.append((line[2:], ""))
        else:
            steps[-1] = (steps[-1][0], steps[-1][1] + line)
    return steps


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(blocks_after("file train.py")[0])
    return tmp_path


@contextmanager
def shell(script: str, folder: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = clean_environment(PATH=path, **variables)
    del environment["BYTEPS_TAG_OUTPUT"]  # as it comes
    process = subprocess.Popen(
        ["bash", "-e", "-c", script],
        cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def test_its_commands_print_what_it_says(folder: Path) -> None:
    for command, expected in commands_of(blocks_after("run")[0]):
        with shell(command, folder) as process:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, output) == (0, expected), command


def test_four_shells_by_hand(folder: Path) -> None:
    roles = [commands_of(block) for block in blocks_after("together")]
    assert len(roles) == 4
    scripts = ["".join(command for command, _ in steps) for steps in roles]
    report = folder / "report.json"
    with contextlib.ExitStack() as stack:
        shells = [stack.enter_context(shell(script, folder, BYTEPS_REPORT=str(report))) for script in scripts]
        for process, steps in zip(reversed(shells), reversed(roles), strict=True):  # all end when the workers have left
            output, _ = process.communicate(timeout=TIMEOUT_S)
            assert (process.returncode, output) == (0, "".join(shown for _, shown in steps))
    (server,) = [member for member in json.loads(report.read_text())["members"] if member["machine"] == "CPU"]
    assert server["bytes_summed"] > 0


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_the_launchers_it_names_print_what_it_says(folder: Path, launcher: str) -> None:
    [(command, expected)] = [step for step in commands_of(blocks_after("launchers")[0]) if step[0].startswith(launcher)]
    if launcher == "mpirun":
        require_open_mpi()
    else:  # torch may lie in another folder than this interpreter
        command = command.replace("torchrun", "python -m torch.distributed.run")
    with shell(command, folder, **OPEN_MPI_ANYWHERE) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, output) == (0, expected)


def test_every_page_it_names_exists() -> None:
    for page in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / page).exists(), page


def test_the_page_of_variables_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert bps(["env", "--markdown"]) == 0
    assert (ROOT / "docs" / "variables.md").read_text().endswith(capsys.readouterr().out), "run: bps env --markdown"
