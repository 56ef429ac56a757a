"""Commands of how-to pages that need a job of their own, or say something else on each machine: they run, and what they
print has the page's form."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest
from support.breaking import command, environ_of, launch
from support.clusters import ROOT
from support.documents import Page, at_own_places, commands_of, shell, with_the_pages_port

from byteps_py.launch.process_plan import free_port

OPERATING = Page(ROOT / "docs" / "howto" / "operating.md")
LAUNCHING = Page(ROOT / "docs" / "howto" / "launching.md")
SLOW_RANK = Page(ROOT / "docs" / "howto" / "find-the-slow-rank.md")
README = Page(ROOT / "README.md")
TIMEOUT_S = 90
PRINTS = """
import sys
import byteps_py as bps

bps.init()
if bps.rank() == 0:
    print("step 1")
else:
    print("careful", file=sys.stderr)
bps.shutdown()
"""


def run(script: str, folder: Path, **variables: str) -> str:
    with shell(script, folder, **variables) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    return output


def form(text: str) -> list[str]:
    """Its lines, but for figures and widths."""
    text = text.replace(f" on {socket.gethostname()} ", " on HOST ").replace(" on vm ", " on HOST ")
    return [re.sub(r"[\d.,]*\d", "0", " ".join(line.split())) for line in text.splitlines()]


def test_launching_has_the_commands_of_the_readme() -> None:
    def commands(page: Page, marker: str) -> list[str]:
        return [line for line, _ in commands_of(page.blocks_after(marker)[0])]

    assert commands(LAUNCHING, "as in the README") == commands(README, "run")


@pytest.mark.slow
def test_logs_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PRINTS)
    for line, shown in commands_of(OPERATING.blocks_after("logs")[0]):
        printed = with_the_pages_port(run(at_own_places(line, {"/shared/logs/run7": "logs"}), tmp_path))
        assert sorted(printed.splitlines()) == sorted(shown.splitlines()), line  # ranks print at the same time


def test_doctor_looks_at_what_the_page_shows(tmp_path: Path) -> None:
    [(line, shown)] = commands_of(OPERATING.blocks_after("doctor")[0])
    with shell(line, tmp_path) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    subjects = [re.findall(r"^(?:ok|warn|fail) +(\w+) ", text, re.MULTILINE) for text in (shown, output)]
    assert len(subjects[0]) == 4
    assert [subject for subject in subjects[1] if subject in subjects[0]] == subjects[0], output


@pytest.mark.slow
def test_top_of_a_job_that_trains(tmp_path: Path) -> None:
    [(line, shown)] = commands_of(OPERATING.blocks_after("top")[0])
    with launch("-np 1 --machines 2 --servers 1", "told") as job:
        job.until("0: training", "1: training")
        own = environ_of(job.pid("told", DMLC_WORKER_ID="0"))
        names = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "BYTEPS_JOB_ID", "BYTEPS_LOCAL_SECRET")
        printed = run(line, tmp_path, **{name: own[name] for name in names})
        assert job.end() == 0
    found = form(printed)
    heads = [each for each in form(shown) if each.startswith(("running", "epoch", "waits", "link ", "server "))]
    assert len(heads) == 5
    assert [each for each in found if each in heads] == heads, printed
    rows = [each.split() for each in form(shown) if each.startswith(("CPU ", "GPU "))]
    assert [each[0] for each in rows] == [each.split()[0] for each in found if each.startswith(("CPU ", "GPU "))]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_bench_of_emulated_machines_and_of_a_cluster(tmp_path: Path) -> None:
    job = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port()), "DMLC_NUM_WORKER": "1"}
    job |= {"DMLC_NUM_SERVER": "0", "BYTEPS_LOCAL_SIZE": "2"}
    emulated, cluster = (line.partition("#")[0].strip() for line, _ in commands_of(OPERATING.blocks_after("bench")[0]))
    printed = run(f"{emulated} --sizes 64K --repeats 1", tmp_path)
    with shell("bpslaunch", tmp_path, DMLC_ROLE="scheduler", **job):
        printed += run(f"{cluster} --sizes 64K --repeats 1", tmp_path, DMLC_ROLE="worker", **job)
    assert len(re.findall(r" 65,536 ", printed)) == 2, printed


@pytest.mark.slow
def test_the_slow_rank_of_traces(tmp_path: Path) -> None:
    [(_, code)] = [program for program in SLOW_RANK.programs if "test_commands.py" in program[0]]
    script = tmp_path / "traced.py"
    script.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{code}")
    with command(sys.executable, "-m", "byteps_py.launch", "-np", "4", sys.executable, str(script)) as job:
        assert job.end() == 0, job.text
    [(line, shown)] = commands_of(SLOW_RANK.blocks_after("slow rank of traces")[0])
    assert form(run(line, tmp_path)) == form(shown)
