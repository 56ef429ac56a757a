"""The tutorial, followed word for word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.clusters import ROOT
from support.documents import Page, commands_of, shell

PAGE = Page(ROOT / "docs" / "tutorial.md")
TIMEOUT_S = 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PAGE.blocks_after("file train.py")[0])
    return tmp_path


def follow(marker: str, folder: Path) -> None:
    """Run the commands of a block; each prints what the page says."""
    for command, expected in commands_of(PAGE.blocks_after(marker)[0]):
        with shell(command, folder) as process:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, output) == (0, expected), command


@pytest.mark.slow  # in `make test`: the README's commands, in test_readme.py
def test_alone_and_on_one_machine(folder: Path) -> None:
    follow("one machine", folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cpu_machine_leaves_and_the_weights_are_the_same(folder: Path) -> None:
    follow("cluster", folder)
    runtime = {"XDG_RUNTIME_DIR": str(folder)}  # jobs of other tests are not found
    [(command, expected)] = commands_of(PAGE.blocks_after("leaving")[0])
    with shell(command, folder, **runtime) as job:
        assert job.stdout is not None
        first = job.stdout.readline()  # it trains
        for other, _ in commands_of(PAGE.blocks_after("second shell")[0]):
            with shell(other, folder, **runtime) as process:
                said, _ = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, said
        output = first + job.communicate(timeout=TIMEOUT_S)[0]
        told = [line for line in output.splitlines(keepends=True) if "leaves: bps scale" in line]
        assert len(told) == 2, output  # one of each GPU machine
        assert (job.returncode, "".join(line for line in output.splitlines(keepends=True) if line not in told)) == (
            0,
            expected,
        )
    follow("comparing", folder)


def test_every_page_it_names_exists() -> None:
    for page in re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", PAGE.text):
        assert (ROOT / "docs" / page).exists(), page
