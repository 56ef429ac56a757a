"""Every block of code of the tutorial and of the how-to pages is run, or says why not (support/documents.py says how).
This file runs what no test of its own does."""

from __future__ import annotations

import functools
import re
import shlex
import sys
from pathlib import Path

import pytest
from support.breaking import command
from support.clusters import ROOT
from support.documents import Block, Page, commands_of, shell, with_the_pages_port

PATHS = sorted(path for kind in ("tutorial", "howto") for path in (ROOT / "docs" / kind).rglob("*.md"))
PAGES = {path.relative_to(ROOT / "docs").as_posix(): Page(path) for path in PATHS}
PROGRAMS = [
    pytest.param(
        *program, id=f"{name}-{number}", marks=[] if name == "howto/tensor-parallelism.md" else pytest.mark.slow
    )
    for name, page in PAGES.items()
    for number, program in enumerate(page.programs)
    if program[0].startswith("bpslaunch")
]


def mark_of(commands: str) -> list[pytest.MarkDecorator]:
    if "bps plan size" in commands:
        return []
    return [pytest.mark.long if "-np 8" in commands else pytest.mark.slow]


COMMANDS = [
    pytest.param(name, block, id=f"{name}:{block.line}", marks=mark_of(block.code))
    for name, page in PAGES.items()
    for block in page.blocks
    if block.marker == "run"
]
#: More need a reason to be added here: what can't be run can't be known to be right.
MOST_NOT_RUN = 6
TIMEOUT_S = 100
END = """
print("all right")
import torch.distributed
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


@functools.cache
def text_of_tests() -> str:
    return "".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))


def is_run(block: Block, name: str) -> bool:
    kind, _, rest = block.marker.partition(":")
    if kind == "not run":
        return rest.count(" ") >= 4  # a reason
    if kind == "test":
        return f'"{rest.strip()}"' in text_of_tests()
    if kind == "run":
        return block.language == "console"
    if kind or block.language == "text":
        return not kind
    is_by_test = block.how.startswith("tests/") and Path(name).name in (ROOT / block.how).read_text()
    return block.language == "python" and (is_by_test or block.how.startswith("bpslaunch -np "))


@pytest.mark.parametrize("name", PAGES)
def test_every_block_is_run_or_says_why_not(name: str) -> None:
    page = PAGES[name]
    assert [f"{name}:{block.line}" for block in page.blocks if not is_run(block, name)] == []
    code = re.compile(r"^(?:\$ |import |from \w+ import)", re.MULTILINE)
    assert [block.line for block in page.blocks if block.language == "text" and code.search(block.code)] == []
    outside = re.sub(r"```.*?```|<!--.*?-->", "", page.text, flags=re.DOTALL)
    assert not re.search(r"^(?:    |\t)(?:\$ |import |\w+ = )", outside, re.MULTILINE), "code without a fence"


def test_few_blocks_are_not_run() -> None:
    blocks = [block for page in PAGES.values() for block in page.blocks if block.language != "text"]
    not_run = [block for block in blocks if block.marker.startswith("not run")]
    assert len(not_run) <= MOST_NOT_RUN
    assert len(blocks) > 2 * len(not_run)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("how", "code"), PROGRAMS)
def test_the_python_blocks_of_a_page_run(how: str, code: str, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{code}{END}")
    _, *options = shlex.split(how)
    with command(sys.executable, "-m", "byteps_py.launch", *options, sys.executable, str(script)) as job:
        assert job.end() == 0, job.text
    sizes = dict(zip(options[::2], options[1::2], strict=True))
    assert job.text.count("all right") == int(sizes["-np"]) * int(sizes.get("--machines", "1")), job.text


@pytest.mark.timeout(700)
@pytest.mark.parametrize(("name", "block"), COMMANDS)
def test_the_commands_of_a_block_print_what_the_page_says(name: str, block: Block) -> None:
    for line, expected in commands_of(block.code):
        with shell(line, ROOT, OMP_NUM_THREADS="1") as process:
            output, _ = process.communicate(timeout=300 if "-np 8" in line else TIMEOUT_S)
        assert process.returncode == 0, output
        assert not expected or with_the_pages_port(output) == expected, line
