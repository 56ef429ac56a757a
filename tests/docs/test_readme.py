"""The README and docs/howto/launching.md, followed word for word: their program, their commands, their output."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from support.clusters import ROOT
from support.documents import Page, commands_of, shell, with_the_pages_port
from support.open_mpi import OPEN_MPI_ANYWHERE, require_open_mpi

from byteps_py.cli.__main__ import main as bps

README = Page(ROOT / "README.md")
LAUNCHING = Page(ROOT / "docs" / "howto" / "launching.md")
TIMEOUT_S = 90


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(README.blocks_after("file train.py")[0])
    return tmp_path


@pytest.mark.slow
def test_its_commands_print_what_it_says(folder: Path) -> None:
    for command, expected in commands_of(README.blocks_after("run")[0]):
        with shell(command, folder) as process:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, with_the_pages_port(output)) == (0, expected), command


@pytest.mark.slow  # in `make test` with another program: test_launch_cluster.py
def test_four_shells_by_hand(folder: Path) -> None:
    roles = [commands_of(block) for block in LAUNCHING.blocks_after("together")]
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


@pytest.mark.slow  # in `make test` with another program: test_launchers_process.py
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_the_launchers_it_names_print_what_it_says(folder: Path, launcher: str) -> None:
    [(command, expected)] = [
        step for step in commands_of(LAUNCHING.blocks_after("launchers")[0]) if step[0].startswith(launcher)
    ]
    if launcher == "mpirun":
        require_open_mpi()
    else:  # torch may lie in another folder than this interpreter
        command = command.replace("torchrun", "python -m torch.distributed.run")
    with shell(command, folder, **OPEN_MPI_ANYWHERE) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, output) == (0, expected)


def test_it_is_short() -> None:
    assert README.text.count("\n") <= 130


def test_the_page_of_variables_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert bps(["env", "--markdown"]) == 0
    page = (ROOT / "docs" / "reference" / "variables.md").read_text()
    assert page.endswith(capsys.readouterr().out), "run: bps env --markdown"
